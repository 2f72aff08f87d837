"""Tensors of a shelf as arrays to others: Dask, scikit-learn and NumPy."""

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import IncrementalPCA
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler

from packhorse.disk import Shelf, ShelfTensor

da = pytest.importorskip("dask.array")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3001, 37)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int64)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        opened.create("x", (0, 37), "float32", chunk_nbytes=1 << 13).append(X)
        opened["y"] = Y
        yield opened


@pytest.fixture
def x(shelf: Shelf) -> ShelfTensor:
    return shelf["x"]


# Dask.


@pytest.mark.parametrize("chunks", ["auto", "64 KiB", (500, -1), (100, 10), -1, ((1, 3000), 37)])
@pytest.mark.parametrize("scheduler", ["threads", "sync"])
def test_dask_computes(x: ShelfTensor, chunks: Any, scheduler: str) -> None:
    array = da.from_array(x, chunks=chunks)
    assert (array.shape, array.dtype) == (X.shape, X.dtype)
    wanted = X.astype(np.float64)
    for lazy, expected in (
        (array.astype("f8").mean(axis=0), wanted.mean(axis=0)),
        (array.astype("f8").std(), wanted.std()),
        (array.T.astype("f8") @ array, wanted.T @ X),
        (array[:, 3].max(), X[:, 3].max()),
    ):
        np.testing.assert_allclose(lazy.compute(scheduler=scheduler), expected, rtol=1e-6)
    for index in (np.s_[10:2000:7], np.s_[::-1, 5:9], np.s_[[5, 3, 2999]], np.s_[:, [1, 30]]):
        np.testing.assert_array_equal(array[index].compute(scheduler=scheduler), X[index])
    mask = Y == 1
    np.testing.assert_array_equal(array[mask].compute(scheduler=scheduler), X[mask])


def test_dask_takes_multiples_of_the_chunks(x: ShelfTensor) -> None:
    rows = da.from_array(x, chunks="64 KiB").chunks[0]
    assert len(rows) > 3
    assert all(n % x.chunks[0] == 0 for n in rows[:-1])


def test_dask_in_other_processes(x: ShelfTensor) -> None:
    def pids(block: np.ndarray) -> np.ndarray:
        return np.full((len(block), 1), os.getpid())

    array = da.from_array(x, chunks=(1000, -1))
    assert array.sum(dtype="f8").compute(scheduler="processes", num_workers=2) == pytest.approx(
        X.sum(dtype="f8")
    )
    found = array.map_blocks(pids, chunks=((1000, 1000, 1000, 1), (1,)), dtype="i8")
    assert os.getpid() not in found.compute(scheduler="processes", num_workers=2)


def test_dask_sees_what_was_written_since(shelf: Shelf, x: ShelfTensor) -> None:
    """Dask takes arrays of the same name for equal, so other content needs other names."""

    def name(tensor: ShelfTensor) -> str:
        return da.from_array(tensor, chunks=1000).name

    shelf.tag("then")
    then, first = name(shelf.at("then")["x"]), name(x)
    total = da.from_array(x, chunks=(1000, -1)).sum().compute()
    assert name(shelf["x"]) == name(pickle.loads(pickle.dumps(x))) == first
    assert name(shelf["y"]) != first
    x += 1
    second = name(x)
    assert len({then, first, second}) == 3
    assert name(shelf.at("then")["x"]) == then
    assert da.from_array(x, chunks=(1000, -1)).sum().compute() > total
    with shelf.transaction():
        x += 1
        assert name(x) not in (then, first, second)


def test_dask_reads_a_tag_and_stores(shelf: Shelf, x: ShelfTensor) -> None:
    shelf.tag("then")
    doubled = shelf.create("doubled", X.shape, "float32")
    da.store(da.from_array(shelf.at("then")["x"], chunks=(700, 20)) * 2, doubled)
    np.testing.assert_array_equal(doubled[...], 2 * X)


def test_dask_with_bfloat16_and_odd_shapes(shelf: Shelf) -> None:
    shelf["half"] = X.astype(ml_dtypes.bfloat16)
    array = da.from_array(shelf["half"], chunks=(1000, -1))
    assert array.dtype == ml_dtypes.bfloat16
    assert array[5:7].compute().tobytes() == X.astype(ml_dtypes.bfloat16)[5:7].tobytes()
    for value in (np.float32(3.5), np.zeros((0, 4)), np.zeros((3, 0))):
        shelf["odd"] = value
        found = da.from_array(shelf["odd"]).compute()
        assert (found.shape, found.dtype) == (value.shape, value.dtype)


