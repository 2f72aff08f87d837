"""Specifications of plots for Vega-Lite, as plain values of JSON.

Colours are variables of page.css, so that a plot follows the light and the dark mode without being
drawn again. Legends are text of the page (`Figure.legend`), because those of a plot do not fold on
a phone. Texts that come from files are data, never part of a name of a field or of an expression;
the caller shortens them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.reports.page import words

__all__ = [
    "BYTES",
    "HEAT_COLORS",
    "Bar",
    "Field",
    "bars",
    "chart",
    "columns",
    "config",
    "heat_map",
    "layer",
    "lines",
    "log_ticks",
    "points",
    "quantity",
    "rows_of",
    "tips",
]

_Spec = dict[str, Any]
# Font sizes are pixels; the page's own text has 16.
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
_INK, _SOFT, _LINE = "var(--ink)", "var(--soft)", "var(--line)"
# Colours of shares from 0 to 1, in tenths.
HEAT_COLORS = [f"var(--heat{i})" for i in range(10)]
# An axis of bytes, in the units of the page.
BYTES: _Spec = {
    "labelExpr": (
        "datum.value ? replace(format(datum.value, '~s'), regexp('([a-zA-Z]?)$'), ' $1B') : 0"
    ),
    "tickCount": 5,
    "grid": True,
}
_DASHES = ((1, 0), (6, 3), (2, 3), (8, 3, 2, 3), (4, 4), (1, 2), (10, 4))
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
_LABEL_NCHARS = 44
# Pixels that texts behind bars take.
_TEXT_MARGIN, _CHARACTER_WIDTH = 14, 7


@dataclass(frozen=True)
class Field:
    """A field of the data that a tooltip shows.

    Attributes:
        key: its key: letters only.
        title: what it is.
    """

    key: str
    title: str


@dataclass(frozen=True)
class Bar:
    """A bar of pieces that follow each other.

    Attributes:
        label: the text beside it.
        pieces: the length of each piece, in the order of the colours.
        text: what stands on it, or behind it.
        tips: texts for the tooltip, by the keys of the fields.
        mark: where a mark crosses it; None for no mark.
        error: how far the end of the first piece may be off.
    """

    label: str
    pieces: tuple[float, ...]
    text: str
    tips: dict[str, str]
    mark: float | None = None
    error: float = 0


def config() -> _Spec:
    """What all plots share."""
    axis = {
        "labelColor": _SOFT, "titleColor": _SOFT, "gridColor": _LINE, "domainColor": _LINE,
        "tickColor": _LINE, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
        "titlePadding": 8, "labelLimit": 150, "labelPadding": 6, "ticks": False, "domain": False,
    }  # fmt: skip
    return {
        "font": _FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "text": {"fill": _INK, "fontSize": 12},
        "rule": {"stroke": _LINE},
        # The numbers are in a table: a plot says in a sentence what it shows, not mark by mark.
        "axis": axis | {"aria": False},
        "mark": {"aria": False},
    }


def chart(label: str, values: Iterable[_Spec], height: int, layers: Sequence[_Spec]) -> _Spec:
    """A plot as wide as its place.

    Args:
        label: what it shows, for people who do not see it.
        values: the data, one object for each thing that is drawn.
        height: in pixels.
        layers: what is drawn from the data, the lowest first. One that would draw nothing is left
            out, because Vega warns of it.

    Returns:
        The specification; empty if there are no data.
    """
    known = list(values)
    if not known:
        return {}
    return {
        "description": label,
        "data": {"values": known},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": 4,
        "layer": [each for each in layers if _draws(each, known)],
    }


def _draws(shown: _Spec, values: Sequence[_Spec]) -> bool:
    """Whether a layer draws any of the objects."""
    filters = [each["filter"]["field"] for each in shown.get("transform", ())]
    return all(any(value.get(key) for value in values) for key in filters)


def layer(mark: str | _Spec, when: str = "", /, **encoding: Any) -> _Spec:
    """A layer: one mark for each object.

    Args:
        mark: the mark, with its properties.
        when: the key of a field that must be true; empty for all objects.
        encoding: its channels.
    """
    whole: _Spec = {"mark": mark, "encoding": encoding}
    return whole | {"transform": [{"filter": {"field": when, "equal": True}}]} if when else whole


def tips(fields: Sequence[Field]) -> list[_Spec]:
    """What the tooltip shows: texts of the data."""
    return [{"field": each.key, "type": "nominal", "title": each.title} for each in fields]


def quantity(key: str, title: str | None, **more: Any) -> _Spec:
    """A channel of numbers."""
    return {"field": key, "type": "quantitative", "title": title, **more}


def bars(
    label: str,
    rows: Sequence[Bar],
    colors: Sequence[str],
    axis: str,
    fields: Sequence[Field],
    *,
    outside: bool = False,
) -> _Spec:
    """Lying bars, one below the other, with their values as text.

    Args:
        label: what the plot shows, for people who do not see it.
        rows: the bars.
        colors: the names of the colours of the pieces.
        axis: the title of the axis; empty for no axis, as the bars say their values.
        fields: what the tooltip shows.
        outside: whether all texts stand behind the bars; otherwise they stand on the first piece
            where that is long.
    """
    longest = max((sum(row.pieces) for row in rows), default=0) or 1
    labels = _distinct([row.label for row in rows])
    y = rows_of(labels)
    scale: _Spec = {"domain": [0, longest], "nice": False}
    if outside:
        room = _TEXT_MARGIN + _CHARACTER_WIDTH * max((len(row.text) for row in rows), default=0)
        scale["range"] = [0, {"expr": f"max(width - {room}, 40)"}]
    shown = {"title": axis, "tickCount": 5} if axis else None
    x = quantity("from", axis or None, axis=shown, scale=scale)
    values = [
        piece
        for name, row in zip(labels, rows, strict=True)
        for piece in _pieces(name, row, longest, outside)
    ]
    layers = [
        layer(
            {"type": "bar", "cornerRadius": 2, "height": {"band": 0.72}},
            "piece", y=y, x=x, x2={"field": "to"},
            color={"field": "color", "type": "nominal", "legend": None,
                   "scale": {"domain": list(range(len(colors))),
                             "range": [f"var(--{name})" for name in colors]}},
            tooltip=tips(fields),
        ),
        layer({"type": "rule", "strokeWidth": 1.5, "stroke": _INK},
              "error", y=y, x=x, x2={"field": "to"}),
        layer({"type": "tick", "thickness": 3, "color": _INK, "height": {"band": 0.92}},
              "mark", y=y, x=x, tooltip=tips(fields)),
        layer({"type": "text", "align": "left", "dx": 8}, "out",
              y=y, x=x, text={"field": "text"}),
        layer({"type": "text", "align": "right", "dx": -8, "fill": "var(--on-teal)"},
              "in", y=y, x=x, text={"field": "text"}),
    ]  # fmt: skip
    return chart(label, values, 34 * len(rows), layers)


def rows_of(labels: Sequence[str], **axis: Any) -> _Spec:
    """The vertical channel of plots that have a row for each label, in the field "row"."""
    shown = {"title": None, "grid": False, "labelColor": _INK, **axis}
    return {"field": "row", "type": "ordinal", "axis": shown, "scale": {"domain": list(labels)}}


def _distinct(labels: Sequence[str]) -> list[str]:
    """The labels with a number behind those that were there before."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        text = words.shorten(label, _LABEL_NCHARS)
        seen[text] += 1
        found.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return found


