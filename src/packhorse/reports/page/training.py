"""Section 3 of a report: how a series of checkpoints packs, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from packhorse.reports.page import words
from packhorse.reports.page.charts import BYTES, Field, columns, lines, log_ticks, quantity
from packhorse.reports.page.grouping import group_label
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Column,
    Figure,
    Picture,
    Section,
    Sentence,
    Table,
    headings,
)
from packhorse.reports.results import Estimate, Series, StepKindRow, StepRow, StepSizeRow

__all__ = ["SERIES_COLORS", "training"]

SERIES_COLORS = ("teal", "ochre", "blue", "rose", "purple", "grey", "brown")
_STEP = Field("step", "Step")
_MAX_TICKS = 9
# From this quotient of the largest and the smallest ratio on, an axis is logarithmic.
_MANY = 6
# Kinds of a smaller share of the bytes are in the table, but in no picture.
_LEAST_SHARE = 0.002
# The same for values of one exponent.
_LEAST_EXPONENT_SHARE = 1e-5


def training(series: Series) -> Section:
    """The section "Over training"."""
    blocks: list[Figure] = [_ratios(series.steps)]
    if len(series.steps) > 1:
        blocks += [_kinds(series.steps), _unchanged(series.steps)]
    if series.step_sizes:
        blocks.append(_step_sizes(series.step_sizes))
    if series.gaps:
        blocks.append(_gaps(series))
    if any(step.needed_nbytes is not None for step in series.steps):
        blocks += _chains(series.steps)
    return Section("training", "Over training", _lead(series.steps), tuple(blocks))


def _lead(steps: Sequence[StepRow]) -> Sentence:
    last = steps[-1]
    if last.delta is None:
        return (f"The checkpoint of step {words.count(last.step)} packs ", *_times(last, last.full))
    start = f"At step {words.count(last.step)}, a checkpoint packs "
    if last.delta.nbytes > 0.99 * last.full.nbytes:
        rest = " on its own; as a difference from the one before it gains nothing more."
        return start, *_times(last, last.full), rest
    rest = " as a difference from the one before."
    return start, *_times(last, last.full), " on its own, and ", *_times(last, last.delta), rest


def _times(step: StepRow, packed: Estimate) -> Sentence:
    return (f"{words.ratio(step.nbytes, packed.nbytes)} times smaller",)


def _step_axis(steps: Iterable[int], title: str = "step") -> dict[str, Any]:
    """The horizontal channel of steps: logarithmic if they grow so."""
    known = sorted(set(steps))
    positive = [step for step in known if step > 0]
    grows = len(positive) > 3 and positive[-1] > 20 * positive[0]
    scale: dict[str, Any] = {"nice": False, "padding": 10}
    axis: dict[str, Any] = {"grid": False, "labelOverlap": True, "format": ",d"}
    if not grows or known[len(known) // 2] > 0.3 * known[-1]:
        scale["zero"] = False
    else:
        scale["type"] = "symlog" if known[0] <= 0 else "log"
        axis["values"] = _spread(positive)
    return quantity("x", title, scale=scale, axis=axis)


def _spread(steps: Sequence[int]) -> list[int]:
    """Some of the steps, from the last on, such that each is much less than the one after."""
    least = (steps[-1] / steps[0]) ** (1 / _MAX_TICKS)
    kept = [steps[-1]]
    for step in reversed(steps):
        if step * least <= kept[-1]:
            kept.append(step)
    return kept[::-1]


def _ratio_axis(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The vertical channel of ratios, from 1, which saves nothing."""
    low = min([1.0, *(value["y"] for value in values)])
    high = max([1.1, *(value["y"] for value in values)])
    scale: dict[str, Any] = {"domain": [low, high]}
    axis: dict[str, Any] = {"tickCount": 5, "format": "~g"}
    if high < _MANY * low:
        scale |= {"nice": True, "zero": False}
    else:
        scale |= {"nice": False, "type": "log"}
        axis["values"] = log_ticks([low, high])
    return quantity("y", "times smaller", scale=scale, axis=axis)


# Ratios.


def _ratios(steps: Sequence[StepRow]) -> Figure:
    values = [
        *(_ratio_value(step, 0, "on its own", step.full) for step in steps),
        *(_ratio_value(step, 1, "as a difference", step.delta) for step in steps if step.delta),
    ]
    fields = [_STEP, Field("how", "Packed"), Field("ratio", "Ratio"), Field("size", "Bytes")]
    label = f"Ratio by step. {_lead(steps)[0]}{''.join(_lead(steps)[1:])}"
    colors = ["grey", "teal"]
    y = _ratio_axis(values)
    spec = lines(label, values, colors, _step_axis(step.step for step in steps), y, fields)
    caption = (
        "The higher a point, the fewer bytes. The distance between both lines is what a "
        "difference from the checkpoint before gains; it grows as steps of the optimizer get "
        "smaller, and shrinks as checkpoints lie further apart."
    )
    heads = ("Step", "Plain", "On its own", "Ratio", "Difference", "Ratio ", "Unchanged")
    rows = tuple(
        (
            words.count_cell(step.step),
            words.size_cell(step.nbytes),
            words.estimate_cell(step.full),
            words.ratio_cell(step.nbytes, step.full.nbytes),
            words.estimate_cell(step.delta),
            words.ratio_cell(step.nbytes, step.delta.nbytes if step.delta else None),
            words.share_cell(step.unchanged),
        )
        for step in steps
    )
    table = Table("Checkpoints", headings(*heads, n_text=0), rows)
    legend = (("grey line-0", "on its own"), ("teal line-1", "as a difference"))
    return Figure("Ratio by step", Caption(caption), (Picture(label, spec),), table, legend)


def _ratio_value(step: StepRow, color: int, how: str, packed: Estimate) -> dict[str, Any]:
    ratio = step.nbytes / packed.nbytes if packed.nbytes else 0.0
    off = ratio * packed.error / packed.nbytes if packed.nbytes else 0.0
    return {
        "x": step.step, "y": ratio, "color": color, "how": how, "step": words.count(step.step),
        "ratio": words.ratio_error(step.nbytes, packed), "size": words.estimate(packed),
        "error": off > 0, "low": ratio - off, "high": ratio + off,
    }  # fmt: skip


# By kind and role.


def _roles(steps: Sequence[StepRow]) -> list[str]:
    """Roles of the newest checkpoint, the largest first."""
    sums: dict[str, int] = {}
    for kind in steps[-1].kinds:
        sums[kind.role] = sums.get(kind.role, 0) + kind.nbytes
    return sorted(sums, key=lambda role: -sums[role])


def _kinds(steps: Sequence[StepRow]) -> Figure:
    pictures = []
    series = _kind_colors(steps)
    for role in _roles(steps)[:4]:
        values = [
            _kind_value(step, kind, series[kind.kind])
            for step in steps
            for kind in step.kinds
            if kind.role == role and kind.delta is not None and kind.kind in series
        ]
        fields = [_STEP, Field("kind", "Kind"), Field("ratio", "Ratio"), Field("own", "On its own")]
        label = f"Ratio of differences by step and kind, {role}."
        y = _ratio_axis(values)
        x = _step_axis(step.step for step in steps[1:])
        colors = SERIES_COLORS[: len(series)]
        pictures.append(
            Picture(label, lines(label, values, colors, x, y, fields, height=220), role)
        )
    caption = (
        "Differences from the checkpoint before, by what a tensor is for. Weights change little "
        "from one checkpoint to the next; the moments of the optimizer are averages of gradients, "
        "and change much more."
    )
    legend = tuple((f"{SERIES_COLORS[color]} line-{color}", kind) for kind, color in series.items())
    across = min(len(pictures), 3)
    return Figure(
        "Differences by kind", Caption(caption), tuple(pictures), _kind_table(steps), legend,
        across=across, half=across == 1,
    )  # fmt: skip


def _kind_colors(steps: Sequence[StepRow]) -> dict[str, int]:
    """Numbers of colours for the largest kinds, in a fixed order."""
    sums: dict[str, int] = {}
    for row in steps[-1].kinds:
        sums[row.kind] = sums.get(row.kind, 0) + row.nbytes
    large = [kind for kind in sums if sums[kind] >= _LEAST_SHARE * sum(sums.values())]
    largest = sorted(large, key=lambda kind: -sums[kind])[: len(SERIES_COLORS)]
    return {kind: color for color, kind in enumerate(largest)}


def _kind_value(step: StepRow, kind: StepKindRow, color: int) -> dict[str, Any]:
    assert kind.delta is not None
    return {
        "x": step.step, "y": kind.nbytes / max(kind.delta.nbytes, 1), "color": color,
        "step": words.count(step.step), "kind": f"{kind.kind} · {kind.dtype}",
        "ratio": words.ratio_error(kind.nbytes, kind.delta),
        "own": words.ratio(kind.nbytes, kind.full.nbytes),
    }  # fmt: skip


def _kind_table(steps: Sequence[StepRow]) -> Table:
    heads = ("Step", "Tensors", "Plain", "On its own", "Ratio", "Difference", "Ratio ", "Unchanged")
    rows = [
        (
            words.count_cell(step.step),
            Cell(group_label(kind.role, kind.kind, kind.dtype, n_roles=2)),
            words.size_cell(kind.nbytes),
            words.size_cell(kind.full.nbytes),
            words.ratio_cell(kind.nbytes, kind.full.nbytes),
            words.size_cell(kind.delta.nbytes if kind.delta else None),
            words.ratio_cell(kind.nbytes, kind.delta.nbytes if kind.delta else None),
            words.share_cell(kind.unchanged),
        )
        for step in steps
        for kind in step.kinds
    ]
    columns_of = tuple(Column(head, head != "Tensors") for head in heads)
    sizes = tuple(kind.nbytes for step in steps for kind in step.kinds)
    return Table("Checkpoints by kind", columns_of, tuple(rows), sizes)


