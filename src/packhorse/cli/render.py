"""Drawing: tables, bars and progress, from rows to a terminal or a pipe.

Results go to standard output and progress to standard error. A pipe gets the same tables without
colour and at full width, and no progress at all. Names and messages come from files, so they are
never read as markup, and control characters in them are shown, not sent.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from packhorse.cli.rows import (
    BenchedFile,
    BenchRow,
    ErrorRow,
    FileRow,
    InspectedFile,
    PlannedFile,
    TensorRow,
    TunedMatrix,
    VerifiedFile,
    gb_per_s,
    ratio,
)

__all__ = [
    "add_columns",
    "bench_table",
    "draw",
    "error_line",
    "inspect_table",
    "json_document",
    "new_table",
    "open_console",
    "packed_line",
    "plan_table",
    "printable",
    "progress",
    "safe_text",
    "size",
    "tune_table",
    "unpacked_line",
    "verify_lines",
    "waiting",
]

_BAR_WIDTH = 24
_PROGRESS_WIDTH = 20  # with the columns beside it, a line of 80 characters keeps a long name
_PIPE_WIDTH = 100_000  # nothing is folded: what reads a pipe works by lines
# One glyph and colour for each mode; dots are what packing saved.
_MODE_STYLE = {
    "stored": ("█", "blue"),
    "rans": ("▓", "green"),
    "classed_rans": ("▓", "bright_green"),
    "palette": ("▒", "yellow"),
    "zstd": ("░", "magenta"),
    "constant": ("▏", "cyan"),
    "delta": ("▚", "bright_cyan"),
}
_SAVED = ("·", "dim")


def json_document(results: Sequence[Any], errors: Sequence[ErrorRow]) -> None:
    """Print rows as one JSON document on standard output."""
    document = {
        "results": [asdict(row) for row in results],
        "errors": [asdict(row) for row in errors],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def error_line(text: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"packhorse: error: {printable(text)}\n")


def printable(text: str) -> str:
    """The text with control characters as escapes, as a name may try to steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """A size in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"


def packed_line(row: FileRow) -> None:
    """What packing did, on a terminal alone: in a pipe, success is silent."""
    _file_line(row, row.nbytes, row.packed_nbytes)


def growth_warning(row: FileRow | PlannedFile, packed_nbytes: int) -> None:
    """Why a file grows when it is packed, and what to do; on standard error, also in a pipe."""
    if packed_nbytes <= row.nbytes:
        return
    words = row.notice or "its data cannot be packed"
    line = f"{row.dst}: ratio {row.ratio:.3f}, larger than the original: {words}; "
    sys.stderr.write(f"packhorse: warning: {printable(line)}keep {printable(row.src)} as it is\n")


def unpacked_line(row: FileRow) -> None:
    """What unpacking did, on a terminal alone."""
    _file_line(row, row.packed_nbytes, row.nbytes)


def _file_line(row: FileRow, before: int, after: int) -> None:
    console = open_console()
    if not console.is_terminal:
        return
    sizes = f"{size(before)} -> {size(after)}"
    line = f"{row.dst}: {sizes}, ratio {row.ratio:.3f}, {row.gb_per_s:.2f} GB/s"
    console.print(safe_text(line), soft_wrap=True)


def plan_table(planned: PlannedFile) -> None:
    """What packing would do to each tensor."""
    table = new_table(f"{planned.src} -> {planned.dst} (dry run, nothing is written)")
    add_columns(
        table, "tensor", "dtype", "shape", ">size", ">estimate", ">ratio", "split", "reason"
    )
    for row in planned.tensors:
        table.add_row(
            *_described(row.name, row.dtype, row.shape),
            size(row.nbytes),
            size(row.estimated_nbytes),
            f"{row.ratio:.3f}",
            row.split,
            safe_text(row.reason),
        )
    _total(table, len(planned.tensors), planned.nbytes, planned.estimated_nbytes)
    draw(table)


def inspect_table(inspected: InspectedFile) -> None:
    """Tensors with their planes, modes, ratio and bar."""
    table = new_table(inspected.path)
    add_columns(table, "tensor", "dtype", "shape", ">size", ">packed", ">ratio", "planes")
    between = "\n" if sys.stdout.isatty() else "  "  # a pipe wants one line for each tensor
    for row in inspected.tensors:
        table.add_row(
            *_described(row.name, row.dtype, row.shape),
            size(row.nbytes),
            size(row.packed_nbytes),
            f"{row.ratio:.3f}",
            _bar(row).append(between).append(_planes(row)),
        )
    _total(table, len(inspected.tensors), inspected.nbytes, inspected.packed_nbytes)
    draw(table)
    draw(_legend())
    if inspected.n_delta:
        draw(safe_text(_needed_base(inspected)))


def _needed_base(inspected: InspectedFile) -> str:
    called = f", called {inspected.base_name!r} when it was packed" if inspected.base_name else ""
    hashes = [row.base_hash for row in inspected.tensors if row.base_hash is not None]
    return (
        f"base: {inspected.n_delta} of {len(inspected.tensors)} tensors are not unpacked without "
        f"theirs{called}; the first has content hash {hashes[0]}"
    )


def verify_lines(verified: VerifiedFile) -> None:
    """One line for a good file or folder, one for each problem of a bad one."""
    console = open_console()
    if verified.ok:
        speed = gb_per_s(verified.packed_nbytes, verified.seconds)
        files = "" if verified.n_files == 1 else f"{verified.n_files} packed files, "
        line = f"{verified.path}: ok, {files}{size(verified.packed_nbytes)} at {speed:.2f} GB/s"
        console.print(safe_text(line), soft_wrap=True)
    for problem in verified.problems:
        console.print(safe_text(f"bad: {problem.message}"), soft_wrap=True)


def bench_table(benched: BenchedFile) -> None:
    """Speeds and ratio for each dtype, the last row being the total."""
    threads = "1 thread" if benched.threads == 1 else f"{benched.threads} threads"
    table = new_table(f"{benched.path}, level {benched.level}, {threads}, in memory")
    add_columns(
        table, "dtype", ">tensors", ">size", ">packed", ">ratio", ">encode", ">decode", "bit-exact"
    )
    for row in benched.dtypes:
        table.add_row(*_benched(row))
    table.add_section()
    table.add_row(*_benched(benched.total))
    draw(table)


def tune_table(tuned: TunedMatrix) -> None:
    """What is chosen for each number of tokens, and what that gains."""
    source = f"measured on {tuned.gpu}" if tuned.measured else f"predicted for {tuned.gpu}"
    many = f", {tuned.n_matrices} of them" if tuned.n_matrices else ""
    table = new_table(f"{tuned.n_rows} x {tuned.n_columns} {tuned.format}{many}: {source}")
    add_columns(table, ">tokens", "strategy", "division", ">us", ">BF16 us", ">times BF16")
    for row in tuned.buckets:
        division = "/".join(str(value) for value in (row.config or {}).values())
        plain = "" if row.plain_seconds is None else f"{row.plain_seconds * 1e6:.1f}"
        gain = "" if row.speedup is None else f"{row.speedup:.2f}"
        times = (f"{row.seconds * 1e6:.1f}", plain, gain)
        table.add_row(str(row.n_tokens), row.strategy, division, *times)
    draw(table)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """A line on standard error while the block runs, on a terminal alone."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(safe_text(title)):
        yield


