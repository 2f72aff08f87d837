"""Opens files for reading without ever waiting: only regular files are opened.

Opening a pipe waits for a writer, and opening a device may start it. So the kind of a file is
checked before the file is opened, and again when it is open, because a pipe may have replaced it in
the meantime. The file is opened in a mode that never waits.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader

from packhorse.storage.system import NO_WAIT, OPEN_FLAGS

__all__ = ["LOST", "kind_of", "naming", "open_regular"]

# The message for a mapped file when `_core.FileMapper.has_lost` is true.
LOST = "a part of it could not be read: it was cut short after it was opened, or its disk failed"

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading, without waiting.

    Raises:
        ValueError: the path leads to a pipe, a socket or a device.
        IsADirectoryError: it leads to a folder.
        OSError: the file cannot be opened.
    """
    return open(path, "rb", opener=_open)


def _open(path: str, flags: int) -> int:
    _refuse(path, os.stat(path))
    descriptor = os.open(path, flags | OPEN_FLAGS | NO_WAIT)
    try:
        _refuse(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    name, kind = os.fsdecode(path), kind_of(status)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{name}: a folder, but a file is needed; name a file in it")
    raise ValueError(f"{name}: not a regular file, but {kind}; name a model file")


def kind_of(status: os.stat_result) -> str:
    """The kind of a file, in words."""
    return next((words for test, words in _KINDS if test(status.st_mode)), "a file")


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make errors of the system name a file, for calls that get only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise
