"""Decoded chunks in memory: with any cache the values are the same, and memory is bounded."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from packhorse.disk import Shelf
from packhorse.disk.shelf.records import NO_CHUNK, TensorRecord
from packhorse.disk.shelf.versions import Known

MIB = 1 << 20
WIDTH = 64  # of 4 bytes: 256 rows in a chunk
N_ROWS = 64 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shelf of 16 MiB in 256 chunks, and one as large that was never written to."""
    path = tmp_path_factory.mktemp("shelf") / "data.shelf"
    with Shelf(path) as shelf:
        x = shelf.create("x", (N_ROWS, WIDTH), "int32", chunk_nbytes=1 << 16)
        x[...] = rows_of(np.arange(N_ROWS))
        shelf.create("zeros", (N_ROWS, WIDTH), "int32", chunk_nbytes=1 << 16)
        shelf.create("sparse", (1 << 45, WIDTH), "int32")[[1 << 40, 5]] = 1
    return path


def rows_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * 3 + np.arange(WIDTH)).astype(np.int32)


class Undo(Exception):
    """Ends a transaction."""


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cache_nbytes", [0, 1000, 1 * MIB, 64 * MIB])
def test_every_cache_gives_the_same(folder: Path, cache_nbytes: int) -> None:
    rng = np.random.default_rng(0)
    with Shelf(folder, cache_nbytes=cache_nbytes) as shelf:
        x, whole = shelf["x"], rows_of(np.arange(N_ROWS))
        for _ in range(20):
            ids = rng.integers(0, N_ROWS, 40)
            start, stop = sorted(rng.integers(0, N_ROWS, 2).tolist())
            assert np.array_equal(x[ids], whole[ids])
            assert np.array_equal(x[ids, 3:9], whole[ids, 3:9])
            assert np.array_equal(x[start:stop, -2], whole[start:stop, -2])
            assert np.array_equal(x[start], whole[start])
        assert np.array_equal(x, whole)
        assert np.array_equal(np.concatenate(list(x.iter_chunks(70_000))), whole)
        with suppress(Undo), shelf.transaction():
            for start in range(0, N_ROWS, 5000):
                x[start : start + 2] = -1
                whole[start : start + 2] = -1
            assert np.array_equal(x[::2500], whole[::2500])
            assert np.array_equal(x, whole)
            raise Undo


@pytest.mark.parametrize("cache_nbytes", [0, 1 * MIB])
@pytest.mark.parametrize("name", ["x", "zeros"])
def test_memory_while_reading(folder: Path, name: str, cache_nbytes: int) -> None:
    rng = np.random.default_rng(0)
    with Shelf(folder, "r", cache_nbytes=cache_nbytes, threads=1) as shelf:
        x = shelf[name]
        with at_most(cache_nbytes + 3 * MIB):
            for _ in range(200):
                x[rng.integers(0, N_ROWS, 5)]
                x[int(rng.integers(0, N_ROWS))]
        with at_most(cache_nbytes + 4 * MIB):  # 16 chunks at once
            x[np.arange(0, N_ROWS, 100)]
            x[::100, 3:5]
            x[:, 0]
        with at_most(cache_nbytes + 4 * MIB):
            for block in x.iter_chunks(MIB // 4):
                assert len(block) == 1024


def test_rows_of_a_tensor_of_very_many_chunks(folder: Path) -> None:
    with Shelf(folder, "r") as shelf, at_most(2 * MIB):
        x = shelf["sparse"]
        assert x[[5, 1 << 44, (1 << 40) - 1, 1 << 40, -1], 7].tolist() == [1, 0, 0, 1, 0]


def test_rows_that_change_are_read_anew(folder: Path) -> None:
    """The cache knows the places of rows that were gathered."""
    ids = np.arange(0, N_ROWS, 500)
    with Shelf(folder) as shelf, Shelf(folder, "r") as other:
        x = shelf["x"]
        for i in range(3):
            assert np.array_equal(x[ids], other["x"][ids])
            x[ids] = i
            assert (x[ids] == i).all()
            assert (other["x"][ids] == i).all()
            with shelf.transaction():
                x[ids[:9]] = -i
                assert (x[ids[:9]] == -i).all()
                assert (x[ids[9:]] == i).all()
            assert (other["x"][ids[:9]] == -i).all()
        shelf.tag("now")
        x[ids] = 5
        assert (shelf.at("now")["x"][ids[9:]] == 2).all()
        assert (x[ids] == 5).all()
        shelf.rollback("now")
        assert (other["x"][ids[9:]] == 2).all()
        assert (x[ids[9:]] == 2).all()
        x.resize(N_ROWS // 2)
        x.resize(N_ROWS)
        assert (x[ids] == 0).all(axis=1).tolist() == (ids >= N_ROWS // 2).tolist()
        shelf.rollback("now")
        shelf.untag("now")
        shelf["x"] = rows_of(np.arange(N_ROWS))  # another tensor
        assert np.array_equal(x[ids], rows_of(ids))
        assert np.array_equal(other["x"][ids], rows_of(ids))
        assert shelf.verify() == []


def test_pointers_of_old_states_are_forgotten() -> None:
    known = Known()
    with at_most(32 * MIB):
        for serial in range(40):  # a commit makes a new version of the tensor
            record = TensorRecord(1, "U8", (1 << 30,), (1,), serial=serial)
            known.pointers(record).update(dict.fromkeys(range(30_000), NO_CHUNK))
    assert len(known.pointers(record)) == 30_000
