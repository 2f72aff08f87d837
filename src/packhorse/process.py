"""What happens when the process forks and when it ends.

Other modules register their handlers here. So Packhorse has one set of fork handlers and one exit
handler in the process, and a maintainer finds all of them as callers of `at_fork` and `at_exit`.
Registering a handler twice has no effect, so a module can register its handlers each time it needs
them, without a flag.

Importing this module does nothing: Python's own hooks are set when the first handler is registered.
docs/architecture.md ("State of the process") lists everything that outlives a call.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

__all__ = ["at_exit", "at_fork"]

_Handler: TypeAlias = Callable[[], object]


class _AtFork(NamedTuple):
    """Handlers for a fork, like those of `os.register_at_fork`."""

    before: _Handler | None
    in_parent: _Handler | None
    in_child: _Handler | None


_lock = threading.RLock()  # held while handlers are added
_at_fork: list[_AtFork] = []
_at_exit: list[_Handler] = []


def at_fork(
    *,
    before: _Handler | None = None,
    in_parent: _Handler | None = None,
    in_child: _Handler | None = None,
) -> None:
    """Run handlers at every fork from now on.

    Args:
        before: runs before the fork; the handler that was registered last runs first.
        in_parent: runs after the fork in the parent, in the order of registration.
        in_child: runs after the fork in the child, in the order of registration.
    """
    handlers = _AtFork(before, in_parent, in_child)
    with _lock:
        if handlers in _at_fork:
            return
        if not _at_fork and hasattr(os, "register_at_fork"):  # Windows does not fork
            os.register_at_fork(
                before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child
            )
        _at_fork.append(handlers)


def at_exit(handler: _Handler) -> None:
    """Run a handler when the program ends; the handler that was registered last runs first.

    Args:
        handler: runs after all threads of the program except daemon threads have ended.
    """
    with _lock:
        if handler in _at_exit:
            return
        if not _at_exit:
            atexit.register(_before_exit)
        _at_exit.append(handler)


def _before_fork() -> None:
    _run([handlers.before for handlers in reversed(_at_fork)])


def _in_parent() -> None:
    _run([handlers.in_parent for handlers in _at_fork])


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that the child does not have may hold the parent's
    _run([handlers.in_child for handlers in _at_fork])


def _before_exit() -> None:
    _run(list(reversed(_at_exit)))


def _run(handlers: Sequence[_Handler | None]) -> None:
    """Run all handlers in order, even after one that fails; the last error is raised."""
    with ExitStack() as stack:
        for handler in reversed(handlers):
            if handler is not None:
                stack.callback(handler)
