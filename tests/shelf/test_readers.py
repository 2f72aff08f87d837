"""Readers beside a writer see one committed state at a time, and never an older one than before.

`PACKHORSE_READER_S=60 pytest tests/shelf/test_readers.py` goes on for a minute.
"""

import os
import random
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from forked import fork_context

from packhorse.disk import Shelf

SECONDS = float(os.environ.get("PACKHORSE_READER_S", "4"))
N_COLUMNS = 300


def rows_of(stamp: int, n_rows: int) -> np.ndarray:
    return np.full((n_rows, N_COLUMNS), stamp, np.int64)


def write(folder: str, until: float, committed: Synchronized) -> None:
    """All rows of two tensors get the same stamp, in each commit; compacts at times, and grows."""
    rng = random.Random(0)
    with Shelf(folder) as shelf:
        stamp = int(shelf["a"][0, 0])
        while time.time() < until:
            stamp += 1
            with shelf.transaction():
                for name in ("a", "b"):
                    if rng.random() < 0.3:
                        n_rows = rng.randint(1, 200)
                        shelf[name] = rows_of(stamp, n_rows)
                        shelf[name].append(rows_of(stamp, rng.randint(0, 60)))
                    elif rng.random() < 0.5:
                        shelf[name] += 1
                    else:
                        shelf[name][::-1] = stamp
            committed.value = stamp
            if stamp % 10 == 0:
                shelf[f"more {stamp}"] = np.random.default_rng(stamp).integers(
                    0, 256, 1 << 20, np.uint8
                )
            if stamp % 37 == 0:
                for name in shelf.keys("more"):
                    del shelf[name]
                shelf.compact()


def read(
    folder: str, until: float, committed: Synchronized, seed: int, result: Synchronized
) -> None:
    """Counts states in `result`."""
    rng, last = random.Random(seed), -1
    with Shelf(folder, "r") as shelf:
        while time.time() < until:
            before = committed.value
            stamp = read_state(shelf, rng) if rng.random() < 0.7 else read_row(shelf, rng)
            assert stamp >= max(last, before), f"state {stamp} after {last}, {before} was committed"
            last = stamp
            result.value += 1


def read_state(shelf: Shelf, rng: random.Random) -> int:
    """All rows of both tensors in one state."""
    with shelf.reading():
        stamps = set()
        for name in rng.sample(["a", "b"], 2):
            x = shelf[name]
            assert x.shape[1] == N_COLUMNS
            stamps |= set(np.unique(x[...]).tolist())
            stamps |= set(np.unique(x[rng.randrange(len(x))]).tolist())
            if rng.random() < 0.3:
                time.sleep(0.02)
    assert len(stamps) == 1, sorted(stamps)
    return int(stamps.pop())


def read_row(shelf: Shelf, rng: random.Random) -> int:
    """One row, in whatever state there is."""
    stamps = np.unique(shelf[rng.choice("ab")][0])
    assert len(stamps) == 1
    return int(stamps[0])


def test_two_readers_beside_a_writer(tmp_path: Path) -> None:
    folder = str(tmp_path / "data.shelf")
    with Shelf(folder) as shelf, shelf.transaction():
        shelf["a"], shelf["b"] = rows_of(0, 100), rows_of(0, 50)
    committed = fork_context().Value("q", 0)
    counts = [fork_context().Value("q", 0) for _ in range(2)]
    until = time.time() + SECONDS  # the server of `fork_context` runs by now
    processes = [fork_context().Process(target=write, args=(folder, until, committed))]
    for seed, count in enumerate(counts):
        arguments = (folder, until, committed, seed, count)
        processes.append(fork_context().Process(target=read, args=arguments))
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS + 60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    print(f"{committed.value} commits; states read: {[count.value for count in counts]}")
    assert committed.value > 40
    assert min(count.value for count in counts) > 40
    with Shelf(folder) as shelf:
        assert not shelf.verify()
        assert np.unique(shelf["a"][...]).tolist() == [committed.value]


def hold(folder: str, holds: Event) -> None:
    """Keep one state until somebody ends this process."""
    with Shelf(folder, "r") as shelf, shelf.reading():
        assert shelf["x"][0] == 0
        holds.set()
        time.sleep(600)


def test_a_killed_reader_keeps_no_pages(tmp_path: Path) -> None:
    """While it lives, the pages of its state are kept; a new writer frees them when it is dead."""
    folder = tmp_path / "data.shelf"
    rng = np.random.default_rng(0)
    with Shelf(folder) as shelf:
        shelf["x"] = np.zeros(1)
    holds = fork_context().Event()
    reader = fork_context().Process(target=hold, args=(str(folder), holds))
    reader.start()
    assert holds.wait(60)
    with Shelf(folder) as shelf:
        for _ in range(3):
            shelf["x"] = rng.integers(0, 256, 1 << 20, np.uint8)
    reader.kill()
    reader.join()
    with Shelf(folder) as shelf:
        for _ in range(12):
            shelf["x"] = rng.integers(0, 256, 1 << 20, np.uint8)
    assert sum(path.stat().st_blocks * 512 for path in folder.glob("*.mdb")) < 8 << 20
