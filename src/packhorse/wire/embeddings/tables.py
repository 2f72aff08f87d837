"""Says which rank holds which part of an embedding table.

A table is cut into shards, each with a range of rows and a range of columns: one shard
(table-wise), ranges of rows (row-wise), ranges of columns (column-wise), or a grid.
All ranks describe the tables in the same way. A block is what all shards of a table with the same
columns make up; a block has one row for each id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Block", "Shard", "Table", "blocks_of", "by_columns", "by_rows", "on_rank"]


class Shard(NamedTuple):
    """A part of a table: `table[rows[0]:rows[1], columns[0]:columns[1]]` lies on `rank`.

    Attributes:
        rank: who holds it.
        rows: its first row, and the row after its last one.
        columns: its first column, and the column after its last one.
    """

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Table:
    """An embedding table, and where its shards lie.

    Attributes:
        name: its name; no other table has it.
        rows: how many ids it has.
        dim: the length of a row.
        shards: they cover the table without overlap.
        mean: bags are the mean of their rows, not the sum.
        rows_only: holders never add up bags; each distinct row travels.

    Raises:
        ValueError: the shards do not cover the table.
    """

    name: str
    rows: int
    dim: int
    shards: tuple[Shard, ...]
    mean: bool = field(default=False, kw_only=True)
    rows_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        columns = sorted({shard.columns for shard in self.shards})
        _check_covered(self.name, "columns", columns, self.dim)
        for part in columns:
            rows = sorted(shard.rows for shard in self.shards if shard.columns == part)
            _check_covered(self.name, f"rows of columns {part[0]}:{part[1]}", rows, self.rows)


def on_rank(name: str, rows: int, dim: int, rank: int, *, mean: bool = False) -> Table:
    """A table that lies on one rank, whole (table-wise).

    Args:
        name: its name; no other table has it.
        rows: how many ids it has.
        dim: the length of a row.
        rank: who holds it.
        mean: bags are the mean of their rows, not the sum.

    Returns:
        The table, with one shard.

    Example:
        >>> from packhorse.wire.embeddings import on_rank
        >>> on_rank("user", 1_000, 16, rank=1).shards
        (Shard(rank=1, rows=(0, 1000), columns=(0, 16)),)
    """
    return Table(name, rows, dim, (Shard(rank, (0, rows), (0, dim)),), mean=mean)


def by_rows(name: str, rows: int, dim: int, world: int, *, mean: bool = False) -> Table:
    """A table of which each rank holds as many rows (row-wise), as torchrec cuts it.

    If the rows do not divide evenly, the last ranks hold fewer, or none.

    Args:
        name: its name; no other table has it.
        rows: how many ids it has.
        dim: the length of a row.
        world: how many ranks there are.
        mean: bags are the mean of their rows, not the sum.

    Returns:
        The table, with at most one shard on each rank.

    Example:
        >>> from packhorse.wire.embeddings import by_rows
        >>> [shard.rows for shard in by_rows("user", 1_000, 16, world=3).shards]
        [(0, 334), (334, 668), (668, 1000)]
    """
    size = -(-rows // world)
    cuts = [min(size * rank, rows) for rank in range(world + 1)]
    shards = (Shard(rank, (cuts[rank], cuts[rank + 1]), (0, dim)) for rank in range(world))
    return Table(name, rows, dim, tuple(s for s in shards if s.rows[0] < s.rows[1]), mean=mean)


def by_columns(
    name: str, rows: int, dim: int, ranks: Sequence[int], *, mean: bool = False
) -> Table:
    """A table of which each of `ranks` holds as many columns (column-wise).

    Args:
        name: its name; no other table has it.
        rows: how many ids it has.
        dim: the length of a row.
        ranks: who holds the columns, from the first ones to the last ones.
        mean: bags are the mean of their rows, not the sum.

    Returns:
        The table, with a shard for each entry of `ranks`.

    Raises:
        ValueError: `dim` is not a multiple of the number of ranks.

    Example:
        >>> from packhorse.wire.embeddings import by_columns
        >>> [shard.columns for shard in by_columns("user", 1_000, 16, ranks=[0, 1]).shards]
        [(0, 8), (8, 16)]
    """
    if not ranks or dim % len(ranks):
        raise ValueError(f"table {name}: {dim} columns cannot be shared by {len(ranks)} ranks")
    size = dim // len(ranks)
    shards = (Shard(rank, (0, rows), (size * i, size * (i + 1))) for i, rank in enumerate(ranks))
    return Table(name, rows, dim, tuple(shards), mean=mean)


class Block(NamedTuple):
    """The shards of one table with the same columns, in the order of their rows.

    `shards` are (number of the shard among all shards of all tables, shard).
    """

    table: int
    columns: tuple[int, int]
    shards: tuple[tuple[int, Shard], ...]


def blocks_of(tables: Sequence[Table]) -> tuple[Block, ...]:
    """All blocks, by table and column. Shards are numbered as `tables` lists them."""
    blocks = []
    first = 0
    for number, table in enumerate(tables):
        numbered = list(enumerate(table.shards, first))
        first += len(numbered)
        for columns in sorted({shard.columns for shard in table.shards}):
            parts = [(i, shard) for i, shard in numbered if shard.columns == columns]
            parts.sort(key=lambda part: part[1].rows)
            blocks.append(Block(number, columns, tuple(parts)))
    return tuple(blocks)


def _check_covered(name: str, what: str, parts: Sequence[tuple[int, int]], end: int) -> None:
    at = 0
    for start, stop in parts:
        if start != at or stop <= start:
            raise ValueError(f"table {name}: shards do not cover its {what}: {parts} of 0:{end}")
        at = stop
    if at != end:
        raise ValueError(f"table {name}: shards do not cover its {what}: {parts} of 0:{end}")
