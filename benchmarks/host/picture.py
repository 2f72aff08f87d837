"""Bars of what a fetch of a row pulls, ours beside Invariant Bit Packing, as an SVG."""

from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.common.svg import FAINT, GREY, RIVAL, TEAL, opening

__all__ = ["ALT", "NAME", "picture"]

NAME = "benchmarks_host.svg"
ALT = "What a fetch of a row pulls over the link, in per cent of the plain row"
WIDTH, TOP, LINE, BAR = 880, 84, 38, 13
LEFT, FULL = 260, 520  # where bars begin, and the length of a plain row


def picture(ratios: list[dict[str, Any]]) -> str:
    """The SVG of docs/.

    Args:
        ratios: what a fetch touches, for each table, as `run.py host` keeps it.
    """
    height = TOP + LINE * len(ratios) + 10
    lines = [
        *opening(
            (WIDTH, height),
            ALT,
            "What a fetch of one row pulls",
            "per cent of the plain row, in sectors of 32 bytes; shorter is better",
        ),
        *_legend(),
        f'  <path d="M{LEFT} {TOP - 8}V{height - 12}M{LEFT + FULL} {TOP - 8}V{height - 12}" '
        f'stroke="{FAINT}"/>',
    ]
    for i, row in enumerate(ratios):
        y = TOP + LINE * i
        lines.append(
            f'  <text x="{LEFT - 10}" y="{y + 19}" fill="{GREY}" text-anchor="end">'
            f"{escape(row['table'])}</text>"
        )
        lines += _bar(y, row["ways"]["chosen for 32"]["pulled"]["32"], TEAL)
        lines += _bar(y + BAR + 2, row["ibp"]["pulled"]["32"], RIVAL)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for x, colour, name in ((560, TEAL, "packhorse"), (670, RIVAL, "Invariant Bit Packing")):
        yield f'  <path d="M{x} 36h14v14h-14z" fill="{colour}"/>'
        yield f'  <text x="{x + 20}" y="48" fill="{GREY}">{name}</text>'


def _bar(y: int, times_less: float, colour: str) -> Iterator[str]:
    length = FULL / times_less
    yield f'  <path d="M{LEFT} {y}h{length:.1f}v{BAR}H{LEFT}z" fill="{colour}"/>'
    share = 100 / times_less
    figure = f"{share:.0f}" if share >= 10 else f"{share:.1f}"
    yield f'  <text x="{LEFT + length + 6:.1f}" y="{y + BAR - 1}" fill="{GREY}">{figure}</text>'
