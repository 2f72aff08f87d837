"""The work of `pack`, `unpack` and `verify` with `--scheduler`: all sources at once, on a cluster.

Errors are printed as they come, and the rows of all files at the end.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from packhorse.cli import render
from packhorse.cli.failures import ExitCode, describe, describe_bug, exit_code
from packhorse.cli.jobs import Job
from packhorse.cli.rows import ProblemRow, SharedFile, ratio
from packhorse.cli.runs import Outcome, together
from packhorse.disk.cluster import FileReport
from packhorse.disk.cluster.many import run_jobs
from packhorse.disk.cluster.steps import PART_NBYTES, Settings
from packhorse.disk.cluster.steps import Job as SharedJob
from packhorse.disk.cluster.work import clean_up
from packhorse.disk.results import Progress
from packhorse.storage.cluster import LOCAL, connected, quieten
from packhorse.storage.locations import Place

__all__ = ["PART_NBYTES", "Settings", "on_cluster", "verify_jobs"]


def verify_jobs(sources: Sequence[Place]) -> list[SharedJob]:
    """Jobs that only read."""
    return [SharedJob(source, None, source.is_dir()) for source in sources]


def on_cluster(
    scheduler: str, jobs: Sequence[Job | SharedJob], settings: Settings, *, json: bool
) -> bool:
    """Do all jobs on a cluster, and show what became of each file.

    Args:
        scheduler: the address, or `local`.
        jobs: the sources and their outputs.
        settings: what to do with them.
        json: whether the rows become a JSON document.

    Returns:
        Whether no file is damaged.

    Raises:
        typer.Exit: at least one file failed.
        OSError, ValueError, PackhorseError: the cluster cannot be used.
    """
    shared = [
        SharedJob(job.src, job.dst, job.is_folder) if isinstance(job, Job) else job for job in jobs
    ]
    n_sources = "1 source" if len(jobs) == 1 else f"{len(jobs)} sources"

    def watch(nbytes: int) -> AbstractContextManager[Progress | None]:
        return render.progress(f"{settings.verb} {n_sources}", nbytes)

    def work(outcome: Outcome) -> list[SharedFile]:
        def tell(report: FileReport) -> None:
            outcome.rows.append(_row(report))
            if report.error is not None:
                _fail(outcome, report, report.error)

        try:
            quieten()
            with connected(scheduler) as client:
                result = run_jobs(shared, settings, client, watch, tell)
        except BaseException:
            if scheduler == LOCAL and not settings.is_dry:  # its workers have ended
                for job in shared:
                    clean_up(job)
            raise
        return [_row(report) for report in result.files]

    rows = together(work, render.shared_table, json)
    return all(row.status != "damaged" for row in rows)


def _fail(outcome: Outcome, report: FileReport, error: Exception) -> None:
    code = exit_code(error)
    words = describe_bug(error) if code == ExitCode.BUG else describe(error, report.source)
    outcome.fail(str(report.source), code, words)


def _row(report: FileReport) -> SharedFile:
    return SharedFile(
        src=str(report.source),
        dst=None if report.output is None else str(report.output),
        status=report.status,
        n_tensors=report.n_tensors,
        n_delta=report.n_delta,
        n_tasks=report.n_parts + (report.n_parts > 1),
        nbytes=report.nbytes,
        packed_nbytes=report.packed_nbytes,
        ratio=ratio(report.nbytes, report.packed_nbytes),
        seconds=report.seconds,
        worker=report.worker or None,
        problems=[
            ProblemRow(str(problem.path), problem.tensor, problem.offset, problem.message)
            for problem in report.problems
        ],
    )
