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
from packhorse.learn.tensors import MemoryShelf, Shelf

__all__ = ["MemoryWriter", "ShelfWriter", "Writer"]

_Bundle: TypeAlias = Sequence[Callable[[], object]]
_MAX_BUNDLES = 2


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
        self._waiting: dict[str, list[Array]] = {}
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
        self._chunk_rows[name] = max(1, chunk_nbytes // max(1, width * np.dtype(dtype).itemsize))

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
        waiting = self._waiting.setdefault(name, [])
        waiting.append(rows)
        n = sum(map(len, waiting))
        n_whole = n - n % self._chunk_rows.get(name, 1)
        if n_whole:
            together = np.concatenate(waiting)
            self.append(name, together[:n_whole])
            self._waiting[name] = [together[n_whole:].copy()] if n_whole < n else []

    def settle(self) -> None:
        """Writes the rows that wait."""
        for name, waiting in self._waiting.items():
            if waiting:
                self.append(name, np.concatenate(waiting))
        self._waiting.clear()

    def delete(self, name: str) -> None:
        """Removes a tensor.

        Args:
            name: of the tensor.
        """
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
        self._queue.drop()

    @staticmethod
    def _write(bundles: Sequence[_Bundle]) -> None:
        for bundle in bundles:
            for work in bundle:
                work()
