"""Gathers of packed tables on GPUs, which read the packed rows directly from memory of the host.

A `DeviceTable` is a table as one GPU sees it: a view of the rows where they lie, and exceptions,
values and changed rows in device memory. Nothing of a gather waits for the GPU, so CUDA graphs can
contain it; a graph stays right after `PackedTable.update_`, because rows change where they lie, and
kernels look up on the device where changed rows are.

Kernels are launched on the current stream. `DeviceGathers` has the tables of all GPUs, and says
why a GPU cannot gather.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse.codecs.tables import TableArrays
from packhorse.gpu.detect import describe_device
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.host.changed_rows import ChangedRows
from packhorse.host.crossover import NEVER, crossover_of, find_crossover
from packhorse.host.device_copies import RowRing
from packhorse.host.device_cost import default_programs
from packhorse.host.places import require_integers
from packhorse.host.row_numbers import numbers_of, require_rows
from packhorse.kernels.vendor import why_no_kernels
from packhorse.table_layout import TableFormat, TableMode
from packhorse.torch_dtypes import TORCH_DTYPES
from packhorse.torch_framework import FRAMEWORK

__all__ = ["DeviceGathers", "DeviceTable", "OnHost", "device_with_number", "flat_ids", "why_not"]

_CALIBRATED_NBYTES = 16 << 20
OnHost: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.uint8]], None]


def why_not(memory: HostMemory, device: torch.device) -> str | None:
    """Why a device cannot gather from memory of the host; None if it can."""
    try:
        from packhorse.kernels.launch import runs_on
    except ImportError:
        return "gathers on a GPU need Triton; install it with: pip install 'packhorse[gpu]'"
    if device.type not in ("cuda", "cpu") or not runs_on(device):
        return f"the kernels run on NVIDIA GPUs, not on {device}"
    if device.type != "cuda":
        return None
    if memory.kind is MemoryKind.PAGEABLE:
        said = f" ({'; '.join(memory.notes)})" if memory.notes else ""
        return (
            f"{device} cannot read the pageable memory that the table's rows lie in{said}; pack the"
            " table with device='cuda'"
        )
    return why_no_kernels(device)


def device_with_number(device: torch.device | str) -> torch.device:
    """A device; of CUDA's, the current one if it has no number."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def flat_ids(ids: torch.Tensor) -> torch.Tensor:
    """Ids as kernels take them: int64, one-dimensional, contiguous.

    Raises:
        TypeError: they are not integers.
    """
    require_integers(ids)
    return ids.detach().reshape(-1).to(torch.int64).contiguous()


