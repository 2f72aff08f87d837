"""Two kinds of rename that Python lacks: one that never replaces, and one that exchanges.

A name may be free when the work begins, and taken when the work is done. So the last step itself
must not replace anything; Linux has `renameat2` for that. If the system or the file system does not
support it, a hard link does the same for files. If there are no hard links either, an empty file is
created first, which claims the name.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from packhorse.storage.system import rename_to_free_name

__all__ = ["exchange", "rename_new"]

_HERE = -100  # AT_FDCWD: paths are relative to the working folder
_NOREPLACE, _EXCHANGE = 1, 2
# Errors if the C library, the system, the file system or a sandbox does not support the call or its
# flags. If the cause is something else, the fallback reports it.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
_NO_LINKS = (*_UNKNOWN, errno.EACCES, errno.EMLINK)


def rename_new(source: Path, destination: Path) -> None:
    """Rename a file to a name that is free.

    Raises:
        FileExistsError: the name is taken; the file keeps its own name.
        OSError: the file cannot be renamed.
    """
    if _renameat2(source, destination, _NOREPLACE):
        return
    if rename_to_free_name(source, destination):
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
    """Exchange the names of two files or folders in one step.

    Returns:
        Whether it was done; False if the system cannot do it.
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
    except (AttributeError, OSError, TypeError):  # Windows takes no None
        return None
    place = ctypes.c_int, ctypes.c_char_p
    call.argtypes = (*place, *place, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
