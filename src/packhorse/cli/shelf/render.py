"""Draws the rows of shelves: tables and lines."""

import json
from collections.abc import Sequence
from typing import Any

from packhorse.cli.grid import Grid
from packhorse.cli.render import draw, line, on_terminal, printable, safe_text, size
from packhorse.cli.shelf.rows import (
    CompactedShelf,
    ExchangedTensor,
    ExportedTensors,
    ImportedTensors,
    ListedShelf,
    ListedTensor,
    ShownState,
    ShownTensor,
    StatisticsRow,
    VerifiedShelf,
)

__all__ = [
    "compacted_line",
    "exported_lines",
    "imported_lines",
    "list_table",
    "show_lines",
    "verify_lines",
]

_VALUE_LENGTH = 120  # characters of a value that are shown; --json has all


def list_table(listed: ListedShelf) -> None:
    """Draw all tensors with their total, then the states, the tags and the size on the disk."""
    title = listed.shelf if listed.tag is None else f"{listed.shelf} at {listed.tag}"
    grid = Grid(
        printable(title),
        ("~tensor", "dtype", "shape", "chunks", "base", ">size", ">packed", ">ratio"),
        drops=("base", "chunks", ">size", "shape", "dtype"),
        last_drops=(">packed", ">ratio"),
    )
    for row in listed.tensors:
        grid.row(
            printable(row.name),
            row.dtype,
            _shape(row.shape),
            _shape(row.chunks),
            row.base or "-",
            *_sizes(row),
        )
    grid.section()
    grid.row(_counted(len(listed.tensors), "tensor"), "", "", "", "", *_sizes(listed))
    draw(grid)
    for name in listed.states:
        draw(safe_text(f"state: {name}"))
    for tag in listed.tags:
        draw(safe_text(f"tag: {tag.name}, {_minute(tag.time)} UTC, commit {tag.commit}"))
    for reader in listed.readers:
        behind = _counted(reader.n_commits_behind, "commit")
        draw(
            safe_text(
                f"reader: process {reader.pid} is {behind} behind; what was replaced since then "
                "stays on the disk"
            )
        )
    free = f", {size(listed.free_nbytes)} of it free" if listed.free_nbytes else ""
    commits = _counted(listed.n_commits, "commit")
    draw(safe_text(f"on the disk: {size(listed.file_nbytes)}{free}, after {commits}"))


def _sizes(row: ListedShelf | ListedTensor) -> tuple[str, str, str]:
    return size(row.nbytes), size(row.packed_nbytes), f"{row.ratio:.3f}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _minute(time: str) -> str:
    """A time without its seconds and its time zone, which is always UTC."""
    return time[:16].replace("T", " ")


def _counted(n: int, what: str) -> str:
    return f"1 {what}" if n == 1 else f"{n} {what}s"


def show_lines(shown: ShownTensor | ShownState) -> None:
    """Print a tensor's facts and values, or draw the table of a state."""
    if isinstance(shown, ShownState):
        _state_table(shown)
        return
    row = shown.tensor
    at = "" if shown.tag is None else f" at {shown.tag}"
    base = ", rows as differences from a keyframe" if row.base else ""
    draw(safe_text(f"{row.name}{at}: {row.dtype} {_shape(row.shape)}"))
    draw(safe_text(f"chunks: {_shape(row.chunks)}{base}"))
    packed = f"{size(row.nbytes)} in {size(row.packed_nbytes)}, ratio {row.ratio:.3f}"
    draw(safe_text(f"size: {packed}"))
    if shown.statistics is not None:
        draw(safe_text(_statistics(shown.statistics)))
    _values(shown)


def _statistics(found: StatisticsRow) -> str:
    parts = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in (("min", found.min), ("max", found.max), ("mean", found.mean))
        if value is not None
    ]
    counts = (("zero", found.n_zero), ("NaN", found.n_nan), ("infinite", found.n_infinite))
    parts += [f"{n} {name}" for name, n in counts if n]
    return ", ".join([f"values: {found.n_values}", *parts])


