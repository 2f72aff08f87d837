"""Decides which step follows which, and collects what became of each file.

First, all sources are listed. Then each file is a task. A large one answers with the runs of its
tensors, each of which becomes a task, and then one that joins them. A folder is finished when all
its files are there; if one failed, the others are still done, and the folder stays unfinished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from packhorse.disk.cluster.results import FileReport
from packhorse.disk.cluster.steps import (
    Clean,
    Cut,
    Finish,
    Folder,
    Job,
    Join,
    Look,
    One,
    Part,
    Settings,
    Shard,
    Step,
)
from packhorse.disk.cluster.work import do
from packhorse.disk.container import Packed
from packhorse.disk.results import Progress
from packhorse.storage.tasks import Outcome, perform

__all__ = ["Run"]

_N_LISTED = 64  # files that one task looks for


@dataclass
class _Pieces:
    """The parts of a large file: its mark, which parts are done, and why one failed."""

    mark: tuple[int, ...]
    done: dict[int, Packed] = field(default_factory=dict)
    n_left: int = 0
    seconds: float = 0.0
    error: Exception | None = None


class Run:
    """All files of some jobs.

    Attributes:
        nbytes: the total size of the files that were found; what progress counts up to.
    """

    def __init__(self, jobs: Sequence[Job], settings: Settings, client: Any) -> None:
        self._jobs, self._settings, self._client = jobs, settings, client
        self._shards: list[Shard] = []
        self._folders: dict[int, Folder] = {}
        self._left: dict[int, int] = {}  # by folder: files that are not done
        self._n_failed: dict[int, int] = {}  # by folder
        self._pieces: dict[Shard, _Pieces] = {}
        self._broken: list[FileReport] = []
        self._todo: deque[Step] = deque()
        self.nbytes = 0

    def look(self) -> None:
        """List the sources, and prepare the output folders. What fails is reported by `work`."""
        files = [pair for pair in enumerate(self._jobs) if not pair[1].is_folder]
        groups = [files[i : i + _N_LISTED] for i in range(0, len(files), _N_LISTED)]
        groups += [[pair] for pair in enumerate(self._jobs) if pair[1].is_folder]
        todo = deque(Look(tuple(group)) for group in groups)
        for outcome in perform(partial(do, self._settings), todo, self._client):
            found = outcome.value or [outcome.error] * len(outcome.task.jobs)
            for (number, job), what in zip(outcome.task.jobs, found, strict=True):
                if isinstance(what, Exception):
                    self._broken.append(FileReport(job.source, job.output, "failed", error=what))
                    continue
                self._shards += what.shards
                if what.folder is not None:
                    self._folders[number] = what.folder
                    self._left[number], self._n_failed[number] = len(what.shards), 0
        self._shards.sort(key=lambda shard: (shard.job, str(shard.relative)))
        self.nbytes = sum(shard.nbytes for shard in self._shards)

    def work(self, progress: Progress | None = None) -> Generator[FileReport, None, None]:
        """Do everything, and yield a report for each file as soon as it is done."""
        yield from self._broken
        # The largest first, so that no worker is left alone with one at the end.
        self._todo.extend(
            One(shard) for shard in sorted(self._shards, key=lambda shard: -shard.nbytes)
        )
        with closing(perform(partial(do, self._settings), self._todo, self._client)) as outcomes:
            for outcome in outcomes:
                for shard, report in self._after(outcome):
                    if progress is not None and shard is not None:
                        progress(shard.nbytes)
                    yield report

    def _after(self, outcome: Outcome[Any]) -> Iterator[tuple[Shard | None, FileReport]]:
        """What is reported after a step; the steps that follow are added to what is to be done."""
        step = outcome.task
        if isinstance(step, Part):
            step = self._after_part(step, outcome)
        if isinstance(step, One | Join) and not isinstance(outcome.value, Packed):
            yield from self._after_file(step, outcome)
        if isinstance(step, Finish):
            yield from self._after_folder(step.folder, outcome)

    def _after_file(
        self, step: One | Join, outcome: Outcome[Any]
    ) -> Iterator[tuple[Shard | None, FileReport]]:
        shard, pieces = step.shard, self._pieces.get(step.shard)
        if isinstance(outcome.value, Cut):
            runs, mark = outcome.value.runs, outcome.value.mark
            self._pieces[shard] = _Pieces(mark, n_left=len(runs))
            self._todo.extendleft(Part(shard, i, run, mark) for i, run in enumerate(runs))
            return
        error = outcome.error if pieces is None else pieces.error or outcome.error
        seconds = outcome.seconds + (pieces.seconds if pieces else 0)
        if error is not None:
            self._todo.append(Clean(shard))
            report = FileReport(shard.source, shard.output, "failed", error=error)
        else:
            report = outcome.value
        yield shard, replace(report, seconds=seconds, worker=outcome.worker)
        yield from self._count(shard, report)

    def _after_part(self, step: Part, outcome: Outcome[Any]) -> Step | None:
        """Count a part. The step that has failed, if this was the last part and one failed."""
        pieces = self._pieces[step.shard]
        pieces.n_left -= 1
        pieces.seconds += outcome.seconds
        if outcome.error is not None:
            pieces.error = outcome.error
        else:
            pieces.done[step.number] = outcome.value
        if pieces.n_left:
            return None
        join = Join(step.shard, [pieces.done[i] for i in sorted(pieces.done)], pieces.mark)
        if pieces.error is None:
            self._todo.appendleft(join)
            return None
        return join

    def _count(self, shard: Shard, report: FileReport) -> Iterator[tuple[Shard | None, FileReport]]:
        folder = self._folders.get(shard.job)
        if folder is None:
            return
        self._left[shard.job] -= 1
        self._n_failed[shard.job] += report.error is not None
        if self._left[shard.job]:
            return
        if not self._n_failed[shard.job]:
            self._todo.append(Finish(folder))
        elif folder.output is not None and folder.may_write and not self._settings.is_dry:
            n_failed = self._n_failed[shard.job]
            error = OSError(
                f"{folder.output}: this folder is not complete, because {n_failed} of its files "
                "failed; repair them, and run the same command again, which goes on with them"
            )
            yield None, FileReport(folder.source, folder.output, "failed", error=error)

    def _after_folder(
        self, folder: Folder, outcome: Outcome[Any]
    ) -> Iterator[tuple[None, FileReport]]:
        if outcome.error is not None:
            yield None, FileReport(folder.source, folder.output, "failed", error=outcome.error)
            return
        for report in outcome.value:
            yield None, replace(report, worker=outcome.worker)
