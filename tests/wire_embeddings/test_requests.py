"""Requests between ranks: what is asked for arrives, and nothing that is damaged is looked up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import CorruptionError
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


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    message = np.frombuffer(noise, np.uint8)
    try:
        found = unpack_request(message, ROWS)
    except CorruptionError:
        return
    assert all(one.n <= 1 << 20 for one in found)
