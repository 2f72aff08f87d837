"""Imports modules at first use, and makes a fork wait until such imports are done.

If one thread imports a module while another thread forks, the module stays locked in the child
forever, and the child hangs when it needs that module.
Imports do not wait for each other, because one may need a module that another thread is importing.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from packhorse.errors import MissingBackendError
from packhorse.process import at_fork

__all__ = ["import_late", "late_name"]

# Another thread's import may wait for a module that the forking thread is importing itself.
# Then the fork goes ahead after this time.
_PATIENCE_S = 60

_changed = threading.Condition()
_importing: Counter[int] = Counter()  # how many imports each thread is in


def import_late(name: str) -> ModuleType:
    """`importlib.import_module`, for a module that is imported only when it is needed.

    Args:
        name: the module's full name.

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
        # Registered here, because importing this module must do nothing.
        at_fork(before=_before_fork, in_parent=_changed.release, in_child=_in_child)
        _importing[thread] += 1
    try:
        return import_module(name)
    finally:
        with _changed:
            _importing[thread] -= 1
            if not _importing[thread]:
                del _importing[thread]
            _changed.notify_all()


def late_name(package: str, modules: Mapping[str, str], name: str) -> Any:
    """What a name of a package stands for, from one of its modules, which is imported now. The
    package's `__getattr__` calls it.

    Args:
        package: the package's full name.
        modules: the package's modules by the names that they have.
        name: the name that is asked for.

    Raises:
        AttributeError: the package has no such name.
        ImportError: as `import_module`.
        MissingBackendError: PyTorch is not installed.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_late(f"{package}.{modules[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingBackendError(
            f"{package} needs PyTorch; install it with: pip install 'packhorse[torch]'"
        ) from error


def _before_fork() -> None:
    """Wait for the imports of other threads; none can begin until the fork is done."""
    thread = threading.get_ident()
    _changed.acquire()
    _changed.wait_for(lambda: not _importing.keys() - {thread}, _PATIENCE_S)


def _in_child() -> None:
    """Forget the other threads: the child does not have them."""
    thread = threading.get_ident()
    for other in [other for other in _importing if other != thread]:
        del _importing[other]
    _changed.release()
