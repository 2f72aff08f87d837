"""What a part of the soak is, and what it says of a case.

A part draws cases from a seed and runs them. A case is small and goes through JSON, so that a file
can hold it and run it again. Running one either ends well, or raises: `Finding` where a claim does
not hold, and any exception that is not documented is a finding, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from packhorse.errors import PackhorseError
from soak_parts.operations import Operations

__all__ = ["Case", "Finding", "Part", "Place", "claim", "is_documented"]

Case = dict[str, Any]


class Finding(AssertionError):
    """Something is not as it is promised.

    Attributes:
        trace: what another process said of it.
    """

    def __init__(self, words: str, trace: str = "") -> None:
        super().__init__(words)
        self.trace = trace


def claim(holds: object, words: str, trace: str = "") -> None:
    """Raise a finding unless something holds."""
    if not holds:
        raise Finding(words, trace)


def is_documented(error: BaseException) -> bool:
    """Whether an error is one that any reader or writer may raise. Subclasses of `ValueError` say
    that somebody forgot to catch them."""
    return isinstance(error, PackhorseError | OSError) or type(error) in (ValueError, TypeError)


@dataclass
class Place:
    """Where a case runs.

    Attributes:
        folder: an empty one.
        operations: what is tried.
        tally: how often something was accepted, refused or killed.
    """

    folder: Path
    operations: Operations
    tally: Counter[str] = field(default_factory=Counter)

    def accept(self) -> None:
        """Count something that was done."""
        self.tally["accepted"] += 1

    def refuse(self) -> None:
        """Count something that was refused with a documented error."""
        self.tally["refused"] += 1

    def kill(self) -> None:
        """Count a process that was ended."""
        self.tally["killed"] += 1

    def outcome(self, work: Callable[[], Any], *more: type[BaseException]) -> Any:
        """What a call returns, or the documented error that it raises.

        Args:
            work: the call.
            more: kinds of errors that are documented for it beside those of every call.
        """
        try:
            result = work()
        except BaseException as error:
            if not is_documented(error) and not isinstance(error, more):
                raise
            self.refuse()
            return error
        self.accept()
        return result


@dataclass(frozen=True)
class Part:
    """A part of the soak.

    Attributes:
        name: for the command line.
        title: what it tries, in a line.
        draw: makes a case.
        run: runs one.
        limit_s: how long one may take; more is a hang.
        memory_nbytes: how much memory one may take beyond what its process has when it starts.
        is_exact: whether a case does the same whenever it runs; others depend on what happens when,
            and are run again several times.
        share: of the time, beside those of other parts.
    """

    name: str
    title: str
    draw: Callable[[Random], Case]
    run: Callable[[Case, Place], None]
    limit_s: float = 60.0
    memory_nbytes: int = 4 << 30
    is_exact: bool = True
    share: float = 1.0
