"""`PackedTable`: a matrix in memory of the host whose rows stay packed, and are read by number.

Each row has the same number of bytes, so a row is found, and replaced, without an index. A sample
of the rows decides how they are packed (packhorse.codecs.table_plan): by the bytes that a fetch
touches, not by the ratio.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse.arguments import resolve_threads
from packhorse.codecs.table_plan import TableWay, choose_way, list_ways
from packhorse.codecs.tables import (
    TableArrays,
    TablePacker,
    gather_into,
    replace_rows,
    sum_into,
)
from packhorse.framework import framework_of, resolve_framework
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.host.changed_rows import ChangedRows
from packhorse.host.row_numbers import numbers_of, require_rows
from packhorse.host.sources import RowSource
from packhorse.late_import import import_late

if TYPE_CHECKING:
    import torch

    from packhorse.host.device_gather import DeviceGathers
    from packhorse.host.table_tensor import TableTensor

__all__ = ["PackedTable", "is_on_device", "pack_table", "plan_table"]

_Bytes = NDArray[np.uint8]


class PackedTable:
    """A matrix whose rows are packed; `pack_table` packs one.

    Attributes:
        shape: rows and columns.
        dtype: safetensors' name of the dtype.
        way: how rows are packed, and what a fetch of a row touches.
        memory: where the packed rows lie.
        n_updates: how often rows were replaced.

    Example:
        >>> import numpy as np
        >>> from packhorse.host import pack_table
        >>> table = pack_table(np.tile(np.arange(512, dtype=np.float32), (1000, 1)))
        >>> table.gather(np.array([3, 3, 999])).shape
        (3, 512)
    """

    def __init__(self, dtype: str, way: TableWay, arrays: TableArrays, memory: HostMemory) -> None:
        self.dtype, self.way, self.memory = dtype, way, memory
        self._arrays = arrays
        self._changed = ChangedRows(len(arrays.rows), way.format.row_nbytes)
        self._gathers: DeviceGathers | None = None
        self.shape = (len(arrays.rows), way.format.n_columns)
        self.n_updates = 0

    @property
    def arrays(self) -> TableArrays:
        """The arrays themselves; do not write to them."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Bytes that the packed table takes, with everything that gathering needs."""
        packed = self._arrays.rows.nbytes + self._arrays.fast_nbytes
        return packed + self._changed.nbytes

    @property
    def fast_nbytes(self) -> int:
        """Bytes that belong in device memory when a GPU gathers."""
        return self._arrays.fast_nbytes + self._changed.fast_nbytes

    @property
    def n_unpacked_rows(self) -> int:
        """Rows that were changed and do not fit the table; they are kept plain."""
        return len(self._changed)

    def __len__(self) -> int:
        return self.shape[0]

    def gather(
        self,
        ids: Any,
        out: Any = None,
        *,
        threads: int | None = None,
        sm_budget: int | None = None,
        unique: bool = False,
    ) -> Any:
        """Rows by number, bit for bit: on the host, or on the GPU that `ids` or `out` are on.

        A GPU reads the packed rows from memory of the host and decodes them, on the current stream
        (`with torch.cuda.stream(...)` names another one). Nothing waits for it. A CUDA graph can
        contain a gather of ids that are on the GPU, once one has run before. The graph stays right
        after `update_`; the table must outlive it. A table whose memory the GPU cannot read,
        because it was packed with device="cpu", is gathered by the host, and the rows are copied; a
        `RuntimeWarning` says so once.

        Args:
            ids: integers, of any shape, of NumPy or PyTorch, or a list: 0 to `len(table) - 1`, in
                any order, each as often as wanted.
            out: receives the rows: contiguous, of the table's dtype and the shape of `ids` with a
                dimension of columns added; in host memory, or on the GPU of `ids`, or on any GPU
                if `ids` are in host memory. By default a new tensor.
            threads: threads to use on the host; None for one per core, at most 8.
            sm_budget: multiprocessors to use on a GPU; None for as many as are predicted to keep
                the link busy: 16, or more where rows become much shorter.
            unique: on a GPU, fetch each row once, however often it is asked for, in ascending
                order. It pays where most ids are repeated; it sorts the ids, and waits for the GPU
                to count them, so it does not go into a CUDA graph.

        Returns:
            `out`, or a tensor of the framework of `ids` (NumPy for a list), where `ids` are.

        Raises:
            ClosedError: this process is a fork that has not got the memory.
            IndexError: there is no such row. `out` is as it was. Ids on a GPU are checked there,
                without waiting: a wrong one makes a later call fail with "device-side assert
                triggered", as with PyTorch's own indexing.
            TypeError: `ids` are not integers, or `out` is no such tensor.
            ValueError: `out` has another shape or dtype, or is on another device than `ids`;
                or `sm_budget` is less than 1.
        """
        self.memory.numpy()  # refuses in a fork
        _require_budget(sm_budget)
        for tensor in (ids, out):
            if is_on_device(tensor):
                return self._on_devices().gather(
                    ids, out, tensor.device, sm_budget, unique, self._on_host(threads)
                )
        framework = framework_of(ids) or resolve_framework("np")
        numbers, shape = numbers_of(ids)
        full = (*shape, self.shape[1])
        if out is None:
            out = framework.empty(self.dtype, full)
        else:
            framework = framework_of(out) or framework
            framework.check_out(out, self.dtype, full)
        framework.fill(out, partial(self._on_host(threads), numbers))
        return out

    def read(
        self,
        start: int,
        stop: int,
        out: torch.Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        threads: int | None = None,
        sm_budget: int | None = None,
        copies: bool | None = None,
    ) -> torch.Tensor:
        """Rows `start` to `stop - 1`, bit for bit, as a tensor of PyTorch.

        A GPU reads short blocks as `gather` does. Long ones are copied packed by its copy engine,
        part by part, and decoded on the way. From which size on that is faster is measured at the
        first call on a GPU (in less than a second) and kept, as `packhorse tune` keeps its figures.
        A CUDA graph can contain a call, once one has run before.

        Args:
            start: the first row; 0 or more.
            stop: the row after the last one; `start` to `len(table)`.
            out: receives the rows: contiguous, of the table's dtype, (stop - start, columns). By
                default a new tensor.
            device: where the new tensor is; None for host memory.
            threads: as for `gather`.
            sm_budget: as for `gather`.
            copies: whether the copy engine is used; None for the faster way.

        Raises:
            ClosedError: as `gather`.
            IndexError: there are no such rows.
            MissingBackendError: PyTorch is not installed.
            TypeError, ValueError: `out` is no such tensor, or is given together with `device`;
                there is no such device; or `sm_budget` is less than 1.
        """
        self.memory.numpy()
        _require_budget(sm_budget)
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"rows {start} to {stop} are out of range: the table has {len(self)} rows"
            )
        framework = resolve_framework("pt")
        if out is not None and device is not None:
            raise ValueError(f"out and device={device!r} are given; give one: out has a device")
        framework.check_device(device)
        shape = (stop - start, self.shape[1])
        target: Any = getattr(out, "device", None)
        if device is not None:
            target = import_late("torch").device(device)
        if is_on_device(target):
            on_host = self._on_host(threads)
            return self._on_devices().read(start, stop, out, target, sm_budget, copies, on_host)
        if out is None:
            out = framework.empty(self.dtype, shape)
        else:
            framework.check_out(out, self.dtype, shape)
        framework.fill(out, partial(self._on_host(threads), np.arange(start, stop)))
        return out

    def _on_host(self, threads: int | None) -> Callable[[NDArray[np.int64], _Bytes], None]:
        """Writes rows by number to memory of the host."""

        def write(numbers: NDArray[np.int64], memory: _Bytes) -> None:
            rows = memory.reshape(len(numbers), self.way.format.row_nbytes)
            wanted = _threads_for(rows.nbytes, threads)
            gather_into(self._arrays, self.way.format, numbers, rows, threads=wanted)
            self._changed.put_into(numbers, rows)

        return write

    @property
    def sums_bags(self) -> bool:
        """Whether `sum_bags` can be called: rows are FP32 or BF16, and none is kept plain."""
        return self.dtype in ("F32", "BF16") and not self.n_unpacked_rows

    def sum_bags(
        self, ids: NDArray[np.int64], starts: NDArray[np.int64], *, threads: int | None = None
    ) -> NDArray[np.uint8]:
        """Sums of rows, without the rows in between: bags of embeddings, on the CPU. They are added
        up in fp32, in the order of the ids. Sums of FP32 are those of
        `torch.nn.functional.embedding_bag`, bit for bit; those of BF16 are if PyTorch has FBGEMM.

        Args:
            ids: int64, (n,): the rows of all bags, one bag after the other.
            starts: int64, (n_bags + 1,): where each bag begins, and where the last one ends;
                ascending from 0 to n. A bag may be empty: its sum is 0.
            threads: as for `gather`.

        Returns:
            uint8, (n_bags, bytes of a plain row): the sums, of the table's dtype.

        Raises:
            ClosedError: as `gather`.
            IndexError: there is no such row.
            TypeError: an array is of another kind.
            ValueError: the starts are not as described, or `sums_bags` is false.
        """
        self.memory.numpy()
        if not self.sums_bags:
            raise ValueError(
                f"rows of {self.dtype}, of which {self.n_unpacked_rows} are kept plain, cannot be"
                " added up packed: gather them"
            )
        if not len(starts) or starts[0] or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
            raise ValueError(f"starts must ascend from 0 to the number of ids, {len(ids)}")
        sums = np.empty((len(starts) - 1, self.way.format.row_nbytes), np.uint8)
        wanted = _threads_for(len(ids) * self.way.format.row_nbytes, threads)
        sum_into(self._arrays, self.way.format, ids, starts, sums, threads=wanted)
        return sums

    def _on_devices(self) -> DeviceGathers:
        if self._gathers is None:
            from packhorse.host.device_gather import DeviceGathers

            self._gathers = DeviceGathers(
                self._arrays, self.way.format, self.memory, self.dtype, self.way.pulled.get(32)
            )
            self._gathers.refresh(self._changed)
        return self._gathers

    def as_tensor(self, device: torch.device | str = "cpu") -> TableTensor:
        """This table as a tensor of PyTorch that stays packed, for code that takes rows out of a
        tensor, such as `torch.nn.functional.embedding` and the loaders of PyTorch Geometric.

        Args:
            device: where rows are wanted: "cpu" or a CUDA device.

        Raises:
            CompatibilityError: PyTorch has no such dtype.
            MissingBackendError: PyTorch is not installed.
            ValueError: it is another kind of device.
        """
        resolve_framework("pt")
        tensor: TableTensor = import_late("packhorse.host.table_tensor").TableTensor(self, device)
        return tensor

    def update_(self, ids: Any, rows: Any) -> None:
        """Replaces rows. Those that the table's format holds are packed in place; others are kept
        plain beside it; `n_unpacked_rows` counts them.

        Nothing may gather meanwhile. Gathers that were launched on a GPU before are waited for.

        Args:
            ids: integers, (n,), each at most once.
            rows: (n, n_columns), of the table's dtype: the new rows. They are only read.

        Raises:
            ClosedError: as `gather`.
            IndexError: there is no such row.
            TypeError: `ids` are not integers, or `rows` no matrix of the dtype.
            ValueError: there is another number of rows or columns, or an id is there twice. The
                table is as it was.
        """
        self.memory.numpy()
        numbers, shape = numbers_of(ids)
        source = RowSource(rows)
        if source.dtype != self.dtype:
            raise TypeError(f"rows are {source.dtype}; the table is {self.dtype}")
        if (source.n_rows,) != shape or source.n_columns != self.shape[1]:
            raise ValueError(
                f"rows have shape {(source.n_rows, source.n_columns)}; for these ids it must be"
                f" {(*shape, self.shape[1])}"
            )
        require_rows(numbers, len(self))
        ascends = bool((numbers[1:] > numbers[:-1]).all())  # sparse gradients are in this order
        if not ascends and len(np.unique(numbers)) != len(numbers):
            raise ValueError("an id is there twice; give each row once")
        plain = np.ascontiguousarray(source.read(0, source.n_rows))
        format = self.way.format
        packed = np.empty((len(numbers), format.stride), np.uint8)
        packer = TablePacker(format, packed)
        packer.add(plain)
        self.n_updates += 1
        fits = ~packer.marked & ~self._is_marked(numbers)
        if self._gathers is not None:
            self._gathers.wait()
        self._arrays.rows[numbers[fits]] = packed[fits]
        were_kept = self._changed.drop(numbers[fits])
        self._changed.keep(numbers[~fits], plain[~fits])
        if self._gathers is not None and (were_kept or not fits.all()):
            self._gathers.refresh(self._changed)

    def repack_(self) -> None:
        """Packs the rows that `update_` kept plain: those that have exceptions get them in the
        table. Nothing may gather meanwhile. CUDA graphs that gather must be captured again.

        Raises:
            ClosedError: as `gather`.
            ValueError: the table has more than 2^32 - 1 exceptions then, or other processes share
                its rows. It is as it was.
        """
        self.memory.numpy()
        if self.memory.is_shared and self.n_unpacked_rows:
            raise ValueError(
                "other processes may share the packed rows, but not the exceptions that they would"
                " get: save the table and load it again, or pack another one"
            )
        numbers, packed, arrays = self.settle()
        if self._gathers is not None:
            self._gathers.wait()
        self._gathers = None
        self._arrays.rows[numbers] = packed
        self._arrays = arrays
        self._changed.drop(numbers)

    def become_(self, other: PackedTable) -> None:
        """Takes over what another table holds, in memory and all; whoever holds this one sees it.
        Nothing may gather meanwhile. CUDA graphs that gather must be captured again.

        Args:
            other: a table of the same shape and dtype. Do not update it afterwards.

        Raises:
            ValueError: it has another shape or dtype.
        """
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"the other table is {other.shape} {other.dtype}; it must be {self.shape}"
                f" {self.dtype}"
            )
        if self._gathers is not None:
            self._gathers.wait()
        n_updates = self.n_updates + 1
        self.__dict__.update(other.__dict__)
        self.n_updates, self._gathers = n_updates, None

    def settle(self) -> tuple[NDArray[np.int64], _Bytes, TableArrays]:
        """What `repack_` makes of the table, which stays as it is: numbers of rows, ascending, how
        they are packed, and arrays with the exceptions of all rows. The rows in these arrays are
        the old ones."""
        numbers, plain = self._changed.in_order()
        if not len(numbers):
            return numbers, np.empty((0, self.way.format.stride), np.uint8), self._arrays
        packed, arrays = replace_rows(self._arrays, self.way.format, numbers, plain)
        return numbers, packed, arrays

    def _is_marked(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        words = self._arrays.marks[numbers // 32]
        return (words >> (numbers % 32).astype(np.uint32) & 1).astype(bool)

    def __copy__(self) -> PackedTable:
        return self  # two tables could not share rows that change

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTable:
        device = "cpu" if self.memory.kind is MemoryKind.PAGEABLE else "cuda"
        memory = host_memory(self.memory.nbytes, device=device, shared=self.memory.is_shared)
        np.copyto(memory.numpy(), self.memory.numpy())
        others = self._arrays[1:]  # which are never written to
        changed = self._changed.in_order()
        memo[id(self)] = copied = _attach(
            self.dtype, self.way, memory, self.shape[0], others, changed
        )
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        others = self._arrays[1:]  # than the rows, which lie in `memory`
        changed = self._changed.in_order()
        return _attach, (self.dtype, self.way, self.memory, self.shape[0], others, changed)

    def __repr__(self) -> str:
        plain = self.shape[0] * self.way.format.row_nbytes
        ratio = plain / self.nbytes if self.nbytes else 1.0
        return (
            f"PackedTable({self.shape[0]} x {self.shape[1]} {self.dtype}, {self.way.words},"
            f" {ratio:.2f} times smaller, {self.memory.kind})"
        )


def plan_table(source: Any) -> list[TableWay]:
    """All ways in which a table could be packed, measured on a sample; raw rows first.

    Args:
        source: as for `pack_table`.

    Raises:
        TypeError, ValueError: as for `pack_table`.
    """
    rows = RowSource(source)
    return list_ways(rows.sample(), rows.dtype)


def pack_table(
    source: Any,
    *,
    way: TableWay | None = None,
    granule: int = 32,
    will_change: bool = False,
    device: torch.device | str | None = "cpu",
    shared: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> PackedTable:
    """Packs a matrix, block by block of rows. It is only read.

    Args:
        source: a matrix of NumPy (also a memmap) or PyTorch, a slice of a packed or plain file, or
            a tensor of a shelf; of elements of 8, 16, 32 or 64 bits, with 1 to 65,536 columns.
        way: how to pack it; None for the way that touches the fewest granules.
        granule: bytes that a fetch takes at once: 32, or 128 for links that prefer whole lines.
        will_change: whether `update_` will replace many rows: then a way is chosen in which few
            rows have exceptions, because those are not replaced in place.
        device: the GPU that will gather, so that its rows lie in memory which it reads directly;
            "cpu" for none; None for PyTorch's current GPU, if there is one.
        shared: whether forked and spawned processes, such as workers of a DataLoader, share the
            memory of the rows.
        threads: threads to use; None for one per core, at most 8.
        progress: called with rows done and all rows, after each block.

    Raises:
        MemoryError: the packed rows do not fit in memory.
        TypeError: the source is no such matrix, or `way` is none of a table.
        ValueError: it has no columns or more than 65,536, or an argument is out of range.
    """
    rows = RowSource(source)
    if way is None:
        way = choose_way(rows.sample(), rows.dtype, granule, will_change=will_change)
    elif not isinstance(way, TableWay):
        raise TypeError(f"way must be one of those of plan_table, not {type(way).__name__}")
    elif (way.format.n_columns, way.format.element_nbytes) != (rows.n_columns, rows.element_nbytes):
        raise ValueError("the way is for a table with other columns or elements")
    n_threads = resolve_threads(threads)
    nbytes = max(rows.n_rows * way.format.stride, 1)
    memory = host_memory(nbytes, device=device, shared=shared, threads=n_threads)
    packed = _rows_in(memory, rows.n_rows, way)
    packer = TablePacker(way.format, packed, threads=n_threads)
    for block in rows.blocks():
        packer.add(np.ascontiguousarray(block))
        if progress is not None:
            progress(rows.n_rows - packer.n_rows_left, rows.n_rows)
    return PackedTable(rows.dtype, way, packer.finish(), memory)


def _rows_in(memory: HostMemory, n_rows: int, way: TableWay) -> _Bytes:
    stride = way.format.stride
    return memory.numpy()[: n_rows * stride].reshape(n_rows, stride)


def _attach(
    dtype: str,
    way: TableWay,
    memory: HostMemory,
    n_rows: int,
    others: tuple[Any, ...],
    changed: tuple[NDArray[np.int64], _Bytes],
) -> PackedTable:
    """A table of rows that lie in memory; also that of the process that has spawned this one."""
    table = PackedTable(dtype, way, TableArrays(_rows_in(memory, n_rows, way), *others), memory)
    table._changed.keep(*changed)
    return table


def _threads_for(nbytes: int, threads: int | None) -> int:
    """Threads for a gather: one for each piece that takes longer than to start a thread."""
    return max(1, min(resolve_threads(threads), nbytes >> 18))


def _require_budget(n_programs: int | None) -> None:
    if n_programs is not None and operator.index(n_programs) < 1:
        raise ValueError(f"sm_budget is {n_programs}; it must be at least 1")


def is_on_device(where: Any) -> bool:
    """Whether a tensor, or a device of PyTorch, is that of a GPU."""
    device = getattr(where, "device", where)
    return getattr(device, "type", "cpu") != "cpu"
