"""The hop from the host to a GPU: tables whose rows stay packed in memory of the host, and that
memory. `TableTensor` imports PyTorch at first use."""

from typing import TYPE_CHECKING, Any

from packhorse.codecs.table_plan import TableWay
from packhorse.framework import resolve_framework
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.host.table import PackedTable, pack_table, plan_table
from packhorse.late_import import import_late

if TYPE_CHECKING:
    from packhorse.host.table_tensor import TableTensor

__all__ = [
    "HostMemory",
    "MemoryKind",
    "PackedTable",
    "TableTensor",
    "TableWay",
    "host_memory",
    "pack_table",
    "plan_table",
]

_MODULES = {"TableTensor": "table_tensor"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    resolve_framework("pt")
    return getattr(import_late(f"{__name__}.{_MODULES[name]}"), name)
