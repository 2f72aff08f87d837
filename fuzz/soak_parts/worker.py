"""A process that runs cases, and the process that watches it.

Modules are imported once, in a process from which workers are forked; so a worker starts at once,
and a new one is needed only after a finding. A worker that is silent for too long is asked for its
traceback, and then killed with all processes that it has started.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from soak_parts.case import Case, Finding, Part, Place, is_documented
from soak_parts.operations import Breaks, Operations

__all__ = ["Report", "Seen", "Worker"]

_PROCESSES = multiprocessing.get_context("forkserver")
# The command imports the last two at first use.
_PRELOADED = (
    *("dcp_samples", "packhorse.cli.actions", "packhorse.cli.app", "soak_parts.worker"),
    *("pydantic.types", "rich.pretty"),
)
_STARTING = threading.Lock()
_MAX_FILES = 256  # open at once; `ulimit -n` is 1024 for most users, and our cases are small
_MAX_TEXT = 20_000  # characters of a trace that are kept
_DUMP_S = 0.5  # time for a hanging process to dump its traceback


@dataclass(frozen=True)
class Seen:
    """A finding.

    Attributes:
        kind: "wrong" if a claim does not hold, "exception", "crash", "hang" or "memory".
        text: one line that describes it.
        trace: where it happened.
    """

    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class Report:
    """The outcome of a case."""

    tally: dict[str, int] = field(default_factory=dict)
    seen: Seen | None = None


class Worker:
    """A process that runs the cases of one part, one at a time."""

    def __init__(self, part: Part, scratch: Path, breaks: Breaks | None = None) -> None:
        """
        Args:
            part: the part that its cases belong to.
            scratch: an existing folder, for folders of its own.
            breaks: a function that breaks operations, for a test.
        """
        self._part = part
        self._scratch = scratch
        self._breaks = breaks
        self._process: Any = None

    def run(self, case: Case, *, limit_s: float | None = None) -> Report:
        """Run a case.

        Args:
            case: one of the part's.
            limit_s: how long it may take; None for the limit of the part.
        """
        if self._process is None:
            self._start()
        self._pipe.send(case)
        limit_s = limit_s or self._part.limit_s
        try:
            if self._pipe.poll(limit_s):
                report: Report = self._pipe.recv()
                if report.seen is not None:
                    self.close()
                return report
        except (EOFError, ConnectionError):
            return Report(seen=self._crashed())
        return Report(seen=self._hung(limit_s))

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        with _STARTING:
            _preload()
        self._folder = Path(tempfile.mkdtemp(dir=self._scratch))
        self._pipe, theirs = _PROCESSES.Pipe()
        arguments = (theirs, self._part.name, str(self._folder), self._breaks)
        self._process = _PROCESSES.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def _crashed(self) -> Seen:
        self._process.join()
        code, said = self._process.exitcode, self._said()
        self.close()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Seen("crash", f"the process ended with {how}", said)

    def _hung(self, limit_s: float) -> Seen:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        said = self._said()
        self.close()
        return Seen("hang", f"it was not done after {limit_s:g} s", said)

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-_MAX_TEXT:]


@cache
def _preload() -> None:
    """Start the process from which workers are forked. It finds modules by an environment
    variable."""
    ours = [path for path in sys.path if Path(path).name in ("fuzz", "samples")]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *([before] if before else [])])
    _PROCESSES.set_forkserver_preload([*_PRELOADED])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _serve(pipe: Connection, part_name: str, folder: str, breaks: Breaks | None) -> None:
    """The life of a worker."""
    os.setpgid(0, 0)
    log = open(Path(folder) / "log", "w")  # noqa: SIM115  as long as the process lives
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    tempfile.tempdir = folder
    from soak_parts import PARTS

    part = PARTS[part_name]
    operations = Operations() if breaks is None else breaks(Operations())
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        log.truncate(0)
        pipe.send(_report(part, case, operations, Path(folder) / "case"))


def _report(part: Part, case: Case, operations: Operations, folder: Path) -> Report:
    folder.mkdir()
    place = Place(folder, operations)
    _limit_memory(part.memory_nbytes)
    try:
        part.run(case, place)
    except BaseException as error:
        trace = getattr(error, "trace", "") + traceback.format_exc()
        seen = Seen(_kind_of(error), _line_of(error), trace[-_MAX_TEXT:])
        return Report(dict(place.tally), seen)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        shutil.rmtree(folder, ignore_errors=True)
    return Report(dict(place.tally))


def _limit_memory(nbytes: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, resource.RLIM_INFINITY))


def _kind_of(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    return "wrong" if isinstance(error, Finding | AssertionError) else "exception"


def _line_of(error: BaseException) -> str:
    words = " ".join(str(error).split())[:500]
    if isinstance(error, Finding):
        return words
    documented = " (a documented error, where no error is due)" if is_documented(error) else ""
    return f"{type(error).__name__}: {words}{documented}"