class DeviceTable:
    """A table as one device sees it.

    Args:
        arrays: the packed table; its rows lie at the beginning of `memory`.
        format: its format.
        memory: where its rows lie; the device can read it.
        device: the device, with its number.
        pulled_nbytes: bytes that a fetch of a row touches, on average; None for all of it.
    """

    def __init__(
        self,
        arrays: TableArrays,
        format: TableFormat,
        memory: HostMemory,
        device: torch.device,
        pulled_nbytes: float | None = None,
    ) -> None:
        from packhorse.kernels.tables import INTEGERS, kernel_of, put_rows, upload_table

        self._format, self._device, self._n_rows = format, device, len(arrays.rows)
        model = describe_device(device)
        shape = self._n_rows, format.stride
        nbytes = self._n_rows * format.stride
        self._host_rows = memory.tensor("cpu")[:nbytes].view(shape)
        rows = memory.tensor(device)
        if rows.data_ptr() != memory.address:
            raise RuntimeError(
                f"this PyTorch copies host memory to {device} instead of showing it there: gather"
                " on the first GPU, or update PyTorch"
            )
        self._tensors = upload_table(rows[:nbytes].view(shape), arrays[1:], format)
        self._head = torch.zeros(3, dtype=torch.int64, device=device)
        self._changed: tuple[torch.Tensor, ...] = ()
        self._ring: RowRing | None = None
        has_exceptions = len(arrays.exception_columns) > 0
        block_rows = kernel_of(format, has_exceptions).constants["BLOCK_ROWS"]
        self.default_programs = default_programs(format, block_rows, model, pulled_nbytes)
        self._n_processors = model.n_processors
        # So that its kernel is there when a CUDA graph needs it first.
        kind = INTEGERS[format.element_bits]
        row = torch.zeros((1, format.n_columns), dtype=kind, device=device)
        put_rows(self._head, self._head[:1], row)

    def gather(
        self, ids: torch.Tensor, out: torch.Tensor, n_programs: int | None, *, checked: bool
    ) -> None:
        """Gathers rows.

        Args:
            ids: int64 (n,), on the device.
            out: integers of the elements' size, n x n_columns, on the device.
            n_programs: multiprocessors to use.
            checked: whether the ids are known to be rows.
        """
        if not checked:
            torch._assert_async(
                ((ids >= 0) & (ids < self._n_rows)).all(),
                f"an id is out of range: the table has {self._n_rows} rows",
            )
        self._decode(ids, out, n_programs)

    def read(
        self, start: int, stop: int, out: torch.Tensor, n_programs: int | None, *, copies: bool
    ) -> None:
        """Reads a block of rows.

        Args:
            start, stop: the rows; they are there.
            out: integers of the elements' size, (stop - start) x n_columns, on the device.
            n_programs: multiprocessors to use, while rows are read in place.
            copies: whether the copy engine brings them.
        """
        ids = torch.arange(start, stop, device=self._device)
        if not copies:
            return self._decode(ids, out, n_programs)
        if self._ring is None:
            self._ring = RowRing(self._device)

        def decode(rows: torch.Tensor, first: int, last: int) -> None:
            part = slice(first - start, last - start)
            self._decode(ids[part], out[part], self._n_processors, rows=rows, first_row=first)

        return self._ring.run(self._host_rows, start, stop, decode)

    def _decode(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        n_programs: int | None,
        rows: torch.Tensor | None = None,
        first_row: int = 0,
    ) -> None:
        from packhorse.kernels.tables import gather_rows, put_rows

        tensors = self._tensors if rows is None else self._tensors._replace(rows=rows)
        n_programs = n_programs or self.default_programs
        gather_rows(tensors, self._format, ids, out, n_programs=n_programs, first_row=first_row)
        # A graph is also launched after rows were changed.
        if self._changed or _is_captured(self._device):
            put_rows(self._head, ids, out, n_programs=n_programs)

    def wait(self) -> None:
        """Waits until no gather runs on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def refresh(self, changed: ChangedRows) -> None:
        """Takes other changed rows. No gather may run."""
        words = [0, 0, 0]
        self._changed = ()
        if len(changed):
            arrays = (torch.from_numpy(array) for array in changed.in_order())
            self._changed = tuple(array.to(self._device) for array in arrays)
            words = [len(changed), *(tensor.data_ptr() for tensor in self._changed)]
        self._head.copy_(torch.tensor(words))
        self.wait()  # other streams may gather next


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph takes what is launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class DeviceGathers:
    """The gathers of one table on all GPUs.

    Args:
        arrays, format, memory, pulled_nbytes: as for `DeviceTable`.
        dtype: safetensors' name of the dtype.
    """

    def __init__(
        self,
        arrays: TableArrays,
        format: TableFormat,
        memory: HostMemory,
        dtype: str,
        pulled_nbytes: float | None,
    ) -> None:
        self._arrays, self._format, self._memory = arrays, format, memory
        self._dtype, self._pulled = dtype, pulled_nbytes
        self._tables: dict[torch.device, DeviceTable] = {}
        self._refused: set[torch.device] = set()
        self._changed: ChangedRows | None = None

    def gather(
        self,
        ids: Any,
        out: Any,
        device: torch.device,
        n_programs: int | None,
        unique: bool,
        on_host: OnHost,
    ) -> torch.Tensor:
        """Gathers rows; see `PackedTable.gather`.

        Args:
            ids: on the device, or in host memory.
            out: on the device; None for a new tensor.
            device: that of `ids` or `out`.
            n_programs: multiprocessors to use; None for the default.
            unique: whether each row travels once.
            on_host: gathers where the device cannot.
        """
        if checked := not (isinstance(ids, torch.Tensor) and ids.device == device):
            numbers, shape = numbers_of(ids)
            require_rows(numbers, len(self._arrays.rows))
            flat = _bring(numbers, device)
        else:
            flat, shape = flat_ids(ids), tuple(ids.shape)
        dst = self._out(out, (*shape, self._format.n_columns), device)

        def run(table: DeviceTable) -> None:
            rows = self._as_integers(dst)
            if not unique:
                table.gather(flat, rows, n_programs, checked=checked)
                return
            once, places = torch.unique(flat, return_inverse=True)
            fetched = torch.empty((len(once), rows.shape[1]), dtype=rows.dtype, device=device)
            table.gather(once, fetched, n_programs, checked=checked)
            torch.index_select(fetched, 0, places, out=rows)

        if not self._runs(device, run):
            self._copy(flat.cpu().numpy(), dst, on_host)
        return dst

    def read(
        self,
        start: int,
        stop: int,
        out: Any,
        device: torch.device,
        n_programs: int | None,
        copies: bool | None,
        on_host: OnHost,
    ) -> torch.Tensor:
        """Reads a block of rows; see `PackedTable.read`.

        Args:
            start, stop: the rows; they are there.
            out, device, n_programs, on_host: as for `gather`.
            copies: whether the copy engine brings them; None for the faster way.
        """
        device = device_with_number(device)
        dst = self._out(out, (stop - start, self._format.n_columns), device)

        def run(table: DeviceTable) -> None:
            copied = copies
            if copied is None and device.type == "cuda":
                nbytes = (stop - start) * self._format.stride
                copied = nbytes >= crossover_of(device, partial(_measure, device))
            table.read(start, stop, self._as_integers(dst), n_programs, copies=bool(copied))

        if not self._runs(device, run):
            self._copy(np.arange(start, stop), dst, on_host)
        return dst

    def wait(self) -> None:
        """Waits until no GPU gathers."""
        for table in self._tables.values():
            table.wait()

    def refresh(self, changed: ChangedRows) -> None:
        """Tells all GPUs which rows are changed; no gather may run."""
        self._changed = changed
        for table in self._tables.values():
            table.refresh(changed)

    def _runs(self, device: torch.device, run: Callable[[DeviceTable], None]) -> bool:
        """Runs something with the table on a device; returns whether it could."""
        table = self._on(device)
        if table is None:
            return False
        from packhorse.gpu.compiler_faults import compiler_fault

        try:
            run(table)
        except Exception as error:
            fault = compiler_fault(error)
            if fault is None:
                raise
            self._refuse(device, f"Triton cannot compile kernels for {device} ({fault})")
            return False
        return True

    def _on(self, device: torch.device) -> DeviceTable | None:
        if device in self._tables or device in self._refused:
            return self._tables.get(device)
        reason = why_not(self._memory, device)
        if reason is not None:
            self._refuse(device, reason)
            return None
        _refuse_capture(device, "the first gather uploads arrays and compiles kernels")
        table = DeviceTable(self._arrays, self._format, self._memory, device, self._pulled)
        if self._changed is not None:
            table.refresh(self._changed)
        self._tables[device] = table
        return table

    def _refuse(self, device: torch.device, reason: str) -> None:
        """Gathers for a device on the host from now on, and says so."""
        self._tables.pop(device, None)
        self._refused.add(device)
        warnings.warn(
            f"{reason}: so the host gathers, and plain rows are copied to {device}, which is slow",
            RuntimeWarning,
            stacklevel=6,
        )

    def _copy(self, numbers: NDArray[np.int64], out: torch.Tensor, on_host: OnHost) -> None:
        held = torch.empty(out.shape, dtype=out.dtype, device="cpu")
        FRAMEWORK.fill(held, partial(on_host, numbers))
        out.copy_(held)

    def _out(self, out: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The tensor that receives rows, checked, or a new one."""
        if device.type == "meta":
            raise ValueError("tensors on meta have no memory for rows; give ids and out that have")
        FRAMEWORK.check_form(self._dtype, shape)
        wanted = TORCH_DTYPES[self._dtype]
        if out is None:
            return torch.empty(shape, dtype=wanted, device=device)
        if not isinstance(out, torch.Tensor) or not out.is_contiguous():
            raise TypeError("out must be a contiguous PyTorch tensor")
        if out.device != device:
            raise ValueError(
                f"out is on {out.device} and the ids are on {device}; give both on one"
            )
        if out.dtype != wanted or tuple(out.shape) != shape:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; it must be {wanted} {shape}")
        return out

    def _as_integers(self, out: torch.Tensor) -> torch.Tensor:
        from packhorse.kernels.tables import INTEGERS

        kind = INTEGERS[self._format.element_bits]
        return out.detach().view(kind).view(-1, self._format.n_columns)


