"""Decides for one batch which rows a rank needs from which shard, and how they become bags.

Every id of the batch gets a key, so that equal ids of a table have equal keys, all keys of a shard
are together, and shards with rows of one width are together. One stable sort of the keys of a width
then finds the distinct rows, their place in each holder's answer, and, for the backward pass,
which positions of the batch each row served.

A table with several ids in a bag may be cheaper if its holder adds the rows up: then a bag takes
the place of an id, and everything else stays. `Choice` says what was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from packhorse.wire.backend import torch
from packhorse.wire.embeddings.id_sets import set_nbytes
from packhorse.wire.embeddings.requests import Wanted, bags_nbytes
from packhorse.wire.embeddings.sums import Grouping, bags_of, group, join_ids
from packhorse.wire.embeddings.tables import Block, Table, blocks_of

__all__ = ["Bags", "Choice", "Layout", "Route", "Sending", "Slots", "route"]


class Bags(NamedTuple):
    """One feature of a batch: the ids of each sample.

    Attributes:
        ids: [n] int64.
        offsets: [b + 1] int64, where each bag starts among the ids, and n; None for one id each.
        weights: [n] of floats, what each row is multiplied by, or None.
    """

    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def cpu(self) -> Bags:
        """The same bags on the CPU."""
        offsets, weights = self.offsets, self.weights
        return Bags(
            self.ids.cpu(),
            None if offsets is None else offsets.cpu(),
            None if weights is None else weights.cpu(),
        )

    @property
    def starts(self) -> Tensor:
        """[b + 1] int64: `offsets`, also if there is one id in each bag."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(len(self.ids) + 1, device=self.ids.device)

    @property
    def lengths(self) -> Tensor:
        """[b] int64: how many ids each bag has."""
        if self.offsets is not None:
            return self.offsets.diff()
        return torch.ones_like(self.ids)

    @property
    def n(self) -> int:
        """How many bags there are."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    @property
    def n_filled(self) -> int:
        """How many bags have ids."""
        return len(self.ids) if self.offsets is None else int((self.offsets.diff() > 0).sum())


class Sending(Enum):
    """What travels of a table: each distinct row, a sum for each bag, or whichever is cheaper.

    Bags are added up by the holder, in the order in which PyTorch adds. A table that is cut by
    rows, or whose bags have weights, always sends distinct rows.
    """

    CHEAPER = "cheaper"
    DISTINCT = "distinct"
    BAGS = "bags"


class Choice(NamedTuple):
    """How the rows of a table travelled in a batch, and why.

    Bytes are estimates for this rank's part of the batch: ids, rows and gradients together, also of
    rows that this rank holds itself.

    Attributes:
        table: the name of the table.
        pooled: whether its holder added up the bags.
        n_bags: how many bags have ids.
        n_ids: how many ids they have.
        n_distinct: how many of them are distinct.
        distinct_nbytes: what sending each distinct row takes.
        pooled_nbytes: what sending a sum for each bag takes; None if only rows could travel, or no
            bag has several ids.
    """

    table: str
    pooled: bool
    n_bags: int
    n_ids: int
    n_distinct: int
    distinct_nbytes: int
    pooled_nbytes: int | None

    def __str__(self) -> str:
        distinct = (
            f"{self.n_distinct:,} distinct of {self.n_ids:,} rows ({self.distinct_nbytes:,} B)"
        )
        if self.pooled_nbytes is None:
            return f"{self.table}: {distinct}"
        pooled = f"{self.n_bags:,} sums ({self.pooled_nbytes:,} B)"
        first, second = (pooled, distinct) if self.pooled else (distinct, pooled)
        return f"{self.table}: {first}, not {second}"


class Layout:
    """Tables and features as all ranks agree on them.

    Args:
        tables: all tables.
        features: for each feature, the name of its table.
        world: how many ranks there are.

    Raises:
        ValueError: two tables have one name, a feature has no table, or a shard has no rank.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[str], world: int) -> None:
        self.tables = tuple(tables)
        names = [table.name for table in tables]
        if len(set(names)) != len(names):
            raise ValueError(f"names of tables must differ: {names}")
        unknown = sorted(set(features) - set(names))
        if unknown:
            raise ValueError(f"features name tables {unknown}; there are {names}")
        self.features = tuple(names.index(name) for name in features)
        self.shards = tuple(shard for table in tables for shard in table.shards)
        homeless = sorted({shard.rank for shard in self.shards} - set(range(world)))
        if homeless:
            raise ValueError(f"shards are on ranks {homeless}; there are {world} ranks")
        self.held = [[i for i, s in enumerate(self.shards) if s.rank == r] for r in range(world)]
        self.table_of = [t for t, table in enumerate(tables) for _ in table.shards]
        self.widths = sorted({shard.shape[1] for shard in self.shards})
        self.features_by_table: list[list[int]] = [[] for _ in tables]
        for feature, table in enumerate(self.features):
            self.features_by_table[table].append(feature)
        self.shards_by_table: list[list[int]] = [[] for _ in tables]
        for number, table in enumerate(self.table_of):
            self.shards_by_table[table].append(number)
        blocks = blocks_of(tables)
        self.blocks = [
            [b for b in blocks if b.columns[1] - b.columns[0] == width] for width in self.widths
        ]

    def served(self, table: int, batch: Sequence[Bags]) -> list[Bags]:
        """What a batch has for a table."""
        return [batch[f] for f in self.features_by_table[table]]

    def features_of(self, block: Block) -> list[int]:
        """The features of a block's table."""
        return self.features_by_table[block.table]


