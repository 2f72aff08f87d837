"""Makes a report: finds the sources, describes their tensors, and adds the sections that fit.

Which sections there are follows from the sources: one or more models; a series of checkpoints or a
store of snapshots; or two models, of which the second was made from the first. Tensors stream: of
each only a sample is read, unless everything is asked for, and then about one tensor for each
thread is in memory. What cannot be read becomes a `Problem`, and the rest goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from packhorse._version import __version__
from packhorse.arguments import resolve_threads
from packhorse.errors import PackhorseError
from packhorse.report.bits import PlaneCounts, describe_tensor, exponent_rows
from packhorse.report.results import Findings, Problem, Settings, SourceRow, TensorRow
from packhorse.report.sampling import Places, budget, choose_places, take_sample
from packhorse.report.sources import Entry, Source, find_sources, opened
from packhorse.threads import map_tensors

__all__ = [
    "SAMPLE_NBYTES",
    "Described",
    "Options",
    "PlannedSource",
    "Watch",
    "describe_source",
    "make_findings",
    "plan_report",
]

SAMPLE_NBYTES = 1 << 28

# Opens a display of progress, for a title and a number of bytes. It yields a function that takes
# the bytes done since the last call.
Watch: TypeAlias = Callable[[str, int | None], AbstractContextManager[Callable[[int], None] | None]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a report is made.

    Attributes:
        full: whether everything is read and packed, instead of samples.
        sample_nbytes: bytes to look at of each source, about.
        checkpoints_per_day: how often such files are written, for what is saved in a year.
        seconds_per_step: how long a step of the training takes; None if nobody knows.
        engines: whether other packers are measured on samples.
        threads: the number of threads; None for one per core, at most 8.
    """

    full: bool = False
    sample_nbytes: int = SAMPLE_NBYTES
    checkpoints_per_day: float = 24.0
    seconds_per_step: float | None = None
    engines: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: a number is too small, or `threads` is wrong.
        """
        resolve_threads(self.threads)
        if self.sample_nbytes < 1:
            raise ValueError(f"sample_nbytes is {self.sample_nbytes}; it must be at least 1")
        if not self.checkpoints_per_day >= 0:
            raise ValueError(
                f"checkpoints_per_day is {self.checkpoints_per_day}; it must be 0 or more"
            )
        if self.seconds_per_step is not None and not self.seconds_per_step > 0:
            raise ValueError(f"seconds_per_step is {self.seconds_per_step}; it must be above 0")

    def places(self, entries: Sequence[Entry]) -> list[Places]:
        """Where to look at the tensors of a source."""
        share = 1.0 if self.full else budget(entries, self.sample_nbytes)
        return [choose_places(entry, share) for entry in entries]


@dataclass
class Described:
    """What the tensors of one source are like.

    Attributes:
        row: the source.
        tensors: its tensors, each with the counts of its values.
        problems: what could not be read.
    """

    row: SourceRow
    tensors: list[tuple[TensorRow, PlaneCounts]]
    problems: list[Problem]


def describe_source(source: Source, options: Options, watch: Watch) -> Described:
    """Describes all tensors of a source.

    Raises:
        Exception: as `opened` raises; what is wrong with single tensors becomes problems.
    """
    threads = resolve_threads(options.threads)
    with opened(source, threads) as file:
        places = options.places(file.entries)
        sizes = [each.sampled_nbytes for each in places]
        problems: list[Problem] = []
        with watch(f"look at {source.name}", sum(sizes)) as progress:

            def work(i: int, n_threads: int) -> tuple[TensorRow, PlaneCounts] | None:
                entry = file.entries[i]
                try:
                    return describe_tensor(file, take_sample(file, entry, places[i], n_threads))
                except (PackhorseError, OSError) as error:
                    problems.append(Problem(source.name, entry.name, str(error)))
                    return None
                finally:
                    if progress is not None:
                        progress(sizes[i])

            found = map_tensors(work, sizes, threads)
        return Described(file.row, [each for each in found if each is not None], problems)


def make_findings(
    sources: Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    watch: Watch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Findings:
    """Looks at models, a series or a store, and finds what a report says.

    Args:
        sources: as for `packhorse.report`.
        base: the model that the only source was made from.
        options: how the report is made.
        watch: opens a display of progress.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The findings.

    Raises:
        FileNotFoundError: nothing matches a pattern, or a store has no snapshot.
        ValueError: no source was given, or a base with more than one source.
        Exception: the error of the first source, if no source can be read at all.
    """
    start = time.perf_counter()
    options, watch = options or Options(), watch or _no_display
    found = _found(sources, base, storage_options)
    shape = _shape_of(found)
    described, problems = _describe_all(_shown(found, shape), options, watch)
    tensors = [each for one in described for each in one.tensors]
    return Findings(
        title=_title(found, shape),
        version=__version__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        shape=shape,
        settings=Settings(
            options.full, options.sample_nbytes, options.checkpoints_per_day,
            time.perf_counter() - start, resolve_threads(options.threads),
        ),
        sources=tuple(one.row for one in described),
        tensors=tuple(row for row, _ in tensors),
        exponents=exponent_rows(tensors),
        series=None,
        policy=None,
        engines=(),
        memory=(),
        changes=None,
        problems=tuple(problems),
    )  # fmt: skip


@dataclass(frozen=True)
class PlannedSource:
    """A source that a report would read.

    Attributes:
        name, path, form, step, n_tensors, nbytes: as in `SourceRow`.
        sampled_nbytes: bytes that would be looked at, to begin with.
    """

    name: str
    path: str
    form: str
    step: int | None
    n_tensors: int
    nbytes: int
    sampled_nbytes: int


def plan_report(
    sources: Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, list[PlannedSource]]:
    """What a report would read; only headers are read now.

    Args:
        sources, base, options, storage_options: as for `make_findings`.

    Returns:
        The report's shape ("models", "series" or "pair"), and its sources.

    Raises:
        Exception: as for `make_findings`; and a source cannot be opened.
    """
    found = _found(sources, base, storage_options)
    planned = []
    for source in found:
        with opened(source) as file:
            row, places = file.row, (options or Options()).places(file.entries)
        planned.append(
            PlannedSource(
                row.name, row.path, row.form, row.step, row.n_tensors, row.nbytes,
                sum(each.sampled_nbytes for each in places),
            )
        )  # fmt: skip
    return _shape_of(found), planned


def _found(
    sources: Sequence[str | os.PathLike[str]],
    base: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None,
) -> list[Source]:
    found = find_sources(sources, storage_options=storage_options)
    return found if base is None else _with_base(base, found, storage_options)


def _with_base(
    base: str | os.PathLike[str], found: list[Source], options: Mapping[str, Any] | None
) -> list[Source]:
    if len(found) != 1 or found[0].snapshot is not None:
        raise ValueError(
            f"a base goes with one model, but there are {len(found)} sources; name one model, or "
            "leave the base out"
        )
    return find_sources([base, found[0].path], as_series=False, storage_options=options)


def _shape_of(found: Sequence[Source]) -> str:
    if found[0].step is not None:
        return "series"
    return "pair" if len(found) == 2 else "models"


def _shown(found: list[Source], shape: str) -> list[Source]:
    """The sources whose tensors are described one by one."""
    return found if shape == "models" else found[-1:]


def _title(found: Sequence[Source], shape: str) -> str:
    if shape == "pair":
        return f"{found[1].name} against {found[0].name}"
    if shape == "series":
        noun = "snapshots" if found[0].snapshot is not None else "checkpoints"
        return f"{len(found)} {noun}, {found[0].name} to {found[-1].name}"
    return found[0].name if len(found) == 1 else f"{len(found)} models"


def _describe_all(
    sources: Sequence[Source], options: Options, watch: Watch
) -> tuple[list[Described], list[Problem]]:
    """Describes each source that can be read.

    Raises:
        Exception: that of the first source, if none can be read.
    """
    described, problems, first = [], [], None
    for source in sources:
        try:
            one = describe_source(source, options, watch)
        except (PackhorseError, OSError, ValueError) as error:
            first = first or error
            problems.append(Problem(source.name, None, str(error)))
            continue
        described.append(one)
        problems += one.problems
    if first is not None and not described:
        raise first
    return described, problems


def _no_display(title: str, total: int | None) -> AbstractContextManager[None]:
    return nullcontext()
