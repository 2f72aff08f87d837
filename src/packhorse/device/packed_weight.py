"""`PackedWeight`: a matrix of BF16 weights as a tensor that stays packed.

It has the shape, dtype and device of the plain matrix, and holds the five arrays of docs/format.md,
section 12. It can be the weight of a module like any other parameter: it moves, copies, pickles and
compiles as PyTorch's tensors do, and several modules can share it.

- `linear` and `embedding` of `torch.nn.functional` work on the packed arrays.
- Every other operation runs on the decoded matrix; if it writes, the result is packed again.
- Rows, `weight[3]` or `weight[3:9]`, are decoded to a read-only copy; assigning to them packs the
  weight again.
- Other operations that return a view are refused, because a write to the view would be lost.
- It is frozen: inputs get gradients, the weight gets none.

A detached weight shares its arrays with the original, so each sees what is written to the other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import return_and_correct_aliasing

from packhorse.device import operators, weight_operators  # noqa: F401  (registers operators)
from packhorse.device.decoded_operators import run_decoded
from packhorse.device.decoded_rows import assign_rows, decode_rows
from packhorse.device.host_planes import HostPlanes
from packhorse.device.operators import is_transformed, obey_autocast
from packhorse.device.packed_arrays import check_arrays, empty_arrays, pack_arrays, resolve_format
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

__all__ = ["PackedWeight", "rebuild_weight"]

_aten = torch.ops.aten
_NO_ADDRESS = 1 << 63  # neither the host nor a GPU has memory at such addresses


@dataclass(slots=True)
class _Held:
    """The data that a packed weight shares with all weights detached from it."""

    arrays: WeightTensors
    format: WeightFormat
    n_columns: int
    max_row_exceptions: int | None = None  # None: not counted yet
    host: HostPlanes | None = None  # where the planes are, if the device's arrays only show them

    @property
    def stored(self) -> WeightTensors:
        """The arrays in their own memory, from which they can be copied."""
        return self.arrays if self.host is None else self.host.on_host(self.arrays)


class PackedWeight(Tensor):
    """A packed matrix of BF16 elements; `packhorse.device.pack_weight` makes one.

    Attributes:
        format: its format.
        low_bytes: u8, n_rows x n_padded.
        high_bits: u8, n_rows x n_high_bytes.
        first_exponents: u8, n_rows.
        exception_starts: i32, n_rows + 1.
        exceptions: i32, as many as there are.

    Example:
        >>> import torch
        >>> from packhorse.device import pack_weight
        >>> weight = pack_weight(torch.randn(256, 512, dtype=torch.bfloat16))

        >>> weight.shape, weight.dtype, weight.format.name
        (torch.Size([256, 512]), torch.bfloat16, 'W12')
        >>> weight.gather_rows(torch.tensor([7, 7, 0])).shape
        torch.Size([3, 512])
    """

    _held: _Held

    def __new__(
        cls,
        arrays: "WeightTensors | PackedWeight",
        format: WeightFormat | str | None = None,
        n_columns: int | None = None,
        requires_grad: bool = False,
    ) -> "PackedWeight":
        """Wraps arrays, or makes a parameter of a packed weight as `torch.nn.Parameter` does.

        Nothing is copied, except arrays on a GPU that do not begin at a multiple of 16 bytes, such
        as views of a loader's buffer: kernels would load them a few bytes at a time.

        Args:
            arrays: trusted arrays; `packhorse.device.check_arrays` checks arrays from elsewhere. Or
                a packed weight, without the other arguments: libraries that move parameters, such
                as accelerate, make a new parameter by calling the class of the old one.
            format: their format.
            n_columns: columns of the matrix.
            requires_grad: as for `torch.nn.Parameter`; if it is True, multiplying with the weight
                raises an error.

        Raises:
            TypeError: the arguments are neither arrays with format and columns nor a packed weight.
        """
        if isinstance(arrays, PackedWeight):
            parameter: PackedWeight = Parameter(arrays.detach(), requires_grad)  # type: ignore[assignment]
            return parameter
        if not isinstance(arrays, WeightTensors) or format is None or n_columns is None:
            raise TypeError(
                f"PackedWeight takes arrays, their format and the number of columns, not "
                f"{type(arrays).__name__}; packhorse.device.pack_weight packs a plain matrix"
            )
        held = operators.align(arrays)
        return cls._wrap(_Held(held, resolve_format(format), n_columns))

    @classmethod
    def _wrap(cls, held: _Held) -> "PackedWeight":
        shape = held.arrays.n_rows, held.n_columns
        weight: PackedWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bfloat16, device=held.arrays.device, requires_grad=False
        )
        weight._held = held
        return weight

    @property
    def arrays(self) -> WeightTensors:
        """The arrays themselves; do not write to them."""
        return self._held.arrays

    @property
    def format(self) -> WeightFormat:
        """The format."""
        return self._held.format

    @property
    def low_bytes(self) -> Tensor:
        """Bits 7 to 0 of the packed elements."""
        return self._held.arrays.low_bytes

    @property
    def high_bits(self) -> Tensor:
        """The bits of the packed elements above bit 7."""
        return self._held.arrays.high_bits

    @property
    def first_exponents(self) -> Tensor:
        """The first exponent of each row's window."""
        return self._held.arrays.first_exponents

    @property
    def exception_starts(self) -> Tensor:
        """Where the exceptions of each row begin."""
        return self._held.arrays.exception_starts

    @property
    def exceptions(self) -> Tensor:
        """Elements outside of their row's window, with their columns."""
        return self._held.arrays.exceptions

    @property
    def packed_nbytes(self) -> int:
        """Bytes of all arrays; `nbytes` is that of the plain matrix."""
        return sum(array.numel() * array.element_size() for array in self._held.arrays)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory that a GPU's weight takes; 0 unless `offload_model_` has moved it
        there."""
        return 0 if self._held.host is None else self._held.host.nbytes

    @property
    def host_planes(self) -> HostPlanes | None:
        """The planes in host memory; None unless `offload_model_` has moved them there."""
        return self._held.host

    @property
    def stored_arrays(self) -> WeightTensors:
        """The arrays as `arrays`, except that planes in host memory are tensors of the host."""
        return self._held.stored

    def in_host_memory(self, host: HostPlanes) -> "PackedWeight":
        """The weight as a device sees it whose GPU reads the planes in host memory.

        Args:
            host: the planes of this weight, copied for the device.

        Returns:
            A weight on the device, with small arrays of its own.
        """
        arrays = host.on_device(self._held.arrays)
        return PackedWeight._wrap(replace(self._held, arrays=arrays, host=host))

    def lend(self, n_tokens: int) -> AbstractContextManager[WeightTensors]:
        """The arrays for a product. Planes in host memory may be copied to a buffer that other
        weights use afterwards.

        Args:
            n_tokens: vectors that the weight is multiplied with.

        Returns:
            A context with the arrays; the product is launched before it ends.
        """
        held = self._held
        if held.host is None:
            return nullcontext(held.arrays)
        return held.host.lend(held.arrays, n_tokens)

    @property
    def bits_per_weight(self) -> float:
        """Bits that an element takes, with exceptions and padding; 0 for an empty matrix."""
        return 8 * self.packed_nbytes / max(self.numel(), 1)

    def unpack(self) -> Tensor:
        """The plain matrix: BF16, n_rows x n_columns, on the same device, equal bit for bit to
        what was packed."""
        arrays, format = self._held.arrays, self._held.format
        unpacked: Tensor = torch.ops.packhorse.unpack_weight(
            *arrays, format.name, self._held.n_columns
        )
        return unpacked

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Some rows of the plain matrix.

        Args:
            rows: int32 or int64, any dimensions; on the same device.

        Returns:
            BF16, the dimensions of `rows`, and n_columns.

        Raises:
            TypeError: `rows` has another dtype.
            IndexError: there is no such row. On a GPU, PyTorch's own behaviour for such look-ups.
        """
        if rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rows are {rows.dtype}; they must be torch.int32 or torch.int64")
        held = self._held
        most = held.max_row_exceptions
        if most is None:
            most = min(held.n_columns, held.arrays.exceptions.shape[0])
        flat = rows.reshape(-1).to(torch.int64)
        find = operators.gather_rows if is_transformed() else operators.look_up
        found = find(held.arrays, held.format, held.n_columns, flat, most)
        return found.view(*rows.shape, held.n_columns)

    def prepare_gather(self) -> None:
        """Finds the largest number of exceptions in a row, so that `gather_rows` need not allow for
        the worst case. This reads from the device, so it is done when weights of embeddings are
        packed or loaded."""
        held = self._held
        if self.device.type != "meta":
            held.max_row_exceptions = max(held.arrays.exception_starts.diff().tolist(), default=0)

    # Some libraries, such as PEFT, write to a parameter through its `data`.
    @property
    def data(self) -> Tensor:
        """The same weight, detached; values that are assigned to it are packed. They may have
        another number of rows or columns. A packed weight of another device takes the place of this
        one, as libraries move parameters that way."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, PackedWeight) and value.device != self.device:
            _become(self, _like(self, PackedWeight._wrap(value._held)))
            return
        if value.dtype != torch.bfloat16 or value.device != self.device:
            found, own = f"{value.dtype} on {value.device}", f"torch.bfloat16 on {self.device}"
            raise TypeError(
                f"a packed weight, {own}, cannot become {found}; first take the plain weight back "
                "with unpack_model_"
            )
        if value.dim() != 2:
            raise ValueError(
                f"a packed weight of shape {list(self.shape)} cannot become {list(value.shape)}; "
                "first take the plain weight back with unpack_model_, or assign another parameter"
            )
        if value.shape == self.shape:
            with torch.no_grad():
                self.copy_(value)
            return
        arrays = pack_arrays(value.detach(), self.format)
        resized = PackedWeight(arrays, self.format, value.shape[1])
        if self._held.max_row_exceptions is not None:
            resized.prepare_gather()
        _become(self, _like(self, resized))

    # Libraries ask for gradients when they want to train a weight, or a copy of one, as PEFT does
    # for `modules_to_save`. They hold the parameter already, so that very object becomes plain.
    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Asks for gradients, or for none. A parameter that is to get gradients is unpacked in
        place: it becomes a plain parameter, for all modules that share it."""
        if requires_grad and isinstance(self, Parameter):
            _become(self, Parameter(self.unpack(), requires_grad=True))
            return self
        return super().requires_grad_(requires_grad)

    # PyTorch's own method would return 0 for all packed weights. Accelerate uses this number to
    # find shared weights, and would take all packed weights for the same one.
    def data_ptr(self) -> int:
        """A number that differs between packed weights and is the same for aliases. It is not an
        address; on the meta device it is 0."""
        return 0 if self.is_meta else _NO_ADDRESS | id(self._held)

    # PyTorch's own method would access memory that does not exist.
    def share_memory_(self) -> "PackedWeight":
        """Moves the arrays to shared memory, for other processes; returns the weight itself. Those
        of a GPU stay where they are, and so do planes that a GPU reads in host memory."""
        for array in self._held.arrays if self._held.host is None else ():
            array.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether the arrays are in shared memory, or on a GPU."""
        return all(array.is_shared() for array in self._held.arrays)  # type: ignore[no-untyped-call]

    # safetensors asks for it when it is given packed weights as a whole, and so does diffusers when
    # it is to offload weights to the disk.
    def storage(self) -> NoReturn:
        """Refuses, because there is no plain memory.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a packed weight has no plain memory that could be written to a file: save the state "
            "dict of its module, which has its arrays, or weight.unpack(). With diffusers, offload "
            "without offload_to_disk_path"
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(
            "a packed weight has no plain memory to share; take weight.unpack() for the matrix"
        )

    def _stable_hash_for_caching(self) -> str:
        """A text with everything that compiled code depends on, for the caches of PyTorch's
        compilers."""
        held = self._held
        arrays = [(str(a.shape), a.stride(), str(a.device), a.requires_grad) for a in held.arrays]
        return repr((held.format.name, held.n_columns, held.max_row_exceptions, arrays))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        n_rows, n_columns = self.shape
        bits = self.bits_per_weight
        # While a graph is traced, the number of exceptions has no value.
        size = f"{bits:.2f} bits a weight, " if isinstance(bits, float) else ""
        shape = f"{n_rows} x {n_columns}"
        return f"PackedWeight({self.format.name}, {shape}, {size}device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # PEFT copies a single layer to train the copy, or to load trained values into it.
        root = next(iter(memo.values()), None)  # the copy of what `deepcopy` was called with
        is_alone = isinstance(root, (nn.Linear, nn.Embedding)) and not self.is_meta
        copied = _like(self, self.unpack() if is_alone else self.clone())
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        held = self._held
        traits = isinstance(self, Parameter), held.max_row_exceptions is not None
        # Planes in memory of the host take the small arrays with them.
        place = held.stored[0].device
        arrays = tuple(array.to(place) for array in held.stored)
        return rebuild_weight, (arrays, held.format.name, held.n_columns, *traits)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, int | None]]:
        return list(WeightTensors._fields), (self.format.name, self._held.max_row_exceptions)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, int | None], size: Any, stride: Any
    ) -> "PackedWeight":
        arrays = WeightTensors(*(inner[name] for name in WeightTensors._fields))
        return PackedWeight._wrap(_Held(arrays, WEIGHT_FORMATS[context[0]], size[1], context[1]))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _multiply(*args, **(kwargs or {}))
        if func is F.embedding:
            return _embedding(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], PackedWeight):
            found = decode_rows(*args)
            if found is not None:
                return found
        if func is Tensor.__setitem__ and isinstance(args[0], PackedWeight):
            return assign_rows(*args)
        if func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            return args[0].requires_grad_(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func, _run_decoded)
        return handler(func, args, kwargs or {})