def test_writes_of_dask_in_one_commit(shelf: Shelf) -> None:
    """Threads of Dask cannot take part in a transaction of this thread; its own can."""
    n_commits = shelf.info().n_commits
    with shelf.transaction():
        target = shelf.create("t", (4000, 5), "float64")
        da.store(da.ones((4000, 5), chunks=(1000, 5)), target, scheduler="sync")
    assert shelf.info().n_commits == n_commits + 1
    assert shelf["t"][...].sum() == 20_000


# scikit-learn.


def labelled(x: ShelfTensor, y: ShelfTensor, nbytes: int) -> Iterator[tuple[Any, Any]]:
    start = 0
    for rows in x.iter_chunks(nbytes):
        yield rows, y[start : start + len(rows)]
        start += len(rows)


def test_incremental_pca_and_scaler(x: ShelfTensor) -> None:
    ours, theirs = IncrementalPCA(5), IncrementalPCA(5)
    scaler = StandardScaler()
    start = 0
    for rows in x.iter_chunks(1 << 16):
        ours.partial_fit(rows)
        theirs.partial_fit(X[start : start + len(rows)])
        scaler.partial_fit(rows)
        start += len(rows)
    assert start == len(X)
    np.testing.assert_array_equal(ours.components_, theirs.components_)
    np.testing.assert_allclose(scaler.mean_, X.mean(axis=0, dtype="f8"), atol=1e-7)
    np.testing.assert_array_equal(ours.transform(x[:9]), theirs.transform(X[:9]))


def test_k_means(x: ShelfTensor) -> None:
    models = [MiniBatchKMeans(4, random_state=0, n_init=1) for _ in range(2)]
    start = 0
    for rows in x.iter_chunks(1 << 16):
        models[0].partial_fit(rows)
        models[1].partial_fit(X[start : start + len(rows)].copy())
        start += len(rows)
    np.testing.assert_array_equal(models[0].cluster_centers_, models[1].cluster_centers_)


def test_a_classifier_with_labels(shelf: Shelf, x: ShelfTensor) -> None:
    model = SGDClassifier(random_state=0)
    for _ in range(3):
        for rows, labels in labelled(x, shelf["y"], 1 << 16):
            model.partial_fit(rows, labels, classes=[0, 1])
    assert model.score(X, Y) > 0.95
    assert model.score(x, shelf["y"]) == model.score(X, Y)


def test_estimators_take_a_tensor_as_a_whole(x: ShelfTensor) -> None:
    np.testing.assert_array_equal(
        MiniBatchKMeans(3, random_state=0, n_init=1).fit(x).cluster_centers_,
        MiniBatchKMeans(3, random_state=0, n_init=1).fit(X).cluster_centers_,
    )


# NumPy and pickle.


def test_functions_of_numpy_take_a_tensor(x: ShelfTensor) -> None:
    assert np.asarray(x).tobytes() == X.tobytes()
    assert np.asarray(x, np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.concatenate([x, x]), np.concatenate([X, X]))
    np.testing.assert_array_equal(np.sort(x, axis=0), np.sort(X, axis=0))
    np.testing.assert_array_equal(np.cumsum(x[:10]), np.cumsum(X[:10]))


def test_a_pickled_tensor_reads_what_is_committed(shelf: Shelf, x: ShelfTensor) -> None:
    again = pickle.loads(pickle.dumps(x))
    assert (again.name, again.shape, again.dtype) == ("x", X.shape, X.dtype)
    x[0] = 7
    assert (again[0] == 7).all()
    with pytest.raises(PermissionError):
        again[0] = 8


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_handle_of_the_same_open_shelf(shelf: Shelf, copied: Any) -> None:
    """It may write, and sees what a transaction has written, unlike a tensor that was pickled."""
    shelf.tag("then")
    again = copied(shelf["x"])
    with shelf.transaction():
        shelf["x"][0] = 7
        assert (again[0] == 7).all()
        again[1] = 8
    assert (shelf["x"][1] == 8).all()
    then = copied(shelf.at("then")["x"])
    assert (then.tag, then.name) == ("then", "x")
    np.testing.assert_array_equal(then[:2], X[:2])
    assert copied([shelf["y"].as_framework("pt")])[0][:3].tolist() == Y[:3].tolist()
