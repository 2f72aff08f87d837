"""The shelf as a dict of tensors: names, handles, several objects, pickles, options."""

import copy
import gc
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import fork_context

from packhorse.disk import Shelf
from packhorse.errors import ClosedError


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        yield opened
        if not opened.is_closed:
            assert opened.verify() == []


def test_names(shelf: Shelf) -> None:
    names = ["b", "a", "a/b", "a b", "A", "é", "日本", "a" * 400, "ab", "a!", "\x01", "\U0001f40e"]
    assert (len(shelf), list(shelf), shelf.keys()) == (0, [], [])
    for i, name in enumerate(names):
        shelf[name] = np.array([i])
        assert name in shelf
    expected = sorted(names, key=str.encode)
    assert list(shelf) == shelf.keys() == expected
    assert len(shelf) == len(names)
    for prefix in ("a", "a/", "b", "zz", "", "é", "日", "\x01"):
        listed = [name for name in expected if name.startswith(prefix)]
        assert shelf.keys(prefix) == listed
    with shelf.transaction():
        shelf["a0"], shelf["zz"] = 1, 1
        del shelf["a"]
        assert shelf.keys("a") == ["a b", "a!", "a/b", "a0", "a" * 400, "ab"]
        assert shelf.keys("z") == ["zz"]
        del shelf["a0"], shelf["zz"]
        shelf["a"] = np.array([1])
    for i, name in enumerate(names):
        assert shelf[name][0] == i
        del shelf[name]
        assert name not in shelf
    assert shelf.keys() == []


def test_a_handle_stands_for_a_name(shelf: Shelf) -> None:
    shelf["x"] = np.arange(3)
    x = shelf["x"]
    shelf["x"] = np.ones((2, 5), np.uint8)
    assert (x.shape, x.dtype, x.nbytes) == ((2, 5), np.uint8, 10)
    shelf.rename("x", "y")
    with pytest.raises(KeyError, match="there is no tensor 'x'"):
        x[0]
    with pytest.raises(KeyError, match="there is no tensor 'x'"):
        x[0] = 1
    assert repr(x) == "ShelfTensor('x', not there)"
    assert repr(shelf["y"]) == "ShelfTensor('y', U8, (2, 5))"
    shelf.save("x", {})
    with pytest.raises(TypeError, match="'x' is a nested state"):
        x.append([1])
    shelf["x"] = 5
    assert x.shape == ()
    x[...] = 6
    assert int(x.numpy()) == 6
    del shelf["x"]
    for use in (lambda: x.shape, lambda: x.append([1]), lambda: x.resize(1), lambda: list(x)):
        with pytest.raises(KeyError, match="there is no tensor 'x'"):
            use()


def test_values_of_every_kind(shelf: Shelf) -> None:
    values: dict[str, Any] = {
        "number": 5, "float": 2.5, "bool": True, "list": [[1, 2], [3, 4]], "tuple": (1.5, 2),
        "scalar": np.float32(3), "array": np.arange(6).reshape(2, 3), "0-d": np.array(7),
        "strided": np.arange(20)[::3], "fortran": np.asfortranarray(np.ones((5, 4))),
        "big-endian": np.arange(4, dtype=">f8"), "memmap": np.arange(5), "matrix": np.eye(3)[None],
        "empty": [], "unmasked": np.ma.masked_array([1, 2]),
    }  # fmt: skip
    for name, value in values.items():
        shelf[name] = value
        expected = np.asarray(value)
        found = shelf[name].numpy()
        assert found.dtype == expected.dtype.newbyteorder("=")
        assert np.array_equal(found, expected)
        assert shelf[name].dtype == found.dtype


