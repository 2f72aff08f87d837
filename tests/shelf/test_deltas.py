"""Chunks that need others: rows coded against keyframes, and patches of few rows. Values stay
right however rows are changed, and what they take is what is said."""

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfTensor
from packhorse.disk.shelf.records import parse_chunk

WIDTH = 1500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data.shelf"


@pytest.fixture
def shelf(folder: Path) -> Iterator[Shelf]:
    with Shelf(folder) as opened:
        yield opened
        assert opened.verify() == []


def iterates(n_rows: int, seed: int = 0) -> np.ndarray:
    """Rows that change little, as those of a training run."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((n_rows, WIDTH)) * 1e-5
    steps[0] = rng.standard_normal(WIDTH)
    return np.cumsum(steps, axis=0).astype(np.float32)


def stored_chunks(folder: Path) -> list[tuple[int, bool, int]]:
    """What the stored chunks of a closed shelf need, whether they are patches, and their bytes."""
    (file,) = folder.glob("shelf-*.mdb")
    found = []
    with (
        lmdb.open(str(file), subdir=False, readonly=True, lock=False, max_dbs=6) as env,
        env.begin() as txn,
    ):
        for key, value in txn.cursor(env.open_db(b"chunks", txn, create=False)):
            chunk = parse_chunk(int.from_bytes(key, "big"), value)
            found.append((chunk.base, chunk.places is not None, len(chunk.frame)))
    return found


def kinds_of_chunks(folder: Path) -> tuple[int, int, int]:
    """How many stored chunks are whole, deltas and patches."""
    found = stored_chunks(folder)
    patches = sum(is_patch for _, is_patch, _ in found)
    deltas = sum(base > 0 for base, _, _ in found) - patches
    return len(found) - deltas - patches, deltas, patches


def stored_nbytes(folder: Path) -> int:
    """The bytes of the frames of all stored chunks."""
    return sum(nbytes for _, _, nbytes in stored_chunks(folder))


def resized(array: np.ndarray, n_rows: int) -> np.ndarray:
    more = np.zeros((max(0, n_rows - len(array)), *array.shape[1:]), array.dtype)
    return np.concatenate([array[:n_rows], more])


# Deltas.


@pytest.mark.parametrize("every", [1, 2, 16, 100])
def test_keyframes_come_as_often_as_asked(folder: Path, every: int) -> None:
    rows = iterates(50)
    with Shelf(folder) as shelf:
        x = shelf.create("x", (0, WIDTH), "float32", base="previous", keyframe_every=every)
        assert x.chunks == (1, WIDTH)
        for row in rows[:9]:
            x.append(row)
        x.append(rows[9:])
        assert np.array_equal(x, rows)
        packed = x.packed_nbytes
        shelf["plain"] = rows
        assert packed < shelf["plain"].packed_nbytes * 0.8 or every == 1
        del shelf["plain"]
        assert shelf.verify() == []
    n_keyframes = -(-50 // every)
    assert kinds_of_chunks(folder) == (n_keyframes, 50 - n_keyframes, 0)
    assert stored_nbytes(folder) == packed


def test_rows_that_are_not_alike_are_coded_for_themselves(folder: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (20, WIDTH)).astype(np.uint8)
    with Shelf(folder) as shelf:
        shelf.create("x", rows.shape, "uint8", base="previous")[...] = rows
        assert np.array_equal(shelf["x"], rows)
    assert kinds_of_chunks(folder) == (20, 0, 0)


def test_a_keyframe_that_is_changed_stays_for_the_rows_that_need_it(folder: Path) -> None:
    rows = iterates(12)
    with Shelf(folder) as shelf:
        x = shelf.create("x", (0, WIDTH), "float32", base="previous", keyframe_every=4)
        x.append(rows)
        x[4] = rows[4] = 7
        assert np.array_equal(x, rows)
        assert shelf.verify() == []
    assert kinds_of_chunks(folder) == (4, 9, 0)
    with Shelf(folder) as shelf:
        x = shelf["x"]
        x[0], x[5:8] = iterates(1, 2)[0], rows[5:8] + 1  # the last rows that need the old one
        rows[0], rows[5:8] = iterates(1, 2)[0], rows[5:8] + 1
        assert np.array_equal(x, rows)
        with shelf.transaction():
            x[8] = rows[8] = 5
            x[9] = rows[9] = rows[9] + 1
            x[8, 3] = rows[8, 3] = 6
            x[10, :7] = rows[10, :7] = 2
        assert np.array_equal(x, rows)
        x.resize(9)
        x.resize(1)
        x.append(rows[1:])
        assert np.array_equal(x, rows)
        packed = x.packed_nbytes
    assert stored_nbytes(folder) >= packed


@pytest.mark.parametrize("every", [2, 16])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_changed_in_any_order(shelf: Shelf, every: int, seed: int) -> None:
    rng = random.Random(seed)
    x = shelf.create("x", (0, WIDTH), "float32", base="previous", keyframe_every=every)
    rows = np.zeros((0, WIDTH), np.float32)
    x.append(iterates(40))
    rows, tags = iterates(40), {}
    for step in range(40):
        n = len(rows)
        kind = rng.choice(["row", "rows", "part", "append", "resize", "add", "tag", "rollback"])
        with shelf.transaction() if kind not in ("tag", "rollback") else shelf.reading():
            if kind == "row" and n:
                at = rng.randrange(n)
                x[at] = rows[at] = rows[at - at % every] + np.float32(1e-3)
            elif kind == "rows":
                ids = sorted(rng.sample(range(n), min(n, 5)))
                x[ids] = rows[ids] = iterates(5, step)[: len(ids)]
            elif kind == "part" and n:
                at = rng.randrange(n)
                x[at:, 5:9] = rows[at:, 5:9] = step
            elif kind == "append":
                more = iterates(rng.randint(1, 40), step)
                x.append(more)
                rows = np.concatenate([rows, more])
            elif kind == "resize":
                size = rng.randint(0, n + 3)
                x.resize(size)
                rows = resized(rows, size)
            elif kind == "add":
                x += 1
                rows = rows + np.float32(1)
        if kind == "tag":
            tags[f"{step}"] = rows.copy()
            shelf.tag(f"{step}")
        elif kind == "rollback" and tags:
            name = rng.choice(sorted(tags))
            shelf.rollback(name)
            rows = tags[name].copy()
        assert np.array_equal(x, rows), kind
    assert shelf.verify() == []
    for name, expected in tags.items():
        assert np.array_equal(shelf.at(name)["x"], expected)
        shelf.untag(name)
        assert shelf.verify() == []


def test_many_keyframes_in_one_statement(shelf: Shelf) -> None:
    """Rows and their keyframes are packed together."""
    rows = iterates(300)
    with shelf.transaction():
        x = shelf.create("x", rows.shape, "float32", base="previous", keyframe_every=2)
        x[:, :700] = rows[:, :700]
        x[...] = rows
        x[::3] = rows[::3]
        assert np.array_equal(x, rows)
    assert np.array_equal(x, rows)
    packed = x.packed_nbytes
    x[...] = rows
    assert x.packed_nbytes == packed


# Patches.


def patched(shelf: Shelf, n_rows: int = 4000) -> tuple[ShelfTensor, np.ndarray]:
    """A tensor of noise, in chunks of 1024 rows."""
    array = np.random.default_rng(0).integers(0, 256, (n_rows, 64)).astype(np.uint8)
    x = shelf.create("x", array.shape, "uint8", chunk_nbytes=1 << 16)
    x[...] = array
    assert x.chunks == (1024, 64)
    return x, array


def test_few_rows_are_a_patch(folder: Path) -> None:
    with Shelf(folder) as shelf:
        x, array = patched(shelf)
        before = x.packed_nbytes
        for at in (5, 5, 9, 2000):
            x[at] = array[at] = at % 256
            assert np.array_equal(x, array)
        assert before < x.packed_nbytes < before + 1500
        assert shelf.info().packed_nbytes == x.packed_nbytes
        assert shelf.verify() == []
        packed = x.packed_nbytes
    assert kinds_of_chunks(folder) == (4, 0, 2)
    assert stored_nbytes(folder) == packed
    with Shelf(folder) as shelf:
        x = shelf["x"]
        x[10:290] = array[10:290] = 1  # more than a quarter
        x[1999:2002, 3] = array[1999:2002, 3] = 2  # parts of rows
        assert np.array_equal(x, array)
        packed = x.packed_nbytes
    assert kinds_of_chunks(folder) == (4, 0, 0)
    assert stored_nbytes(folder) == packed


def test_patches_grow_until_a_quarter_of_the_chunk(folder: Path) -> None:
    with Shelf(folder) as shelf:
        x, array = patched(shelf, 1024)
        ids = random.Random(0).sample(range(1024), 300)
        for at in ids[:256]:
            x[at] = array[at] = at % 7
        assert np.array_equal(x, array)
    assert kinds_of_chunks(folder) == (1, 0, 1)
    with Shelf(folder) as shelf:
        shelf["x"][ids[256]] = array[ids[256]] = 1
    assert kinds_of_chunks(folder) == (1, 0, 0)
    with Shelf(folder) as shelf:
        x = shelf["x"]
        with shelf.transaction():
            for at in ids:
                x[at] = array[at] = at % 5
            assert np.array_equal(x, array)
        assert np.array_equal(x, array)
        assert shelf.verify() == []
    assert kinds_of_chunks(folder) == (1, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_patched_in_any_order(shelf: Shelf, seed: int) -> None:
    rng = random.Random(seed)
    x, array = patched(shelf, 2500)
    tags: dict[str, np.ndarray] = {}
    for step in range(60):
        ids = sorted(rng.sample(range(len(array)), rng.choice([1, 1, 2, 30, 300])))
        with shelf.transaction():
            for _ in range(rng.choice([1, 1, 1, 5])):
                x[ids] = array[ids] = step
                first = rng.choice(ids)
                x[first] = array[first] = 200 + step % 50
            if rng.random() < 0.2:
                x[first, 3:] = array[first, 3:] = 9
            assert np.array_equal(x, array)
        kind = rng.random()
        if kind < 0.15:
            shelf.tag(f"{step}")
            tags[f"{step}"] = array.copy()
        elif kind < 0.25 and tags:
            name = rng.choice(sorted(tags))
            shelf.rollback(name)
            array = tags[name].copy()
        elif kind < 0.35 and tags:
            name = rng.choice(sorted(tags))
            shelf.untag(name)
            del tags[name]
        elif kind < 0.5:
            size = rng.randint(1000, 2500)
            x.resize(size)
            more = np.ones((rng.randint(0, 200), 64), np.uint8)
            x.append(more)
            array = np.concatenate([resized(array, size), more])
        elif kind < 0.6:
            shelf.rename("x", "y")
            shelf.rename("y", "x")
        assert np.array_equal(x, array)
    assert shelf.verify() == []
    for name, expected in tags.items():
        assert np.array_equal(shelf.at(name)["x"], expected)
    for name in tags:
        shelf.untag(name)
    assert shelf.verify() == []
    x[...] = array
    packed = x.packed_nbytes
    shelf.compact()
    assert shelf.info().file_nbytes < packed + (1 << 17)


def test_a_chunk_that_is_short_or_zero_is_patched(shelf: Shelf) -> None:
    x = shelf.create("x", (500, 64), "uint8", chunk_nbytes=1 << 16)
    x[3] = 1  # of a chunk that was never written
    array = np.zeros((500, 64), np.uint8)
    array[3] = 1
    x[4] = array[4] = 2
    x.resize(900)
    array = resized(array, 900)
    x[880] = array[880] = 3  # beyond what is stored
    assert np.array_equal(x, array)
    x[700] = array[700] = 4
    assert np.array_equal(x, array)
    x.resize(881)
    x.resize(1000)
    assert np.array_equal(x[:881], array[:881])
    assert not x[881:].any()
