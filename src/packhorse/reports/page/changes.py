"""Section 7 of a report: what changed from one model to another, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

from packhorse.reports.page import words
from packhorse.reports.page.charts import Bar, Field, bars, columns
from packhorse.reports.page.glance import size_figure
from packhorse.reports.page.grouping import Sized
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Column,
    Figure,
    Name,
    Picture,
    Section,
    Sentence,
    Table,
    headings,
)
from packhorse.reports.results import ChangeRow, Changes, total

__all__ = ["changes_section"]

_COLORS = {
    "equal": "pale",
    "moved": "blue",
    "changed": "teal",
    "replaced": "ochre",
    "new": "purple",
    "removed": "grey",
}
_MAX_LAYERS = 128


def changes_section(changes: Changes) -> Section:
    """The section "What changed"."""
    blocks: list[Figure | Table] = [_counts(changes.rows)]
    compared = [row for row in changes.rows if row.delta is not None and row.change == "changed"]
    if compared:
        blocks.append(_by_kind(compared))
    if any(row.layer is not None for row in compared):
        blocks.append(_by_layer(compared))
    return Section("changes", "What changed", _lead(changes), (*blocks, _all(changes.rows)))


def _lead(changes: Changes) -> Sentence:
    names = f"From {words.shorten(changes.base)} to {words.shorten(changes.tuned)}, "
    found = {change: len(those) for change, those in _by_change(changes.rows).items()}
    changed = found.pop("changed", 0)
    rest = words.listed(
        f"{words.count(n)} {'is' if n == 1 else 'are'} {change}" for change, n in found.items()
    )
    return names, f"{words.plural(changed, 'tensor')} changed", f"; {rest}." if rest else "."


def _by_change(rows: Sequence[ChangeRow]) -> dict[str, list[ChangeRow]]:
    found = {change: [row for row in rows if row.change == change] for change in _COLORS}
    return {change: those for change, those in found.items() if those}


def _counts(rows: Sequence[ChangeRow]) -> Figure:
    found = _by_change(rows)
    shown, body = [], []
    for change, those in found.items():
        nbytes = sum(row.nbytes for row in those)
        text = f"{words.plural(len(those), 'tensor')} · {words.size(nbytes)}"
        tips = {"what": change, "n": words.count(len(those)), "size": words.size(nbytes)}
        pieces = tuple(float(nbytes if change == other else 0) for other in found)
        shown.append(Bar(change, pieces, text, tips))
        body.append((Cell(change), words.count_cell(len(those)), words.size_cell(nbytes)))
    label = "Bytes of tensors by what happened to them. " + "; ".join(
        f"{bar.label}: {bar.text}" for bar in shown
    )
    fields = [Field("what", "Change"), Field("n", "Tensors"), Field("size", "Bytes")]
    spec = bars(label, shown, [_COLORS[change] for change in found], "", fields, outside=True)
    caption = (
        "In a file that has the first model as its base, equal tensors take no more than a header, "
        "and those that changed are stored as differences. Those that moved are packed on their "
        "own, because a base is looked for by name; a store of snapshots has them already."
    )
    table = Table(
        "Tensors by change",
        (Column("Change"), Column("Tensors", True), Column("Bytes", True)),
        tuple(body),
    )
    return Figure("What happened to the tensors", Caption(caption), (Picture(label, spec),), table)


def _by_kind(rows: Sequence[ChangeRow]) -> Figure:
    kinds: dict[str, list[ChangeRow]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    sizes = [
        Sized(
            kind, sum(row.nbytes for row in those), total([row.delta for row in those if row.delta])
        )
        for kind, those in kinds.items()
    ]
    sizes.sort(key=lambda row: -row.nbytes)
    caption = "Tensors that changed, as differences from the first model, by what they are for."
    return size_figure("Differences by kind", Caption(caption), "Kind", sizes, half=True)


def _by_layer(rows: Sequence[ChangeRow]) -> Figure:
    layers: dict[int, list[ChangeRow]] = {}
    for row in rows:
        if row.layer is not None:
            layers.setdefault(row.layer, []).append(row)
    values, body = [], []
    for layer, those in sorted(layers.items())[:_MAX_LAYERS]:
        nbytes = sum(row.nbytes for row in those)
        changed = sum(row.nbytes * (row.changed or 0.0) for row in those) / max(nbytes, 1)
        delta = total([row.delta for row in those if row.delta])
        tips = {
            "layer": str(layer),
            "share": words.share(changed),
            "ratio": words.ratio_error(nbytes, delta),
        }
        values.append({"x": layer, "from": 0, "to": changed, "color": 0, **tips})
        body.append(
            (
                words.count_cell(layer),
                words.share_cell(changed),
                words.size_cell(nbytes),
                words.estimate_cell(delta),
                words.ratio_cell(nbytes, delta.nbytes),
            )
        )
    label = "Share of values that changed, by layer."
    fields = [Field("layer", "Layer"), Field("share", "Changed"), Field("ratio", "Ratio")]
    spec = columns(
        label, values, ["teal"], ("layer", "values that changed"), fields,
        axis={"format": "%", "tickCount": 5}, scale={"domain": [0, 1]},
    )  # fmt: skip
    caption = (
        "A value counts as changed if any of its bits did. Layers that were frozen stay at zero."
    )
    heads = headings("Layer", "Changed", "Plain", "Difference", "Ratio", n_text=0)
    table = Table("Changes by layer", heads, tuple(body))
    return Figure(
        "Values that changed, by layer", Caption(caption), (Picture(label, spec),), table, half=True
    )


def _all(rows: Sequence[ChangeRow]) -> Table:
    heads = (
        Column("Tensor"), Column("Change"), Column("Was"), Column("Dtype"), Column("Kind"),
        Column("Layer", True), Column("Plain", True), Column("Values changed", True),
        Column("On its own", True), Column("Difference", True), Column("Ratio", True),
    )  # fmt: skip
    body = tuple(
        (
            Name(row.name),
            Cell(row.change),
            Name(row.was or ""),
            Cell(row.dtype),
            Cell(row.kind),
            words.count_cell(row.layer),
            words.size_cell(row.nbytes),
            words.share_cell(row.changed),
            words.estimate_cell(row.full),
            words.estimate_cell(row.delta),
            words.ratio_cell(row.nbytes, row.delta.nbytes if row.delta else None),
        )
        for row in rows
    )
    return Table("Tensors of both models", heads, body, tuple(row.nbytes for row in rows))
