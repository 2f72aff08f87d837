"""Sections 6.1 and 6.2 of docs/format.md: symbols with raw bits, escapes, and models.

A symbol is the upper part of a byte; the lower part lies in raw bit planes. A model gives each of
4096 slots to a code, and each code to a symbol or to the escape, which is None here.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.reference.words import Reader, equal, within

__all__ = [
    "Model",
    "RawBits",
    "join_raw_bits",
    "read_bit_plane",
    "read_escapes",
    "read_model",
    "read_raw_planes",
    "resolve_escapes",
]


class RawBits(NamedTuple):
    """The two fields that say which bits are stored uncoded."""

    n_bits: int
    mask: int

    @property
    def n_symbols(self) -> int:
        """The number of symbols; each is below this."""
        return 1 << (8 - self.n_bits)

    def check(self, most: int, offset: int) -> None:
        """Checks that there are at most `most` bits and no mask beyond them. The fields are at
        `offset`."""
        within(self.n_bits, 0, most, "raw_bits", offset)
        equal(self.mask >> self.n_bits, 0, "raw_mask beyond raw_bits", offset + 1)


def read_bit_plane(reader: Reader, n: int, what: str) -> list[int]:
    """Returns bit i of the plane for each of n units, and ignores the bits behind them."""
    plane = reader.take(8 * -(-n // 64), what)
    return [plane[i // 8] >> i % 8 & 1 for i in range(n)]


def read_raw_planes(reader: Reader, n: int, raw: RawBits) -> list[int]:
    """Returns the lower bits of each of n bytes."""
    low = [0] * n
    for j in range(raw.n_bits):
        if raw.mask >> j & 1:
            bits = read_bit_plane(reader, n, "bytes of a raw bit plane")
            low = [below | bit << j for below, bit in zip(low, bits, strict=True)]
    return low


def join_raw_bits(symbols: Iterable[int], low: list[int], raw: RawBits) -> bytes:
    """Joins bytes from their upper and their lower bits."""
    return bytes(above << raw.n_bits | below for above, below in zip(symbols, low, strict=True))


def read_escapes(reader: Reader, n: int, n_symbols: int) -> bytes:
    """Reads symbols without a code of their own, all below `n_symbols`."""
    at = reader.offset
    escapes = reader.take(n, "escapes")
    for i, symbol in enumerate(escapes):
        within(symbol, 0, n_symbols - 1, "an escape", at + i)
    return escapes


def resolve_escapes(symbols: list[int | None], escapes: bytes, at: int) -> list[int]:
    """Replaces each None by the next escape; there must be as many as the field at `at` says."""
    equal(len(escapes), symbols.count(None), "n_escapes", at)
    following = iter(escapes)
    return [next(following) if symbol is None else symbol for symbol in symbols]


class Model(NamedTuple):
    """What the slots stand for."""

    symbols: list[int | None]  # of each code; None for the escape
    frequencies: tuple[int, ...]  # of each code, none of them 0
    owners: list[int]  # the code of each slot
    ranks: list[int]  # of each slot among those of its code


def read_model(reader: Reader, n_allowed: int) -> Model:
    """Section 6.2, for symbols below `n_allowed`."""
    at = reader.offset
    first, last = struct.unpack("<BB", reader.take(2, "bytes of a model"))
    n_symbols = last + 1
    within(first + n_symbols, 1, n_allowed, "end of the range of symbols", at)
    *frequencies, escape = _read_frequencies(reader, n_symbols + 1)
    codes: list[tuple[int | None, int]] = [
        (first + i, frequency) for i, frequency in enumerate(frequencies) if frequency
    ]
    if escape and len(codes) == n_allowed:
        raise CorruptionError(f"model at byte offset {at} has an escape beside codes for all")
    codes += [(None, escape)] if escape else []
    symbols, present = [symbol for symbol, _ in codes], tuple(f for _, f in codes)
    return Model(symbols, present, *_slots(present))


def _read_frequencies(reader: Reader, n: int) -> list[int]:
    at = reader.offset
    packed = reader.take(-(-3 * n // 2), "bytes of frequencies")
    bits = int.from_bytes(packed, "little")
    frequencies = [bits >> 12 * i & 0xFFF for i in range(n)]
    equal(bits >> 12 * n, 0, "half byte behind the frequencies", at)
    equal(sum(frequencies), layout.PROB_SUM, "sum of the frequencies", at)
    return frequencies


@lru_cache(maxsize=16)
def _slots(frequencies: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the owner and the rank of each slot."""
    if len(frequencies) > layout.WIDE_BUCKETS:
        owners = [code for code, frequency in enumerate(frequencies) for _ in range(frequency)]
    else:
        owners = _alias_owners(frequencies)
    counters = [count() for _ in frequencies]
    return owners, [next(counters[code]) for code in owners]


def _alias_owners(frequencies: tuple[int, ...]) -> list[int]:
    narrow = len(frequencies) <= layout.NARROW_BUCKETS
    n_buckets = layout.NARROW_BUCKETS if narrow else layout.WIDE_BUCKETS
    size = layout.PROB_SUM // n_buckets
    rest = [*frequencies, *[0] * (n_buckets - len(frequencies))]
    own, alias = [size] * n_buckets, list(range(n_buckets))
    low = [code for code in range(n_buckets) if rest[code] < size]
    high = [code for code in range(n_buckets) if rest[code] > size]
    while low:
        s, h = low.pop(), high[-1]
        own[s], alias[s] = rest[s], h
        rest[h] -= size - rest[s]
        if rest[h] <= size:
            high.pop()
            if rest[h] < size:
                low.append(h)
    owners: list[int] = []
    for b in range(n_buckets):
        parts = [[b] * own[b], [alias[b]] * (size - own[b])]
        first, second = reversed(parts) if b % 2 else parts
        owners += first + second
    return owners
