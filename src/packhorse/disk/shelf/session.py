"""An open shelf: which state a thread sees, and the transaction of the thread that writes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from packhorse.disk.shelf.changes import Changes
from packhorse.disk.shelf.committed import Committed, Settings, StateChunks
from packhorse.disk.shelf.new_chunks import delete_unused_chunks
from packhorse.disk.shelf.records import CHUNK_KEY, Entry, StateRecord, TensorRecord
from packhorse.disk.shelf.rows import Chunks
from packhorse.disk.shelf.store import Folder
from packhorse.errors import ClosedError

__all__ = ["Session", "missing"]


def missing(name: object, path: Path, tag: str | None, what: str = "tensor") -> KeyError:
    """The error for a name that a shelf does not have."""
    where = f"{path}" if tag is None else f"{path}, tag {tag!r}"
    return KeyError(f"{where}: there is no {what} {name!r}")


class Session:
    """An open shelf.

    Attributes:
        folder: of the shelf.
        settings: how it works.
    """

    def __init__(self, folder: Folder, settings: Settings) -> None:
        """Args:
        folder: of the shelf.
        settings: how it works.
        """
        self.folder, self.settings = folder, settings
        self._turn = threading.Lock()
        self._owner: tuple[int, int] | None = None  # the process and the thread that write
        self._depth = 0
        self._changes: Changes | None = None
        self._doom: BaseException | None = None
        self._close = weakref.finalize(self, folder.close)
        if folder.writes:
            try:
                self._clean()
            except BaseException:
                self._close()
                raise

    def _clean(self) -> None:
        """Delete what a transaction of a killed process wrote early."""
        with self.folder.read() as (txn, head):
            cursor = txn.handle.cursor(db=txn.tables.chunks)
            has_unused = cursor.set_range(CHUNK_KEY.pack(head.next_chunk))
        if has_unused:
            with suppress(OSError):  # a full disk: the next commit deletes them, too
                self.folder.write(delete_unused_chunks)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    def check_open(self) -> None:
        """Make sure that the shelf is open.

        Raises:
            ClosedError: it is closed.
        """
        if self.folder.is_closed:
            raise ClosedError(f"{self.path}: the shelf is closed; open it again")

    def close(self) -> None:
        """Close the shelf.

        Raises:
            RuntimeError: this thread is in a transaction.
            TimeoutError: another thread's transaction goes on for too long.
        """
        if self.folder.is_closed:
            return
        if self.seen() is not None:
            raise RuntimeError(
                f"{self.path}: the shelf was closed inside a transaction; leave it first"
            )
        is_busy = self._owner is not None and self._owner[0] == os.getpid()
        with self.turn() if is_busy else nullcontext():
            self._close()

    # Reading.

    def seen(self) -> Changes | None:
        """The transaction that this thread is in; None if it is in none. A forked child is in none,
        because what its parent has written ahead may be gone at any time."""
        return self._changes if self._owner == _me() else None

    def state(self, tag: str | None = None) -> Committed:
        """A committed state, as a context: the one that this thread holds, or else the newest; or
        that of a tag.

        Args:
            tag: of the state; None for no tag.
        """
        return Committed(self.folder, self.settings, tag)

    @contextmanager
    def tensor(self, name: str, tag: str | None) -> Iterator[tuple[TensorRecord, Chunks]]:
        """A tensor, as a context: its record, and its chunks as this thread sees them.

        Raises:
            KeyError: there is no tensor of this name.
        """
        changes = None if tag is not None else self.seen()
        if changes is not None:
            yield self.checked(changes.entry(name), name, tag), changes
            return
        with self.state(tag) as state:
            record = self.checked(state.entry(name), name, tag)
            yield record, StateChunks(state, self.settings, f"{self.path}: {name!r}")

    def record(self, name: str, tag: str | None) -> TensorRecord:
        """The record of a tensor.

        Raises:
            KeyError: there is no tensor of this name.
        """
        return self.checked(self.entry(name, tag), name, tag)

    def checked(self, entry: Entry | None, name: str, tag: str | None) -> TensorRecord:
        """An entry that must be a tensor.

        Raises:
            KeyError: there is none of this name.
            TypeError: it is a nested state.
        """
        if isinstance(entry, StateRecord):
            raise TypeError(f"{self.path}: {name!r} is a nested state; read it with load({name!r})")
        if entry is None:
            raise missing(name, self.path, tag)
        return entry

    def entry(self, name: str, tag: str | None) -> Entry | None:
        """The entry of a name; None if there is none."""
        changes = None if tag is not None else self.seen()
        if changes is not None:
            self.check_open()
            return changes.entry(name)
        with self.state(tag) as state:
            return state.entry(name)

    def has(self, name: str, tag: str | None) -> bool:
        """Whether there is an entry of a name, which may be damaged."""
        changes = None if tag is not None else self.seen()
        if changes is not None:
            self.check_open()
            return changes.has(name)
        with self.state(tag) as state:
            return state.has(name)

    def names(self, prefix: str, tag: str | None) -> list[str]:
        """All names that begin so, in order."""
        changes = None if tag is not None else self.seen()
        if changes is not None:
            return changes.names(prefix)
        with self.state(tag) as state:
            return state.names(prefix)

    def tags(self) -> list[str]:
        """The names of all tags, the oldest first."""
        with self.state() as state:
            return state.tag_names()

    # Writing.

    def check_no_transaction(self, what: str) -> None:
        """Refuse what cannot be part of a transaction.

        Raises:
            RuntimeError: this thread is in a transaction.
        """
        self.folder.check_writes()
        if self.seen() is not None:
            raise RuntimeError(f"{self.path}: {what} inside a transaction; leave it first")

    @contextmanager
    def transaction(self) -> Iterator[Changes]:
        """A transaction of this thread; inside one it is the same.

        Raises:
            TimeoutError: another thread's transaction goes on for too long.
            RuntimeError: at the end, if something inside had failed.
        """
        self.folder.check_writes()
        if self._owner == _me():
            with self._joined() as changes:
                yield changes
            return
        with self.turn():
            changes, self._doom = Changes(self.folder, self.settings), None
            self._changes, self._owner = changes, _me()
            try:
                yield changes
                self._finish(changes)
            except BaseException:
                changes.abort()
                raise
            finally:
                self._owner = self._changes = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other thread writes.

        Raises:
            TimeoutError: another thread's transaction goes on for too long.
        """
        if not self._turn.acquire(timeout=self.folder.timeout):
            raise TimeoutError(
                f"{self.path}: a transaction of another thread goes on for more than "
                f"{self.folder.timeout:g} s; end it, or open the shelf with a longer timeout"
            )
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _joined(self) -> Iterator[Changes]:
        assert self._changes is not None
        changes, n_writes = self._changes, self._changes.n_writes
        try:
            yield changes
        except BaseException as error:
            if changes.n_writes != n_writes:
                self._doom = error
            raise

    def _finish(self, changes: Changes) -> None:
        if self._doom is not None:
            raise RuntimeError(
                f"{self.path}: nothing of this transaction was committed, because a part of it had "
                f"failed: {type(self._doom).__name__}: {self._doom}"
            ) from self._doom
        changes.commit()


def _me() -> tuple[int, int]:
    """This thread, and no thread of a forked child, where the numbers of threads are the same."""
    return os.getpid(), threading.get_ident()
