"""The bytes of a file that is open for lazy reading: mapped, in memory, or at a URL.

An object at a URL can be replaced while it is open. So its stamp is compared after bytes were read
that nothing else checks, and after an error. A mapped file stays what it was, but a part of it can
get lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.errors import ChangedError, TruncationError
from packhorse.layout import FIXED_HEADER_NBYTES
from packhorse.storage.locations import Place
from packhorse.storage.opening import LOST, open_regular
from packhorse.storage.remote_object import RemoteObject
from packhorse.storage.remote_path import RemotePath
from packhorse.storage.remote_source import Blocks, read_remote_header
from packhorse.storage.safetensors_header import FileHeader, read_file_header

__all__ = ["LazyBytes", "MappedBytes", "RemoteBytes", "open_bytes"]

_N_PROBES = 16  # places of a file; each takes a microsecond
_N_TOLD = 256  # tensors that the file's identity covers: reading a million would take too long


class LazyBytes(Protocol):
    """The bytes of an open file."""

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read bytes into memory, in few requests. A part is memory, with the offset of its bytes
        in the file."""

    def settle(self, *, has_failed: bool) -> None:
        """Check, after bytes were used, that they belong to the file that was opened.

        Raises:
            TruncationError: a part of a mapped file is lost.
            ChangedError: an object at a URL was replaced.
        """

    def identity(self, header: FileHeader) -> tuple[int, str]:
        """The file's size, and a hash that other files do not have.

        Args:
            header: the header of the file itself.
        """


def open_bytes(place: Place) -> tuple[FileHeader, MappedBytes | RemoteBytes]:
    """Open a safetensors file on this machine or at a URL, and read its header.

    Raises:
        CorruptionError, CompatibilityError: the header is bad or too new.
        OSError: the file cannot be opened or read.
    """
    label = str(place)
    if not isinstance(place, Path):
        file = place.open()
        return read_remote_header(file, label), RemoteBytes(place, file)
    with open_regular(label) as opened:
        header = read_file_header(opened, label)
        mapper = _core.FileMapper()
        view = mapper.map(opened.fileno(), 0, header.file_nbytes)
        is_cached = _is_cached(opened.fileno(), header.file_nbytes)
    return header, MappedBytes(view, label, mapper, is_cached=is_cached)


def _is_cached(descriptor: int, nbytes: int) -> bool:
    """Whether the system has a file in its cache, as far as some places in it show. True if it does
    not tell: only Linux does, and not of every file system."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    try:
        for i in range(_N_PROBES):
            os.preadv(descriptor, [bytearray(1)], i * nbytes // _N_PROBES, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class MappedBytes:
    """The bytes of a file that is mapped or in memory.

    Attributes:
        data: the bytes.
        is_cached: whether they were in memory when this was made, so that none need be read ahead.
    """

    def __init__(
        self,
        data: memoryview,
        label: str,
        mapper: _core.FileMapper | None = None,
        *,
        is_cached: bool = True,
    ) -> None:
        """Args:
        data: the bytes of the file.
        label: the name of the file in messages.
        mapper: has mapped `data`; None if `data` is memory of the caller.
        is_cached: False for a mapped file that has to be read from a disk.
        """
        self.data = data
        self.is_cached = is_cached
        self._label = label
        self._mapper = mapper

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Copy bytes."""
        for memory, offset in parts:
            memory[:] = np.frombuffer(self.data[offset : offset + memory.size], np.uint8)

    def settle(self, *, has_failed: bool) -> None:
        """Check that no part of the file is lost."""
        if self._mapper is not None and self._mapper.has_lost:
            raise TruncationError(f"{self._label}: {LOST}; open it again when it is whole")

    def identity(self, header: FileHeader) -> tuple[int, str]:
        """The size, and a hash of the header and of the first bytes of up to `_N_TOLD` tensors. In
        a packed file, these are the headers of frames, which name their content."""
        return header.file_nbytes, _hash([header.prefix(), *self._starts(header)])

    def _starts(self, header: FileHeader) -> Iterable[memoryview]:
        n = len(header.entries)
        chosen = {i * (n - 1) // (_N_TOLD - 1) for i in range(_N_TOLD)} if n else set()
        for entry in (header.entries[i] for i in sorted(chosen)):
            start = header.data_offset + entry.start
            yield self.data[start : start + min(FIXED_HEADER_NBYTES, entry.nbytes)]


class RemoteBytes:
    """The bytes of a file at a URL."""

    def __init__(self, path: RemotePath, file: RemoteObject) -> None:
        self._path = path
        self._file = file
        # How often bytes were read that nothing else checks, and how often they had been when the
        # stamp was compared.
        self._n_doubted = 0
        self._n_checked = 0

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Zeros, for bytes that `fill` will read."""
        return self._file.sketch(offset, nbytes)

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read bytes; `settle` will then compare the stamp."""
        self._file.fill(parts)
        self.doubt()

    def fill_checked(self, memory: ByteArray, offset: int) -> None:
        """Read bytes whose checksums are known."""
        self._file.fill([(memory, offset)])

    def doubt(self) -> None:
        """Make the next `settle` compare the stamp."""
        self._n_doubted += 1

    @contextmanager
    def blocks(self) -> Iterator[Blocks]:
        """The file, read from front to back for the time of the block."""
        blocks = Blocks(self._file)
        try:
            yield blocks
        finally:
            blocks.close()

    def settle(self, *, has_failed: bool) -> None:
        """Compare the stamp of the object, if that is needed."""
        n_doubted = self._n_doubted
        if not has_failed and n_doubted == self._n_checked:
            return
        try:
            fault = self._file.stamp.difference(self._path.stamp())
        except FileNotFoundError:
            fault = "it was removed"
        if fault:
            raise ChangedError(
                f"{self._path}: changed since it was opened ({fault}); open it again"
            )
        self._n_checked = n_doubted

    def identity(self, header: FileHeader) -> tuple[int, str]:
        """The size, and a hash of the header and of the object's stamp."""
        changed = self._file.stamp.changed.to_bytes(8, "little")
        return header.file_nbytes, _hash([header.prefix(), changed])


def _hash(parts: Sequence[bytes | memoryview]) -> str:
    return content_hash(np.frombuffer(b"".join(parts), np.uint8), threads=1).hex()
