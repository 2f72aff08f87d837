"""A snapshot that is being written in the background, and who has heard of its failure."""

from __future__ import annotations

from concurrent.futures import Future

from packhorse.disk.snapshots.results import SnapshotInfo

__all__ = ["Pending", "ToldFuture"]


class ToldFuture(Future[SnapshotInfo]):
    """A future that knows whether its error was seen."""

    was_asked = False

    def result(self, timeout: float | None = None) -> SnapshotInfo:
        """The snapshot."""
        try:
            return super().result(timeout)
        finally:
            self.was_asked = self.was_asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None."""
        try:
            return super().exception(timeout)
        finally:
            self.was_asked = self.was_asked or self.done()


class Pending:
    """A snapshot that is being written, and the future that the caller has."""

    def __init__(self, future: Future[SnapshotInfo]) -> None:
        self._future = future
        self.told = ToldFuture()
        self.told.set_running_or_notify_cancel()
        future.add_done_callback(self._tell)

    def _tell(self, future: Future[SnapshotInfo]) -> None:
        error = future.exception()
        if error is None:
            self.told.set_result(future.result())
        else:
            self.told.set_exception(error)

    def is_done(self) -> bool:
        """Whether it is on the disk, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until it is on the disk, or has failed."""
        self._future.exception()

    def raise_unseen(self) -> None:
        """Raise the error of a snapshot that is done, if the caller has not seen it."""
        error = self._future.exception()
        if error is not None and not self.told.was_asked:
            raise error
