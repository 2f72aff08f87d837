"""How often to take snapshots, and how many deltas to chain: measured on a sample, then computed.

The bytes of a delta follow from the gap between two snapshots: the series has measured them for
some gaps, and between those the logarithm of the bytes is taken to be linear in the logarithm of
the gap. Seconds follow from rates that are measured here. A pair (every k steps, chains of c
deltas) then costs, for each snapshot on average,

- bytes: one snapshot of c + 1 is full, without the tensors that never change; the others are
  deltas;
- seconds of packing: a delta also unpacks its base along the chain, and then the bytes are written;
- a stall: `take_async` copies the state while the job waits, and packing must be done before the
  next snapshot is due;
- a restore: the chain of the snapshot is read and unpacked;
- steps that a failure costs: half of those between two snapshots, and those during packing.

The recommended pair is the smallest store among the pairs that waste little more of the job's time
than the best one. Waste is stalls, and what failures cost (J. W. Young, 1974; J. T. Daly, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from packhorse.reports.names import steps_of
from packhorse.reports.rates import DiskRate, Rates, measure_disk, measure_rates
from packhorse.reports.results import Policy, PolicyRow, Series
from packhorse.reports.sources import Source
from packhorse.reports.stores import summaries

__all__ = ["CHAINS", "Model", "recommend", "seconds_per_step"]

CHAINS = (0, 1, 2, 4, 8, 16, 32, 63)
_STEPS = 1000  # what the rows are for
_SAMPLE_NBYTES = 1 << 26
_MORE_WASTE = 0.005  # of the job's time; with a failure a day, about a quarter of an hour apart
_SLOWER_RESTORE = 2.0  # times that of a full snapshot
_HOUR = 3600.0
_MIN_INTERVALS = 8  # how many times the smallest gap the longest interval is, at least
_MAX_INTERVALS = 1024


@dataclass(frozen=True)
class Model:
    """What the rows are computed from.

    Attributes:
        nbytes: bytes of a checkpoint.
        full: bytes of a full snapshot.
        gaps: (steps, bytes of a delta), the nearest first; at least one.
        rates: seconds for each byte.
        disk: bytes a second.
        step_seconds: how long a step takes; None if unknown.
    """

    nbytes: int
    full: int
    gaps: tuple[tuple[int, int], ...]
    rates: Rates
    disk: DiskRate
    step_seconds: float | None

    def delta(self, gap: int) -> float:
        """Bytes of a delta after so many steps, at most those of a full snapshot."""
        return min(_interpolated(self.gaps, gap), self._again)

    @property
    def _again(self) -> float:
        """Bytes of a full snapshot in a store that has the tensors which never change."""
        return self.full * self.rates.changed

    def row(self, every: int, chain: int) -> PolicyRow:
        """What taking a snapshot every so many steps with chains of so many deltas costs."""
        delta, n = self.delta(every), _STEPS / every
        stored = (self._again + chain * delta) / (chain + 1)
        seconds = self._pack_seconds(chain) + stored / self.disk.write
        late = max(seconds - every * self.step_seconds, 0.0) if self.step_seconds else 0.0
        lost = every / 2 + (seconds / self.step_seconds if self.step_seconds else 0.0)
        return PolicyRow(
            every, chain, round(n * stored), n * seconds, n * (self.stall_seconds + late),
            self._restore_seconds(chain, delta), lost,
        )  # fmt: skip

    @property
    def stall_seconds(self) -> float:
        """How long the job waits for the copies of one snapshot."""
        return self.nbytes * self.rates.copy

    def _pack_seconds(self, chain: int) -> float:
        """Of a snapshot on average. The base of the delta of number j has j - 1 deltas."""
        rates, n_bases = self.rates, chain * (chain - 1) / 2
        deltas = chain * (rates.pack_delta + rates.unpack_base) + n_bases * rates.unpack_delta
        return self.nbytes * (rates.pack_full + deltas) / (chain + 1)

    def _restore_seconds(self, chain: int, delta: float) -> float:
        """Of a snapshot on average: half of the chain's deltas."""
        read = self.full + chain / 2 * delta * self.rates.differences
        unpacked = self.rates.unpack_full + chain / 2 * self.rates.unpack_delta
        return read / self.disk.read + self.nbytes * unpacked


