"""A sharder for torchrec whose collections of bags fetch each distinct row once.

Put `DedupEmbeddingBagCollectionSharder` where you have torchrec's `EmbeddingBagCollectionSharder`.
Plans, parameters, names in the state dict, kernels and fused optimizers stay torchrec's own:
the sharded module is a subclass, and only what goes between ranks is replaced. Instead of a row for
each sample and each table, a holder gets distinct ids and sends distinct rows, with all tables
in one message; gradients return likewise. The lookup itself runs in torchrec's kernels, with one id
in each bag.

Differences: gradients of a row are summed over the samples of a rank first, then in the kernel of
the holder, so their last bits differ from torchrec's; the sums are deterministic. Batches of
another size for each feature (`inverse_indices`) are refused. Ids are exchanged in `input_dist`,
and rows at once in `compute_and_output_dist`, without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from packhorse.integrations.torchrec.backend import (
    comm_ops,
    embedding_modules,
    embeddingbag,
    sharding,
    torchrec,
)
from packhorse.wire.backend import dist, torch
from packhorse.wire.embeddings import (
    Bags,
    EmbeddingExchange,
    Request,
    RowCodec,
    Sending,
    Shard,
    Table,
)

__all__ = ["DedupEmbeddingBagCollectionSharder", "DedupShardedEmbeddingBagCollection"]

_MakeCodec = Callable[[], RowCodec]


class DedupEmbeddingBagCollectionSharder(embeddingbag.EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Shards an `EmbeddingBagCollection` so that each distinct row travels once.

    Args:
        fused_params: as for torchrec's sharder.
        forward: makes the codec of rows for each sharded module; by default rows stay exact.
        backward: makes the codec of gradients; by default they stay exact.
        sending: what travels of a table; see `packhorse.wire.embeddings.Sending`.
        options: as for torchrec's sharder. Its own communication codecs have no effect here.

    Example:
        >>> from packhorse.torchrec import DedupEmbeddingBagCollectionSharder
        >>> def parallel(model):
        ...     sharders = [DedupEmbeddingBagCollectionSharder()]
        ...     return DistributedModelParallel(model, sharders=sharders)
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        forward: _MakeCodec | None = None,
        backward: _MakeCodec | None = None,
        sending: Sending = Sending.CHEAPER,
        **options: Any,
    ) -> None:
        super().__init__(fused_params, **options)
        self._make_forward = forward
        self._make_backward = backward
        self._sending = sending

    def shard(
        self,
        module: torchrec.EmbeddingBagCollection,
        params: Mapping[str, sharding.ParameterSharding],
        env: sharding.ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> DedupShardedEmbeddingBagCollection:
        """As torchrec's sharder."""
        sharded = DedupShardedEmbeddingBagCollection(
            module, params, env, fused_params=self.fused_params, device=device,
            module_fqn=module_fqn,
        )  # fmt: skip
        sharded.connect(
            forward=self._make_forward and self._make_forward(),
            backward=self._make_backward and self._make_backward(),
            sending=self._sending,
        )
        return sharded

    @property
    def sharded_module_type(self) -> type[DedupShardedEmbeddingBagCollection]:
        """As torchrec's sharder."""
        return DedupShardedEmbeddingBagCollection


class _Place(NamedTuple):
    """Where a kernel of torchrec has a shard."""

    kernel: int
    table: int  # of the kernel


