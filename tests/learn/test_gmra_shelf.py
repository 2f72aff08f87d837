"""GMRA on a shelf: the same bits as in memory, within a budget, and after any interruption."""

import json
import os
import signal
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from forked import fork_context
from numpy.typing import NDArray

from packhorse.disk import Shelf
from packhorse.learn import GMRA
from packhorse.learn.growth import Growth, Plan
from packhorse.learn.nodes import Node, NodeTensors
from packhorse.learn.tensors import chunk_rows

Array = NDArray[Any]
SETTINGS: dict[str, Any] = {"random_state": 0, "memory_nbytes": 1 << 20}
TORCH = {np.uint8: torch.uint8, np.float16: torch.float16, ml_dtypes.bfloat16: torch.bfloat16}
PATHS = ("bases", "centres", "floats", "integers", "planes", "translations", "wavelets")


def cloud(n: int = 6_000, width: int = 37, dtype: Any = np.float32) -> Array:
    """Points of which a piece has some 1,400. A row of 37 numbers begins at any place in memory."""
    rng = np.random.default_rng(3)
    points = rng.standard_normal((n, width)) * 0.8 ** np.arange(width)
    return (points + np.sin(points[:, ::-1]) + 3).astype(dtype)


def batches(points: Array, size: int = 777) -> Iterator[Array]:
    return (points[i : i + size] for i in range(0, len(points), size))


def bits(gmra: GMRA) -> list[bytes]:
    """All that a fit found."""
    nodes = gmra.nodes_
    found = [np.concatenate([nodes.rms, nodes.thresholds]), nodes.parent, nodes.n_points]
    for number in range(len(nodes)):
        found += [np.concatenate([part.ravel() for part in nodes[number][4:8]])]
        found += [np.asarray(nodes[number].plane.direction)] if nodes[number].plane else []
    return [array.tobytes() for array in found]


@cache
def bits_in_memory(n_components: float = 3) -> list[bytes]:
    """Those of a fit of the cloud in memory."""
    return bits(GMRA(n_components, **SETTINGS).fit(cloud()))


def names(shelf: Any) -> list[str]:
    return sorted(shelf.keys("gmra/nodes/")) + [n for n in shelf.keys("gmra/part")]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Any]:
    with Shelf(tmp_path / "shelf", cache_nbytes=1 << 20) as opened:
        yield opened


@pytest.mark.parametrize("n_components", [3, 0.8])
def test_bits_do_not_depend_on_where_the_points_are(shelf: Any, n_components: float) -> None:
    points = cloud()
    wanted = bits_in_memory(n_components)
    assert len(wanted) > 100
    shelf["x"] = points
    assert bits(GMRA(n_components, **SETTINGS).fit(shelf["x"])) == wanted
    sources = (points, shelf["x"], batches(points)) if n_components == 3 else (shelf["x"],)
    for X in sources:  # how many directions a node has does not depend on how points are read
        gmra = GMRA(n_components, **SETTINGS).fit(X, shelf=shelf)
        assert bits(gmra) == wanted
        assert names(shelf) == [f"gmra/nodes/{name}" for name in PATHS]
        assert "gmra/points" not in shelf
    codes = gmra.transform(shelf["x"])
    assert (codes != gmra.transform(points)).nnz == 0
    assert bits(GMRA.from_shelf(shelf)) == wanted


@pytest.fixture
def shelf_of_torch(tmp_path: Path) -> Iterator[Any]:
    with Shelf(tmp_path / "torch", framework="pt", cache_nbytes=1 << 20) as opened:
        yield opened