def _like(weight: PackedWeight, other: Any) -> Any:
    """The other tensor, as a parameter if the weight is one."""
    return Parameter(other, requires_grad=False) if isinstance(weight, Parameter) else other


def _become(weight: PackedWeight, other: Tensor) -> None:
    """Makes another tensor of the object that modules and libraries hold."""
    try:
        torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            "a packed weight cannot change its shape, or become plain to get gradients, while "
            "compiled code or a graph refers to it: do this first, or leave the layer plain: "
            "PackhorseConfig takes lm_head=False, embeddings=False and modules_to_not_convert"
        ) from error


def rebuild_weight(
    arrays: tuple[Tensor, ...], format: str, n_columns: int, is_parameter: bool, gathers: bool
) -> PackedWeight:
    """Rebuilds a packed matrix from a pickle."""
    checked = WeightTensors(*(array.contiguous() for array in arrays))
    check_arrays(checked, resolve_format(format), n_columns, name="pickle")
    weight = PackedWeight(checked, format, n_columns)
    if gathers:
        weight.prepare_gather()
    return Parameter(weight, requires_grad=False) if is_parameter else weight  # type: ignore[return-value]


rebuild_weight.__module__ = "packhorse.device"  # pickles must not name a file that may move


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; under a transform it uses the decoded matrix."""
    input, bias = obey_autocast(input, bias)
    if isinstance(weight, PackedWeight) and is_transformed():
        with torch._C._DisableFuncTorch():
            plain = weight.unpack()
        return F.linear(input, plain, bias)
    product: Tensor = torch.ops.packhorse.linear(input, weight, bias)
    return product


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`; arguments that only affect gradients are ignored."""
    if max_norm is not None:
        raise NotImplementedError(
            "max_norm changes the weight at each look-up, but a packed weight is frozen: take the "
            "plain one back with unpack_model_"
        )
    if isinstance(weight, PackedWeight) and is_transformed():
        return weight.gather_rows(input)
    found: Tensor = torch.ops.packhorse.embedding(input, weight)
    return found


