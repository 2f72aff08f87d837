"""The verbs and their options, declared for typer, and how a run of the program ends.

Every verb takes several sources, continues after one that fails, and returns the exit code of the
first failure. Exceptions become a line and an exit code only here, and with `--json` also a
document. A signal raises an exception, so that unfinished output is removed before the run ends.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

import packhorse
from packhorse.arguments import resolve_threads
from packhorse.cli import actions, render
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
from packhorse.cli.options import (
    Base,
    Check,
    CheckName,
    Force,
    FormatName,
    Json,
    Level,
    LevelName,
    MaxNbytes,
    Output,
    PartNbytes,
    Scheduler,
    Threads,
)
from packhorse.cli.rows import BenchedFile, FileRow, PlannedFile, TunedMatrix, VerifiedFile
from packhorse.cli.runs import Outcome, Source, each, wants_json
from packhorse.cli.signals import ENDING, stop_start
from packhorse.cli.standard_streams import OutputClosed, safe_streams
from packhorse.layout import FRAME_VERSION
from packhorse.storage.locations import Place, open_place

__all__ = ["run"]

_EPILOG = """
Exit codes: 0 success; 1 the data is bad, or verify found a problem; 2 the command line is wrong, or
an output exists; 3 the system refused (missing file, permissions, full disk, memory); 4 an optional
package is missing; 5 a fault of Packhorse itself; 128 + n ended by signal n.
"""

_SIGPIPE = getattr(signal, "SIGPIPE", 13)  # its number where it exists; Windows has none
_HALF_WAY = "finished output was kept, unfinished output was removed"

_app = typer.Typer(
    name="packhorse",
    help="Pack model files without loss: smaller on disk, bit-exact when unpacked.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# readable=False turns off typer's own check of paths: failures.py words the system's errors.
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC",
        help="Safetensors files or model folders: paths or URLs.",
        show_default=False,
    ),
]
Packed = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC", help="Packed files or folders: paths or URLs.", show_default=False
    ),
]


def run(args: list[str] | None) -> int:
    """Run the program.

    Args:
        args: the words of the command line after the program's name; None for those of the process.

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
        return _die_by(_SIGPIPE)


def _ended(words: list[str], outcome: Outcome, json: bool) -> int:
    """Run a verb, report an error, and return the exit code."""
    try:
        # With --json, typer raises mistakes in the options instead of drawing them.
        command = _command(words)
        ended = command(args=words, prog_name="packhorse", standalone_mode=not json)
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
    """Whether the command line asks for help or the version, which are text even with --json."""
    return not {"--help", "-h", "--version", "-V"}.isdisjoint(words)


def _printed(outcome: Outcome, code: int, json: bool) -> int:
    """Print the JSON document if `json` is set, and flush, while errors can still be reported."""
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
    """Report a signal that arrived after the work; the next one ends the process."""
    name = signal.Signals(number).name
    outcome.fail("", 128 + number, f"stopped by {name}; the work was already done")
    if json and not outcome.is_told:
        return _printed(outcome, 128 + number, json)
    return _die_by(number)


def _die_by(number: int) -> int:
    """End the process by a signal, as other programs do, without waiting for a pipe's reader.

    SIGPIPE gets its default effect only here. Earlier it would also end the program when a server
    closes a connection. Windows ends no process by a signal.
    """
    if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
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
    # Declares the options of the whole program. The help text is the app's, so no docstring here.
    pass


