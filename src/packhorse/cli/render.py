"""Draws rows as tables, bars and progress, on a terminal or to a pipe.

Results go to standard output, progress to standard error. A pipe gets the same tables at full width
(`grid.py`) and without colour, and no progress. Names and messages can come from files, so they are
never read as markup, and control characters in them are escaped.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

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
from rich.table import Column
from rich.text import Text

from packhorse.cli.grid import Grid, cut, shorten
from packhorse.cli.rows import (
    BenchedFile,
    BenchRow,
    ErrorRow,
    FileRow,
    InspectedFile,
    PlaneRow,
    PlannedFile,
    SharedFile,
    TensorRow,
    TunedMatrix,
    VerifiedFile,
    gb_per_s,
    ratio,
)

__all__ = [
    "bench_table",
    "draw",
    "error_line",
    "flush",
    "glyphs_are_ascii",
    "inspect_table",
    "json_text",
    "line",
    "on_terminal",
    "packed_line",
    "plan_table",
    "printable",
    "progress",
    "safe_text",
    "shared_table",
    "size",
    "tune_table",
    "unpacked_line",
    "verify_lines",
    "waiting",
    "warning_line",
    "write",
]

_BAR_WIDTH = 24
_PROGRESS_WIDTH = 20  # leaves room for a long name in a line of 80 characters
_PIPE_WIDTH = 100_000  # so wide that no line is folded: readers of pipes work by lines
_PIECE_NBYTES = 1 << 15  # a document is printed in pieces of this size
# For each mode a glyph, a glyph in ASCII, and a colour. Dots show what packing saved.
_SAVED = "saved"
_STYLES = {
    "stored": ("█", "#", "blue"),
    "rans": ("▓", "=", "green"),
    "classed_rans": ("▓", "=", "bright_green"),
    "palette": ("▒", "+", "yellow"),
    "zstd": ("░", "-", "magenta"),
    "matches": ("░", "-", "bright_magenta"),
    "nibbles": ("▓", "=", "bright_yellow"),
    "constant": ("▏", "|", "cyan"),
    "delta": ("▚", "%", "bright_cyan"),
    "sparse_delta": ("▞", "/", "bright_blue"),
    _SAVED: ("·", ".", "dim"),
}
# Modes that cover whole units, although they are listed under the first plane.
_FROM_BASE = {"delta", "sparse_delta"}


def json_text(results: Sequence[Any], errors: Sequence[ErrorRow]) -> str:
    """Rows as one JSON document."""
    document = {
        "results": [asdict(row) for row in results],
        "errors": [asdict(row) for row in errors],
    }
    return json.dumps(document, indent=2) + "\n"


def write(text: str) -> None:
    """Print a text as it is, in pieces."""
    # If the reader of a pipe ends while an unbuffered stream (PYTHONUNBUFFERED) writes, Python
    # loses the rest of the text without an error. The next piece then raises the error.
    for start in range(0, len(text), _PIECE_NBYTES):
        sys.stdout.write(text[start : start + _PIECE_NBYTES])


def error_line(text: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"packhorse: error: {printable(text)}\n")


def warning_line(text: str) -> None:
    """Print one line on standard error about something that did not stop the work."""
    sys.stderr.write(f"packhorse: warning: {printable(text)}\n")


def printable(text: str) -> str:
    """The text with control characters escaped: a name may try to control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """A size in decimal units, with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"


def packed_line(row: FileRow) -> None:
    """Print what packing did, only on a terminal: in a pipe, success is silent."""
    _file_line(row, row.nbytes, row.packed_nbytes)


def growth_warning(row: FileRow | PlannedFile, packed_nbytes: int) -> None:
    """Warn on standard error that a file grows when it is packed: why, and what to do."""
    if packed_nbytes <= row.nbytes:
        return
    words = row.notice or "its data cannot be packed"
    text = f"{row.dst}: ratio {row.ratio:.3f}, larger than the original: {words}; "
    warning_line(f"{text}keep {row.src} as it is")


def unpacked_line(row: FileRow) -> None:
    """Print what unpacking did, only on a terminal."""
    _file_line(row, row.packed_nbytes, row.nbytes)


def _file_line(row: FileRow, before: int, after: int) -> None:
    sizes = f"{size(before)} -> {size(after)}"
    if on_terminal():
        line(f"{row.dst}: {sizes}, ratio {row.ratio:.3f}, {row.gb_per_s:.2f} GB/s")


def plan_table(planned: PlannedFile) -> None:
    """Draw what packing would do to each tensor."""
    grid = Grid(
        printable(f"{planned.src} -> {planned.dst} (dry run, nothing is written)"),
        ("~tensor", "dtype", "shape", ">size", ">estimate", ">ratio", "split"),
        drops=("split", ">size", "shape", "dtype"),
        last_drops=(">estimate", ">ratio"),
        note="reason",
    )
    for row in planned.tensors:
        grid.row(
            *_described(row.name, row.dtype, row.shape),
            size(row.nbytes),
            size(row.estimated_nbytes),
            f"{row.ratio:.3f}",
            row.split,
            note=safe_text(row.reason),
        )
    grid.section()
    _total(grid, len(planned.tensors), planned.nbytes, planned.estimated_nbytes, "")
    draw(grid)


def inspect_table(inspected: InspectedFile) -> None:
    """Draw the tensors with their planes, modes, ratio and bar."""
    grid = Grid(
        printable(inspected.path),
        ("~tensor", "dtype", "shape", ">size", ">packed", ">ratio"),
        drops=(">size", "shape", "dtype"),
        last_drops=(">packed", ">ratio"),
        note="planes",
    )
    for row in inspected.tensors:
        grid.row(
            *_described(row.name, row.dtype, row.shape),
            size(row.nbytes),
            size(row.packed_nbytes),
            f"{row.ratio:.3f}",
            note=_bar(row).append("  ").append_text(_planes(row)),
        )
    grid.section()
    _total(grid, len(inspected.tensors), inspected.nbytes, inspected.packed_nbytes)
    draw(grid)
    draw(_legend(inspected), is_cut=True)
    if inspected.n_delta:
        draw(safe_text(_needed_base(inspected)))


def _needed_base(inspected: InspectedFile) -> str:
    called = f", called {inspected.base_name!r} when it was packed" if inspected.base_name else ""
    hashes = [row.base_hash for row in inspected.tensors if row.base_hash is not None]
    return (
        f"base: {inspected.n_delta} of {len(inspected.tensors)} tensors need one to be unpacked"
        f"{called}; that of the first has content hash {hashes[0]}"
    )


def verify_lines(verified: VerifiedFile) -> None:
    """Print one line for a good file or folder, or one for each problem of a bad one."""
    if verified.ok:
        speed = gb_per_s(verified.packed_nbytes, verified.seconds)
        files = "" if verified.n_files == 1 else f"{verified.n_files} packed files, "
        line(f"{verified.path}: ok, {files}{size(verified.packed_nbytes)} at {speed:.2f} GB/s")
    for problem in verified.problems:
        line(f"bad: {problem.message}")


def shared_table(files: list[SharedFile]) -> None:
    """Draw a row for each file that was handled on a cluster, and a line for each problem."""
    counts = Counter(row.status for row in files)
    grid = Grid(
        ", ".join(f"{n} {status}" for status, n in counts.items()) or "no files",
        ("~file", "status", ">size", ">packed", ">ratio", ">tasks", ">seconds"),
        drops=(">tasks", ">seconds", ">size"),
        last_drops=(">packed", ">ratio"),
    )
    for row in files:
        sizes = (size(row.nbytes), size(row.packed_nbytes), f"{row.ratio:.3f}")
        shown = sizes if row.packed_nbytes else (size(row.nbytes) if row.nbytes else "", "", "")
        times = (str(row.n_tasks), f"{row.seconds:.2f}")
        grid.row(safe_text(row.src), row.status, *shown, *times)
    grid.section()
    known = [row for row in files if row.packed_nbytes]
    before, after = sum(row.nbytes for row in known), sum(row.packed_nbytes for row in known)
    grid.row(
        "1 file" if len(files) == 1 else f"{len(files)} files",
        "", size(before), size(after), f"{ratio(before, after):.3f}",
        str(sum(row.n_tasks for row in files)), f"{sum(row.seconds for row in files):.2f}",
    )  # fmt: skip
    draw(grid)
    for row in files:
        for problem in row.problems:
            line(f"bad: {problem.message}")


def bench_table(benched: BenchedFile) -> None:
    """Draw speeds and ratio for each dtype, and the total in the last row."""
    threads = "1 thread" if benched.threads == 1 else f"{benched.threads} threads"
    grid = Grid(
        printable(f"{benched.path}, level {benched.level}, {threads}, in memory"),
        ("dtype", ">tensors", ">size", ">packed", ">ratio", ">encode", ">decode", "bit-exact"),
        drops=(">packed", ">tensors", ">size"),
        last_drops=(">encode", ">decode", "bit-exact", ">ratio"),
    )
    for row in benched.dtypes:
        grid.row(*_benched(row))
    grid.section()
    grid.row(*_benched(benched.total))
    draw(grid)


def tune_table(tuned: TunedMatrix) -> None:
    """Draw the choice for each number of tokens, and its gain."""
    source = f"measured on {tuned.gpu}" if tuned.measured else f"predicted for {tuned.gpu}"
    many = f", {tuned.n_matrices} of them" if tuned.n_matrices else ""
    grid = Grid(
        printable(f"{tuned.n_rows} x {tuned.n_columns} {tuned.format}{many}: {source}"),
        (">tokens", "strategy", "division", ">us", ">BF16 us", ">times BF16"),
        drops=("division", ">BF16 us"),
        last_drops=(">us", ">times BF16", "strategy"),
    )
    for row in tuned.buckets:
        division = "/".join(str(value) for value in (row.config or {}).values())
        plain = "" if row.plain_seconds is None else f"{row.plain_seconds * 1e6:.1f}"
        gain = "" if row.speedup is None else f"{row.speedup:.2f}"
        times = (f"{row.seconds * 1e6:.1f}", plain, gain)
        grid.row(str(row.n_tokens), row.strategy, division, *times)
    draw(grid)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """A status line on standard error while the block runs, only on a terminal."""
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
        title: what the program is working on.
        nbytes: the total number of bytes; None if it is not known.

    Yields:
        A function that takes the bytes done since its last call; None if standard error is not a
        terminal.
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
        task = bar.add_task(
            shorten(printable(title), max(8, console.width // 3), ".."), total=nbytes
        )
        yield lambda done: bar.advance(task, done)


class _BytesColumn(ProgressColumn):
    """Bytes done, of the total, and GB/s since the start."""

    def render(self, task: Task) -> Text:
        speed = gb_per_s(int(task.completed), task.elapsed or 0.0)
        done = size(task.completed) + (f" of {size(task.total)}" if task.total else "")
        return Text(f"{done}, {speed:.2f} GB/s")


def _console() -> Console:
    """Standard output; a pipe gets a width at which no line is folded."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return _console().is_terminal


