"""What the hop to the compute units asks of this one: a model's embeddings in memory of the host
(packhorse.gpu.host_embeddings)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from packhorse.codecs.table_plan import choose_way
from packhorse.gpu.host_embeddings import HostedRows
from packhorse.host.embedding import pack_embedding_, unpack_embedding_
from packhorse.host.packed_module import PackedModule
from packhorse.host.sources import RowSource
from packhorse.host.table import PackedTable
from packhorse.torch_dtypes import TORCH_DTYPES, short_name

__all__ = ["EMBEDDING_HOST", "ModelEmbeddings"]


class ModelEmbeddings:
    """The `EmbeddingHost` of this hop."""

    def plan(self, weight: Tensor) -> HostedRows:
        """What rows would take, by a sample."""
        rows = RowSource(weight.detach())
        way = choose_way(rows.sample(), rows.dtype)
        nbytes = int(rows.n_rows * (way.format.stride + way.fast_nbytes))
        return HostedRows(
            (rows.n_rows, rows.n_columns),
            way.words,
            nbytes,
            rows.element_nbytes,
            short_name(weight.dtype),
        )

    def pack_(self, modules: Mapping[str, nn.Module]) -> HostedRows:
        """Packs the rows that embeddings share, in place; they are frozen."""
        embeddings: list[Any] = [*modules.values()]
        for each in embeddings:
            each.requires_grad_(False)
        pack_embedding_(*embeddings)
        for name, each in zip(modules, embeddings, strict=True):
            each.name_in_model = name
        return _rows_of(embeddings[0].table)

    def save_plain_(self, model: nn.Module) -> None:
        """Has the state dict of a model hold the plain rows of all its embeddings from now on."""
        for module in model.modules():
            if isinstance(module, PackedModule):
                module.plain_state = True

    def unpack_(self, model: nn.Module) -> None:
        """Gives all embeddings of a model their plain rows back. Those that shared rows share a
        parameter again."""
        weights: dict[int, nn.Parameter] = {}
        for module in list(model.modules()):
            if isinstance(module, PackedModule):
                table = id(module.table)
                unpack_embedding_(module, weights.get(table))
                weights[table] = module.weight  # type: ignore[assignment]

    def hosted(self, model: nn.Module) -> dict[str, HostedRows]:
        """The rows that are in memory of the host; modules that share them are one, with " = "
        between their names."""
        names: dict[int, list[str]] = {}
        tables: dict[int, PackedTable] = {}
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                names.setdefault(id(module.table), []).append(name)
                tables[id(module.table)] = module.table
        return {" = ".join(names[key]): _rows_of(table) for key, table in tables.items()}


def _rows_of(table: PackedTable) -> HostedRows:
    way = table.way
    dtype = short_name(TORCH_DTYPES[table.dtype])
    return HostedRows(table.shape, way.words, table.nbytes, way.format.element_nbytes, dtype)


EMBEDDING_HOST = ModelEmbeddings()
