"""A snapshot that is being written in the background, and whether its failure was reported.

The future reports a failure, or else the next call of the store does. If neither has done so when
the program ends, a warning reports it, and the exit code is 1 instead of 0.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from packhorse._core import fail_at_exit
from packhorse.disk.snapshots.results import SnapshotInfo
from packhorse.process import at_exit

__all__ = ["Pending", "ToldFuture"]


class ToldFuture(Future[SnapshotInfo]):
    """A future that knows whether its error was seen."""

    was_asked = False

    def result(self, timeout: float | None = None) -> SnapshotInfo:
        """The snapshot that was written."""
        with self._asking():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that it failed with; None if it did not fail."""
        with self._asking():
            return super().exception(timeout)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # a timeout does not report the failure
            self.was_asked = self.was_asked or error is self._exception
            raise
        self.was_asked = True


class Pending:
    """A snapshot that is being written, and the future that the caller has."""

    def __init__(self, future: Future[SnapshotInfo], label: str) -> None:
        """Args:
        future: the future of the thread that writes.
        label: what messages call the snapshot.
        """
        self._future = future
        self._label = label
        self._pid = os.getpid()
        self.told = ToldFuture()
        self.told.set_running_or_notify_cancel()
        _unheard.add(self)
        at_exit(_warn_at_exit)
        future.add_done_callback(self._tell)

    def _tell(self, future: Future[SnapshotInfo]) -> None:
        error = future.exception()
        if error is None:
            self.forget()
            self.told.set_result(future.result())
        else:
            self.told.set_exception(error)

    def is_done(self) -> bool:
        """Whether it is on the disk, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until it is on the disk, or has failed."""
        self._future.exception()

    def forget(self) -> None:
        """Stop watching it, because the caller knows the result."""
        _unheard.discard(self)

    def raise_unseen(self) -> None:
        """Raise the error of a snapshot that is done, if the caller has not seen it."""
        self.forget()
        error = self._future.exception()
        if error is not None and not self.told.was_asked:
            raise error

    def unseen(self) -> BaseException | None:
        """The error that the caller has not seen; None if there is none. A forked child has none,
        because the snapshot is its parent's."""
        if self._pid != os.getpid() or not self.is_done() or self.told.was_asked:
            return None
        return self._future.exception()

    def warn(self, error: BaseException) -> None:
        """Warn of an error that nobody has seen."""
        warnings.warn(
            f"{self._label} was not taken, and result() of its future was never called: "
            f"{type(error).__name__}: {error}; call result(), or close the store",
            RuntimeWarning,
            stacklevel=1,
        )


# Snapshots that are being written, and those that failed and whose error nobody has seen.
_unheard: set[Pending] = set()


def _warn_at_exit() -> None:
    """Report failures at the end of the program, when the writing threads have ended."""
    for pending in _unheard:
        error = pending.unseen()
        if error is not None:
            fail_at_exit()  # before the warning, which may be turned into an error
            pending.warn(error)
