"""Memory that is reused, because fresh memory costs more than decoding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from packhorse.codecs.base import ByteArray

__all__ = ["Scratch", "Window"]


class Window:
    """A piece of memory that grows when it must."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> ByteArray:
        """The first `nbytes` bytes. Earlier pieces share this memory."""
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def cut(self, sizes: Sequence[int]) -> list[ByteArray]:
        """Pieces of these sizes, one after the other. Earlier pieces share this memory."""
        ends = list(accumulate(sizes))
        memory = self.take(ends[-1] if ends else 0)
        return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class Scratch:
    """Numbered windows, separate for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, number: int, nbytes: int) -> ByteArray:
        """The first `nbytes` bytes of this thread's window with this number."""
        windows: dict[str, Window] = self._local.__dict__
        return windows.setdefault(str(number), Window()).take(nbytes)
