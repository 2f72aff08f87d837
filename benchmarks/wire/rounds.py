"""Runs of the arms of a comparison, in turn, on all ranks at once, and what they cost.

Every round runs every arm once, in an order that changes from round to round, so that
a disturbance of the machine meets all of them. Ranks begin together, at a barrier. An arm returns
*marks*: readings of `time.perf_counter` at the ends of its steps. All ranks run on one machine, so
that clock is the same in all processes, and marks of different ranks can be subtracted.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.wire import links

__all__ = [
    "Arm",
    "Marks",
    "Report",
    "Round",
    "combine",
    "interleave",
    "middle",
    "now",
    "slowest",
    "spread",
]

Marks = dict[str, float]
Round = dict[str, Any]
Report = dict[str, list[Round]]
Arm = Callable[[], Marks]
now = time.perf_counter


def interleave(
    arms: Mapping[str, Arm],
    rounds: int,
    *,
    device: str,
    barrier: Callable[[], None],
    prepare: Callable[[str], None] = lambda name: None,
    check: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run arms in turn; all ranks call this with the same names.

    The first pass is not kept: it warms up, and it proves the results before anything is timed.

    Args:
        arms: what to run, by name.
        rounds: how often each is timed.
        device: the interface whose bytes are counted.
        barrier: waits for all ranks.
        prepare: called before each run, untimed.
        check: called after each run, untimed; it raises if the result is wrong.

    Returns:
        For each arm the rounds of this rank: "begin" and "end" (readings of the clock), "cpu"
        (processor seconds of this process), "sent" (bytes at the interface), "marks".
    """
    names = list(arms)
    report: Report = {name: [] for name in names}
    for number in range(rounds + 1):
        shift = number % max(1, len(names))
        for name in (*names[shift:], *names[:shift]):
            prepare(name)
            found = _once(arms[name], device, barrier)
            check(name)
            if number:
                report[name].append(found)
    return report


def _once(arm: Arm, device: str, barrier: Callable[[], None]) -> Round:
    gc.collect()
    barrier()
    sent = links.sent_nbytes(device)
    barrier()
    gc.disable()
    cpu, begin = time.process_time(), time.perf_counter()
    marks = arm()
    end, cpu = time.perf_counter(), time.process_time() - cpu
    gc.enable()
    # A rank that ends early must not count what others still send through it, nor miss it.
    barrier()
    sent = links.sent_nbytes(device) - sent
    return {"begin": begin, "end": end, "cpu": cpu, "sent": sent, "marks": marks}


def combine(reports: Sequence[Report], *, shared: bool) -> dict[str, dict[str, Any]]:
    """One row for each arm from what all ranks report.

    Args:
        reports: by rank.
        shared: whether all ranks count the bytes of one interface.

    Returns:
        By arm: "seconds" from the first rank's beginning until the slowest has ended (median,
        least, greatest), "cpu" (seconds of all
        ranks together, median), "nbytes" that the interfaces sent, all ranks together (median).
    """
    out = {}
    for name in reports[0]:
        rounds = list(zip(*(report[name] for report in reports), strict=True))
        total = max if shared else sum
        out[name] = {
            "seconds": spread(
                [max(r["end"] for r in ranks) - min(r["begin"] for r in ranks) for ranks in rounds]
            ),
            "cpu": statistics.median(sum(r["cpu"] for r in ranks) for ranks in rounds),
            "nbytes": statistics.median(total([r["sent"] for r in ranks]) for ranks in rounds),
        }
    return out


def slowest(
    reports: Sequence[Report], name: str, step: str, since: str, ranks: Sequence[int]
) -> float | None:
    """Median over the rounds of the slowest rank's time for one step.

    Args:
        reports: by rank.
        name: the arm.
        step: the mark at the end of the step.
        since: the mark at its beginning, or "begin".
        ranks: those that take the step.
    """
    found = []
    for number in range(len(reports[0][name])):
        rounds = [reports[rank][name][number] for rank in ranks]
        if not all(step in r["marks"] for r in rounds):
            return None
        found.append(max(_at(r, step) - _at(r, since) for r in rounds))
    return statistics.median(found)


def _at(found: Round, mark: str) -> float:
    return float(found["begin"] if mark == "begin" else found["marks"][mark])


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and greatest."""
    return [statistics.median(values), min(values), max(values)]


def middle(values: Sequence[float]) -> float:
    """The median of some figures."""
    return statistics.median(values)
