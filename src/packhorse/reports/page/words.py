"""How a report writes numbers, and text from files.

Numbers have three digits. A unit stands behind a no-break space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from packhorse.reports.page.outline import Cell
from packhorse.reports.results import Estimate

__all__ = [
    "bits",
    "bits_cell",
    "count",
    "count_cell",
    "digits",
    "estimate",
    "estimate_cell",
    "listed",
    "number",
    "plural",
    "printable",
    "ratio",
    "ratio_cell",
    "ratio_error",
    "seconds",
    "seconds_cell",
    "shape",
    "share",
    "share_cell",
    "shorten",
    "size",
    "size_cell",
    "speed",
    "times",
]

_NOTHING = "\N{EN DASH}"
_SPACE = "\N{NO-BREAK SPACE}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
_SHOWN_NCHARS = 72


def digits(value: float) -> str:
    """A number with three digits, or all of a larger one, with commas."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 99.95 or value == 0:
        return f"{value:,.0f}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def size(nbytes: float) -> str:
    """A size in decimal units."""
    value, unit = float(nbytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{digits(value) if unit else round(value)}{_SPACE}{_UNITS[unit]}"


def count(value: int) -> str:
    """A number of things."""
    return f"{value:,}"


def number(value: float) -> str:
    """A number that somebody chose, or a mean of few: no more digits than it needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plural(value: int, noun: str) -> str:
    """A number of things with their noun, such as "1 layer" and "12 layers"."""
    return f"{count(value)}{_SPACE}{noun}{'' if value == 1 else 's'}"


def share(value: float | None) -> str:
    """A share as percent."""
    if value is None:
        return _NOTHING
    percent = 100 * value
    if not percent or percent >= 99.95:
        text = f"{percent:.0f}"
    else:
        text = f"{percent:.1f}" if percent >= 1 else f"{percent:.2g}"
    return f"{text}{_SPACE}%"


def ratio(original: float, packed: float) -> str:
    """Original / packed, with two decimals."""
    return f"{original / packed:.2f}" if packed else _NOTHING


def times(original: float, packed: float) -> str:
    """The ratio with a sign, for places without words."""
    return f"{ratio(original, packed)}{_TIMES}"


def shape(sizes: Sequence[int]) -> str:
    """A shape."""
    return f" {_TIMES} ".join(map(str, sizes)) or "scalar"


def speed(gb_per_s: float | None) -> str:
    """A speed."""
    return _NOTHING if gb_per_s is None else f"{digits(gb_per_s)}{_SPACE}GB/s"


def ratio_error(original: float, packed: Estimate) -> str:
    """The ratio with the error of sampling, if there is one."""
    text = ratio(original, packed.nbytes)
    if not packed.error or not packed.nbytes:
        return text
    error = original / packed.nbytes * packed.error / packed.nbytes
    return f"{text} ±{_SPACE}{max(error, 0.01):.2f}"


def estimate(value: Estimate | None) -> str:
    """A size with the error of sampling, if there is one."""
    if value is None:
        return _NOTHING
    return size(value.nbytes) + (f" ±{_SPACE}{size(value.error)}" if value.error else "")


def bits(value: float) -> str:
    """Bits of an element, with two decimals."""
    return f"{value:.2f}"


def seconds(value: float) -> str:
    """A time in the unit that people would use."""
    for limit, factor, unit in (
        (1e-3, 1e6, "µs"),
        (1, 1e3, "ms"),
        (120, 1, "s"),
        (7200, 1 / 60, "min"),
    ):
        if value < limit:
            return f"{digits(value * factor)}{_SPACE}{unit}"
    return f"{digits(value / 3600)}{_SPACE}h"


def size_cell(nbytes: int | None) -> Cell:
    """A cell with a size."""
    return Cell(_NOTHING, -1) if nbytes is None else Cell(size(nbytes), nbytes)


def estimate_cell(value: Estimate | None) -> Cell:
    """A cell with a size and its error."""
    return Cell(estimate(value), -1 if value is None else value.nbytes)


def ratio_cell(original: float, packed: float | None) -> Cell:
    """A cell with a ratio."""
    return Cell(ratio(original, packed), original / packed) if packed else Cell(_NOTHING, -1)


def share_cell(value: float | None) -> Cell:
    """A cell with a share."""
    return Cell(share(value), -1 if value is None else value)


def bits_cell(value: float | None) -> Cell:
    """A cell with bits of an element."""
    return Cell(_NOTHING, -1) if value is None else Cell(bits(value), value)


def count_cell(value: int | None) -> Cell:
    """A cell with a number of things."""
    return Cell(_NOTHING, -1) if value is None else Cell(count(value), value)


def seconds_cell(value: float) -> Cell:
    """A cell with a time."""
    return Cell(seconds(value), value)


def listed(words: Iterable[str]) -> str:
    """Words with commas and an "and"."""
    parts = list(words)
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def printable(text: str) -> str:
    """The text with everything escaped that is not seen, or that changes the order of what is: line
    ends, control characters, marks of direction, spaces without width."""
    if text.isprintable():
        return text
    return "".join(_seen(c) for c in text)


def _seen(c: str) -> str:
    return c if c.isprintable() or c == _SPACE else c.encode("unicode_escape").decode()


def shorten(text: str, width: int = _SHOWN_NCHARS) -> str:
    """A text from a file, printable, and cut in the middle if it is long: ends tell it apart."""
    if len(text) > 2 * width:  # so that very long ones cost nothing
        return _cut(printable(text[:width]), printable(text[-width:]), width)
    shown = printable(text)
    return shown if len(shown) <= width else _cut(shown, shown, width)


def _cut(head: Sequence[str], tail: Sequence[str], width: int) -> str:
    left = width // 2
    return f"{''.join(head[:left])}…{''.join(tail[left - width + 1 :])}"
