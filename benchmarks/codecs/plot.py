"""Draw ratio against decoding speed as an SVG, with a point for each codec.

No plotting library is used, so the file is small and its text stays text. It has middle tones on a
transparent background, so that it is readable on white and on black. The axis of speed is
logarithmic, because rivals are far apart. A codec slower than `SLOWEST` is an arrow at the left
end, with its speed in words. Each label takes the nearest free place to its point, ours first and
then those in crowds; a thin line connects a label that lies far from its point.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.common.svg import FAINT, FONT_SIZE, GREY, RIVAL, TEAL, opening

__all__ = ["svg"]

Row = dict[str, Any]
OURS = "packhorse"
CEILING = "np.copyto"
WIDTH, HEIGHT = 880, 520
LEFT, RIGHT, TOP, BOTTOM = 64, 856, 74, 462
RATIO_STEP = 0.1
RATIO_MARGIN = 0.045  # above the highest and below the lowest point
SLOWEST = 0.2  # GB/s; the axis may begin later
# Width of a letter divided by the font's size: a large value, because the reader's font is unknown.
LETTER_WIDTH, LETTER_HEIGHT = 0.61, 1.0
RADIUS = {True: 7, False: 5}
GAP = 5  # between a point and its label
LEADER_FROM = 16  # a label farther from its point than this gets a line
LABELS = {
    "packhorse": "Packhorse",
    "packhorse-fast": "Packhorse fast",
    "packhorse-max": "Packhorse max",
    "openzl": "OpenZL",
    "openzl-fse": "OpenZL, FSE",
    "pcodec-12": "pcodec, level 12",
    "zstandard-1": "zstd 1",
    "zstandard-3": "zstd 3",
    "planes+zstandard-1": "planes + zstd 1",
    "planes+zstandard-3": "planes + zstd 3",
    "planes+bz2": "planes + bz2",
    "dcp-zstd": "PyTorch DCP",
    "blosc2-bitshuffle-lz4": "Blosc2 lz4",
    "blosc2-bitshuffle-zstd": "Blosc2 zstd",
    CEILING: "memory copy",
}


@dataclass(frozen=True)
class _Box:
    """A rectangle, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "_Box") -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )

    def inside(self, other: "_Box") -> bool:
        return (
            self.x >= other.x
            and self.y >= other.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )


@dataclass(frozen=True)
class _Point:
    """A codec in the picture."""

    x: float
    y: float
    codec: str
    speed: float

    @property
    def is_off(self) -> bool:
        """Whether it is slower than the axis shows."""
        return self.speed < SLOWEST

    @property
    def is_ours(self) -> bool:
        return self.codec.startswith(OURS)

    @property
    def label(self) -> str:
        label = LABELS.get(self.codec, self.codec)
        return f"{label}, {self.speed:.2g} GB/s" if self.is_off else label

    @property
    def box(self) -> _Box:
        radius = RADIUS[self.is_ours] + 1
        return _Box(self.x - radius, self.y - radius, 2 * radius, 2 * radius)


