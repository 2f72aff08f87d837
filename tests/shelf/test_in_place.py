"""Operators in place and `apply`: equal to NumPy's and PyTorch's, also in their errors, in one
commit, and in little memory."""

import operator
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from packhorse.disk import Shelf

OPERATORS = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
]  # fmt: skip
NAMES = ["int32", "uint8", "bool", "float32", "float16", "complex64"]
NAMES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (40, 30), (3, 5, 2)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with Shelf(tmp_path_factory.mktemp("shelf") / "data.shelf") as opened:
        yield opened


def array_of(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 9, shape).astype(dtype)


def operands(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """Numbers and arrays, some of which do not fit."""
    whole = array_of(shape, dtype, seed=1)
    listed: list[Any] = [2, 0.5, 1j, True, -1, "text", None, whole, whole[None], np.float64(1.5)]
    listed += [whole.astype(np.int64), whole.astype(np.float64), [1, 2], np.ones(11)]
    if shape:
        listed += [whole[:1], whole[..., :1], whole[0], whole[0].tolist()] if whole.size else []
    return listed


def fits(operand: Any, shape: tuple[int, ...]) -> bool:
    given = np.shape(operand)
    pairs = zip(given[::-1], shape[::-1], strict=False)
    return len(given) <= len(shape) and all(size in (1, target) for size, target in pairs)


def outcome(change: Callable[[], Any]) -> type[Exception] | None:
    """The kind of NumPy's error."""
    with np.errstate(all="ignore"):
        try:
            change()
        except (TypeError, ValueError, OverflowError) as error:
            kinds = TypeError, OverflowError, ValueError
            return next(kind for kind in kinds if isinstance(error, kind))
    return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", NAMES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operators_are_those_of_numpy(shelf: Shelf, shape: tuple[int, ...], dtype: Any) -> None:
    start = array_of(shape, dtype)
    with shelf.transaction():
        for change in OPERATORS:
            for operand in operands(shape, dtype):
                expected = start.copy()
                wrong = outcome(lambda: change(expected, operand))  # noqa: B023
                shelf["x"] = start
                x = shelf["x"]
                found = outcome(lambda: change(x, operand))  # noqa: B023
                assert (found is None) == (wrong is None), (change, operand)
                if fits(operand, shape):  # otherwise NumPy may find another fault first
                    assert found == wrong, (change, operand)
                if wrong is None:
                    assert x.numpy().tobytes() == expected.tobytes(), (change, operand)
                else:
                    assert x.numpy().tobytes() == start.tobytes(), (change, operand)


def test_an_operator_may_raise_what_numpy_raises_and_changes_nothing(shelf: Shelf) -> None:
    shelf["i"] = np.arange(5)
    x = shelf["i"]
    n_commits = shelf.info().n_commits
    with pytest.raises(TypeError, match="Cannot cast ufunc 'add' output from dtype"):
        x += 0.5
    with shelf.transaction(), pytest.raises(TypeError, match="Cannot cast ufunc"):
        x += 0.5
    with pytest.raises(ValueError, match=r"'i' of shape \(5,\) cannot take the shape \(2, 5\)"):
        x += np.ones((2, 5), int)
    assert shelf.info().n_commits == n_commits
    assert x.numpy().tolist() == [0, 1, 2, 3, 4]


def test_the_operand_is_a_tensor_of_a_shelf(shelf: Shelf, tmp_path: Path) -> None:
    array = array_of((300, 40), np.float32)
    with Shelf(tmp_path / "other.shelf") as other:
        shelf["a"], other["b"], shelf["row"] = array, array + 1, array[0]
        a = shelf["a"]
        a += other["b"]
        a *= a
        a -= shelf["row"]
        a /= a
        assert (a.numpy() == 1).all()
        shelf["a"] = array
        a += shelf["a"]
        assert np.array_equal(a, array * 2)
        shelf["short"] = array[:3]
        with pytest.raises(ValueError, match=r"'short' of shape \(3, 40\) cannot take the shape"):
            shelf["short"] += a
    shelf["a"] = array
    shelf["a"] += 1
    assert np.array_equal(shelf["a"], array + 1)


def test_the_operand_and_the_elements_are_of_pytorch(shelf: Shelf, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    array = array_of((300, 40), np.float32)
    shelf["a"] = array
    a = shelf["a"]
    a += torch.from_numpy(array)
    a *= torch.tensor(2.0)
    a -= torch.ones(40, dtype=torch.bfloat16)
    assert np.array_equal(a, array * 4 - 1)
    pt = a.as_framework("pt")
    pt += array
    pt += shelf["a"]
    pt += torch.ones(40)
    pt += np.ones(40, ml_dtypes.bfloat16)
    pt += [1.0] * 40
    pt /= 2
    assert torch.equal(pt[...], torch.from_numpy((((array * 5 - 1) * 2) + 3) / 2))
    shelf["i"] = np.arange(5)
    with pytest.raises(RuntimeError, match="can't be cast"):
        shelf["i"].as_framework("pt").__iadd__(0.5)
    with pytest.raises(ValueError, match="cannot take the shape"):
        pt += torch.ones(2, 300, 40)


def test_apply(shelf: Shelf) -> None:
    array = array_of((300, 40), np.float32)
    shelf["a"] = array
    seen = []

    def change(block: np.ndarray) -> np.ndarray:
        seen.append(len(block))
        return np.sqrt(block)

    n_commits = shelf.info().n_commits
    shelf["a"].apply(change, nbytes=8000)
    assert sum(seen) == 300
    assert shelf.info().n_commits == n_commits + 1
    assert np.array_equal(shelf["a"], np.sqrt(array))
    kept = []

    def in_place(block: np.ndarray) -> np.ndarray:
        block[...] = len(kept)
        kept.append(block)
        return block

    shelf["long"] = np.ones((2, 90, 7000), np.float32)
    shelf["long"].apply(in_place, nbytes=1 << 20)
    for block in kept:
        block[...] = -1  # the caller's again
    assert shelf["long"][0, 0, 0] == 0
    assert shelf["long"][1, -1, -1] == len(kept) - 1 > 1
    shelf["scalar"] = np.float32(4)
    shelf["scalar"].apply(np.sqrt)
    assert shelf["scalar"].numpy() == 2
    shelf["empty"] = np.ones((0, 3))
    shelf["empty"].apply(lambda block: 1 / 0)


def failing(shelf: Shelf, kind: str) -> Callable[[Any], Any]:
    """A function that does well at first, and then does not."""
    calls = []

    def change(block: Any) -> Any:
        calls.append(len(block))
        if len(calls) == 2 and kind == "shape":
            return block[:-1]
        if len(calls) == 2 and kind == "number":
            return 1.0
        if len(calls) == 2 and kind == "value":
            return np.array(["a"] * len(block))[:, None] + np.zeros(block.shape, "U1")
        if len(calls) == 2 and kind == "raise":
            raise LookupError("mine")
        if len(calls) == 2 and kind == "resize":
            shelf["failing"].resize(5)
        if len(calls) == 2 and kind == "replace":
            shelf["failing"] = np.ones((200, 50))
        if len(calls) == 2 and kind == "remove":
            del shelf["failing"]
        return block + 1

    return change


FAILURES: list[tuple[str, type[Exception], str]] = [
    ("shape", ValueError, r"'failing': the function returned the shape \(\d+, 50\) for a block of"),
    ("number", ValueError, r"the function returned the shape \(\) for a block of"),
    ("value", ValueError, "could not convert string to float"),
    ("raise", LookupError, "mine"),
    ("resize", RuntimeError, "'failing': the function has resized or replaced it"),
    ("replace", RuntimeError, "'failing': the function has resized or replaced it"),
    ("remove", KeyError, "there is no tensor 'failing'"),
]


@pytest.mark.parametrize(("kind", "error", "message"), FAILURES, ids=lambda value: str(value)[:9])
def test_apply_that_fails_changes_nothing(
    shelf: Shelf, kind: str, error: type[Exception], message: str
) -> None:
    array = array_of((1000, 50), np.float64)
    shelf["failing"] = array
    n_commits = shelf.info().n_commits
    with pytest.raises(error, match=message):
        shelf["failing"].apply(failing(shelf, kind), nbytes=4096)
    assert shelf.info().n_commits == n_commits
    assert np.array_equal(shelf["failing"], array)


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_tensor_that_is_larger_than_the_budget(tmp_path: Path, *, by_columns: bool) -> None:
    """96 MiB are changed within the cache of 4 MiB, and two of the runs of 16 MiB."""
    n_rows, width = 3000, 8192
    rows = np.random.default_rng(0).integers(0, 9, (100, width)).astype(np.float32)
    with Shelf(tmp_path / "large.shelf", cache_nbytes=4 << 20) as shelf:
        x = shelf.create("x", (0, width), "float32")
        tracemalloc.start()
        try:
            with shelf.transaction():
                for _ in range(n_rows // len(rows)):
                    x.append(rows)
            appended = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            if by_columns:
                x[:, 5:7] = -1
            else:
                x += 1
                x.apply(lambda block: np.multiply(block, 2, out=block))
            changed = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            sums = sum(float(block.sum()) for block in x.iter_chunks())
            read = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        expected = (
            np.where(np.isin(np.arange(width), [5, 6]), -1, rows) if by_columns else 2 * rows + 2
        )
        assert sums == float(expected.sum()) * n_rows / len(rows)
        assert appended < 48 << 20, appended
        assert changed < (96 if by_columns else 64) << 20, changed
        assert read < 16 << 20, read


# Multiplication by a matrix.


@pytest.mark.parametrize(
    "shape", [(7, 4), (5_000, 70), (3, 5, 4), (0, 4), (2, 70_000, 64)], ids=str
)
def test_a_matrix_multiplies_all_rows(shelf: Shelf, shape: tuple[int, ...]) -> None:
    """Also where a row has more bytes than a block; without this, `x` would become an array."""
    array = array_of(shape, "float32")
    matrix = np.roll(np.eye(shape[-1], dtype="float32"), 1, axis=1) * 2
    x = shelf.create("product", shape, "float32", replace=True)
    x[...] = array
    n_commits, handle = shelf.info().n_commits, x
    x @= matrix
    assert x is handle
    assert shelf.info().n_commits == n_commits + (array.size > 0)
    array @= matrix
    np.testing.assert_array_equal(x.numpy(), array)
    shelf["product"] @= shelf_of(shelf, matrix)
    np.testing.assert_array_equal(x.numpy(), array @ matrix)


def shelf_of(shelf: Shelf, matrix: np.ndarray) -> Any:
    shelf["matrix"] = matrix
    return shelf["matrix"]


def test_matrices_that_do_not_fit(shelf: Shelf) -> None:
    shelf["x"], shelf["line"] = np.arange(12).reshape(3, 4), np.arange(4)
    x = shelf["x"]
    for matrix in (np.ones((4, 3), int), np.ones(4, int), 2, np.ones((3, 4, 4), int), None):
        with pytest.raises(ValueError, match="it needs a square matrix for its last axis"):
            x @= matrix
    with pytest.raises(ValueError, match=r"'line' of shape \(4,\) cannot be multiplied in place"):
        shelf["line"] @= np.eye(4)
    with pytest.raises(TypeError, match="Cannot cast ufunc 'matmul' output"):
        x @= np.eye(4)
    shelf.tag("multiplied")
    then = shelf.at("multiplied")["x"]
    with pytest.raises(PermissionError):
        then @= np.eye(4, dtype=int)
    x @= (2 * np.eye(4, dtype=int)).tolist()
    np.testing.assert_array_equal(x.numpy(), 2 * np.arange(12).reshape(3, 4))


def test_a_matrix_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with Shelf(tmp_path / "pt.shelf", framework="pt") as shelf:
        shelf["x"] = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
        shelf["x"] @= torch.tensor([[0, 1], [2, 0]], dtype=torch.bfloat16)
        assert shelf["x"].torch().tolist() == [[2, 0], [6, 2], [10, 4]]
