"""Ids in a few bits: what is packed comes back, and what is damaged is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import _core
from packhorse.errors import CorruptionError
from packhorse.wire.embeddings.id_sets import (
    list_nbytes,
    pack_list,
    pack_set,
    set_nbytes,
    unpack_list,
    unpack_set,
)


@st.composite
def sets(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    universe = draw(st.one_of(st.integers(1, 300), st.integers(1, 1 << 40)))
    ids = draw(st.sets(st.integers(0, universe - 1), max_size=200))
    return np.array(sorted(ids), np.int64), universe


@given(sets())
def test_sets_come_back(case: tuple[np.ndarray, int]) -> None:
    ids, universe = case
    packed = pack_set(ids, universe)
    assert len(packed) == set_nbytes(len(ids), universe)
    assert np.array_equal(unpack_set(packed, len(ids), universe), ids)


@given(st.integers(0, 63), st.integers(0, 50), st.integers(0, 1 << 30))
def test_lists_come_back(bits: int, n: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, n, dtype=np.int64)
    packed = pack_list(numbers, bits)
    assert len(packed) == list_nbytes(n, bits)
    assert np.array_equal(unpack_list(packed, n, bits), numbers)
    whole = sum(number << bits * i for i, number in enumerate(numbers.tolist()))
    assert int.from_bytes(packed.tobytes(), "little") == whole


def test_the_core_refuses_what_does_not_fit() -> None:
    """Sizes and ids that a mistake of the caller would make it write or read outside."""
    ids = np.array([3, 17], np.int64)
    for wrong in (np.array([3, 24], np.int64), np.array([-1], np.int64)):
        with pytest.raises(ValueError, match="an id is outside"):
            _core.mark_ids(wrong, np.empty(3, np.uint8))
    for bits, nbytes in ((0, 0), (64, 16), (5, 3), (5, 1)):
        with pytest.raises(ValueError, match=r"must (be|fit)"):
            _core.pack_numbers(ids, bits, np.empty(nbytes, np.uint8))
        with pytest.raises(ValueError, match=r"must (be|fit)"):
            _core.unpack_numbers(np.empty(nbytes, np.uint8), bits, ids)
    bitmap = np.full(9, 0xFF, np.uint8)
    found = np.zeros(4, np.int64)
    assert _core.find_ids(bitmap, found[:3]) == 72
    assert found.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(("n", "universe"), [(1000, 1_000_000), (20_000, 1_000_000), (500, 1000)])
def test_sets_take_few_bits_more_than_they_must(n: int, universe: int) -> None:
    least = math.log2(math.comb(universe, n)) / 8
    assert set_nbytes(n, universe) < 1.15 * least + 2


@given(sets(), st.data())
def test_damaged_sets_are_refused_or_are_other_sets(
    case: tuple[np.ndarray, int], data: st.DataObject
) -> None:
    """A flipped bit that gives ascending ids in range cannot be seen here: the exchange of bytes
    has checksums. Nothing else may come out."""
    ids, universe = case
    packed = pack_set(ids, universe)
    if not len(packed):
        return
    at = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[at // 8] ^= 1 << at % 8
    try:
        found = unpack_set(packed, len(ids), universe)
    except CorruptionError:
        return
    assert len(found) == len(ids)
    assert (np.diff(found) > 0).all()
    assert found[0] >= 0
    assert found[-1] < universe


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_sizes_are_refused(change: int) -> None:
    packed = pack_set(np.arange(0, 1000, 7), 1000)
    wrong = packed[:-1] if change < 0 else np.append(packed, packed[:1])
    with pytest.raises(CorruptionError, match="bytes"):
        unpack_set(wrong, len(range(0, 1000, 7)), 1000)
    with pytest.raises(CorruptionError, match="does not fit a universe"):
        unpack_set(packed, 1001, 1000)
