"""Section 6.6 of docs/format.md: the units of a chunk as differences from those of a base.

Units are integers here. Only `round_f32` knows the values that units stand for: it rounds a base of
F32 to the narrower dtype of its frame.
"""

import struct
from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import DType, Split
from packhorse.reference.rans import check_coder, decode_words, read_states
from packhorse.reference.symbols import (
    read_bit_plane,
    read_escapes,
    read_model,
    resolve_escapes,
)
from packhorse.reference.words import Reader, equal, within, zero

__all__ = ["base_units", "decode_delta", "order", "round_f32", "unit_of"]

_MANTISSA_BITS = {"BF16": 7, "F16": 10}


# Base units.
def base_units(data: bytes, base: DType, dtype: DType) -> list[int]:
    """Returns the units of the base, as units of the frame's dtype."""
    size = base.unit_nbytes
    units = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    return units if base == dtype else [round_f32(unit, dtype.name) for unit in units]


def round_f32(x: int, name: str) -> int:
    """Rounds the bits of an F32 to those of the nearest BF16 or F16, ties to even."""
    mantissa_bits = _MANTISSA_BITS[name]
    infinity = 0x7FFF >> mantissa_bits << mantissa_bits
    sign, exponent, mantissa = x >> 31 << 15, x >> 23 & 0xFF, x & 0x7FFFFF
    if exponent == 0xFF and mantissa:
        return sign | infinity | 1 << (mantissa_bits - 1) | mantissa >> (23 - mantissa_bits)
    # The value is significand * 2^power; the result is a multiple of 2^step.
    significand = mantissa | (1 << 23 if exponent else 0)
    power = max(exponent, 1) - 150
    bias = (infinity >> mantissa_bits) // 2
    least_step = 1 - bias - mantissa_bits
    step = max(power + 23 - mantissa_bits, least_step)
    kept, dropped = divmod(significand, 1 << (step - power))
    kept += 2 * dropped + kept % 2 > 1 << (step - power)
    return sign | min(kept + (step - least_step << mantissa_bits), infinity)


# Differences.
def order(x: int, dtype: DType) -> int:
    """Returns the page's `o`: the position of a unit among all units, in the order of their
    values."""
    half = 1 << (8 * dtype.unit_nbytes - 1)
    if Split.FLOAT not in dtype.splits:
        return x
    return x + half if x < half else 2 * half - 1 - x


def unit_of(y: int, dtype: DType) -> int:
    """Returns the unit at a position: the inverse of `order`."""
    half = 1 << (8 * dtype.unit_nbytes - 1)
    if Split.FLOAT not in dtype.splits:
        return y
    return y - half if y >= half else 2 * half - 1 - y


# Key and class.
def _key(b: int, dtype: DType) -> int:
    w = 8 * dtype.unit_nbytes
    if Split.FLOAT not in dtype.splits:
        return (b if b < 1 << (w - 1) else (1 << w) - 1 - b).bit_length()
    if w == 8:
        return b << 1 & 0xFF | b >> 7
    return b >> (w - 16) >> (4 if dtype.name == "F64" else 7) & 0xFF


