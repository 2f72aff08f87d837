"""The pictures of docs/compressibility.md as SVG: ratios by step, sizes of differences by gap, and
a map of the bits that a step changes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

from benchmarks.common.svg import FAINT, GREY, RIVAL, TEAL, label_places, opening

__all__ = [
    "BITS_ALT",
    "BITS_NAME",
    "GAPS_ALT",
    "GAPS_NAME",
    "STEPS_ALT",
    "STEPS_NAME",
    "Line",
    "bits",
    "gaps",
    "steps",
]

STEPS_NAME = "compressibility_steps.svg"
STEPS_ALT = "Ratio of the difference of one step, for six ways to train"
GAPS_NAME = "compressibility_gaps.svg"
GAPS_ALT = "Size of a difference against the steps between two states"
BITS_NAME = "compressibility_bits.svg"
BITS_ALT = "Share of weights in which a step changes each bit"
WIDTH, HEIGHT = 880, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 660, 76, 386
WIDE_LEFT, WIDE_RIGHT = 224, 820  # where the names are on the left
LINE_HEIGHT = 18
CELL_WIDTH, CELL_HEIGHT = 23, 22
N_EXPONENT_BITS = 8


@dataclass(frozen=True)
class Line:
    """A line of a picture.

    Attributes:
        name: beside its end.
        points: places on both axes, in order; places to the right are at least 1.
        is_main: whether it has our colour.
        is_reference: whether it is grey: what the others are compared with.
        dashes: lengths of dashes and spaces, in pixels; empty for a whole line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_main: bool = False
    is_reference: bool = False
    dashes: str = ""

    @property
    def colour(self) -> str:
        return TEAL if self.is_main else GREY if self.is_reference else RIVAL


