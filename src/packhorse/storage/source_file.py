"""Reads a source file of this machine, and notices if the file changes in the meantime.

`Source` is what the disk hop needs of a file; `remote_source.py` has the same for a file at a URL.

If a file changes while it is read, the bytes that were read may mix two versions of it. So a stamp
is taken before the file is read, and compared before the output is complete. The stamp consists of
the identity of the file that the name leads to, the file's size, and the times of its last changes.
If the stamp differs, the work fails. Two changes go unnoticed: writes through a shared mapping to
pages that were written to before, because they change no time, and writes within one tick of the
file system's clock, some milliseconds. Frames hash the bytes that they hold, so even then
everything that was packed can be unpacked.

The file is mapped, because copying would cost packing a third of its speed. A process may have some
65,000 mappings, so small regions are cut from cells of 16 MiB, each mapped as one. If a file is cut
short while it is mapped, the core reads zeros and `check` fails (csrc/common/mapping.hpp).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.errors import PackhorseError, TruncationError
from packhorse.storage import interface
from packhorse.storage.locations import Place
from packhorse.storage.opening import LOST, open_regular
from packhorse.storage.safetensors_header import FileHeader, read_file_header

__all__ = [
    "AnyStamp", "Source", "SourceFile", "Stamp", "check_unchanged", "difference", "open_local",
    "read_ahead", "refuse_change", "stamp_of",
]  # fmt: skip

# Larger regions are mapped by themselves; a batch of tensors (`threads.py`) has at most eight.
_SMALL_NBYTES = 1 << 22
_CELL_NBYTES = 1 << 24
_N_CELLS = 3  # of all files in total: a model may have hundreds of files
# No more of a tensor is read ahead, lest a file push itself out of memory.
_READ_AHEAD_NBYTES = 1 << 29


class Stamp(NamedTuple):
    """Values that stay the same as long as a file is not written to or replaced."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """The stamp of a file or a folder."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def difference(self, now: Stamp) -> str:
        """What happened between this stamp and a later one, in words; empty if nothing did."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "it was replaced by another file"
        if self.nbytes != now.nbytes:
            return f"its size went from {self.nbytes} to {now.nbytes} bytes"
        if self.modified_ns != now.modified_ns:
            return "it was written to"
        return "" if self == now else "its content, name, links or permissions were changed"


AnyStamp = Stamp | interface.Stamp


def stamp_of(place: Place) -> AnyStamp:
    """The stamp of a file or a folder of this machine, or of a file at a URL."""
    return Stamp.of(place.stat()) if isinstance(place, Path) else place.stamp()


def difference(before: AnyStamp, now: AnyStamp) -> str:
    """What happened between two stamps of one file, in words; empty if nothing did."""
    return before.difference(now)  # type: ignore[arg-type]


def read_ahead(tensors: Sequence[memoryview]) -> None:
    """Read tensors of a mapped file that are not in memory, as far as 512 MiB of each."""
    _core.read_now([view[:_READ_AHEAD_NBYTES] for view in tensors])


def check_unchanged(path: Place, before: AnyStamp) -> None:
    """Compare a file with its earlier stamp.

    Raises:
        OSError: it was changed, replaced or removed.
    """
    try:
        now = stamp_of(path)
    except (FileNotFoundError, NotADirectoryError):
        refuse_change(path, "it was moved or removed")
    else:
        refuse_change(path, difference(before, now))


def refuse_change(path: Place, fault: str) -> None:
    """Report what happened to a file that was being read; nothing, if `fault` is empty.

    Raises:
        OSError: `fault` is not empty.
    """
    if fault:
        raise OSError(
            f"{path}: changed while it was being read ({fault}), so nothing was written; try again "
            "when nothing writes to it, or use a copy"
        )


class Source(Protocol):
    """A file that is open for reading, until the end of a block."""

    @property
    def path(self) -> Place:
        """Its place."""

    @property
    def is_private(self) -> bool:
        """Whether the bytes that `map` returns cannot change any more."""

    def header(self) -> FileHeader:
        """The file's header, read as that of a safetensors file.

        Raises:
            CorruptionError, CompatibilityError: it is not a safetensors file, is damaged, or is too
                new.
        """

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A part of the file, read-only. Parts that are asked for in order are read ahead.

        Raises:
            TruncationError: the file has been cut short since its headers were read.
        """

    def bytes_at(self, offsets: Sequence[int]) -> bytes:
        """Single bytes of the file, which a file at a URL reads in few requests.

        Raises:
            TruncationError: as for `map`.
        """

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Like `map`, but the bytes of a file at a URL are zeros until `fill` reads them."""

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read the bytes of parts of sketches, in few requests. A part is a piece of a sketch's
        memory, with the offset of its bytes in the file."""

    def now(self) -> object:
        """A value that changes when bytes that were read may no longer be those of the file."""

    def check(self) -> None:
        """Check that everything that was read belongs to one version of the file.

        Raises:
            OSError: the file was changed, replaced or removed since it was opened.
        """


