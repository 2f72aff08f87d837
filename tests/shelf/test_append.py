"""Rows are added at the end, and tensors are resized: what NumPy's `concatenate` gives."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfTensor


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with Shelf(tmp_path_factory.mktemp("shelf") / "data.shelf") as opened:
        yield opened
        assert opened.verify() == []


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def empty(shelf: Shelf, width: int = 30, dtype: Any = "float32", **options: Any) -> ShelfTensor:
    options = {"chunk_nbytes": 4096, "replace": True, **options}
    return shelf.create("x", (0, width), dtype, **options)


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "as it is": lambda rows: rows,
    "columns first": np.asfortranarray,
    "every other": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "backwards": lambda rows: rows[::-1].copy()[::-1],
    "big-endian": lambda rows: rows.astype(">f4"),
    "read-only": lambda rows: np.frombuffer(rows.tobytes(), np.float32).reshape(rows.shape),
    "doubles": lambda rows: rows.astype(np.float64),
    "lists": lambda rows: rows.tolist(),
    "a tuple of rows": tuple,
    "broadcast": lambda rows: np.broadcast_to(rows[0], rows.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout(shelf: Shelf, layout: str) -> None:
    x, rows = empty(shelf), LAYOUTS[layout](noise(100, 30))
    x.append(rows)
    x.append(rows[:3])
    x.append(rows[5])
    expected = np.asarray(rows, np.float32)
    assert np.array_equal(x, np.concatenate([expected, expected[:3], expected[5:6]]))


@pytest.mark.parametrize("base", [None, "previous"])
def test_many_small_appends(shelf: Shelf, base: str | None) -> None:
    x, rows = empty(shelf, base=base), noise(300, 30)
    at, n = 0, 0
    while at < len(rows):
        x.append(rows[at : at + n % 7])
        at += n % 7
        n += 1
    assert np.array_equal(x, rows)
    with shelf.transaction():
        for row in rows:
            x.append(row)
        assert np.array_equal(x[300:], rows)
    assert np.array_equal(x, np.concatenate([rows, rows]))


def test_the_array_of_the_caller_may_change_afterwards(shelf: Shelf) -> None:
    x, rows = empty(shelf), noise(500, 30)
    kept = rows.copy()
    with shelf.transaction():
        x.append(rows)
        rows[...] = 7
        x[100:400] = rows[100:400]
        rows[...] = 8
        shelf["y"] = rows
        rows[...] = 9
        x[0] = rows[0]
        shelf.save("state", {"rows": rows})
        rows[...] = 10
    kept[100:400], kept[0] = 7, 9
    assert np.array_equal(x, kept)
    assert (shelf["y"].numpy() == 8).all()
    assert (shelf.load("state")["rows"] == 9).all()


WRONG: list[tuple[Any, type[Exception], str]] = [
    (np.ones((2, 31)), ValueError, r"'x' has rows of shape \(30,\); these have the shape \(31,\)"),
    (np.ones((2, 2, 30)), ValueError, r"these have the shape \(2, 30\)"),
    (np.ones(29), ValueError, r"rows of shape \(30,\); these have the shape \(29,\)"),
    (np.ones(()), ValueError, r"these have the shape \(\)"),
    (1, ValueError, r"these have the shape \(\)"),
    ([[1, 2], [3]], ValueError, "inhomogeneous"),
    ("text", TypeError, "rows of <U4 would change their kind"),
    (None, TypeError, "rows of object would change their kind"),
    (np.ones((2, 30), "S1"), TypeError, r"'x' is float32, and rows of \|S1 would change"),
    (np.ones((2, 30), complex), TypeError, "rows of complex128 would change their kind; convert"),
    ([[1j] * 30], TypeError, "rows of complex128 would change their kind"),
    (
        np.ma.masked_equal(np.ones((2, 30)), 1),
        TypeError,
        "a masked array has elements that are missing; fill",
    ),
]


@pytest.mark.parametrize(("rows", "kind", "message"), WRONG, ids=lambda value: repr(value)[:25])
def test_wrong_rows_are_refused(
    shelf: Shelf, rows: Any, kind: type[Exception], message: str
) -> None:
    x = empty(shelf)
    x.append(noise(3, 30))
    n_commits = shelf.info().n_commits
    with pytest.raises(kind, match=message):
        x.append(rows)
    with shelf.transaction():
        with pytest.raises(kind, match=message):
            x.append(rows)
        x.append(noise(1, 30))  # the transaction goes on
    assert shelf.info().n_commits == n_commits + 1
    assert np.array_equal(x, np.concatenate([noise(3, 30), noise(1, 30)]))


KINDS: list[tuple[Any, Any, bool]] = [
    ("int32", np.ones((1, 2), np.int64), True),
    ("int32", np.ones((1, 2)), False),
    ("int32", [[0.5, 1]], False),
    ("int32", [[1, 2]], True),
    ("int32", [[True, False]], True),
    ("uint8", [[1, 2]], True),
    ("bool", [[1, 2]], False),
    ("bool", [[True, False]], True),
    ("bool", np.ones((1, 2), bool), True),
    ("float32", np.ones((1, 2), np.int64), True),
    ("float32", [[1, 2.5]], True),
    ("complex64", np.ones((1, 2)), True),
    ("bfloat16", np.ones((1, 2)), True),
    ("bfloat16", np.ones((1, 2), np.float16), True),
    ("bfloat16", [[1, 2.5]], True),
    ("F8_E4M3", np.ones((1, 2), ml_dtypes.bfloat16), True),
    ("float32", np.ones((1, 2), ml_dtypes.float8_e5m2), True),
    ("int8", np.ones((1, 2), ml_dtypes.bfloat16), False),
    ("F4", np.ones((1, 2)), True),
]


@pytest.mark.parametrize(("dtype", "rows", "fits"), KINDS, ids=lambda value: repr(value)[:30])
def test_rows_keep_their_kind(shelf: Shelf, dtype: str, rows: Any, *, fits: bool) -> None:
    x = empty(shelf, 2, dtype)
    if not fits:
        with pytest.raises(TypeError, match=f"'x' is {x.dtype}, and rows of .* would change"):
            x.append(rows)
        return
    x.append(rows)
    assert np.array_equal(x[0].astype(complex), np.asarray(rows).astype(complex)[0])


def test_rows_of_pytorch_keep_their_kind(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    x = empty(shelf, 2, "int32")
    with pytest.raises(TypeError, match="'x' is int32, and rows of float32 would change"):
        x.append(torch.tensor([[0.5, 1]]))
    x.append(torch.tensor([[3, 4]]))
    y = empty(shelf, 2, "float16")
    y.append(torch.tensor([[0.5, 1]], dtype=torch.bfloat16, requires_grad=True))
    y.append(torch.tensor([[1, 2], [3, 4]]).T[1])
    assert y.numpy().tolist() == [[0.5, 1], [2, 4]]


def test_values_out_of_range_are_refused(shelf: Shelf) -> None:
    x = empty(shelf, 2, "uint8")
    with pytest.raises(OverflowError, match="300 out of bounds for uint8"):
        x.append([[1, 300]])
    assert x.shape == (0, 2)


def test_rows_without_elements(shelf: Shelf) -> None:
    x = shelf.create("x", (2, 0, 5), "int16", replace=True)
    x.append(np.zeros((3, 0, 5), np.int16))
    assert x.shape == (5, 0, 5)
    assert x.numpy().shape == (5, 0, 5)
    x.resize(1)
    x.resize(9)
    assert [block.shape for block in x.iter_chunks()] == [(9, 0, 5)]
    y = shelf.create("y", (0,), "int16", replace=True)
    y.append(np.int16(4))
    y.append([5, 6])
    assert y.numpy().tolist() == [4, 5, 6]


@pytest.mark.parametrize("base", [None, "previous"])
@pytest.mark.parametrize("together", [False, True])
def test_resize_there_and_back_gives_zeros(
    shelf: Shelf, base: str | None, *, together: bool
) -> None:
    x, array = empty(shelf, base=base, keyframe_every=4), noise(200, 30)
    x.append(array)
    rng = np.random.default_rng(1)
    for _ in range(12):
        low, high = sorted(rng.integers(0, 260, 2).tolist())
        expected = np.zeros((high, 30), np.float32)
        kept = min(low, len(array))
        expected[:kept] = array[:kept]
        if together:
            with shelf.transaction():
                x.resize(low)
                x.resize(high)
                assert np.array_equal(x, expected)
        else:
            x.resize(low)
            x.resize(high)
        assert np.array_equal(x, expected)
        assert sum(len(block) for block in x.iter_chunks(3000)) == high
        array = noise(200, 30, seed=high)
        x.resize(0)
        x.append(array)


def test_what_is_not_written_takes_no_space(shelf: Shelf) -> None:
    x = shelf.create("x", (1 << 40, 100), "float64", replace=True)
    assert x.packed_nbytes == 0
    assert x.ratio == 1
    x[-1, 5] = 3
    assert 0 < x.packed_nbytes < 1000
    assert x[(1 << 40) - 1].sum() == 3
    assert not x[[5, 1 << 39]].any()
    x.resize(1 << 39)
    assert x.packed_nbytes == 0
