"""Reading and writing by index: equal to NumPy on the same array, and with the same errors.

`PACKHORSE_EXAMPLES=500 pytest tests/shelf/test_indexing.py` draws 500 indices for each shape.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from packhorse.disk import Shelf

# Shapes with many chunks of a few rows, with one chunk, and with rows of several chunks.
SHAPES = [(0,), (1,), (700,), (90, 17), (5, 4, 3), (40, 3, 11), (3, 70_000), (2, 3, 90_001), (4, 0)]
CHUNK_NBYTES = 4096


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with Shelf(tmp_path_factory.mktemp("shelf") / "data.shelf") as opened:
        yield opened


def make(shelf: Shelf, shape: tuple[int, ...]) -> tuple[str, np.ndarray]:
    """A tensor, and the same in memory; half of its rows were never written, and are zero."""
    array = np.zeros(shape)
    half = -(-shape[0] // 2)
    array[:half] = np.random.default_rng(0).standard_normal((half, *shape[1:]))
    name = str(shape)
    if name not in shelf:
        x = shelf.create(name, shape, "float64", chunk_nbytes=CHUNK_NBYTES)
        x[:half] = array[:half]
    return name, array


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    basic = hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)
    n_rows = shape[0]
    if not n_rows:
        return basic
    ids = st.lists(st.integers(-n_rows, n_rows - 1), min_size=0, max_size=40)
    listed = ids | ids.map(lambda rows: np.array(rows, np.int64))
    square = st.lists(st.integers(0, n_rows - 1), min_size=4, max_size=4).map(
        lambda rows: np.array(rows, np.uint16).reshape(2, 2)
    )
    mask = hnp.arrays(np.bool_, n_rows)
    rows = listed | square | mask
    with_rest = st.tuples(rows, hnp.basic_indices(shape[1:])) if len(shape) > 1 else rows
    joined = with_rest.map(lambda pair: _joined(pair) if isinstance(pair, tuple) else pair)
    both = st.tuples(ids, ids).map(lambda pair: _both(pair, shape)) if len(shape) > 1 else rows
    many = shape[0] * int(np.prod(shape[1:])) < 5000
    masks = hnp.arrays(np.bool_, shape) if many else mask
    return basic | rows | joined | both | masks


def _joined(pair: tuple[Any, Any]) -> tuple[Any, ...]:
    rows, rest = pair
    return (rows, *rest) if isinstance(rest, tuple) else (rows, rest)


def _both(pair: tuple[list[int], list[int]], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Lists on the first and the last axis."""
    n = min(map(len, pair))
    first, last = pair[0][:n], [place % max(1, shape[-1]) for place in pair[1][:n]]
    return (np.array(first, int), ..., np.array(last, int))


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


