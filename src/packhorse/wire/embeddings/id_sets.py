"""Packs the ids that a rank asks another rank for, a few bits each.

A set of ids is ascending and distinct, so it needs far less than its numbers: it is stored as
a bitmap, or as Elias and Fano stored posting lists (the high bits of all ids as steps in a bitmap,
the low bits packed), whichever is smaller. Both sizes follow from the number of ids and
the universe, so the message does not say which it is. A list, whose order matters, is packed with
as many bits as the largest number may need.

Everything that is unpacked is checked: a wrong size, a wrong count, an id outside of the universe
or out of order is a `CorruptionError`. Sources: Elias, "Efficient storage and retrieval by content
and address of static files", 1974; Vigna, "Quasi-succinct indices", 2013.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packhorse import _core
from packhorse.errors import CorruptionError, TruncationError

__all__ = [
    "list_nbytes",
    "pack_list",
    "pack_set",
    "set_nbytes",
    "unpack_list",
    "unpack_set",
]

_Bytes = npt.NDArray[np.uint8]
_Ids = npt.NDArray[np.int64]


def set_nbytes(n: int, universe: int) -> int:
    """How many bytes a set takes.

    Args:
        n: how many ids.
        universe: ids are in 0 <= id < universe.
    """
    if n == 0:
        return 0
    return min(_bytes(universe), sum(_split_nbytes(n, universe)))


def pack_set(ids: _Ids, universe: int) -> _Bytes:
    """The bytes of a set.

    Args:
        ids: [n], ascending and distinct, in 0 <= id < universe.
        universe: as `set_nbytes`.
    """
    n = len(ids)
    if n == 0:
        return np.empty(0, np.uint8)
    if _is_bitmap(n, universe):
        return _bitmap(ids, universe)
    low_bits = _low_bits(n, universe)
    steps = (ids >> low_bits) + np.arange(n)
    high = _bitmap(steps, n + ((universe - 1) >> low_bits))
    return np.concatenate([pack_list(ids & ((1 << low_bits) - 1), low_bits), high])


def unpack_set(packed: _Bytes, n: int, universe: int) -> _Ids:
    """What `pack_set` packed.

    Args:
        packed: `set_nbytes(n, universe)` bytes.
        n: how many ids.
        universe: as `set_nbytes`.

    Raises:
        CorruptionError: the bytes are no such set.
    """
    if n > universe:
        raise CorruptionError(f"a set of {n} ids does not fit a universe of {universe}")
    _check_size(packed, set_nbytes(n, universe))
    if n == 0:
        return np.empty(0, np.int64)
    if _is_bitmap(n, universe):
        return _ones(packed, n, universe)
    low_bits = _low_bits(n, universe)
    low_size, _ = _split_nbytes(n, universe)
    steps = _ones(packed[low_size:], n, n + ((universe - 1) >> low_bits))
    ids = (steps - np.arange(n)) << low_bits
    ids |= unpack_list(packed[:low_size], n, low_bits)
    if ids[-1] >= universe or (ids[1:] <= ids[:-1]).any():
        raise CorruptionError(f"ids of a set are not distinct and below {universe}")
    return ids


def list_nbytes(n: int, bits: int) -> int:
    """How many bytes a list of `n` numbers of `bits` bits takes."""
    return _bytes(n * bits)


def pack_list(numbers: _Ids, bits: int) -> _Bytes:
    """The bytes of a list.

    Args:
        numbers: [n], in 0 <= number < 2 ** bits.
        bits: 0 to 63.
    """
    if bits == 0:
        return np.empty(0, np.uint8)
    packed = np.empty(list_nbytes(len(numbers), bits), np.uint8)
    _core.pack_numbers(np.ascontiguousarray(numbers, np.int64), bits, packed)
    return packed


def unpack_list(packed: _Bytes, n: int, bits: int) -> _Ids:
    """What `pack_list` packed.

    Args:
        packed: `list_nbytes(n, bits)` bytes.
        n: how many numbers.
        bits: as they were packed.

    Raises:
        CorruptionError: there are more or fewer bytes.
    """
    _check_size(packed, list_nbytes(n, bits))
    if bits == 0:
        return np.zeros(n, np.int64)
    numbers = np.empty(n, np.int64)
    _core.unpack_numbers(packed, bits, numbers)
    return numbers


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _low_bits(n: int, universe: int) -> int:
    return max(0, (universe // n).bit_length() - 1)


def _split_nbytes(n: int, universe: int) -> tuple[int, int]:
    """Bytes of the low bits, and of the steps, in the form of Elias and Fano."""
    low_bits = _low_bits(n, universe)
    return _bytes(n * low_bits), _bytes(n + ((universe - 1) >> low_bits))


def _is_bitmap(n: int, universe: int) -> bool:
    return _bytes(universe) <= sum(_split_nbytes(n, universe))


def _bitmap(ones: _Ids, universe: int) -> _Bytes:
    bitmap = np.empty(_bytes(universe), np.uint8)
    _core.mark_ids(np.ascontiguousarray(ones, np.int64), bitmap)
    return bitmap


def _ones(bitmap: _Bytes, n: int, universe: int) -> _Ids:
    ids = np.empty(n, np.int64)
    n_found = _core.find_ids(bitmap, ids)
    if n_found != n or ids[-1] >= universe:
        raise CorruptionError(f"a bitmap marks {n_found} ids, not {n} below {universe}")
    return ids


def _check_size(packed: _Bytes, expected: int) -> None:
    if len(packed) < expected:
        raise TruncationError(f"ids end after {len(packed)} bytes of {expected}")
    if len(packed) > expected:
        raise CorruptionError(f"{len(packed)} bytes of ids are too many: {expected} were announced")