def _interpolated(points: Sequence[tuple[int, int]], gap: int) -> float:
    """The value at a gap; beyond the points, the nearest two are continued."""
    if len(points) == 1:
        return float(points[0][1])
    logs = [(math.log(steps), math.log(max(nbytes, 1))) for steps, nbytes in points]
    at = math.log(gap)
    pairs = list(pairwise(logs))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return math.exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def recommend(
    series: Series,
    sources: Sequence[Source],
    *,
    threads: int,
    sample_nbytes: int = _SAMPLE_NBYTES,
    step_seconds: float | None = None,
    hours_between_failures: float = 24.0,
    disk: DiskRate | None = None,
) -> Policy | None:
    """Computes what snapshots cost at several intervals and chains, and recommends a pair.

    Args:
        series: what `describe_series` says of the sources.
        sources: the checkpoints.
        threads: how many threads pack and unpack.
        sample_nbytes: bytes of two checkpoints to measure rates on, about.
        step_seconds: how long a step of the training takes; None to take it from the times of the
            snapshots of a store, if they have any.
        hours_between_failures: how often a failure ends the job, on average.
        disk: the rate of the disk; None to measure it.

    Returns:
        The policy; None if the series has no delta, or if nothing ever changes in it.

    Raises:
        ValueError: `step_seconds` or `hours_between_failures` is not above 0; or as below.
        PackhorseError, OSError: the newest two checkpoints cannot be read any more, or nothing can
            be written into the temporary folder.
    """
    for name, value in (
        ("step_seconds", step_seconds),
        ("hours_between_failures", hours_between_failures),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    gaps, note = _gaps(series)
    note += _numbers_note(sources)
    if not any(nbytes for _, nbytes in gaps):
        return None
    by_name = {source.name: source for source in sources}
    old, new = (by_name[row.name] for row in series.steps[-2:])
    measured_step = seconds_per_step(series, sources) if step_seconds is None else None
    newest = series.steps[-1]
    model = Model(
        newest.nbytes, newest.full.nbytes, gaps,
        measure_rates(old, new, sample_nbytes=sample_nbytes, threads=threads),
        disk or measure_disk(new.path), step_seconds or measured_step,
    )  # fmt: skip
    rows = [model.row(every, chain) for every in _intervals(model, series) for chain in CHAINS]
    latest = newest.step - series.steps[-2].step
    chosen, reason = _choose(model, rows, latest, hours_between_failures)
    return Policy(
        tuple(rows), chosen, reason,
        tuple(_assumptions(model, rows, note, measured_step, hours_between_failures)),
    )  # fmt: skip


def seconds_per_step(series: Series, sources: Sequence[Source]) -> float | None:
    """How long a step took, by the times of the snapshots of a store: the median. None if the
    sources are no snapshots."""
    known = summaries(sources)
    by_name = {source.name: source.snapshot for source in sources}
    times = [(row.step, known.get(by_name.get(row.name) or "")) for row in series.steps]
    taken = [(step, summary.time) for step, summary in times if summary is not None]
    found = [
        (later - earlier).total_seconds() / (b - a)
        for (a, earlier), (b, later) in pairwise(taken)
        if b > a and later > earlier
    ]
    return median(found) if found else None


def _gaps(series: Series) -> tuple[tuple[tuple[int, int], ...], str]:
    """Bytes of deltas by gap, and where those of the shortest gaps come from."""
    gaps = {steps: each.nbytes for steps, each in series.gaps if steps > 0}
    if not gaps:
        return (), ""
    nearest, full = min(gaps), series.steps[-1].full.nbytes
    early: dict[int, list[float]] = {}
    for before, row in pairwise(series.steps):
        gap = row.step - before.step
        if 0 < gap < nearest and row.delta is not None and row.full.nbytes:
            early.setdefault(gap, []).append(row.delta.nbytes / row.full.nbytes)
    for gap, shares in early.items():
        gaps[gap] = round(median(shares) * full)
    note = f"gaps below {nearest} steps occur only earlier in the series; " if early else ""
    return tuple(sorted(gaps.items())), note


def _numbers_note(sources: Sequence[Source]) -> str:
    """What a step is, if the snapshots of a store are only counted."""
    names = [source.snapshot for source in sources if source.snapshot is not None]
    if not names or steps_of(names) == [source.step for source in sources]:
        return ""
    return "the names of the snapshots do not count steps, so a step is one snapshot here; "


def _intervals(model: Model, series: Series) -> list[int]:
    """Powers of two times the smallest gap: beyond the gaps that were measured, and up to an hour
    if a step's time is known."""
    first, last = model.gaps[0][0], model.gaps[-1][0]
    longest = max(_MIN_INTERVALS * first, 4 * last)
    if model.step_seconds:
        longest = max(longest, int(_HOUR / model.step_seconds))
    n = min(longest // first, _MAX_INTERVALS).bit_length()
    return [first << i for i in range(n)]


def _choose(model: Model, rows: Sequence[PolicyRow], latest: int, hours: float) -> tuple[int, str]:
    """The number of the recommended row, and why. `latest` is the gap between the newest two."""
    plain = {row.every: row.restore_seconds for row in rows if row.chain == 0}
    quick = [row for row in rows if row.restore_seconds <= _SLOWER_RESTORE * plain[row.every]]
    if model.step_seconds is None:
        every = min((row.every for row in rows), key=lambda n: abs(math.log(n / max(latest, 1))))
        row = min((row for row in quick if row.every == every), key=_smallest)
        return rows.index(row), (
            f"How long a step takes is not known, so the interval stays near that of the newest "
            f"checkpoints ({latest:,} steps); there, chains of {row.chain} make the smallest store "
            f"({_stored(row)}) of those that "
            f"{_restores(row, plain)}; each stalls the job for {_time(model.stall_seconds)}."
        )
    wastes = {id(row): _waste(row, model.step_seconds, hours) for row in rows}
    least = min(wastes.values())
    good = [row for row in quick if wastes[id(row)] <= least + _MORE_WASTE]
    row = min(good or [min(quick, key=lambda row: wastes[id(row)])], key=_smallest)
    return rows.index(row), (
        f"A snapshot every {row.every:,} steps with chains of {row.chain} makes the smallest store "
        f"({_stored(row)}) of the pairs that waste at most {_percent(_MORE_WASTE)} more of the "
        f"job's time than the best one ({_percent(wastes[id(row)])} against {_percent(least)}, for "
        f"stalls and one failure in {hours:g} hours) and {_restores(row, plain)}."
    )


def _stored(row: PolicyRow) -> str:
    return f"{_size(row.nbytes)} in {_STEPS:,} steps"


def _restores(row: PolicyRow, plain: dict[int, float]) -> str:
    return (
        f"restore in at most twice the time of a full snapshot ({_time(row.restore_seconds)} "
        f"against {_time(plain[row.every])})"
    )


def _smallest(row: PolicyRow) -> tuple[int, int, int]:
    """Of equal stores, the one with the shorter chain."""
    return row.nbytes, row.chain, row.every


def _waste(row: PolicyRow, step_seconds: float, hours: float) -> float:
    """The share of the job's time that stalls and failures cost."""
    stalled = row.stall_seconds / (_STEPS * step_seconds)
    return stalled + (row.lost_steps * step_seconds + row.restore_seconds) / (hours * _HOUR)


def _assumptions(
    model: Model, rows: Sequence[PolicyRow], note: str, measured_step: float | None, hours: float
) -> list[str]:
    rates, disk = model.rates, model.disk
    first, last = model.gaps[0][0], model.gaps[-1][0]
    beyond = f"; sizes of gaps above {last} steps are extrapolated" * (rows[-1].every > last)
    where = f"measured in {disk.place}" if disk.place else "as given"
    words = [
        f"Rates are measured on {_size(rates.sampled_nbytes)} with {rates.threads} threads, at the "
        f"level default: packing {_rate(rates.pack_full)} in full and {_rate(rates.pack_delta)} as "
        f"a delta, unpacking {_rate(rates.unpack_full)} in full and {_rate(rates.unpack_delta)} "
        f"for each delta, copying {_rate(rates.copy)}.",
        f"The disk writes {_size(round(disk.write))} and reads {_size(round(disk.read))} a second, "
        f"{where}.",
        f"Bytes of deltas are those at the end of the series, measured for gaps of {first} to "
        f"{last} steps and interpolated between; {note}training is taken to go on alike{beyond}.",
        "Snapshots are taken in the background: the job waits for a copy of its state in memory "
        "(from a GPU the copy takes as long as its bus needs), and for a snapshot that is not "
        "packed when the next is due. Packing in the background may slow down a job that uses all "
        "cores.",
        "Bases of deltas are unpacked again for each snapshot; with cache_nbytes= they stay in "
        "memory, and packing takes less time.",
    ]  # fmt: skip
    return [*words, *_of_steps(model, rows, measured_step, hours)]


def _of_steps(
    model: Model, rows: Sequence[PolicyRow], measured_step: float | None, hours: float
) -> list[str]:
    """What is known of the time of a step, and what follows by Young and Daly."""
    seconds = model.step_seconds
    if seconds is None:
        return [
            "How long a step takes is not known: give it, to see how much of its time the job "
            "stalls, and to get an interval."
        ]
    source = "by the times of the snapshots (give the time if they were taken later)"
    best = math.sqrt(2 * model.stall_seconds * hours * _HOUR)
    return [
        f"A step takes {_time(seconds)}, {source if measured_step else 'as given'}; a failure ends "
        f"the job once in {hours:g} hours.",
        "By Young (1974) and Daly (2006), the interval that wastes the least time is the square "
        "root of 2 x stall x time between failures: "
        f"{_time(best)}, or {max(round(best / seconds), 1):,} steps.",
    ]


def _size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def _rate(seconds_per_byte: float) -> str:
    return f"{_size(1 / seconds_per_byte)}/s" if seconds_per_byte else "in no time"


def _time(seconds: float) -> str:
    for unit, factor in (("h", _HOUR), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
