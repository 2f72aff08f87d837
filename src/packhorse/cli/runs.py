"""A run of the program over its sources: one after the other, and on after one that fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import typer

from packhorse.cli import render
from packhorse.cli.failures import EXPECTED, describe, exit_code
from packhorse.cli.rows import ErrorRow

__all__ = ["Source", "each"]


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
    """Do the jobs in turn, showing each result at once, or all of them as JSON at the end.

    Raises:
        typer.Exit: at least one job failed; the code is that of the first, and all went on.
    """
    rows: list[_Row] = []
    errors: list[ErrorRow] = []
    for job in jobs:
        try:
            done = work(job)
        except EXPECTED as error:
            errors.append(ErrorRow(str(job.src), exit_code(error), describe(error, job.src)))
            render.error_line(errors[-1].message)
            continue
        rows += done
        if not json:
            for row in done:
                show(row)
    if json:
        render.json_document(rows, errors)
    if errors:
        raise typer.Exit(errors[0].exit_code)
    return rows