def test_a_tensor_of_a_shelf_is_copied(shelf: Shelf, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((5000, 100)).astype(np.float32)
    shelf["x"] = array
    shelf["copy"], shelf["x"] = shelf["x"], shelf["x"]
    shelf["scalar"] = np.float32(3)
    shelf["other scalar"] = shelf["scalar"]
    shelf["none"] = np.ones((0, 5))
    shelf["also none"] = shelf["none"]
    with Shelf(tmp_path / "other.shelf") as other:
        other["x"] = shelf["x"]
        assert np.array_equal(other["x"], array)
        other["x"] += 1
        shelf["x"] = other["x"]
    assert np.array_equal(shelf["x"], array + 1)
    assert np.array_equal(shelf["copy"], array)
    assert float(shelf["other scalar"].numpy()) == 3
    assert shelf["also none"].shape == (0, 5)
    shelf["x"] = shelf["x"].as_framework("np")
    with shelf.transaction():
        shelf["x"][0] = 5
        shelf["copy"] = shelf["x"]
    assert (shelf["copy"][0] == 5).all()
    shelf["copy"][:] = shelf["x"]
    shelf["copy"][:3] = shelf["x"][5:8]
    assert np.array_equal(shelf["copy"][:3], array[5:8] + 1)


def test_info_says_what_there_is(shelf: Shelf) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3000, 100)).astype(np.uint8)
    shelf["noise"], shelf["zeros"] = noise, np.zeros((1000, 50))
    shelf.create("deltas", (0, 30), "bfloat16", base="previous").append(np.ones((4, 30)))
    shelf.save("state", {"w": noise})
    info = shelf.info()
    assert info.path == shelf.path
    assert info.n_tensors == 3
    assert [tensor.name for tensor in info.tensors] == ["deltas", "noise", "zeros"]
    for tensor in info.tensors:
        x = shelf[tensor.name]
        assert (tensor.shape, tensor.chunks, tensor.nbytes) == (x.shape, x.chunks, x.nbytes)
        assert (tensor.packed_nbytes, tensor.ratio) == (x.packed_nbytes, x.ratio)
    assert [tensor.base for tensor in info.tensors] == ["previous", None, None]
    assert [tensor.dtype for tensor in info.tensors] == ["BF16", "U8", "F64"]
    assert info.states == ["state"]
    assert info.nbytes == sum(tensor.nbytes for tensor in info.tensors) + noise.nbytes
    assert info.packed_nbytes > 2 * noise.nbytes
    assert info.packed_nbytes < info.file_nbytes - info.free_nbytes
    assert info.n_commits == 5
    assert (info.tags, info.readers) == ([], [])
    assert shelf["noise"].ratio == pytest.approx(1, abs=0.02)
    assert shelf["zeros"].ratio > 100
    sizes: list[tuple[int, int]] = []
    assert shelf.verify(lambda done, total: sizes.append((done, total))) == []
    assert sizes == sorted(sizes)
    assert sizes[-1][0] == sizes[-1][1] > info.packed_nbytes
    with shelf.transaction():
        del shelf["noise"]
        assert shelf.info() == info  # as of the last commit
    sizes.clear()
    before = shelf.info().file_nbytes
    freed = shelf.compact(lambda done, total: sizes.append((done, total)))
    assert shelf.info().file_nbytes == before - freed
    assert sizes[-1][0] == sizes[-1][1]


@pytest.mark.parametrize("level", ["fast", "default", "max"])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_levels_and_threads_give_the_same(tmp_path: Path, level: str, threads: int) -> None:
    rng = np.random.default_rng(0)
    array = np.cumsum(rng.standard_normal((3000, 60)), axis=0).astype(np.float32)
    with Shelf(tmp_path / "data.shelf", level=level, threads=threads) as shelf:
        x = shelf.create("x", (0, 60), "float32", chunk_nbytes=4096)
        x.append(array)
        x[::7, 3] = array[::7, 3] = 1
        x *= 2
        assert np.array_equal(x, array * 2)
        ids = rng.permutation(3000)
        assert np.array_equal(x[ids], array[ids] * 2)
        assert shelf.verify() == []


def test_two_objects_in_one_process(shelf: Shelf) -> None:
    shelf["x"] = np.arange(5)
    with Shelf(shelf.path, "r") as one, Shelf(str(shelf.path), "r", cache_nbytes=0) as two:
        for i in range(4):
            shelf["x"] += 1
            assert one["x"][0] == two["x"][0] == i + 1
        with shelf.transaction():
            shelf["x"][0] = 99
            assert one["x"][0] == two["x"][0] == 4
        assert one["x"][0] == 99
        with one.reading():
            assert one["x"][0] == 99
            shelf["x"][0] = 100
            shelf.compact()
            assert one["x"][0] == 99
            assert two["x"][0] == shelf["x"][0] == 100
        assert one["x"][0] == 100
        shelf.close()
        assert one["x"][0] == 100
        with Shelf(shelf.path) as writer:
            writer["y"] = 1
            assert "y" in two
        two.close()
        assert one.verify() == []


