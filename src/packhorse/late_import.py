"""Imports at first use, which no fork cuts in two.

A module that one thread is importing when another forks stays locked in the child for ever, and the
child waits for it as soon as it needs it too. So such imports hold a lock that a fork waits for.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from types import ModuleType

__all__ = ["import_late"]

# The thread that imports may fork itself.
_lock = threading.RLock()
_is_registered = False


def import_late(name: str) -> ModuleType:
    """`importlib.import_module`, for what is imported when it is needed.

    Args:
        name: of the module, in full.

    Raises:
        ImportError: as `import_module`.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    _make_forks_wait()
    with _lock:
        return import_module(name)


def _make_forks_wait() -> None:
    """Once, and not before anything is imported late: importing this module does nothing."""
    global _is_registered
    with _lock:
        if not _is_registered:
            os.register_at_fork(
                before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
            )
            _is_registered = True
