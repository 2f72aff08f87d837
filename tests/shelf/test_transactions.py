"""Transactions: one commit over many writes or none, what their thread sees and what others see,
and those that are larger than the memory for packed chunks."""

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from packhorse.disk import Shelf
from packhorse.errors import CorruptionError

MIB = 1 << 20


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf", timeout=20) as opened:
        opened["x"], opened["y"] = np.arange(10), np.ones((50, 20), np.float32)
        yield opened
        assert opened.verify() == []


class Undo(Exception):
    """Ends a transaction."""


def content(shelf: Shelf) -> dict[str, list[object]]:
    return {name: shelf[name].numpy().tolist() for name in shelf}


def test_one_commit_over_many_writes(shelf: Shelf) -> None:
    n_commits = shelf.info().n_commits
    with Shelf(shelf.path, "r") as other, shelf.transaction():
        before = content(other)
        shelf["x"][3:5] = 0
        shelf["y"].append(np.zeros((2, 20)))
        shelf["z"] = np.ones(3)
        shelf["z"] *= 5
        shelf.rename("z", "a")
        shelf.create("b", (3,), "u1")[1] = 1
        shelf.save("s", {"w": np.ones(2)})
        del shelf["x"]
        shelf["x"] = np.ones(2)
        assert content(other) == before
        del shelf["s"]
        mine = content(shelf)
        assert list(mine) == ["a", "b", "x", "y"]
        assert (mine["a"], mine["b"], mine["x"]) == ([5, 5, 5], [0, 1, 0], [1, 1])
        assert shelf.info().n_commits == n_commits
    assert content(shelf) == mine
    assert shelf.info().n_commits == n_commits + 1


def test_a_transaction_without_writes_is_no_commit(shelf: Shelf) -> None:
    n_commits = shelf.info().n_commits
    with shelf.transaction():
        assert shelf["x"][3] == 3
        shelf["x"].append(np.zeros(0, int))
        shelf["x"].resize(10)
    assert shelf.info().n_commits == n_commits