def _values(shown: ShownTensor) -> None:
    """The first values: a line for each row, cut at the edge of the terminal."""
    index = "" if shown.index is None else f"[{shown.index}]"
    kept = _lengths(shown.values)
    n_axes = len(shown.selected)
    is_cut = any(some < all_ for some, all_ in zip(kept, shown.selected, strict=False))
    first = f", the first {_shape(kept)}" if is_cut and 0 not in kept else ""
    what = f"{_shape(shown.selected)} values" if n_axes else "one value"
    draw(safe_text(f"{shown.tensor.name}{index}: {what}{first}"))
    for text in _lines(shown.values, n_axes):
        draw(safe_text(f"  {text}"), is_cut=True)


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        return ()
    return (len(values), *(_lengths(values[0]) if values else ()))


def _lines(values: Any, n_axes: int) -> list[str]:
    if n_axes < 2:
        numbers = values if n_axes else [values]
        return [" ".join(f"{_number(number):>11}" for number in numbers)] if numbers else []
    return [text for inner in values for text in _lines(inner, n_axes - 1)]


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _state_table(shown: ShownState) -> None:
    at = "" if shown.tag is None else f" at {shown.tag}"
    grid = Grid(
        printable(f"{shown.name}{at}: a state"),
        ("~path", "dtype", "shape", ">size"),
        drops=("shape", "dtype"),
        last_drops=(">size",),
    )
    for row in shown.tensors:
        grid.row(printable(row.path), row.dtype, _shape(row.shape), size(row.nbytes))
    grid.section()
    grid.row(_counted(len(shown.tensors), "tensor"), "", "", size(shown.nbytes))
    draw(grid)
    for path, value in shown.values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        end = "..." if len(text) > _VALUE_LENGTH else ""
        draw(safe_text(f"value: {path} = {text[:_VALUE_LENGTH]}{end}"))


def verify_lines(verified: VerifiedShelf) -> None:
    """Print one line for a good shelf, or one for each problem of a bad one."""
    if verified.ok:
        there = f"{_counted(verified.n_tensors, 'tensor')}, {_counted(verified.n_tags, 'tag')}"
        line(f"{verified.shelf}: ok, {there}, {size(verified.packed_nbytes)}")
    for problem in verified.problems:
        line(f"bad: {problem.message}")


def compacted_line(row: CompactedShelf) -> None:
    """Print what compacting saved, or would save."""
    saved = f"{size(row.saved_nbytes)} of {size(row.file_nbytes)}"
    if row.dry_run:
        draw(safe_text(f"{row.shelf}: would save about {saved}"))
    elif on_terminal():
        line(f"{row.shelf}: saved {saved}")


def exported_lines(row: ExportedTensors) -> None:
    """Print what was exported, only on a terminal, or what would be."""
    if row.dry_run:
        _exchange_table(f"{row.shelf} -> {row.dst} ({row.format})", row.tensors, ())
    elif on_terminal():
        tensors = _counted(len(row.tensors), "tensor")
        line(f"{row.dst}: {tensors}, {size(row.nbytes)}, {row.gb_per_s:.2f} GB/s")


def imported_lines(row: ImportedTensors) -> None:
    """Print what was imported, only on a terminal, or what would be."""
    if row.dry_run:
        _exchange_table(f"{row.src} ({row.format}) -> {row.shelf}", row.tensors, row.replaced)
    elif on_terminal():
        tensors = _counted(len(row.tensors), "tensor")
        packed = f"{size(row.nbytes)} -> {size(row.packed_nbytes or 0)}, ratio {row.ratio:.3f}"
        line(f"{row.src}: {tensors}, {packed}, {row.gb_per_s:.2f} GB/s")


def _exchange_table(title: str, rows: Sequence[ExchangedTensor], replaced: Sequence[str]) -> None:
    grid = Grid(
        printable(title), ("~tensor", "dtype", "shape", ">size"), drops=("shape", "dtype"),
        last_drops=(">size",), note="replaced" if replaced else "",
    )  # fmt: skip
    for row in rows:
        note = "replaced" if row.name in replaced else ""
        grid.row(printable(row.name), row.dtype, _shape(row.shape), size(row.nbytes), note=note)
    draw(grid)
