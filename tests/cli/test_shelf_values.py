"""What `packhorse shelf show` makes of an index and of values, compared with NumPy's answers."""

import json
import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from cases import each

from packhorse.cli.failures import UsageError
from packhorse.cli.shelf.selection import beginning, parse_index
from packhorse.cli.shelf.statistics import describe_values, plain_values

RNG = np.random.default_rng(0)
SHAPES = [(), (0,), (3,), (20,), (7, 9), (0, 5), (5, 0), (4, 3, 20), (3, 1, 7, 30)]
INDICES = [
    "0", "-1", ":", "...", "2:", ":2", "::2", "::-1", "-3:", "5:1:-2", "1:100:3", "0,0", "...,0",
    "0,...", ":,1", "-1,::-1", "...,2:,:", "1,...,-1", " 1 , 0 ", "::-4", "3:3",
]  # fmt: skip


@each("text, shape", product(INDICES, SHAPES))
def test_an_index_is_as_in_numpy(text: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    try:
        wanted = array[eval(f"np.s_[{text}]")]
    except IndexError:
        with pytest.raises(UsageError, match=r"out of bounds|items"):
            beginning(parse_index(text), shape)
        return
    places, selected = beginning(parse_index(text), shape)
    assert selected == wanted.shape
    limits = [2] * (wanted.ndim - 2) + [6, 8][max(0, 2 - wanted.ndim) :]
    first = wanted[tuple(slice(limit) for limit in limits)]
    np.testing.assert_array_equal(array[places], first)


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "x", "1.5", "[1,2]", "None", "1:2:3:4", "::0", "...,...", "1;2", "- 1:"]
)
def test_what_is_no_index_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="index"):
        parse_index(text)


DTYPES = [
    np.bool_, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_statistics_are_those_of_numpy(dtype: type) -> None:
    values = (RNG.normal(0, 2, (100, 7)) + 3).clip(0, 6).astype(dtype)
    values[5] = 0
    found = describe_values(values[i : i + 13] for i in range(0, 100, 13))
    plain = np.abs(values) if np.dtype(dtype).kind == "c" else values
    wide = plain.astype(np.float64)
    assert (found.n_values, found.n_nan, found.n_infinite) == (700, 0, 0)
    assert found.n_zero == int((wide == 0).sum()) >= 7
    assert found.min == 0
    assert found.max == pytest.approx(wide.max(), rel=1e-6)
    assert found.mean == pytest.approx(wide.mean(), rel=1e-6)


def test_statistics_leave_out_what_is_not_finite() -> None:
    values = np.array([1, np.nan, -np.inf, 3, np.inf, -0.0], np.float32)
    found = describe_values([values, values[:0], np.float32([np.nan])])
    assert (found.n_values, found.n_nan, found.n_infinite, found.n_zero) == (7, 2, 2, 1)
    assert (found.min, found.max, found.mean) == (0, 3, pytest.approx(4 / 3))
    for nothing in ([], [values[:0]], [np.full(3, np.nan)]):
        found = describe_values(nothing)
        assert (found.min, found.max, found.mean) == (None, None, None)


def test_statistics_of_extremes_are_exact() -> None:
    """Integers beyond 2^53 keep their ends, and sums beyond the range of doubles their mean."""
    large = np.array([2**64 - 1, 2**64 - 2], np.uint64)
    found = describe_values([large, large[1:]])
    assert (found.min, found.max) == (2**64 - 2, 2**64 - 1)
    ends = np.array([np.finfo(np.float64).max] * 4)
    assert describe_values([ends, ends]).mean == ends[0]
    assert describe_values([np.complex64([3e38 + 3e38j])]).max == pytest.approx(3e38 * 2**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_values_become_json(dtype: type) -> None:
    values = RNG.normal(0, 2, (2, 3)).clip(0, 6).astype(dtype)
    told = json.loads(json.dumps(plain_values(values), allow_nan=False))
    assert np.array(told).shape == (2, 3)
    np.testing.assert_array_equal(np.array(told).astype(dtype), values)
    assert json.loads(json.dumps(plain_values(values[0, 0]), allow_nan=False)) == told[0][0]


def test_strange_values_become_words() -> None:
    assert plain_values(np.float32([np.nan, np.inf, -np.inf, 0.5])) == ["nan", "inf", "-inf", 0.5]
    assert plain_values(np.complex64([1 + 2j])) == ["(1+2j)"]
