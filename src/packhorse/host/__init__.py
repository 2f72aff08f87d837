"""The hop from the host to a GPU: tables whose rows stay packed in memory of the host, and that
memory."""

from packhorse.codecs.table_plan import TableWay
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.host.files import load_table, load_tables, save_tables
from packhorse.host.table import PackedTable, pack_table, plan_table

__all__ = [
    "HostMemory",
    "MemoryKind",
    "PackedTable",
    "TableWay",
    "host_memory",
    "load_table",
    "load_tables",
    "pack_table",
    "plan_table",
    "save_tables",
]
