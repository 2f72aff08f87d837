"""What a fit writes: to memory at once, or to a shelf in the background, in bundles.

A bundle is one transaction. `ShelfWriter` hands it to a thread, so that packing and the disk take
the time of another processor. What is read must have been written, so a fit waits before it reads
what it has just written; it knows where that is.

Rows that come a few at a time, for many tensors in turn, wait until they fill a chunk. Otherwise
each chunk would be packed several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from packhorse.learn.background import BackgroundQueue
from packhorse.learn.bases import Array
from packhorse.learn.tensors import MemoryShelf, Shelf, chunk_rows

__all__ = ["MemoryWriter", "ShelfWriter", "Writer"]

_Bundle: TypeAlias = Sequence[Callable[[], object]]
_MAX_BUNDLES = 1


class Writer(Protocol):
    """Writes tensors of rows."""

    def create(self, name: str, width: int, dtype: Any, chunk_nbytes: int) -> None:
        """Makes a matrix without rows."""

    def append(self, name: str, rows: Array) -> None:
        """Adds rows at the end of a matrix."""

    def append_some(self, name: str, rows: Array) -> None:
        """Adds rows at the end of a matrix, at the latest when `settle` is called."""

    def settle(self) -> None:
        """Writes the rows that wait."""

    def delete(self, name: str) -> None:
        """Removes a tensor."""

    def note(self, work: Callable[[Shelf], object]) -> None:
        """Writes what only a fit needs that goes on after an interruption."""

    def commit(self) -> None:
        """Ends a bundle."""

    def wait(self) -> None:
        """Waits until all bundles are written."""

    def drop(self) -> None:
        """Forgets what is not written."""


class MemoryWriter:
    """Writes to memory."""

    def __init__(self, shelf: MemoryShelf) -> None:
        """Begins to write.

        Args:
            shelf: where to.
        """
        self._shelf = shelf

    def create(self, name: str, width: int, dtype: Any, chunk_nbytes: int) -> None:
        """Makes a matrix without rows.

        Args:
            name: its name.
            width: the number of its columns.
            dtype: of its elements.
            chunk_nbytes: not used; memory has no chunks.
        """
        self._shelf.create(name, (0, width), dtype)

    def append(self, name: str, rows: Array) -> None:
        """Adds rows at the end of a matrix.

        Args:
            name: of the matrix.
            rows: as many columns as it has.
        """
        self._shelf[name].append(rows)

    append_some = append

    def settle(self) -> None:
        """Nothing: all is there."""

    def delete(self, name: str) -> None:
        """Removes a tensor.

        Args:
            name: of the tensor.
        """
        del self._shelf[name]

    def note(self, work: Callable[[Shelf], object]) -> None:
        """Nothing: a fit in memory does not go on.

        Args:
            work: what a shelf would be given to.
        """

    def commit(self) -> None:
        """Nothing: all is there."""

    def wait(self) -> None:
        """Nothing: all is there."""

    def drop(self) -> None:
        """Nothing: all is there."""


class ShelfWriter:
    """Writes to a shelf, in a thread. Rows that it was given must not change any more."""

    def __init__(self, shelf: Shelf) -> None:
        """Begins to write.

        Args:
            shelf: where to.
        """
        self._shelf = shelf
        self._bundle: list[Callable[[], object]] = []
        self._chunk_rows: dict[str, int] = {}
        self._waiting: dict[str, Array] = {}
        self._n_written: dict[str, int] = {}  # rows of matrices with rows that wait
        self._queue = BackgroundQueue[_Bundle](
            self._write, lambda: shelf.transaction(), _MAX_BUNDLES, "steps of a fit"
        )

    def create(self, name: str, width: int, dtype: Any, chunk_nbytes: int) -> None:
        """Makes a matrix without rows.

        Args:
            name: its name.
            width: the number of its columns.
            dtype: of its elements.
            chunk_nbytes: about how many bytes a chunk has.
        """
        make = partial(self._shelf.create, name, (0, width), dtype, chunk_nbytes=chunk_nbytes)
        self._bundle.append(make)
        self._chunk_rows[name] = chunk_rows(width, dtype, chunk_nbytes)

    def append(self, name: str, rows: Array) -> None:
        """Adds rows at the end of a matrix.

        Args:
            name: of the matrix.
            rows: as many columns as it has.
        """
        self._bundle.append(lambda: self._shelf[name].append(rows))

    def append_some(self, name: str, rows: Array) -> None:
        """Adds rows at the end of a matrix, at the latest when `settle` is called.

        Args:
            name: of the matrix.
            rows: as many columns as it has.
        """
        waiting, n_written = self._waiting.pop(name, rows[:0]), self._n_written.get(name, 0)
        n_whole = n_written + len(waiting) + len(rows)
        n_whole -= n_whole % self._chunk_rows.get(name, 1)
        if n_whole <= n_written:
            self._waiting[name] = np.concatenate([waiting, rows])
            return
        n_now = n_whole - n_written - len(waiting)
        self._append(name, np.concatenate([waiting, rows[:n_now]]))
        if n_now < len(rows):
            self._waiting[name] = rows[n_now:].copy()

    def _append(self, name: str, rows: Array) -> None:
        self.append(name, rows)
        self._n_written[name] = self._n_written.get(name, 0) + len(rows)

    def settle(self) -> None:
        """Writes the rows that wait."""
        for name, rows in self._waiting.items():
            self._append(name, rows)
        self._waiting.clear()

    def delete(self, name: str) -> None:
        """Removes a tensor.

        Args:
            name: of the tensor.
        """
        self._n_written.pop(name, None)
        self._bundle.append(lambda: self._shelf.__delitem__(name))

    def note(self, work: Callable[[Shelf], object]) -> None:
        """Writes what only a fit needs that goes on after an interruption.

        Args:
            work: takes the shelf.
        """
        self._bundle.append(lambda: work(self._shelf))

    def commit(self) -> None:
        """Ends a bundle, which becomes durable as a whole or not at all.

        Raises:
            BaseException: an earlier bundle could not be written.
        """
        bundle, self._bundle = self._bundle, []
        if bundle:
            self._queue.put(bundle)

    def wait(self) -> None:
        """Waits until all bundles are written.

        Raises:
            BaseException: one could not be written.
        """
        self._queue.flush()

    def drop(self) -> None:
        """Forgets what is not written."""
        self._bundle = []
        self._waiting.clear()
        self._n_written.clear()
        self._queue.drop()

    @staticmethod
    def _write(bundles: Sequence[_Bundle]) -> None:
        for bundle in bundles:
            for work in bundle:
                work()