@pytest.mark.parametrize("error", [Undo, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_is_committed_after_an_error(shelf: Shelf, error: type[BaseException]) -> None:
    before, info = content(shelf), shelf.info()
    with pytest.raises(error), shelf.transaction():  # noqa: PT012
        shelf["x"] += 1
        shelf["y"][7] = 0
        shelf["new"] = np.ones(5)
        del shelf["y"]
        raise error
    assert content(shelf) == before
    assert shelf.info() == info
    shelf["new"] = np.full(7, 7, np.uint8)  # has the number of the tensor that never was
    assert shelf["new"].numpy().tolist() == [7] * 7


def test_a_transaction_inside_another_is_part_of_it(shelf: Shelf) -> None:
    n_commits = shelf.info().n_commits
    with shelf.transaction():
        shelf["x"][0] = 1
        with shelf.transaction():
            shelf["x"][1] = 2
            with shelf.transaction():
                shelf["x"][2] = 3
    assert shelf["x"][:3].tolist() == [1, 2, 3]
    assert shelf.info().n_commits == n_commits + 1
    with suppress(Undo), shelf.transaction():
        with shelf.transaction():
            shelf["x"][0] = 9
        raise Undo
    assert shelf["x"][0] == 1


def test_an_inner_transaction_that_fails_dooms_the_outer(shelf: Shelf) -> None:
    before = content(shelf)
    message = (
        "data.shelf: nothing of this transaction was committed, because a part of it had failed: "
        "Undo: inner"
    )
    with pytest.raises(RuntimeError, match=message), shelf.transaction():  # noqa: PT012
        shelf["x"][0] = 1
        with suppress(Undo), shelf.transaction():
            shelf["x"][1] = 2
            raise Undo("inner")
        assert shelf["x"][:2].tolist() == [1, 2]
        shelf["x"][2] = 3
    assert content(shelf) == before
    shelf["x"][2] = 3  # later ones are as good as ever
    with shelf.transaction():
        with suppress(Undo), shelf.transaction():
            raise Undo  # wrote nothing
        shelf["x"][3] = 4
    assert shelf["x"][:4].tolist() == [0, 1, 3, 4]


def test_calls_that_are_refused_doom_nothing(shelf: Shelf) -> None:
    with shelf.transaction():
        for wrong in (
            lambda: shelf["x"].__setitem__(99, 1),
            lambda: shelf["x"].__setitem__(slice(2), np.ones(3)),
            lambda: shelf["x"].append(np.ones((2, 2), int)),
            lambda: shelf["x"].append([0.5]),
            lambda: shelf["x"].resize(-1),
            lambda: shelf["x"].__iadd__(0.5),
            lambda: shelf["x"].__iadd__(np.ones(3, int)),
            lambda: shelf["x"].apply(lambda block: block[1:]),
            lambda: shelf.create("x", 3, "u1"),
            lambda: shelf.create("z", -3, "u1"),
            lambda: shelf.rename("x", "y"),
            lambda: shelf.rename("z", "a"),
            lambda: shelf.save("s", {"w": {1, 2}}),
            lambda: shelf.__setitem__("s", "text"),
            lambda: shelf.__delitem__("z"),
            lambda: shelf["z"],
            lambda: shelf.tag("t"),
        ):
            with pytest.raises((KeyError, ValueError, TypeError, IndexError, RuntimeError)):
                wrong()
        shelf["x"][0] = 5
    assert shelf["x"].numpy().tolist() == [5, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_reading_inside_and_around_transactions(shelf: Shelf) -> None:
    x = shelf["x"]
    with shelf.transaction(), shelf.reading():
        x[0] = 1
        assert x[0] == 1  # the thread sees what it writes
    with shelf.reading() as same:
        assert same is shelf
        assert x[0] == 1
        x[0] = 2
        assert x[0] == 1
        with shelf.transaction():
            x[1] = 7
            assert x[:2].tolist() == [2, 7]  # what it goes on from
            x += 1
        assert x[:2].tolist() == [1, 1]
        x.append([5])
        x += np.ones(11, int)  # as long as it is now
        assert len(x) == 10
        with x.reading():
            assert x[0] == 1
    assert x.numpy().tolist() == [4, 9, 4, 5, 6, 7, 8, 9, 10, 11, 6]


# Threads.


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_other_threads_see_the_state_before(shelf: Shelf) -> None:
    seen: list[object] = []

    def look() -> None:
        seen.append((shelf["x"][0], "z" in shelf, shelf.keys(), shelf.info().n_commits))

    look()
    with shelf.transaction():
        shelf["x"][0] = 5
        shelf["z"] = 1
        in_thread(look).join()
    look()
    assert seen[0] == seen[1]
    assert seen[2] == (5, True, ["x", "y", "z"], seen[0][3] + 1)  # type: ignore[index]


def test_threads_that_write_take_turns(shelf: Shelf) -> None:
    shelf["n"] = np.zeros(4, np.int64)

    def count() -> None:
        for _ in range(25):
            with shelf.transaction():
                shelf["n"][...] = shelf["n"][...] + 1
                assert len(set(shelf["n"].numpy().tolist())) == 1

    def add() -> None:
        for _ in range(25):
            n = shelf["n"]
            n += 1
            shelf["n"].apply(lambda block: block)

    def tag() -> None:
        for i in range(10):
            shelf.tag(f"{threading.get_ident()} {i}")

    for thread in [in_thread(work) for work in (count, add, count, tag)]:
        thread.join()
    assert shelf["n"].numpy().tolist() == [75] * 4
    assert len(shelf.tags()) == 10


def test_a_thread_waits_for_so_long(tmp_path: Path) -> None:
    with Shelf(tmp_path / "data.shelf", timeout=0.05) as shelf:
        shelf["x"] = np.zeros(3)
        errors: list[str] = []

        def write() -> None:
            for work in (
                lambda: shelf["x"].__setitem__(0, 1),
                lambda: shelf.tag("t"),
                lambda: shelf.compact(),
                lambda: shelf.transaction().__enter__(),
            ):
                try:
                    work()
                except TimeoutError as error:
                    errors.append(str(error))

        with shelf.transaction():
            shelf["x"][1] = 1
            in_thread(write).join()
        message = (
            f"{shelf.path}: a transaction of another thread goes on for more than 0.05 s; end it, "
            "or open the shelf with a longer timeout"
        )
        assert errors == [message] * 4
        in_thread(lambda: shelf["x"].__setitem__(0, 1)).join()
        assert shelf["x"].numpy().tolist() == [1, 1, 0]


def test_a_shelf_is_closed_by_another_thread(tmp_path: Path) -> None:
    """It waits for the transaction, as every write of another thread does."""
    shelf = Shelf(tmp_path / "closed.shelf")
    shelf["x"] = np.zeros(4)
    with shelf.transaction():
        closing = in_thread(shelf.close)
        shelf["x"][0] = 1
        closing.join(0.1)
        assert not shelf.is_closed
        with pytest.raises(RuntimeError, match="closed inside a transaction"):
            shelf.close()
    closing.join(20)
    assert shelf.is_closed
    with Shelf(shelf.path, "r") as again:
        assert again["x"][0] == 1


# Transactions of more than 64 MiB of packed chunks, which go to the file before the commit.


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (90, MIB), np.uint8)


def test_a_large_transaction_is_committed(shelf: Shelf, noise: np.ndarray) -> None:
    shelf["x"] = noise[:1]
    with Shelf(shelf.path, "r") as other, shelf.transaction():
        big = shelf.create("big", (0, MIB), "uint8")
        for start in range(0, 80, 20):
            big.append(noise[start : start + 20])
        assert shelf.info().file_nbytes > 64 * MIB  # some of it is in the file already
        assert "big" not in other
        assert other.verify() == []
        big[5] = noise[80]
        big[70:80] = noise[80:90]
        big[:, 7] = 3
        assert np.array_equal(big[5, 8:], noise[80, 8:])
        big.resize(75)
        shelf["gone"] = noise[:10]
        del shelf["gone"]
        shelf["x"][0] = noise[5]
        assert other["x"][0, 0] == noise[0, 0]
    expected = noise[:75].copy()
    expected[5], expected[70:75] = noise[80], noise[80:85]
    expected[:, 7] = 3
    assert np.array_equal(shelf["big"], expected)
    assert np.array_equal(shelf["x"][0], noise[5])
    assert shelf["big"].packed_nbytes < 76 * MIB
    assert shelf.verify() == []
    shelf.compact()
    assert shelf.info().file_nbytes < 78 * MIB


def test_a_large_transaction_is_dropped(shelf: Shelf, noise: np.ndarray) -> None:
    before = content(shelf)
    with suppress(Undo), shelf.transaction():
        shelf["big"] = noise
        shelf["x"] += 1
        assert shelf.info().file_nbytes > 64 * MIB
        raise Undo
    assert content(shelf) == before
    assert shelf.verify() == []
    info = shelf.info()
    assert info.file_nbytes - info.free_nbytes < MIB
    with shelf.transaction():  # its chunks get numbers that the dropped ones had
        shelf["small"] = noise[3]
        shelf["x"][0] = 9
    assert np.array_equal(shelf["small"], noise[3])
    with Shelf(shelf.path, "r") as other:
        assert np.array_equal(other["small"], noise[3])


# Errors inside.


def test_a_damaged_chunk_is_named_inside_a_transaction(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 1000)).astype(np.uint8)
    with Shelf(tmp_path / "data.shelf") as shelf:
        shelf.create("x", noise.shape, "uint8", chunk_nbytes=4096)[...] = noise
    (file,) = (tmp_path / "data.shelf").glob("shelf-*.mdb")
    data = bytearray(file.read_bytes())
    at = data.index(noise[101, 100:900].tobytes())
    data[at + 50] ^= 4
    file.write_bytes(data)
    with Shelf(tmp_path / "data.shelf") as shelf:
        x = shelf["x"]
        chunk = r"data.shelf: 'x': chunk 25 \(rows 100 to 103\)"
        with pytest.raises(CorruptionError, match=chunk):
            x[101]
        with shelf.transaction():
            with pytest.raises(CorruptionError, match=chunk):
                x[101]
            with pytest.raises(CorruptionError, match=chunk):
                x[[3, 103]]
            x[104:] = 0
            with pytest.raises(CorruptionError, match=chunk):
                x[...]
            with pytest.raises(CorruptionError, match=chunk):
                x[100, 3] = 5  # needs the rest of the chunk
        assert np.array_equal(x[:100], noise[:100])
        assert not x[104:].any()
        x[100:104] = noise[100:104]
        assert np.array_equal(x[:104], noise[:104])
        assert shelf.verify() == []


def test_random_transactions(shelf: Shelf) -> None:
    """Nested, failing and joined ones, against a list of what was committed."""
    rng = random.Random(0)
    expected = shelf["x"].numpy().tolist()

    def nest(depth: int, now: list[int]) -> list[int]:
        """Writes, and returns what should be there then."""
        with shelf.transaction():
            for _ in range(rng.randint(0, 3)):
                now = list(now)
                if rng.random() < 0.3 and depth < 3:
                    now = nest(depth + 1, now)
                elif rng.random() < 0.5:
                    at, value = rng.randrange(len(now)), rng.randrange(99)
                    shelf["x"][at] = now[at] = value
                else:
                    shelf["x"].append([7])
                    now.append(7)
                assert shelf["x"].numpy().tolist() == now
            if rng.random() < 0.15:
                raise Undo
        return now

    for _ in range(80):
        with suppress(Undo):
            expected = nest(0, expected)
        assert shelf["x"].numpy().tolist() == expected
