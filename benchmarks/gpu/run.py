"""The settings that `gpu.py device` gives to each of its parts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """The settings of a part.

    Attributes:
        smoke: on a tiny scale, on the CPU.
        ends: when the part that runs has to end, by `time.monotonic`.
        cache: folder of the autotuner's cache; None for the usual one.
        again: tune what was tuned before, too.
        keep: writes the rows that a part has so far.
        strategies: names of the only ones that part `repeat` repeats, if any are given.
    """

    smoke: bool
    ends: float
    cache: Path | None
    again: bool
    keep: Callable[[list[dict[str, Any]]], None]
    strategies: Sequence[str] = ()

    def is_late(self) -> bool:
        """Whether the part has to end."""
        return time.monotonic() > self.ends

    def left(self) -> float:
        """Seconds until the part has to end; at least 20, as other programs take some to start."""
        return max(self.ends - time.monotonic(), 20.0)
