"""What callers say about any operation: the level, and the number of threads."""

from __future__ import annotations

import os

from packhorse.layout import Level

__all__ = ["resolve_level", "resolve_threads"]

_MAX_DEFAULT_THREADS = 8
_MAX_THREADS = 1024  # more help nobody, and room for them is made before it is known how many start
_LEVELS = dict(Level.__members__)  # by name


def resolve_level(level: Level | str | int) -> Level:
    """A `Level` from itself, its name in any case, or its number.

    Raises:
        ValueError: no such level.
    """
    if isinstance(level, Level):
        return level
    if isinstance(level, str) and level.upper() in _LEVELS:
        return _LEVELS[level.upper()]
    if type(level) is int and level in Level.__members__.values():
        return Level(level)
    names = ", ".join(repr(known.name.lower()) for known in Level)
    raise ValueError(f"level is {level!r}; it must be one of {names}")


def resolve_threads(threads: int | None) -> int:
    """The number of threads to use: as asked, but at most 1024; or the cores that this process may
    use, at most 8.

    Raises:
        ValueError: below 1.
        TypeError: not an integer.
    """
    if threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an integer or None, not {type(threads).__name__}")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return min(threads, _MAX_THREADS)