class SourceFile:
    """A file of this machine that is open for reading.

    Attributes:
        path: its path.
        stamp: its stamp when it was opened.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._mapper = _core.FileMapper()
        self.path = path
        self.stamp = Stamp.of(os.fstat(file.fileno()))
        if hasattr(os, "posix_fadvise"):  # the system then reads farther ahead
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    is_private = False

    def header(self) -> FileHeader:
        """The file's header, read as that of a safetensors file."""
        self._file.seek(0)
        return read_file_header(self._file, str(self.path))

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A part of the file, read-only, without a copy.

        Args:
            offset: the first byte.
            nbytes: the number of bytes.

        Raises:
            TruncationError: the file has been cut short since its headers were read.
        """
        return self.map_all([(offset, nbytes)])[0]

    def map_all(self, places: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Parts of the file, as `map` returns them, with one question to the system for all.

        Args:
            places: the first byte and the number of bytes of each.

        Raises:
            TruncationError: as for `map`.
        """
        end = min(os.fstat(self._file.fileno()).st_size, self.stamp.nbytes)
        return [self._part(offset, nbytes, end) for offset, nbytes in places]

    def _part(self, offset: int, nbytes: int, end: int) -> memoryview:
        if offset + nbytes > end:
            raise TruncationError(
                f"cut short while it was being read: bytes {offset} to {offset + nbytes} are "
                f"needed, but it has {end} bytes; try again when nothing writes to it"
            )
        if nbytes > _SMALL_NBYTES:
            return self._map(offset, nbytes)
        if nbytes == 0:  # the system cannot map an empty region
            return memoryview(b"")
        number = offset // _CELL_NBYTES
        start = offset - number * _CELL_NBYTES
        return self._cell(number)[start : start + nbytes]

    def map_for_samples(self, offset: int, nbytes: int) -> memoryview:
        """A long part of the file, as `map` returns it, of which the system reads single pages, as
        they are used."""
        view = self.map(offset, nbytes)
        _core.will_sample(view)
        return view

    def bytes_at(self, offsets: Sequence[int]) -> bytes:
        """Single bytes of the file."""
        return bytes([view[0] for view in self.map_all((offset, 1) for offset in offsets)])

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """The same as `map`."""
        return np.frombuffer(self.map(offset, nbytes), np.uint8)

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Nothing: the bytes of a mapped file are there."""

    def _cell(self, number: int) -> memoryview:
        global _cells
        for owner, known, cell in _cells:
            if owner is self and known == number:
                return cell
        start = number * _CELL_NBYTES
        cell = self._map(start, min(_CELL_NBYTES + _SMALL_NBYTES, self.stamp.nbytes - start))
        _cells = (*_cells[1 - _N_CELLS :], (self, number, cell))
        return cell

    def close(self) -> None:
        """Release the mappings, except those that callers still use."""
        global _cells
        _cells = tuple(item for item in _cells if item[0] is not self)

    def _map(self, offset: int, nbytes: int) -> memoryview:
        """Map a region; the mapping ends with the last view of it."""
        return self._mapper.map(self._file.fileno(), offset, nbytes)

    def now(self) -> Stamp:
        """The current stamp of the file that was opened."""
        return Stamp.of(os.fstat(self._file.fileno()))

    def check(self) -> None:
        """Check that everything that was read belongs to one version of the file.

        Raises:
            OSError: the file was changed, replaced or removed since it was opened.
        """
        check_unchanged(self.path, self.stamp)
        if self._mapper.has_lost:
            raise OSError(f"{self.path}: {LOST}; try again when it is whole")


# The cells that were mapped last, of any file. Threads replace the tuple as a whole. There is no
# lock, because a fork might find it taken; so a closed file's cell may occasionally stay until
# three others have followed. This is not an attribute of the class: ending a mapping releases the
# GIL, and while a class attribute is replaced, CPython 3.11 gives other threads the old value from
# its cache, although that value is freed already.
_cells: tuple[tuple[SourceFile, int, memoryview], ...] = ()


@contextmanager
def open_local(path: Path) -> Iterator[SourceFile]:
    """Open a file of this machine for the time of the block. If the block fails because the file
    changed, the error says so.

    Raises:
        OSError: the file cannot be opened or read, or it changed.
        ValueError: it is not a regular file.
    """
    with open_regular(path) as file:
        source = SourceFile(file, path)
        try:
            yield source
        except (PackhorseError, ValueError, RuntimeError):
            source.check()
            raise
        except OSError as error:
            if error.errno == errno.EFAULT:  # a system call read a part that was cut off
                source.check()
            raise
        finally:
            source.close()
