"""Section 6 of a report: what tensors would take in memory if they stayed packed there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from packhorse.reports.page import words
from packhorse.reports.page.charts import BYTES, Field, columns
from packhorse.reports.page.glance import PACKED_AND_SAVED, size_figure
from packhorse.reports.page.grouping import Sized, weighted
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
from packhorse.reports.results import Estimate, MemoryRow, total

__all__ = ["memory_section"]

_MAX_LAYERS = 128
_MAX_TABLES = 14


def memory_section(rows: Sequence[MemoryRow]) -> Section:
    """The section "Packed in memory"."""
    on_device = [row for row in rows if row.device_nbytes is not None]
    on_host = [row for row in rows if row.host_nbytes is not None]
    blocks: list[Figure | Table] = []
    if any(row.layer is not None for row in on_device):
        blocks += [_by_layer(on_device), _exceptions(on_device)]
    if on_device:
        blocks.append(_by_format(on_device))
    if on_host:
        blocks.append(_tables(on_host))
    return Section("memory", "Packed in memory", _lead(rows, on_device), (*blocks, _all(rows)))


def _lead(rows: Sequence[MemoryRow], on_device: Sequence[MemoryRow]) -> tuple[str, ...]:
    plain = sum(row.nbytes for row in rows)
    if not on_device:
        tables = [row for row in rows if row.host_nbytes is not None]
        held = total([row.host_nbytes for row in tables if row.host_nbytes])
        text = "No tensor here is a matrix of BF16, which is what stays packed on a GPU"
        if not tables:
            return (f"{text}.",)
        plain = sum(row.nbytes for row in tables)
        rest = f". In the memory of the host, {words.plural(len(tables), 'table')} of "
        return text + rest + f"{words.size(plain)} would take ", words.size(held.nbytes), "."
    packed = total([row.device_nbytes for row in on_device if row.device_nbytes])
    kept = plain - sum(row.nbytes for row in on_device)
    return (
        f"In the memory of a GPU, {words.size(plain)} become ",
        words.size(packed.nbytes + kept),
        f": {words.plural(len(on_device), 'tensor')} stay packed and are decoded as they are used, "
        f"{words.count(len(rows) - len(on_device))} stay plain.",
    )


def _layers(rows: Sequence[MemoryRow]) -> dict[int, list[MemoryRow]]:
    found: dict[int, list[MemoryRow]] = {}
    for row in rows:
        if row.layer is not None:
            found.setdefault(row.layer, []).append(row)
    return dict(sorted(found.items())[:_MAX_LAYERS])


def _by_layer(rows: Sequence[MemoryRow]) -> Figure:
    values, body = [], []
    for layer, those in _layers(rows).items():
        plain = sum(row.nbytes for row in those)
        packed = total([row.device_nbytes for row in those if row.device_nbytes])
        tips = {"layer": str(layer), "plain": words.size(plain), "packed": words.estimate(packed),
                "ratio": words.ratio_error(plain, packed)}  # fmt: skip
        for color, (start, end) in enumerate(((0, packed.nbytes), (packed.nbytes, plain))):
            values.append(
                {"x": layer, "from": start, "to": max(end, start), "color": color, **tips}
            )
        body.append(
            (
                words.count_cell(layer),
                words.size_cell(plain),
                words.estimate_cell(packed),
                words.ratio_cell(plain, packed.nbytes),
                words.share_cell(_excepted(those)),
                *_format_cells(those),
            )
        )
    fields = [
        Field("layer", "Layer"),
        Field("plain", "Plain"),
        Field("packed", "Packed"),
        Field("ratio", "Ratio"),
    ]
    label = "Bytes in memory by layer, packed and saved."
    colors = [color for color, _ in PACKED_AND_SAVED]
    spec = columns(label, values, colors, ("layer", ""), fields, axis=BYTES)
    names = _format_names(rows)
    both = [head for name in names for head in (name, f"{name}: exceptions")]
    heads = headings("Layer", "Plain", "Packed", "Ratio", "Exceptions", *both, n_text=0)
    caption = "Matrices of BF16 in codes of a fixed length, so that any row is found at once. "
    caption += "They take more than in a file, and far less than plain."
    table = Table("Memory by layer", heads, tuple(body))
    return Figure(
        "By layer", Caption(caption), (Picture(label, spec),), table, PACKED_AND_SAVED, half=True
    )


def _format_names(rows: Sequence[MemoryRow]) -> list[str]:
    """The formats that rows were sized in."""
    return list(dict.fromkeys(name for row in rows for name in row.formats))


def _in_format(rows: Sequence[MemoryRow], name: str) -> tuple[Estimate, float]:
    """Bytes and share of exceptions of some rows in one format."""
    nbytes = total([row.formats[name].nbytes for row in rows])
    return nbytes, weighted((prod(row.shape), row.formats[name].exceptions) for row in rows)


def _format_cells(rows: Sequence[MemoryRow]) -> list[Cell]:
    """What a layer takes in each format, and its exceptions there."""
    found = [_in_format(rows, name) for name in _format_names(rows)]
    return [
        cell
        for nbytes, share in found
        for cell in (words.estimate_cell(nbytes), words.share_cell(share))
    ]


def _by_format(rows: Sequence[MemoryRow]) -> Figure:
    plain = sum(row.nbytes for row in rows)
    found = {name: _in_format(rows, name) for name in _format_names(rows)}
    sizes = [Sized(name, plain, nbytes) for name, (nbytes, _) in found.items()]
    shares = " and ".join(f"{words.share(share)} in {name}" for name, (_, share) in found.items())
    n_w11 = sum(row.device_note.startswith("W11") for row in rows)
    chosen = f"W11 is chosen for {words.plural(n_w11, 'tensor')} of {words.count(len(rows))}."
    caption = Caption(
        "The same matrices in each format. W11 is shorter, but has more exceptions, which are "
        "corrected one by one; so it is chosen only where they are few.",
        f"Exceptions are {shares} of the elements. {chosen}",
    )
    return size_figure("By format", caption, "Format", sizes, half=False)


def _excepted(rows: Sequence[MemoryRow]) -> float:
    return weighted((prod(row.shape), row.exceptions or 0.0) for row in rows)


def _exceptions(rows: Sequence[MemoryRow]) -> Figure:
    layers = {layer: _excepted(those) for layer, those in _layers(rows).items()}
    values = [
        {
            "x": layer,
            "from": 0,
            "to": found,
            "color": 0,
            "layer": str(layer),
            "share": words.share(found),
        }
        for layer, found in layers.items()
    ]
    worst = max(layers, key=lambda layer: layers[layer])
    label = f"Exceptions by layer. Layer {worst} has the most, {words.share(layers[worst])}."
    spec = columns(
        label, values, ["rose"], ("layer", "share of elements"),
        [Field("layer", "Layer"), Field("share", "Exceptions")],
        axis={"format": "~%", "tickCount": 5},
    )  # fmt: skip
    caption = Caption(
        "Elements whose exponent is outside of their row's window, and which are kept aside. They "
        "cost bytes and time.",
        f"Layer {worst} has the most: {words.share(layers[worst])}.",
    )
    heads = (Column("Layer", True), Column("Exceptions", True))
    body = tuple(
        (words.count_cell(layer), words.share_cell(found)) for layer, found in layers.items()
    )
    table = Table("Exceptions by layer", heads, body)
    return Figure("Exceptions", caption, (Picture(label, spec),), table, half=True)


def _tables(rows: Sequence[MemoryRow]) -> Figure:
    largest = sorted(rows, key=lambda row: -row.nbytes)[:_MAX_TABLES]
    sizes = [Sized(row.name, row.nbytes, row.host_nbytes) for row in largest if row.host_nbytes]
    caption = (
        "Tables in the memory of the host, whose rows are fetched one by one and decoded where "
        "they are needed. What is saved in memory is saved on the way to the GPU as well."
    )
    return size_figure("Tables in host memory", Caption(caption), "Table", sizes, half=False)


def _all(rows: Sequence[MemoryRow]) -> Table:
    heads = (
        Column("Tensor"), Column("Dtype"), Column("Layer", True), Column("Plain", True),
        Column("On a GPU", True), Column("How"), Column("Exceptions", True),
        Column("On the host", True), Column("How "), Column("Pulled", True),
    )  # fmt: skip
    body = tuple(
        (
            Name(row.name),
            Cell(row.dtype),
            words.count_cell(row.layer),
            words.size_cell(row.nbytes),
            words.estimate_cell(row.device_nbytes),
            Cell(words.printable(row.device_note)),
            words.share_cell(row.exceptions),
            words.estimate_cell(row.host_nbytes),
            Cell(words.printable(row.host_note)),
            words.share_cell(row.pulled),
        )
        for row in rows
    )
    return Table("Tensors in memory", heads, body, tuple(row.nbytes for row in rows))
