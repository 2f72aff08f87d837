"""Checks the arguments that most operations have: the level and the number of threads."""

from __future__ import annotations

import os

from packhorse.layout import Level

__all__ = ["n_cores", "resolve_level", "resolve_threads"]

_MAX_DEFAULT_THREADS = 8
# More threads do not help, and memory for all of them is allocated before any has started.
_MAX_THREADS = 1024
_LEVELS = dict(Level.__members__)  # by name


def resolve_level(level: Level | str | int) -> Level:
    """The `Level` for a level, its name (in any case) or its number.

    Raises:
        ValueError: there is no such level.
    """
    if isinstance(level, str) and (found := _LEVELS.get(level.upper())) is not None:
        return found
    if isinstance(level, Level):
        return level
    if type(level) is int and level in Level.__members__.values():
        return Level(level)
    names = ", ".join(repr(known.name.lower()) for known in Level)
    raise ValueError(f"level is {level!r}; it must be one of {names}")


def n_cores() -> int:
    """The cores that this process may use, or all of the machine if the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS or Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_threads(threads: int | None) -> int:
    """The number of threads to use.

    Args:
        threads: the number that the caller asks for; a number above 1024 counts as
            1024. None for one thread per core that this process may use, at most 8.

    Raises:
        ValueError: the number is below 1.
        TypeError: it is not an integer.
    """
    if threads is None:
        return min(n_cores(), _MAX_DEFAULT_THREADS)
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an integer or None, not {type(threads).__name__}")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return min(threads, _MAX_THREADS)
