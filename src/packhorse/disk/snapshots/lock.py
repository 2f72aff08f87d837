"""The lock of a store, which allows one writer at a time.

In a folder the lock is the system's `flock`. It ends with the process that holds it, so a killed
writer never blocks the next one. Elsewhere the lock is a lease: an object that names the writer,
and that the writer renews while it works. A lease that was not renewed for ten minutes is void.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from packhorse.disk.snapshots.names import LOCK_FILE
from packhorse.errors import CorruptionError
from packhorse.storage.folder_lock import (
    MAX_HOLDER_NBYTES,
    FolderLock,
    describe_self,
    parse_holder,
    refusal,
    words_for,
)
from packhorse.storage.interface import Storage
from packhorse.storage.local import LocalStorage
from packhorse.storage.remote import RemoteStorage

__all__ = ["Lease", "WriterLock", "open_lock", "settle_s", "void_after_s"]

_WHAT, _CLASS = "the snapshot store", "SnapshotStore"
_RENEW_S = 30.0
void_after_s = 600.0
settle_s = 2.0  # until a writer can see that another one has overwritten its lease


class WriterLock(Protocol):
    """The lock of the one writer.

    Attributes:
        was_left: whether the previous writer did not release the lock, and so may have left
            unfinished work.
    """

    was_left: bool

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: another writer holds the lock; the message names it.
        """

    def check(self) -> None:
        """Make sure that the lock is still held, before something is committed.

        Raises:
            BlockingIOError: the lock was lost.
        """

    def release(self) -> None:
        """Release the lock."""


def open_lock(storage: Storage) -> WriterLock:
    """The lock of a store's one writer, not taken yet."""
    if isinstance(storage, LocalStorage):
        storage.make()
        return FolderLock(storage.at(LOCK_FILE), storage.label(), _WHAT, _CLASS)
    if isinstance(storage, RemoteStorage):
        return Lease(storage)
    raise TypeError(f"{storage.label()}: cannot lock a {type(storage).__name__}")


class Lease:
    """The lock of an object store.

    It is as good as the store allows. If the store can create an object only if it is absent, two
    writers never both begin. Otherwise, and when a lease is void, the last writer of the lease
    wins, and waits long enough that the others notice before they do anything. A writer can lose
    its lease if it did not run for minutes, or if a clock is wrong. It notices at the next `check`.
    """

    def __init__(self, storage: RemoteStorage) -> None:
        self._storage = storage
        self._label = storage.label()
        self._owner = os.urandom(16).hex()
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None
        self.was_left = False

    def acquire(self) -> None:
        """Take the lease, even from another writer if that one has not renewed it for ten minutes.

        Raises:
            BlockingIOError: another writer holds the lease; the message names it.
        """
        try:
            if not self._storage.put_new(LOCK_FILE, self._text()):
                self._check_void(self._holder())
                self.was_left = True
                self._storage.put(LOCK_FILE, self._text(), replace=True)
                time.sleep(settle_s)
            self.check()
            self._stop.clear()
            self._renewer = threading.Thread(target=self._renew, daemon=True)
            self._renewer.start()
        except BaseException:
            self.release()
            raise

    def _check_void(self, holder: dict[str, Any]) -> None:
        timestamp = holder.get("timestamp")
        if not isinstance(timestamp, int | float):
            return  # damaged, so nobody holds it
        age = datetime.now(UTC).timestamp() - timestamp
        if age < void_after_s:
            raise refusal(
                f"{_WHAT} is being written by {words_for(holder, _CLASS)}; one writer at a time: "
                "wait until it is done. If that writer is dead, its lease ends in "
                f"{void_after_s - age:.0f} s; removing {LOCK_FILE} ends it now",
                self._label,
            )

    def check(self) -> None:
        """Make sure that this writer holds the lease.

        Raises:
            BlockingIOError: another writer holds it, or nobody does.
        """
        holder = self._holder()
        if holder.get("owner") != self._owner:
            words = words_for(holder, _CLASS) if holder else "nobody"
            raise refusal(
                f"this writer has lost its lease, and {words} holds it now; nothing was committed; "
                "try again",
                self._label,
            )

    def _holder(self) -> dict[str, Any]:
        """The content of the lease; empty if there is no lease, or if it cannot be read."""
        try:
            return parse_holder(self._storage.read(LOCK_FILE, MAX_HOLDER_NBYTES))
        except (FileNotFoundError, CorruptionError):
            return {}

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_S):
            with suppress(Exception):  # the next `check` raises it, before anything is committed
                self.check()
                self._storage.put(LOCK_FILE, self._text(), replace=True)

    def release(self) -> None:
        """Release the lease. If the store does not answer, the lease ends by itself."""
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join()
        with suppress(Exception):  # the work is committed, and the lease ends by itself
            self.check()
            self._storage.remove(LOCK_FILE)

    def _text(self) -> bytes:
        return json.dumps({**describe_self(), "owner": self._owner}).encode()
