"""`TableTensor`: a packed table as a tensor of PyTorch, for code that takes rows out of a tensor.

It has the shape and dtype of the plain matrix, and holds the table. Rows are decoded, and nothing
else:

- `index_select`, also into `out=`; `x[ids]`, `x[mask]`, `x[3]`, `x[3:9]`, `x[ids, :5]`;
  `torch.nn.functional.embedding`. Rows of a number or a slice would be a view of a plain tensor;
  here they are a copy that cannot be written to.
- `torch.equal` compares block by block.
- `clone`, `detach`, `copy.deepcopy` and `x[:]` share the table, since none can be written to.

Any other operation would decode a matrix that may be larger than memory, so it is refused with the
remedy; `unpack()` decodes all on purpose. The table takes no gradients.
"""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from packhorse.errors import CompatibilityError
from packhorse.gpu.host_memory import MemoryKind
from packhorse.read_only_rows import DecodedRows
from packhorse.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from packhorse.host.table import PackedTable

__all__ = ["TableTensor", "numbers_at"]

_aten = torch.ops.aten
_BLOCK_NBYTES = 16 << 20  # of plain rows that are compared at once
_MAX_ROWS_FOR_COLUMNS = 1 << 16  # that are decoded for the sake of some of their columns


class TableTensor(Tensor):
    """A packed table as a tensor; `PackedTable.as_tensor` makes one.

    Attributes:
        table: the table.

    Example:
        >>> import torch
        >>> from packhorse.host import pack_table
        >>> x = pack_table(torch.eye(1000)).as_tensor()
        >>> x.shape, x.dtype
        (torch.Size([1000, 1000]), torch.float32)
        >>> x[torch.tensor([7, 7, 0])].argmax(1)
        tensor([7, 7, 0])
    """

    table: "PackedTable"

    def __new__(cls, table: "PackedTable", device: torch.device | str = "cpu") -> "TableTensor":
        """Wraps a table; nothing is copied.

        Args:
            table: the table.
            device: where its rows are wanted: "cpu" or a CUDA device.

        Raises:
            CompatibilityError: PyTorch has no such dtype.
            ValueError: it is another kind of device.
        """
        place = torch.device(device)
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"rows of a table go to the CPU or to a CUDA device, not to {place}")
        if table.dtype not in TORCH_DTYPES:
            raise CompatibilityError(
                f"PyTorch {torch.__version__} has no dtype for {table.dtype}; gather rows as NumPy "
                "arrays"
            )
        tensor: TableTensor = Tensor._make_wrapper_subclass(
            cls, table.shape, dtype=TORCH_DTYPES[table.dtype], device=place
        )
        tensor.table = table
        return tensor

    def unpack(self) -> Tensor:
        """The whole plain matrix, in new memory."""
        return self._take(_range(0, len(self)))

    @property
    def packed_nbytes(self) -> int:
        """Bytes that the table takes; `nbytes` is that of the plain matrix."""
        return self.table.nbytes

    def _take(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows by number, on this tensor's device, with as many threads as PyTorch uses."""
        if out is None and ids.device.type == "cpu" and self.device.type != "cpu":
            out = torch.empty((*ids.shape, self.shape[1]), dtype=self.dtype, device=self.device)
        found: Tensor = self.table.gather(ids, out, threads=torch.get_num_threads())
        return found.to(ids.device) if out is None else found

    def _again(self) -> "TableTensor":
        """Another tensor of the same table."""
        return TableTensor(self.table, self.device)

    # PyTorch's own methods would use memory that this tensor has not got.
    def is_shared(self) -> bool:
        """Whether forked processes get the table's memory."""
        return self.table.memory.is_inherited

    def share_memory_(self) -> "TableTensor":
        """Nothing, if forked processes get the memory.

        Raises:
            RuntimeError: they do not.
        """
        if not self.is_shared():
            raise RuntimeError(
                "this table lies in memory that forked processes do not get: pack it with "
                "pack_table(..., shared=True)"
            )
        return self

    def data_ptr(self) -> NoReturn:
        """Refused: there is no plain memory."""
        self._refuse("data_ptr()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: it would decode the table."""
        self._refuse("numpy()")

    def tolist(self) -> NoReturn:
        """Refused: it would decode the table."""
        self._refuse("tolist()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._refuse("an array of NumPy")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("__dlpack__()")

    def requires_grad_(self, requires_grad: bool = True) -> "TableTensor":
        """Refused, unless it is False: the table takes no gradients."""
        if requires_grad:
            raise RuntimeError(
                "a packed table takes no gradients: ask them for the rows that you take out of it, "
                "and write new rows with table.update_(ids, rows)"
            )
        return self

    def _refuse(self, what: str) -> NoReturn:
        rows, columns = self.shape
        raise NotImplementedError(
            f"{what} would need all of a packed table of {rows} x {columns} {self.dtype}, "
            f"{self.nbytes:,} bytes when it is decoded: take rows by number first, x[ids]; "
            "x.unpack() decodes all"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableTensor":
        memo[id(self)] = copied = _share(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TableTensor, (self.table, str(self.device))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableTensor({self.table!r}, device='{self.device}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[0], TableTensor):
            return _index(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], TableTensor):
            raise TypeError(
                "rows of a packed table are not assigned: table.update_(ids, rows) replaces them"
            )
        if func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            return args[0].requires_grad_(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            _refuse_one((args, kwargs or {}), str(func))
        return handler(*args, **(kwargs or {}))


def _refuse_one(values: Any, what: str) -> NoReturn:
    """Refuses for the first packed table among the arguments of an operator."""
    found = next(value for value in tree_leaves(values) if isinstance(value, TableTensor))
    found._refuse(what)


def _index(x: TableTensor, index: Any) -> Tensor:
    """`x[index]`: what stands first names rows, which are decoded, and the rest their columns."""
    if isinstance(index, tuple) and not index:
        return _share(x)
    first, *rest = index if isinstance(index, tuple) else (index,)
    if len(rest) > 1:
        raise IndexError(f"too many indices for a packed table, which has 2 dimensions: {index}")
    if first is None or first is Ellipsis or isinstance(first, bool):
        x._refuse(f"x[{index}]")
    if isinstance(first, slice):
        if first == slice(None) and not rest:
            return _share(x)
        n = len(range(*first.indices(len(x))))
        if rest and n > _MAX_ROWS_FOR_COLUMNS:
            x._refuse(f"columns of {n} rows")
        return x._take(numbers_at(first, len(x)))[:, *rest].as_subclass(DecodedRows)
    if _is_number(first):
        return x._take(numbers_at(first, len(x)))[0, *rest].as_subclass(DecodedRows)
    if any(not isinstance(part, slice) for part in rest):
        x._refuse("rows and columns that are named in pairs")
    found = x._take(numbers_at(first, len(x)))
    return found[..., *rest] if rest else found


def numbers_at(index: Any, n_rows: int) -> Tensor:
    """The numbers of the rows that `x[index]` has.

    Args:
        index: a slice, a number, a mask of rows, or numbers, of which negative ones count from the
            end; not a tuple.
        n_rows: rows of `x`.

    Returns:
        Numbers of the shape of `index`; one-dimensional for slices, masks and a single number.
        They may be out of range if they come from a tensor or a list.

    Raises:
        IndexError: there is no such row, or the mask is none of these rows.
        ValueError: the step of a slice is not positive.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(n_rows)
        if step < 1:
            raise ValueError(f"the step of a slice is {step}; it must be greater than zero")
        return _range(start, max(start, stop), step)
    if _is_number(index):
        row = _row_number(operator.index(index), n_rows)
        return _range(row, row + 1)
    ids = index if isinstance(index, Tensor) else torch.as_tensor(index, device="cpu")
    if ids.dtype in (torch.bool, torch.uint8):
        if ids.shape != (n_rows,) or ids.dtype == torch.uint8:
            raise IndexError(
                f"a mask of rows is a torch.bool vector of {n_rows}, not {ids.dtype} of shape "
                f"{tuple(ids.shape)}"
            )
        return ids.nonzero()[:, 0]
    if not ids.numel():
        return ids.to(torch.int64)  # from the floats that an empty list becomes
    if ids.is_floating_point() or ids.is_complex():
        return ids  # which gathers refuse
    ids = ids.to(torch.int64)  # a narrow one could not hold the number of rows
    return torch.where((ids < 0) & (ids >= -n_rows), ids + n_rows, ids)


def _range(start: int, stop: int, step: int = 1) -> Tensor:
    return torch.arange(start, stop, step, device="cpu")  # whatever the default device is


def _is_number(part: Any) -> bool:
    return hasattr(part, "__index__") and not hasattr(part, "__len__")


def _row_number(number: int, n_rows: int) -> int:
    if not -n_rows <= number < n_rows:
        raise IndexError(f"row {number} of a packed table of {n_rows} rows")
    return number % n_rows


# The operators that work on the table.


def _share(x: TableTensor, *args: Any, **kwargs: Any) -> TableTensor:
    return x._again()


def _move(
    x: TableTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> TableTensor:
    """`to` with `copy=True`, or with another dtype or device."""
    if dtype not in (None, x.dtype):
        x._refuse(f"a copy as {dtype}")
    if device not in (None, x.device):
        raise NotImplementedError(
            "a packed table stays in memory of the host: table.as_tensor('cuda') is one whose rows "
            "come out on a GPU; to move what else is there, name it, as in "
            "data.to(device, 'y', 'edge_index')"
        )
    return _share(x)


def _index_select(x: TableTensor, dim: int, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    _require(x, index)
    if dim not in (0, -2):
        x._refuse("a selection of columns")
    ids = index.reshape(-1)
    if out is None:
        return x._take(ids)
    if not out.numel():
        out.resize_(len(ids), x.shape[1])
    return x._take(ids, out) if out.is_contiguous() else out.copy_(x._take(ids))


def _require(x: Any, ids: Tensor) -> None:
    if not isinstance(x, TableTensor) or isinstance(ids, TableTensor):
        raise TypeError("numbers of rows must be a plain tensor, not a packed table")


def _index_tensor(x: TableTensor, indices: list[Tensor | None]) -> Tensor:
    if len(indices) != 1 or indices[0] is None:
        _refuse_one((x, indices), "rows and columns that are named in pairs")
    _require(x, indices[0])
    return x._take(numbers_at(indices[0], len(x)))


def _embedding(
    x: TableTensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Arguments that only affect gradients are ignored."""
    _require(x, ids)
    return x._take(ids)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    step = max(1, _BLOCK_NBYTES * len(one) // max(one.nbytes, 1))
    return all(
        torch.equal(
            *(_block(each, range(start, min(start + step, len(one)))) for each in (one, other))
        )
        for start in range(0, len(one), step)
    )


def _block(x: Tensor, rows: range) -> Tensor:
    if isinstance(x, TableTensor):
        return x._take(_range(rows.start, rows.stop))
    return x[rows.start : rows.stop]


def _is_pinned(x: TableTensor, device: Any = None) -> bool:
    return x.table.memory.kind is not MemoryKind.PAGEABLE


def _pin(x: TableTensor, device: Any = None) -> NoReturn:
    raise NotImplementedError(
        "a packed table is pinned when it is packed: pack_table(..., device='cuda')"
    )


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _share,
    _aten.clone.default: _share,
    _aten.detach.default: _share,
    _aten.lift_fresh.default: _share,
    _aten._to_copy.default: _move,
    _aten.embedding.default: _embedding,
    _aten.equal.default: _equal,
    _aten.index.Tensor: _index_tensor,
    _aten.index_select.default: _index_select,
    _aten.index_select.out: _index_select,
    _aten.is_pinned.default: _is_pinned,
    _aten._pin_memory.default: _pin,
}
