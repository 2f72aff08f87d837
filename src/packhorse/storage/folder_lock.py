"""The lock of a folder on this machine, which allows one writer at a time.

The lock is the system's `flock`, or its twin on Windows. It ends with the process that holds it, so
a killed writer never blocks the next one.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packhorse.errors import PackhorseError
from packhorse.process import at_fork
from packhorse.storage import system
from packhorse.storage.strict_json import parse_json, shown

__all__ = [
    "MAX_HOLDER_NBYTES",
    "FolderLock",
    "describe_self",
    "parse_holder",
    "refusal",
    "words_for",
]

MAX_HOLDER_NBYTES = 4096  # of the description that a writer leaves of itself

_held: set[int] = set()  # descriptors of the lock files that this process holds


def describe_self() -> dict[str, Any]:
    """What a writer leaves of itself, for the message to others."""
    now = datetime.now(UTC)
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "timestamp": now.timestamp(),
    }


def words_for(holder: dict[str, Any], kind: str) -> str:
    """Who holds a lock, in words.

    Args:
        holder: what the writer left of itself.
        kind: the class that writes, for a writer of this process.
    """
    if not holder:
        return "another process"
    if holder.get("host") == socket.gethostname() and holder.get("pid") == os.getpid():
        return f"another {kind} of this process (since {shown(holder.get('time'))})"
    return (
        f"process {shown(holder.get('pid'))} on {shown(holder.get('host'))} (since "
        f"{shown(holder.get('time'))})"
    )


def parse_holder(text: bytes) -> dict[str, Any]:
    """Read what a writer left of itself; empty if it cannot be read."""
    try:
        return parse_json(text, label="writer.lock")
    except PackhorseError:
        return {}


def refusal(words: str, path: str) -> BlockingIOError:
    """The error for a lock that somebody else holds."""
    return BlockingIOError(errno.EAGAIN, words, path)


class FolderLock:
    """The lock of a folder on this machine."""

    def __init__(self, path: Path, label: str, what: str, kind: str) -> None:
        """
        Args:
            path: the lock file.
            label: what is locked, for the system's error.
            what: the same in words, such as "the shelf".
            kind: the class that writes.
        """
        self._path, self._label = path, label
        self._what, self._kind = what, kind
        self._descriptor = -1
        self.was_left = False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: another writer holds the lock; the message names it.
        """
        at_fork(in_child=_close_held)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | system.OPEN_FLAGS, 0o666)
        try:
            system.lock(descriptor)
        except BlockingIOError:
            holder = parse_holder(system.read_at(descriptor, MAX_HOLDER_NBYTES, 0))
            os.close(descriptor)
            raise refusal(
                f"{self._what} is being written by {words_for(holder, self._kind)}; one writer at "
                "a time: wait until it is done",
                self._label,
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        _held.add(descriptor)
        self._descriptor = descriptor
        self.was_left = os.fstat(descriptor).st_size > 0
        with suppress(OSError):  # the disk may be full, but the lock is held
            os.ftruncate(descriptor, 0)
            system.write_at(descriptor, json.dumps(describe_self()).encode(), 0)

    def check(self) -> None:
        """Make sure that the lock file still exists. If someone has removed it, the lock is void.

        Raises:
            BlockingIOError: the file was removed, or replaced.
        """
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise refusal(
                f"{self._path.name} was removed while this process was writing, so another process "
                "may be writing too; nothing was committed; try again",
                self._label,
            )

    def release(self) -> None:
        """Release the lock, even if forked children have inherited it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        _held.discard(descriptor)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        system.unlock(descriptor)
        os.close(descriptor)


def _close_held() -> None:
    """A forked worker of a data loader must not keep the lock of a parent that was killed."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())
