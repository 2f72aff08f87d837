"""A process that has a shelf open forks: the child reads and cannot write, the parent goes on."""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import Shelf
from packhorse.errors import ChangedError


class Child:
    """A forked child that runs a function. It begins when the parent lets it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result, result = os.pipe()
        go, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._go)
            os.read(go, 1)
            try:
                answer = function()
            except BaseException:
                answer = traceback.format_exc()
            with os.fdopen(result, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
        os.close(result)
        os.close(go)

    def answer(self) -> Any:
        """What the function returned, or its traceback."""
        os.write(self._go, b"x")
        os.close(self._go)
        with os.fdopen(self._result, "rb") as pipe:
            content = pipe.read()
        assert os.waitpid(self._pid, 0)[1] == 0
        return pickle.loads(content)


def in_child(function: Callable[[], Any]) -> Any:
    return Child(function).answer()


def said(function: Callable[[], Any]) -> str:
    """The error of a function."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def noise(seed: int, nbytes: int = 1 << 18) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def shelf(tmp_path: Path) -> Any:
    with Shelf(tmp_path / "data.shelf", timeout=5) as made:
        made["x"] = np.arange(1000)
        yield made
        made["x"] = made["x"][...] + 1  # the parent still writes
        assert not made.verify()


def total(shelf: Shelf, name: str = "x") -> int:
    return int(shelf[name][...].sum())


def test_the_child_reads(shelf: Shelf) -> None:
    child = Child(lambda: (total(shelf), shelf.keys(), shelf.info().n_tensors, shelf.verify()))
    shelf["x"] = np.ones(10)
    shelf["y"] = np.ones(10)
    assert child.answer() == (10, ["x", "y"], 2, [])


def test_the_child_cannot_write(shelf: Shelf) -> None:
    def write() -> list[str]:
        x = shelf["x"]
        return [
            said(lambda: shelf.__setitem__("y", [1])), said(lambda: x.append([1])),
            said(lambda: x.__iadd__(1)), said(lambda: shelf.tag("t")),
            said(lambda: shelf.compact()), said(lambda: shelf.transaction().__enter__()),
        ]  # fmt: skip

    for line in in_child(write):
        assert line.startswith("PermissionError: ")
        assert "forked from the shelf's writer" in line
    assert shelf.keys() == ["x"]


def test_inside_a_transaction(shelf: Shelf) -> None:
    """The child sees what was committed, and cannot commit what its parent has begun."""

    def leave() -> str:
        context.__exit__(None, None, None)
        return "left"

    context = shelf.transaction()
    with context:
        shelf["x"] = np.zeros(3)
        shelf["y"] = [1]
        assert in_child(lambda: (total(shelf), shelf.keys())) == (499500, ["x"])
        assert "PermissionError" in in_child(lambda: said(leave))
        assert in_child(lambda: said(lambda: shelf.close())) == "no error"
        assert total(shelf) == 0
    assert (total(shelf), shelf.keys()) == (0, ["x", "y"])


def test_another_thread_is_in_a_transaction(shelf: Shelf) -> None:
    """A thread of the child may get the number of the parent's thread, but not its transaction."""
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        with shelf.transaction():
            shelf["x"] = np.zeros(3)
            begun.set()
            done.wait(60)

    def read() -> list[int]:
        found: list[int] = []
        for _ in range(5):
            thread = threading.Thread(target=lambda: found.append(total(shelf)))
            thread.start()
            thread.join()
        return [*found, total(shelf)]

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(60)
    assert in_child(read) == [499500] * 6
    done.set()
    writer.join()
    assert total(shelf) == 0


def test_inside_reading(shelf: Shelf) -> None:
    """The child reads the same state; while the child lives and afterwards, the parent keeps it."""
    shelf["big"] = noise(0)
    with shelf.reading():
        before = shelf["big"][...]
        child = Child(lambda: (total(shelf), shelf.tags(), said(lambda: shelf["big"][:10])))
        assert child.answer() == (499500, [], "no error")
        for seed in range(1, 20):  # pages that nobody reads are used again
            in_thread(lambda seed=seed: shelf.__setitem__("big", noise(seed)))
        assert shelf._session.folder.engine.readers(), "the parent is not in the table of readers"
        np.testing.assert_array_equal(shelf["big"][...], before)
    np.testing.assert_array_equal(shelf["big"][...], noise(19))


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_the_state_that_the_child_holds_is_gone(shelf: Shelf) -> None:
    with shelf.reading():
        child = Child(lambda: said(lambda: total(shelf)))
        in_thread(lambda: shelf.__setitem__("x", [1]))
        answer = child.answer()
        assert answer.startswith(ChangedError.__name__)
        assert "forked" in answer
        assert total(shelf) == 499500


