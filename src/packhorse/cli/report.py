"""`packhorse report`: the verb, its options, and what it prints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from packhorse.cli import render
from packhorse.cli.failures import ExitCode, UsageError
from packhorse.cli.grid import Grid
from packhorse.cli.options import Base, Force, Json, Scheduler, Threads
from packhorse.cli.runs import Source, each
from packhorse.reports.build import PlannedSource, make_findings, plan_report
from packhorse.reports.options import SAMPLE_NBYTES, Options
from packhorse.reports.report import Report
from packhorse.reports.results import Findings
from packhorse.storage.cluster import connected, quieten
from packhorse.storage.locations import check_output, open_place

__all__ = ["add_report"]

_OUTPUT = "report.html"


@dataclass(frozen=True)
class _PlannedReport:
    """What a report would read."""

    shape: str
    sources: list[PlannedSource]


def add_report(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command(no_args_is_help=True)(report)


def report(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="Models, packed or not, checkpoints of a series, or a snapshot store: files, "
            "folders, patterns in quotes, or URLs.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"The page to write: a path or a URL; {_OUTPUT} in this folder by default.",
            show_default=False,
        ),
    ] = None,
    base: Base = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read and pack everything instead of samples.")
    ] = False,
    sample: Annotated[
        int,
        typer.Option("--sample", min=1, metavar="N", help="Bytes to look at of each source."),
    ] = SAMPLE_NBYTES,
    checkpoints_per_day: Annotated[
        float,
        typer.Option(min=0, help="How often such files are written, for what a year saves."),
    ] = 24.0,
    seconds_per_step: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that a step of the training takes.", show_default=False),
    ] = None,
    engines: Annotated[
        bool, typer.Option(help="Whether to measure other packers on samples, too.")
    ] = True,
    threads: Threads = None,
    scheduler: Scheduler = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be read; write nothing.")
    ] = False,
    force: Force = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown instead of a page.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what is compressible, and why, as one page with pictures.

    The sections follow from the sources: one model or several; checkpoints whose paths differ in
    their number, or a snapshot store, as a series; two models, as a base and its fine-tune.
    Samples are enough for most questions, and the page says how far they may be off. Only
    the page is written. What cannot be read is reported, and the rest goes on (exit code 1).

    Examples:

    - `packhorse report model.safetensors`
    - `packhorse report 'run/checkpoint-*' -o run.html`
    - `packhorse report path/to/store --seconds-per-step 1.5`
    - `packhorse report s3://bucket/hub/* --scheduler tcp://10.0.0.1:8786 -o hub.html`
    - `packhorse report tuned.safetensors --base original.safetensors --full`
    """
    if json and markdown:
        raise UsageError("--json and --markdown exclude each other; run the command twice")
    prints = json or markdown
    options = Options(
        full=full, sample_nbytes=sample, checkpoints_per_day=checkpoints_per_day,
        seconds_per_step=seconds_per_step, engines=engines, threads=threads,
    )  # fmt: skip
    target = output or (None if prints else _OUTPUT)
    if dry_run:
        each([Source("")], lambda _: [_planned(src, base, options)], _plan_table, json)
        return
    if target is not None:
        check_output(open_place(target), force=force)

    def work(job: Source) -> list[Findings]:
        with _client_of(scheduler) as client:
            findings = make_findings(
                src, base=base, options=options, watch=render.progress, client=client
            )
        made = Report(findings)
        if target is not None:
            made.save(target, force=force)
        if markdown:
            render.write(made.to_markdown())
        elif render.on_terminal() and not json:
            render.line(f"{target}: {made.summary}")
        return [findings]

    (findings,) = each([Source("")], work, lambda row: None, json)
    for problem in findings.problems:
        render.warning_line(problem.line)
    if not all(problem.is_note for problem in findings.problems):
        raise typer.Exit(ExitCode.BAD_DATA)


@contextmanager
def _client_of(scheduler: str | None) -> Iterator[Any]:
    """The client of a cluster, if there is to be one."""
    if scheduler is None:
        yield None
        return
    quieten()
    with connected(scheduler) as client:
        yield client


def _planned(src: list[str], base: str | None, options: Options) -> _PlannedReport:
    return _PlannedReport(*plan_report(src, base=base, options=options))


_TITLES = {
    "models": "a report on models",
    "series": "a report on a series",
    "pair": "a report on what changed from the first model to the second",
}


def _plan_table(planned: _PlannedReport) -> None:
    """Draw what would be read of each source."""
    grid = Grid(
        f"{_TITLES[planned.shape]} (dry run, nothing is written)",
        ("~source", "form", ">step", ">tensors", ">size", ">looked at"),
        drops=("form", ">tensors", ">step"),
        last_drops=(">looked at",),
    )
    for row in planned.sources:
        grid.row(
            render.safe_text(row.path if row.form != "snapshot" else row.name),
            row.form,
            "" if row.step is None else str(row.step),
            f"{row.n_tensors:,}",
            render.size(row.nbytes),
            render.size(row.sampled_nbytes),
        )
    render.draw(grid)
