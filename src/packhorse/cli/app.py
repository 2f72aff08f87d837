"""The verbs and their options, as typer declares them, and how a run of the program ends.

Every verb takes several sources, goes on after one that fails, and returns the exit code of the
first failure. Exceptions become one line and an exit code here and nowhere else, and with `--json`
one document besides. A signal ends the run by way of an exception, so that whatever was being
written is removed on the way out.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

import packhorse
from packhorse.arguments import resolve_threads
from packhorse.cli import actions, render, tuning
from packhorse.cli.failures import (
    ExitCode,
    Stopped,
    UsageError,
    describe,
    describe_bug,
    exit_code,
)
from packhorse.cli.help import plain_types
from packhorse.cli.jobs import Job, check_source, pack_jobs, unpack_jobs
from packhorse.cli.measure import Settings
from packhorse.cli.options import (
    Base,
    Force,
    FormatName,
    Json,
    Level,
    LevelName,
    MaxNbytes,
    Output,
    Threads,
)
from packhorse.cli.rows import BenchedFile, FileRow, PlannedFile, TunedMatrix, VerifiedFile
from packhorse.cli.runs import Outcome, Source, each, wants_json
from packhorse.cli.signals import ENDING, stop_start
from packhorse.cli.snapshots import snapshot_app
from packhorse.cli.streams import OutputClosed, safe_streams
from packhorse.layout import FRAME_VERSION

__all__ = ["run"]

_EPILOG = """
Exit codes: 0 all went well; 1 the data is bad, or verify found something; 2 the command line is
wrong, or an output exists; 3 the system refused (missing file, permissions, full disk, memory);
4 an optional package is missing; 5 a fault of Packhorse itself; 128 + n ended by signal n.
"""

_HALF_WAY = "what was finished stays, what was unfinished was removed"

_app = typer.Typer(
    name="packhorse",
    help="Pack model files without loss: smaller on disk, bit-exact when unpacked.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_app.add_typer(snapshot_app, name="snapshot")

# typer's own check of paths (readable) is off: failures.py words what the system says.
Models = Annotated[
    list[Path],
    typer.Argument(
        metavar="SRC",
        readable=False,
        help="Safetensors files or model folders.",
        show_default=False,
    ),
]
Packed = Annotated[
    list[Path],
    typer.Argument(
        metavar="SRC", readable=False, help="Packed files or folders.", show_default=False
    ),
]


def run(args: list[str] | None) -> int:
    """Run the program.

    Args:
        args: words of the command line without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if args is None else args
    json = wants_json(words)
    outcome = Outcome.begin()
    try:
        with safe_streams():
            try:
                with _signals():
                    code = _ended(words, outcome, json)
                    return _printed(outcome, code, json and not (code == 0 and _prints_text(words)))
            except Stopped as stopped:
                return _stopped_late(outcome, stopped.number, json)
    except OutputClosed:
        return _die_by(signal.SIGPIPE)


def _ended(words: list[str], outcome: Outcome, json: bool) -> int:
    """Run a verb, and tell how it ended."""
    try:
        # With JSON a mistake in the options is an exception too, and typer draws nothing.
        ended = _command(args=words, prog_name="packhorse", standalone_mode=not json)
        return ended if isinstance(ended, int) else ExitCode.OK
    except SystemExit as ended:  # how typer ends every run, with its own usage errors as 2
        return ended.code if isinstance(ended.code, int) else ExitCode.USAGE
    except _UsageFault as fault:
        outcome.fail("", ExitCode.USAGE, fault.format_message())
    except (Stopped, KeyboardInterrupt) as stopped:
        number = getattr(stopped, "number", signal.SIGINT)
        outcome.fail("", 128 + number, f"stopped by {signal.Signals(number).name}; {_HALF_WAY}")
    except Exception as error:
        code = exit_code(error)
        if code == ExitCode.BUG:
            traceback.print_exc()
            outcome.fail("", code, describe_bug(error))
        else:
            doing = "go on" if outcome.rows or outcome.errors else "start"
            outcome.fail("", code, describe(error, doing=doing))
    return outcome.errors[-1].exit_code


def _prints_text(words: list[str]) -> bool:
    """Whether text was asked for, and printed."""
    return not {"--help", "-h", "--version", "-V"}.isdisjoint(words)


