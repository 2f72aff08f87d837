"""The decoded chunks of a shelf that are kept in memory, and where they lie there.

A decoded chunk is a one-dimensional, read-only array of its elements in C order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from packhorse.disk.shelf.arrays import Array, dtype_of
from packhorse.disk.shelf.records import TensorRecord
from packhorse.process import at_fork

__all__ = ["Cache", "RowTable", "Stored", "stored"]

_MAX_TABLES = 64
_MAX_OF_TABLE = 1 << 20  # chunks: 8 MiB of addresses


class Stored(NamedTuple):
    """A decoded chunk.

    Attributes:
        data: its elements, read-only.
        content_hash: of its frame.
        address: where the elements lie in memory.
    """

    data: Array
    content_hash: bytes
    address: int


def stored(data: Array, content_hash: bytes) -> Stored:
    """A decoded chunk.

    Args:
        data: its elements, one-dimensional and contiguous.
        content_hash: of its frame.
    """
    return Stored(data, content_hash, data.__array_interface__["data"][0])


class RowTable:
    """Where chunks of whole rows lie in memory, so that many rows are gathered at once.

    It keeps the chunks alive. The cache forgets its tables when it drops a chunk.

    Attributes:
        addresses: of each chunk of the tensor; 0 if it is not known.
    """

    def __init__(self, record: TensorRecord, n_chunks: int | None = None) -> None:
        """Args:
        record: the tensor.
        n_chunks: for how many chunks; None for all of the tensor.
        """
        grid = record.grid
        self._numel = grid.rows_per_chunk * grid.row_numel
        self._dtype = dtype_of(record.dtype)
        self._kept: dict[int, Array] = {}
        self._zeros: Stored | None = None
        self.addresses = np.zeros(grid.n_chunks if n_chunks is None else n_chunks, np.uint64)

    def add(self, numbers: Sequence[int], chunks: Sequence[Stored | None]) -> None:
        """Note chunks; one of zeros, or with fewer rows than others, is filled up."""
        addresses = []
        for number, chunk in zip(numbers, chunks, strict=True):
            if chunk is None:
                chunk = self._zeros = self._zeros or stored(np.zeros(self._numel, self._dtype), b"")
            elif chunk.data.size < self._numel:
                data = np.zeros(self._numel, self._dtype)
                data[: chunk.data.size] = chunk.data
                chunk = stored(data, b"")
            self._kept[number] = chunk.data
            addresses.append(chunk.address)
        self.addresses[np.asarray(numbers, np.intp)] = addresses


class Cache:
    """Decoded chunks, of which those that were used last are kept, within a number of bytes.

    They are found by the number of the stored chunk. No other chunk ever gets the number, so what
    is here stays right whatever is committed, also by other processes. Of patches, the rows alone
    are kept too, under ~number.
    """

    def __init__(self, nbytes: int) -> None:
        """Args:
        nbytes: the most bytes that it keeps.
        """
        self.max_nbytes = nbytes
        self.nbytes = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, Stored] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], RowTable] = OrderedDict()
        at_fork(in_child=_replace_locks)
        _caches.add(self)

    def get(self, numbers: Sequence[int]) -> list[Stored | None]:
        """Chunks; None for each that is not here."""
        with self._lock:
            kept, move = self._chunks, self._chunks.move_to_end
            found = [kept.get(number) for number in numbers]
            for number, chunk in zip(numbers, found, strict=True):
                if chunk is not None:
                    move(number)
        return found

    def take_rows(self, number: int) -> Array | None:
        """The decoded rows of a patch, which are not kept any longer; None if they are not here."""
        with self._lock:
            found = self._chunks.pop(~number, None)
            self.nbytes -= 0 if found is None else found.data.nbytes
        return None if found is None else found.data

    def put_rows(self, number: int, rows: Array) -> None:
        """Keep the decoded rows of a patch, for the next one that takes its place."""
        self.put(~number, Stored(rows, b"", 0))

    def put(self, number: int, chunk: Stored) -> None:
        """Keep a chunk, and drop the ones that were used longest ago."""
        if chunk.data.nbytes > self.max_nbytes:
            return
        with self._lock:
            before = self._chunks.pop(number, None)
            self._chunks[number] = chunk
            self.nbytes += chunk.data.nbytes - (before.data.nbytes if before else 0)
            if self.nbytes > self.max_nbytes:
                self._tables.clear()
            while self.nbytes > self.max_nbytes:
                _, dropped = self._chunks.popitem(last=False)
                self.nbytes -= dropped.data.nbytes

    def table(self, record: TensorRecord) -> RowTable | None:
        """Where the chunks of a tensor lie in memory, as far as that was found already; None if
        its chunks are not kept, or are too many for a table."""
        grid, key = record.grid, (record.id, record.serial)
        chunk_nbytes = grid.rows_per_chunk * grid.row_numel * dtype_of(record.dtype).itemsize
        if chunk_nbytes > self.max_nbytes or grid.n_chunks > _MAX_OF_TABLE:
            return None
        with self._lock:
            found = self._tables.get(key)
            if found is None:
                found = self._tables[key] = RowTable(record)
                if len(self._tables) > _MAX_TABLES:
                    self._tables.popitem(last=False)
            return found

    def in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held during the fork."""
        self._lock = threading.Lock()


_caches: WeakSet[Cache] = WeakSet()


def _replace_locks() -> None:
    for kept in _caches:
        kept.in_child()
