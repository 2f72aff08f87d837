"""A file that is being written, and soon flushed: its bytes go to the disk while others are made.

Otherwise the system keeps most of them in memory until the end, when everybody waits for the disk.
There are two ways:

- Short pieces go through the system's cache, and the system is told at once to write them to
  the disk. It is also told to forget what it has written, except the last `_CACHED_NBYTES`. Memory
  that is used again costs less than fresh memory, which a virtual machine may have to get from its
  host first: on such a machine that took longer than writing to the disk.
- Long pieces go to the disk without a copy (`O_DIRECT`), if their place in memory allows it: their
  address and their offset in the file must agree (`placed`). Where there is no such way, they go
  through the cache, too.

Both ways mix in one file, because each page is written by one of them. On systems other than Linux
the calls are missing or do less, and `sync` has more to wait for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.late_import import import_late
from packhorse.storage.system import write_at

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PLACING_NBYTES", "OutputFile", "naming_output", "placed"]

# Room that `placed` may need in addition. It is a multiple of the blocks and pages of usual disks
# and file systems; where it is not, the system refuses, and the bytes go through the cache.
PLACING_NBYTES = 1 << 12
# Bytes per direct call; few enough for a quick reaction to Ctrl-C while a huge tensor is written.
_WRITE_NBYTES = 1 << 24
# Pieces per system call; POSIX allows 16 at least, Linux and macOS 1024.
_N_PIECES = 1024 if hasattr(os, "posix_fadvise") else 16
# A shorter piece goes through the cache: a call that waits for the disk costs as much as a copy.
_DIRECT_NBYTES = 1 << 20
# The system is told to write when so many bytes are new. A call through the cache takes no more.
_NEW_NBYTES = 1 << 22
_CACHED_NBYTES = 1 << 26
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EFAULT)


def placed(memory: ByteArray, offset: int) -> ByteArray:
    """The part of some memory that `OutputFile.write_all` can write to a file without a copy.

    Args:
        memory: memory with `PLACING_NBYTES` bytes to spare.
        offset: where the bytes will lie in the file.

    Returns:
        The memory, without a few bytes at its beginning.
    """
    return memory[(offset - memory.ctypes.data) % PLACING_NBYTES :]


class OutputFile:
    """A file that is being written: appends bytes, and overwrites bytes that were appended.

    Attributes:
        nbytes: the number of bytes appended so far.
    """

    def __init__(
        self, descriptor: int, destination: Path | str, *, will_sync: bool = False
    ) -> None:
        """
        Args:
            descriptor: the open file.
            destination: what messages call the file.
            will_sync: whether `sync` will be called at the end. Otherwise bytes only go to the
                system's cache, as usual.
        """
        self._descriptor = descriptor
        self._destination = destination
        self._is_direct = will_sync and hasattr(os, "O_DIRECT")
        self._is_hinting = will_sync and hasattr(os, "posix_fadvise")
        self._hinted = 0  # the system has been told to write the bytes before this one
        self.nbytes = 0

    def write(self, data: Buffer) -> None:
        """Append all of `data`.

        Raises:
            OSError: the bytes cannot be written (a full disk, a quota); it names the destination.
        """
        self.write_all([data])

    def write_all(self, pieces: Iterable[Buffer]) -> None:
        """Append several pieces, in few system calls.

        Raises:
            OSError: as for `write`.
        """
        short: list[memoryview] = []
        for piece in pieces:
            view = memoryview(piece).cast("B")
            if not self._is_direct or view.nbytes < _DIRECT_NBYTES:
                short.append(view)
                continue
            self._append(short)
            short = []
            done = self._append_direct(view)
            self._append([view[done:]])
        self._append(short)

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite bytes that were appended before."""
        with naming_output(self._destination):
            self._write_at(offset, [memoryview(data).cast("B")])

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        with naming_output(self._destination):
            os.fsync(self._descriptor)

    def _append(self, views: Iterable[memoryview]) -> None:
        """Append pieces through the cache."""
        with naming_output(self._destination):
            for group in _groups(views):
                self.nbytes += self._write_at(self.nbytes, group)
                self._hint(_NEW_NBYTES)

    def _write_at(self, offset: int, views: list[memoryview]) -> int:
        """Write views through the cache, and return the number of bytes."""
        start = offset
        while views:
            if hasattr(os, "pwritev"):
                done = os.pwritev(self._descriptor, views, offset)
            else:
                done = write_at(self._descriptor, views[0], offset)
            offset += done
            while views and done >= views[0].nbytes:
                done -= views.pop(0).nbytes
            if views:
                views[0] = views[0][done:]
        return offset - start

    def _append_direct(self, view: memoryview) -> int:
        """Append the beginning of a long piece: without a copy, except its first bytes up to a
        page. Return how many bytes were appended."""
        head = -self.nbytes % PLACING_NBYTES
        address = np.frombuffer(view, np.uint8).ctypes.data
        if (address + head) % PLACING_NBYTES:
            return 0
        self._append([view[:head]])
        self._hint(1)
        done, end = head, view.nbytes - (view.nbytes - head) % PLACING_NBYTES
        with naming_output(self._destination), self._direct():
            while done < end and self._is_direct:
                nbytes = self._write_direct(view[done : min(done + _WRITE_NBYTES, end)])
                done += nbytes
                self.nbytes += nbytes
        self._hinted = self.nbytes
        return done

    def _write_direct(self, view: memoryview) -> int:
        """Write some pages, and return how many bytes; none, if there is no such way."""
        try:
            done = os.pwrite(self._descriptor, view, self.nbytes)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            done = 0
        # What is left of a page can only go through the cache.
        self._is_direct = done > 0 and done % PLACING_NBYTES == 0
        return done

    @contextmanager
    def _direct(self) -> Iterator[None]:
        """Make calls bypass the cache for the time of the block."""
        fcntl: Any = import_late("fcntl")  # not every system has it
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._is_direct = False
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)

    def _hint(self, min_nbytes: int) -> None:
        """Tell the system to write what is new, and to forget what is old, if there is enough."""
        if not self._is_hinting or self.nbytes - self._hinted < min_nbytes:
            return
        start, self._hinted = self._hinted, self.nbytes
        self._done_with(start, self.nbytes)
        self._done_with(start - _CACHED_NBYTES, self.nbytes - _CACHED_NBYTES)

    def _done_with(self, start: int, end: int) -> None:
        """Tell the system that some bytes are not needed any more. Linux then starts to write them
        to the disk, and forgets those that are there already."""
        if end > 0:
            start = max(start, 0)
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming_output(destination: Path | str) -> Iterator[None]:
    """Make the system's errors name the destination instead of a temporary file or no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # otherwise the message is ours, and names it
            error.filename, error.filename2 = os.fspath(destination), None
        raise


def _groups(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Lists of views that one system call writes, so short that the disk does not wait for work."""
    group: list[memoryview] = []
    room = _NEW_NBYTES
    for view in views:
        while view.nbytes:
            if not room or len(group) == _N_PIECES:
                yield group
                group, room = [], _NEW_NBYTES
            group.append(view[:room])
            view = view[room:]
            room -= group[-1].nbytes
    if group:
        yield group
