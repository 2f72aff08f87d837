"""Makes a report: finds the sources, describes their tensors, and adds the sections that fit.

Which sections there are follows from the sources: one or more models; a series of checkpoints or a
store of snapshots; or two models, of which the second was made from the first. Tensors stream: of
each only a sample is read, unless everything is asked for, and then about one tensor for each
thread is in memory. What cannot be read becomes a `Problem`, and the rest goes on.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packhorse._version import __version__
from packhorse.arguments import resolve_threads
from packhorse.disk.results import Progress
from packhorse.reports.bits import exponent_rows
from packhorse.reports.changes import compare_models
from packhorse.reports.describe import (
    Described,
    Part,
    describe_part,
    describe_source,
    join_parts,
    parts_of,
)
from packhorse.reports.engine_samples import take_engine_samples
from packhorse.reports.engines import compare_engines
from packhorse.reports.names import are_shards
from packhorse.reports.options import Options, Watch
from packhorse.reports.policy import recommend
from packhorse.reports.report import Report
from packhorse.reports.results import EngineTable, Findings, Problem, Settings, SourceRow
from packhorse.reports.series import describe_series
from packhorse.reports.sources import READ_ERRORS, Source, find_sources, opened
from packhorse.storage.cluster import check_cluster
from packhorse.storage.tasks import perform

__all__ = ["PlannedSource", "make_findings", "make_report", "plan_report"]

_ENGINE_SECONDS = 3.0  # for each sample


def make_findings(
    sources: Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    watch: Watch | None = None,
    storage_options: Mapping[str, Any] | None = None,
    client: Any = None,
) -> Findings:
    """Looks at models, a series or a store, and finds what a report says.

    Args:
        sources: as for `packhorse.report`.
        base: the model that the only source was made from.
        options: how the report is made.
        watch: opens a display of progress.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.
        client: a `distributed.Client`, whose cluster describes the tensors; None for this process.
            Checkpoints and models are compared here in any case.

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
    findings = _SECTIONS[shape](found, options, _Describer(options, watch, client))
    seconds = time.perf_counter() - start
    return replace(findings, settings=replace(findings.settings, seconds=seconds))


def make_report(
    sources: Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    client: Any = None,
    **options: Any,
) -> Report:
    """Makes the report of `packhorse.report`, whose arguments these are.

    Args:
        sources, base, progress, storage_options, client: as there.
        options: the fields of `Options`.

    Raises:
        Exception: as there.
    """

    def watch(title: str, total: int | None) -> AbstractContextManager[Progress | None]:
        return nullcontext(progress)

    findings = make_findings(
        sources, base=base, options=Options(**options), watch=watch,
        storage_options=storage_options, client=client,
    )  # fmt: skip
    return Report(findings)


def _of_models(found: Sequence[Source], options: Options, describer: _Describer) -> Findings:
    """The findings of models that have nothing to do with each other."""
    described, problems = describer.all(found)
    findings = _findings("models", _title(found, "models"), described, options, problems)
    largest = max(described, key=lambda one: one.row.nbytes)
    source = next(source for source in found if source.name == largest.row.name)
    return replace(findings, engines=_engines(source, None, options, describer.watch))


def _of_series(found: Sequence[Source], options: Options, describer: _Describer) -> Findings:
    """The findings of a series: the newest checkpoint that can be read, and how it came about."""
    newest, problems = describer.newest(found)
    rows = list(_rows(found))
    threads = resolve_threads(options.threads)
    with describer.watch("compare checkpoints", sum(row.nbytes for row in rows)) as progress:
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
        engines=_engines(last, before, options, describer.watch),
    )