def test_leaving_reading_in_the_child(shelf: Shelf) -> None:
    """The child leaves the block, and sees the newest state."""
    context = shelf.reading()
    context.__enter__()

    def leave() -> int:
        context.__exit__(None, None, None)
        return total(shelf)

    child = Child(leave)
    in_thread(lambda: shelf.__setitem__("x", [7]))
    assert child.answer() == 7
    assert total(shelf) == 499500
    context.__exit__(None, None, None)
    assert total(shelf) == 7


def test_the_parent_compacts_before_the_child_reads(shelf: Shelf) -> None:
    """The files get the numbers that their predecessors had on the disk."""
    child = Child(lambda: total(shelf))
    for _ in range(3):
        shelf.compact()
    shelf["x"] = [5]
    assert child.answer() == 5
    assert len(list(shelf.path.glob("*.mdb"))) == 1


def test_a_child_of_a_child(shelf: Shelf) -> None:
    def fork_again() -> Any:
        return total(shelf), in_child(lambda: (total(shelf), in_child(lambda: total(shelf))))

    assert in_child(fork_again) == (499500, (499500, 499500))
    assert in_child(lambda: in_child(lambda: total(shelf))) == 499500


def test_the_child_opens_the_shelf_itself(shelf: Shelf) -> None:
    def read() -> tuple[int, int]:
        with Shelf(shelf.path, "r") as mine:
            mine.close()
        with Shelf(shelf.path, "r") as mine:
            return total(mine), total(shelf)

    assert in_child(read) == (499500, 499500)


def test_the_places_of_readers_are_their_own(shelf: Shelf) -> None:
    """A child that holds a state keeps its pages, also after the shelf of its parent is closed in
    it, which would end all locks that the child has on the file."""
    shelf["big"] = noise(0)

    def read() -> bool:
        with Shelf(shelf.path, "r") as mine, mine.reading():
            before = mine["big"][...]
            shelf.close()
            with open(ready, "wb"):
                pass
            while not done.exists():
                time.sleep(0.01)
            return bool((mine["big"][...] == before).all())

    ready, done = shelf.path.with_suffix(".ready"), shelf.path.with_suffix(".done")
    child = Child(read)
    os.write(child._go, b"x")
    while not ready.exists():
        time.sleep(0.01)
    for seed in range(1, 20):
        shelf["big"] = noise(seed)
        shelf._session.folder.engine._next_check = 0.0  # look for dead readers each time
    done.touch()
    assert child.answer() is True


def test_many_forks_while_threads_work(shelf: Shelf) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(turn: Callable[[], Any]) -> None:
        try:
            while not stop.is_set():
                turn()
        except BaseException as error:
            errors.append(error)

    def write() -> None:
        with shelf.transaction():
            shelf["a"] = shelf["b"] = np.full(2000, next(numbers))

    def read() -> None:
        with shelf.reading():
            assert (shelf["a"][...] == shelf["b"][...]).all()

    numbers = iter(range(1_000_000))
    write()
    threads = [threading.Thread(target=work, args=(turn,)) for turn in (write, read, read)]
    for thread in threads:
        thread.start()
    answers = [in_child(read) for _ in range(10)]
    stop.set()
    for thread in threads:
        thread.join()
    assert answers == [None] * 10
    assert not errors


def test_forked_inside_a_progress_callback(shelf: Shelf) -> None:
    """The thread that forks is itself amid a read: the child is told, and the parent goes on."""
    answers = []

    def fork(done: int, n: int) -> None:
        if not answers:
            answers.append(in_child(lambda: said(lambda: total(shelf))))

    assert not shelf.verify(fork)
    assert "fork" in answers[0]
    assert total(shelf) == 499500
