"""Threads that share a shelf: each sees one state, and what they write takes turns."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from packhorse.disk import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf", timeout=20) as opened:
        yield opened
        assert opened.verify() == []


@contextmanager
def hasty_switches() -> Iterator[None]:
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(*works: Callable[[], object]) -> None:
    """Runs functions at the same time, and raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_read_different_states(shelf: Shelf) -> None:
    """What is known of one state does not get into another."""
    for n in range(1, 5):
        shelf["x"] = np.full(n, n)
        shelf.tag(f"{n} rows")
    until = time.monotonic() + 1.5

    def reader(n: int) -> Callable[[], None]:
        x = shelf.at(f"{n} rows")["x"]

        def read() -> None:
            while time.monotonic() < until:
                assert x.shape == (n,)
                assert x[...].tolist() == [n] * n

        return read

    with hasty_switches():
        in_threads(*map(reader, range(1, 5)))
