"""Hands copies of tensors from the thread that trains to the thread that packs.

The copies take a bounded amount of memory; the thread that trains waits for room. The memory is
kept for the next snapshot, whose tensors have the same sizes, because fresh memory costs more than
the copy.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from packhorse.codecs.base import ByteArray

__all__ = ["Staging"]


class Staging:
    """A queue of copies between two threads, with a bounded size."""

    def __init__(self, max_nbytes: int | None) -> None:
        """Args:
        max_nbytes: the most bytes of all copies together, unless one group alone is larger; None
            for no bound.
        """
        self.max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._spare: dict[int, list[ByteArray]] = {}
        self._ready: deque[ByteArray] = deque()
        self._taken: list[ByteArray] = []
        self._nbytes = 0  # in use
        self._spare_nbytes = 0
        self._group_nbytes = 0
        self._state_nbytes = 0
        self._failure: BaseException | None = None
        self._is_given_up = False

    def begin(self, group_nbytes: int, state_nbytes: int) -> None:
        """Begin a snapshot: drop the copies of the previous one, and keep their memory.

        Args:
            group_nbytes: bytes of the largest group of tensors that are packed together. There is
                always room for it.
            state_nbytes: bytes of all tensors. Without a bound, used and spare memory together stay
                below this.
        """
        with self._changed:
            self._group_nbytes = group_nbytes
            self._state_nbytes = state_nbytes
            self._keep([*self._ready, *self._taken])
            self._ready.clear()
            self._taken.clear()
            self._failure = None
            self._is_given_up = False

    def put(self, data: ByteArray) -> None:
        """Copy a tensor's bytes once there is room. The thread that trains calls this."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._has_room(data.size))
            if self._is_given_up:
                return
            memory = self._take(data.size)
        memory[:] = data
        with self._changed:
            self._ready.append(memory)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Say that no more copies will come, and why. The other thread then raises the reason."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def get(self) -> ByteArray:
        """The next copy, which is valid until `release`. The thread that packs calls this."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._failure is not None)
            if not self._ready:
                raise RuntimeError("the tensors could not be copied") from self._failure
            memory = self._ready.popleft()
            self._taken.append(memory)
            return memory

    def release(self) -> None:
        """Let the memory of all copies that `get` returned be used again."""
        with self._changed:
            self._keep(self._taken)
            self._taken.clear()
            self._changed.notify_all()

    def give_up(self) -> None:
        """Stop waiting for room, because the thread that packs has failed."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Release the spare memory."""
        with self._changed:
            self._spare.clear()
            self._spare_nbytes = 0

    def _has_room(self, nbytes: int) -> bool:
        bound = self._bound()
        return bound is None or self._nbytes == 0 or self._nbytes + nbytes <= bound

    def _bound(self) -> int | None:
        return None if self.max_nbytes is None else max(self.max_nbytes, self._group_nbytes)

    def _take(self, nbytes: int) -> ByteArray:
        self._nbytes += nbytes
        spare = self._spare.get(nbytes)
        if spare:
            self._spare_nbytes -= nbytes
            return spare.pop()
        bound = self._bound()
        bound = self._state_nbytes if bound is None else bound
        if self._nbytes + self._spare_nbytes > bound:
            self._spare.clear()
            self._spare_nbytes = 0
        return np.empty(nbytes, np.uint8)

    def _keep(self, memory: list[ByteArray]) -> None:
        for part in memory:
            self._nbytes -= part.size
            self._spare_nbytes += part.size
            self._spare.setdefault(part.size, []).append(part)
