"""Imports at first use, which no fork cuts in two.

A module that one thread is importing when another forks stays locked in the child for ever, and the
child waits for it as soon as it needs it too. So a fork waits until such imports are done. They do
not wait for each other: one may need a module that another thread is importing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from importlib import import_module
from types import ModuleType

__all__ = ["import_late"]

# An import may need what the thread that forks is importing itself; then somebody must give way.
_PATIENCE_S = 60

_changed = threading.Condition()
_importing: Counter[int] = Counter()  # imports that each thread is at
_is_registered = False


def import_late(name: str) -> ModuleType:
    """`importlib.import_module`, for what is imported when it is needed.

    Args:
        name: of the module, in full.

    Raises:
        ImportError: as `import_module`.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    ):
        return module
    thread = threading.get_ident()
    with _changed:
        _make_forks_wait()
        _importing[thread] += 1
    try:
        return import_module(name)
    finally:
        with _changed:
            _importing[thread] -= 1
            if not _importing[thread]:
                del _importing[thread]
            _changed.notify_all()


def _make_forks_wait() -> None:
    """Once, and not before anything is imported late: importing this module does nothing."""
    global _is_registered
    if not _is_registered:
        os.register_at_fork(
            before=_before_fork, after_in_parent=_changed.release, after_in_child=_in_child
        )
        _is_registered = True


def _before_fork() -> None:
    """Wait for the imports of other threads, and let none begin until the fork is done."""
    thread = threading.get_ident()
    _changed.acquire()
    _changed.wait_for(lambda: not _importing.keys() - {thread}, _PATIENCE_S)


def _in_child() -> None:
    """Of all threads only this one is here."""
    thread = threading.get_ident()
    for other in [other for other in _importing if other != thread]:
        del _importing[other]
    _changed.release()
