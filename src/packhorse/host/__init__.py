"""The hop from the host to a GPU: tables whose rows stay packed in memory of the host, and that
memory; embeddings of PyTorch with such rows, which import PyTorch at first use."""

from typing import TYPE_CHECKING, Any

from packhorse.codecs.table_plan import TableWay
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.host.files import load_table, load_tables, save_tables
from packhorse.host.table import PackedTable, pack_table, plan_table
from packhorse.late_import import late_name

if TYPE_CHECKING:
    from packhorse.host.embedding import (
        PackedEmbedding,
        PackedEmbeddingBag,
        pack_embedding_,
        unpack_embedding_,
    )
    from packhorse.host.hot_rows import HotRows
    from packhorse.host.row_optimizer import RowOptimizer
    from packhorse.host.table_tensor import TableTensor

__all__ = [
    "HostMemory",
    "HotRows",
    "MemoryKind",
    "PackedEmbedding",
    "PackedEmbeddingBag",
    "PackedTable",
    "RowOptimizer",
    "TableTensor",
    "TableWay",
    "host_memory",
    "load_table",
    "load_tables",
    "pack_embedding_",
    "pack_table",
    "plan_table",
    "save_tables",
    "unpack_embedding_",
]

_MODULES = {  # those that need PyTorch
    "HotRows": "hot_rows",
    "PackedEmbedding": "embedding",
    "PackedEmbeddingBag": "embedding",
    "RowOptimizer": "row_optimizer",
    "TableTensor": "table_tensor",
    "pack_embedding_": "embedding",
    "unpack_embedding_": "embedding",
}


def __getattr__(name: str) -> Any:
    return late_name(__name__, _MODULES, name)