def _printed(outcome: Outcome, code: int, json: bool) -> int:
    """Print the JSON document if it is wanted, and let all output go while errors can be told."""
    try:
        if json:
            text = render.json_text(outcome.rows, outcome.errors)
            outcome.is_told = True
            render.write(text)
        render.flush()
    except (OSError, MemoryError) as error:
        outcome.fail("", exit_code(error), describe(error, doing="print the result"))
        return code or exit_code(error)
    return code


def _stopped_late(outcome: Outcome, number: int, json: bool) -> int:
    """Tell of a signal that came when the work had ended; the next one ends the process."""
    name = signal.Signals(number).name
    outcome.fail("", 128 + number, f"stopped by {name}; the work had ended before")
    if json and not outcome.is_told:
        return _printed(outcome, 128 + number, json)
    return _die_by(number)


def _die_by(number: int) -> int:
    """End as other programs do by a signal: at once, without waiting for the reader of a pipe.

    SIGPIPE is not left to the system from the start, as it would end the program when a server
    closes a connection, too.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return 128 + number


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"packhorse {packhorse.__version__} (format {FRAME_VERSION})")
        raise typer.Exit


@_app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    # Options of the whole program; the help text is that of the app.
    pass


@_app.command(no_args_is_help=True)
def pack(
    src: Models,
    output: Output = None,
    base: Base = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done; write nothing.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Pack model files, or model folders with their shards.

    X.safetensors becomes X.ph.safetensors beside it, and a folder X becomes a folder X.ph:
    its shards packed, their index rewritten, all other files copied. The source is never changed.

    With --base, tensors of a fine-tune are packed as differences from those of the model that it
    was tuned from, where that is shorter. Unpacking then needs that model again.

    Examples:

    - `packhorse pack model.safetensors`
    - `packhorse pack model.safetensors -o small.ph.safetensors --level max`
    - `packhorse pack path/to/model-folder --dry-run`
    - `packhorse pack tuned.safetensors --base original.safetensors`
    """

    def work(job: Job) -> list[FileRow]:
        row = actions.pack(
            job,
            base=base,
            level=level.value,
            threads=threads,
            force=force,
            watch=render.progress,
        )
        render.growth_warning(row, row.packed_nbytes)
        return [row]

    def plan(job: Job) -> list[PlannedFile]:
        rows = actions.plan(job, base=base, level=level.value)
        for row in rows:
            render.growth_warning(row, row.estimated_nbytes)
        return rows

    jobs = pack_jobs(src, output, force=force or dry_run)
    _check_base(base)
    if dry_run:
        each(jobs, plan, render.plan_table, json)
    else:
        each(jobs, work, render.packed_line, json)


@_app.command(no_args_is_help=True)
def unpack(
    src: Packed,
    output: Output = None,
    base: Base = None,
    threads: Threads = None,
    force: Force = False,
    max_nbytes: MaxNbytes = None,
    json: Json = False,
) -> None:
    """Give back the original files or folders, byte for byte.

    X.ph.safetensors becomes X.safetensors beside it, and a folder X.ph becomes a folder X.

    Examples:

    - `packhorse unpack model.ph.safetensors`
    - `packhorse unpack model-folder.ph -o restored`
    - `packhorse unpack tuned.ph.safetensors --base original.safetensors`
    """

    def work(job: Job) -> list[FileRow]:
        return [
            actions.unpack(
                job,
                base=base,
                threads=threads,
                force=force,
                max_nbytes=max_nbytes,
                watch=render.progress,
            )
        ]

    _check_base(base)
    each(unpack_jobs(src, output, force=force), work, render.unpacked_line, json)


@_app.command(no_args_is_help=True)
def inspect(src: Packed, json: Json = False) -> None:
    """Show the tensors of packed files: planes, modes, ratios, and a bar of what each plane takes.

    Examples:

    - `packhorse inspect model.ph.safetensors`
    - `packhorse inspect model-folder.ph --json`
    """
    each(map(Source, src), lambda job: actions.inspect(job.src), render.inspect_table, json)


