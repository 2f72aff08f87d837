"""How a report is made: what its caller chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from packhorse.arguments import resolve_threads
from packhorse.reports.sampling import Places, budget, choose_places
from packhorse.reports.sources import Entry

__all__ = ["SAMPLE_NBYTES", "Options", "Watch"]

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

    def share(self, entries: Sequence[Entry]) -> float:
        """How much of each tensor of a source to look at; 1 for all of it."""
        return 1.0 if self.full else min(budget(entries, self.sample_nbytes), 1.0)

    def places(self, entries: Sequence[Entry]) -> list[Places]:
        """Where to look at the tensors of a source."""
        share = self.share(entries)
        return [choose_places(entry, share) for entry in entries]
