"""Makes a report: finds the sources, describes their tensors, and adds the sections that fit.

Which sections there are follows from the sources: one or more models; a series of checkpoints or a
store of snapshots; or two models, of which the second was made from the first. Tensors stream: of
each only a sample is read, unless everything is asked for, and then about one tensor for each
thread is in memory. What cannot be read becomes a `Problem`, and the rest goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from packhorse._version import __version__
from packhorse.arguments import resolve_threads
from packhorse.disk.results import Progress
from packhorse.reports.bits import exponent_rows
from packhorse.reports.changes import compare_models
from packhorse.reports.describe import Described, describe_source
from packhorse.reports.engine_samples import take_engine_samples
from packhorse.reports.engines import compare_engines
from packhorse.reports.options import Options, Watch
from packhorse.reports.policy import recommend
from packhorse.reports.report import Report
from packhorse.reports.results import EngineTable, Findings, Problem, Settings, SourceRow
from packhorse.reports.series import describe_series
from packhorse.reports.sources import READ_ERRORS, Source, find_sources, opened

__all__ = ["PlannedSource", "make_findings", "make_report", "plan_report"]

_ENGINE_SECONDS = 3.0  # for each sample


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
    findings = _SECTIONS[shape](found, options, watch)
    seconds = time.perf_counter() - start
    return replace(findings, settings=replace(findings.settings, seconds=seconds))


def make_report(
    sources: Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Makes the report of `packhorse.report`, whose arguments these are.

    Args:
        sources, base, progress, storage_options: as there.
        options: the fields of `Options`.

    Raises:
        Exception: as there.
    """

    def watch(title: str, total: int | None) -> AbstractContextManager[Progress | None]:
        return nullcontext(progress)

    findings = make_findings(
        sources, base=base, options=Options(**options), watch=watch,
        storage_options=storage_options,
    )  # fmt: skip
    return Report(findings)


def _of_models(found: Sequence[Source], options: Options, watch: Watch) -> Findings:
    """The findings of models that have nothing to do with each other."""
    described, problems = _describe_all(found, options, watch)
    findings = _findings("models", _title(found, "models"), described, options, problems)
    largest = max(described, key=lambda one: one.row.nbytes)
    source = next(source for source in found if source.name == largest.row.name)
    return replace(findings, engines=_engines(source, None, options, watch))


def _of_series(found: Sequence[Source], options: Options, watch: Watch) -> Findings:
    """The findings of a series: the newest checkpoint that can be read, and how it came about."""
    newest, problems = _describe_newest(found, options, watch)
    rows = list(_rows(found))
    threads = resolve_threads(options.threads)
    with watch("compare checkpoints", sum(row.nbytes for row in rows)) as progress:
        series, more = describe_series(
            found, sample_nbytes=options.sample_nbytes, full=options.full, threads=threads,
            progress=progress,
        )  # fmt: skip
    names = [step.name for step in series.steps]
    good = [source for source in found if source.name in names]
    policy = None
    try:
        policy = recommend(series, good, threads=threads, step_seconds=options.seconds_per_step)
    except READ_ERRORS as error:
        more.append(Problem(good[-1].name, None, f"there is no policy: {error}"))
    findings = _findings("series", _title(found, "series"), [newest], options, [*more, *problems])
    (last,) = (source for source in found if source.name == newest.row.name)
    before = good[-2] if len(good) > 1 and good[-1] == last else None
    return replace(
        findings,
        sources=tuple(rows),
        series=series,
        policy=policy,
        engines=_engines(last, before, options, watch),
    )


def _of_pair(found: Sequence[Source], options: Options, watch: Watch) -> Findings:
    """The findings of two models: the second, and what changed from the first."""
    base, tuned = found
    described, problems = _describe_all([tuned], options, watch)
    findings = _findings("pair", _title(found, "pair"), described, options, problems)
    threads = resolve_threads(options.threads)
    full = {row.name: row.levels["default"] for row in findings.tensors}
    with opened(base, threads) as old, opened(tuned, threads) as new:
        share = options.share(new.entries)
        with watch(f"compare with {base.name}", new.row.nbytes) as progress:
            changes, more = compare_models(
                old, new, share=share, full=full, threads=threads, progress=progress
            )
        rows = (old.row, new.row)
    return replace(
        findings,
        sources=rows,
        changes=changes,
        engines=_engines(tuned, base, options, watch),
        problems=tuple(dict.fromkeys([*findings.problems, *more])),
    )


def _engines(
    source: Source, base: Source | None, options: Options, watch: Watch
) -> tuple[EngineTable, ...]:
    """Other ways to pack samples of a source."""
    if not options.engines:
        return ()
    threads = resolve_threads(options.threads)
    try:
        with ExitStack() as stack:
            new = stack.enter_context(opened(source, threads))
            old = stack.enter_context(opened(base, threads)) if base else None
            samples = take_engine_samples(new, old, threads=threads)
    except READ_ERRORS:
        return ()  # it was read before, so it has gone or changed since; the section is left out
    tables = []
    with watch("measure other packers", sum(sample.data.size for sample in samples)) as progress:
        for sample in samples:
            tables.append(
                compare_engines(
                    sample.data, sample.dtype, sample.base, seconds=_ENGINE_SECONDS,
                    title=sample.title,
                )
            )  # fmt: skip
            if progress is not None:
                progress(sample.data.size)
    return tuple(tables)


_SECTIONS = {"models": _of_models, "series": _of_series, "pair": _of_pair}


def _findings(
    shape: str, title: str, described: Sequence[Described], options: Options,
    problems: Iterable[Problem],
) -> Findings:  # fmt: skip
    """What all reports have in common."""
    tensors = [each for one in described for each in one.tensors]
    return Findings(
        title=title,
        version=__version__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        shape=shape,
        settings=Settings(
            options.full, options.sample_nbytes, options.checkpoints_per_day, 0.0,
            resolve_threads(options.threads),
        ),
        sources=tuple(one.row for one in described),
        tensors=tuple(row for row, _ in tensors),
        exponents=exponent_rows(tensors),
        series=None,
        policy=None,
        engines=(),
        memory=tuple(row for one in described for row in one.memory),
        changes=None,
        problems=tuple(dict.fromkeys(problems)),
    )  # fmt: skip


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
        except READ_ERRORS as error:
            first = first or error
            problems.append(Problem(source.name, None, str(error)))
            continue
        described.append(one)
        problems += one.problems
    if first is not None and not described:
        raise first
    return described, problems


def _describe_newest(
    sources: Sequence[Source], options: Options, watch: Watch
) -> tuple[Described, list[Problem]]:
    """Describes the last source that can be read.

    Raises:
        Exception: that of the last source, if none can be read.
    """
    last = None
    for source in reversed(sources):
        try:
            one = describe_source(source, options, watch)
            return one, one.problems
        except READ_ERRORS as error:
            last = last or error
    assert last is not None
    raise last


def _rows(sources: Sequence[Source]) -> Iterable[SourceRow]:
    """What the report says of each source that can be opened."""
    for source in sources:
        try:
            with opened(source) as file:
                yield file.row
        except READ_ERRORS:
            continue  # the series says so


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


def _title(found: Sequence[Source], shape: str) -> str:
    if shape == "pair":
        return f"{found[1].name} against {found[0].name}"
    if shape == "series":
        noun = "snapshots" if found[0].snapshot is not None else "checkpoints"
        return f"{len(found)} {noun}, {found[0].name} to {found[-1].name}"
    return found[0].name if len(found) == 1 else f"{len(found)} models"


def _no_display(title: str, total: int | None) -> AbstractContextManager[None]:
    return nullcontext()