@_app.command(no_args_is_help=True)
def verify(
    src: Packed,
    base: Base = None,
    threads: Threads = None,
    max_nbytes: MaxNbytes = None,
    json: Json = False,
) -> None:
    """Check every checksum of packed files or folders; exit with 1 and list whatever is bad.

    Examples:

    - `packhorse verify model.ph.safetensors`
    - `packhorse verify model-folder.ph other.ph.safetensors`
    - `packhorse verify tuned.ph.safetensors --base original.safetensors`
    """

    def work(job: Source) -> list[VerifiedFile]:
        return [
            actions.verify(
                job.src,
                base=base,
                threads=threads,
                max_nbytes=max_nbytes,
                watch=render.progress,
            )
        ]

    _check_base(base)
    rows = each(map(Source, src), work, render.verify_lines, json)
    if not all(row.ok for row in rows):
        raise typer.Exit(ExitCode.BAD_DATA)


@_app.command(no_args_is_help=True)
def bench(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", readable=False, help="An ordinary safetensors file.", show_default=False
        ),
    ],
    base: Base = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    repeat: Annotated[
        int, typer.Option("--repeat", "-r", min=1, help="Timed runs; the best counts.")
    ] = 3,
    json: Json = False,
) -> None:
    """Pack and unpack a file's tensors in memory; show ratio and speed for each dtype.

    Nothing is written. Speeds are uncompressed GB (10^9 bytes) per second between recycled buffers.

    Examples:

    - `packhorse bench model.safetensors`
    - `packhorse bench model.safetensors --level fast --threads 1`
    - `packhorse bench tuned.safetensors --base original.safetensors`
    """
    _check_base(base)
    settings = Settings(level.value, resolve_threads(threads), repeat)

    def work(job: Source) -> list[BenchedFile]:
        return [actions.bench(job.src, base, settings, render.progress)]

    rows = each([Source(file)], work, render.bench_table, json)
    if not all(row.bit_exact for row in rows):
        raise typer.Exit(ExitCode.BAD_DATA)


@_app.command(no_args_is_help=True)
def tune(
    src: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SRC",
            readable=False,
            help="Model files or folders, packed or not; only their headers are read.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", "-s", metavar="RxC", help="A matrix: outputs x inputs; repeat it for more."
        ),
    ] = None,
    format: Annotated[
        list[FormatName] | None,
        typer.Option("--format", help="Of packed weights; W12 by default. Give both to try both."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Predict instead of measuring; needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Which GPU to predict for, such as H200.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", readable=False, metavar="DIR", help="Folder for what is measured."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what was measured before.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure which kernel is best for the packed weights of a model, on the GPU that is here.

    The first matrix takes some minutes, later ones less, as kernels are compiled once. Each is kept
    when it is done: a run that was stopped goes on where it ended. Without a GPU, --dry-run shows
    what is chosen untuned, with predicted times.

    Examples:

    - `packhorse tune path/to/model-folder`
    - `packhorse tune --shape 4096x14336 --format W12 --format W11`
    - `packhorse tune path/to/model-folder --dry-run --gpu H200`
    """
    if gpu is not None and not dry_run:
        raise UsageError("--gpu says what to predict for, and so needs --dry-run")
    if dry_run and (again or cache is not None):
        raise UsageError("--cache and --again are for measuring; leave them out with --dry-run")
    jobs = tuning.tune_jobs(
        src or [], shape or [], [name.value for name in format or [FormatName.W12]]
    )
    tuning.check_gpu(gpu, dry_run=dry_run)

    def work(job: tuning.TuneJob) -> list[TunedMatrix]:
        if dry_run:
            return tuning.predict(job, gpu)
        with render.waiting(f"tune {job.src}"):
            return tuning.measure(job, cache, again=again)

    each(jobs, work, render.tune_table, json)


def _check_base(base: Path | None) -> None:
    if base is not None:
        check_source(base)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn signals that ask a process to end into `Stopped`.

    A signal that the parent process chose to ignore stays ignored. Outside the main thread, where
    Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_running = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_running:
            raise Stopped(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number in ENDING:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
    finally:
        is_running = False
        for number, handler in before.items():
            # What the start of the program says is not true any more.
            signal.signal(number, signal.SIG_DFL if handler is stop_start else handler)


# typer brings click or a copy of it, by version: this is what its parser raises, whichever it is.
_UsageFault: type[Any] = typer.BadParameter.__bases__[0]
_command = plain_types(typer.main.get_command(_app))
