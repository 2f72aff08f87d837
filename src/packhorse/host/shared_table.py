"""`SharedTable`: a packed table as the modules that share its rows hold it.

A copy or a pickle of a model has the table once, and the modules of the copy share it again, as
modules share a parameter of PyTorch.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from numpy.typing import NDArray
from torch import Tensor

from packhorse.gpu.host_memory import MemoryKind
from packhorse.host.table import PackedTable
from packhorse.host.table_state import join_table, split_table

__all__ = ["SharedTable", "share_table"]

_NAME = "table"
_IS_READ = "is_read_by_gpus"


class SharedTable:
    """A table that several modules hold.

    Attributes:
        table: the table.
    """

    def __init__(self, table: PackedTable) -> None:
        self.table = table

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTable:
        copied = SharedTable.__new__(SharedTable)
        copied.__setstate__(self.__getstate__())
        return copied

    def __getstate__(self) -> dict[str, Any]:
        is_read = self.table.memory.kind is not MemoryKind.PAGEABLE
        parts = split_table(self.table, _NAME).items()
        return {key: _as_tensor(each) for key, each in parts} | {_IS_READ: is_read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = None if state.pop(_IS_READ) else "cpu"
        arrays = {key: _as_array(each) for key, each in state.items()}
        self.table = join_table(arrays, _NAME, device=device)
        _shared[id(self.table)] = self


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """`torch.save` writes tensors as they are, and arrays of NumPy as text; only `pickle` cannot
    write wide integers without a sign."""
    return torch.from_numpy(array if array.itemsize == 1 else array.view(f"i{array.itemsize}"))


def _as_array(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy().view(f"u{tensor.element_size()}")


# While a value is there, it holds the table, so no other table has the same id.
_shared: WeakValueDictionary[int, SharedTable] = WeakValueDictionary()


def share_table(table: PackedTable) -> SharedTable:
    """The same object for all who hold a table."""
    held = _shared.get(id(table))
    if held is None:
        held = _shared[id(table)] = SharedTable(table)
    return held