def _of_pair(found: Sequence[Source], options: Options, describer: _Describer) -> Findings:
    """The findings of two models: the second, and what changed from the first."""
    base, tuned = found
    described, problems = describer.all([tuned])
    findings = _findings("pair", _title(found, "pair"), described, options, problems)
    threads = resolve_threads(options.threads)
    full = {row.name: row.levels["default"] for row in findings.tensors}
    with opened(base, threads) as old, opened(tuned, threads) as new:
        share = options.share(new.entries)
        with describer.watch(f"compare with {base.name}", new.row.nbytes) as progress:
            changes, more = compare_models(
                old, new, share=share, full=full, threads=threads, progress=progress
            )
        rows = (old.row, new.row)
    return replace(
        findings,
        sources=rows,
        changes=changes,
        engines=_engines(tuned, base, options, describer.watch),
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


@dataclass(frozen=True)
class _Describer:
    """Describes sources, here or on a cluster.

    Attributes:
        options: how the report is made.
        watch: opens a display of progress.
        client: a client of a cluster, or None.
    """

    options: Options
    watch: Watch
    client: Any

    def all(self, sources: Sequence[Source]) -> tuple[list[Described], list[Problem]]:
        """Each source that can be read.

        Raises:
            Exception: that of the first source, if none can be read.
        """
        results = self._shared(sources) if self.client else self._here(sources)
        described = [found for found in results if isinstance(found, Described)]
        if not described:
            raise next(found for found in results if isinstance(found, Exception))
        problems: list[Problem] = []
        for source, found in zip(sources, results, strict=True):
            if isinstance(found, Described):
                problems += found.problems
            else:
                problems.append(Problem(source.name, None, str(found)))
        return described, problems

    def newest(self, sources: Sequence[Source]) -> tuple[Described, list[Problem]]:
        """The last source that can be read.

        Raises:
            Exception: that of the last source, if none can be read.
        """
        last = None
        for source in reversed(sources):
            try:
                (one,), problems = self.all([source])
                return one, problems
            except READ_ERRORS as error:
                last = last or error
        assert last is not None
        raise last

    def _here(self, sources: Sequence[Source]) -> list[Described | Exception]:
        results: list[Described | Exception] = []
        for source in sources:
            try:
                results.append(describe_source(source, self.options, self.watch))
            except READ_ERRORS as error:
                results.append(error)
        return results

    def _shared(self, sources: Sequence[Source]) -> list[Described | Exception]:
        """On the cluster, in parts; an error of a part is one of its source."""
        check_cluster(self.client, [Path(s.path) for s in sources if Path(s.path).exists()])
        results: list[Described | Exception | None] = [None] * len(sources)
        parts: list[Part] = []
        for i, source in enumerate(sources):
            try:
                parts += parts_of(source, self.options)
            except READ_ERRORS as error:
                results[i] = error
        found: dict[Part, Any] = {}
        with self.watch(f"look at {_title(sources, 'models')}", None) as progress:
            for outcome in perform(describe_part, deque(parts), self.client):
                found[outcome.task] = outcome.error or outcome.value
                if progress is not None and outcome.error is None:
                    progress(sum(row.sampled_nbytes for row, _ in outcome.value.tensors))
        for i, source in enumerate(sources):
            own = [found[part] for part in parts if part.source == source]
            fault = next((each for each in own if isinstance(each, Exception)), None)
            if fault is not None and not isinstance(fault, READ_ERRORS):
                raise fault
            results[i] = results[i] or fault or join_parts(own)
        return [each for each in results if each is not None]


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
    is_pair = len(found) == 2 and not are_shards([source.path for source in found])
    return "pair" if is_pair else "models"


def _title(found: Sequence[Source], shape: str) -> str:
    if shape == "pair":
        return f"{found[1].name} against {found[0].name}"
    if shape == "series":
        noun = "snapshots" if found[0].snapshot is not None else "checkpoints"
        return f"{len(found)} {noun}, {found[0].name} to {found[-1].name}"
    return found[0].name if len(found) == 1 else f"{len(found)} models"


def _no_display(title: str, total: int | None) -> AbstractContextManager[None]:
    return nullcontext()
