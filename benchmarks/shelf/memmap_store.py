"""numpy.memmap in both layouts. The file has its full length from the beginning, but its blocks are
given to it as they are written. A file that exists is taken as full: nothing in it says how far it
was written."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.shelf.store import Array, Layout, Store

__all__ = ["EPOCH", "Columns", "Rows"]

EPOCH = 600  # columns of the file at most: the updates of one epoch, the paper's smallest file


class Rows(Store):
    """A row of the run is a row of the file: shape (K, n)."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        self._n = layout.capacity if _path(folder).exists() else 0
        self._map = _open(folder, (layout.capacity, layout.width))

    def append(self, rows: Array) -> None:
        self._map[self._n : self._n + len(rows)] = rows
        self._map.flush()
        self._n += len(rows)

    def blocks(self) -> Iterator[Array]:
        for start in range(0, self._n, self._layout.block_rows):
            yield self._map[start : min(start + self._layout.block_rows, self._n)]

    def take(self, index: Array) -> Array:
        return self._map[index]

    def overwrite(self, index: Array, rows: Array) -> None:
        self._map[index] = rows
        self._map.flush()

    def close(self) -> None:
        del self._map


class Columns(Store):
    """A row of the run is a column of the file, as in the paper: shape (n, K)."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        capacity = min(layout.capacity, EPOCH)
        self._n = capacity if _path(folder).exists() else 0
        self._map = _open(folder, (layout.width, capacity))

    def append(self, rows: Array) -> None:
        self._map[:, self._n : self._n + len(rows)] = rows.T
        self._map.flush()
        self._n += len(rows)

    def blocks(self) -> Iterator[Array]:
        for start in range(0, self._n, self._layout.block_rows):
            yield self._map[:, start : min(start + self._layout.block_rows, self._n)].T

    def weighted_sum(self, weights: Array) -> Array:
        # The sums of a few values at a time: the order of the file. Columns that were not written
        # are zero, and are read as well.
        padded = np.zeros(self._map.shape[1], np.float32)
        padded[: len(weights)] = weights
        step = self._layout.block_rows * self._layout.width // self._map.shape[1]
        starts = range(0, len(self._map), step)
        return np.concatenate([self._map[start : start + step] @ padded for start in starts])

    def close(self) -> None:
        del self._map


def _path(folder: Path) -> Path:
    return folder / "rows.bin"


def _open(folder: Path, shape: tuple[int, int]) -> Array:
    path = _path(folder)
    return np.memmap(path, np.float32, "r+" if path.exists() else "w+", shape=shape)
