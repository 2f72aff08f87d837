"""Reads a source file at a URL: its header in one or two requests, its parts ahead of their use.

A file that is read from front to back is fetched in blocks of `_BLOCK_NBYTES`. While callers use
one block, threads fetch the next `_N_AHEAD`. A few blocks stay in memory, because the tensors of
one batch (`threads.py`) are not asked for in order. A part that is longer than a block is put
together in memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.errors import PackhorseError
from packhorse.layout import LENGTH_NBYTES
from packhorse.storage.interface import check_region
from packhorse.storage.remote_object import RemoteObject
from packhorse.storage.remote_path import RemotePath
from packhorse.storage.safetensors_header import FileHeader, declared_nbytes, parse_header
from packhorse.storage.source_file import check_unchanged

__all__ = ["Blocks", "RemoteSource", "open_remote_source", "read_remote_header"]

# Read first: the whole header of most files. A shard of a language model has some 50 kB.
_HEAD_NBYTES = 1 << 17
_BLOCK_NBYTES = 1 << 24
_N_AHEAD = 2
_N_KEPT = 4


def read_remote_header(file: RemoteObject, label: str) -> FileHeader:
    """The header of a safetensors file, in one request, or in two if it is long.

    Args:
        file: the open file.
        label: the name of the file in messages.

    Raises:
        CorruptionError, CompatibilityError: as for `read_header`.
    """
    start = bytes(file.head(_HEAD_NBYTES))
    stop = LENGTH_NBYTES + declared_nbytes(start, file.nbytes, label)
    text = bytearray(start[LENGTH_NBYTES:stop])
    if stop > len(start):
        rest = file.sketch(len(start), stop - len(start))
        file.fill([(rest, len(start))])
        text += rest.tobytes()
    return parse_header(bytes(text), data_nbytes=file.nbytes - stop, label=label)


class RemoteSource:
    """A file at a URL that is open for reading; the same as `SourceFile`."""

    is_private = True

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self._file = path.open()
        self._blocks = Blocks(self._file)

    def header(self) -> FileHeader:
        """The file's header."""
        return read_remote_header(self._file, str(self.path))

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A part of the file. The parts after it are read ahead."""
        check_region(str(self.path), self._file.nbytes, offset, nbytes)
        return self._blocks.read(offset, nbytes) if nbytes else memoryview(b"")

    def bytes_at(self, offsets: Sequence[int]) -> bytes:
        """Single bytes of the file."""
        sketches = [self.sketch(offset, 1) for offset in offsets]
        self.fill(list(zip(sketches, offsets, strict=True)))
        return b"".join([sketch.tobytes() for sketch in sketches])

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Zeros, which `fill` replaces by bytes of the file."""
        return self._file.sketch(offset, nbytes)

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read the bytes of parts of sketches."""
        self._file.fill(parts)

    def now(self) -> object:
        """Always the same: bytes that were read stay as they are."""
        return self._file.stamp

    def check(self) -> None:
        """Check that everything that was read belongs to one version of the file."""
        check_unchanged(self.path, self._file.stamp)

    def close(self) -> None:
        """Wait for requests that are under way, and release what was read."""
        self._blocks.close()


@contextmanager
def open_remote_source(path: RemotePath) -> Iterator[RemoteSource]:
    """`open_source` for a file at a URL."""
    source = RemoteSource(path)
    try:
        yield source
    except (PackhorseError, ValueError, RuntimeError, FileNotFoundError):
        source.check()
        raise
    finally:
        source.close()


class Blocks:
    """The blocks of a file that were asked for last, and those that will probably be next."""

    def __init__(self, file: RemoteObject) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._found: dict[int, Future[ByteArray]] = {}
        self._last = -1
        self._pool: ThreadPoolExecutor | None = None

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes of the file: a view of a block, or a copy from several."""
        first, last = offset // _BLOCK_NBYTES, (offset + nbytes - 1) // _BLOCK_NBYTES
        if first == last:
            return memoryview(self._piece(first, offset, nbytes)).toreadonly()
        whole, done = np.empty(nbytes, np.uint8), 0
        for number in range(first, last + 1):
            piece = self._piece(number, offset + done, nbytes - done)
            whole[done : done + piece.size] = piece
            done += piece.size
        return memoryview(whole).toreadonly()

    def read_all(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Parts of the file, as `read` gives them, in one call for many short ones.

        Args:
            places: the offset and length of each part, in the order in which these lie.
        """
        parts = []
        number, block = -1, memoryview(b"")
        for offset, nbytes in places:
            first, start = divmod(offset, _BLOCK_NBYTES)
            if start + nbytes > _BLOCK_NBYTES:
                parts.append(self.read(offset, nbytes))
                continue
            if first != number:
                number, block = first, memoryview(self._block(first)).toreadonly()
            parts.append(block[start : start + nbytes])
        return parts

    def _piece(self, number: int, offset: int, nbytes: int) -> ByteArray:
        start = offset - number * _BLOCK_NBYTES
        return self._block(number)[start : start + nbytes]

    def _block(self, number: int) -> ByteArray:
        with self._lock:
            is_next = self._last <= number <= self._last + 1
            self._last = number
            ahead = _N_AHEAD if is_next else 0
            wanted = range(number, min(number + ahead + 1, -(-self._file.nbytes // _BLOCK_NBYTES)))
            for i in wanted:
                if i not in self._found:
                    self._found[i] = self._fetch_later(i)
            found = self._found[number]
            far = sorted(self._found, key=lambda i: (i in wanted, i))
            for i in far[: max(0, len(far) - _N_KEPT - _N_AHEAD)]:
                del self._found[i]
        return found.result()

    def _fetch_later(self, number: int) -> Future[ByteArray]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_N_AHEAD + 1)
        return self._pool.submit(self._fetch, number)

    def _fetch(self, number: int) -> ByteArray:
        start = number * _BLOCK_NBYTES
        block = np.empty(min(_BLOCK_NBYTES, self._file.nbytes - start), np.uint8)
        self._file.fill([(block, start)])
        return block

    def close(self) -> None:
        """Wait for requests that are under way, and release what was read."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._found.clear()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