@_app.command(no_args_is_help=True)
def pack(
    src: Models,
    output: Output = None,
    base: Base = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be done; write nothing.")
    ] = False,
    force: Force = False,
    scheduler: Scheduler = None,
    check: Check = None,
    part_nbytes: PartNbytes = None,
    json: Json = False,
) -> None:
    """Pack model files, or model folders with their shards.

    X.safetensors is packed to X.ph.safetensors beside it, and a folder X to a folder X.ph, with
    the shards packed, their index rewritten and all other files copied. The source is never
    changed. All of them may be URLs of fsspec. If writing a folder to a URL is interrupted, the
    same command goes on with the files that are missing.

    With --base, the tensors of a fine-tune are packed as differences from the model that it was
    tuned from, if these are shorter. Unpacking then needs that model.

    With --scheduler, files and shards are shared out on a cluster. What is packed already is
    skipped, so the same command goes on after an interruption.

    Examples:

    - `packhorse pack model.safetensors`
    - `packhorse pack model.safetensors -o small.ph.safetensors --level max`
    - `packhorse pack path/to/model-folder --dry-run`
    - `packhorse pack tuned.safetensors --base original.safetensors`
    - `packhorse pack s3://bucket/llama -o s3://bucket/llama.ph`
    - `packhorse pack s3://bucket/hub -o s3://bucket/hub.ph --scheduler tcp://10.0.0.1:8786`
    """

    def work(job: Job) -> list[FileRow]:
        row = actions.pack(
            job,
            base=old,
            level=level.value,
            threads=threads,
            force=force,
            watch=render.progress,
        )
        render.growth_warning(row, row.packed_nbytes)
        return [row]

    def plan(job: Job) -> list[PlannedFile]:
        rows = actions.plan(job, base=old, level=level.value)
        for row in rows:
            render.growth_warning(row, row.estimated_nbytes)
        return rows

    _refuse_alone(scheduler, check, part_nbytes)
    jobs = pack_jobs(src, output, force=force or dry_run or scheduler is not None)
    old = _base_of(base)
    if scheduler is not None:
        from packhorse.cli import cluster

        settings = cluster.Settings(
            "pack", level.value, force, threads, old, check is CheckName.WHOLE,
            part_nbytes or cluster.PART_NBYTES, is_dry=dry_run,
        )  # fmt: skip
        cluster.on_cluster(scheduler, jobs, settings, json=json)
    elif dry_run:
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
    scheduler: Scheduler = None,
    check: Check = None,
    json: Json = False,
) -> None:
    """Restore the original files or folders, byte for byte.

    X.ph.safetensors is unpacked to X.safetensors beside it, and a folder X.ph to a folder X.

    Examples:

    - `packhorse unpack model.ph.safetensors`
    - `packhorse unpack model-folder.ph -o restored`
    - `packhorse unpack tuned.ph.safetensors --base original.safetensors`
    """

    def work(job: Job) -> list[FileRow]:
        return [
            actions.unpack(
                job,
                base=old,
                threads=threads,
                force=force,
                max_nbytes=max_nbytes,
                watch=render.progress,
            )
        ]

    _refuse_alone(scheduler, check)
    old = _base_of(base)
    jobs = unpack_jobs(src, output, force=force or scheduler is not None)
    if scheduler is not None:
        from packhorse.cli import cluster

        settings = cluster.Settings(
            "unpack", force=force, threads=threads, base=old, whole=check is CheckName.WHOLE,
            max_nbytes=max_nbytes,
        )  # fmt: skip
        cluster.on_cluster(scheduler, jobs, settings, json=json)
    else:
        each(jobs, work, render.unpacked_line, json)


@_app.command(no_args_is_help=True)
def inspect(src: Packed, json: Json = False) -> None:
    """Show the tensors of packed files: planes, modes, ratios, and a bar with each plane's share.

    Examples:

    - `packhorse inspect model.ph.safetensors`
    - `packhorse inspect model-folder.ph --json`
    - `packhorse inspect s3://bucket/model.ph.safetensors`
    """
    each(
        map(Source.of, src),
        lambda job: actions.inspect(open_place(job.src)),
        render.inspect_table,
        json,
    )


@_app.command(no_args_is_help=True)
def verify(
    src: Packed,
    base: Base = None,
    threads: Threads = None,
    max_nbytes: MaxNbytes = None,
    scheduler: Scheduler = None,
    json: Json = False,
) -> None:
    """Check every checksum of packed files or folders, and list all problems (exit code 1).

    Examples:

    - `packhorse verify model.ph.safetensors`
    - `packhorse verify model-folder.ph other.ph.safetensors`
    - `packhorse verify tuned.ph.safetensors --base original.safetensors`
    """

    def work(job: Source) -> list[VerifiedFile]:
        return [
            actions.verify(
                open_place(job.src),
                base=old,
                threads=threads,
                max_nbytes=max_nbytes,
                watch=render.progress,
            )
        ]

    old = _base_of(base)
    if scheduler is not None:
        from packhorse.cli import cluster

        settings = cluster.Settings("verify", threads=threads, base=old, max_nbytes=max_nbytes)
        jobs = cluster.verify_jobs([check_source(path) for path in src])
        is_good = cluster.on_cluster(scheduler, jobs, settings, json=json)
    else:
        rows = each(map(Source.of, src), work, render.verify_lines, json)
        is_good = all(row.ok for row in rows)
    if not is_good:
        raise typer.Exit(ExitCode.BAD_DATA)


