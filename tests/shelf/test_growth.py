"""The map of a shelf's file grows by itself, also beside readers."""

import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from forked import fork_context

from packhorse.disk import Shelf
from packhorse.disk.shelf import environment

SMALL = 1 << 18


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_MAP_NBYTES", SMALL)


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 1 << 18, np.uint8)


def map_nbytes(shelf: Shelf) -> int:
    return int(shelf._session.folder.engine._env.info()["map_size"])


def fill(shelf: Shelf, n: int = 12) -> None:
    for seed in range(n):
        shelf[f"n{seed}"] = noise(seed)


def is_full(shelf: Shelf, n: int = 12) -> bool:
    return all((shelf[f"n{seed}"][...] == noise(seed)).all() for seed in range(n))


def test_the_map_grows(tmp_path: Path) -> None:
    with Shelf(tmp_path / "data.shelf") as shelf:
        assert map_nbytes(shelf) <= 2 << 20
        fill(shelf)
        assert map_nbytes(shelf) > 12 << 18
        assert is_full(shelf)
        assert not shelf.verify()


def test_one_transaction_is_longer_than_the_map(tmp_path: Path) -> None:
    with Shelf(tmp_path / "data.shelf") as shelf:
        with shelf.transaction():
            fill(shelf)
        assert is_full(shelf)
        shelf.compact()
        assert is_full(shelf)


def test_beside_reading(tmp_path: Path) -> None:
    """A state that is held in this process cannot stay where it is."""
    with Shelf(tmp_path / "data.shelf") as shelf:
        shelf["x"] = [1]
        with shelf.reading():
            assert shelf["x"][0] == 1
            with pytest.raises(OSError, match=r"reading\(\) or iter_chunks\(\) is active"):
                fill(shelf)
            assert shelf["x"][0] == 1
            assert shelf.keys() == ["x"]
        fill(shelf)
        assert is_full(shelf)


def test_beside_threads(tmp_path: Path) -> None:
    """Threads that read without a pause do not keep the map from growing."""
    stop, errors = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                assert (shelf["x"][...] == noise(0)).all()
        except BaseException as error:
            errors.append(error)

    with Shelf(tmp_path / "data.shelf", cache_nbytes=0, timeout=20) as shelf:
        shelf["x"] = noise(0)
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        fill(shelf)
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert is_full(shelf)


def answer(folder: str, connection: Connection) -> None:
    """Read with a short map what the other process has made longer."""
    environment._MAP_NBYTES = SMALL
    with Shelf(folder, "r") as shelf:
        connection.send(map_nbytes(shelf))
        connection.recv()
        connection.send(is_full(shelf))
        held: Iterator[np.ndarray] = shelf["n0"].iter_chunks(1 << 16)
        next(held)
        connection.send(True)
        connection.recv()
        try:
            shelf.keys()
            connection.send("no error")
        except OSError as error:
            connection.send(str(error))
        assert sum(len(block) for block in held) == (1 << 18) - (1 << 16)
        connection.send(len(shelf.keys()))


def test_another_process_lets_the_file_grow(tmp_path: Path) -> None:
    folder = str(tmp_path / "data.shelf")
    with Shelf(folder) as shelf:
        shelf["x"] = [1]
        ours, theirs = fork_context().Pipe()
        process = fork_context().Process(target=answer, args=(folder, theirs))
        process.start()
        assert ours.recv() <= 2 << 20
        fill(shelf)
        ours.send(None)
        assert ours.recv() is True
        assert ours.recv() is True
        for seed in range(12, 60):
            shelf[f"n{seed}"] = noise(seed)
        ours.send(None)
        assert "another process has let the file grow" in ours.recv()
        assert ours.recv() == 61
        process.join()
        assert process.exitcode == 0


def test_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is committed, and what was committed stays readable."""
    with Shelf(tmp_path / "data.shelf") as shelf:
        shelf["x"] = [1]
        monkeypatch.setattr(environment, "_map_sizes", lambda path, more_than: [more_than or SMALL])
        with pytest.raises(MemoryError, match=r"refuses.*; nothing was committed"):
            fill(shelf)
        names = shelf.keys()
        assert shelf["x"][0] == 1
        monkeypatch.undo()
        fill(shelf)
        assert is_full(shelf)
        assert not shelf.verify()
    assert 1 <= len(names) < 12
