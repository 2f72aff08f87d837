"""Section 1 of a report: how many bytes there are, before and after packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packhorse.reports.page import words
from packhorse.reports.page.charts import BYTES, Bar, Field, bars, columns
from packhorse.reports.page.grouping import LEVELS, Group, Sized, group, group_label, grouped
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Column,
    Figure,
    Name,
    Note,
    Picture,
    Section,
    Sentence,
    Table,
)
from packhorse.reports.results import Estimate, Findings, SourceRow, StepRow, total

__all__ = ["PACKED_AND_SAVED", "glance", "headline", "size_figure"]

PACKED_AND_SAVED = (("teal", "packed"), ("pale", "saved"))
_COLORS = [name for name, _ in PACKED_AND_SAVED]
_FIELDS = (
    Field("what", "What"),
    Field("plain", "Plain"),
    Field("packed", "Packed"),
    Field("ratio", "Ratio"),
)
_MAX_KINDS = 14
_MAX_MODELS = 6
_MAX_MODEL_BARS = 20
# What has a smaller share of the bytes is not said to gain the most or the least.
_LEAST_SHARE = 0.01
_LEAST_GAIN = 0.002
_MAX_LAYERS = 128
_MAX_NARROW_LAYERS = 24


def glance(findings: Findings) -> Section:
    """The section "At a glance"."""
    blocks: list[Figure | Note | Table] = [*_asides(findings)]
    if findings.tensors:
        blocks += [_levels(findings), *_by_model(findings), _by_kind(findings)]
        blocks += [*_by_dtype(findings), *_by_layer(findings)]
    if len(findings.sources) > 1:
        blocks.append(_sources(findings))
    plain, packed = _totals(findings)
    left = packed.nbytes / plain if plain else 1.0
    return Section("glance", "At a glance", headline(findings), tuple(blocks), min(left, 1.0))


# The first sentence.


def headline(findings: Findings) -> Sentence:
    """The report in a sentence."""
    plain, packed = _totals(findings)
    before, between = _told(findings)
    return before, words.size(plain), between, words.size(packed.nbytes), *_gain(plain, packed)


def _told(findings: Findings) -> tuple[str, str]:
    """The words before the first and before the second size."""
    n = len(findings.sources)
    if _is_series(findings):
        steps = _steps(findings)
        if steps[0].stored_nbytes is None:
            these = f"These {words.count(len(steps))} checkpoints take "
            return these, "; the first packed, the others as differences, they take "
        return f"These {words.count(len(steps))} snapshots take ", "; the store takes "
    if _is_pair(findings):
        return "The second model takes ", "; as a difference from the first it takes "
    if n == 1:
        return "This model takes ", "; packed it takes "
    return f"These {words.count(n)} models take ", "; packed they take "


def _is_series(findings: Findings) -> bool:
    return findings.shape == "series" and len(_steps(findings)) > 1


def _is_pair(findings: Findings) -> bool:
    return findings.shape == "pair" and findings.changes is not None


def _steps(findings: Findings) -> Sequence[StepRow]:
    return findings.series.steps if findings.series else ()


def _totals(findings: Findings) -> tuple[int, Estimate]:
    """Bytes of all that the report is about, plain and packed."""
    if _is_series(findings):
        return sum(step.nbytes for step in _steps(findings)), _series_total(_steps(findings))
    if findings.changes and _is_pair(findings):
        rows = [row for row in findings.changes.rows if row.change != "removed"]
        packed = total([row.full if row.delta is None else row.delta for row in rows])
        return sum(row.nbytes for row in rows), packed
    return _before_and_after(findings)


def _before_and_after(findings: Findings) -> tuple[int, Estimate]:
    """Bytes of the sources whose tensors are described, plain and packed: as they lie there if all
    are packed."""
    described = {row.source for row in findings.tensors}
    sources = [source for source in findings.sources if source.name in described]
    plain = sum(source.nbytes for source in sources)
    stored = [source.packed_nbytes for source in sources]
    known = [nbytes for nbytes in stored if nbytes is not None]
    if known and len(known) == len(stored):
        return plain, Estimate(sum(known))
    return plain, group(findings.tensors).default


def _series_total(steps: Sequence[StepRow]) -> Estimate:
    stored = [step.stored_nbytes for step in steps if step.stored_nbytes is not None]
    if len(stored) == len(steps):
        return Estimate(sum(stored))
    return total([step.delta or step.full for step in steps])


def _gain(plain: float, packed: Estimate) -> Sentence:
    """How many times smaller, in brackets."""
    if packed.nbytes >= plain:
        return (" (no gain).",)
    found, _, error = words.ratio_error(plain, packed).partition(" ")
    return " (", f"{found} times smaller", f", {error})." if error else ")."


# What follows from it.


def _asides(findings: Findings) -> list[Note]:
    """How sure the figures are, and what is saved in a year."""
    settings, notes = findings.settings, []
    if settings.full:
        notes.append(Note(("Everything was measured.",)))
    elif any(row.sampled_nbytes < row.nbytes for row in findings.tensors):
        seen, there = (
            sum(row.sampled_nbytes for row in findings.tensors),
            sum(row.nbytes for row in findings.tensors),
        )
        notes.append(
            Note(
                (
                    f"Estimated from a sample: {words.size(seen)} of {words.size(there)} were "
                    "looked at. What stands behind ± says how far off a figure may be.",
                )
            )
        )
    year = _year(findings)
    return [*notes, Note(year, strong=True)] if year else notes


def _year(findings: Findings) -> Sentence:
    """What a year of checkpoints saves; empty if nothing."""
    n = findings.settings.checkpoints_per_day * 365
    if _is_series(findings):
        steps = _steps(findings)
        one, packed = steps[-1].nbytes, _series_total(steps).nbytes
        first = steps[0].stored_nbytes or steps[0].full.nbytes
        saved, how = one - (packed - first) / (len(steps) - 1), "as differences "
    else:
        one, after = _totals(findings)
        saved, how = one - after.nbytes, "as differences " if _is_pair(findings) else ""
    if saved <= 0 or n <= 0:
        return ()
    each = "of each " if findings.shape == "models" and len(findings.sources) > 1 else ""
    rate = f"{words.number(findings.settings.checkpoints_per_day)} checkpoints {each}a day"
    return (
        f"At {rate}, a year takes {words.size(n * one)}. Packing {how}saves ",
        words.size(n * saved), " of it (", words.share(saved / one), ").",
    )  # fmt: skip


# Figures.


def _bar(row: Sized) -> Bar:
    label, packed = words.shorten(row.label, 44), row.packed
    text = f"{words.size(packed.nbytes)} · {words.times(row.nbytes, packed.nbytes)}"
    pieces = (float(min(packed.nbytes, row.nbytes)), float(max(row.nbytes - packed.nbytes, 0)))
    return Bar(label, pieces, text, _tips(label, row), error=packed.error)


def _tips(label: str, row: Sized) -> dict[str, str]:
    return {
        "what": label,
        "plain": words.size(row.nbytes),
        "packed": words.estimate(row.packed),
        "ratio": words.ratio_error(row.nbytes, row.packed),
    }


def _size_table(title: str, head: str, rows: Sequence[Sized]) -> Table:
    heads = (
        Column(head),
        Column("Plain", True),
        Column("Packed", True),
        Column("Ratio", True),
    )
    body = tuple(
        (
            Name(label),
            words.size_cell(plain),
            words.estimate_cell(packed),
            words.ratio_cell(plain, packed.nbytes),
        )
        for label, plain, packed in rows
    )
    return Table(title, heads, body)


def size_figure(
    title: str, caption: Caption, head: str, rows: Sequence[Sized], *, half: bool
) -> Figure:
    """Bars of bytes, packed and saved."""
    label = f"{title}: bars of packed and saved bytes. " + _in_words(rows)
    spec = bars(label, [_bar(row) for row in rows], _COLORS, "", _FIELDS)
    table = _size_table(title, head, rows)
    return Figure(title, caption, (Picture(label, spec),), table, PACKED_AND_SAVED, half=half)


def _in_words(rows: Sequence[Sized]) -> str:
    """The first bars as text."""
    told = [
        f"{words.shorten(name, 28)}: {words.size(plain)}, packed {words.size(packed.nbytes)}"
        for name, plain, packed in rows[:8]
    ]
    return "; ".join(told) + "."


def _levels(findings: Findings) -> Figure:
    whole = group(findings.tensors)
    rows = [Sized(name, whole.nbytes, whole.levels[name]) for name in LEVELS]
    rows = [row for row in rows if row.packed.nbytes]
    stored = [row.packed_nbytes for row in findings.tensors if row.packed_nbytes is not None]
    if stored and len(stored) == len(findings.tensors):
        rows.insert(0, Sized("as stored", whole.nbytes, Estimate(sum(stored))))
    return size_figure("By level", _level_caption(whole, findings), "Level", rows, half=False)


def _level_caption(whole: Group, findings: Findings) -> Caption:
    of = {"series": "the newest checkpoint", "pair": "the second model"}.get(findings.shape)
    reading = (
        "The shorter the solid part, the better. “fast” packs near the speed of a copy, “max” "
        "takes the most time."
    )
    finding = f"Bytes of {of}, packed on its own." if of else ""
    default, most = whole.levels["default"], whole.levels["max"]
    if not most.nbytes or not default.nbytes:
        return Caption(reading, finding)
    more = 1 - most.nbytes / default.nbytes
    takes = "about as much as" if more < _LEAST_GAIN else f"{words.share(more)} less than"
    return Caption(reading, f"{finding} Here “max” takes {takes} “default”.".strip())


def _rows_by(groups: Mapping[str, Group]) -> list[Sized]:
    return [Sized(name, each.nbytes, each.default) for name, each in groups.items()]


def _by_kind(findings: Findings) -> Figure:
    tensors = findings.tensors
    n_roles, dtypes = len({row.role for row in tensors}), {row.dtype for row in tensors}
    groups = grouped(
        tensors, lambda row: group_label(row.role, row.kind, "", n_roles=n_roles, n_dtypes=1)
    )
    rows = _rows_by(groups)[:_MAX_KINDS]
    caption = _best_caption(rows)
    if len(dtypes) == 1:
        finding = f"{caption.finding} All tensors are {words.shorten(dtypes.pop())}."
        caption = caption._replace(finding=finding.strip())
    return size_figure("By kind of tensor", caption, "Kind", rows, half=True)


def _by_dtype(findings: Findings) -> list[Figure]:
    rows = _rows_by(grouped(findings.tensors, lambda row: row.dtype))
    if len(rows) == 1:
        return []
    return [size_figure("By dtype", _best_caption(rows), "Dtype", rows, half=True)]


def _best_caption(rows: Sequence[Sized]) -> Caption:
    """Which of the larger rows gain the most and the least."""
    reading = "The largest first, at the level “default”."
    whole = sum(row.nbytes for row in rows)
    large = [row for row in rows if row.nbytes >= _LEAST_SHARE * whole]
    if len(large) < 2:
        return Caption(reading)
    by_ratio = sorted(large, key=lambda row: row.nbytes / max(row.packed.nbytes, 1))
    worst, best = by_ratio[0], by_ratio[-1]
    low, high = (words.ratio(row.nbytes, row.packed.nbytes) for row in (worst, best))
    if low == high:
        return Caption(reading, "All gain the same.")
    most, least = words.shorten(best.label), words.shorten(worst.label)
    return Caption(
        reading,
        f"The most is gained by {most} ({high} times smaller), the least by {least} ({low}).",
    )


def _sources(findings: Findings) -> Table:
    is_store = all(source.form == "snapshot" for source in findings.sources)
    heads = (
        Column("Source"),
        Column("What it is"),
        Column("Tensors", True),
        Column("Plain", True),
        Column("What a restore reads" if is_store else "As it lies there", True),
        Column("Path"),
    )
    rows = tuple(
        (
            Name(source.name),
            Cell(source.form),
            words.count_cell(source.n_tensors),
            words.size_cell(source.nbytes),
            words.size_cell(
                source.nbytes if source.packed_nbytes is None else source.packed_nbytes
            ),
            Name(source.path),
        )
        for source in findings.sources
    )
    return Table("Sources", heads, rows, tuple(source.nbytes for source in findings.sources))


def _by_model(findings: Findings) -> list[Figure]:
    per_source = grouped(findings.tensors, lambda row: row.source)
    if findings.shape != "models" or len(per_source) < 2:
        return []
    rows = [
        Sized(source.name, source.nbytes, _packed(source, per_source))
        for source in findings.sources
        if source.name in per_source
    ]
    rows.sort(key=lambda row: -row.nbytes)
    largest = rows[:_MAX_MODEL_BARS]
    return [size_figure("By model", _best_caption(largest), "Model", largest, half=False)]


def _packed(source: SourceRow, per_source: Mapping[str, Group]) -> Estimate:
    if source.packed_nbytes is not None:
        return Estimate(source.packed_nbytes)
    return per_source[source.name].default


def _by_layer(findings: Findings) -> list[Figure]:
    """Bytes by layer, for each model."""
    pictures, rows = [], []
    models = grouped(findings.tensors, lambda row: row.source if row.layer is not None else None)
    for model, tensors in list(models.items())[:_MAX_MODELS]:
        layers = dict(sorted(grouped(tensors.rows, lambda row: row.layer).items()))
        if len(layers) < 2:
            continue
        title = words.shorten(model, 40) if len(models) > 1 else ""
        pictures.append(_layer_picture(title, layers))
        rows += [
            Sized(f"{title} layer {layer}".strip(), each.nbytes, each.default)
            for layer, each in layers.items()
        ]
    if not pictures:
        return []
    caption = "At the level “default”. Layers of one size that pack alike make a flat row; "
    caption += "a layer that stands out holds other values than its neighbours."
    table = _size_table("By layer", "Layer", rows)
    # Beside "By kind of tensor", if nothing else is there.
    one_dtype = len({row.dtype for row in findings.tensors}) == 1
    half = one_dtype and len(pictures) == 1 and len(rows) <= _MAX_NARROW_LAYERS
    return [
        Figure("By layer", Caption(caption), tuple(pictures), table, PACKED_AND_SAVED, half=half)
    ]


def _layer_picture(title: str, layers: Mapping[int, Group]) -> Picture:
    values = []
    for layer, each in list(layers.items())[:_MAX_LAYERS]:
        packed = min(each.default.nbytes, each.nbytes)
        what = f"layer {layer}"
        tips = _tips(what, Sized(what, each.nbytes, each.default))
        for color, (start, end) in enumerate(((0, packed), (packed, each.nbytes))):
            values.append({"x": layer, "from": start, "to": end, "color": color, **tips})
    label = f"{title} Bytes by layer, packed and saved, of {words.plural(len(layers), 'layer')}."
    spec = columns(label.strip(), values, _COLORS, ("layer", ""), _FIELDS, axis=BYTES)
    return Picture(label.strip(), spec, title)
