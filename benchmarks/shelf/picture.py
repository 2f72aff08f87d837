"""Bars of the long rows as an SVG: bytes of a row, and the time until it is on the disk."""

from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.common.svg import FAINT, GREY, RIVAL, TEAL, opening

__all__ = ["ALT", "NAME", "picture"]

NAME = "benchmarks_shelf.svg"
ALT = "Bytes and time of appending an iterate of training to each store"
WIDTH, TOP, LINE = 880, 92, 28
NAMES_END, PANELS, PANEL_WIDTH, BAR = 170, (180, 540), 240, 16


def picture(result: dict[str, Any]) -> str:
    """The SVG of docs/.

    Args:
        result: the figures of a run of `run.py shelf`, with the long rows.
    """
    rows = result["rows"]["stores"]
    height = TOP + LINE * len(rows) + 16
    panels = [
        ("MB on the disk for one row", [row["nbytes_per_row"] / 1e6 for row in rows]),
        ("ms until it is there", [row["append"]["mean"] for row in rows]),
    ]
    raw = result["rows"]["nbytes"] / 1e6
    title = f"Every iterate of a training run, {raw:.1f} MB each"
    lines = [
        *opening((WIDTH, height), ALT, title, "appended as a row; shorter is better"),
        *_names([row["store"] for row in rows]),
    ]
    for left, (heading, values) in zip(PANELS, panels, strict=True):
        lines += _panel(left, heading, [row["store"] for row in rows], values)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _names(stores: list[str]) -> Iterator[str]:
    yield f'  <g fill="{GREY}" text-anchor="end">'
    for i, store in enumerate(stores):
        weight = ' font-weight="bold"' if _is_ours(store) else ""
        y = TOP + LINE * i + BAR - 3
        yield f'    <text x="{NAMES_END}" y="{y}"{weight}>{escape(store)}</text>'
    yield "  </g>"


def _panel(left: int, title: str, stores: list[str], values: list[float]) -> Iterator[str]:
    """Bars with their figures. One bar may be many times as long as all others: it ends with an
    arrow at the end of the panel, and only its figure tells its length."""
    longest = max(sorted(values)[:-1] or values) * 1.1
    yield f'  <text x="{left}" y="{TOP - 14}" fill="{GREY}">{escape(title)}</text>'
    for i, (store, value) in enumerate(zip(stores, values, strict=True)):
        y = TOP + LINE * i
        width = min(1.0, value / longest) * PANEL_WIDTH
        colour = TEAL if _is_ours(store) else RIVAL
        tip = f"l8 {BAR / 2}l-8 {BAR / 2}" if value > longest else f"v{BAR}"
        yield f'  <path d="M{left} {y}h{width:.1f}{tip}H{left}z" fill="{colour}"/>'
        end = left + width + (14 if value > longest else 6)
        yield f'  <text x="{end:.1f}" y="{y + BAR - 3}" fill="{GREY}">{value:.1f}</text>'
    bottom = TOP + LINE * len(stores) - 6
    yield f'  <path d="M{left} {TOP - 6}V{bottom}" stroke="{FAINT}"/>'


def _is_ours(store: str) -> bool:
    return store.startswith("packhorse")
