"""Performs tasks: one after the other in this process, or on a Dask cluster.

A task is any object that can be pickled, and the work a function of a module, which takes a task
and returns something small. Tasks must be idempotent: if a worker dies, Dask gives its tasks to
others, and it may do a task twice.

Dask runs a task in each thread of a worker. `holding` bounds the memory of all of them: a task says
how much it needs, and waits while the other tasks of its worker leave too little. So it needs no
settings of the cluster, and holds for workers that join later. The client keeps only a few tasks
for each thread in the scheduler, so a million tasks cost the scheduler no more than a thousand.

If the caller stops, for example by Ctrl-C, tasks that run on workers are told to end, and are
waited for: they call `check_wanted` between pieces of their work, and remove what they have not
finished.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from packhorse.arguments import resolve_threads
from packhorse.storage.cluster import dask, gone, reaching_scheduler

__all__ = ["Outcome", "check_wanted", "holding", "perform"]

_Task = TypeVar("_Task")

# Tasks in the scheduler for each thread, and at least. It takes some 10 ms until a worker has a
# task, and until the client has its outcome; workers with few short tasks would be idle meanwhile.
_N_AHEAD = 10
_MIN_AHEAD = 64
_STOP_S = 10.0  # for running tasks to end when the caller stops
_POLL_S = 2.0
_PAUSE_S = 0.1
_PATIENCE_S = 60.0  # without any worker, or without the scheduler
# Of a worker's limit; Dask stops giving it tasks at 0.8, and ends it at 0.95.
_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Outcome(Generic[_Task]):
    """How a task ended.

    Attributes:
        task: the task.
        value: what the work returned; None if it failed.
        error: the exception of the work; None if it succeeded.
        seconds: how long it took, on the worker.
        worker: the address of the worker; empty for this process.
    """

    task: _Task
    value: Any
    error: Exception | None
    seconds: float
    worker: str


def perform(
    work: Callable[[_Task], Any], todo: deque[_Task], client: Any = None
) -> Generator[Outcome[_Task], None, None]:
    """Do tasks, and yield each outcome as soon as it is there, in any order.

    Args:
        work: a function of a module. An exception of it becomes the outcome of its task.
        todo: the tasks. The caller may add more while it iterates.
        client: a `distributed.Client`; None to work in this process.

    Yields:
        The outcome of each task. If its workers died too often (Dask's setting
        `distributed.scheduler.allowed-failures`), the error is an OSError.

    Raises:
        OSError: the scheduler, or the last worker, has been gone for a minute.

    Example:
        >>> from collections import deque
        >>> from packhorse.storage.tasks import perform
        >>> [outcome.value for outcome in perform(len, deque(["a", "bcd"]))]
        [1, 3]
    """
    if client is not None:
        yield from _OnCluster(work, todo, client)
        return
    while todo:
        task = todo.popleft()
        yield Outcome(task, *_attempt(work, task))


class _Unwanted(Exception):
    """Nobody waits for this task any more."""


def check_wanted(nbytes: int = 0) -> None:
    """End this task if its caller has stopped. It has the form of a function for progress.

    Args:
        nbytes: is ignored.

    Raises:
        Exception: the caller has stopped; the task must let it pass.
    """
    del nbytes
    if getattr(_task_of, "run", None) in _stopped:
        raise _Unwanted("the caller has stopped")


def _attempt_in(
    run: str, work: Callable[[_Task], Any], task: _Task
) -> tuple[Any, Exception | None, float, str]:
    """`_attempt` on a worker, for a run that may be stopped."""
    _task_of.run = run
    _active.append(run)  # a list, because threads may add to it at once
    try:
        return _attempt(work, task)
    finally:
        _active.remove(run)
        _task_of.run = None


def _stop(run: str) -> int:
    """Tell the tasks of a run on this worker to end. Returns how many have not ended yet."""
    _stopped.add(run)
    return _active.count(run)


def _attempt(work: Callable[[_Task], Any], task: _Task) -> tuple[Any, Exception | None, float, str]:
    start, value, fault = time.perf_counter(), None, None
    try:
        value = work(task)
    except Exception as error:
        fault = error
    worker = _worker()
    return value, fault, time.perf_counter() - start, worker.address if worker else ""


class _OnCluster(Generic[_Task]):
    """Iterates over the outcomes of tasks on a cluster."""

    def __init__(self, work: Callable[[_Task], Any], todo: deque[_Task], client: Any) -> None:
        self._work, self._todo, self._client = work, todo, client
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: dict[str, tuple[_Task, Any]] = {}  # by key: the task and its future
        self._alive = time.monotonic()
        self._room = 0
        self._name = os.urandom(16).hex()

    def __iter__(self) -> Iterator[Outcome[_Task]]:
        try:
            with reaching_scheduler():
                while self._todo or self._running:
                    self._submit()
                    yield from self._outcomes(self._next())
        finally:
            if self._running and self._client.status == "running":
                self._stop()

    def _stop(self) -> None:
        """Give up what is not done, and wait until no worker works at it."""
        self._client.cancel([future for _, future in self._running.values()])
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end:
            active = self._client.run(_stop, self._name, on_error="ignore")
            if not any(active.values()):
                break
            time.sleep(_PAUSE_S)

    def _submit(self) -> None:
        """Send tasks, many at once, when half of those that were sent are done."""
        if not self._room:
            self._count_room()
        if len(self._running) > self._room // 2:
            return
        n = min(len(self._todo), self._room - len(self._running))
        tasks = [self._todo.popleft() for _ in range(n)]
        if not tasks:
            return
        names, works = [self._name] * n, [self._work] * n
        sent = self._client.map(_attempt_in, names, works, tasks, pure=False)
        for task, future in zip(tasks, sent, strict=True):
            self._running[future.key] = task, future
            future.add_done_callback(self._ended.put)

    def _next(self) -> list[Any]:
        """The futures that have ended; waits for one."""
        while True:
            try:
                ended = [self._ended.get(timeout=_POLL_S)]
                while not self._ended.empty():
                    ended.append(self._ended.get())
                return ended
            except queue.Empty:
                self._count_room()
                self._submit()

    def _count_room(self) -> None:
        """How many tasks may be in the scheduler. Workers come and go.

        Raises:
            OSError: there has been no worker for too long.
        """
        is_up = self._client.status == "running"
        threads = self._client.nthreads() if is_up else {}
        now = time.monotonic()
        self._alive = now if threads else self._alive
        if now - self._alive > _PATIENCE_S or self._client.status == "closed":
            raise gone("the last worker" if is_up else "the scheduler")
        self._room = max(_MIN_AHEAD, _N_AHEAD * sum(threads.values()))

    def _outcomes(self, futures: Sequence[Any]) -> Iterator[Outcome[_Task]]:
        done = [future for future in futures if future.status == "finished"]
        values = dict(zip([f.key for f in done], self._client.gather(done), strict=True))
        for future in futures:
            task, _ = self._running.pop(future.key)
            if future.key in values:
                yield Outcome(task, *values[future.key])
            else:
                yield Outcome(task, None, self._error(future), 0.0, "")

    def _error(self, future: Any) -> Exception:
        try:
            error = future.exception(timeout=_POLL_S)
        except Exception as lost:  # cancelled, by another client or because the scheduler ended
            error = lost
        if isinstance(error, dask().KilledWorker):
            error = OSError(
                f"{error.allowed_failures + 1} workers died at this task, the last was "
                f"{error.last_worker.address}; probably memory ran out: give workers more memory, "
                "or fewer threads"
            )
        if isinstance(error, Exception):
            return error
        return OSError(f"the cluster has cancelled this task ({future.status}); repeat it")


class _Gate:
    """The memory that the tasks of this process hold, in bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = 0

    @contextmanager
    def holding(self, nbytes: int, total: int) -> Iterator[None]:
        """Wait until there is room, and hold it for the time of the block. What is larger than the
        total gets it alone."""
        nbytes = min(nbytes, total)
        with self._changed:
            self._changed.wait_for(lambda: self._held + nbytes <= total)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


