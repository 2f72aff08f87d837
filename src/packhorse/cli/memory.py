"""Whether there is memory for an import; nothing outside the standard library is needed to ask.

Where memory ends, Python raises an error, but libraries written in C end the process with words of
their own (OpenBLAS, which comes with NumPy, does, and so does PyTorch), and no Python is asked. So
where memory is limited, a child process tries the import first.
"""

import mmap
import os
import signal
from importlib import import_module
from typing import NoReturn

__all__ = ["has_memory_for"]

_MARGIN_NBYTES = 1 << 24  # left by an import: less is of no use to any verb
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def has_memory_for(module: str, nbytes: int) -> bool:
    """Whether a module can be imported without ending the process.

    Args:
        module: its name; imported in a child process, if at all.
        nbytes: as much address space is more than it takes, and if that is there, nothing is tried.

    Returns:
        True also where the import raises ImportError: that will tell all by itself. Any other error
        of an import, where memory is limited, is one that Python makes of memory that ended.
    """
    if _is_there(nbytes):
        return True
    try:
        child = os.fork()
    except OSError:  # nothing can be tried; it may go well
        return True
    if child == 0:
        _import_silently(module)
    return os.waitpid(child, 0)[1] == 0


def _is_there(nbytes: int) -> bool:
    """Whether so much memory may be had; none is taken."""
    try:
        mmap.mmap(-1, nbytes, flags=_PRIVATE).close()
    except (OSError, MemoryError):
        return False
    return True


def _import_silently(module: str) -> NoReturn:
    """Import it and end; with 1 if little memory is left."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        import_module(module)
    except ImportError:
        os._exit(0)
    except BaseException:
        os._exit(1)
    os._exit(0 if _is_there(_MARGIN_NBYTES) else 1)