COMMON = settings(
    max_examples=int(os.environ.get("PACKHORSE_EXAMPLES", "30")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@COMMON
@given(data=st.data())
def test_what_is_read_is_what_numpy_reads(
    shelf: Shelf, shape: tuple[int, ...], data: st.DataObject
) -> None:
    name, array = make(shelf, shape)
    index = data.draw(indices(shape))
    try:
        expected = array[index]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            shelf[name][index]
        return
    found = shelf[name][index]
    same(found, expected)
    if isinstance(found, np.ndarray):
        assert found.base is None or not np.shares_memory(found, shelf[name][index])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@COMMON
@given(data=st.data())
def test_what_is_written_is_what_numpy_writes(
    shelf: Shelf, shape: tuple[int, ...], data: st.DataObject
) -> None:
    name, array = make(shelf, shape)
    index = data.draw(indices(shape))
    try:
        target = array[index]
    except (IndexError, ValueError):
        return
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    whole = rng.standard_normal(np.shape(target))
    short = whole[..., :1] if whole.ndim else 1
    value = data.draw(st.sampled_from([whole, 3, np.float32(2), short]))
    copied = np.array(value)
    array[index] = value
    with suppress(Undo), shelf.transaction():
        shelf[name][index] = value
        same(shelf[name][...], array)
        raise Undo
    assert np.array_equal(value, copied)
    same(shelf[name][...], make(shelf, shape)[1])


class Undo(Exception):
    """Ends a transaction."""


WRONG = [
    5, -6, (0, 4), (0, 0, 0), "a", 1.5, [0, 9], [[0, -6]], np.zeros(4, bool), (..., ...),
    (slice(None), ..., ...), (..., 0, ...), slice(0, 1, 0), [1.0], (0, "b"), ([0, 1], [0, 1, 2]),
    {}, np.array([], float),
]  # fmt: skip


@pytest.mark.parametrize("index", WRONG, ids=repr)
def test_wrong_indices_give_the_errors_of_numpy(shelf: Shelf, index: Any) -> None:
    array = np.zeros((5, 4))
    if "small" not in shelf:
        shelf["small"] = array
    with pytest.raises((IndexError, ValueError, TypeError)) as expected:
        array[index]
    with pytest.raises(expected.type) as found:
        shelf["small"][index]
    assert str(found.value) == str(expected.value)
    with pytest.raises(expected.type) as found:
        shelf["small"][index] = 1
    assert str(found.value) == str(expected.value)
    assert not shelf["small"].numpy().any()


WRONG_VALUES = [
    ((0,), np.zeros(5)), (slice(0, 2), np.zeros((3, 4))), ([0, 1], np.zeros((3, 4))), (0, "text"),
    (0, [1, "b"]), (0, {}), ((0, 0), np.zeros(2)), (slice(None), np.zeros((1, 1, 5, 4, 1))),
    (np.ones(5, bool), np.zeros((4, 4))), (np.ones((5, 4), bool), np.zeros(19)),
    ([True] + [False] * 4, np.zeros((2, 4))), ([[0, 1], [2, 3]], np.zeros((3, 4))),
    (([0, 1], ...), np.zeros((100, 100))), ((slice(None), [1, 2]), np.zeros(3)),
    ((slice(4, None, -2), slice(2)), np.zeros((2, 2))), ((None, 0), np.zeros((3, 4))),
]  # fmt: skip


@pytest.mark.parametrize(("index", "value"), WRONG_VALUES, ids=repr)
def test_wrong_values_are_refused_as_numpy_refuses_them(
    shelf: Shelf, index: Any, value: Any
) -> None:
    array = np.zeros((5, 4))
    shelf["refusing"] = array
    with pytest.raises((ValueError, TypeError)) as expected:
        array[index] = value
    with pytest.raises(expected.type) as found:
        shelf["refusing"][index] = value
    if not isinstance(value, list | dict | str):
        assert str(found.value) == str(expected.value)
    assert not shelf["refusing"].numpy().any()
    with shelf.transaction():
        with pytest.raises(expected.type):
            shelf["refusing"][index] = value
        shelf["refusing"][1] = 1
    assert shelf["refusing"].numpy().sum() == 4


class Third:
    """No array, but an object that says which integer it stands for."""

    def __index__(self) -> int:
        return 2

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


def test_objects_that_stand_for_integers(shelf: Shelf) -> None:
    array = np.arange(20.0).reshape(5, 4)
    shelf["x"] = array
    for index in (Third(), (Third(), 1), (slice(1), Third()), (..., Third()), slice(Third(), None)):
        same(shelf["x"][index], array[index])
    shelf["x"][Third(), Third()] = -1
    assert shelf["x"][2, 2] == -1


EMPTY = [
    [], (), range(0), (slice(None), []), (..., []), ([], []), ([], [], []), (1, []), ([0, 1], [[]]),
    ([[]], slice(1)), (slice(None), range(0)), (slice(None), (), 1), (None, []), ([], 1, [1]),
    ([True, False, True], [], 0),
]  # fmt: skip


@pytest.mark.parametrize("index", EMPTY, ids=repr)
def test_empty_lists_select_nothing(shelf: Shelf, index: Any) -> None:
    """NumPy makes an empty list to an array of floats, but takes it for one of integers here."""
    name, array = make(shelf, (3, 4, 5))
    try:
        expected = array[index]
    except IndexError as error:
        with pytest.raises(IndexError, match=re.escape(str(error))):
            shelf[name][index]
        return
    same(shelf[name][index], expected)
    if not expected.size:
        shelf[name][index] = 7
        same(shelf[name][...], array)


def test_a_tensor_without_axes(shelf: Shelf) -> None:
    shelf["scalar"] = np.float32(2.5)
    x, array = shelf["scalar"], np.array(2.5, np.float32)
    for index in ((), ..., None, (None, ...)):
        same(x[index], array[index])
    x[()] = 4
    x[...] += 1
    assert float(x.numpy()) == 5
    with pytest.raises(IndexError, match="too many indices"):
        x[0]
    with pytest.raises(TypeError, match=r"len\(\) of unsized"):
        len(x)
    with pytest.raises(ValueError, match="has no axes"):
        x.append(np.zeros(1))


def test_the_last_of_equal_rows_stays(shelf: Shelf) -> None:
    shelf["repeated"] = np.zeros((50, 20))
    shelf["repeated"][[3, 3, 40, 3]] = np.arange(4.0)[:, None]
    assert shelf["repeated"][[3, 40, 4], 0].tolist() == [3, 2, 0]


def test_indices_of_pytorch(shelf: Shelf, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    array = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    with Shelf(tmp_path / "pt.shelf", framework="pt") as other:
        other["x"] = torch.from_numpy(array.copy())
        x = other["x"]
        ids = torch.tensor([4, 4, -1])
        assert torch.equal(x[ids], torch.from_numpy(array)[ids])
        mask = torch.arange(50) % 3 == 0
        assert torch.equal(x[mask], torch.from_numpy(array)[mask])
        assert torch.equal(x[5:40, 1], torch.from_numpy(array)[5:40, 1])
        x[mask] = torch.ones(4, dtype=torch.float16, requires_grad=True)
        assert x.dtype == torch.float32
        assert x.torch()[0].tolist() == [1, 1, 1, 1]
        assert isinstance(x[0, 0], torch.Tensor)
