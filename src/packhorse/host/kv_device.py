"""Pages of keys and values unpacked on a GPU: its kernels read the slots in memory of the host.

What a kernel needs besides the slots is the same for each token until a page is added, so it stays
on the GPU as a `DevicePages`. Importing this needs Triton.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packhorse.gpu.host_memory import HostMemory, MemoryKind
from packhorse.host.kv_pages import PackedPages
from packhorse.kernels.tables import TableTensors, gather_rows

__all__ = ["DevicePages"]


class DevicePages:
    """Which pages go where in tensors of one shape, on the device of the kernels.

    If the device cannot read the memory of the pages, they are copied to it each time.

    Args:
        pages: where the pages are.
        numbers: as for `PackedPages.read_into`.
        out: a destination: integers of the elements' size, on the device.
    """

    def __init__(self, pages: PackedPages, numbers: NDArray[np.int64], out: Tensor) -> None:
        self._pages, self._numbers, self._memory = pages, numbers, pages.memory
        self._shape, self._device = out.shape, out.device
        self._plain = [
            (sequence, page * pages.shape[1], self._view(memory)[part].view(out.dtype))
            for sequence, page, memory, part in pages.plain_pages(numbers)
        ]
        ids = pages.row_ids(numbers, out.shape[2] // pages.shape[1])
        self._ids = None if ids is None else self._to_device(ids)
        if ids is not None:
            places, elements = pages.exceptions(numbers, tuple(out.shape))
            self._places, self._elements = self._to_device(places), self._to_device(elements)
            self._table = self._table_of_slots()

    def suits(self, pages: PackedPages, numbers: NDArray[np.int64], out: Tensor) -> bool:
        """Whether these are the pages, in such a destination."""
        return (
            self._pages is pages
            and self._numbers is numbers
            and self._memory is pages.memory
            and (self._shape, self._device) == (out.shape, out.device)
        )

    def read_into(self, out: Tensor) -> None:
        """Unpacks the pages, bit for bit, in the order of the device's current stream.

        Args:
            out: as given to `__init__`, or another of the same shape and device.
        """
        if self._ids is not None:
            rows = out.view(len(self._ids), -1)
            table = self._table
            if table.rows.device != self._device:
                table = table._replace(rows=table.rows.to(self._device))
            gather_rows(table, self._pages.format.rows, self._ids, rows)
            out.view(-1)[self._places] = self._elements.to(out.dtype)
        shape = self._pages.shape
        for sequence, start, plain in self._plain:
            held = plain.view(shape).to(self._device)
            out[sequence, :, start : start + shape[1]] = held

    def _table_of_slots(self) -> TableTensors:
        """The slots as a table without exceptions."""
        format, memory = self._pages.format.rows, self._memory
        assert memory is not None
        held = self._view(memory)
        n_bytes = self._pages.n_slots * self._pages.format.n_rows * format.stride
        values = np.array(format.values, f"u{format.element_nbytes}")
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        return TableTensors(
            held[:n_bytes].view(-1, format.stride),
            *(none, none, none, none.short(), none.byte()),
            self._to_device(values),
        )

    def _view(self, memory: HostMemory) -> Tensor:
        """The bytes of memory, where the device reads them; otherwise on the host."""
        is_read = self._device.type == "cpu" or memory.kind is not MemoryKind.PAGEABLE
        return memory.tensor(self._device if is_read else "cpu")

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        """Unsigned integers become signed ones of the same bits, except for bytes."""
        signed = array.view(f"i{array.itemsize}") if array.itemsize > 1 else array
        held = torch.from_numpy(np.ascontiguousarray(signed))
        if self._device.type != "cuda":
            return held.to(self._device)
        return held.pin_memory().to(self._device, non_blocking=True)  # the host does not wait
