"""Runs the jobs of a command line one by one, and continues after one that fails.

An `Outcome` collects what the run has done, so that `app.run` can print one JSON document however
the run ends: normally, by a signal, or by a mistake in the options.
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
from packhorse.storage.locations import Place

__all__ = ["Outcome", "Source", "each", "together", "wants_json"]


@dataclass
class Outcome:
    """The results and errors of a run so far.

    Attributes:
        rows: the results.
        errors: the errors.
        is_told: whether the program has begun to print them as a document.
    """

    rows: list[Any] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    is_told: bool = False

    @classmethod
    def begin(cls) -> "Outcome":
        """A new outcome, to which `each` adds from now on."""
        outcome = cls()
        _CURRENT.set(outcome)
        return outcome

    def fail(self, path: str, code: int, message: str) -> None:
        """Add an error, and print it on standard error at once."""
        self.errors.append(ErrorRow(path, code, message))
        render.error_line(message)


_CURRENT: ContextVar[Outcome] = ContextVar("outcome")


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even if it is wrong otherwise."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


@dataclass(frozen=True)
class Source:
    """A source without an output: a path or URL."""

    src: str

    @classmethod
    def of(cls, text: str) -> "Source":
        """The source of a word of the command line; messages show a path as `Path` writes it."""
        return cls(text if "://" in text else str(Path(text)))


class _HasSource(Protocol):
    @property
    def src(self) -> Place | str: ...


_Job = TypeVar("_Job", bound=_HasSource)
_Row = TypeVar("_Row")


def each(
    jobs: Iterable[_Job],
    work: Callable[[_Job], list[_Row]],
    show: Callable[[_Row], None],
    json: bool,
) -> list[_Row]:
    """Do the jobs in turn, and show each result at once, unless the results become a JSON document.

    Raises:
        typer.Exit: at least one job failed. All jobs have run; the code is that of the first error.
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


def together(
    work: Callable[[Outcome], list[_Row]], show: Callable[[list[_Row]], None], json: bool
) -> list[_Row]:
    """Do work that handles all sources at once, and show its results.

    Args:
        work: returns the results in order. It adds each to the outcome as soon as it is there, and
            so does it with errors.
        show: draws all results.
        json: whether the results become a JSON document.

    Raises:
        typer.Exit: there was an error; the code is that of the first.
    """
    outcome = _CURRENT.get()
    rows = work(outcome)
    outcome.rows[:] = rows
    if not json:
        show(rows)
    if outcome.errors:
        raise typer.Exit(outcome.errors[0].exit_code)
    return rows