@pytest.mark.parametrize("n_components", [3, 0.8])
def test_a_shelf_may_give_tensors_of_torch(shelf_of_torch: Any, n_components: float) -> None:
    shelf, points = shelf_of_torch, cloud(3000)
    plain = GMRA(n_components, **SETTINGS).fit(points)
    shelf["x"] = points
    assert isinstance(shelf["x"][0], torch.Tensor)
    assert bits(GMRA(n_components, **SETTINGS).fit(shelf["x"])) == bits(plain)
    others = (shelf["x"].iter_chunks(100_000), points) if n_components == 3 else ()
    for X in (shelf["x"], *others):
        gmra = GMRA(n_components, **SETTINGS).fit(X, shelf=shelf)
        assert bits(gmra) == bits(plain)
    codes = plain.transform(points)
    for one in (gmra, GMRA.from_shelf(shelf)):
        assert (one.transform(shelf["x"]) != codes).nnz == 0
        assert (one.transform(shelf["x"].iter_chunks()) != codes).nnz == 0
        assert np.array_equal(one.inverse_transform(codes), plain.inverse_transform(codes))
        assert np.array_equal(one.apply(shelf["x"]), plain.apply(points))
        short = one.encode(shelf["x"][:])
        assert np.array_equal(one.decode(short), plain.decode(plain.encode(points)))


def test_a_fit_goes_on_whatever_the_shelf_gives(
    shelf_of_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = cloud()
    with interrupted(monkeypatch, 9):
        GMRA(3, **SETTINGS).fit(points, shelf=shelf_of_torch)
    shelf_of_torch["x"] = points
    gmra = GMRA(3, **SETTINGS).fit(shelf_of_torch["x"], shelf=shelf_of_torch)
    assert bits(gmra) == bits_in_memory()


def test_bfloat16_of_torch_and_of_numpy_are_the_same_points(shelf: Any) -> None:
    shelf["x"] = torch.from_numpy(cloud()).bfloat16()
    wanted = bits(GMRA(3, **SETTINGS).fit(shelf["x"]))
    of_torch = shelf["x"].as_framework("pt")
    assert bits(GMRA(3, **SETTINGS).fit(of_torch)) == wanted
    assert bits(GMRA(3, **SETTINGS).fit(of_torch.iter_chunks(50_000))) == wanted
    with pytest.raises(ValueError, match="X has 36 features, but GMRA is expecting 37 features"):
        GMRA(3, **SETTINGS).fit(shelf["x"]).transform(of_torch[:5, 1:])


def test_a_data_set_of_hdf5_is_read_in_parts(tmp_path: Path, shelf: Any) -> None:
    points = cloud()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        X = file.create_dataset("x", data=points, chunks=(100, 37))
        assert bits(GMRA(3, **SETTINGS).fit(X)) == bits_in_memory()


def test_a_shelf_that_is_opened_again_has_the_fit(tmp_path: Path) -> None:
    points = cloud(3000)
    with Shelf(tmp_path / "shelf") as shelf:
        wanted = bits(GMRA(3, **SETTINGS).fit(points, shelf=shelf, name="a/b"))
    with Shelf(tmp_path / "shelf", mode="r") as shelf:
        gmra = GMRA.from_shelf(shelf, "a/b")
        assert bits(gmra) == wanted
        assert gmra.n_components == 3
        assert gmra.inverse_transform(gmra.transform(points)).shape == points.shape
        with pytest.raises(ValueError, match="the shelf has no fit of the name 'gmra'"):
            GMRA.from_shelf(shelf)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16])
def test_points_of_other_dtypes(shelf: Any, dtype: Any) -> None:
    points = (cloud(3000) * 10).clip(0, 255).astype(dtype)
    shelf["x"] = points
    as_float = points.astype(np.float64 if dtype == np.uint8 else np.float32)
    gmra = GMRA(3, **SETTINGS).fit(shelf["x"], shelf=shelf)
    for array in (as_float, points, torch.from_numpy(points.astype(np.float32)).to(TORCH[dtype])):
        assert bits(gmra) == bits(GMRA(3, **SETTINGS).fit(array))


@pytest.mark.parametrize(("width", "dtype"), [(7, "f4"), (300, "f8"), (200_000, "f4"), (0, "f8")])
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 18])
def test_a_fit_knows_the_chunks_of_its_tensors(
    shelf: Any, width: int, dtype: str, nbytes: int
) -> None:
    made = shelf.create("x", (0, width), dtype, chunk_nbytes=nbytes)
    assert chunk_rows(width, dtype, nbytes) == made.chunks[0]


