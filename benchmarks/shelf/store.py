"""What every store of rows does in these measurements, and what its rows look like."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_NBYTES", "Array", "Entry", "Layout", "Store", "by_chunk"]

Array = NDArray[Any]
BLOCK_NBYTES = 48 << 20  # of the rows that one step of a pass over all rows has in memory


@dataclass(frozen=True)
class Layout:
    """The rows of a store, all of fp32.

    Attributes:
        width: values in a row.
        capacity: rows that will come at most; only stores that cannot grow use it.
        chunk_rows: rows in a chunk of the stores that have chunks.
        cache_nbytes: memory for decoded chunks, in stores that keep them.
    """

    width: int
    capacity: int
    chunk_rows: int
    cache_nbytes: int

    @property
    def row_nbytes(self) -> int:
        return 4 * self.width

    @property
    def block_rows(self) -> int:
        """Rows of one step of a pass."""
        return max(1, BLOCK_NBYTES // self.row_nbytes)


class Store(Protocol):
    """Rows in a folder of their own. A store is opened again by the same call that made it."""

    def append(self, rows: Array) -> None:
        """Add rows at the end; they are on the disk when it returns."""
        raise NotImplementedError

    def blocks(self) -> Iterator[Array]:
        """All rows in order, some at a time; a block is valid until the next."""
        raise NotImplementedError

    def take(self, index: Array) -> Array:
        """The rows of these numbers, in this order."""
        raise NotImplementedError

    def overwrite(self, index: Array, rows: Array) -> None:
        """Replace rows, none twice; they are on the disk when it returns."""
        raise NotImplementedError

    def weighted_sum(self, weights: Array) -> Array:
        """The sum of all rows, each times its weight: what sampling a posterior needs."""
        total, start = np.float32(0), 0
        for block in self.blocks():
            total = total + weights[start : start + len(block)] @ block
            start += len(block)
        return total

    def close(self) -> None:
        """Let go of the files."""


@dataclass(frozen=True)
class Entry:
    """A store of the tables.

    Attributes:
        make: the store in a folder, new or opened again.
        how: how it is run, for the report.
        works: "rows" (long rows of a training run), "table" (many short rows), or both.
        max_rows: long rows that it gets at most, because more would take minutes; 0 for all.
    """

    make: Callable[[Path, Layout], Store]
    how: str
    works: tuple[str, ...] = ("rows", "table")
    max_rows: int = 0


def by_chunk(index: Array, chunk_rows: int) -> Iterator[tuple[int, Array, Array]]:
    """Row numbers in groups of one chunk each, in the order of the chunks.

    Yields:
        The chunk's number, the places of its rows in `index`, and their places in the chunk.
    """
    chunks, places = np.divmod(index, chunk_rows)
    order = np.argsort(chunks, kind="stable")
    starts = np.flatnonzero(np.diff(chunks[order], prepend=-1))
    for group in np.split(order, starts[1:]):
        yield int(chunks[group[0]]), group, places[group]