class _Axes:
    """To the right powers of two; upwards the logarithm and names at the right ends of lines, or
    from 0 and names at the left ends: where lines differ."""

    def __init__(self, lines: Sequence[Line], *, is_log: bool) -> None:
        self.left, self.right = (LEFT, RIGHT) if is_log else (WIDE_LEFT, WIDE_RIGHT)
        self.names_are_left = not is_log
        points = [point for line in lines for point in line.points]
        self._last = max(log2(x) for x, _ in points)
        self._scale: Callable[[float], float] = log2 if is_log else float
        highest = max(y for _, y in points)
        self.marks = [2.0**i for i in range(12)] if is_log else [i / 5 for i in range(20)]
        self.marks = [mark for mark in self.marks if mark < 1.1 * highest]
        self._top = self._scale(1.1 * highest)

    def x(self, place: float) -> float:
        return self.left + (self.right - self.left) * log2(place) / self._last

    def y(self, place: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * self._scale(place) / self._top

    def grid(self, below: str, form: Callable[[float], str]) -> Iterator[str]:
        """Rules, numbers, and what the numbers below are."""
        rules = "".join(f"M{self.left} {self.y(mark):.1f}H{self.right}" for mark in self.marks)
        place = f'x="{self.right + 8}"' if self.names_are_left else f'x="{self.left - 8}"'
        anchor = "start" if self.names_are_left else "end"
        yield f'  <path d="{rules}" stroke="{FAINT}" stroke-opacity="0.25"/>'
        yield f'  <g fill="{GREY}" text-anchor="{anchor}">'
        for mark in self.marks:
            yield f'    <text {place} y="{self.y(mark) + 5:.1f}">{form(mark)}</text>'
        yield "  </g>"
        yield f'  <g fill="{GREY}" text-anchor="middle">'
        for power in range(int(self._last) + 1):
            x = self.x(1 << power)
            yield f'    <text x="{x:.1f}" y="{BOTTOM + 22}">{1 << power}</text>'
        yield f'    <text x="{(self.left + self.right) / 2}" y="{BOTTOM + 44}">{below}</text>'
        yield "  </g>"


def steps(lines: Iterable[Line]) -> str:
    """Ratios by step.

    Args:
        lines: for each run the ratio of the difference from the step before.
    """
    drawn = list(lines)
    return _chart(
        drawn,
        _Axes(drawn, is_log=True),
        STEPS_ALT,
        "One step of training, packed as a difference",
        "ratio of bf16 weights against the step before; higher is better",
        "step",
        lambda mark: f"{mark:g}",
    )


def gaps(lines: Iterable[Line]) -> str:
    """Sizes of differences by gap.

    Args:
        lines: for each part its size as a difference, over its size packed alone.
    """
    drawn = list(lines)
    return _chart(
        drawn,
        _Axes(drawn, is_log=False),
        GAPS_ALT,
        "How long a difference pays",
        "size of the difference; 100 % is the state packed alone; lower is better",
        "steps between the two states",
        lambda mark: f"{mark:.0%}",
    )


def _chart(
    lines: Sequence[Line],
    axes: _Axes,
    alt: str,
    title: str,
    subtitle: str,
    below: str,
    form: Callable[[float], str],
) -> str:
    drawn = sorted(lines, key=lambda line: line.is_main)  # ours above the others
    parts = [
        *opening((WIDTH, HEIGHT), alt, title, subtitle),
        *axes.grid(below, form),
        *(_path(axes, line) for line in drawn),
        *_names(axes, drawn),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _path(axes: _Axes, line: Line) -> str:
    places = "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in line.points)
    return (
        f'  <path d="M{places}" fill="none" stroke="{line.colour}" '
        f'stroke-width="{3 if line.is_main else 1.5}" stroke-linejoin="round"{_dashes(line)}/>'
    )


def _dashes(line: Line) -> str:
    return f' stroke-dasharray="{line.dashes}"' if line.dashes else ""


def _names(axes: _Axes, lines: Sequence[Line]) -> Iterator[str]:
    """The names at the ends of the lines, pushed apart where they would touch."""
    ends = [line.points[0 if axes.names_are_left else -1] for line in lines]
    heights = [axes.y(y) for _, y in ends]
    places = label_places(heights, BOTTOM, LINE_HEIGHT)
    elbow, at, anchor = axes.right + 28, axes.right + 32, "start"
    if axes.names_are_left:
        elbow, at, anchor = axes.left - 14, axes.left - 18, "end"
    for line, (x, _), y, place in zip(lines, ends, heights, places, strict=True):
        way = f"M{axes.x(x):.1f} {y:.1f}L{elbow} {place:.1f}"
        yield f'  <path d="{way}" stroke="{line.colour}"{_dashes(line)}/>'
        weight = ' font-weight="bold"' if line.is_main else ""
        yield (
            f'  <text x="{at}" y="{place + 5:.1f}" fill="{line.colour}" text-anchor="{anchor}"'
            f"{weight}>{escape(line.name)}</text>"
        )


def bits(rows: Sequence[tuple[int, Sequence[float]]]) -> str:
    """A map: a row for each step, a column for each bit; the fuller, the more often it changes.

    Args:
        rows: steps, and the share of values in which each of the 32 bits has changed.
    """
    top, n_bits = 104, len(rows[0][1])
    right, bottom = LEFT + CELL_WIDTH * n_bits, top + CELL_HEIGHT * len(rows)
    parts = [
        *opening(
            (WIDTH, bottom + 56),
            BITS_ALT,
            "Which bits of fp32 masters a step changes",
            "share of values whose bit is not that of the step before; empty: none; full: half",
        ),
        f'  <g fill="{GREY}" text-anchor="middle">',
        *_bit_names(top, n_bits),
        "  </g>",
        f'  <g fill="{GREY}" text-anchor="end">',
        *(
            f'    <text x="{LEFT - 8}" y="{top + CELL_HEIGHT * i + 16}">{step}</text>'
            for i, (step, _) in enumerate(rows)
        ),
        "  </g>",
        f'  <g fill="{TEAL}" stroke="{FAINT}" stroke-opacity="0.3">',
        *_cells(top, rows),
        "  </g>",
        f'  <path d="M{LEFT + 16 * CELL_WIDTH} {top}V{bottom + 8}" stroke="{RIVAL}"/>',
        f'  <text x="{LEFT + 16 * CELL_WIDTH}" y="{bottom + 26}" fill="{RIVAL}" '
        'text-anchor="middle">bits to the left are those of bf16</text>',
        f'  <text x="{right}" y="{bottom + 26}" fill="{GREY}" text-anchor="end">lowest bit</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bit_names(top: int, n_bits: int) -> Iterator[str]:
    middle = LEFT + CELL_WIDTH * (1 + N_EXPONENT_BITS / 2)
    yield f'    <text x="{LEFT + CELL_WIDTH / 2}" y="{top - 10}">sign</text>'
    yield f'    <text x="{middle + 12}" y="{top - 10}">exponent</text>'
    middle = LEFT + CELL_WIDTH * (1 + N_EXPONENT_BITS + n_bits) / 2
    yield f'    <text x="{middle}" y="{top - 10}">mantissa</text>'


def _cells(top: int, rows: Sequence[tuple[int, Sequence[float]]]) -> Iterator[str]:
    for i, (step, shares) in enumerate(rows):
        for k, share in enumerate(shares):
            # The first step may change a bit in more than half of the values.
            opacity = min(2 * share, 1.0)
            yield (
                f'    <rect x="{LEFT + CELL_WIDTH * k}" y="{top + CELL_HEIGHT * i}" '
                f'width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill-opacity="{opacity:.2f}">'
                f"<title>step {step}, bit {len(shares) - 1 - k}: {share:.1%}</title></rect>"
            )
