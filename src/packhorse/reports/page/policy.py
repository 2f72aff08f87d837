"""Section 4 of a report: how often to take snapshots, and how long chains of differences may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packhorse.reports.page import words
from packhorse.reports.page.charts import BYTES, Field, layer, log_ticks, points, quantity, tips
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Figure,
    Note,
    Picture,
    Section,
    Table,
    headings,
)
from packhorse.reports.page.training import SERIES_COLORS
from packhorse.reports.results import Policy, PolicyRow

__all__ = ["policy_section"]

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")


def policy_section(policy: Policy) -> Section:
    """The section "Policy"."""
    best = policy.rows[policy.recommended]
    lead = (
        "Take a snapshot ", f"every {_steps(best.every)}", *_how(best.chain),
    )  # fmt: skip
    cost = (
        f"In 1,000 steps the store then grows by {words.size(best.nbytes)}, and the job waits for "
        f"{words.seconds(best.stall_seconds)}. A restore takes "
        f"{words.seconds(best.restore_seconds)}; a failure costs "
        f"{words.number(best.lost_steps)} steps on average."
    )
    why = Note((f"Why: {policy.reason.strip().rstrip('.')}.",))
    return Section(
        "policy",
        "Policy",
        lead,
        (
            Note((cost,), strong=True),
            why,
            _figure(policy),
            Note(("What these figures rest on:",), policy.assumptions),
        ),
    )


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{words.count(every)} steps"


def _how(chain: int) -> tuple[str, ...]:
    return (", each in full.",) if chain == 0 else (", with ", _chain(chain), ".")


def _chain(chain: int) -> str:
    return (
        "every one in full"
        if chain == 0
        else f"chains of up to {words.plural(chain, 'difference')}"
    )


def _value(row: PolicyRow, color: int, best: bool) -> dict[str, Any]:
    return {
        "x": row.nbytes, "y": row.restore_seconds, "color": color, "best": best,
        "text": f"recommended: every {row.every}, chains of {row.chain}",
        "every": f"every {_steps(row.every)}", "chain": words.count(row.chain), "order": row.chain,
        "size": words.size(row.nbytes), "restore": words.seconds(row.restore_seconds),
        "stall": words.seconds(row.stall_seconds), "lost": words.number(row.lost_steps),
    }  # fmt: skip


def _figure(policy: Policy) -> Figure:
    rates = sorted({row.every for row in policy.rows})
    shown = rates[:: -(-len(rates) // len(SERIES_COLORS))]
    best = policy.rows[policy.recommended]
    shown = shown if best.every in shown else sorted([*shown[:-1], best.every])
    values = [
        _value(row, shown.index(row.every), row is best)
        for row in policy.rows
        if row.every in shown
    ]
    caption = (
        "Further left is a smaller store, further down a faster restore. Each line is one rate of "
        "snapshots; along it, chains get longer, which saves bytes and costs time to restore. The "
        "ring is the pair that is recommended."
    )
    label = (
        f"Bytes that the store grows by against seconds of a restore. Recommended: every "
        f"{_steps(best.every)}, {_chain(best.chain)}."
    )
    legend = tuple(
        (f"{SERIES_COLORS[i]} shape-{i}", f"every {_steps(every)}") for i, every in enumerate(shown)
    )
    return Figure(
        "Bytes and restores",
        Caption(caption),
        (Picture(label, _spec(label, values, len(shown))),),
        _table(policy),
        legend,
    )


def _spec(label: str, values: list[dict[str, Any]], n_series: int) -> dict[str, object]:
    fields = [
        Field("every", "Snapshots"), Field("chain", "Longest chain"),
        Field("size", "Store grows by"), Field("restore", "A restore takes"),
        Field("stall", "The job waits for"), Field("lost", "Steps lost by a failure"),
    ]  # fmt: skip
    numbers = list(range(n_series))

    def by_series(outputs: Sequence[str]) -> dict[str, object]:
        scale = {"domain": numbers, "range": outputs[:n_series]}
        return {"field": "color", "type": "nominal", "legend": None, "scale": scale}

    color = by_series([f"var(--{name})" for name in SERIES_COLORS])
    log = {"type": "log", "nice": False, "padding": 16}
    ticks = log_ticks([row["x"] for row in values])
    x = quantity("x", "bytes in 1,000 steps", scale=log, axis=BYTES | {"values": ticks})
    times = [row["y"] for row in values]
    axis = {"values": log_ticks(times), "format": "~g"}
    y = quantity("y", "seconds of a restore", axis=axis, scale=log)
    channels = {"x": x, "y": y, "color": color}
    ring = {
        "type": "point",
        "size": 420,
        "stroke": "var(--ink)",
        "strokeWidth": 2.5,
        "shape": "circle",
    }
    return points(label, values, [
        layer({"type": "line", "strokeWidth": 1.5, "opacity": 0.6, "aria": False}, **channels,
              order={"field": "order", "type": "quantitative"}),
        layer({"type": "point", "filled": True, "size": 70, "opacity": 1}, **channels,
              shape=by_series(_SHAPES), tooltip=tips(fields)),
        layer(ring, "best", x=x, y=y, tooltip=tips(fields)),
    ])  # fmt: skip


def _table(policy: Policy) -> Table:
    heads = (
        "Every", "Longest chain", "Store grows by", "Packing", "The job waits", "A restore takes",
        "Steps lost by a failure",
    )  # fmt: skip
    rows = tuple(
        (
            words.count_cell(row.every),
            words.count_cell(row.chain),
            words.size_cell(row.nbytes),
            words.seconds_cell(row.write_seconds),
            words.seconds_cell(row.stall_seconds),
            words.seconds_cell(row.restore_seconds),
            Cell(words.number(row.lost_steps), row.lost_steps),
        )
        for row in policy.rows
    )
    title = "Pairs of rate and chain, for 1,000 steps"
    return Table(title, headings(*heads, n_text=0), rows, marked=policy.recommended)
