"""Modules of `benchmarks`, imported for one file of tests, because some read the environment on
import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

__all__ = ["import_afresh"]


@contextmanager
def import_afresh(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Import modules of `benchmarks` again, and restore the earlier modules afterwards.

    Args:
        names: their names below `benchmarks`, such as "codecs.peers".

    Yields:
        The modules by these names.
    """
    before = _forget()
    try:
        yield {name: import_module(f"benchmarks.{name}") for name in names}
    finally:
        _forget()
        sys.modules.update(before)


def _forget() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == "benchmarks"]
    return {name: sys.modules.pop(name) for name in names}
