"""Processes that a case starts. They are forked, which is fast, and watched, and some are ended.

A child may end itself at a certain call of the operating system. Unlike a point in time, this call
is the same each time that the case runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_parts.case import claim

__all__ = ["Child", "Ended", "end_at_call", "run_child", "start_child"]

# Calls that change names, and calls that change anything.
_NAMING = ("replace", "rename", "link", "unlink", "mkdir", "rmdir")
_CALLS = (*_NAMING, "open", "pwrite", "write", "fsync", "ftruncate", "fchmod")
_FAILED = 99  # exit code of a child that raised
_DUMP_S = 0.5
_AGAIN_S = 5.0
# Signals that are blocked while a child is prepared.
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_MAX_SAID = 10_000  # characters


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: its exit code; negative if a signal ended it.
        out: what it printed.
        err: what it printed as errors.
    """

    code: int
    out: str
    err: str

    @property
    def is_good(self) -> bool:
        """Whether it ended without an error."""
        return self.code == 0

    @property
    def last_line(self) -> str:
        """The last line of its errors, which is the exception if there is a traceback."""
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Child:
    """A process that was started."""

    pid: int
    out: Path
    err: Path

    def end(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit_s: float, again: int | None = None) -> Ended:
        """Wait for its end.

        Args:
            limit_s: how long.
            again: a signal to send once more if it has no effect, because Python may lose an
                interrupt in a place where it cannot raise.

        Raises:
            Finding: it does not end in time.
        """
        until, sent = time.monotonic() + limit_s, time.monotonic()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while not pid and time.monotonic() < until:
            time.sleep(0.001)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid and again is not None and time.monotonic() > sent + _AGAIN_S:
                self.end(again)
                sent = time.monotonic()
        if not pid:
            self.end(signal.SIGUSR1)
            time.sleep(_DUMP_S)
            self.end(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        said = self.err.read_text(errors="replace")
        claim(pid, f"a child hangs: it was not done after {limit_s:g} s", said[-_MAX_SAID:])
        return Ended(os.waitstatus_to_exitcode(status), self.out.read_text(), said)


def run_child(work: Callable[[], Any], folder: Path, *, limit_s: float = 30.0) -> Ended:
    """Run something in a child, and wait for it."""
    return start_child(work, folder).wait(limit_s)


def start_child(work: Callable[[], Any], folder: Path) -> Child:
    """Fork a process that does something.

    Args:
        work: what it does; an integer that it returns is the exit code.
        folder: where files of what it prints go.
    """
    mark = os.urandom(6).hex()
    out, err = folder / f"child-{mark}.out", folder / f"child-{mark}.err"
    for path in (out, err):
        path.touch()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        pid = os.fork()
        if pid == 0:
            _live(work, out, err, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(pid, out, err)


def _live(work: Callable[[], Any], out: Path, err: Path, parent: int) -> None:
    """The life of a child; it does not return."""
    code = _FAILED
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
        for stream, path in ((1, out), (2, err)):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, stream)
            os.close(descriptor)
        _say_where_it_hangs()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout = os.fdopen(os.dup(1), "w")
        sys.stderr = os.fdopen(os.dup(2), "w")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
        result = work()
        code = int(result) if isinstance(result, int) else 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if f"{os.sep}packhorse{os.sep}" in (trace := traceback.format_exc()):
            sys.stderr.write(trace)
    except BaseException as error:
        with suppress(BaseException):
            sys.stderr.write(getattr(error, "trace", ""))
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _say_where_it_hangs() -> None:
    import faulthandler

    faulthandler.register(signal.SIGUSR1, 2)


def end_at_call(number: int, signal_number: int, *, after: bool, naming: bool) -> None:
    """Make this process send itself a signal at one of its next calls that change files.

    Args:
        number: which call, from 0.
        signal_number: the signal.
        after: whether the call is done first.
        naming: whether only calls that change names are counted.
    """
    left = number

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            is_now = left == -1
            if is_now and not after:
                os.kill(os.getpid(), signal_number)
            try:
                return real(*args, **kwargs)
            finally:
                if is_now and after:
                    os.kill(os.getpid(), signal_number)

        return call

    for name in _NAMING if naming else _CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
