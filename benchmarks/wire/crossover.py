"""At which rate of the link sending raw wins, from what packing costs.

An arm that takes `codec` seconds more than raw outside the wire and sends `saved` bytes fewer is
ahead while the wire carries fewer than `saved / codec` bytes a second. That is checked against the
measured points: below this rate the arm's time must be less than raw's, and above it greater.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RAW", "Crossover", "Line", "crossover", "line", "points"]

RAW = "raw"
Row = Mapping[str, Any]
Cases = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """The model of an arm's time: `seconds + nbytes / rate`.

    Attributes:
        seconds: encoding, decoding and applying.
        nbytes: of the payload.
    """

    seconds: float
    nbytes: float

    def at(self, rate: float) -> float:
        """Seconds from end to end if the wire carries `rate` bytes a second."""
        return self.seconds + self.nbytes / rate


@dataclass(frozen=True)
class Crossover:
    """Where an arm and raw take the same time.

    Attributes:
        rate: bytes a second above which raw wins; None if the arm wins at any rate.
        agrees: measured points whose winner is the one that the rate says.
        total: measured points.
    """

    rate: float | None
    agrees: int
    total: int


def line(cases: Cases, arm: str) -> Line:
    """An arm's time from its steps, as medians over the rates.

    Args:
        cases: the same update at several rates.
        arm: its name.
    """
    rows = [case["rows"][arm] for case in cases]
    steps = [row["encode"] + row["decode"] + row["apply"] for row in rows]
    return Line(statistics.median(steps), rows[0]["payload"])


def points(cases: Cases, arm: str) -> list[tuple[float, float]]:
    """For each rate the bytes a second that raw reached on the wire, and the arm's seconds."""
    return [
        (case["rows"][RAW]["payload"] / case["rows"][RAW]["wire"], case["rows"][arm]["seconds"][0])
        for case in cases
    ]


def crossover(cases: Cases, arm: str) -> Crossover:
    """Where raw overtakes an arm.

    Args:
        cases: the same update at several rates.
        arm: any but raw.
    """
    own, raw = line(cases, arm), line(cases, RAW)
    more = own.seconds - raw.seconds
    rate = (raw.nbytes - own.nbytes) / more if more > 0 else None
    agrees = 0
    for (reached, seconds), (_, raw_seconds) in zip(
        points(cases, arm), points(cases, RAW), strict=True
    ):
        wins = rate is None or reached < rate
        agrees += wins == (seconds < raw_seconds)
    return Crossover(rate, agrees, len(cases))
