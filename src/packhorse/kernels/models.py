"""Models of rANS streams and the tables that a GPU decodes with (docs/format.md, section 6.2).

NumPy alone, and many streams at once: a frame has hundreds of them, and a loop over streams would
take longer than their upload. Loops run over symbols, buckets and codes; every statement in them
handles all streams. `slot_tables` is the construction of the format for the alias layout, with a
stack for each stream.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse.layout import NARROW_BUCKETS, PROB_BITS, PROB_SUM, WIDE_BUCKETS

__all__ = [
    "PLAIN_BUCKETS",
    "Codes",
    "Ints",
    "Words",
    "bucket_tables",
    "n_buckets_of",
    "plain_table",
    "slot_tables",
]

PLAIN_BUCKETS = PROB_SUM  # the plain layout: a bucket for each slot, so that nothing is shared

Ints = NDArray[np.int64]
Words = NDArray[np.uint32]


class Codes(NamedTuple):
    """The codes of S models.

    Attributes:
        n_codes: how many there are, shape (S,).
        freqs: frequency of each code in 1/4096, 0 from `n_codes` on, shape (S, C).
        values: the byte that each code yields, shape (S, C).
    """

    n_codes: Ints
    freqs: Ints
    values: Ints

    def take(self, rows: NDArray[np.intp]) -> "Codes":
        """Those of some of the models."""
        return Codes(self.n_codes[rows], self.freqs[rows], self.values[rows])


def n_buckets_of(n_codes: Ints) -> Ints:
    """Buckets of the layout that a model of so many codes has, `PLAIN_BUCKETS` for none."""
    narrow_or_wide = np.where(n_codes <= NARROW_BUCKETS, NARROW_BUCKETS, WIDE_BUCKETS)
    return np.where(n_codes <= WIDE_BUCKETS, narrow_or_wide, PLAIN_BUCKETS)


def plain_table(codes: Codes) -> Words:
    """The entries of all slots of models in the plain layout.

    Returns:
        Shape (S, 4096), an entry as in `slot_tables`.
    """
    starts = np.cumsum(codes.freqs, axis=1) - codes.freqs
    entries = _entries(codes.freqs, -starts, codes.values)
    pairs = zip(entries, codes.freqs, strict=True)
    return np.stack([np.repeat(row, freqs) for row, freqs in pairs])


def _entries(freqs: Ints, bias: Ints, values: Ints) -> Words:
    packed = freqs | (bias & (PROB_SUM - 1)) << PROB_BITS | values << 24
    return packed.astype(np.uint32)


def bucket_tables(codes: Codes, n_buckets: int) -> Words:
    """`slot_tables`, with the buckets of narrower layouts cut into so many.

    A bucket of 128 slots is two of 64, with the same threshold and the same entries.
    """
    tables = np.empty((len(codes.n_codes), 3, n_buckets), np.uint32)
    own = n_buckets_of(codes.n_codes)
    for narrower in (NARROW_BUCKETS, WIDE_BUCKETS):
        rows = np.flatnonzero(own == narrower)
        if rows.size:
            built = slot_tables(codes.take(rows), narrower)
            tables[rows] = np.repeat(built, n_buckets // narrower, axis=2)
    return tables


def slot_tables(codes: Codes, n_buckets: int) -> Words:
    """The alias layout of S models.

    Args:
        codes: of at most `n_buckets` codes each, whose frequencies sum to 4096.
        n_buckets: 32 or 64.

    Returns:
        Shape (S, 3, `n_buckets`): the slot at which the second part of a bucket begins; the entry
        of its first part; that of its second. An entry has the frequency in bits 0 to 11, the rank
        of a slot less the slot (modulo 4096) in bits 12 to 23, and the value in bits 24 to 31.
    """
    n_slots = PROB_SUM // n_buckets
    freqs = np.zeros((len(codes.freqs), n_buckets), np.int64)
    width = min(n_buckets, codes.freqs.shape[1])
    freqs[:, :width] = codes.freqs[:, :width]
    values = np.zeros_like(freqs)
    values[:, :width] = codes.values[:, :width]
    own, alias = _share_buckets(freqs, n_slots)
    bucket = np.broadcast_to(np.arange(n_buckets), own.shape)
    mirrored = bucket % 2 == 1
    owners = np.stack(
        [np.where(mirrored, alias, bucket), np.where(mirrored, bucket, alias)], axis=2
    )
    first = np.where(mirrored, n_slots - own, own)
    lengths = np.stack([first, n_slots - first], axis=2)
    starts = bucket[:, :, None] * n_slots + np.stack([np.zeros_like(first), first], axis=2)
    ranks = _first_ranks(owners.reshape(len(own), -1), lengths.reshape(len(own), -1))
    rows = np.arange(len(own))[:, None, None]
    bias = ranks.reshape(starts.shape) - starts
    entries = _entries(freqs[rows, owners], bias, values[rows, owners])
    return np.stack([starts[:, :, 1].astype(np.uint32), entries[..., 0], entries[..., 1]], axis=1)


def _share_buckets(freqs: Ints, n_slots: int) -> tuple[Ints, Ints]:
    """Slots of each bucket that its code keeps, and the code that gets the others."""
    rows = np.arange(len(freqs))
    rest, own = freqs.copy(), np.full_like(freqs, n_slots)
    alias = np.broadcast_to(np.arange(freqs.shape[1]), freqs.shape).copy()
    low, n_low = _stacks(rest < n_slots)
    high, n_high = _stacks(rest > n_slots)
    while rows.size:
        rows = rows[n_low[rows] > 0]
        n_low[rows] -= 1
        s, h = low[rows, n_low[rows]], high[rows, n_high[rows] - 1]
        own[rows, s] = rest[rows, s]
        alias[rows, s] = h
        rest[rows, h] -= n_slots - rest[rows, s]
        n_high[rows] -= rest[rows, h] <= n_slots
        lowered = rest[rows, h] < n_slots
        pushed = rows[lowered]
        low[pushed, n_low[pushed]] = h[lowered]
        n_low[pushed] += 1
    return own, alias


def _stacks(members: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each row its members in ascending order, and how many they are."""
    return np.argsort(~members, axis=1, kind="stable"), members.sum(axis=1)


def _first_ranks(owners: Ints, lengths: Ints) -> Ints:
    """For each run of slots, how many slots before it belong to its code."""
    rows = np.arange(len(owners))
    n_before = np.zeros((len(owners), owners.shape[1] // 2), np.int64)
    ranks = np.empty_like(owners)
    for part in range(owners.shape[1]):
        code = owners[:, part]
        ranks[:, part] = n_before[rows, code]
        n_before[rows, code] += lengths[:, part]
    return ranks