@dataclass(frozen=True)
class Slots:
    """The rows of one width that a rank gets, and the bags that they become."""

    n: int
    of_shard: dict[int, tuple[int, int]]  # number of the shard: its first slot and the next one's
    grouping: Grouping
    bags: Tensor  # [positions] int64: the bag of each position
    offsets: Tensor  # [bags + 1] int64
    weights: Tensor | None


@dataclass(frozen=True)
class Route:
    """What a rank needs for a batch.

    `slots` are by width, as `Layout.widths`; `wanted` by number of the shard. `choices` counts,
    when it is called, what each table took.
    """

    slots: list[Slots]
    wanted: list[Wanted]
    choices: Callable[[], list[Choice]]
    n_bags: list[int]  # of each feature


def route(
    layout: Layout, batch: Sequence[Bags], element_nbytes: Sequence[float], sending: Sending
) -> Route:
    """Plans the exchange of a batch; nothing is sent.

    Args:
        layout: tables and features.
        batch: the bags of each feature.
        element_nbytes: for each table, the bytes of an element, both ways together.
        sending: what travels.

    Raises:
        ValueError: an id is outside of its table, or offsets do not fit the ids.
    """
    if len(batch) != len(layout.features):
        raise ValueError(f"a batch has {len(batch)} features, not {len(layout.features)}")
    tables = [layout.tables[table] for table in layout.features]
    for feature, bags in enumerate(batch):
        _check(feature, bags, tables[feature])
    asked = [
        _may_pool(layout, t, batch, element_nbytes[t], sending) for t in range(len(layout.tables))
    ]
    pooled = [choice is not None and choice.pooled for choice in asked]
    for table, is_pooled in enumerate(pooled):
        if is_pooled:
            _check_ids(layout, table, batch)
    wanted = [Wanted(torch.empty(0, dtype=torch.int64).numpy())] * len(layout.shards)
    slots = [_slots(layout, blocks, batch, pooled, wanted) for blocks in layout.blocks]

    def choices() -> list[Choice]:
        return [
            choice or _distinct(layout, t, batch, wanted, element_nbytes[t])
            for t, choice in enumerate(asked)
        ]

    return Route(slots, wanted, choices, [bags.n for bags in batch])


def _check(feature: int, bags: Bags, table: Table) -> None:
    ids, offsets, weights = bags
    where = f"feature {feature} (table {table.name})"
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"{where}: ids must be [n] int64, not {list(ids.shape)} {ids.dtype}")
    if offsets is not None and (
        offsets.dtype != torch.int64
        or len(offsets) == 0
        or int(offsets[0]) != 0
        or int(offsets[-1]) != len(ids)
        or bool((offsets.diff() < 0).any())
    ):
        raise ValueError(f"{where}: offsets must be int64 that ascend from 0 to {len(ids)}")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"{where}: {list(weights.shape)} weights for {len(ids)} ids")


def _check_ids(layout: Layout, table: int, batch: Sequence[Bags]) -> None:
    """Refuses ids that are outside of their table."""
    features = layout.features_by_table[table]
    limits = [layout.tables[table].rows] * len(features)
    _, wrong = join_ids([batch[f].ids for f in features], limits, [0] * len(features))
    if wrong is not None:
        _refuse_ids(layout, features[wrong], batch)


def _refuse_ids(layout: Layout, feature: int, batch: Sequence[Bags]) -> None:
    table = layout.tables[layout.features[feature]]
    low, high = (int(end) for end in batch[feature].ids.aminmax())
    raise ValueError(
        f"feature {feature} (table {table.name}): ids are {low} to {high}; "
        f"0 to {table.rows - 1} are allowed"
    )


def _may_pool(
    layout: Layout, number: int, batch: Sequence[Bags], element_nbytes: float, sending: Sending
) -> Choice | None:
    """Counts both ways for a table whose holder could add up; None for any other."""
    table = layout.tables[number]
    served = layout.served(number, batch)
    has_several = any(bags.offsets is not None for bags in served)
    if sending is Sending.DISTINCT or (sending is Sending.CHEAPER and not has_several):
        return None
    n_ids = sum(len(bags.ids) for bags in served)
    n_bags = sum(bags.n_filled for bags in served)
    must = sending is Sending.BAGS and n_ids > 0
    if not _can_pool(table, served) or (n_bags == n_ids and not must):
        return None
    n_distinct = len(torch.unique(torch.cat([bags.ids for bags in served])))
    longest = max(int(bags.lengths.max()) for bags in served if len(bags.ids))
    row = table.dim * element_nbytes
    distinct = int(n_distinct * row) + set_nbytes(n_distinct, table.rows)
    pooled = int(n_bags * row) + bags_nbytes(n_bags, n_ids, longest, table.rows)
    is_pooled = must or pooled < distinct
    return Choice(table.name, is_pooled, n_bags, n_ids, n_distinct, distinct, pooled)