def glyphs_are_ascii() -> bool:
    """Whether the encoding of standard output has only ASCII characters."""
    return _console().options.ascii_only


def draw(what: Grid | Text, *, is_cut: bool = False) -> None:
    """Draw on standard output, without blanks at the ends of lines.

    Args:
        what: a table, or a text that is folded on a narrow terminal.
        is_cut: whether the text is cut there instead of folded.
    """
    console = _console()
    width = console.width if console.is_terminal else None
    mark = ".." if glyphs_are_ascii() else "…"
    if isinstance(what, Grid):
        _print(console, *what.lines(width, mark), soft_wrap=True)
    elif is_cut and width is not None:
        _print(console, cut(what, width, mark), soft_wrap=True)
    else:
        _print(console, what, soft_wrap=width is None)


def line(text: str) -> None:
    """Print one line; only the terminal itself folds it if it is too long."""
    _print(_console(), safe_text(text), soft_wrap=True)


def _print(console: Console, *texts: Text, soft_wrap: bool) -> None:
    with console.capture() as captured:
        for text in texts:
            console.print(text, soft_wrap=soft_wrap)
    lines = captured.get().splitlines()
    sys.stdout.write("".join(text.rstrip(" ") + "\n" for text in lines))


def flush() -> None:
    """Flush standard output.

    Raises:
        OSError: the text cannot be written; a full disk is noticed only here.
    """
    sys.stdout.flush()


