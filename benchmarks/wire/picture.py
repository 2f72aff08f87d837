"""Time of a weight update against the rate of the link as an SVG: lines from the steps of each arm,
points where it was measured, and where raw overtakes ours."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.common.svg import FAINT, GREY, RIVAL, TEAL, opening
from benchmarks.wire.crossover import RAW, Line, crossover, line, points

__all__ = ["ALT", "NAME", "picture"]

NAME = "benchmarks_wire.svg"
ALT = "Time until a weight update is applied, against the rate of the link"
WIDTH, HEIGHT = 880, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 660, 76, 430
LABEL_STEP = 18
STEPS = 40
Cases = Sequence[Mapping[str, Any]]


def picture(cases: Cases, arms: Sequence[str], ours: str, what: str) -> str:
    """The SVG of docs/.

    Args:
        cases: one update at several rates.
        arms: those to draw.
        ours: the arm in our colour.
        what: one line that says what is sent.
    """
    axes = _Axes(cases, arms)
    lines = [
        *opening(
            (WIDTH, HEIGHT),
            ALT,
            what,
            "ms until the slowest worker has the new weights; lower is better."
            " Points are measured, lines come from the steps",
        ),
        *axes.grid(),
    ]
    for arm in arms:
        lines += _arm(axes, cases, arm, _colour(arm, ours), heavy=arm == ours)
    lines += _labels(axes, cases, arms, ours)
    lines += _crossing(axes, cases, ours)
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Axes:
    """Logarithmic axes: Gb/s to the right, ms upwards."""

    def __init__(self, cases: Cases, arms: Sequence[str]) -> None:
        reached = [rate for rate, _ in points(cases, RAW)]
        self._x = _decades([8 * rate / 1e9 for rate in reached], 1.6)
        seconds = [s for arm in arms for _, s in points(cases, arm)]
        rates = self.rates()
        seconds += [line(cases, arm).at(rate) for arm in arms for rate in (rates[0], rates[-1])]
        self._y = _decades([1e3 * s for s in seconds], 1.1)

    def x(self, rate: float) -> float:
        """Place of a rate in bytes a second."""
        return LEFT + (RIGHT - LEFT) * _share(8 * rate / 1e9, self._x)

    def y(self, seconds: float) -> float:
        """Place of a time."""
        return BOTTOM - (BOTTOM - TOP) * _share(1e3 * seconds, self._y)

    def rates(self) -> list[float]:
        """Rates over the whole axis, in bytes a second."""
        low, high = self._x
        return [low * (high / low) ** (k / STEPS) * 1e9 / 8 for k in range(STEPS + 1)]

    def grid(self) -> Iterator[str]:
        yield f'  <g stroke="{FAINT}" stroke-width="0.5" fill="none">'
        for value in _ticks(self._x):
            yield f'    <path d="M{self.x(value * 1e9 / 8):.1f} {TOP}V{BOTTOM}"/>'
        for value in _ticks(self._y):
            yield f'    <path d="M{LEFT} {self.y(value / 1e3):.1f}H{RIGHT}"/>'
        yield "  </g>"
        yield f'  <g fill="{GREY}">'
        for value in _ticks(self._x):
            x = self.x(value * 1e9 / 8)
            yield f'    <text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{value:g}</text>'
        for value in _ticks(self._y):
            y = self.y(value / 1e3) + 5
            yield f'    <text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{value:g}</text>'
        middle = (LEFT + RIGHT) / 2
        yield (
            f'    <text x="{middle}" y="{BOTTOM + 42}" text-anchor="middle">'
            "Gb/s that raw reached on the wire</text>"
        )
        yield "  </g>"


def _decades(values: Sequence[float], margin: float) -> tuple[float, float]:
    return min(values) / margin, max(values) * margin


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return math.log(value / low) / math.log(high / low)


def _ticks(ends: tuple[float, float]) -> list[float]:
    low, high = (math.floor(math.log10(end)) for end in ends)
    powers = [m * 10.0**k for k in range(low, high + 1) for m in (1, 2, 5)]
    return [power for power in powers if ends[0] <= power <= ends[1]]


def _colour(arm: str, ours: str) -> str:
    return {ours: TEAL, RAW: GREY}.get(arm, RIVAL)


def _arm(axes: _Axes, cases: Cases, arm: str, colour: str, *, heavy: bool) -> Iterator[str]:
    model: Line = line(cases, arm)
    places = [f"{axes.x(rate):.1f} {axes.y(model.at(rate)):.1f}" for rate in axes.rates()]
    width = 2.5 if heavy else 1.2
    yield (
        f'  <path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    )
    for rate, seconds in points(cases, arm):
        yield (
            f'  <circle cx="{axes.x(rate):.1f}" cy="{axes.y(seconds):.1f}" '
            f'r="{5 if heavy else 3.5}" fill="{colour}"/>'
        )


def _labels(axes: _Axes, cases: Cases, arms: Sequence[str], ours: str) -> Iterator[str]:
    """Names at the right ends of the lines, pushed apart where they would touch."""
    last = axes.rates()[-1]
    wanted = sorted((axes.y(line(cases, arm).at(last)), arm) for arm in arms)
    at: float = TOP - LABEL_STEP
    placed = []
    for y, arm in wanted:
        at = max(y + 5, at + LABEL_STEP)
        placed.append((at, y, arm))
    over = max(0.0, at - BOTTOM)
    for at, y, arm in placed:
        weight = ' font-weight="bold"' if arm == ours else ""
        colour = _colour(arm, ours)
        yield (
            f'  <path d="M{RIGHT + 2} {y:.1f}L{RIGHT + 18} {at - over - 5:.1f}" '
            f'stroke="{colour}" stroke-width="0.7"/>'
        )
        yield (
            f'  <text x="{RIGHT + 22}" y="{at - over:.1f}" fill="{colour}"{weight}>'
            f"{escape(arm)}</text>"
        )


def _crossing(axes: _Axes, cases: Cases, ours: str) -> Iterator[str]:
    """A ring where raw overtakes ours, if that is inside the picture."""
    rate = crossover(cases, ours).rate
    rates = axes.rates()
    if rate is None or not rates[0] <= rate <= rates[-1]:
        return
    x, y = axes.x(rate), axes.y(line(cases, ours).at(rate))
    yield f'  <circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{TEAL}"/>'
    words = f"raw wins above {8 * rate / 1e9:.1f} Gb/s"
    yield (
        f'  <text x="{min(x, RIGHT - 90):.1f}" y="{y - 14:.1f}" text-anchor="middle" '
        f'fill="{TEAL}">{words}</text>'
    )
