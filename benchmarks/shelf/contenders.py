"""The stores that take part in a work, each in a folder of its own, and their seconds."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.codecs.measure import Seconds, time_call
from benchmarks.common.files import evict, nbytes_on_disk
from benchmarks.shelf.store import Layout, Store
from benchmarks.shelf.stores import STORES

__all__ = ["Contender", "enter", "in_turn", "summary"]


class Contender:
    """A store that takes part.

    Attributes:
        name: its key in `STORES`.
        store: the store, open.
        seconds: processor and wall seconds of each call, by what was done.
    """

    def __init__(self, name: str, folder: Path, layout: Layout) -> None:
        folder.mkdir(parents=True)
        self.name, self.folder, self.layout = name, folder, layout
        self.store: Store = STORES[name].make(folder, layout)
        self.seconds: dict[str, list[Seconds]] = {}

    @property
    def nbytes(self) -> int:
        """What its files take of the disk."""
        return nbytes_on_disk(self.folder)

    def time(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call something of the store, and keep the seconds; returns what it returns."""
        result, seconds = time_call(lambda values: call(*values), args)
        self.seconds.setdefault(what, []).append(seconds)
        return result

    def reopen(self, *, cold: bool = False) -> None:
        """Open the store again, without anything that its process kept.

        Args:
            cold: whether its files leave the system's cache too.
        """
        self.store.close()
        if cold:
            evict(self.folder)
        self.store = STORES[self.name].make(self.folder, self.layout)
        if cold:  # what opening has read
            evict(self.folder)


def enter(
    names: Iterable[str], work: str, folder: Path, layout: Layout
) -> tuple[list[Contender], dict[str, str]]:
    """Make the stores that do a work.

    Returns:
        Those that are installed, and why the others do not take part.
    """
    entered, absent = [], {}
    for i, name in enumerate(names):
        if work not in STORES[name].works:
            continue
        try:
            entered.append(Contender(name, folder / f"{work}-{i}", layout))
        except ImportError as reason:
            absent[name] = str(reason)
    return entered, absent


def in_turn(contenders: list[Contender], round_: int) -> list[Contender]:
    """The contenders in an order that changes from round to round."""
    first = round_ % max(1, len(contenders))
    return contenders[first:] + contenders[:first]


def summary(seconds: list[Seconds]) -> dict[str, float]:
    """Milliseconds of the calls by the clock: mean, median, least and greatest; and the mean of the
    processor."""
    cpu, wall = zip(*seconds, strict=True)
    figures = {
        "mean": statistics.fmean(wall),
        "median": statistics.median(wall),
        "least": min(wall),
        "greatest": max(wall),
        "cpu": statistics.fmean(cpu),
    }
    return {name: round(1e3 * value, 3) for name, value in figures.items()}
