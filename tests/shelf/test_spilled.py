"""A transaction that is larger than its memory writes chunks ahead of its commit. If the commit
never comes, they are deleted, and nothing else."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packhorse.disk import Shelf
from packhorse.disk.shelf import changes, new_chunks

N_ROWS = 40


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_chunks, "_MAX_PACKED_NBYTES", 1 << 18)
    monkeypatch.setattr(changes, "_MAX_DIRTY_NBYTES", 1 << 18)


def noise(seed: int, n_rows: int = N_ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n_rows, 1 << 15), np.uint8)


def make(folder: Path) -> None:
    with Shelf(folder) as shelf:
        for name, base in (("x", None), ("deltas", "previous")):
            shelf.create(name, (N_ROWS, 1 << 15), "uint8", base=base, keyframe_every=4)
            shelf[name][...] = noise(0)
        shelf.tag("tag")


def n_stored(folder: Path) -> int:
    """How many chunks are in the file."""
    with Shelf(folder, "r") as shelf, shelf._session.state() as state:
        return len(list(state.stored()))


def write_much(shelf: Shelf) -> None:
    """Overwrite all, some twice, beyond the memory; the rows of `deltas` are near each other."""
    shelf["x"][...] = noise(1)
    shelf["x"][::3] = noise(2)[::3]
    deltas = noise(3, 1) + np.arange(N_ROWS, dtype=np.uint8)[:, None]
    for _ in range(2):
        shelf["deltas"][...] = deltas
    shelf["deltas"][1] = 0
    shelf["new"] = noise(4)
    del shelf["new"]
    shelf["new"] = noise(5, 20)


def expected() -> dict[str, np.ndarray]:
    x = noise(1)
    x[::3] = noise(2)[::3]
    deltas = noise(3, 1) + np.arange(N_ROWS, dtype=np.uint8)[:, None]
    deltas[1] = 0
    return {"deltas": deltas, "new": noise(5, 20), "x": x}


def check_before(shelf: Shelf) -> None:
    assert shelf.keys() == ["deltas", "x"]
    for name in shelf:
        np.testing.assert_array_equal(shelf[name][...], noise(0))
    assert not shelf.verify()


def check_after(shelf: Shelf) -> None:
    assert shelf.keys() == ["deltas", "new", "x"]
    for name, array in expected().items():
        np.testing.assert_array_equal(shelf[name][...], array)
    np.testing.assert_array_equal(shelf.at("tag")["x"][...], noise(0))
    assert not shelf.verify()


def test_committed(tmp_path: Path) -> None:
    make(tmp_path)
    n_before = n_stored(tmp_path)
    with Shelf(tmp_path, cache_nbytes=1 << 20) as shelf, Shelf(tmp_path, "r") as reader:
        with shelf.transaction():
            write_much(shelf)
            assert n_stored(tmp_path) > n_before + 20
            check_before(reader)
            for name, array in expected().items():
                np.testing.assert_array_equal(shelf[name][...], array)
        check_after(shelf)
        check_after(reader)
        shelf.rollback("tag")
        shelf.untag("tag")
        check_before(shelf)
    assert n_stored(tmp_path) == n_before


def fail_in_transaction(shelf: Shelf) -> None:
    n_before = n_stored(shelf.path)
    with shelf.transaction():
        write_much(shelf)
        assert n_stored(shelf.path) > n_before + 20
        1 / 0  # noqa: B018


def test_it_fails(tmp_path: Path) -> None:
    make(tmp_path)
    n_before = n_stored(tmp_path)
    with Shelf(tmp_path) as shelf:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                fail_in_transaction(shelf)
            assert n_stored(tmp_path) == n_before
            check_before(shelf)
        write_much(shelf)
        check_after(shelf)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_the_writer_is_killed(tmp_path: Path, mode: str) -> None:
    make(tmp_path)
    n_before = n_stored(tmp_path)
    child = os.fork()
    if not child:
        with Shelf(tmp_path) as shelf, shelf.transaction():
            write_much(shelf)
            kill_me()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert n_stored(tmp_path) > n_before + 20
    with Shelf(tmp_path, mode) as shelf:
        check_before(shelf)
    with Shelf(tmp_path) as shelf:
        assert n_stored(tmp_path) == n_before
        write_much(shelf)
        check_after(shelf)


def refuse(*_: object) -> None:
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("reopened", [False, True])
def test_what_is_left_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    """The disk is full when a transaction ends, and perhaps when the shelf is opened again. The
    next commit deletes what is left, though it uses the same numbers."""
    make(tmp_path)
    n_before = n_stored(tmp_path)
    shelf = Shelf(tmp_path)

    def fail(write: Callable[..., object] = shelf._session.folder.write) -> None:
        with shelf.transaction():
            write_much(shelf)
            monkeypatch.setattr(type(shelf._session.folder), "write", refuse)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        fail()
    if reopened:
        shelf.close()
        shelf = Shelf(tmp_path)
    monkeypatch.undo()
    assert n_stored(tmp_path) > n_before + 20
    with shelf:
        check_before(shelf)
        shelf["y"] = noise(6, 3)
        assert not shelf.verify()
        del shelf["y"]
    assert n_stored(tmp_path) == n_before
