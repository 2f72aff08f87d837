"""Section 13 of docs/format.md: bounded codes, decoded and encoded the slow way, with NumPy.

This module is written from the page alone; the C++ coder and the kernels are tested against it.
The page defines every byte that this release's encoder writes, so an encoder is here too.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import (
    BOUNDED_ALIGNMENT,
    BOUNDED_BLOCK,
    BOUNDED_CRC_OFFSET,
    BOUNDED_DTYPES,
    BOUNDED_ENTRY,
    BOUNDED_FREE_SLOTS,
    BOUNDED_HEADER,
    BOUNDED_LANES,
    BOUNDED_MAGIC,
    BOUNDED_SLOT_SHARE,
    BOUNDED_VERSION,
    DTYPE_BY_CODE,
    MAX_BOUNDED_BITS,
    BoundedForm,
    Rounding,
)
from packhorse.reference.words import crc32c

__all__ = ["Entry", "codes_nbytes", "decode_message", "encode_message", "pack_codes", "step_of"]

_Array = NDArray[Any]
_NUMPY = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
_LARGEST = {
    "F16": 65504.0,
    "BF16": math.ldexp(2 - 2**-7, 127),
    "F32": float(np.finfo(np.float32).max),
    "F64": float(np.finfo(np.float64).max),
}
_DIGITS = {4: 24, 8: 53}  # by the bytes of a number of the coder


@dataclass(frozen=True)
class Entry:
    """The fields of a segment; those before `step` are what an encoder is asked for."""

    n: int
    bound: float
    bits: int
    center: float
    step: float = 0.0
    n_escapes: int = 0
    doublings: int = 0


def _number_of(name: str) -> type[np.floating[Any]]:
    """The numbers that elements of a dtype are computed with."""
    return np.float64 if name == "F64" else np.float32


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise CorruptionError(f"bounded message: {fault}")


# Decoding, in the order of the page.


def decode_message(message: bytes) -> tuple[str, list[Entry], _Array]:
    """The dtype of a message, its table, and its elements.

    Raises:
        TruncationError: bytes are missing at the end.
        CompatibilityError: the message is of a later version.
        CorruptionError: it breaks another rule of the page.
    """
    name, form, n_segments = _read_header(message)
    entries, at = _read_table(message, name, form, n_segments)
    codes = []
    for entry in entries:
        codes.append(message[at : at + codes_nbytes(entry.n, entry.bits)])
        at += len(codes[-1])
    counts, at = _read_counts(message, at, entries, form)
    values = []
    for entry, packed, per_block in zip(entries, codes, counts, strict=True):
        slots = _n_slots(entry, form)
        end = at + slots * np.dtype(_NUMPY[name]).itemsize
        _require(end <= len(message), "the escapes are cut off")
        escapes = np.frombuffer(message[at:end], _NUMPY[name])
        unused = escapes[entry.n_escapes :].tobytes()
        _require(not any(unused), "a slot without an escape is not zero")
        values.append((entry, packed, per_block, escapes[: entry.n_escapes]))
        at = end
    _require(at == len(message), "the parts do not end with the message")
    for entry, _, per_block, _ in values:
        _require(sum(per_block or []) == entry.n_escapes, "the counts do not sum up")
    parts = [_decode_segment(name, *value) for value in values]
    return name, entries, np.concatenate([np.empty(0, _NUMPY[name]), *parts])


def _read_header(message: bytes) -> tuple[str, BoundedForm, int]:
    if len(message) < BOUNDED_HEADER.size:
        raise TruncationError("bounded message: it ends before its header does")
    fields = BOUNDED_HEADER.unpack(message[: BOUNDED_HEADER.size])
    magic, version, code, rounding, form, n_segments, crc, nbytes, reserved = fields
    _require(magic == BOUNDED_MAGIC, "another magic")
    _require(version != 0, "version 0")
    if version > BOUNDED_VERSION:
        raise CompatibilityError(f"bounded message: version {version}")
    if len(message) < nbytes:
        raise TruncationError("bounded message: it is shorter than it declares")
    _require(len(message) == nbytes, "it is longer than it declares")
    _require(code in {dtype.code for dtype in BOUNDED_DTYPES}, "another dtype")
    _require(rounding <= max(Rounding) and form <= max(BoundedForm), "another rounding or form")
    _require(form == BoundedForm.PLAIN or n_segments == 1, "the fixed form has one segment")
    _require(not any(reserved), "reserved bytes")
    zeroed = message[:BOUNDED_CRC_OFFSET] + bytes(4) + message[BOUNDED_CRC_OFFSET + 4 :]
    _require(crc32c(zeroed) == crc, "the CRC does not match")
    return DTYPE_BY_CODE[code].name, BoundedForm(form), n_segments


def _read_table(
    message: bytes, name: str, form: BoundedForm, n_segments: int
) -> tuple[list[Entry], int]:
    """The entries, and where the codes begin."""
    end = BOUNDED_HEADER.size + n_segments * BOUNDED_ENTRY.size
    start = -(-end // BOUNDED_ALIGNMENT) * BOUNDED_ALIGNMENT
    _require(start <= len(message), "the table does not end with the message")
    _require(not any(message[end:start]), "padding behind the table")
    rows = BOUNDED_ENTRY.iter_unpack(message[BOUNDED_HEADER.size : end])
    return [_read_entry(row, name, form) for row in rows], start


def _read_entry(row: tuple[Any, ...], name: str, form: BoundedForm) -> Entry:
    n, n_escapes, step, center, bound, bits, reserved, doublings, more_reserved = row
    _require(reserved == 0 and not any(more_reserved), "reserved bytes of an entry")
    _require(1 <= bits <= MAX_BOUNDED_BITS, "bits")
    _require(0 < bound < math.inf, "bound")
    number = _number_of(name)
    largest = float(np.finfo(number).max)
    _require(abs(center) <= largest and float(number(center)) == center, "center")
    _require(0 < step <= largest, "step")
    _require(_cut_digits(step, bits, number) == step, "digits of the step")
    _require(doublings == 0 or form == BoundedForm.FIXED, "doublings")
    entry = Entry(n, bound, bits, center, step, n_escapes, doublings)
    _require(n_escapes <= (n if form == BoundedForm.PLAIN else _n_slots(entry, form)), "escapes")
    return entry


def _n_slots(entry: Entry, form: BoundedForm) -> int:
    if form == BoundedForm.PLAIN:
        return entry.n_escapes
    return min(entry.n, BOUNDED_FREE_SLOTS + entry.n // BOUNDED_SLOT_SHARE)


def _cut_digits(x: float, bits: int, number: type[np.floating[Any]]) -> float:
    """A positive number without the digits that a step may not have."""
    _, exponent = math.frexp(x)
    smallest = round(math.log2(float(np.finfo(number).smallest_subnormal)))
    last = max(exponent - (_DIGITS[np.dtype(number).itemsize] - bits), smallest)
    return math.ldexp(math.floor(math.ldexp(x, -last)), last)


def _n_words(n: int, bits: int) -> int:
    """Words in each lane of a block of `n` elements."""
    n_rows = math.ceil(n / BOUNDED_LANES)
    return math.ceil(n_rows * bits / 32)


def codes_nbytes(n: int, bits: int) -> int:
    """Bytes of the codes of `n` elements that begin with a block."""
    whole, rest = divmod(n, BOUNDED_BLOCK)
    return 4 * BOUNDED_LANES * (whole * _n_words(BOUNDED_BLOCK, bits) + _n_words(rest, bits))


def _read_counts(
    message: bytes, at: int, entries: Sequence[Entry], form: BoundedForm
) -> tuple[list[list[int] | None], int]:
    """The counts of each segment, None if it has none, and where the escapes begin."""
    start, counts = at, list[list[int] | None]()
    for entry in entries:
        if entry.n_escapes == 0 and form == BoundedForm.PLAIN:
            counts.append(None)
            continue
        n_blocks = -(-entry.n // BOUNDED_BLOCK)
        _require(at + 2 * n_blocks <= len(message), "the counts are cut off")
        counts.append(list(struct.unpack(f"<{n_blocks}H", message[at : at + 2 * n_blocks])))
        at += 2 * n_blocks
    end = start + -(-(at - start) // 8) * 8
    _require(end <= len(message) and not any(message[at:end]), "padding behind the counts")
    return counts, end


def _decode_segment(
    name: str, entry: Entry, packed: bytes, counts: list[int] | None, escapes: _Array
) -> _Array:
    values, used = [np.empty(0, _NUMPY[name])], 0
    for i, start in enumerate(range(0, entry.n, BOUNDED_BLOCK)):
        n = min(BOUNDED_BLOCK, entry.n - start)
        at = i * codes_nbytes(BOUNDED_BLOCK, entry.bits)
        codes = _unpack_block(packed[at : at + codes_nbytes(n, entry.bits)], n, entry.bits)
        is_escape = codes == 0
        declared = 0 if counts is None else counts[i]
        _require(int(is_escape.sum()) == declared, "zero codes are not as many as declared")
        block = _values(name, codes.astype(np.int64) - (1 << entry.bits - 1), entry)
        block[is_escape] = escapes[used : used + declared]
        used += declared
        values.append(block)
    joined: _Array = np.concatenate(values)
    return joined


def _unpack_block(packed: bytes, n: int, bits: int) -> _Array:
    """The codes of a block, one lane at a time."""
    words = np.frombuffer(packed, "<u4").reshape(-1, BOUNDED_LANES)
    codes = np.zeros(n, np.uint32)
    for lane in range(BOUNDED_LANES):
        string = sum(int(word) << 32 * w for w, word in enumerate(words[:, lane]))
        here = range(lane, n, BOUNDED_LANES)
        for row, i in enumerate(here):
            codes[i] = string >> bits * row & (1 << bits) - 1
        _require(string >> bits * len(here) == 0, "reserved bits of codes")
    return codes


def _values(name: str, steps: _Array, entry: Entry) -> _Array:
    """The values of numbers of steps."""
    number = _number_of(name)
    with np.errstate(over="ignore", invalid="ignore"):
        product = steps.astype(number) * number(entry.step)
        values: _Array = (product + number(entry.center)).astype(_NUMPY[name])
        return values


# Encoding.


def step_of(name: str, entry: Entry, rounding: Rounding) -> float:
    """The step that the encoder chooses."""
    number = _number_of(name)
    reach = abs(entry.center) + _times_power(entry.bound, entry.bits)
    shrunk = max(entry.bound - _spacing(reach, number) / 2, entry.bound / 2)
    whole = 2 * shrunk if rounding == Rounding.NEAREST else shrunk
    return _cut_digits(min(whole, _LARGEST[name]), entry.bits, number)


def _times_power(x: float, exponent: int) -> float:
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.inf


def _spacing(x: float, number: type[np.floating[Any]]) -> float:
    """The difference of the numbers next to each other from `x` on."""
    _, exponent = math.frexp(min(x, float(np.finfo(number).max)))
    smallest = float(np.finfo(number).smallest_subnormal)
    return max(math.ldexp(1.0, exponent - _DIGITS[np.dtype(number).itemsize]), smallest)


def _limits_of(bound: float, number: type[np.floating[Any]]) -> tuple[float, float]:
    """The largest difference that counts if it is rounded, and the largest that counts at all."""
    if number is np.float64:
        return float(np.nextafter(bound, 0.0)), bound
    outer = np.float32(min(bound, float(np.finfo(np.float32).max)))
    if float(outer) > bound:
        outer = np.nextafter(outer, np.float32(0))
    inner = outer
    if float(inner) + _spacing(float(inner), np.float32) / 2 > bound:
        inner = np.nextafter(inner, np.float32(0))
    return float(inner), float(outer)


def encode_message(
    name: str,
    elements: _Array,
    asked: Sequence[Entry],
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    form: BoundedForm = BoundedForm.PLAIN,
) -> bytes:
    """The message that the encoder writes; `elements` has the dtype's type of NumPy."""
    table, codes, counts, escapes, at = [], b"", b"", b"", 0
    for j, entry in enumerate(asked):
        number = _number_of(name)
        centered = Entry(entry.n, entry.bound, entry.bits, float(number(entry.center)))
        step = step_of(name, centered, rounding)
        full = Entry(centered.n, entry.bound, entry.bits, centered.center, step)
        part = elements[at : at + entry.n]
        at += entry.n
        found = _codes_of(name, part, full, rounding, _key(seed, j))
        codes += pack_codes(found, entry.bits)
        kept = part[found == 0]
        if kept.size or form == BoundedForm.FIXED:
            blocks = range(0, entry.n, BOUNDED_BLOCK)
            per_block = [int((found[b : b + BOUNDED_BLOCK] == 0).sum()) for b in blocks]
            counts += struct.pack(f"<{len(per_block)}H", *per_block)
        escapes += kept.tobytes()
        if form == BoundedForm.FIXED:
            n_unused = _n_slots(full, form) - kept.size
            assert n_unused >= 0, "more escapes than slots"
            escapes += bytes(n_unused * part.itemsize)
        row = (entry.n, kept.size, step, full.center, entry.bound, entry.bits, 0, entry.doublings)
        table.append(BOUNDED_ENTRY.pack(*row, bytes(4)))
    front = b"".join(table)
    front += bytes(-(BOUNDED_HEADER.size + len(front)) % BOUNDED_ALIGNMENT)
    rest = front + codes + counts + bytes(-len(counts) % 8) + escapes
    return _seal(name, rest, rounding, form, len(asked))


def _seal(name: str, rest: bytes, rounding: Rounding, form: BoundedForm, n: int) -> bytes:
    code = next(dtype.code for dtype in BOUNDED_DTYPES if dtype.name == name)
    nbytes = BOUNDED_HEADER.size + len(rest)

    def header(crc: int) -> bytes:
        fields = (BOUNDED_MAGIC, BOUNDED_VERSION, code, int(rounding), int(form), n, crc, nbytes)
        return BOUNDED_HEADER.pack(*fields, bytes(8))

    return header(crc32c(header(0) + rest)) + rest


def pack_codes(codes: _Array, bits: int) -> bytes:
    """Packs codes, which are u32, as the page lays them out."""
    packed = b""
    for start in range(0, codes.size, BOUNDED_BLOCK):
        block = codes[start : start + BOUNDED_BLOCK]
        words = np.zeros((_n_words(block.size, bits), BOUNDED_LANES), "<u4")
        for lane in range(BOUNDED_LANES):
            rows = block[lane::BOUNDED_LANES]
            string = sum(int(code) << bits * row for row, code in enumerate(rows))
            words[:, lane] = [string >> 32 * w & 0xFFFFFFFF for w in range(len(words))]
        packed += words.tobytes()
    return packed


def _key(seed: int, segment: int) -> int:
    mask = (1 << 64) - 1
    z = (seed + (segment + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return (z ^ z >> 31) & 0xFFFFFFFF


def _shares(key: int, n: int, number: type[np.floating[Any]]) -> _Array:
    y = np.arange(n, dtype=np.uint32) ^ np.uint32(key)
    y = (y ^ y >> np.uint32(16)) * np.uint32(0x7FEB352D)
    y = (y ^ y >> np.uint32(15)) * np.uint32(0x846CA68B)
    y = y ^ y >> np.uint32(16)
    shares: _Array = (y >> np.uint32(8)).astype(number) * number(2.0**-24)
    return shares


def _codes_of(
    name: str, elements: _Array, entry: Entry, rounding: Rounding, key: int
) -> NDArray[np.uint32]:
    number = _number_of(name)
    with np.errstate(all="ignore"):
        x = elements.astype(number)
        inverse = number(min(1 / entry.step, float(np.finfo(number).max)))
        scaled = (x - number(entry.center)) * inverse
        if rounding == Rounding.NEAREST:
            q = np.rint(scaled)
            holds = _holds(name, x, q, entry)
        else:
            q = np.floor(scaled)
            low, high = _steps_to_values(name, q, entry), _steps_to_values(name, q + 1, entry)
            exceeds = x - low > 0
            holds = _holds(name, x, q, entry) & (_holds(name, x, q + 1, entry) | ~exceeds)
            up = exceeds & (_shares(key, x.size, number) * (high - low) < x - low)
            q = np.where(up, q + 1, q)
        codes: NDArray[np.uint32] = np.where(holds, q + 2 ** (entry.bits - 1), 0).astype(np.uint32)
        return codes


def _steps_to_values(name: str, q: _Array, entry: Entry) -> _Array:
    """The values as numbers of the coder."""
    number = _number_of(name)
    values = (q * number(entry.step) + number(entry.center)).astype(_NUMPY[name])
    numbers: _Array = values.astype(number)
    return numbers


def _holds(name: str, x: _Array, q: _Array, entry: Entry) -> _Array:
    number = _number_of(name)
    value = _steps_to_values(name, q, entry)
    difference = x - value
    is_exact = (x - difference == value) & (value + difference == x)
    inner, outer = (number(limit) for limit in _limits_of(entry.bound, number))
    near = np.abs(difference) <= inner
    in_range = (np.abs(q) <= 2 ** (entry.bits - 1) - 1) & (np.abs(difference) <= outer)
    holds: _Array = in_range & (near | is_exact)
    return holds