def log_ticks(numbers: Sequence[float]) -> list[float]:
    """Where a logarithmic axis has its ticks: powers of ten, or more where these are few."""
    known = [value for value in numbers if value > 0] or [1.0]
    low, high = math.log10(min(known)), math.log10(max(known))
    steps = (1,) if high - low > 2.5 else (1, 3) if high - low > 1.2 else (1, 2, 5)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    shown = [tick for tick in ticks if 10 ** (low - 0.1) <= tick <= 10 ** (high + 0.1)]
    return shown or [float(f"{max(known):.2g}")]


def _pieces(name: str, row: Bar, longest: float, outside: bool) -> Iterable[_Spec]:
    """The objects of a bar: its pieces, its mark, its text."""
    start, ends, common = 0.0, [], {"row": name, **row.tips}
    for color, length in enumerate(row.pieces):
        ends.append(start + length)
        yield common | {"piece": True, "from": start, "to": ends[-1], "color": color}
        start = ends[-1]
    if row.error:
        first = ends[0]
        yield common | {"error": True, "from": max(first - row.error, 0), "to": first + row.error}
    if row.mark is not None:
        yield common | {"mark": True, "from": min(row.mark, longest)}
    solid = ends[0] > 0.5 * longest and not outside
    place = ends[0] if solid or (ends[-1] > 0.55 * longest and not outside) else ends[-1]
    if not solid and row.mark is not None:
        place = max(place, min(row.mark, longest))
    yield common | {"in" if solid else "out": True, "from": place, "text": row.text}


def columns(
    label: str,
    values: Sequence[_Spec],
    colors: Sequence[str],
    titles: tuple[str, str],
    fields: Sequence[Field],
    *,
    height: int = 220,
    **y_more: Any,
) -> _Spec:
    """Standing bars side by side: objects with "x" (a whole number), "from", "to" and "color" (the
    number of a colour).

    Args:
        label: what the plot shows, for people who do not see it.
        values: the objects.
        colors: the names of the colours.
        titles: the titles of both axes.
        fields: what the tooltip shows.
        height: in pixels.
        y_more: more of the vertical channel.
    """
    axis = {"labelOverlap": True, "labelSeparation": 8, "grid": False, "labelAngle": 0}
    x = {"field": "x", "type": "ordinal", "title": titles[0], "axis": axis}
    x["scale"] = {"paddingInner": 0.2, "paddingOuter": 0.1}
    y = quantity("from", titles[1] or None, **y_more)
    color = {
        "field": "color",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": list(range(len(colors))), "range": [f"var(--{c})" for c in colors]},
    }
    bar = layer({"type": "bar"}, x=x, y=y, y2={"field": "to"}, color=color, tooltip=tips(fields))
    return chart(label, values, height, [bar])


