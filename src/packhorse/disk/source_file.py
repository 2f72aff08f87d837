"""A file that is read as one: if it changes meanwhile, what was read belongs to no state of it.

A source is looked at before it is read and once more before anything is made of it: its size, the
times of its last changes, and whether its name still leads to it. If any of that moved, the work is
refused, whatever came of it. Two changes escape: writes through a shared mapping to pages that have
been written to already, which move no time, and those within one tick of the file system's clock,
some milliseconds. Frames hash what they hold, so even then all that was packed can be unpacked.

Bytes are mapped, as a copy of them would cost packing a third of its speed. A process may have some
65,000 mappings, so small regions are cut from cells of 16 MiB that are mapped as one. Where a file
is cut short while it is mapped, the core reads zeros; `check` tells (csrc/common/mapping.hpp).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from packhorse import _core
from packhorse.disk.safetensors_header import FileHeader, read_file_header
from packhorse.errors import PackhorseError, TruncationError
from packhorse.storage.opening import LOST, open_regular

__all__ = ["SourceFile", "Stamp", "check_unchanged", "open_source"]

# Larger regions are mapped by themselves. A batch of tensors (`threads.py`) has eight of them.
_SMALL_NBYTES = 1 << 22
_CELL_NBYTES = 1 << 24
_N_CELLS = 3  # of all files together: a model may have hundreds


class Stamp(NamedTuple):
    """What stays the same as long as nobody writes to a file, or puts another in its place."""

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
        """What happened since, in words; empty if nothing did."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "another file took its place"
        if self.nbytes != now.nbytes:
            return f"its size went from {self.nbytes} to {now.nbytes} bytes"
        if self.modified_ns != now.modified_ns:
            return "it was written to"
        return "" if self == now else "its content, name, links or permissions were changed"


def check_unchanged(path: Path, before: Stamp) -> None:
    """Compare a file with what it was.

    Raises:
        OSError: it was changed, replaced or removed.
    """
    try:
        fault = before.difference(Stamp.of(path.stat()))
    except (FileNotFoundError, NotADirectoryError):
        fault = "it was moved or removed"
    if fault:
        raise OSError(
            f"{path}: changed while it was being read ({fault}), so nothing was written; try again "
            "when nobody writes to it, or use a copy"
        )


class SourceFile:
    """A file that is open for reading, from the time when it was opened.

    Attributes:
        path: where it is.
        stamp: what it was then.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._mapper = _core.FileMapper()
        self.path = path
        self.stamp = Stamp.of(os.fstat(file.fileno()))

    def header(self) -> FileHeader:
        """Its header, as that of a safetensors file.

        Raises:
            CorruptionError, CompatibilityError: it is none, or of a newer kind.
        """
        self._file.seek(0)
        return read_file_header(self._file, str(self.path))

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of a few bytes; fewer at the end of the file."""
        return os.pread(self._file.fileno(), nbytes, offset)

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A part of the file, read-only, without a copy.

        Args:
            offset: first byte.
            nbytes: how many.

        Raises:
            TruncationError: the file has been cut short since its headers were read.
        """
        end = min(os.fstat(self._file.fileno()).st_size, self.stamp.nbytes)
        if offset + nbytes > end:
            raise TruncationError(
                f"cut short while it was read: bytes {offset} to {offset + nbytes} are needed, and "
                f"it has {end}; try again when nobody writes to it"
            )
        if nbytes > _SMALL_NBYTES:
            return self._map(offset, nbytes)
        if nbytes == 0:  # the system maps no empty region
            return memoryview(b"")
        number = offset // _CELL_NBYTES
        start = offset - number * _CELL_NBYTES
        return self._cell(number)[start : start + nbytes]

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
        """Let go of what is mapped, but for what was handed out."""
        global _cells
        _cells = tuple(item for item in _cells if item[0] is not self)

    def _map(self, offset: int, nbytes: int) -> memoryview:
        """The mapping ends with the last view of it."""
        return self._mapper.map(self._file.fileno(), offset, nbytes)

    def now(self) -> Stamp:
        """What the file that was opened is now."""
        return Stamp.of(os.fstat(self._file.fileno()))

    def check(self) -> None:
        """See that all that was read belongs together.

        Raises:
            OSError: the file was changed, replaced or removed since it was opened.
        """
        check_unchanged(self.path, self.stamp)
        if self._mapper.has_lost:
            raise OSError(f"{self.path}: {LOST}; try again when it is whole")


# The cells that were mapped last, of any file. Replaced as a whole, for threads; without a lock, as
# a fork might find that taken, so one may now and then stay until three others have come. It is no
# attribute of the class: the end of a mapping lets go of Python's lock, and while such an attribute
# is replaced, Python's cache of them gives its old value, though gone, to other threads (3.11).
_cells: tuple[tuple[SourceFile, int, memoryview], ...] = ()


@contextmanager
def open_source(path: Path) -> Iterator[SourceFile]:
    """Open a file for the time of the block. What fails there because the file changed says so.

    Whoever makes anything of it calls `check` before that is there for others.

    Raises:
        OSError: the system refuses, or the file changed.
        ValueError: it is no regular file.
    """
    with open_regular(path) as file:
        source = SourceFile(file, path)
        try:
            yield source
        except (PackhorseError, ValueError, RuntimeError):
            source.check()
            raise
        except OSError as error:
            if error.errno == errno.EFAULT:  # the system came to a part that was cut off
                source.check()
            raise
        finally:
            source.close()
