"""Pages of keys and values unpacked on a GPU: its kernels read the slots in memory of the host."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packhorse.host.kv_pages import PackedPages
from packhorse.kernels.tables import TableTensors, gather_rows

__all__ = ["read_on_device"]


def read_on_device(pages: PackedPages, numbers: NDArray[np.int64], out: Tensor) -> None:
    """Unpacks pages, bit for bit, in the order of the device's current stream.

    Args:
        pages: where the pages are.
        numbers: as for `PackedPages.read_into`.
        out: its destination, as integers of the elements' size on the device of the kernels.

    Raises:
        ValueError: the device cannot read the memory of the pages.
    """
    shape = tuple(out.shape)
    ids = pages.row_ids(numbers, shape[2] // pages.shape[1])
    if ids is not None:
        rows = out.view(len(ids), pages.format.rows.n_columns)
        gather_rows(_tensors_of(pages, out), pages.format.rows, _to(ids, out), rows)
        places, elements = pages.exceptions(numbers, shape)
        if len(places):
            out.view(-1)[_to(places, out)] = _to(elements, out).to(out.dtype)
    for sequence, page, plain in pages.plain_pages(numbers):
        start = page * pages.shape[1]
        out[sequence, :, start : start + pages.shape[1]] = _to(plain, out)


def _tensors_of(pages: PackedPages, out: Tensor) -> TableTensors:
    """The slots as a table without exceptions."""
    format, memory = pages.format.rows, pages.memory
    assert memory is not None
    n_bytes = pages.n_slots * pages.format.n_rows * format.stride
    rows = memory.tensor(out.device)[:n_bytes].view(-1, format.stride)
    values = np.array(format.values, f"u{format.element_nbytes}")
    none = torch.empty(0, dtype=torch.int32, device=out.device)
    no_columns = torch.empty(0, dtype=torch.int16, device=out.device)
    no_elements = torch.empty(0, dtype=torch.uint8, device=out.device)
    return TableTensors(rows, none, none, none, no_columns, no_elements, _to(values, out))


def _to(array: NDArray[Any], out: Tensor) -> Tensor:
    """An array on the device of a tensor, unsigned integers as signed ones of the same bits."""
    signed = array.view(f"i{array.itemsize}") if array.itemsize > 1 else array
    return torch.from_numpy(np.ascontiguousarray(signed)).to(out.device)
