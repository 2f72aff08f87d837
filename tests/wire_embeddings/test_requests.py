"""Requests between ranks: what is asked for arrives, and nothing that is damaged is looked up."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import CorruptionError, TruncationError
from packhorse.wire.embeddings.requests import Wanted, pack_request, unpack_request

ROWS = [3, 1000, 1_000_000, 50, 200_000]


def wanted(seed: int) -> list[Wanted]:
    """Sets, dense and sparse, an empty one, and bags."""
    generator = np.random.default_rng(seed)
    sets = [np.sort(generator.choice(n, min(n, 40), replace=False)) for n in ROWS[:3]]
    lengths = generator.integers(1, 6, 12)
    return [
        *(Wanted(ids.astype(np.int64)) for ids in sets),
        Wanted(np.empty(0, np.int64)),
        Wanted(generator.integers(0, ROWS[4], lengths.sum()), lengths),
    ]


@given(st.integers(0, 1 << 20))
def test_requests_come_back(seed: int) -> None:
    asked = wanted(seed)
    found = unpack_request(pack_request(asked, ROWS), ROWS)
    for a, b in zip(asked, found, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert (a.lengths is None) == (b.lengths is None)
        assert a.lengths is None or np.array_equal(a.lengths, b.lengths)


def test_every_truncation_is_refused() -> None:
    message = pack_request(wanted(1), ROWS)
    for length in range(len(message)):
        with pytest.raises(CorruptionError):
            unpack_request(message[:length], ROWS)
    with pytest.raises(CorruptionError, match="more than it announced"):
        unpack_request(np.append(message, message[:3]), ROWS)


@given(st.integers(0, 1 << 20), st.data())
def test_flipped_bits_never_ask_for_rows_that_are_not_there(seed: int, data: st.DataObject) -> None:
    message = pack_request(wanted(seed), ROWS)
    at = data.draw(st.integers(0, 8 * len(message) - 1))
    message[at // 8] ^= 1 << at % 8
    try:
        found = unpack_request(message, ROWS)
    except CorruptionError:
        return
    for one, rows in zip(found, ROWS, strict=True):
        assert one.lengths is None or (one.lengths.min() >= 1 and one.lengths.sum() == len(one.ids))
        assert not len(one.ids) or (one.ids.min() >= 0 and one.ids.max() < rows)


def test_few_bytes_cannot_ask_for_many_ids() -> None:
    """A table of one row needs no bits for its ids, but a list of them has some."""
    bags = Wanted(np.zeros(6, np.int64), np.array([1, 5]))
    message = pack_request([bags], [1])
    assert np.array_equal(unpack_request(message, [1])[0].ids, bags.ids)
    message[:8] = np.array([1 << 30, 1 << 31], "<u4").view(np.uint8)
    with pytest.raises(CorruptionError):
        unpack_request(message, [1])


def test_bags_without_bytes_for_their_lengths_are_not_believed() -> None:
    """Lengths of 0 bits take no bytes, so only the ids can show how many bags there are."""
    message = pack_request([Wanted(np.arange(6), np.ones(6, np.int64))], [10])
    message[:8] = np.array([0xFFFFFFFF, 0xFFFFFFFF], "<u4").view(np.uint8)
    tracemalloc.start()
    with pytest.raises(TruncationError, match="a request ends after"):
        unpack_request(message, [10])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ([11, 0], r"a request wants \[11\] of \[10\] rows"),
        ([3, 0], r"too many|more than it announced|marks"),
        ([7, 6], "7 bags of 6 ids"),
        ([0, 6], "0 bags of 6 ids"),
        ([5, 6], r"bags of 5 ids were announced as 6|more than it announced"),
        ([6, 7], "more than it announced|bags of 6 ids were announced as 7|ends after"),
    ],
)
def test_false_counts_are_refused(head: list[int], words: str) -> None:
    bags = pack_request([Wanted(np.arange(6), np.ones(6, np.int64))], [10])
    bags[:8] = np.array(head, "<u4").view(np.uint8)
    with pytest.raises(CorruptionError, match=words):
        unpack_request(bags, [10])


def test_ids_outside_of_the_table_are_refused() -> None:
    """Ten rows take four bits for an id, and a bitmap two bytes: both could say more."""
    bags = pack_request([Wanted(np.array([1, 9]), np.array([2]))], [10])
    bags[-1] = 0xF1
    with pytest.raises(CorruptionError, match="id 15 of a request is not below 10"):
        unpack_request(bags, [10])
    ones = pack_request([Wanted(np.arange(4))], [10])
    ones[-1] = 0x80
    with pytest.raises(CorruptionError, match=r"ids|bitmap"):
        unpack_request(ones, [10])


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    message = np.frombuffer(noise, np.uint8)
    try:
        found = unpack_request(message, ROWS)
    except CorruptionError:
        return
    assert all(one.n <= 1 << 20 for one in found)
