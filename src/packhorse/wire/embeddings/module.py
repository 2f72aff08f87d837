"""Embedding tables on several ranks as a module of PyTorch: bags of ids in, bags of rows out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from packhorse.wire.backend import torch
from packhorse.wire.embeddings.exchange import EmbeddingExchange, Request
from packhorse.wire.embeddings.routes import Bags
from packhorse.wire.embeddings.sums import gather_rows
from packhorse.wire.embeddings.tables import Table

__all__ = ["EmbeddingBags"]


class EmbeddingBags(nn.Module):
    """Holds this rank's shards and fetches the rest; call it as one calls `nn.EmbeddingBag`.

    The parameter of a table that this rank holds whole is `tables.<name>`, that of a shard
    `tables.<name>:<number of the shard>`. Their gradients are sparse: use `torch.optim.SGD`,
    `Adagrad` or `SparseAdam`, and no `DistributedDataParallel` around this module.

    Args:
        tables: all tables, the same on all ranks.
        features: for each feature, the name of its table; by default a feature for each table.
        options: of `EmbeddingExchange`.

    Attributes:
        exchange: what fetches; `exchange.explain()` and `exchange.traffic` say what it did.

    Example:
        >>> from packhorse.wire.embeddings import Bags, EmbeddingBags, on_rank
        >>> def look_up(ids):  # on each rank
        ...     bags = EmbeddingBags([on_rank("user", 1_000, 16, rank=0)])
        ...     (users,) = bags([Bags(ids)])
        ...     return users
    """

    def __init__(
        self, tables: Sequence[Table], features: Sequence[str] | None = None, **options: Any
    ) -> None:
        self.set_up(EmbeddingExchange(tables, features, **options))

    def set_up(self, exchange: EmbeddingExchange) -> None:
        """Makes the parameters for an exchange that is there already.

        Args:
            exchange: what fetches.
        """
        super().__init__()
        self.exchange = exchange
        self.tables = nn.ParameterDict()
        for number in self.exchange.held:
            shape = self.exchange.layout.shards[number].shape
            parameter = nn.Parameter(torch.empty(shape, dtype=self.exchange.dtype))
            self.tables[self._name(number)] = parameter
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all rows from U(-1/sqrt(rows), 1/sqrt(rows)), as DLRM does."""
        for number in self.exchange.held:
            rows = self.exchange.layout.tables[self.exchange.layout.table_of[number]].rows
            end = 1 / math.sqrt(rows)
            self.tables[self._name(number)].uniform_(-end, end)

    def forward(self, batch: Sequence[Bags]) -> list[Tensor]:
        """The bags of each feature; all ranks call it.

        Args:
            batch: the ids of each feature.

        Returns:
            For each feature, [bags, dim] of float32, or of float64 if the tables are.
        """
        return self.exchange.fetch(self.exchange.plan(batch), self.gather)

    def gather(self, requests: Sequence[Request]) -> list[Tensor]:
        """Rows of the shards that this rank holds, as `EmbeddingExchange.fetch` wants them.

        Args:
            requests: what is wanted of each shard.

        Returns:
            For each request, [n, width] in the dtype of the tables, with a gradient.
        """
        return [
            gather_rows(
                self.tables[self._name(asked.shard)], asked.ids, asked.offsets, asked.counts
            )
            for asked in requests
        ]

    def _name(self, number: int) -> str:
        layout = self.exchange.layout
        table = layout.tables[layout.table_of[number]]
        return table.name if len(table.shards) == 1 else f"{table.name}:{number}"