class DedupShardedEmbeddingBagCollection(embeddingbag.ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """torchrec's sharded collection with another exchange; made by the sharder.

    Attributes:
        exchange: what fetches; `exchange.explain()` and `exchange.traffic` say what it did.
    """

    exchange: EmbeddingExchange

    def connect(self, **options: Any) -> None:
        """Sets up the exchange.

        Args:
            options: of `EmbeddingExchange`.
        """
        plan = self.module_sharding_plan
        replicated = sharding.ShardingType.DATA_PARALLEL.value
        configs = [
            c for c in self._embedding_bag_configs if plan[c.name].sharding_type != replicated
        ]
        self._kernels = [
            kernel
            for lookup, kind in zip(self._lookups, self._sharding_types, strict=True)
            if kind != replicated
            for kernel in lookup._emb_modules
        ]
        tables = [_table(config, plan[config.name]) for config in configs]
        divide = dist.get_world_size(self._env.process_group)
        self.exchange = EmbeddingExchange(
            tables,
            [config.name for config in configs for _ in config.feature_names],
            group=self._env.process_group,
            divide=divide if comm_ops.get_gradient_division() else 1,
            **options,
        )
        self._features = [name for config in configs for name in config.feature_names]
        self._outputs = [
            (name, config.embedding_dim)
            for config, names in zip(
                self._embedding_bag_configs,
                embedding_modules.get_embedding_names_by_table(self._embedding_bag_configs),
                strict=True,
            )
            if config in configs
            for name in names
        ]
        self._places = self._find_places()

    def input_dist(
        self, ctx: embeddingbag.EmbeddingBagCollectionContext, features: torchrec.KeyedJaggedTensor
    ) -> sharding.NoWait[sharding.NoWait[Any]]:
        """As torchrec's: the holders learn which rows are wanted."""
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError(
                "features have batches of different sizes; give all the same batch size, or use "
                "torchrec's own sharder"
            )
        found = features.to_dict()
        missing = sorted(set(self._features) - set(found))
        if missing:
            raise ValueError(f"features {missing} are missing; there are {sorted(found)}")
        bags = [_bags(found[name], self._is_weighted) for name in self._features]
        return sharding.NoWait(sharding.NoWait((self.exchange.plan(bags), features)))

    def compute_and_output_dist(
        self, ctx: embeddingbag.EmbeddingBagCollectionContext, input: Any
    ) -> sharding.LazyNoWait[torchrec.KeyedTensor]:
        """As torchrec's: rows are fetched and become bags."""
        plan, features = input
        bags = self.exchange.fetch(plan, self._gather)
        found = dict(zip([name for name, _ in self._outputs], bags, strict=True))
        found |= self._replicated(features)
        names, dims = self._embedding_names, self._embedding_dims
        device = features.device()
        values = torch.cat([found[name].to(device) for name in names], 1)
        return sharding.LazyNoWait(
            torchrec.KeyedTensor(keys=names, length_per_key=dims, values=values)
        )

    def _replicated(self, features: torchrec.KeyedJaggedTensor) -> dict[str, Tensor]:
        """The bags of tables that every rank has whole: nothing travels."""
        found: dict[str, Tensor] = {}
        for lookup, kind, way in zip(
            self._lookups, self._sharding_types, self._embedding_shardings, strict=True
        ):
            if kind != sharding.ShardingType.DATA_PARALLEL.value:
                continue
            order = [features.keys().index(name) for name in way.feature_names()]
            bags = lookup(features.permute(order))
            parts = torch.split(bags, way.embedding_dims(), dim=1)
            found |= dict(zip(way.embedding_names(), parts, strict=True))
        return found

    def _find_places(self) -> dict[int, _Place]:
        """Which kernel has each shard of this rank."""
        by_offset: dict[tuple[str, int, int], _Place] = {}
        for k, kernel in enumerate(self._kernels):
            for t, table in enumerate(kernel._config.embedding_tables):
                row, column = table.local_metadata.shard_offsets
                by_offset[table.name, row, column] = _Place(k, t)
        layout = self.exchange.layout
        places = {}
        for number in self.exchange.held:
            shard, table = layout.shards[number], layout.tables[layout.table_of[number]]
            places[number] = by_offset[table.name, shard.rows[0], shard.columns[0]]
        return places

    def _gather(self, requests: Sequence[Request]) -> list[Tensor]:
        """Looks rows up in torchrec's kernels, all shards of a kernel at once."""
        found: dict[int, Tensor] = {}
        for k, kernel in enumerate(self._kernels):
            mine = {
                self._places[r.shard].table: r
                for r in requests
                if self._places[r.shard].kernel == k
            }
            if mine:
                found |= _look_up(kernel, mine)
        return [found[request.shard] for request in requests]


def _look_up(kernel: Any, requests: Mapping[int, Request]) -> dict[int, Tensor]:
    """Rows for the shards of one kernel, by number of the shard."""
    keys, ids, lengths, sizes = [], [], [], []
    for t, table in enumerate(kernel._config.embedding_tables):
        request = requests.get(t)
        for i, name in enumerate(table.feature_names):
            keys.append(name)
            n = request.n if request is not None and i == 0 else 0
            sizes.append([n])
            if request is not None and i == 0:
                ids.append(request.ids)
                ones = torch.ones(n, dtype=torch.int64)
                lengths.append(ones if request.offsets is None else request.offsets.diff())
    features = torchrec.KeyedJaggedTensor(
        keys=keys, values=torch.cat(ids), lengths=torch.cat(lengths), stride_per_key_per_rank=sizes
    )
    rows = kernel(features.to(_device(kernel))).view(-1)
    found = {}
    at = 0
    for t, request in sorted(requests.items()):
        width = kernel._config.embedding_tables[t].local_cols
        found[request.shard] = rows[at : at + request.n * width].view(request.n, width)
        at += request.n * width
    return found


def _table(config: Any, placing: sharding.ParameterSharding) -> Table:
    """A table of torchrec as the exchange describes it."""
    shards = []
    for part in placing.sharding_spec.shards:
        (row, column), (rows, columns) = part.shard_offsets, part.shard_sizes
        if rows and columns:
            shards.append(
                Shard(part.placement.rank(), (row, row + rows), (column, column + columns))
            )
    is_mean = config.pooling == torchrec.PoolingType.MEAN
    # Kernels of such tables make means, of which no sum can be had: rows travel.
    return Table(
        config.name, config.num_embeddings, config.embedding_dim, tuple(shards), mean=is_mean,
        rows_only=is_mean,
    )  # fmt: skip


def _bags(feature: Any, is_weighted: bool) -> Bags:
    weights = feature.weights() if is_weighted else None
    return Bags(feature.values().long(), feature.offsets().long(), weights)


def _device(kernel: Any) -> torch.device:
    device: torch.device = kernel.split_embedding_weights()[0].device
    return device
