"""Draws the rows of snapshots: tables, a plot of size and ratio, and lines."""

import json
from collections.abc import Sequence

from packhorse.cli.grid import Grid
from packhorse.cli.render import (
    draw,
    glyphs_are_ascii,
    line,
    on_terminal,
    printable,
    safe_text,
    size,
    warning_line,
)
from packhorse.cli.snapshots.rows import (
    ListedStore,
    PrunedStore,
    RestoredSnapshot,
    ShownSnapshot,
    SnapshotsDiff,
    TakenSnapshot,
    VerifiedStore,
)
from packhorse.disk import TensorDiff

__all__ = [
    "diff_table",
    "growth_warning",
    "list_table",
    "pruned_lines",
    "removal_line",
    "restored_line",
    "show_plot",
    "show_table",
    "taken_line",
    "verify_lines",
]

_BAR_WIDTH = 18
_BLOCKS = " ▏▎▍▌▋▊▉█"  # a cell, filled from 0 to 8 eighths
_ALWAYS_SHOWN = 50  # rows of a plot
_METADATA_LENGTH = 120  # characters of a value that are shown; --json has all


def taken_line(row: TakenSnapshot) -> None:
    """Print what taking did, only on a terminal."""
    new = f"{size(row.nbytes)} -> {size(row.stored_nbytes)}"
    _on_terminal(f"{row.name}: {new}, ratio {_ratio(row.ratio)}, {row.gb_per_s:.2f} GB/s")


def growth_warning(row: TakenSnapshot) -> None:
    """Print which data became larger, on standard error, in a pipe too."""
    if row.notice is not None:
        warning_line(f"{row.store}: snapshot {row.name!r}: {row.notice}")


def restored_line(row: RestoredSnapshot) -> None:
    """Print what restoring did, only on a terminal."""
    _on_terminal(
        f"{row.dst}: {row.n_tensors} tensors, {size(row.file_nbytes)}, {row.gb_per_s:.2f} GB/s"
    )


def _on_terminal(text: str) -> None:
    if on_terminal():
        line(text)


def list_table(listed: ListedStore) -> None:
    """Draw all snapshots, and their total."""
    grid = Grid(
        printable(listed.store),
        (
            "~snapshot", "time (UTC)", ">tensors", ">size", ">stored", ">ratio", ">deltas", "~base"
        ),
        drops=(">deltas", ">tensors", "time (UTC)", "~base", ">size"),
        last_drops=(">stored", ">ratio"),
    )  # fmt: skip
    for row in listed.snapshots:
        grid.row(
            printable(row.name),
            _minute(row.time),
            str(row.n_tensors),
            size(row.nbytes),
            size(row.stored_nbytes),
            _ratio(row.ratio),
            str(row.max_deltas),
            printable(row.base or "-"),
        )
    grid.section()
    name = "1 snapshot" if len(listed.snapshots) == 1 else f"{len(listed.snapshots)} snapshots"
    sizes = (size(listed.nbytes), size(listed.stored_nbytes))
    grid.row(name, "", "", *sizes, _ratio(listed.ratio), "", "")
    draw(grid)
    _damaged(listed)


def _minute(time: str) -> str:
    """A time without its seconds and its time zone, which is always UTC."""
    return time[:16].replace("T", " ")


def show_plot(listed: ListedStore) -> None:
    """Draw what each of the newest snapshots added to the store, and its ratio, as bars."""
    rows = listed.snapshots[-_ALWAYS_SHOWN:]
    left_out = len(listed.snapshots) - len(rows)
    title = f"{listed.store}: {size(listed.nbytes)} in {size(listed.stored_nbytes)}"
    title += f" (the newest {len(rows)} snapshots)" if left_out else ""
    grid = Grid(
        printable(title),
        ("~snapshot", "stored", "> ", "ratio", ">  "),
        drops=("ratio", "stored"),  # the bars; names are shortened before
        last_drops=("> ", ">  "),
    )
    is_ascii = glyphs_are_ascii()
    most = max((row.stored_nbytes for row in rows), default=0)
    best = max((row.ratio or 0.0 for row in rows), default=0.0)
    for row in rows:
        grid.row(
            printable(row.name),
            safe_text(_bar(row.stored_nbytes, most, is_ascii), "green"),
            size(row.stored_nbytes),
            safe_text(_bar(row.ratio or 0.0, best, is_ascii), "cyan"),
            _ratio(row.ratio),
        )
    draw(grid)
    _damaged(listed)