def _distinct(
    layout: Layout,
    number: int,
    batch: Sequence[Bags],
    wanted: Sequence[Wanted],
    element_nbytes: float,
) -> Choice:
    """What is counted of a table of which each distinct row travels."""
    table = layout.tables[number]
    served = layout.served(number, batch)
    n_ids = sum(len(bags.ids) for bags in served)
    n_bags = sum(bags.n_filled for bags in served)
    first = table.shards[0].columns
    n = sum(
        wanted[i].n for i in layout.shards_by_table[number] if layout.shards[i].columns == first
    )
    nbytes = int(n * table.dim * element_nbytes) + set_nbytes(n, table.rows)
    return Choice(table.name, False, n_bags, n_ids, n, nbytes, None)


def _can_pool(table: Table, served: Sequence[Bags]) -> bool:
    """Weights stay with the rank that has them, and a sum over holders would be another sum."""
    rows = {shard.rows for shard in table.shards}
    return len(rows) == 1 and not table.rows_only and all(bags.weights is None for bags in served)


def _slots(
    layout: Layout,
    blocks: Sequence[Block],
    batch: Sequence[Bags],
    pooled: Sequence[bool],
    wanted: list[Wanted],
) -> Slots:
    """The slots of one width; fills in what is wanted of its shards."""
    ids: list[Tensor] = []
    limits: list[int] = []
    starts: list[int] = []  # of the keys of each feature
    features: list[int] = []
    weights: list[Tensor | None] = []
    bases: dict[int, int] = {}
    base = 0
    for block in blocks:
        served = layout.served(block.table, batch)
        if pooled[block.table]:
            number = block.shards[0][0]
            bases[number] = base
            wanted[number] = _bags_wanted(served)
            rows = wanted[number].n
            ids.append(torch.arange(rows))
            features += layout.features_of(block)[:1]
            weights.append(None)
        else:
            for number, shard in block.shards:
                bases[number] = base + shard.rows[0]
            rows = layout.tables[block.table].rows
            ids += [bags.ids for bags in served]
            features += layout.features_of(block)
            weights += [bags.weights for bags in served]
        n_new = len(ids) - len(limits)
        limits += [rows] * n_new
        starts += [base] * n_new
        base += rows
    keys, wrong = join_ids(ids, limits, starts)
    if wrong is not None:
        _refuse_ids(layout, features[wrong], batch)
    grouping = group(keys)
    of_shard = _ranges(grouping.unique, bases)
    unique = grouping.unique.numpy()
    for number, (start, stop) in of_shard.items():
        if not pooled[layout.table_of[number]]:
            wanted[number] = Wanted(unique[start:stop] - bases[number])
    offsets, bags = _places(layout, blocks, batch, pooled)
    return Slots(len(grouping.unique), of_shard, grouping, bags, offsets, _joined(weights, ids))


def _places(
    layout: Layout, blocks: Sequence[Block], batch: Sequence[Bags], pooled: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Where each bag starts among the keys, and the bag of each key."""
    served = [
        (bags, pooled[block.table])
        for block in blocks
        for bags in layout.served(block.table, batch)
    ]
    if all(bags.offsets is None for bags, _ in served):  # one key each, which is common
        offsets = torch.arange(sum(bags.n for bags, _ in served) + 1)
        return offsets, offsets[:-1]
    counts = [
        (bags.lengths > 0).long() if is_pooled else bags.lengths for bags, is_pooled in served
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)])
    return offsets, bags_of(offsets)


def _bags_wanted(served: Sequence[Bags]) -> Wanted:
    lengths = torch.cat([bags.lengths for bags in served])
    ids = torch.cat([bags.ids for bags in served])
    return Wanted(ids.numpy(), lengths[lengths > 0].numpy())


def _ranges(unique: Tensor, bases: dict[int, int]) -> dict[int, tuple[int, int]]:
    """The slots of each shard; a shard ends where the next one begins."""
    order = sorted(bases, key=lambda number: bases[number])
    cuts = torch.searchsorted(unique, torch.tensor([bases[number] for number in order]))
    ends = [*cuts.tolist(), len(unique)]
    return {number: (ends[i], ends[i + 1]) for i, number in enumerate(order)}


def _joined(weights: Sequence[Tensor | None], ids: Sequence[Tensor]) -> Tensor | None:
    """The weights of all positions, 1 where a feature has none; None if none has any."""
    if all(part is None for part in weights):
        return None
    return torch.cat(
        [
            torch.ones(len(of_part)) if part is None else part
            for part, of_part in zip(weights, ids, strict=True)
        ]
    )
