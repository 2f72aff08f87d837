"""Parts of the soak, their cases, and findings.

A part draws cases from a seed and runs them. A case is small and can be written as JSON, so that
a file can keep it to be run again. A case ends well or raises an exception: `Finding` if a claim
does not hold. Any undocumented exception is a finding, too.
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
    """A promise does not hold.

    Attributes:
        trace: what another process printed about it.
    """

    def __init__(self, words: str, trace: str = "") -> None:
        super().__init__(words)
        self.trace = trace


def claim(holds: object, words: str, trace: str = "") -> None:
    """Raise a finding unless something holds."""
    if not holds:
        raise Finding(words, trace)


def is_documented(error: BaseException) -> bool:
    """Whether a reader or writer may raise this error. Subclasses of `ValueError` are not
    documented: they mean that somebody forgot to catch them."""
    return isinstance(error, PackhorseError | OSError) or type(error) in (ValueError, TypeError)


@dataclass
class Place:
    """The surroundings in which a case runs.

    Attributes:
        folder: an empty one.
        operations: the operations that are tried.
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
        """The result of a call, or the documented error that it raises.

        Args:
            work: the call.
            more: kinds of errors that are documented for it, in addition to those of every call.
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
        limit_s: how long a case may take; if it takes longer, it hangs.
        memory_nbytes: how much memory a case may take in addition to that of its process at the
            start.
        is_exact: whether a case does the same each time it runs. Other cases depend on timing, and
            are run again several times.
        share: its share of the time, relative to those of other parts.
    """

    name: str
    title: str
    draw: Callable[[Random], Case]
    run: Callable[[Case, Place], None]
    limit_s: float = 60.0
    memory_nbytes: int = 4 << 30
    is_exact: bool = True
    share: float = 1.0