# Tokens.
class _ExtraBits:
    """Takes bits, the lowest bit of a byte first."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset, self._n_taken = data, offset, 0

    def take(self, n: int) -> int:
        start, stop = self._n_taken, self._n_taken + n
        if stop > 8 * len(self._data):
            where = f"the {len(self._data)} bytes at byte offset {self._offset}"
            raise CorruptionError(f"a token takes {n} extra bits, but {where} have fewer left")
        self._n_taken = stop
        around = int.from_bytes(self._data[start // 8 : -(-stop // 8)], "little")
        return around >> start % 8 & ((1 << n) - 1)

    def check_end(self) -> None:
        """Checks that all bytes are used, and that the bits left over in the last one are zero."""
        used = -(-self._n_taken // 8)
        equal(len(self._data), used, "number of bytes of extra bits", self._offset)
        left = self._data[-1] >> (self._n_taken - 1) % 8 + 1 if used else 0
        equal(left, 0, "bits left over behind the extra bits", self._offset)


def _read_t(token: int, extra: _ExtraBits) -> int:
    """Returns the `t` of a token and its extra bits."""
    if token < layout.DELTA_DIRECT_TOKENS:
        return token - layout.DELTA_DIRECT_TOKENS // 2
    if token == layout.DELTA_FULL_TOKEN:
        t = extra.take(64)
        return t - (1 << 64) if t >> 63 else t
    is_negative, n_lower = extra.take(1), token - 28
    m = 1 << n_lower | extra.take(n_lower)
    return -1 - m if is_negative else m


# The stream.
class _Head(NamedTuple):
    n_lanes: int
    extra_nbytes: int
    n_escapes: int
    thresholds: bytes
    shifts: bytes  # of each class


def decode_delta(reader: Reader, dtype: DType, base: list[int]) -> bytes:
    """Decodes a chunk, given the units of its base, to the bytes of its units."""
    return b"".join(
        unit.to_bytes(dtype.unit_nbytes, "little") for unit in _decode_units(reader, dtype, base)
    )


def _decode_units(reader: Reader, dtype: DType, base: list[int]) -> list[int]:
    if reader.is_empty:
        return base
    head = _read_head(reader, 8 * dtype.unit_nbytes)
    models = [read_model(reader, layout.DELTA_TOKENS) for _ in head.shifts]
    classes = [sum(t <= _key(b, dtype) for t in head.thresholds) for b in base]
    members = [[u for u, c in enumerate(classes) if c == k] for k in range(len(models))]
    sizes = [len(units) for units in members]
    states = read_states(reader, head.n_lanes)
    raw = [_read_raw_bits(reader, *pair) for pair in zip(sizes, head.shifts, strict=True)]
    extra = _ExtraBits(reader.take(head.extra_nbytes, "extra bits"), reader.offset)
    escapes = read_escapes(reader, head.n_escapes, layout.DELTA_TOKENS)
    at = reader.offset
    decoded = decode_words(reader, models, sizes, states)
    odd_states = [state for state in states if state != layout.STATE_LOWER_BOUND]
    equal(odd_states, [], "list of last states other than 2^16", at)
    tokens = iter(resolve_escapes(decoded, escapes, reader.start + 8))
    units = list(base)
    for places, low, shift in zip(members, raw, head.shifts, strict=True):
        for unit, bits in zip(places, low, strict=True):
            d = (_read_t(next(tokens), extra) << shift) + bits
            y = (order(base[unit], dtype) + d) % (1 << 8 * dtype.unit_nbytes)
            units[unit] = unit_of(y, dtype)
    extra.check_end()
    return units


def _read_head(reader: Reader, w: int) -> _Head:
    at = reader.start
    fields = reader.take(layout.DELTA_MODELS_OFFSET, "bytes of the delta header")
    lanes_log, prob_bits, n_classes, reserved, extra_nbytes, n_escapes, more, t, shifts = (
        struct.unpack("<BBBcII4s8s8s", fields)
    )
    check_coder(lanes_log, prob_bits, at)
    within(n_classes, 1, layout.MAX_DELTA_CLASSES, "n_classes", at + 2)
    zero(reserved, "reserved bytes", at + 3)
    zero(more, "reserved bytes", at + 12)
    thresholds = t[: n_classes - 1]
    equal([*thresholds], sorted(thresholds), "thresholds", at + 16)
    zero(t[n_classes - 1 :], "unused thresholds", at + 16 + n_classes - 1)
    within(max(shifts[:n_classes]), 0, w - 1, "a shift", at + 24)
    zero(shifts[n_classes:], "unused shifts", at + 24 + n_classes)
    return _Head(1 << lanes_log, extra_nbytes, n_escapes, thresholds, shifts[:n_classes])


def _read_raw_bits(reader: Reader, n: int, shift: int) -> list[int]:
    """Reads the raw bits of the `n` units of a class, in the order of decoding."""
    low = [0] * n
    for j in range(shift // 8):
        plane = reader.take(n, "bytes of raw bits")
        low = [below | byte << 8 * j for below, byte in zip(low, plane, strict=True)]
    for j in range(shift // 8 * 8, shift):
        bits = read_bit_plane(reader, n, "bytes of a raw bit plane")
        low = [below | bit << j for below, bit in zip(low, bits, strict=True)]
    return low
