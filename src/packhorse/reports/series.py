"""How a series of checkpoints evolves: sizes in full and as deltas, what changes, and by how much.

Each checkpoint is read once, the newest first: its samples stay in memory, because each earlier
checkpoint is also the base of a delta of the newest (the gap). The others follow in order, and the
samples of the one before stay until the next has been compared. So there are three samples in
memory at most. With `full`, tensors are read from two open checkpoints instead, a tensor of each
for every thread.

Sizes are counted as a snapshot store counts them: a tensor that equals another one, of its own
checkpoint or of the one before, costs nothing; a rounded copy is packed against its master; and a
tensor for which a delta is no shorter is packed in full. Nothing that is wrong with one checkpoint
ends the series: the checkpoint is left out, or its damaged tensors are, on both sides of a
comparison, and a `Problem` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from packhorse.disk.results import Progress
from packhorse.reports.checkpoint import Checkpoint, SamplePlan, plan_samples
from packhorse.reports.deltas import Key, Measured, is_cast, is_comparable, measure_tensor
from packhorse.reports.movement import StepSizes
from packhorse.reports.names import kind_of, role_of
from packhorse.reports.results import (
    Estimate,
    Problem,
    Series,
    SourceRow,
    StepKindRow,
    StepRow,
    total,
)
from packhorse.reports.sampling import budget
from packhorse.reports.sources import READ_ERRORS, Opened, Source, opened
from packhorse.reports.stores import StoreFacts
from packhorse.reports.survey import look_through
from packhorse.threads import map_tensors

__all__ = ["describe_series", "measure_all"]

_MAX_GAPS = 32  # all gaps of a shorter series are measured
_GAP_RATIO = 1.19  # of a longer one, four to each doubling beyond these
_MIN_MOVED = 64  # counters of steps would make a group of their own
_ONE_THREAD_NBYTES = (1 << 19) - 1  # what `map_tensors` never shares: a tensor a thread


def measure_all(
    new: Checkpoint,
    old: Checkpoint | None,
    plan: SamplePlan,
    threads: int,
    *,
    fulls: Mapping[str, Measured] | None = None,
    old_keys: frozenset[Key] = frozenset(),
    sizes: StepSizes | None = None,
    progress: Progress | None = None,
) -> dict[str, Measured]:
    """What the tensors of a checkpoint take, by name.

    Args:
        new: the checkpoint.
        old: the one before; None if there is none.
        plan: where both are sampled.
        threads: how many tensors are packed at once.
        fulls: what the tensors take in full, if that is known.
        old_keys: the keys of the tensors before, wherever they were.
        sizes: gets how far the values moved.
        progress: called with the bytes of each tensor.

    Returns:
        The tensors in order, without those that are damaged in either checkpoint.
    """
    names = list(new.entries)

    def measure(i: int, n_threads: int) -> Measured | None:
        found = _measure(new, old, plan, names[i], n_threads, fulls, sizes)
        if progress is not None:
            progress(new.entries[names[i]].nbytes)
        return found

    lengths = [min(n, _ONE_THREAD_NBYTES) for n in new.sampled_nbytes(names)]
    measured = map_tensors(measure, lengths, threads)
    return {each.entry.name: each for each in _shared(measured, old_keys)}


def _measure(
    new: Checkpoint, old: Checkpoint | None, plan: SamplePlan, name: str, threads: int,
    fulls: Mapping[str, Measured] | None, sizes: StepSizes | None,
) -> Measured | None:  # fmt: skip
    sample = new.sample(name, threads)
    before = old.sample(name, threads) if old is not None else None
    if sample is None or (before is None and old is not None and name in old.entries):
        return None
    if before is not None and not is_comparable(before, sample):
        before = None
    master = new.sample(plan.casts[name], threads) if name in plan.casts else None
    if master is not None and not is_cast(sample, master):
        master = None
    known = fulls.get(name) if fulls is not None else None
    found = measure_tensor(sample, before, master=master, full=known.full if known else None)
    if before is not None and sizes is not None and before.entry.numel >= _MIN_MOVED:
        sizes.add(before, sample)
    return found if old is not None else replace(found, delta=None)


def _shared(measured: Sequence[Measured | None], old_keys: frozenset[Key]) -> Iterator[Measured]:
    """Tensors that equal an earlier one, or one of the checkpoint before, cost nothing."""
    seen: set[Key] = set()
    for each in measured:
        if each is None:
            continue
        if each.key in seen:
            each = replace(each, full=Estimate(0))
        if each.delta is not None and (each.key in seen or each.key in old_keys):
            each = replace(each, delta=Estimate(0))
        seen.add(each.key)
        yield each


class _GoneError(Exception):
    """A source could not be opened, none of it can be read, or it changed while it was open."""

    def __init__(self, source: Source, error: Exception | str) -> None:
        super().__init__(str(error))
        self.source = source


@dataclass
class _Done:
    """A checkpoint of the series, and its row."""

    source: Source
    row: StepRow
    keys: frozenset[Key]


def describe_series(
    sources: Sequence[Source],
    *,
    sample_nbytes: int,
    full: bool,
    threads: int,
    progress: Progress | None = None,
) -> tuple[Series, list[Problem]]:
    """What a report says of a series of checkpoints, or of the snapshots of a store.

    Args:
        sources: the checkpoints in order, from `find_sources`.
        sample_nbytes: how many bytes of each checkpoint to sample, about. Three times as many are
            in memory at most.
        full: whether to measure all tensors whole instead.
        threads: how many tensors are packed at once.
        progress: called with bytes of tensors as they are handled; for a series without problems
            they add up to those of all checkpoints.

    Returns:
        The series, and what could not be read or compared. The sums of a row leave out tensors that
        are damaged, there or in the checkpoint before. Of a long series, only about four gaps to
        each doubling are measured.
    """
    survey = look_through(sources)
    facts = StoreFacts(survey.sources)
    work = _Work(survey.sources, sample_nbytes, full, threads, progress, facts)
    series = work.run()
    return series, [*survey.problems, *work.problems(), *facts.problems()]


class _Work:
    """One pass over a series."""

    def __init__(
        self, sources: Sequence[Source], sample_nbytes: int, full: bool, threads: int,
        progress: Progress | None, facts: StoreFacts,
    ) -> None:  # fmt: skip
        self._sources = list(sources)
        self._sample_nbytes = sample_nbytes
        self._is_full = full
        self._threads = threads
        self._progress = progress
        self._facts = facts
        self._plan = SamplePlan(None, {}, {})
        self._held: dict[str, Checkpoint] = {}
        self._rows: dict[str, SourceRow] = {}
        self._gone: dict[str, str] = {}
        self._damaged: dict[str, dict[str, str]] = {}
        self._gaps: dict[str, Estimate] = {}

    def problems(self) -> Iterator[Problem]:
        """What could not be read."""
        for name, message in self._gone.items():
            yield Problem(name, None, f"{message}; the series goes on without this checkpoint")
        for name, damaged in self._damaged.items():
            yield from _damage(name, damaged)

    def run(self) -> Series:
        """Measures everything."""
        newest = self._begin()
        if newest is None:
            return Series((), (), ())
        source, fulls = newest
        wanted = self._wanted_gaps(source)
        done: list[_Done] = []
        for other in self._sources[: self._sources.index(source)]:
            self._advance(other, done)
            if len(done) > 1 and done[-2].source.name in wanted:
                self._add_gap(source, fulls, done[-2])
            if len(done) > 1:
                self._let_go(done[-2])
        sizes = StepSizes()
        self._finish(source, fulls, done, sizes)
        return Series(
            tuple(each.row for each in done), tuple(self._sorted_gaps(source)), sizes.rows()
        )

    def _begin(self) -> tuple[Source, dict[str, Measured]] | None:
        """The newest checkpoint that can be read, and what its tensors take in full."""
        for source in reversed(self._sources):
            try:
                with _opened(source) as found:
                    self._plan = self._planned(found)
                return source, self._measure(source, None)
            except _GoneError as error:
                self._report(error)
        return None

    def _planned(self, found: Opened) -> SamplePlan:
        if self._is_full:
            return plan_samples(found, None)
        return plan_samples(found, budget(found.entries, self._sample_nbytes))

    def _wanted_gaps(self, newest: Source) -> set[str]:
        """The checkpoints that the newest is compared with: all, or some of many."""
        older = self._sources[: self._sources.index(newest)][::-1]
        chosen, last = set(), 0.0
        for source in older:
            gap = self._gap(source, newest)
            if len(older) <= _MAX_GAPS or gap >= last * _GAP_RATIO:
                chosen.add(source.name)
                last = gap
        return chosen

    def _gap(self, old: Source, new: Source) -> int:
        if old.step is None or new.step is None:
            return self._sources.index(new) - self._sources.index(old)
        return new.step - old.step

    def _advance(self, source: Source, done: list[_Done]) -> None:
        """Measures the next checkpoint against the last good one."""
        while True:
            try:
                measured = self._measure(source, done[-1] if done else None, reports=True)
            except _GoneError as error:
                self._report(error)
                if error.source is source:
                    return
                done.pop()  # it changed after it had been measured
            else:
                done.append(self._done(source, measured))
                return

    def _add_gap(self, newest: Source, fulls: Mapping[str, Measured], old: _Done) -> None:
        try:
            measured = self._measure(newest, old, fulls=fulls)
        except _GoneError as error:
            self._report(error)
            return
        self._gaps[old.source.name] = _sum(measured)[1] or Estimate(0)

    def _finish(
        self, newest: Source, fulls: Mapping[str, Measured], done: list[_Done], sizes: StepSizes
    ) -> None:
        """The newest checkpoint's row; its delta is also the nearest gap."""
        while True:
            old = done[-1] if done else None
            try:
                measured = self._measure(newest, old, fulls=fulls, sizes=sizes, reports=True)
            except _GoneError as error:
                self._report(error)
                if error.source is newest:
                    return
                done.pop()
            else:
                break
        done.append(self._done(newest, measured))
        if old is not None:
            self._gaps[old.source.name] = done[-1].row.delta or Estimate(0)

    def _sorted_gaps(self, newest: Source) -> list[tuple[int, Estimate]]:
        """The gaps, the nearest first."""
        order = [source for source in reversed(self._sources) if source.name in self._gaps]
        return [(self._gap(source, newest), self._gaps[source.name]) for source in order]

    def _measure(
        self, source: Source, old: _Done | None, *, fulls: Mapping[str, Measured] | None = None,
        sizes: StepSizes | None = None, reports: bool = False,
    ) -> dict[str, Measured]:  # fmt: skip
        progress = self._progress if reports else None
        keys = old.keys if old else frozenset[Key]()
        with ExitStack() as stack:
            before = stack.enter_context(self._checkpoint(old.source)) if old else None
            new = stack.enter_context(self._checkpoint(source))
            measured = measure_all(
                new, before, self._plan, self._threads, fulls=fulls, old_keys=keys, sizes=sizes,
                progress=progress,
            )  # fmt: skip
            if len(new.damaged) == len(new.entries) > 0:
                self._damaged.pop(source.name, None)
                raise _GoneError(source, next(iter(new.damaged.values())))
        return measured

    @contextmanager
    def _checkpoint(self, source: Source) -> Iterator[Checkpoint]:
        """A checkpoint: its samples, which are read at first use, or the open source itself."""
        held = self._held.get(source.name)
        if held is None:
            with _opened(source) as found:
                checkpoint = Checkpoint(found, self._plan)
                self._rows[source.name] = found.row
                if self._is_full:
                    yield checkpoint
                else:
                    checkpoint.hold(self._threads)
            self._damaged.setdefault(source.name, {}).update(checkpoint.damaged)
            if self._is_full:
                return
            held = self._held[source.name] = checkpoint
        yield held

    def _let_go(self, done: _Done) -> None:
        """Frees what is only needed of the last checkpoint."""
        self._held.pop(done.source.name, None)
        done.keys = frozenset()

    def _report(self, error: _GoneError) -> None:
        self._gone.setdefault(error.source.name, str(error))
        self._held.pop(error.source.name, None)

    def _done(self, source: Source, measured: Mapping[str, Measured]) -> _Done:
        keys = frozenset(each.key for each in measured.values())
        nbytes = sum(each.entry.nbytes for each in measured.values())
        step = source.step if source.step is not None else self._sources.index(source)
        row = StepRow(
            source.name, step, nbytes, *_sum(measured), _kinds(measured),
            *self._facts.of(self._rows[source.name]),
        )  # fmt: skip
        return _Done(source, row, keys)