def _unchanged(steps: Sequence[StepRow]) -> Figure:
    roles = _roles(steps)[: len(SERIES_COLORS)]
    values: list[dict[str, Any]] = []
    rows: list[tuple[Cell, ...]] = []
    for step in steps[1:]:
        cells = []
        for color, role in enumerate(roles):
            same = _unchanged_of(step, role)
            cells.append(words.share_cell(same))
            if same is not None:
                values.append({
                    "x": step.step, "y": same, "color": color, "role": role,
                    "step": words.count(step.step), "share": words.share(same),
                })  # fmt: skip
        rows.append((words.count_cell(step.step), *cells))
    fields = [_STEP, Field("role", "Of"), Field("share", "Unchanged")]
    label = "Share of values that did not change since the checkpoint before, by step."
    y = quantity("y", None, axis={"format": "%", "tickCount": 5}, scale={"domain": [0, 1]})
    colors = SERIES_COLORS[: len(roles)]
    spec = lines(label, values, colors, _step_axis(step.step for step in steps[1:]), y, fields)
    caption = (
        "Values whose bits are those of the checkpoint before. A step that is smaller than half "
        "the distance to the next value of a short format is lost in rounding, so more and more "
        "values stay as they are when the learning rate falls."
    )
    finding = ""
    if max((value["y"] for value in values), default=0.0) < 0.001:
        finding = "Nearly every value changes from one checkpoint to the next."
    legend = tuple((f"{SERIES_COLORS[i]} line-{i}", role) for i, role in enumerate(roles))
    heads = (Column("Step", True), *(Column(role.capitalize(), True) for role in roles))
    table = Table("Share of values that did not change", heads, tuple(rows))
    return Figure(
        "Values that stay",
        Caption(caption, finding),
        (Picture(label, spec),),
        table,
        legend,
        half=True,
    )


def _unchanged_of(step: StepRow, role: str) -> float | None:
    """Of all values of a role; kinds are weighted by their bytes."""
    known = [kind for kind in step.kinds if kind.role == role and kind.unchanged is not None]
    nbytes = sum(kind.nbytes for kind in known)
    if not nbytes:
        return None
    return sum(kind.nbytes * (kind.unchanged or 0.0) for kind in known) / nbytes


# Sizes of steps, gaps, chains.


def _step_sizes(rows: Sequence[StepSizeRow]) -> Figure:
    labels = list(dict.fromkeys(f"{row.role} · {row.dtype}" for row in rows))
    labels = labels[: len(SERIES_COLORS)]
    values = [
        _step_size(row, labels.index(f"{row.role} · {row.dtype}"))
        for row in rows
        if f"{row.role} · {row.dtype}" in labels and row.share > _LEAST_EXPONENT_SHARE
    ]
    fields = [
        Field("role", "Of"), Field("power", "Values from"), Field("share", "Share of values"),
        Field("median", "Half moved at most"), Field("most", "Nine tenths moved at most"),
    ]  # fmt: skip
    label = "How many representable values a value moved in the last step, by its exponent."
    ticks = log_ticks([value[end] for value in values for end in ("low", "high")])
    axis = {"values": ticks, "format": "~s"}
    y = quantity("y", "representable values, + 1", scale={"type": "log"}, axis=axis)
    x_axis = {"grid": False, "tickCount": 8}
    x = quantity("x", "power of two of the value", scale={"zero": False}, axis=x_axis)
    spec = lines(label, values, SERIES_COLORS[: len(labels)], x, y, fields, height=280)
    caption = (
        "Points are medians, lines reach to nine tenths of the values. An optimizer moves all "
        "weights by about the same amount; where values are large, that is few representable "
        "values, and where they are small, many. So the size of a value tells the size of its "
        "step, and the code for differences needs fewer bits if it knows the base's exponent."
    )
    legend = tuple((f"{SERIES_COLORS[i]} line-{i}", text) for i, text in enumerate(labels))
    return Figure(
        "How far values move", Caption(caption), (Picture(label, spec),), _step_size_table(rows),
        legend, half=True,
    )  # fmt: skip