def safe_text(text: str, style: str = "") -> Text:
    """Text from a file, which must not be read as markup."""
    return Text(printable(text), style=style)


def _described(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[Text, str, str]:
    return safe_text(name), dtype, "x".join(map(str, shape)) or "scalar"


def _total(grid: Grid, n_tensors: int, nbytes: int, packed_nbytes: int, *rest: str) -> None:
    name = "1 tensor" if n_tensors == 1 else f"{n_tensors} tensors"
    sizes = (size(nbytes), size(packed_nbytes))
    grid.row(name, "", "", *sizes, f"{ratio(nbytes, packed_nbytes):.3f}", *rest)


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
    """Each plane with its modes and their gain: `exponent rans 2.66x, mantissa 0 stored`."""
    parts = []
    for plane in row.planes:
        modes = "+".join(sorted(plane.modes, key=lambda mode: -plane.modes[mode]))
        from_base = _FROM_BASE & plane.modes.keys()
        if from_base and from_base == plane.modes.keys():
            gain = _gain(ratio(row.nbytes, plane.packed_nbytes))
            parts.append(f"{modes} {gain}" if plane.packed_nbytes else "equal to its base")
        elif modes == "stored" or from_base:
            parts.append(f"{plane.name} {modes}")
        elif modes or row.n_chunks == 0:
            parts.append(f"{plane.name} {modes} {_gain(plane.ratio)}".strip())
    return safe_text(", ".join(parts))


def _gain(gained: float) -> str:
    return f"{gained:.{2 if gained < 100 else 0}f}x"


def _bar(row: TensorRow) -> Text:
    """A bar of each plane's share of the tensor's bytes, in the glyph of its main mode."""
    bar = Text()
    filled = 0.0
    for plane in row.planes:
        if not plane.modes:
            continue
        filled += _BAR_WIDTH * plane.packed_nbytes / max(row.nbytes, 1)
        n_cells = min(round(filled), _BAR_WIDTH) - len(bar)
        bar.append_text(_glyphs(_main_mode(plane), max(n_cells, 0)))
    return bar.append_text(_glyphs(_SAVED, _BAR_WIDTH - len(bar)))


def _main_mode(plane: PlaneRow) -> str:
    return max(plane.modes, key=lambda mode: plane.modes[mode])


def _glyphs(mode: str, n: int) -> Text:
    glyph, plain, style = _STYLES[mode]
    return Text((plain if glyphs_are_ascii() else glyph) * n, style=style)


def _legend(inspected: InspectedFile) -> Text:
    """The glyphs that occur in the bars, with their modes."""
    planes = [plane for row in inspected.tensors for plane in row.planes if plane.modes]
    shown = {_SAVED, *map(_main_mode, planes)}
    parts = [_glyphs(mode, 1).append(f" {mode}") for mode in _STYLES if mode in shown]
    return Text("bar: ").append_text(Text("  ").join(parts))
