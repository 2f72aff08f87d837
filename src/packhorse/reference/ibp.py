"""Invariant Bit Packing (IBP), as published: the method that packed tables are compared with.

This is the format of AKKamath/InvariantBitPacking (commit b2f7100; EuroSys 2026, arXiv 2605.30728),
written from a description of it, the slow way. Nothing of it is in our format.

A table is a matrix of *words* of 32 or 64 bits; several narrow elements share a word. Each column
has a *mask* of bits that nearly all rows agree on, and the bits that they have. A word that agrees
takes only its other bits; any other word takes all of its bits. A bit for each word says which.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IbpFit", "decode_row", "encode_row", "fit_best", "fit_ibp", "row_nbytes"]

_THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 1.00)
_Words = NDArray[np.unsignedinteger]


class IbpFit(NamedTuple):
    """What all rows of a table share.

    Attributes:
        mask: the bits of each column that count as invariant.
        value: what they are.
        threshold: the share of rows that must agree on a bit.
    """

    mask: _Words
    value: _Words
    threshold: float


def fit_ibp(words: _Words, threshold: float) -> IbpFit:
    """The invariant bits of the columns of a table.

    Args:
        words: uint32 or uint64, (n_rows, n_words).
        threshold: more than this share of the rows must agree on a bit.
    """
    n_rows, n_words = words.shape
    kind = words.dtype.type
    mask, value = np.zeros(n_words, words.dtype), np.zeros(n_words, words.dtype)
    for bit in range(8 * words.itemsize):
        ones = (words >> kind(bit) & kind(1)).sum(0, dtype=np.int64)
        is_one, is_zero = ones > threshold * n_rows, ones < (1 - threshold) * n_rows
        mask |= (is_one | is_zero).astype(words.dtype) << kind(bit)
        value |= is_one.astype(words.dtype) << kind(bit)
    return IbpFit(mask, value, threshold)


def fit_best(words: _Words) -> IbpFit:
    """The fit with the threshold that saves the most bits, of those that the authors try."""
    fits = [fit_ibp(words, threshold) for threshold in _THRESHOLDS]
    return max(fits, key=lambda fit: int(_saved_bits(words, fit).sum()) - words.size)


def _saved_bits(words: _Words, fit: IbpFit) -> NDArray[np.int64]:
    """Bits of each row that need not be stored."""
    agrees = words & fit.mask == fit.value
    widths = np.array([int(mask).bit_count() for mask in fit.mask], np.int64)
    saved: NDArray[np.int64] = (agrees * widths).sum(1)
    return saved


def row_nbytes(words: _Words, fit: IbpFit) -> NDArray[np.int64]:
    """Bytes of each packed row; a row that does not become shorter is stored as it is."""
    size, n_words = words.itemsize, words.shape[1]
    flags = _align(-(-n_words // 8), size)
    payload = n_words * size - _saved_bits(words, fit) // 8
    packed = flags + -(-payload // size) * size
    raw = n_words * size
    sizes: NDArray[np.int64] = np.where(packed >= raw, raw, packed)
    return sizes


def _align(nbytes: int, size: int) -> int:
    return -(-nbytes // size) * size


def encode_row(row: _Words, fit: IbpFit) -> bytes | None:
    """The bytes of a row; None if it is stored as it is."""
    size = row.itemsize
    flags, bits = 0, []
    for i, word in enumerate(row):
        agrees = word & fit.mask[i] == fit.value[i]
        flags |= int(agrees) << i
        kept = ~int(fit.mask[i]) if agrees else -1
        bits += [int(word) >> b & 1 for b in reversed(range(8 * size)) if kept >> b & 1]
    head = flags.to_bytes(_align(-(-len(row) // 8), size), "little")
    n_bytes = len(row) * size - (8 * size * len(row) - len(bits)) // 8
    bits += [0] * (8 * _align(n_bytes, size) - len(bits))
    words = [bits[i : i + 8 * size] for i in range(0, len(bits), 8 * size)]
    data = head + b"".join(
        int("".join(map(str, word)), 2).to_bytes(size, "little") for word in words
    )
    return data if len(data) < len(row) * size else None


def decode_row(data: bytes, n_words: int, fit: IbpFit) -> _Words:
    """The words of a row that `encode_row` has packed."""
    size = fit.mask.itemsize
    head = _align(-(-n_words // 8), size)
    flags = int.from_bytes(data[:head], "little")
    text = "".join(
        f"{int.from_bytes(data[at : at + size], 'little'):0{8 * size}b}"
        for at in range(head, len(data), size)
    )
    row, at = np.zeros(n_words, fit.mask.dtype), 0
    for i in range(n_words):
        agrees = flags >> i & 1
        kept = ~int(fit.mask[i]) if agrees else -1
        word = int(fit.value[i]) if agrees else 0
        for b in reversed(range(8 * size)):
            if kept >> b & 1:
                word |= int(text[at]) << b
                at += 1
        row[i] = word
    return row