_gate = _Gate()
_task_of = threading.local()  # .run: the run that the task of a thread belongs to
_active: list[str] = []  # the runs of the tasks of this process
_stopped: set[str] = set()  # runs that were stopped


@contextmanager
def holding(nbytes: int, threads: int | None = None) -> Iterator[int]:
    """Hold memory of the worker for the time of the block, and wait for it first.

    Args:
        nbytes: how much memory the block needs.
        threads: how many threads the caller wants; None to choose.

    Yields:
        The number of threads to use: the worker's threads, shared by as many such blocks as its
        memory has room for. Outside of a worker nothing is held, and the number is that of
        `resolve_threads`.
    """
    worker = _worker()
    if worker is None:
        yield resolve_threads(threads)
        return
    n_threads = worker.state.nthreads
    total = int((worker.memory_manager.memory_limit or 0) * _SHARE)
    if not total:
        yield threads or 1
        return
    n_fitting = max(1, total // max(nbytes, 1))
    with _gate.holding(nbytes, total):
        yield threads or max(1, n_threads // n_fitting)


def _worker() -> Any:
    """The Dask worker that runs this task; None in any other process."""
    library = sys.modules.get("distributed")
    if library is None:
        return None
    try:
        return library.get_worker()
    except ValueError:
        return None
