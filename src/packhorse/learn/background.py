"""A bounded queue whose items a thread writes.

The thread lives only while items wait, so an idle queue holds no thread, and a program that ends
waits for the items that are left. Items leave the queue when they are written: if writing fails,
they stay, and the next call tries again. Those that are left when the program has ended are
reported by a warning, and the exit code is 1 instead of 0.

A write runs inside `session()`, which may wait for a lock, for example that of a transaction.
Items are taken only after the lock is held. So a caller that holds the lock itself can write all
items with `flush`, while the thread waits for the lock with empty hands.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from packhorse._core import fail_at_exit
from packhorse.process import at_exit

__all__ = ["BackgroundQueue"]

_Item = TypeVar("_Item")

# A caller that finds the queue full waits this long for the thread to get the lock. After that the
# caller writes itself: it may be the one that holds the lock.
_PATIENCE_S = 0.1

# Queues with items.
_waiting: set[BackgroundQueue[Any]] = set()


class BackgroundQueue(Generic[_Item]):
    """Items that wait for a thread to write them."""

    def __init__(
        self,
        write: Callable[[Sequence[_Item]], object],
        session: Callable[[], AbstractContextManager[object]],
        max_items: int,
        what: str,
    ) -> None:
        """An empty queue.

        Args:
            write: writes some items, in order.
            session: what a write runs in; items count as written when it has ended.
            max_items: how many items may wait, those included that are just being written.
            what: what a warning calls items.
        """
        self._write = write
        self._session = session
        self._max_items = max_items
        self._what = what
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._owner: int | None = None  # the thread that writes
        self._error: BaseException | None = None
        self._pid = os.getpid()

    def warn_of_loss(self) -> None:
        """Say that items are lost, if this process has any that it did not write."""
        if not self._items or not self.is_of_this_process():
            return
        fail_at_exit()  # before the warning, which may be turned into an error
        why = "" if self._error is None else f": {type(self._error).__name__}: {self._error}"
        warnings.warn(
            f"{len(self._items)} {self._what} were not written{why}; call flush() or close()",
            RuntimeWarning,
            stacklevel=1,
        )

    def last(self) -> _Item | None:
        """The newest item that is not written yet."""
        with self._changed:
            return self._items[-1] if self._items else None

    def put(self, item: _Item) -> None:
        """Add an item; wait while the queue is full.

        Raises:
            BaseException: an earlier write failed. The item was not added; the items before it
                still wait.
        """
        self._raise_error()
        while not self._has_room():
            self._write_waiting()
            self._raise_error()
        with self._changed:
            self._items.append(item)
            _waiting.add(self)
            at_exit(_warn_at_exit)
            if self._thread is None:
                self._start()

    def flush(self) -> None:
        """Write all items that wait, in the caller's thread, those too that the thread failed to
        write.

        Raises:
            BaseException: the write failed; the items still wait.
        """
        with self._changed:
            self._error = None
        self._write_waiting()
        self._raise_error()

    def drop(self) -> None:
        """Forget the items that wait; the caller knows that they are lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner is None)
            self._items.clear()
            _waiting.discard(self)

    def is_of_this_process(self) -> bool:
        """Whether the queue was made by this process, not by one that forked it."""
        return os.getpid() == self._pid

    def _has_room(self) -> bool:
        """Whether an item can be added; False also if the thread does not get the lock."""
        with self._changed:
            while len(self._items) >= self._max_items:
                if self._error is not None:
                    return False
                got = self._changed.wait(_PATIENCE_S)
                if not got and self._owner is None:
                    return False
            return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="packhorse-background")
        try:
            thread.start()
        except RuntimeError:  # no more threads, or Python is ending: the next flush writes
            return
        self._thread = thread

    def _run(self) -> None:
        while True:
            self._write_waiting()
            with self._changed:
                if self._error is not None or not self._items:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _write_waiting(self) -> None:
        """Write the items; an error is kept for `_raise_error`."""
        if not self._items:
            return
        items: list[_Item] = []
        try:
            with self._session():
                items = self._take()
                if items:
                    self._write(items)
        except BaseException as error:
            self._settle(0, error)
        else:
            self._settle(len(items), None)

    def _take(self) -> list[_Item]:
        """The items to write; they stay in the queue."""
        with self._changed:
            # Whoever took items before this thread got the lock is done, and says so in a moment.
            self._changed.wait_for(lambda: self._owner is None)
            self._owner = threading.get_ident()
            return list(self._items)

    def _settle(self, n_written: int, error: BaseException | None) -> None:
        """Remove the items that this thread has written, or keep its error."""
        with self._changed:
            for _ in range(n_written):
                self._items.popleft()
            if not self._items:
                _waiting.discard(self)
            if self._owner == threading.get_ident():
                self._owner = None
            if n_written or error is not None:
                self._error = error  # None: what another thread could not write is written now
            self._changed.notify_all()

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _warn_at_exit() -> None:
    """Report items that are left when the threads of the program have ended."""
    for queue in list(_waiting):
        queue.warn_of_loss()