@_app.command(no_args_is_help=True)
def bench(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A plain safetensors file.", show_default=False),
    ],
    base: Base = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    repeat: Annotated[
        int, typer.Option("--repeat", "-r", min=1, help="Timed runs; the best one counts.")
    ] = 3,
    json: Json = False,
) -> None:
    """Pack and unpack a file's tensors in memory; show ratio and speed for each dtype.

    Nothing is written. Speeds are uncompressed GB (10^9 bytes) per second, in reused memory.

    Examples:

    - `packhorse bench model.safetensors`
    - `packhorse bench model.safetensors --level fast --threads 1`
    - `packhorse bench tuned.safetensors --base original.safetensors`
    """
    from packhorse.cli.measure import Settings

    old = _base_of(base)
    settings = Settings(level.value, resolve_threads(threads), repeat)

    def work(job: Source) -> list[BenchedFile]:
        return [actions.bench(open_place(job.src), old, settings, render.progress)]

    rows = each([Source.of(file)], work, render.bench_table, json)
    if not all(row.bit_exact for row in rows):
        raise typer.Exit(ExitCode.BAD_DATA)


@_app.command(no_args_is_help=True)
def tune(
    src: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC",
            help="Model files or folders, packed or not, or URLs; only their headers are read.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", "-s", metavar="RxC", help="A matrix: outputs x inputs. May be repeated."
        ),
    ] = None,
    format: Annotated[
        list[FormatName] | None,
        typer.Option("--format", help="Format of packed weights; W12 by default. May be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Predict instead of measuring; needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="The GPU to predict for, such as H200.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", readable=False, metavar="DIR", help="Folder for measured results."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what the cache already has.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure which kernel is best for a model's packed weights, on this machine's GPU.

    The first matrix takes some minutes and later ones less, because each kernel is compiled once.
    The result of each matrix is stored when it is done, so a run that was stopped can continue.
    Without a GPU, --dry-run shows the kernels that are used untuned, with predicted times.

    Examples:

    - `packhorse tune path/to/model-folder`
    - `packhorse tune --shape 4096x14336 --format W12 --format W11`
    - `packhorse tune path/to/model-folder --dry-run --gpu H200`
    """
    from packhorse.cli.tune import TuneJob, check_gpu, measure, predict, tune_jobs

    if gpu is not None and not dry_run:
        raise UsageError("--gpu selects the GPU to predict for, so it needs --dry-run")
    if dry_run and (again or cache is not None):
        raise UsageError("--cache and --again are for measuring, so they exclude --dry-run")
    jobs = tune_jobs(src or [], shape or [], [name.value for name in format or [FormatName.W12]])
    check_gpu(gpu, dry_run=dry_run)

    def work(job: TuneJob) -> list[TunedMatrix]:
        if dry_run:
            return predict(job, gpu)
        with render.waiting(f"tune {job.src}"):
            return measure(job, cache, again=again)

    each(jobs, work, render.tune_table, json)


def _refuse_alone(
    scheduler: str | None, check: CheckName | None, part_nbytes: int | None = None
) -> None:
    """Refuse options that mean something on a cluster only."""
    for option, value in (("--check", check), ("--part-nbytes", part_nbytes)):
        if value is not None and scheduler is None:
            raise UsageError(f"{option} is for work on a cluster, so it needs --scheduler")


def _base_of(base: str | None) -> Place | None:
    return None if base is None else check_source(base)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn signals that ask the process to end into the exception `Stopped`.

    A signal that the parent process set to be ignored stays ignored. Outside the main thread Python
    allows no handlers, so nothing changes there.
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
            # Do not restore stop_start, which would say that no work was started.
            signal.signal(number, signal.SIG_DFL if handler is stop_start else handler)


# Depending on its version, typer uses click or a copy of it. This is the base class of the errors
# that its parser raises, in either case.
_UsageFault: type[Any] = typer.BadParameter.__bases__[0]


def _command(words: list[str]) -> Any:
    """The program, or only the verb that the command line begins with: to import and to declare
    the others would take longer than to verify a small model."""
    app = copy(_app)
    app.registered_commands = [
        command
        for command in _app.registered_commands
        if command.callback is not None and [command.callback.__name__] == words[:1]
    ]
    if not app.registered_commands:
        from packhorse.cli.report import add_report
        from packhorse.cli.shelf import shelf_app
        from packhorse.cli.snapshots import snapshot_app

        app.registered_commands = list(_app.registered_commands)
        app.registered_groups = []
        add_report(app)
        app.add_typer(snapshot_app, name="snapshot")
        app.add_typer(shelf_app, name="shelf")
    return plain_types(typer.main.get_command(app))
