"""Section 5 of a report: other ways to pack the same bytes, ratio against speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packhorse.reports.page import words
from packhorse.reports.page.charts import log_ticks
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Column,
    Figure,
    Note,
    Picture,
    Section,
    Table,
)
from packhorse.reports.results import EngineRow, EngineTable

__all__ = ["engines_section"]

_LEGEND = (
    ("teal dot", "Packhorse"),
    ("ochre dot", "others"),
    ("ochre ring", "loses: a way of the other side packs shorter and is faster both ways"),
)
_WIDTH, _HEIGHT = 480, 360


def engines_section(tables: Sequence[EngineTable]) -> Section:
    """The section "Against others"."""
    blocks: list[Figure | Table | Note] = []
    for table in tables:
        blocks.append(_figure(table) if any(map(_is_timed, table.rows)) else _table(table))
        if table.skipped:
            items = tuple(
                f"{words.printable(name)}: {words.printable(reason)}"
                for name, reason in table.skipped.items()
            )
            blocks.append(Note((f"Not tried on {words.printable(table.title)}:",), items))
    return Section("engines", "Against others", _lead(tables), tuple(blocks))


def _lead(tables: Sequence[EngineTable]) -> tuple[str, ...]:
    rivals = [row for table in tables for row in table.rows if not row.is_ours and _is_timed(row)]
    ours = [row for table in tables for row in table.rows if row.is_ours and _is_timed(row)]
    lost, lose = (sum(row.loses for row in rows) for rows in (rivals, ours))
    if not rivals:
        return ("What other ways to pack take, on the same sample.",)
    text = f"{words.count(lost)} of {words.plural(len(rivals), 'other way')} lose"
    rest = ": one of ours packs shorter, packs faster and unpacks faster."
    rest += f" {words.count(lose)} of our own {len(ours)} lose to another." if lose else ""
    return "", text, rest


def _is_timed(row: EngineRow) -> bool:
    return row.unpack_gb_per_s is not None and row.pack_gb_per_s is not None


def _figure(table: EngineTable) -> Figure:
    timed = [row for row in table.rows if _is_timed(row)]
    pictures = tuple(
        Picture(label := _label(table, what), _spec(label, timed, key, what), f"{what} speed")
        for key, what in (("unpack_gb_per_s", "Unpacking"), ("pack_gb_per_s", "Packing"))
    )
    return Figure(
        words.shorten(table.title, 100),
        _caption(table), pictures, _table(table), _LEGEND, across=2,
    )  # fmt: skip


def _label(table: EngineTable, what: str) -> str:
    best = max(table.rows, key=_ratio, default=None)
    text = f"Ratio against speed, {what.lower()}, of {words.shorten(table.title)}."
    return text + (f" The shortest is {best.name}, {_ratio(best):.2f}." if best else "")


def _ratio(row: EngineRow) -> float:
    return row.nbytes / row.packed_nbytes if row.packed_nbytes else 0.0


def _caption(table: EngineTable) -> Caption:
    text = ""
    timed = [row for row in table.rows if _is_timed(row)]
    ours = [row.name for row in timed if row.is_ours and row.loses]
    rivals = [row.name for row in timed if not row.is_ours and not row.loses]
    if rivals:
        text += f"Not beaten: {words.listed(rivals)}. "
    elif any(not row.is_ours for row in timed):
        text += "Every other way is beaten in ratio and in both speeds at once. "
    if ours:
        text += f"Of our own ways, {words.listed(ours)} lose to another. "
    if any(not _is_timed(row) for row in table.rows):
        text += "Ways that were only sized are in the table."
    return Caption("Higher is shorter, further right is faster, on one thread.", text.strip())


def _spec(label: str, rows: Sequence[EngineRow], key: str, what: str) -> dict[str, Any]:
    """A plot for Vega, because Vega-Lite has no labels that make room for each other."""
    values = [
        {"name": row.name, "speed": getattr(row, key), "ratio": _ratio(row), "loses": row.loses,
         "color": "var(--teal)" if row.is_ours else "var(--ochre)", "order": not row.is_ours,
         "tip": {"Way": row.name, "Ratio": f"{_ratio(row):.2f}",
                 "Packs": words.speed(row.pack_gb_per_s),
                 "Unpacks": words.speed(row.unpack_gb_per_s),
                 "Loses": "yes" if row.loses else "no"}}
        for row in sorted(rows, key=lambda row: (not row.is_ours, row.loses, -_ratio(row)))
    ]  # fmt: skip
    place = {"x": {"scale": "x", "field": "speed"}, "y": {"scale": "y", "field": "ratio"}}
    dot = {
        "type": "symbol", "name": "dots", "from": {"data": "ways"}, "aria": False,
        "encode": {"update": place | {
            "size": {"value": 90}, "strokeWidth": {"value": 2}, "stroke": {"field": "color"},
            "tooltip": {"field": "tip"},
            "fill": [{"test": "datum.loses", "value": "var(--page)"}, {"field": "color"}],
        }},
    }  # fmt: skip
    text = {
        "type": "text", "from": {"data": "dots"}, "aria": False,
        "encode": {"update": {
            "text": {"field": "datum.name"}, "fontSize": {"value": 12},
            "fill": [{"test": "datum.datum.order", "value": "var(--soft)"},
                     {"value": "var(--ink)"}],
        }},
        "transform": [{"type": "label", "size": {"signal": "[width, height]"}, "padding": 0,
                       "offset": [4, 4, 4, 4, 6, 6, 6, 6], "avoidBaseMark": True,
                       "anchor": ["right", "left", "top", "bottom", "top-right", "bottom-right",
                                  "top-left", "bottom-left"]}],
    }  # fmt: skip
    return {
        "description": label,
        "width": _WIDTH, "height": _HEIGHT, "padding": 4,
        "data": [{"name": "ways", "values": values}],
        "scales": [
            {"name": "x", "type": "log", "range": "width", "zero": False, "nice": False,
             "domain": {"data": "ways", "field": "speed"}, "padding": 24},
            {"name": "y", "type": "linear", "range": "height", "zero": False, "nice": True,
             "domain": {"data": "ways", "field": "ratio"}, "padding": 12},
        ],
        "axes": [
            {"orient": "bottom", "scale": "x", "title": f"{what.lower()}, GB/s", "grid": True,
             "values": log_ticks([value["speed"] for value in values]), "format": "~g"},
            {"orient": "left", "scale": "y", "title": "times smaller", "grid": True,
             "tickCount": 6},
        ],
        "marks": [dot, text],
    }  # fmt: skip


def _table(table: EngineTable) -> Table:
    rows = tuple(
        (
            Cell(row.name),
            Cell(f"{_ratio(row):.3f}", _ratio(row)),
            Cell(words.speed(row.pack_gb_per_s), row.pack_gb_per_s or -1),
            Cell(words.speed(row.unpack_gb_per_s), row.unpack_gb_per_s or -1),
            words.size_cell(row.nbytes),
            Cell(_loses(row)),
            Cell(words.printable(row.note)),
        )
        for row in sorted(table.rows, key=lambda row: -_ratio(row))
    )
    heads = (
        Column("Way"), Column("Ratio", True), Column("Packs", True), Column("Unpacks", True),
        Column("Sample", True), Column("Verdict"), Column("Note"),
    )  # fmt: skip
    return Table(words.printable(table.title), heads, rows)


def _loses(row: EngineRow) -> str:
    if not _is_timed(row):
        return "only sized"
    return "loses" if row.loses else "holds"