# How a packed weight handles operators; all that are not listed go to `_run_decoded`.


def _run_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, weight, bias = _bind(args, kwargs)
    if not isinstance(weight, PackedWeight) or isinstance(x, PackedWeight):
        raise TypeError("the input of a linear layer must be a plain tensor, not a packed weight")
    n_columns = weight.shape[1]
    with weight.lend(x.numel() // n_columns) as arrays:
        product: Tensor = torch.ops.packhorse.multiply_weight(
            x, *arrays, bias, weight.format.name, n_columns
        )
    return product


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    def bind(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
        return input, weight, bias

    return bind(*args, **kwargs)


def _run_embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    rows, weight, _ = _bind(args, kwargs)
    found: Tensor = weight.gather_rows(rows)
    return found


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shared = PackedWeight._wrap(args[0]._held)
    return return_and_correct_aliasing(func, args, kwargs, shared)  # type: ignore[no-untyped-call]


def _copy_arrays(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`clone` and moves between devices."""
    held = args[0]._held
    if held.host is not None and func is _aten._pin_memory.default:
        raise RuntimeError(
            f"this packed weight is in host memory that {args[0].device} reads (offload_model_), "
            "so it need not be pinned; weight.cpu() is a copy that can be"
        )
    dtype = kwargs.get("dtype")
    if dtype not in (None, torch.bfloat16):
        return _run_decoded(func, args, kwargs)
    kept = {
        name: value
        for name, value in kwargs.items()
        if name in ("device", "non_blocking", "pin_memory")
    }
    if held.host is not None:  # the copy lies on the device as a whole
        kept.setdefault("device", args[0].device)
        func = _aten._to_copy.default
    arrays = WeightTensors(*(func(array, **kept) for array in held.stored))
    return PackedWeight._wrap(replace(held, arrays=arrays, host=None))


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    arrays = [array for array in args[0]._held.stored if array.numel()]
    return all(func(array, *args[1:], **kwargs) for array in arrays)


def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for array in args[0]._held.arrays:
        func(array, *args[1:], **kwargs)


def _make_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("dtype") not in (None, torch.bfloat16):
        return _run_decoded(func, args, kwargs)
    held, device = args[0]._held, kwargs.get("device") or args[0].device
    arrays = empty_arrays(held.arrays.n_rows, held.n_columns, held.format, device=device)
    return PackedWeight._wrap(_Held(arrays, held.format, held.n_columns))


def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`copy_`, to or from a packed weight."""
    target, source = args[:2]
    if not isinstance(target, PackedWeight):
        return func(target, source.unpack(), *args[2:])  # type: ignore[no-any-return]
    if isinstance(source, PackedWeight) and source._held is target._held:
        return target
    if source.shape != target.shape:
        source = source.unpack() if isinstance(source, PackedWeight) else source
        source = source.expand(target.shape)
    if not isinstance(source, PackedWeight):
        arrays = pack_arrays(source.to(torch.bfloat16), target.format)
        source = PackedWeight(arrays, target.format, target.shape[1])
    held = target._held
    if held.host is None:
        moved = (array.to(target.device, copy=True) for array in source._held.stored)
        held.arrays, held.format = WeightTensors(*moved), source.format
    else:
        if source.format is not held.format:
            arrays = pack_arrays(source.unpack(), held.format)
            source = PackedWeight(arrays, held.format, held.n_columns)
        held.host.write(source._held.stored)
        held.arrays = held.host.on_device(source.arrays)
    was_prepared = held.max_row_exceptions is not None
    held.max_row_exceptions = source._held.max_row_exceptions
    if was_prepared and held.max_row_exceptions is None:
        target.prepare_gather()
    return target


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_decoded(PackedWeight, func, args, kwargs)


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.detach.default: _share,
    _aten.alias.default: _share,
    _aten.clone.default: _copy_arrays,
    _aten._to_copy.default: _copy_arrays,
    _aten._pin_memory.default: _copy_arrays,
    _aten.empty_like.default: _make_empty,
    _aten.is_pinned.default: _is_pinned,
    _aten.record_stream.default: _record_stream,
    _aten.copy_.default: _assign,
    torch.ops.packhorse.linear.default: _run_linear,
    torch.ops.packhorse.embedding.default: _run_embedding,
}