class Interrupted(BaseException):
    """What ends a fit in these tests."""


@contextmanager
def interrupted(
    monkeypatch: pytest.MonkeyPatch, after: int, owner: Any = Growth, name: str = "step"
) -> Iterator[None]:
    """Ends a fit after its step of this number, when the step is done but not committed."""
    method, n_done = getattr(owner, name), 0

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal n_done
        found = method(self, *arguments)
        n_done += 1
        if n_done == after:
            raise Interrupted
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        with pytest.raises(Interrupted):
            yield


# Each number of steps with batches, which a fit copies first; with the others, some of them.
@pytest.mark.parametrize(
    ("kind", "steps"), [("array", (1, 9)), ("tensor", (4, 12)), ("batches", (1, 3, 4, 9, 12))]
)
def test_an_interrupted_fit_goes_on(
    shelf: Any, kind: str, steps: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    points, wanted = cloud(), bits_in_memory()
    shelf["x"] = points
    for after in steps:
        for n_steps in (after, 2):
            with interrupted(monkeypatch, n_steps):
                GMRA(3, **SETTINGS).fit(points_of(kind, shelf, points), shelf=shelf)
        with pytest.raises(ValueError, match="the fit 'gmra' was interrupted; call fit again"):
            GMRA.from_shelf(shelf)
        gmra = GMRA(3, **SETTINGS).fit(points_of(kind, shelf, points), shelf=shelf)
        assert bits(gmra) == wanted
        assert names(shelf) == [f"gmra/nodes/{name}" for name in PATHS]


def test_nodes_of_an_unfinished_step_are_removed(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are committed before the step that they belong to is done."""
    points, wanted = cloud(), bits_in_memory()
    append = NodeTensors.append

    def written(self: NodeTensors, nodes: Sequence[Node]) -> None:
        append(self, nodes)
        self._writer.wait()

    monkeypatch.setattr(NodeTensors, "append", written)
    monkeypatch.setattr(Plan, "found_nbytes", 40_000)
    for after in (5, 4, 9):
        with interrupted(monkeypatch, after, NodeTensors, "append"):
            GMRA(3, **SETTINGS).fit(points, shelf=shelf)
        n_nodes = len(shelf["gmra/nodes/integers"])
        assert n_nodes > json.loads(shelf.load("gmra/state")["fit"])["n_nodes"]
    assert bits(GMRA(3, **SETTINGS).fit(points, shelf=shelf)) == wanted


def test_what_is_not_of_the_fit_stays(shelf: Any) -> None:
    shelf["gmra/points of mine"] = np.arange(3)
    shelf["gmra/part-of"] = np.arange(4)
    shelf["gmra/x"] = cloud()
    for _ in range(2):
        GMRA(3, **SETTINGS).fit(shelf["gmra/x"], shelf=shelf)
    kept = ["gmra/part-of", "gmra/points of mine", "gmra/state", "gmra/x"]
    assert sorted(set(shelf.keys()) - set(names(shelf))) == kept[1:]


def points_of(kind: str, shelf: Any, points: Array) -> Any:
    return {"array": points, "tensor": shelf["x"], "batches": batches(points)}[kind]


def fit_until_killed(folder: Path, steps: int) -> None:
    """Fit the cloud, and die after its step of this number, when it is done but not committed."""
    method, n_done = Growth.step, 0

    def counted(self: Growth) -> Any:
        nonlocal n_done
        found = method(self)
        n_done += 1
        if n_done == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Growth.step = counted  # type: ignore[method-assign]
    with Shelf(folder) as shelf:
        GMRA(3, **SETTINGS).fit(cloud(), shelf=shelf)


@pytest.mark.parametrize("steps", [2, 11])
def test_a_killed_fit_goes_on(tmp_path: Path, steps: int) -> None:
    process = fork_context().Process(target=fit_until_killed, args=(tmp_path / "shelf", steps))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    with Shelf(tmp_path / "shelf") as shelf:
        gmra = GMRA(3, **SETTINGS).fit(cloud(), shelf=shelf)
        assert bits(gmra) == bits_in_memory()


def test_another_fit_does_not_go_on(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch, 9):
        GMRA(3, memory_nbytes=1 << 20).fit(cloud(), shelf=shelf)
    with pytest.raises(ValueError, match="'gmra' on the shelf was interrupted, and had other poi"):
        GMRA(3, memory_nbytes=1 << 20).fit(cloud() + 1, shelf=shelf)
    with pytest.raises(ValueError, match="was interrupted, and had other settings: give the same"):
        GMRA(4, memory_nbytes=1 << 20).fit(cloud(), shelf=shelf)
    with pytest.raises(ValueError, match="was interrupted, and had other settings: give the same"):
        GMRA(3, **SETTINGS).fit(cloud(), shelf=shelf)
    GMRA(3, memory_nbytes=1 << 20).fit(cloud(), shelf=shelf)  # with the seed that it began with
    GMRA(4, **SETTINGS).fit(cloud(), shelf=shelf)  # a fit that is done is made anew


def test_memory_stays_within_the_budget(shelf: Any) -> None:
    """Five times as many points as fit. What a fit allocates comes first; then the cache of the
    shelf, 1 MiB, and what it packs: chunks of 128 pieces, with their frames."""
    budget = 2 << 20
    shelf["x"] = cloud(5 * budget // (100 * 4), 100)
    gmra = GMRA(4, leaf_size=256, random_state=0, memory_nbytes=budget)
    tracemalloc.start()
    gmra.fit(shelf["x"], shelf=shelf)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < budget + (5 << 20)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_named(shelf: Any, wrong: float) -> None:
    points = cloud()
    points[5_555, 5] = wrong
    shelf["x"] = points
    with pytest.raises(ValueError, match="row 5555 of X has NaN or infinity; GMRA needs finite"):
        GMRA(3, **SETTINGS).fit(shelf["x"], shelf=shelf)


def test_what_is_no_shelf_or_no_name_is_refused(shelf: Any) -> None:
    for call in (lambda s, n: GMRA().fit(cloud(), shelf=s, name=n), GMRA.from_shelf):
        with pytest.raises(TypeError, match=r"shelf is a str; it must be a packhorse.disk.Shelf"):
            call("data.shelf", "gmra")
        with pytest.raises(TypeError, match="name is 3; it must be a string"):
            call(shelf, 3)
        with pytest.raises(ValueError, match="the name of a tensor, or its beginning"):
            call(shelf, "a\0")
    shelf.tag("then")
    with pytest.raises(PermissionError, match="shelf is the state of a tag, which cannot change"):
        GMRA().fit(cloud(), shelf=shelf.at("then"))
    with Shelf(shelf.path, "r") as reader:
        for X in (cloud(), iter([cloud()])):
            with pytest.raises(PermissionError, match="the shelf is open for reading only"):
                GMRA().fit(X, shelf=reader)
    assert list(shelf) == []


def test_complex_numbers_of_a_shelf_are_refused(shelf: Any) -> None:
    shelf["x"] = cloud(500).astype(np.complex64)
    for act in (GMRA().fit, GMRA(random_state=0).fit(cloud(500)).transform):
        with pytest.raises(ValueError, match=r"X has complex numbers \(complex64\); GMRA needs re"):
            act(shelf["x"])


def test_tensors_of_other_shapes_are_refused(shelf: Any) -> None:
    shelf["x"] = cloud(500).reshape(-1)
    with pytest.raises(ValueError, match=r"X has the shape \(18500,\); it must have two axes"):
        GMRA().fit(shelf["x"])
    shelf["x"] = cloud(500)
    gmra = GMRA(random_state=0).fit(shelf["x"])
    shelf["y"] = cloud(500)[:, 1:]
    with pytest.raises(ValueError, match="X has 36 features, but GMRA is expecting 37 features"):
        gmra.transform(shelf["y"])
