"""A thread that writes to memory while it is read, and rounds of a test that waits for an overlap
of the two."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from packhorse.codecs.base import ByteArray

__all__ = ["disturbed", "need_overlap", "rounds"]

_LIMIT_S = 1.0


@contextmanager
def disturbed(memory: ByteArray, *states: bytes) -> Iterator[None]:
    """While the block runs, a thread writes one state after the other, piece by piece."""
    done = threading.Event()
    sources = [np.frombuffer(state, np.uint8) for state in states]
    piece = max(1, memory.size // 5)

    def write() -> None:
        while not done.is_set():
            for source in sources:
                for at in range(0, memory.size, piece):
                    memory[at : at + piece] = source[at : at + piece]

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def rounds() -> Iterator[int]:
    """Counts rounds, for as long as a test may take."""
    end = time.monotonic() + _LIMIT_S
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def need_overlap(n_overlaps: int) -> None:
    """Skips a test in which no write fell into a call, so that nothing was shown."""
    if not n_overlaps:
        pytest.skip("no write fell into a call")