@contextmanager
def progress(title: str, nbytes: int | None) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error while the block runs.

    Args:
        title: what is being worked on.
        nbytes: bytes of the whole work; None if that is not known.

    Yields:
        A function that takes the bytes done since it was called last; None where standard error
        is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=_PROGRESS_WIDTH),
        TaskProgressColumn(),
        _BytesColumn(table_column=Column(no_wrap=True, min_width=29)),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(title), total=nbytes)
        yield lambda done: bar.advance(task, done)


class _BytesColumn(ProgressColumn):
    """Bytes done of all, and GB/s since the start."""

    def render(self, task: Task) -> Text:
        speed = gb_per_s(int(task.completed), task.elapsed or 0.0)
        done = size(task.completed) + (f" of {size(task.total)}" if task.total else "")
        return Text(f"{done}, {speed:.2f} GB/s")


def open_console() -> Console:
    """Standard output; a pipe is so wide that nothing is folded."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def draw(what: Table | Text) -> None:
    """Draw on standard output; in a pipe without the blanks that fill up lines."""
    console = open_console()
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    lines = captured.get().splitlines()
    sys.stdout.write("".join(line.rstrip() + "\n" for line in lines))


def safe_text(text: str, style: str = "") -> Text:
    """Text from outside, never read as markup."""
    return Text(printable(text), style=style)


def new_table(title: str) -> Table:
    """A table without columns."""
    return Table(title=safe_text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def add_columns(table: Table, *names: str) -> None:
    """Columns by name; those whose name starts with `>` hold numbers."""
    for name in names:
        is_number = name.startswith(">")
        justify: Any = "right" if is_number else "left"
        table.add_column(name.lstrip(">"), justify=justify, no_wrap=is_number, overflow="fold")


def _described(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[Text, str, str]:
    return safe_text(name), dtype, "x".join(map(str, shape)) or "scalar"


def _total(table: Table, n_tensors: int, nbytes: int, packed_nbytes: int) -> None:
    table.add_section()
    name = "1 tensor" if n_tensors == 1 else f"{n_tensors} tensors"
    sizes = (size(nbytes), size(packed_nbytes))
    table.add_row(name, "", "", *sizes, f"{ratio(nbytes, packed_nbytes):.3f}")


def _benched(row: BenchRow) -> list[str | Text]:
    return [
        row.dtype,
        str(row.n_tensors),
        size(row.nbytes),
        size(row.packed_nbytes),
        f"{row.ratio:.3f}",
        f"{row.encode_gb_per_s:.2f} GB/s",
        f"{row.decode_gb_per_s:.2f} GB/s",
        "yes" if row.bit_exact else Text("NO", style="bold red"),
    ]


def _planes(row: TensorRow) -> Text:
    """Each plane with its modes, and what they gain: `exponent rans 2.66x, mantissa 0 stored`."""
    parts = []
    for plane in row.planes:
        modes = "+".join(sorted(plane.modes, key=lambda mode: -plane.modes[mode]))
        if modes == "delta":  # whole units, whatever the first plane is called
            gain = _gain(ratio(row.nbytes, plane.packed_nbytes))
            parts.append(f"delta {gain}" if plane.packed_nbytes else "equal to its base")
        elif modes == "stored" or "delta" in plane.modes:
            parts.append(f"{plane.name} {modes}")
        elif modes or row.n_chunks == 0:
            parts.append(f"{plane.name} {modes} {_gain(plane.ratio)}".strip())
    return safe_text(", ".join(parts))


def _gain(gained: float) -> str:
    return f"{gained:.{2 if gained < 100 else 0}f}x"


def _bar(row: TensorRow) -> Text:
    """How much of the tensor's bytes each plane still takes, in the glyph of its main mode."""
    bar = Text()
    filled = 0.0
    for plane in row.planes:
        if not plane.modes:
            continue
        filled += _BAR_WIDTH * plane.packed_nbytes / max(row.nbytes, 1)
        n_cells = min(round(filled), _BAR_WIDTH) - len(bar)
        glyph, style = _MODE_STYLE[max(plane.modes, key=lambda mode: plane.modes[mode])]
        bar.append(glyph * max(n_cells, 0), style=style)
    glyph, style = _SAVED
    return bar.append(glyph * (_BAR_WIDTH - len(bar)), style=style)


def _legend() -> Text:
    legend = Text("bar: ")
    for mode, (glyph, style) in _MODE_STYLE.items():
        legend.append(glyph, style=style).append(f" {mode}  ")
    return legend.append(_SAVED[0], style=_SAVED[1]).append(" saved")
