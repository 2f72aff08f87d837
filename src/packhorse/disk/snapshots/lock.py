"""One writer at a time.

In a folder the lock is the system's own: `flock`, which ends with the process that holds it, so
that a killed writer never blocks the next. Elsewhere it is a lease: an object that names the writer
and is written anew while it works; a lease that has not been renewed for some minutes is void.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from packhorse.disk.snapshots.names import LOCK_FILE
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.process import at_fork
from packhorse.storage.interface import Storage
from packhorse.storage.local import LocalStorage
from packhorse.storage.remote import RemoteStorage
from packhorse.storage.strict_json import parse_json, shown

__all__ = ["FolderLock", "Lease", "WriterLock", "open_lock", "settle_s", "void_after_s"]

_MAX_NBYTES = 4096  # of what a writer says of itself
_RENEW_S = 30.0
void_after_s = 600.0
settle_s = 2.0  # for a writer to see that another has written the lease after it

_held: set[int] = set()  # descriptors of the lock files that this process holds


class WriterLock(Protocol):
    """The lock of the one writer.

    Attributes:
        was_left: whether the writer before did not release it, so that it may have left more.
    """

    was_left: bool

    def acquire(self) -> None:
        """Take it.

        Raises:
            BlockingIOError: another writer has it; the message says which.
        """

    def check(self) -> None:
        """Make sure that it is still held, before something is committed.

        Raises:
            BlockingIOError: it is not.
        """

    def release(self) -> None:
        """Let it go."""


def _describe_self() -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "timestamp": now.timestamp(),
    }


def _words(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    if holder.get("host") == socket.gethostname() and holder.get("pid") == os.getpid():
        return f"another SnapshotStore of this process (since {shown(holder.get('time'))})"
    return (
        f"process {shown(holder.get('pid'))} on {shown(holder.get('host'))} (since "
        f"{shown(holder.get('time'))})"
    )


def _parse(text: bytes) -> dict[str, Any]:
    try:
        return parse_json(text, label="writer.lock")
    except PackhorseError:
        return {}


def _refusal(words: str, path: str) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, words, path)


def open_lock(storage: Storage) -> WriterLock:
    """The lock of the one writer of a store, not yet taken."""
    if isinstance(storage, LocalStorage):
        storage.make()
        return FolderLock(storage.at(LOCK_FILE), storage.label())
    if isinstance(storage, RemoteStorage):
        return Lease(storage)
    raise TypeError(f"{storage.label()}: nobody knows how to lock a {type(storage).__name__}")


class FolderLock:
    """The lock of a folder of this machine."""

    def __init__(self, path: Path, label: str) -> None:
        self._path = path
        self._label = label
        self._descriptor = -1
        self.was_left = False

    def acquire(self) -> None:
        """Take it."""
        at_fork(in_child=_close_held)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _parse(os.pread(descriptor, _MAX_NBYTES, 0))
            os.close(descriptor)
            raise _refusal(
                f"the snapshot store is being written by {_words(holder)}; one writer at a time: "
                "wait until it is done",
                self._label,
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        _held.add(descriptor)
        self._descriptor = descriptor
        self.was_left = os.fstat(descriptor).st_size > 0
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_describe_self()).encode(), 0)

    def check(self) -> None:
        """The system keeps it, unless somebody has removed the file: then it locks nothing."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise _refusal(
                f"{self._path.name} was removed while this process was writing, so another may be "
                "writing too; nothing was committed: take it again",
                self._label,
            )

    def release(self) -> None:
        """Let it go, in children of this process too."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        _held.discard(descriptor)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _close_held() -> None:
    """A forked worker of a data loader must not keep the lock of a parent that was killed."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


class Lease:
    """The lock of an object store.

    It is as good as the store: where an object can be created only if it is absent, two writers
    never both begin; elsewhere, and when a lease is void, the last to write it wins, and waits so
    long that the others notice before they do anything. A writer whose lease was taken away,
    because it did not run for minutes or a clock is wrong, notices at the next `check`.
    """

    def __init__(self, storage: RemoteStorage) -> None:
        self._storage = storage
        self._label = storage.label()
        self._owner = os.urandom(16).hex()
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None
        self.was_left = False

    def acquire(self) -> None:
        """Take it, from a writer that has not renewed it for minutes too."""
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
            return  # damaged: nobody's
        age = datetime.now(UTC).timestamp() - timestamp
        if age < void_after_s:
            raise _refusal(
                f"the snapshot store is being written by {_words(holder)}; one writer at a time. "
                f"If that one is dead, its lease ends in {void_after_s - age:.0f} s, or when its "
                "writer.lock is removed",
                self._label,
            )

    def check(self) -> None:
        """Make sure that the lease is this writer's."""
        holder = self._holder()
        if holder.get("owner") != self._owner:
            words = _words(holder) if holder else "nobody"
            raise _refusal(
                f"the snapshot store is now being written by {words}; nothing was committed",
                self._label,
            )

    def _holder(self) -> dict[str, Any]:
        """What the lease says; nothing if there is none."""
        try:
            return _parse(self._storage.read(LOCK_FILE, _MAX_NBYTES))
        except (FileNotFoundError, CorruptionError):
            return {}

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_S):
            with suppress(Exception):  # `check` tells, before anything is committed
                self.check()
                self._storage.put(LOCK_FILE, self._text(), replace=True)

    def release(self) -> None:
        """Let it go; should the store not answer, it ends by itself."""
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join()
        with suppress(Exception):  # what was committed is committed
            self.check()
            self._storage.remove(LOCK_FILE)

    def _text(self) -> bytes:
        return json.dumps({**_describe_self(), "owner": self._owner}).encode()