def _bring(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Ids of the host on a device. Through pinned memory, as a copy from other memory would wait
    for all that the stream has to do."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    _refuse_capture(device, "ids in host memory are copied", "give ids that are on the GPU")
    pinned = torch.tensor(numbers, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _refuse_capture(device: torch.device, why: str, remedy: str = "call it once before") -> None:
    if _is_captured(device):
        raise RuntimeError(f"{why} on {device}, which a CUDA graph cannot contain: {remedy}")


def _measure(device: torch.device) -> int:
    """Measures from which size on copies are faster, with plain rows of 512 bytes."""
    from packhorse.gpu.timing import time_chain

    _refuse_capture(device, "the first read measures copies")
    format = TableFormat(TableMode.RAW, 32, 128, rest_bits=32)
    n_rows = _CALIBRATED_NBYTES // format.stride
    memory = host_memory(_CALIBRATED_NBYTES, device=device)
    if memory.kind is MemoryKind.PAGEABLE:  # unlike that of the table, which can be read in place
        return NEVER
    rows = memory.numpy().reshape(n_rows, format.stride)
    nothing = np.zeros(-(-n_rows // 32), np.uint32)
    starts, columns = np.zeros(1, np.uint32), np.empty(0, np.uint16)
    arrays = TableArrays(rows, nothing, nothing, starts, columns, np.empty(0, np.uint8))
    table = DeviceTable(arrays, format, memory, device)
    out = torch.empty((n_rows, format.n_columns), dtype=torch.int32, device=device)

    def seconds(copies: bool, nbytes: int) -> float:
        n = nbytes // format.stride
        call = partial(table.read, 0, n, out[:n], None, copies=copies)
        call()
        return time_chain([call] * 4, n_replays=10)

    return find_crossover(partial(seconds, False), partial(seconds, True))
