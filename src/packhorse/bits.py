"""Elements of 4 and 6 bits, as safetensors stores them and as NumPy holds them.

In a file, elements follow each other without gaps, from the low bits of a byte to the high ones:
two elements of 4 bits take one byte, four of 6 bits take three. NumPy gives each element a byte of
its own and uses the low bits of that.
"""

from __future__ import annotations

import math

import numpy as np

from packhorse.codecs.base import ByteArray

__all__ = ["pack_bits", "unpack_bits_into"]


def pack_bits(elements: ByteArray, bits: int) -> ByteArray:
    """Put elements together without gaps.

    Args:
        elements: one element in each byte, whose high bits are ignored. All elements together must
            take a whole number of bytes.
        bits: bits of an element, 4 or 6.

    Returns:
        The bytes, a new array.
    """
    n_bytes, n_elements, word = _group(bits)
    words = np.zeros(elements.size // n_elements, word)
    for i in range(n_elements):
        words |= (elements[i::n_elements].astype(word) & (1 << bits) - 1) << bits * i
    packed = np.empty(words.size * n_bytes, np.uint8)
    for i in range(n_bytes):
        packed[i::n_bytes] = words >> 8 * i & 0xFF
    return packed


def unpack_bits_into(data: ByteArray, bits: int, out: ByteArray) -> None:
    """Give each element a byte of its own.

    Args:
        data: elements without gaps.
        bits: bits of an element, 4 or 6.
        out: a byte for each element; written to.
    """
    n_bytes, n_elements, word = _group(bits)
    words = np.zeros(data.size // n_bytes, word)
    for i in range(n_bytes):
        words |= data[i::n_bytes].astype(word) << 8 * i
    for i in range(n_elements):
        out[i::n_elements] = words >> bits * i & (1 << bits) - 1


def _group(bits: int) -> tuple[int, int, type[np.unsignedinteger]]:
    """The fewest elements that end at a byte: their bytes, their number, and a type for a word that
    holds them."""
    n_bits = math.lcm(bits, 8)
    return n_bits // 8, n_bits // bits, np.uint8 if n_bits == 8 else np.uint32
