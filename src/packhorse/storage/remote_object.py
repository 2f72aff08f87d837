"""One object of a file system of fsspec, read in ranges of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.errors import TruncationError
from packhorse.storage.interface import check_region
from packhorse.storage.remote_client import Client, reaching, remote_stamp

__all__ = ["RemoteObject"]

_READ_NBYTES = 1 << 23  # bytes per request; frames are often read in the order in which they lie
# Ranges this close are fetched as one: a request costs more than the bytes between them.
_JOIN_NBYTES = 1 << 18
_GROUP_NBYTES = 1 << 26  # bytes that are requested at the same time, and so in memory twice

_Part = tuple[ByteArray, int]  # memory to fill, and the offset of its bytes in the object


class _Range(NamedTuple):
    """A range of an object, and the parts that get bytes of it."""

    start: int
    stop: int
    parts: Sequence[_Part]


class RemoteObject:
    """An object that is read in ranges. It keeps the last range, if that is short.

    Attributes:
        nbytes: its size.
        stamp: its stamp when it was opened.
    """

    def __init__(self, client: Client, path: str, label: str) -> None:
        self._client, self._path, self._label = client, path, label
        with reaching(label):
            info = client.fs.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{label}: a folder, but a file is needed; name a file in it")
        if info.get("size") is None:
            raise OSError(
                f"{label}: the server does not say how many bytes it has; copy it to a disk first"
            )
        self.stamp = remote_stamp(info)
        self.nbytes = self.stamp.nbytes
        # The range that was read last: its first byte, and its bytes. It is replaced as a whole, so
        # readers need no lock, which a fork might find taken.
        self._kept = (0, b"")
        self._lock = threading.Lock()  # lets threads of `region` wait for each other's read-ahead

    def region(self, offset: int, nbytes: int) -> memoryview:
        """Some of the object's bytes. If they are few, those that follow are read too."""
        check_region(self._label, self.nbytes, offset, nbytes)
        if nbytes > _READ_NBYTES:
            memory = np.empty(nbytes, np.uint8)
            self.fill([(memory, offset)])
            return memoryview(memory).toreadonly()
        with self._lock:
            start, data = self._kept
            if not start <= offset <= offset + nbytes <= start + len(data):
                start, stop = offset, min(self.nbytes, offset + max(nbytes, _READ_NBYTES))
                data = self._read(start, stop)
                self._kept = start, data
        return memoryview(data)[offset - start : offset - start + nbytes]

    def head(self, nbytes: int) -> memoryview:
        """The first bytes, or all if there are fewer. They are kept for later reads."""
        stop = min(nbytes, self.nbytes)
        start, data = self._kept
        if start or len(data) < stop:
            data = self._read(0, stop)
            self._kept = 0, data
        return memoryview(data)[:stop]

    def _read(self, start: int, stop: int) -> bytes:
        with reaching(self._label):
            data: bytes = self._client.fs.cat_file(self._path, start=start, end=stop)
        self._check_length(data, start, stop)
        return data

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Zeros, which `fill` replaces by the object's bytes."""
        check_region(self._label, self.nbytes, offset, nbytes)
        return np.zeros(nbytes, np.uint8)  # pages of it that are never filled cost nothing

    def fill(self, parts: Sequence[_Part]) -> None:
        """Read the bytes of parts of sketches, in few requests, several at a time."""
        missing = [part for part in parts if not self._fill_from_kept(*part)]
        for group in _groups([piece for whole in _join(missing) for piece in _cut(whole)]):
            starts, stops = [piece.start for piece in group], [piece.stop for piece in group]
            with reaching(self._label):
                found = self._client.fs.cat_ranges(
                    [self._path] * len(group), starts, stops, on_error="raise"
                )
            for data, piece in zip(found, group, strict=True):
                self._check_length(data, piece.start, piece.stop)
                _copy(data, piece)

    def _fill_from_kept(self, memory: ByteArray, offset: int) -> bool:
        start, data = self._kept
        if not start <= offset <= offset + memory.size <= start + len(data):
            return False
        memory[:] = np.frombuffer(data, np.uint8)[offset - start :][: memory.size]
        return True

    def _check_length(self, data: bytes, start: int, stop: int) -> None:
        if len(data) != stop - start:
            raise TruncationError(
                f"{self._label}: bytes {start} to {stop} were requested, but {len(data)} bytes came"
            )


def _join(parts: Sequence[_Part]) -> list[_Range]:
    """The ranges that hold all parts; parts that are near each other share one."""
    ranges: list[tuple[int, int, list[_Part]]] = []
    for part in sorted(parts, key=lambda pair: pair[1]):
        offset, stop = part[1], part[1] + part[0].size
        if ranges and offset <= ranges[-1][1] + _JOIN_NBYTES:
            start, end, found = ranges[-1]
            found.append(part)
            ranges[-1] = start, max(end, stop), found
        elif part[0].size:
            ranges.append((offset, stop, [part]))
    return [_Range(*found) for found in ranges]


def _cut(whole: _Range) -> Iterator[_Range]:
    """Pieces of a range that are short enough for one request each."""
    for start in range(whole.start, whole.stop, _READ_NBYTES):
        yield _Range(start, min(start + _READ_NBYTES, whole.stop), whole.parts)


def _groups(pieces: Sequence[_Range]) -> Iterator[list[_Range]]:
    """Pieces that are requested at the same time."""
    group: list[_Range] = []
    nbytes = 0
    for piece in pieces:
        if group and nbytes + piece.stop - piece.start > _GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.stop - piece.start
    if group:
        yield group


def _copy(data: bytes, piece: _Range) -> None:
    source = np.frombuffer(data, np.uint8)
    for memory, offset in piece.parts:
        low, high = max(offset, piece.start), min(offset + memory.size, piece.stop)
        if low < high:
            memory[low - offset : high - offset] = source[low - piece.start : high - piece.start]
