"""Calls that only some systems have, each with its twin for the others.

Linux and macOS have those of POSIX. Windows has neither `flock` nor reading and writing at an
offset, and it opens files as text unless it is told otherwise.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["NO_WAIT", "OPEN_FLAGS", "lock", "read_at", "rename_to_free_name", "unlock", "write_at"]

# For os.open: child processes do not inherit the descriptor, and bytes stay as they are.
OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a pipe does not wait for its other end.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
# Windows lets nobody else read a byte that is locked, so this one is behind all content.
_LOCKED_BYTE = 1 << 30


def lock(descriptor: int) -> None:
    """Lock a file as a whole, against other processes that lock it.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    if sys.platform == "win32":
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release the lock of a file."""
    if sys.platform == "win32":
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read at most `nbytes` bytes from an offset. On Windows, this moves the file's position."""
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, nbytes)
    else:
        return os.pread(descriptor, nbytes, offset)


def write_at(descriptor: int, data: Buffer, offset: int) -> int:
    """Write bytes at an offset. On Windows, this moves the file's position.

    Returns:
        How many bytes were written.
    """
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)
    else:
        return os.pwrite(descriptor, data, offset)


def rename_to_free_name(source: Path, destination: Path) -> bool:
    """Rename a file unless the name is taken, where a plain rename does that: on Windows.

    Returns:
        Whether it was done.
    """
    if sys.platform == "win32":
        os.rename(source, destination)
        return True
    else:
        return False