@contextmanager
def _opened(source: Source) -> Iterator[Opened]:
    """Opens a source; whatever is wrong with the source itself is a `_GoneError`."""
    failure: BaseException | None = None
    try:
        with opened(source) as found:
            try:
                yield found
            except BaseException as error:
                failure = error
                raise
    except READ_ERRORS as error:
        if error is failure:
            raise
        raise _GoneError(source, error) from error


def _sum(measured: Mapping[str, Measured]) -> tuple[Estimate, Estimate | None, float | None]:
    """Bytes in full, as deltas, and the share of unchanged elements."""
    full = total([each.full for each in measured.values()])
    deltas = [each.delta for each in measured.values() if each.delta is not None]
    delta = total(deltas) if len(deltas) == len(measured) else None
    known = [(each.entry.numel, each.unchanged) for each in measured.values()]
    weights = [(numel, share) for numel, share in known if share is not None]
    numel = sum(numel for numel, _ in weights)
    return full, delta, sum(n * share for n, share in weights) / numel if numel else None


def _kinds(measured: Mapping[str, Measured]) -> tuple[StepKindRow, ...]:
    groups: dict[tuple[str, str, str], dict[str, Measured]] = {}
    for name, each in measured.items():
        key = role_of(name), kind_of(name), each.entry.dtype
        groups.setdefault(key, {})[name] = each
    return tuple(
        StepKindRow(*key, sum(each.entry.nbytes for each in group.values()), *_sum(group))
        for key, group in groups.items()
    )


def _damage(source: str, damaged: Mapping[str, str]) -> Iterator[Problem]:
    """One problem for all damaged tensors of a checkpoint."""
    if not damaged:
        return
    name, message = next(iter(damaged.items()))
    others = f" (and {len(damaged) - 1} more tensors)" if len(damaged) > 1 else ""
    yield Problem(
        source, name,
        f"{message}{others}; left out of this checkpoint and of the comparison with the next; "
        "get the file again, or restore it from a copy",
    )  # fmt: skip
