"""Chunks of mode delta, and the base that they are made against (docs/format.md, section 6.6)."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frame_builder.codings import Around, Coding, bit_plane
from frame_builder.models import Model, encode_classes, fit
from frame_builder.planes import split_planes
from packhorse.layout import DTYPE_BY_NAME, DType, Mode, Split

__all__ = ["Base", "Delta", "DeltaEqual", "narrowed"]


@dataclass(frozen=True)
class Base:
    """The tensor that a frame's chunks may differ from."""

    data: bytes
    dtype: str

    def units(self, dtype: str) -> bytes:
        """Its units in the dtype of the frame."""
        if self.dtype == dtype:
            return self.data
        values = struct.unpack(f"<{len(self.data) // 4}I", self.data)
        return struct.pack(f"<{len(values)}H", *[narrowed(value, dtype) for value in values])


def narrowed(bits: int, dtype: str) -> int:
    """An F32 rounded to BF16 by an addition, to F16 by the standard library."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isnan(value):
        return bits >> 16 | 0x40 if dtype == "BF16" else bits >> 16 & 0x8000 | f16_nan(bits)
    if dtype == "BF16":
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0x7C00 | bits >> 16 & 0x8000


def f16_nan(bits: int) -> int:
    return 0b11111_1_000000000 | bits >> 13 & 0b111111111


class DeltaEqual(Coding):
    """The chunk equals the base's."""

    mode = Mode.DELTA

    def encode(self, plane: bytes, around: Around) -> bytes:
        assert around.units == around.base, "the base differs"
        return b""


@dataclass(frozen=True)
class Delta(Coding):
    """Attributes:
    lanes_log: log2 of the lanes.
    thresholds: between the classes.
    shifts: of class after class; those that are missing are 0.
    mapped, escape_frequency, frequencies, margin: as in Rans, for the tokens of every class.
    first_state: what every lane starts from.
    always_full: use token 63 for every difference without a direct token.
    turns: how many times 2^w is added to each difference; a decoder must not notice.
    edit_extra: gets the extra bits as 0s and 1s, and returns those to write instead.
    edit_escapes: gets the escapes, and returns those to write instead.
    """

    lanes_log: int = 2
    thresholds: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()
    mapped: tuple[int, ...] | None = None
    escape_frequency: int | None = None
    frequencies: tuple[int, ...] | None = None
    margin: tuple[int, int] = (0, 0)
    first_state: int = 0x10000
    always_full: bool = False
    turns: int = 0
    edit_extra: Callable[[str], str] = str
    edit_escapes: Callable[[bytes], bytes] = bytes
    mode = Mode.DELTA

    def encode(self, plane: bytes, around: Around) -> bytes:
        row = DTYPE_BY_NAME[around.dtype]
        differences = [d + (self.turns << 8 * row.unit_nbytes) for d in distances(around, row)]
        classes = self.members(around.base, row)
        shifts = [*self.shifts, *[0] * 8][: len(classes)]
        tokens, bits, raw = [0] * len(differences), "", b""
        for units, r in zip(classes, shifts, strict=True):
            raw += raw_bits([differences[unit] for unit in units], r)
            for unit in units:
                tokens[unit], extra_bits = self.token(differences[unit] >> r)
                bits += extra_bits
        models = [self._fit([tokens[unit] for unit in units]) for units in classes]
        escaped = bytes(
            tokens[unit]
            for units, model in zip(classes, models, strict=True)
            for unit in units
            if model.escapes(tokens[unit])
        )
        extra, escapes = to_bytes(self.edit_extra(bits)), self.edit_escapes(escaped)
        states, words = encode_classes(
            tokens, classes, models, [self.first_state] * (1 << self.lanes_log)
        )
        sizes = struct.pack("<III", len(extra), len(escapes), 0)
        fields = bytes(self.thresholds).ljust(8, b"\0") + bytes(shifts).ljust(8, b"\0")
        head = bytes([self.lanes_log, 12, len(classes), 0]) + sizes + fields
        tables = b"".join(model.to_bytes() for model in models)
        return head + tables + states + raw + extra + escapes + words

    def _fit(self, tokens: list[int]) -> Model:
        return fit(tokens, self.mapped, self.frequencies, self.escape_frequency, self.margin)

    def members(self, base: bytes, row: DType) -> list[list[int]]:
        """The units of each class, ascending."""
        classes = [len([t for t in self.thresholds if t <= key]) for key in keys(base, row)]
        numbers = range(len(self.thresholds) + 1)
        return [[unit for unit, c in enumerate(classes) if c == number] for number in numbers]

    def token(self, t: int) -> tuple[int, str]:
        """A token and its extra bits."""
        if -16 <= t < 16:
            return t + 16, ""
        m = max(t, ~t)
        if m.bit_length() > 35 or self.always_full:
            return 63, lowest_first(t, 64)
        return 27 + m.bit_length(), str(int(t < 0)) + lowest_first(m, m.bit_length() - 1)


def keys(base: bytes, row: DType) -> Sequence[int]:
    """The keys of the base's units, which decide the classes."""
    if Split.FLOAT in row.splits:
        return split_planes(base, row, Split.FLOAT)[0]
    return [max(b, ~b).bit_length() for b in integers(base, row, signed=True)]


def distances(around: Around, row: DType) -> list[int]:
    """How far each unit is from the base's, as a signed number."""
    w = 8 * row.unit_nbytes
    half = 1 << (w - 1)
    places = [
        [x ^ (2 * half - 1 if x & half else half) if Split.FLOAT in row.splits else x for x in xs]
        for xs in (integers(around.units, row), integers(around.base, row))
    ]
    return [(new - old + half) % (2 * half) - half for new, old in zip(*places, strict=True)]


def integers(data: bytes, row: DType, *, signed: bool = False) -> list[int]:
    size = row.unit_nbytes
    units = [data[i : i + size] for i in range(0, len(data), size)]
    return [int.from_bytes(unit, "little", signed=signed) for unit in units]


def raw_bits(values: Sequence[int], r: int) -> bytes:
    """The r lower bits of the differences of one class."""
    whole = [bytes(value >> 8 * j & 0xFF for value in values) for j in range(r // 8)]
    return b"".join([*whole, *[bit_plane(values, j) for j in range(r - r % 8, r)]])


def lowest_first(value: int, n_bits: int) -> str:
    return "".join(str(value >> i & 1) for i in range(n_bits))


def to_bytes(bits: str) -> bytes:
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[i : i + 8][::-1], 2) for i in range(0, len(padded), 8))