def lines(
    label: str,
    values: Sequence[_Spec],
    colors: Sequence[str],
    x: _Spec,
    y: _Spec,
    fields: Sequence[Field],
    *,
    height: int = 260,
    more: Sequence[_Spec] = (),
) -> _Spec:
    """Lines with points: objects with "x", "y" and "color" (the number of a colour). Those whose
    "error" is true have an upright line from "low" to "high".

    Args:
        label: what the plot shows, for people who do not see it.
        values: the objects.
        colors: the names of the colours.
        x: the horizontal channel.
        y: the vertical channel.
        fields: what the tooltip shows.
        height: in pixels.
        more: layers below the lines.
    """
    numbers = list(range(len(colors)))

    def by_series(*outputs: Any) -> _Spec:
        scale = {"domain": numbers, "range": list(outputs)[: len(colors)]}
        return {"field": "color", "type": "nominal", "legend": None, "scale": scale}

    color = by_series(*[f"var(--{name})" for name in colors])
    dash, shape = by_series(*_DASHES), by_series(*_SHAPES)
    size = 52 if len(values) <= 30 * len(colors) else 24
    point = {"type": "point", "filled": True, "size": size, "opacity": 1}
    layers = [
        *more,
        layer({"type": "rule", "strokeWidth": 1.5}, "error", x=x, color=color,
              y=y | {"field": "low"}, y2={"field": "high"}),
        layer({"type": "line", "strokeWidth": 2.25}, x=x, y=y, color=color,
              strokeDash=dash),
        layer(point, x=x, y=y, color=color, shape=shape, tooltip=tips(fields)),
    ]  # fmt: skip
    return chart(label, values, height, layers)


def points(
    label: str, values: Sequence[_Spec], layers: Sequence[_Spec], *, height: int = 320
) -> _Spec:
    """A plot of points, with the layers that the caller makes."""
    return chart(label, values, height, layers)


def heat_map(
    label: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[tuple[str, int]]
) -> _Spec:
    """Shares as colours: a row for each layer of a model, a column for each bit.

    Args:
        label: what the plot shows, for people who do not see it.
        rows: the rows, each with its label and its shares from 0 to 1.
        parts: what the columns are: names and numbers of columns, which fill the row.
    """
    n, starts = sum(width for _, width in parts), [0]
    for _, width in parts:
        starts.append(starts[-1] + width)
    of_column = [name for name, width in parts for _ in range(width)]
    labels = _distinct([text for text, _ in rows])
    values = [
        {"row": labels[at], "x": bit, "to": bit + 1, "share": round(value, 3), "layer": text,
         "bit": f"{n - 1 - bit} ({of_column[bit]})", "shown": f"{value:.2f}"}
        for at, (text, shares) in enumerate(rows)
        for bit, value in enumerate(shares)
    ]  # fmt: skip
    x = quantity("x", None, axis=None, scale={"domain": [0, n], "nice": False})
    y = rows_of(labels, labelOverlap=True, labelLimit=100)
    y["scale"]["padding"] = 0
    color = {
        "field": "share",
        "type": "quantitative",
        "legend": None,
        "scale": {"type": "quantize", "domain": [0, 1], "range": HEAT_COLORS},
    }
    fields = [Field("layer", "Layer"), Field("bit", "Bit"), Field("shown", "Entropy")]
    cell = {"type": "rect", "stroke": "var(--page)", "strokeWidth": 0.5}
    middle = [
        {"x": (start + end) / 2, "part": name if end - start > 1 else name[:1] if n <= 16 else ""}
        for (name, _), start, end in zip(parts, starts, starts[1:], strict=False)
    ]
    step = max(7, min(20, 260 // max(len(rows), 1)))
    layers = [
        layer(cell, x=x, x2={"field": "to"}, y=y, color=color, tooltip=tips(fields)),
        {"data": {"values": [{"x": start} for start in starts[1:-1]]}}
        | layer({"type": "rule", "stroke": "var(--page)", "strokeWidth": 3}, x=x),
        {"data": {"values": middle}}
        | layer({"type": "text", "y": -9, "fill": _SOFT}, x=x, text={"field": "part"}),
    ]
    spec = chart(label, values, step * len(rows), layers)
    return spec | {"padding": {"top": 22, "bottom": 4}}
