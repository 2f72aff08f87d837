"""Section 2 of a report: which bits carry information, and which of them packing can save."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import TypeVar

from packhorse.reports.page import words
from packhorse.reports.page.charts import (
    HEAT_COLORS,
    Bar,
    Field,
    bars,
    columns,
    heat_map,
)
from packhorse.reports.page.grouping import (
    Group,
    float_parts,
    group_label,
    grouped,
    weighted,
)
from packhorse.reports.page.outline import (
    Caption,
    Cell,
    Column,
    Figure,
    Name,
    Picture,
    Section,
    Table,
    headings,
)
from packhorse.reports.results import ExponentRow, Findings, PlaneRow, TensorRow

__all__ = ["MODE_COLORS", "bits", "mode_words"]

_Key = TypeVar("_Key")

_MAX_GROUPS = 14
# Groups of a smaller share of the bytes are in the tables, but in no picture.
_LEAST_SHARE = 0.0002
# Shares of values at both ends of a histogram that are left out.
_LEAST_TAIL = 0.001
_REASON_NCHARS = 120
_MAX_PANELS = 9
_MAX_ROWS = 48
_PIECES = (("grey", "noise"), ("teal", "not noise, but needed"), ("pale", "saved"))
MODE_COLORS = {
    "stored": "grey",
    "constant": "pale",
    "rans": "teal",
    "classed_rans": "blue",
    "palette": "ochre",
    "zstd": "purple",
    "matches": "brown",
    "nibbles": "green",
    "delta": "rose",
}
_MODE_WORDS = {
    "stored": "stored as it is",
    "constant": "one value",
    "rans": "rANS",
    "classed_rans": "rANS with contexts",
    "palette": "palette",
    "zstd": "zstd",
    "matches": "repeated numbers",
    "nibbles": "rANS of half bytes",
    "delta": "difference",
}


def bits(findings: Findings) -> Section:
    """The section "Where the bits go"."""
    tensors = findings.tensors
    lead = _lead(tensors)
    blocks: list[Figure | Table] = [_spent(tensors)]
    if any(row.bit_entropies for row in tensors):
        blocks.append(_heat(tensors))
    exponents = _by_size(findings)
    if exponents:
        blocks.append(_exponents(exponents))
    if any(row.planes for row in tensors):
        blocks += [_planes(tensors), _modes(tensors)]
    return Section("bits", "Where the bits go", lead, (*blocks, _reasons(tensors), _all(tensors)))


def _lead(tensors: Sequence[TensorRow]) -> tuple[str, ...]:
    """The sentence about the dtype that takes the most bytes."""
    (dtype, most), *_ = grouped(tensors, lambda row: row.dtype).items()
    noise = weighted((prod(row.shape), row.noise_bits) for row in most.rows)
    return (
        f"Of the {most.bits:.0f} bits of a {dtype} element, ", f"{noise:.1f} are noise",
        ", which no lossless code can shorten. Of the others, packing needs ",
        f"{max(most.bits_of(most.default.nbytes) - noise, 0):.1f}",
        f" and saves {max(most.bits - most.bits_of(most.default.nbytes), 0):.1f}.",
    )  # fmt: skip


def _groups(tensors: Iterable[TensorRow]) -> dict[str, Group]:
    rows = list(tensors)
    n_roles, n_dtypes = len({row.role for row in rows}), len({row.dtype for row in rows})

    def label(row: TensorRow) -> str:
        return group_label(row.role, row.kind, row.dtype, n_roles=n_roles, n_dtypes=n_dtypes)

    return grouped(rows, label)


# Bits spent and saved.


def _spent(tensors: Sequence[TensorRow]) -> Figure:
    groups = _groups(tensors)
    rows = [_spent_bar(label, each) for label, each in _large(groups).items()]
    fields = [
        Field("what", "What"),
        Field("bits", "Bits of an element"),
        Field("noise", "Noise"),
        Field("reached", "Reached"),
        Field("bound", "Bound"),
    ]
    label = "Bits of an element by kind: noise, needed and saved. " + "; ".join(
        f"{row.label}: {row.tips['noise']} noise, {row.tips['reached']} when packed"
        for row in rows[:8]
    )
    colors = [color for color, _ in _PIECES]
    spec = bars(label, rows, colors, "bits of an element", fields, outside=True)
    caption = (
        "Each bar is one element. Grey bits are noise: each is 0 or 1 as if by the toss of a "
        "coin. Packing can only shorten the rest. The mark is the bound: what a code that treats "
        "elements one by one takes at least. A bar that ends before the mark uses more than that, "
        "such as rows, columns or repeats."
    )
    table = Table(
        "Bits of an element",
        (
            Column("Kind"),
            Column("Bits", True),
            Column("Noise", True),
            Column("Bound", True),
            Column("Reached", True),
            Column("Saved", True),
        ),
        tuple(_spent_row(name, each) for name, each in groups.items()),
    )
    return Figure(
        "What an element is made of", Caption(caption), (Picture(label, spec),), table, _PIECES
    )


def _noise(each: Group) -> float:
    return weighted((prod(row.shape), row.noise_bits) for row in each.rows)


def _spent_bar(label: str, each: Group) -> Bar:
    reached = min(each.bits_of(each.default.nbytes), each.bits)
    noise = min(_noise(each), reached)
    bound = each.bits_of(each.bound.nbytes)
    tips = {
        "what": label,
        "bits": words.bits(each.bits),
        "noise": words.bits(_noise(each)),
        "reached": words.bits(reached),
        "bound": words.bits(bound),
    }
    text = f"{words.bits(reached)} of {each.bits:.0f}"
    return Bar(label, (noise, reached - noise, each.bits - reached), text, tips, bound)


def _spent_row(name: str, each: Group) -> tuple[Cell, ...]:
    reached = each.bits_of(each.default.nbytes)
    return (
        Cell(name),
        words.bits_cell(each.bits),
        words.bits_cell(_noise(each)),
        words.bits_cell(each.bits_of(each.bound.nbytes)),
        words.bits_cell(reached),
        words.bits_cell(max(each.bits - reached, 0)),
    )


def _large(groups: dict[_Key, Group]) -> dict[_Key, Group]:
    """The groups that are worth a picture."""
    least = _LEAST_SHARE * sum(each.nbytes for each in groups.values())
    shown = [(key, each) for key, each in groups.items() if each.nbytes >= least]
    return dict(shown[:_MAX_GROUPS])


# The heat map.


def _heat(tensors: Sequence[TensorRow]) -> Figure:
    rows = [row for row in tensors if row.bit_entropies]
    panels = [
        *_panels((row for row in rows if row.layer is not None), by_layer=True),
        *_panels((row for row in rows if row.layer is None), by_layer=False),
    ]
    largest = sorted(panels, key=lambda panel: -panel[1].nbytes)[:_MAX_PANELS]
    least = _LEAST_SHARE * sum(row.nbytes for row in tensors)
    shown = [panel for panel in panels if panel in largest and panel[1].nbytes >= least]
    pictures = tuple(_heat_picture(title, each, rows) for title, each, rows in shown)
    caption = (
        "A column is a bit of the element, from the sign on the left to the last bit of the "
        "mantissa on the right; a row is a layer. A bit in the strongest colour is noise. A faint "
        "one is nearly always the same, and costs nothing once it is packed: there is what can be "
        "saved."
    )
    finding = ""
    if len(panels) > len(shown):
        finding = f"Of {len(panels)} groups of tensors, the {len(shown)} largest are shown."
    if len({row.source for row in tensors}) > 1:
        caption += " Layers of the same number in different models are averaged."
    legend = tuple(
        (f"heat{i}", f"{i / 10:.1f}" if i < 9 else "0.9 to 1 bit") for i in range(len(HEAT_COLORS))
    )
    return Figure(
        "Entropy of every bit",
        Caption(caption, finding),
        pictures,
        _heat_table(shown),
        legend,
        across=3,
    )


_Rows = list[tuple[str, list[float]]]


def _panels(tensors: Iterable[TensorRow], *, by_layer: bool) -> Iterable[tuple[str, Group, _Rows]]:
    """The groups of tensors that get a heat map each: title, sum, rows."""
    rows = list(tensors)
    n_roles, n_dtypes = len({row.role for row in rows}), len({row.dtype for row in rows})

    def key(row: TensorRow) -> tuple[str, str]:
        kind = row.kind if by_layer else "outside of layers"
        title = group_label(row.role, kind, row.dtype, n_roles=n_roles, n_dtypes=n_dtypes)
        return title, row.dtype

    for (title, _), each in grouped(rows, key).items():
        widths = Counter(len(row.bit_entropies) for row in each.rows)
        width = widths.most_common(1)[0][0]
        same = [row for row in each.rows if len(row.bit_entropies) == width]
        yield title, each, _layer_rows(same) if by_layer else _kind_rows(same)


def _mean(rows: Sequence[TensorRow]) -> list[float]:
    width = len(rows[0].bit_entropies)
    return [
        weighted((prod(row.shape), row.bit_entropies[bit]) for row in rows) for bit in range(width)
    ]


def _kind_rows(tensors: Sequence[TensorRow]) -> _Rows:
    return [
        (kind, _mean(each.rows)) for kind, each in grouped(tensors, lambda row: row.kind).items()
    ]


def _layer_rows(tensors: Sequence[TensorRow]) -> _Rows:
    """A row for each layer, or for some neighbours if there are many."""
    last = max(row.layer for row in tensors if row.layer is not None)
    step = -(-(last + 1) // _MAX_ROWS)
    groups = grouped(tensors, lambda row: None if row.layer is None else row.layer // step)
    return [
        (
            str(at) if step == 1 else f"{at * step} to {min(at * step + step - 1, last)}",
            _mean(each.rows),
        )
        for at, each in sorted(groups.items())
    ]


def _heat_picture(title: str, each: Group, rows: _Rows) -> Picture:
    width = len(rows[0][1])
    parts = float_parts(each.rows[0].dtype, width)
    noisy = sum(all(shares[bit] > 0.99 for _, shares in rows) for bit in range(width))
    label = f"Entropy of each bit of {title}, row by row: {noisy} of {width} bits are noise in all."
    return Picture(label, heat_map(label, rows, parts), title)


def _heat_table(panels: Sequence[tuple[str, Group, _Rows]]) -> Table:
    """The entropies by part of the element, as nobody wants to hear 16 numbers a row."""
    heads = ("Tensors", "Row", "Sign", "Exponent", "Mantissa")
    body = []
    for title, each, rows in panels:
        for label, shares in rows:
            sums = {"sign": 0.0, "exponent": 0.0, "mantissa": 0.0, "bits": 0.0}
            at = 0
            for part, width in float_parts(each.rows[0].dtype, len(shares)):
                sums[part] += sum(shares[at : at + width])
                at += width
            cells = [words.bits_cell(sums[part]) for part in ("sign", "exponent", "mantissa")]
            cells = (
                cells
                if not sums["bits"]
                else [words.bits_cell(None)] * 2 + [words.bits_cell(sums["bits"])]
            )
            body.append((Cell(title), Cell(label), *cells))
    title = "Entropy of the bits, summed up by part of the element"
    return Table(title, headings(*heads, n_text=2), tuple(body[:400]))


# Exponents.


def _exponents(exponents: Sequence[ExponentRow]) -> Figure:
    shown = exponents[:_MAX_PANELS]
    n_roles, n_dtypes = len({row.role for row in exponents}), len({row.dtype for row in exponents})
    titles = [
        group_label(row.role, row.kind, row.dtype, n_roles=n_roles, n_dtypes=n_dtypes)
        for row in exponents
    ]
    low = min(_end(row.shares) + row.first for row in shown)
    high = max(row.first + len(row.shares) - _end(row.shares[::-1]) for row in shown)
    pictures = tuple(
        _exponent_picture(row, title, range(low, high))
        for row, title in zip(shown, titles, strict=False)
    )
    caption = (
        "How many values lie between a power of two and the next. A narrow hill means that few "
        "exponents occur, and that they pack into few bits: an exponent of 8 bits that only takes "
        "a dozen values needs about 2.6. All plots have the same axis, so hills can be compared; "
        "it ends where fewer than one value in a thousand is left."
    )
    return Figure(
        "Exponents", Caption(caption), pictures, _exponent_table(exponents, titles), across=3
    )


def _by_size(findings: Findings) -> list[ExponentRow]:
    """The rows that have exponents, those of the most bytes first."""
    groups = grouped(findings.tensors, lambda row: (row.role, row.kind, row.dtype))
    order = {key: at for at, key in enumerate(groups)}
    known = [row for row in findings.exponents if row.shares]
    return sorted(known, key=lambda row: order.get((row.role, row.kind, row.dtype), len(order)))


def _end(shares: Sequence[float]) -> int:
    """How many shares at the beginning are so small that they are left out: long thin tails would
    squeeze the hill."""
    seen = accumulate(shares)
    return next((i for i, part in enumerate(seen) if part > _LEAST_TAIL), 0)


def _exponent_picture(row: ExponentRow, title: str, exponents: range) -> Picture:
    shares = {row.first + i: part for i, part in enumerate(row.shares)}
    values = [
        {"x": at, "from": 0, "to": shares.get(at, 0.0), "color": 0,
         "power": f"2^{at} to 2^{at + 1}", "share": words.share(shares.get(at, 0.0))}
        for at in exponents
    ]  # fmt: skip
    fields = [Field("power", "Values from"), Field("share", "Share")]
    top = max(shares, key=lambda at: shares[at], default=0)
    label = f"Exponents of {title}: most values, {words.share(shares.get(top))}, are from 2^{top}."
    spec = columns(
        label, values, ["teal"], ("power of two", ""), fields, height=150,
        axis={"format": "%", "tickCount": 3},
    )  # fmt: skip
    return Picture(label, spec, title)


def _exponent_table(exponents: Sequence[ExponentRow], titles: Sequence[str]) -> Table:
    rows = []
    for row, title in zip(exponents, titles, strict=True):
        order = sorted(range(len(row.shares)), key=lambda i: -row.shares[i])
        needed, seen = 0, 0.0
        while seen < 0.999 * (1 - row.zeros) and needed < len(order):
            seen, needed = seen + row.shares[order[needed]], needed + 1
        top = Cell(f"2^{row.first + order[0]}", row.first + order[0]) if order else Cell("")
        rows.append((Cell(title), top, words.count_cell(needed), words.share_cell(row.zeros)))
    heads = (
        "Tensors",
        "Most frequent exponent",
        "Exponents of 99.9 % of the values",
        "Zeros and subnormal numbers",
    )
    return Table("Exponents", headings(*heads), tuple(rows))


# Planes and modes.

_Plane = tuple[str, PlaneRow, int]


def _plane_groups(tensors: Sequence[TensorRow]) -> list[tuple[str, list[tuple[int, PlaneRow]]]]:
    """Planes of the same name, dtype and role, each with the elements of its tensor."""
    groups = _large(grouped(tensors, lambda row: (row.role, row.dtype)))
    n_roles, n_dtypes = (len(set(parts)) for parts in zip(*groups, strict=True))
    found: dict[str, list[tuple[int, PlaneRow]]] = {}
    for row in (row for each in groups.values() for row in each.rows):
        for plane in row.planes:
            label = group_label(row.role, plane.name, row.dtype, n_roles=n_roles, n_dtypes=n_dtypes)
            found.setdefault(label, []).append((prod(row.shape), plane))
    return list(found.items())[:_MAX_GROUPS]


def _planes(tensors: Sequence[TensorRow]) -> Figure:
    rows, body = [], []
    for label, planes in _plane_groups(tensors):
        width = weighted((n, plane.bits) for n, plane in planes)
        entropy = weighted((n, plane.entropy) for n, plane in planes)
        reached = weighted(
            (n, plane.bits if plane.packed_bits is None else plane.packed_bits)
            for n, plane in planes
        )
        tips = {
            "what": label, "bits": words.bits(width), "entropy": words.bits(entropy),
            "reached": words.bits(reached),
        }  # fmt: skip
        pieces = (min(reached, width), max(width - reached, 0.0))
        rows.append(Bar(label, pieces, f"{words.bits(reached)} of {width:.0f}", tips, entropy))
        body.append((Cell(label), *map(words.bits_cell, (width, entropy, reached))))
    fields = [
        Field("what", "Plane"), Field("bits", "Bits"), Field("entropy", "Entropy"),
        Field("reached", "Reached"),
    ]  # fmt: skip
    label = "Planes: bits of an element, when packed and plain. " + "; ".join(
        f"{row.label}: {row.text}" for row in rows
    )
    spec = bars(label, rows, ["teal", "pale"], "bits of an element", fields)
    caption = (
        "An element is cut into planes, and each plane is packed on its own. The mark is the "
        "plane's entropy. A solid part that ends at the mark cannot get shorter unless the code "
        "knows more than how often each value occurs."
    )
    heads = headings("Plane", "Bits", "Entropy", "Reached")
    table = Table("Planes", heads, tuple(body))
    legend = (("teal", "packed"), ("pale", "saved"))
    return Figure("Planes", Caption(caption), (Picture(label, spec),), table, legend, half=True)


def _modes(tensors: Sequence[TensorRow]) -> Figure:
    rows, body, groups = [], [], _plane_groups(tensors)
    seen = {mode for _, planes in groups for _, plane in planes for mode in plane.modes}
    known = [mode for mode in MODE_COLORS if mode in seen] + sorted(seen - MODE_COLORS.keys())
    for label, planes in groups:
        chunks: Counter[str] = Counter()
        for _, plane in planes:
            chunks.update(plane.modes)
        n = sum(chunks.values()) or 1
        text = ", ".join(
            f"{mode_words(mode)} {words.share(k / n)}" for mode, k in chunks.most_common()
        )
        pieces = tuple(chunks[mode] / n for mode in known)
        rows.append(Bar(label, pieces, "", {"what": label, "modes": text}))
        body.append((Cell(label), words.count_cell(sum(chunks.values())), Cell(text)))
    label = "Modes by plane. " + "; ".join(f"{row.label}: {row.tips['modes']}" for row in rows)
    fields = [Field("what", "Plane"), Field("modes", "Modes")]
    colors = [MODE_COLORS.get(mode, "brown") for mode in known]
    spec = bars(label, rows, colors, "", fields)
    caption = (
        "Which way was chosen, chunk by chunk, at the level “default”. Noise is stored as it is, "
        "because a code for it would only take time; a plane with few frequent values goes "
        "through the entropy coder rANS."
    )
    table = Table("Modes", (Column("Plane"), Column("Chunks", True), Column("Modes")), tuple(body))
    legend = tuple((color, mode_words(mode)) for color, mode in zip(colors, known, strict=True))
    return Figure("Modes", Caption(caption), (Picture(label, spec),), table, legend, half=True)


def mode_words(mode: str) -> str:
    """What people call a mode."""
    return _MODE_WORDS.get(mode, words.printable(mode))


# Tables.


def _reasons(tensors: Sequence[TensorRow]) -> Table:
    rows = tuple(
        (
            Name(reason, _REASON_NCHARS),
            Name(split),
            words.count_cell(len(each.rows)),
            words.size_cell(each.nbytes),
            words.ratio_cell(each.nbytes, each.default.nbytes),
        )
        for (reason, split), each in grouped(tensors, _why).items()
    )
    heads = (
        Column("Reason"), Column("Split"), Column("Tensors", True), Column("Plain", True),
        Column("Ratio", True),
    )  # fmt: skip
    return Table("Why tensors are packed so", heads, rows[:60])


def _why(row: TensorRow) -> tuple[str, str]:
    """Why a tensor is packed so, without the figures of that tensor, and how it is split."""
    return re.sub(r"( save)? \d+(\.\d+)?(?=[ ,;]|$)", "", row.reason), row.split


def _all(tensors: Sequence[TensorRow]) -> Table:
    several = len({row.source for row in tensors}) > 1
    titles = (
        "Tensor", "Dtype", "Shape", "Kind", "Layer", "Plain", "Fast", "Default", "Max", "Ratio",
        "Bound", "Noise bits", "Split",
    )  # fmt: skip
    text = {"Tensor", "Model", "Dtype", "Shape", "Kind", "Split"}
    heads = tuple(Column(title, title not in text) for title in titles)
    if several:
        heads = (Column("Model"), *heads)
    rows = tuple(((Name(row.source),) if several else ()) + _tensor_row(row) for row in tensors)
    return Table("All tensors", heads, rows, tuple(row.nbytes for row in tensors))


def _tensor_row(row: TensorRow) -> tuple[Cell | Name, ...]:
    return (
        Name(row.name),
        Cell(row.dtype),
        Cell(words.shape(row.shape), prod(row.shape)),
        Cell(row.kind),
        words.count_cell(row.layer),
        words.size_cell(row.nbytes),
        *(
            words.size_cell(found.nbytes if (found := row.levels.get(name)) else None)
            for name in ("fast", "default", "max")
        ),
        words.ratio_cell(
            row.nbytes, row.levels["default"].nbytes if "default" in row.levels else None
        ),
        words.size_cell(row.bound.nbytes),
        words.count_cell(row.noise_bits),
        Cell(words.printable(row.split)),
    )