def _bar(value: float, most: float, is_ascii: bool) -> str:
    """A bar of at most `_BAR_WIDTH` cells, drawn in eighths of a cell unless only ASCII is left."""
    share = value / most if most else 0.0
    if is_ascii:
        return "#" * max(round(share * _BAR_WIDTH), value > 0)
    eighths = max(round(share * _BAR_WIDTH * 8), value > 0)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _damaged(listed: ListedStore) -> None:
    for problem in listed.damaged:
        line(f"bad: {problem.message}")


def show_table(shown: ShownSnapshot) -> None:
    """Draw one snapshot: what each kind of tensor cost, its base, its chains and its metadata."""
    row = shown.snapshot
    grid = Grid(
        printable(f"{row.name}, {row.time}"),
        (
            "~kind", "dtype", ">tensors", ">full", ">deltas", ">shared", ">size", ">stored",
            ">ratio",
        ),
        drops=(">full", ">tensors", ">size", ">shared", ">deltas", "dtype"),
        last_drops=(">stored", ">ratio"),
    )  # fmt: skip
    for kind in shown.kinds:
        grid.row(
            printable(kind.kind),
            kind.dtype,
            *map(str, (kind.n_tensors, kind.n_full, kind.n_delta, kind.n_shared)),
            size(kind.nbytes),
            size(kind.stored_nbytes),
            _ratio(kind.ratio),
        )
    grid.section()
    sizes = (size(row.nbytes), size(row.stored_nbytes), _ratio(row.ratio))
    grid.row("all", "", str(row.n_tensors), "", "", "", *sizes)
    draw(grid)
    draw(safe_text(f"base: {row.base or 'none'}"))
    links = "no tensor is a delta" if not row.max_deltas else f"at most {row.max_deltas} deltas"
    draw(safe_text(f"chains: {links}; restoring reads {size(shown.needed_nbytes)}"))
    for key, value in shown.metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        end = "..." if len(text) > _METADATA_LENGTH else ""
        draw(safe_text(f"metadata: {key} = {text[:_METADATA_LENGTH]}{end}"))


def diff_table(found: SnapshotsDiff, limit: int) -> None:
    """Draw the tensors that changed, at most `limit` of them, and count the tensors by change."""
    rows = [row for row in found.tensors if row.change != "equal"]
    if rows:
        grid = Grid(
            printable(f"{found.old} -> {found.new}"),
            ("~tensor", "dtype", "shape", "change", ">values", ">largest", ">mean"),
            drops=(">mean", "shape", "dtype", ">largest"),
            last_drops=(">values", "change"),
        )
        for row in rows[:limit]:
            _diff_row(grid, row)
        draw(grid)
    if len(rows) > limit:
        draw(safe_text(f"{len(rows) - limit} more; show them with --limit {len(rows)}"))
    counts = ", ".join(f"{n} {change}" for change, n in found.counts.items() if n)
    draw(safe_text(f"{found.old} -> {found.new}: {counts or 'no tensors'}"))


def _diff_row(grid: Grid, row: TensorDiff) -> None:
    share = ""
    if row.n_changed is not None and row.n_values:
        share = f"{100 * row.n_changed / row.n_values:.3g} %"
    changes = ("" if x is None else f"{x:.3g}" for x in (row.max_change, row.mean_change))
    shape = "x".join(map(str, row.shape)) or "scalar"
    grid.row(printable(row.path), row.dtype, shape, row.change, share, *changes)


def verify_lines(verified: VerifiedStore) -> None:
    """Print one line for a good store, or one for each problem of a bad one."""
    if verified.ok:
        line(f"{verified.store}: ok, {_counted(verified.snapshots)}")
    for problem in verified.problems:
        line(f"bad: {problem.message}")


def removal_line(names: Sequence[str]) -> str:
    """The snapshots that will be removed, as a line for a question or a dry run."""
    return printable(f"remove {_counted(names)}: {', '.join(names)}")


def pruned_lines(row: PrunedStore) -> None:
    """Print what was removed, or what would be."""
    if row.dry_run or not row.removed:
        would = f"would {removal_line(row.removed)}" if row.removed else "nothing to remove"
        draw(safe_text(f"{row.store}: {would} (kept: {_counted(row.kept)})"))
        return
    freed = "" if row.freed_nbytes is None else f", {size(max(row.freed_nbytes, 0))} freed"
    _on_terminal(f"{row.store}: removed {_counted(row.removed)}{freed}")


def _counted(names: Sequence[str]) -> str:
    return "1 snapshot" if len(names) == 1 else f"{len(names)} snapshots"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
