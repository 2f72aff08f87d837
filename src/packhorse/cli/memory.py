"""Finds out whether there is enough memory for an import; it needs only the standard library.

When memory runs out, Python raises an error, but some libraries written in C (OpenBLAS, which comes
with NumPy, and PyTorch) print a message and end the process. So if memory is limited, a child
process tries the import first. Windows, which cannot fork one, is not asked.
"""

import mmap
import os
import signal
from importlib import import_module
from typing import NoReturn

from packhorse.cli.signals import ENDING

__all__ = ["has_memory_for"]

_MARGIN_NBYTES = 1 << 24  # must be left after the import: no verb can work with less


def has_memory_for(module: str, nbytes: int) -> bool:
    """Whether a module can be imported without ending the process.

    Args:
        module: the module's name. It is imported only in a child process, if at all.
        nbytes: address space that is more than enough for the import; if that much is available,
            the import is not tried.

    Returns:
        Whether the module can be imported. Also True if the import raises ImportError, which the
        caller's own import will raise again. If memory is limited, any other error means that
        memory ran out.
    """
    if not hasattr(os, "fork") or _is_there(nbytes):
        return True
    try:
        child = os.fork()
    except OSError:  # the import cannot be tried, and may succeed
        return True
    if child == 0:
        _import_silently(module)
    return os.waitpid(child, 0)[1] == 0


def _is_there(nbytes: int) -> bool:
    """Whether this much address space is available; it is released immediately."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def _import_silently(module: str) -> NoReturn:
    """Import a module and end the process: with 1 if that failed or little memory is left."""
    try:
        for number in ENDING:
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