class _Axes:
    """Maps figures to places in the picture."""

    def __init__(self, rows: list[Row]) -> None:
        speeds = [max(row["decode"][0], SLOWEST) for row in rows]
        ratios = [row["ratio"] for row in rows]
        self.first, self.last = math.log10(min(speeds)) - 0.03, math.log10(max(speeds)) + 0.1
        self.low, self.high = min(ratios) - RATIO_MARGIN, max(ratios) + RATIO_MARGIN

    def point(self, row: Row) -> _Point:
        speed = row["decode"][0]
        x = LEFT if speed < SLOWEST else self.x(speed)
        return _Point(x, self.y(row["ratio"]), row["codec"], speed)

    def x(self, speed: float) -> float:
        share = (math.log10(speed) - self.first) / (self.last - self.first)
        return LEFT + share * (RIGHT - LEFT)

    def y(self, ratio: float) -> float:
        return BOTTOM - (ratio - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def speeds(self) -> Iterator[float]:
        """Speeds with a mark: 1, 2 and 5 times the powers of ten."""
        for power in range(math.floor(self.first), math.ceil(self.last) + 1):
            for digit in (1, 2, 5):
                if self.first <= math.log10(digit) + power <= self.last:
                    yield digit * 10.0**power

    def ratios(self) -> Iterator[float]:
        for i in range(math.ceil(self.low / RATIO_STEP), math.floor(self.high / RATIO_STEP) + 1):
            yield i * RATIO_STEP


def svg(rows: list[Row], *, title: str, subtitle: str) -> str:
    """The picture as the text of an SVG file.

    Args:
        rows: one for each codec, all of one data set and one number of threads.
        title: one line above it.
        subtitle: a second one, smaller.

    Returns:
        The same text for the same arguments.
    """
    axes = _Axes(rows)
    points = [axes.point(row) for row in rows]
    lines = [
        *opening(
            (WIDTH, HEIGHT),
            f"Ratio against decoding speed: {title}",
            title,
            f"{subtitle}; up and right is better",
            left=LEFT,
        ),
        *_grid(axes),
        *_ceiling(points),
        *_marks(points),
        *_labels(points),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _grid(axes: _Axes) -> list[str]:
    ratios, speeds = list(axes.ratios()), list(axes.speeds())
    paths = [f"M{LEFT} {axes.y(ratio):.1f}H{RIGHT}" for ratio in ratios]
    paths += [f"M{axes.x(speed):.1f} {BOTTOM}v6" for speed in speeds]
    lines = [
        f'  <path d="{"".join(paths)}" stroke="{FAINT}" stroke-opacity="0.25"/>',
        f'  <path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{FAINT}"/>',
        f'  <g fill="{GREY}" text-anchor="end">',
        *(f'    <text x="{LEFT - 10}" y="{axes.y(r) + 5:.1f}">{r:.1f}</text>' for r in ratios),
        "  </g>",
        f'  <g fill="{GREY}" text-anchor="middle">',
        *(f'    <text x="{axes.x(s):.1f}" y="{BOTTOM + 23}">{s:g}</text>' for s in speeds),
        f'    <text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 48}">'
        "decoding, GB/s of the original (logarithmic)</text>",
        f'    <text transform="translate(18 {(TOP + BOTTOM) / 2}) rotate(-90)">'
        "ratio, original over packed</text>",
        "  </g>",
    ]
    return lines


def _ceiling(points: list[_Point]) -> list[str]:
    """A dashed line at the speed of a copy."""
    return [
        f'  <path d="M{p.x:.1f} {TOP}V{BOTTOM}" stroke="{GREY}" stroke-dasharray="3 5"/>'
        for p in points
        if p.codec == CEILING
    ]


def _marks(points: list[_Point]) -> list[str]:
    """The marks of all points: ours on top, as larger discs; arrows for points off the axis."""
    return [f"  {_mark(point)}" for point in sorted(points, key=lambda p: p.is_ours)]


def _mark(p: _Point) -> str:
    radius = RADIUS[p.is_ours]
    if p.is_off:
        corner = f"M{p.x - radius:.1f} {p.y:.1f}"
        return f'<path d="{corner}l{2 * radius} {-radius}v{2 * radius}z" fill="{_colour(p)}"/>'
    return f'<circle cx="{p.x:.1f}" cy="{p.y:.1f}" r="{radius}" fill="{_colour(p)}"/>'


def _colour(point: _Point) -> str:
    return TEAL if point.is_ours else GREY if point.codec == CEILING else RIVAL


def _labels(points: list[_Point]) -> list[str]:
    taken = [point.box for point in points]
    taken += [_Box(p.x - 2, TOP, 4, BOTTOM - TOP) for p in points if p.codec == CEILING]
    lines = []
    for point in sorted(points, key=lambda p: (not p.is_ours, not p.is_off, -_crowd(p, points))):
        box = _place(point, taken)
        taken.append(box)
        lines += [*_leader(point, box), f"  {_text(point, box)}"]
    return lines


def _text(point: _Point, box: _Box) -> str:
    """The label, anchored on the side of its point: the gap there does not depend on the font."""
    x, anchor = box.x + box.width / 2, "middle"
    if box.x > point.x:
        x, anchor = box.x, "start"
    elif box.x + box.width < point.x:
        x, anchor = box.x + box.width, "end"
    weight = ' font-weight="bold"' if point.is_ours else ""
    return (
        f'<text x="{x:.1f}" y="{box.y + 0.8 * box.height:.1f}" text-anchor="{anchor}" '
        f'fill="{_colour(point)}"{weight}>{escape(point.label)}</text>'
    )


def _crowd(point: _Point, points: list[_Point]) -> int:
    return sum(math.hypot(point.x - p.x, point.y - p.y) < 60 for p in points)


def _place(point: _Point, taken: list[_Box]) -> _Box:
    """The nearest free place for a label, or just the nearest if none is free."""
    frame = _Box(LEFT, TOP - 20, RIGHT - LEFT, BOTTOM - TOP + 16)
    candidates = [box for box in _around(point) if box.inside(frame)]
    free = (box for box in candidates if not any(box.meets(other) for other in taken))
    return next(free, candidates[0])


def _around(point: _Point) -> Iterator[_Box]:
    """Places for a label, nearest first: right, left, above, below, then in widening circles."""
    letter = LETTER_WIDTH * (1.08 if point.is_ours else 1.0)
    width, height = letter * FONT_SIZE * len(point.label), LETTER_HEIGHT * FONT_SIZE
    near = RADIUS[point.is_ours] + GAP
    for far in range(0, 160, 4):
        for turn in (0, 12, 6, 18, 3, 21, 9, 15, 1, 23, 2, 22, 5, 7, 17, 19, 11, 13, 10, 14):
            angle = turn * math.pi / 12
            dx, dy = math.cos(angle), -math.sin(angle)
            x = point.x + dx * (near + far + width / 2)
            y = point.y + dy * (near + far + height / 2)
            yield _Box(x - width / 2, y - height / 2, width, height)


def _leader(point: _Point, box: _Box) -> list[str]:
    """A thin line from a point to the nearest place of its label, if that is far away."""
    x = min(max(point.x, box.x), box.x + box.width)
    y = min(max(point.y, box.y), box.y + box.height)
    if math.hypot(x - point.x, y - point.y) < LEADER_FROM:
        return []
    return [
        f'  <path d="M{point.x:.1f} {point.y:.1f}L{x:.1f} {y:.1f}" stroke="{_colour(point)}" '
        'stroke-opacity="0.6"/>'
    ]