def _step_size(row: StepSizeRow, color: int) -> dict[str, Any]:
    return {
        "x": row.exponent, "y": row.median + 1, "color": color, "error": True,
        "low": row.median + 1, "high": row.high + 1, "role": f"{row.role} · {row.dtype}",
        "power": f"2^{row.exponent}", "share": words.share(row.share),
        "median": words.digits(row.median), "most": words.digits(row.high),
    }  # fmt: skip


def _step_size_table(rows: Sequence[StepSizeRow]) -> Table:
    heads = ("Of", "Exponent", "Share of values", "Half moved at most", "Nine tenths moved at most")
    body = tuple(
        (
            Cell(f"{row.role} · {row.dtype}"),
            Cell(f"2^{row.exponent}", row.exponent),
            words.share_cell(row.share),
            Cell(words.digits(row.median), row.median),
            Cell(words.digits(row.high), row.high),
        )
        for row in rows
    )
    return Table("Sizes of steps", headings(*heads), body)


def _gaps(series: Series) -> Figure:
    last = series.steps[-1]
    values = [
        {"x": gap, "y": packed.nbytes, "color": 0, "gap": words.count(gap),
         "size": words.estimate(packed), "ratio": words.ratio_error(last.nbytes, packed),
         "error": packed.error > 0, "low": packed.nbytes - packed.error,
         "high": packed.nbytes + packed.error}
        for gap, packed in series.gaps
    ]  # fmt: skip
    fields = [Field("gap", "Steps between"), Field("size", "Difference"), Field("ratio", "Ratio")]
    label = "Bytes of the newest checkpoint as a difference, by the steps between it and its base."
    y = quantity("y", None, axis=BYTES, scale={"domainMin": 0})
    full = {"mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5,
                     "stroke": "var(--soft)"},
            "encoding": {"y": {"datum": last.full.nbytes, "type": "quantitative"}}}  # fmt: skip
    x = _step_axis((gap for gap, _ in series.gaps), "steps between")
    spec = lines(label, values, ["teal"], x, y, fields, more=[full])
    pays = [gap for gap, packed in series.gaps if packed.nbytes < 0.95 * last.full.nbytes]
    caption = "The dashed line is the checkpoint on its own."
    if not pays:
        finding = "No difference is worth its base here."
    elif len(pays) == len(series.gaps):
        finding = "A difference pays at every gap that was tried: it saves a twentieth or more."
    else:
        gap = words.count(max(pays))
        finding = f"Up to a gap of {gap} steps, a difference saves a twentieth or more."
    rows = tuple(
        (
            words.count_cell(gap),
            words.estimate_cell(packed),
            words.ratio_cell(last.nbytes, packed.nbytes),
        )
        for gap, packed in series.gaps
    )
    heads = headings("Steps between", "Difference", "Ratio", n_text=0)
    table = Table("Differences by gap", heads, rows)
    legend = (("teal line-0", "as a difference"), ("soft dashed", "on its own"))
    return Figure(
        "How far apart",
        Caption(caption, finding),
        (Picture(label, spec),),
        table,
        legend,
        half=True,
    )


def _chains(steps: Sequence[StepRow]) -> list[Figure]:
    known = [step for step in steps if step.needed_nbytes is not None]
    values, rows = [], []
    for step in known:
        stored, needed, deltas = (
            step.stored_nbytes or 0,
            step.needed_nbytes or 0,
            step.max_deltas or 0,
        )
        tips = {"step": words.count(step.step), "added": words.size(stored),
                "read": words.size(needed),
                "chain": words.plural(deltas, "difference")}  # fmt: skip
        values.append({"x": step.step, "from": 0, "to": needed, "color": 0, **tips})
        rows.append(
            (
                words.count_cell(step.step),
                words.size_cell(stored),
                words.count_cell(deltas),
                words.size_cell(needed),
                words.ratio_cell(step.nbytes, needed),
            )
        )
    fields = [
        _STEP, Field("added", "Store grew by"), Field("chain", "Longest chain"),
        Field("read", "A restore reads"),
    ]  # fmt: skip
    label = "Bytes that a restore reads, by step."
    most = max(step.nbytes for step in known)
    spec = columns(label, values, ["blue"], ("step", ""), fields, axis=BYTES)
    longest = max(step.max_deltas or 0 for step in known)
    caption = (
        "A snapshot that is a difference needs those it builds on, so a restore reads more the "
        "longer the chain is."
    )
    finding = (
        f"The longest chain has {words.plural(longest, 'difference')}. The largest plain "
        f"checkpoint would take {words.size(most)}."
    )
    heads = (
        "Step",
        "Store grew by",
        "Longest chain",
        "A restore reads",
        "Plain bytes / read bytes",
    )
    table = Table("What a restore reads", headings(*heads, n_text=0), tuple(rows))
    return [
        Figure(
            "What a restore reads",
            Caption(caption, finding),
            (Picture(label, spec),),
            table,
            half=True,
        )
    ]
