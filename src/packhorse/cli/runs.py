"""A run of the program over its sources: one after the other, and on after one that fails.

What a run has done is kept in its `Outcome`, so that `app.run` can print one JSON document however
the run ends: at its end, by a signal, or by a mistake in the options.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import typer

from packhorse.cli import render
from packhorse.cli.failures import ExitCode, describe, exit_code
from packhorse.cli.rows import ErrorRow

__all__ = ["Outcome", "Source", "each", "wants_json"]


@dataclass
class Outcome:
    """What a run has done so far, and what failed.

    Attributes:
        rows: what was done.
        errors: what failed.
        is_told: whether printing them as a document has begun.
    """

    rows: list[Any] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    is_told: bool = False

    @classmethod
    def begin(cls) -> "Outcome":
        """A new one, which the sources of this run go to."""
        outcome = cls()
        _CURRENT.set(outcome)
        return outcome

    def fail(self, path: str, code: int, message: str) -> None:
        """Tell an error, on standard error at once."""
        self.errors.append(ErrorRow(path, code, message))
        render.error_line(message)


_CURRENT: ContextVar[Outcome] = ContextVar("outcome")


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, whatever else is wrong with it."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


@dataclass(frozen=True)
class Source:
    """A source without an output."""

    src: Path


class _HasSource(Protocol):
    @property
    def src(self) -> Path | str: ...


_Job = TypeVar("_Job", bound=_HasSource)
_Row = TypeVar("_Row")


def each(
    jobs: Iterable[_Job],
    work: Callable[[_Job], list[_Row]],
    show: Callable[[_Row], None],
    json: bool,
) -> list[_Row]:
    """Do the jobs in turn, showing each result at once, unless all are to be one JSON document.

    Raises:
        typer.Exit: at least one job failed; the code is that of the first, and all went on.
    """
    outcome = _CURRENT.get()
    rows: list[_Row] = []
    for job in jobs:
        try:
            done = work(job)
        except Exception as error:
            code = exit_code(error)
            if code == ExitCode.BUG:
                raise
            outcome.fail(str(job.src), code, describe(error, job.src))
            continue
        rows += done
        outcome.rows.extend(done)
        if not json:
            for row in done:
                show(row)
    if outcome.errors:
        raise typer.Exit(outcome.errors[0].exit_code)
    return rows
