"""Renames that Python does not have: one that replaces nothing, and one that exchanges.

Whether a name is free is asked before work begins, and may have changed when the work is done. So
the last step itself must not replace: Linux has `renameat2` for that. Where the system or its file
system does not know it, a hard link does the same for files; where there are no links either, an
empty file is made first, which claims the name.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["exchange", "rename_new"]

_HERE = -100  # AT_FDCWD: paths are relative to the working folder
_NOREPLACE, _EXCHANGE = 1, 2
# The C library, the system, the file system, or a sandbox does not know the call or its flags. What
# is wrong besides, the other ways will tell.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
_NO_LINKS = (*_UNKNOWN, errno.EACCES, errno.EMLINK)


def rename_new(source: Path, destination: Path) -> None:
    """Give a file another name that nothing has.

    Raises:
        FileExistsError: something has it; the file keeps its own.
        OSError: the system refuses.
    """
    if _renameat2(source, destination, _NOREPLACE):
        return
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _claim(source, destination)
    else:
        os.unlink(source)


def exchange(first: Path, second: Path) -> bool:
    """Let two files or folders have each other's name, in one step.

    Returns:
        Whether it was done; False where the system cannot.
    """
    return _renameat2(first, second, _EXCHANGE)


def _claim(source: Path, destination: Path) -> None:
    os.close(os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        os.replace(source, destination)
    except BaseException:
        os.unlink(destination)
        raise


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    call = _system_call()
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(destination), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(destination))


@cache
def _system_call() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    place = ctypes.c_int, ctypes.c_char_p
    call.argtypes = (*place, *place, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