def test_a_shelf_inside_a_with_block(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a" / "b" / "data.shelf") as shelf:  # folders are made
        assert (shelf.mode, shelf.path, shelf.is_closed) == (
            "r+",
            tmp_path / "a/b/data.shelf",
            False,
        )
        shelf["x"] = 1
        with (
            shelf.transaction(),
            pytest.raises(RuntimeError, match="closed inside a transaction; leave it first"),
        ):
            shelf.close()
        assert not shelf.is_closed
    assert shelf.is_closed
    assert repr(shelf) == f"Shelf({str(tmp_path / 'a/b/data.shelf')!r})"
    with pytest.raises(ClosedError, match="the shelf is closed; open it again"):
        shelf["x"]
    with Shelf(tmp_path / "a/b/data.shelf", "r") as shelf:
        assert shelf.mode == "r"
        assert shelf.keys() == ["x"]


def sums(tensors: list[Any]) -> list[float]:
    return [float(np.asarray(x[...]).sum()) for x in tensors]


def write(x: Any) -> str:
    try:
        x[0] = 1
    except PermissionError as error:
        return str(error)
    return "written"


def test_pickles(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shelf.path.parent)
    shelf["x"] = np.arange(10.0)
    shelf.tag("then")
    shelf["x"] = np.ones(3)
    shelf.close()
    with Shelf("data.shelf") as relative:
        x, then = relative["x"], relative.at("then")["x"]
        both = pickle.loads(pickle.dumps([x, then]))
        monkeypatch.chdir("/")
        assert sums(both) == [3, 45]
        assert both[1].tag == "then"
        x[...] = 2
        assert sums(both) == [6, 45]
        with relative.transaction():
            x[...] = 3
            assert sums(both) == [6, 45]  # what is committed
            assert sums(pickle.loads(pickle.dumps([x]))) == [6]
        assert sums([copy.copy(x), copy.deepcopy(then)]) == [9, 45]
        assert "is open for reading only" in write(both[0])
        with fork_context().Pool(1) as pool:
            assert pool.apply(sums, ([x, then],)) == [9, 45]
            assert "is open for reading only" in pool.apply(write, (x,))
            x[...] = 4
            assert pool.apply(sums, ([x, then],)) == [12, 45]
    assert sums(pickle.loads(pickle.dumps([x]))) == [12]
    gone = pickle.dumps(x)
    del both
    gc.collect()  # no handle keeps the shelf open
    for name in os.listdir(shelf.path):
        (shelf.path / name).unlink()
    with pytest.raises(FileNotFoundError, match="there is no shelf in this folder"):
        pickle.loads(gone)


def test_a_framework_is_part_of_a_handle(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    shelf["x"] = torch.arange(6.0).reshape(2, 3)
    assert isinstance(shelf["x"][0], np.ndarray)
    with Shelf(shelf.path, "r", framework="torch") as other:
        x = other["x"]
        assert x.dtype == torch.float32
        assert x[0].tolist() == [0, 1, 2]
        assert isinstance(x[0, 0], torch.Tensor)
        assert isinstance(np.asarray(x), np.ndarray)
        assert isinstance(x.numpy(), np.ndarray)
        assert isinstance(pickle.loads(pickle.dumps(x))[0], torch.Tensor)
        shelf.tag("then")
        assert isinstance(other.at("then")["x"][0], torch.Tensor)
    with pytest.raises(ValueError, match="framework is 'jax'; it must be one of"):
        shelf["x"].as_framework("jax")


def test_names_of_a_prefix_that_nothing_precedes(shelf: Shelf) -> None:
    for name in list(shelf):
        del shelf[name]
    assert shelf.keys("b") == []
    shelf["b/1"] = shelf["b/2"] = shelf["c"] = np.ones(1)
    assert shelf.keys("b/") == ["b/1", "b/2"]
    assert shelf.keys("b/2") == ["b/2"]
    assert shelf.keys("a") == shelf.keys("d") == []
    with shelf.transaction():
        assert shelf.keys("b") == ["b/1", "b/2"]
