"""Models of rANS streams and the tables that a GPU decodes with (docs/format.md, section 6.2).

Many streams at once: a frame has hundreds of them, and a loop over streams in Python would take
longer than their upload. The core builds tables of the alias layout, as the decoder of the host has
them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.layout import NARROW_BUCKETS, PROB_BITS, PROB_SUM, WIDE_BUCKETS

__all__ = [
    "PLAIN_BUCKETS",
    "Codes",
    "Ints",
    "Words",
    "bucket_tables",
    "n_buckets_of",
    "plain_table",
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
        Shape (S, 4096), an entry as in `bucket_tables`.
    """
    starts = np.cumsum(codes.freqs, axis=1) - codes.freqs
    entries = _entries(codes.freqs, -starts, codes.values)
    pairs = zip(entries, codes.freqs, strict=True)
    return np.stack([np.repeat(row, freqs) for row, freqs in pairs])


def _entries(freqs: Ints, bias: Ints, values: Ints) -> Words:
    packed = freqs | (bias & (PROB_SUM - 1)) << PROB_BITS | values << 24
    return packed.astype(np.uint32)


def bucket_tables(codes: Codes, n_buckets: int) -> Words:
    """The alias layout of S models.

    Args:
        codes: of at most `n_buckets` codes each, whose frequencies sum to 4096.
        n_buckets: 32 or 64; buckets of a narrower layout are cut into so many. A bucket of 128
            slots is two of 64, with the same threshold and the same entries.

    Returns:
        Shape (S, 3, `n_buckets`): the slot at which the second part of a bucket begins; the entry
        of its first part; that of its second. An entry has the frequency in bits 0 to 11, the rank
        of a slot less the slot (modulo 4096) in bits 12 to 23, and the value in bits 24 to 31.

    Raises:
        ValueError: other codes.
    """
    tables = np.empty((len(codes.n_codes), 3, n_buckets), np.uint32)
    freqs, values = np.ascontiguousarray(codes.freqs), np.ascontiguousarray(codes.values)
    _core.bucket_tables(np.ascontiguousarray(codes.n_codes), freqs, values, tables)
    return tables
