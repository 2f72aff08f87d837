"""LMDB with plain bytes, a row or a chunk under each key; and what a user could write on it to keep
only differences."""

import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shelf.store import Array, Layout, Store, by_chunk

__all__ = ["Chunks", "Differences", "Rows"]

KEYFRAME_EVERY = 16
PIECE = 1 << 17  # values of a row under one key, if the row is longer
MARGIN = 4  # the map may be this many times as large as the rows


def _key(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}Q", *numbers)


class _Lmdb(Store):
    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        size = MARGIN * layout.capacity * layout.row_nbytes + (1 << 28)
        # Every commit is flushed, which is what LMDB does if nothing is said.
        self._env = import_module("lmdb").open(str(folder), map_size=size)
        with self._env.begin() as txn, txn.cursor() as cursor:
            last = cursor.last()
            self._n = self._count(cursor.key(), len(cursor.value())) if last else 0

    def _count(self, key: bytes, nbytes: int) -> int:
        """The number of rows, from the last key and the size under it."""
        return struct.unpack(">Q", key[:8])[0] + 1

    def _read(self) -> Any:
        return self._env.begin(buffers=True)

    def close(self) -> None:
        self._env.close()


class Rows(_Lmdb):
    """A row under each key."""

    def append(self, rows: Array) -> None:
        with self._env.begin(write=True) as txn:
            for i, row in enumerate(rows, self._n):
                txn.put(_key(i), row.data, append=True)
        self._n += len(rows)

    def blocks(self) -> Iterator[Array]:
        with self._read() as txn:
            for _, value in txn.cursor():
                yield np.frombuffer(value, np.float32)[None]

    def take(self, index: Array) -> Array:
        out = np.empty((len(index), self._layout.width), np.float32)
        with self._read() as txn:
            for place, i in enumerate(index.tolist()):
                out[place] = np.frombuffer(txn.get(_key(i)), np.float32)
        return out

    def overwrite(self, index: Array, rows: Array) -> None:
        with self._env.begin(write=True) as txn:
            for i, row in zip(index.tolist(), rows, strict=True):
                txn.put(_key(i), row.data)


class Chunks(_Lmdb):
    """Some rows under each key; or a row in pieces, if it is long."""

    def _count(self, key: bytes, nbytes: int) -> int:
        n = self._layout.chunk_rows
        before = struct.unpack(">Q", key[:8])[0] * n
        return before + (nbytes // self._layout.row_nbytes if n > 1 else 1)

    def append(self, rows: Array) -> None:
        n = self._layout.chunk_rows
        assert self._n % n == 0, "only whole chunks are appended here"
        with self._env.begin(write=True) as txn:
            for start in range(0, len(rows), n):
                chunk = rows[start : start + n].reshape(-1)
                step = PIECE if n == 1 else chunk.size
                for piece in range(0, chunk.size, step):
                    key = _key((self._n + start) // n, piece)
                    txn.put(key, chunk[piece : piece + step].data, append=True)
        self._n += len(rows)

    def blocks(self) -> Iterator[Array]:
        whole = self._layout.chunk_rows > 1
        row, filled = np.empty(self._layout.width, np.float32), 0
        with self._read() as txn:
            for _, value in txn.cursor():
                piece = np.frombuffer(value, np.float32)
                if whole:
                    yield piece.reshape(-1, self._layout.width)
                    continue
                row[filled : filled + piece.size] = piece
                filled = (filled + piece.size) % row.size
                if not filled:
                    yield row[None]

    def take(self, index: Array) -> Array:
        out = np.empty((len(index), self._layout.width), np.float32)
        with self._read() as txn:
            for chunk, places, inside in by_chunk(index, self._layout.chunk_rows):
                out[places] = self._rows(txn, chunk)[inside]
        return out

    def _rows(self, txn: Any, chunk: int) -> Array:
        return np.frombuffer(txn.get(_key(chunk, 0)), np.float32).reshape(-1, self._layout.width)

    def overwrite(self, index: Array, rows: Array) -> None:
        with self._env.begin(write=True) as txn:
            for chunk, places, inside in by_chunk(index, self._layout.chunk_rows):
                new = self._rows(txn, chunk).copy()
                new[inside] = rows[places]
                txn.put(_key(chunk, 0), new.data)


class Differences(_Lmdb):
    """A row under each key, packed by Blosc2 after XOR with the keyframe before it."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        super().__init__(folder, layout)
        self._blosc = import_module("blosc2")
        self._keyframe = np.zeros(layout.width, np.uint32)

    def append(self, rows: Array) -> None:
        with self._env.begin(write=True) as txn:
            for i, row in enumerate(rows.view(np.uint32), self._n):
                if i % KEYFRAME_EVERY:
                    row = row ^ self._keyframe
                else:
                    self._keyframe = row.copy()
                packed = self._blosc.compress2(
                    row, typesize=4, codec=self._blosc.Codec.ZSTD, clevel=1
                )
                txn.put(_key(i), packed, append=True)
        self._n += len(rows)

    def blocks(self) -> Iterator[Array]:
        keyframe = self._keyframe
        with self._read() as txn:
            for i, (_, value) in enumerate(txn.cursor()):
                row = np.frombuffer(self._blosc.decompress2(bytes(value)), np.uint32)
                if i % KEYFRAME_EVERY:
                    row = row ^ keyframe
                else:
                    keyframe = row
                yield row.view(np.float32)[None]
