"""Codings: how one plane becomes a stream, mode by mode (docs/format.md, section 6)."""

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from frame_builder.models import Model, encode_classes, fit
from packhorse.layout import ClassSource, Mode

__all__ = [
    "Around",
    "Classed",
    "Coding",
    "Constant",
    "Palette",
    "Rans",
    "Raw",
    "Stored",
    "Zstd",
]


@dataclass(frozen=True)
class Around:
    """The things that a stream depends on besides its plane."""

    item_nbytes: int = 1
    carried: bytes = b""  # the bytes it is to carry
    lead: bytes = b""  # what plane 0's stream yields
    predictions: Sequence[int] = ()  # q of each unit
    dtype: str = "U8"
    units: bytes = b""  # of the whole chunk, not of a plane
    base: bytes = b""  # the base's units at the same places, in the frame's dtype


class Coding:
    """One way to code a plane."""

    mode: int
    n_carried = 0  # bytes of another plane that the stream can carry

    def encode(self, plane: bytes, around: Around) -> bytes:
        raise NotImplementedError

    def yields(self, plane: bytes, around: Around) -> bytes:
        """The bytes that a decoder gets from the stream before it adds a prediction."""
        return plane


@dataclass(frozen=True)
class Stored(Coding):
    mode = Mode.STORED

    def encode(self, plane: bytes, around: Around) -> bytes:
        return plane


@dataclass(frozen=True)
class Constant(Coding):
    mode = Mode.CONSTANT

    def encode(self, plane: bytes, around: Around) -> bytes:
        item = plane[: around.item_nbytes]
        assert plane == item * (len(plane) // len(item))
        return item


@dataclass(frozen=True)
class Zstd(Coding):
    level: int = 3
    mode = Mode.ZSTD

    def encode(self, plane: bytes, around: Around) -> bytes:
        return zstandard.ZstdCompressor(level=self.level).compress(plane)


@dataclass(frozen=True)
class Raw(Coding):
    """A stream given as it is, legal or not."""

    mode: int
    stream: bytes

    def encode(self, plane: bytes, around: Around) -> bytes:
        return self.stream


def bit_plane(values: Sequence[int], j: int) -> bytes:
    """Bit j of each value."""
    bits = sum((value >> j & 1) << i for i, value in enumerate(values))
    return bits.to_bytes(8 * math.ceil(len(values) / 64), "little")


class RawBits:
    """The lower bits of a plane, cut off; without a given mask, those planes that are not zero."""

    def __init__(self, plane: bytes, n_bits: int, mask: int | None) -> None:
        used = [j for j in range(n_bits) if any(byte >> j & 1 for byte in plane)]
        self.mask = sum(1 << j for j in used) if mask is None else mask
        assert all(self.mask >> j & 1 for j in used), "the mask drops bits"
        present = [j for j in range(n_bits) if self.mask >> j & 1]
        self.planes = b"".join(bit_plane(plane, j) for j in present)
        self.symbols = [byte >> n_bits for byte in plane]


@dataclass(frozen=True)
class Palette(Coding):
    code_bits: int = 3
    has_escape: bool = True
    raw_bits: int = 0
    raw_mask: int | None = None
    mode = Mode.PALETTE

    def encode(self, plane: bytes, around: Around) -> bytes:
        raw = RawBits(plane, self.raw_bits, self.raw_mask)
        n_entries = (1 << self.code_bits) - self.has_escape
        entries = [symbol for symbol, _ in Counter(raw.symbols).most_common(n_entries)]
        codes = [entries.index(s) if s in entries else n_entries for s in raw.symbols]
        escapes = bytes(symbol for symbol in raw.symbols if symbol not in entries)
        assert self.has_escape or not escapes, "too many symbols for a palette without escape"
        kind = [self.code_bits, self.has_escape, self.raw_bits, raw.mask]
        head = struct.pack("<BBBBI", *kind, len(escapes))
        bits = b"".join(bit_plane(codes, j) for j in range(self.code_bits))
        return head + bytes(entries).ljust(16, b"\0") + bits + raw.planes + escapes


@dataclass(frozen=True)
class Rans(Coding):
    """Attributes:
    lanes_log: log2 of the lanes.
    mapped: the symbols with codes of their own; None for all that occur.
    escape_frequency: None to choose it: 0 without escapes, else about their number.
    frequencies: of the mapped symbols and the escape; None for about the counts.
    first_state: what every lane starts from (and a decoder ends in), without its carried bytes.
    raw_bits, raw_mask: section 6.1; a mask of None leaves out what is zero.
    margin: symbols without codes in the model's range, before and behind those with codes.
    """

    lanes_log: int = 2
    mapped: tuple[int, ...] | None = None
    escape_frequency: int | None = None
    frequencies: tuple[int, ...] | None = None
    first_state: int = 0x10000
    raw_bits: int = 0
    raw_mask: int | None = None
    margin: tuple[int, int] = (0, 0)
    mode = Mode.RANS

    @property
    def n_carried(self) -> int:
        return 2 << self.lanes_log

    def encode(self, plane: bytes, around: Around) -> bytes:
        raw = RawBits(self.yields(plane, around), self.raw_bits, self.raw_mask)
        members = self.members(len(plane), around)
        models = [self._fit([raw.symbols[unit] for unit in units]) for units in members]
        n_lanes = 1 << self.lanes_log
        lows = struct.unpack(f"<{n_lanes}H", around.carried or bytes(2 * n_lanes))
        first_states = [self.first_state + low for low in lows]
        states, words = encode_classes(raw.symbols, members, models, first_states)
        escapes = bytes(
            raw.symbols[unit]
            for units, model in zip(members, models, strict=True)
            for unit in units
            if model.escapes(raw.symbols[unit])
        )
        head = struct.pack("<BBBBI", self.lanes_log, 12, self.raw_bits, raw.mask, len(escapes))
        tables = b"".join(model.to_bytes() for model in models)
        return head + self.class_fields() + tables + states + raw.planes + escapes + words

    def _fit(self, symbols: list[int]) -> Model:
        return fit(symbols, self.mapped, self.frequencies, self.escape_frequency, self.margin)

    def members(self, n: int, around: Around) -> list[list[int]]:
        """The units of each class, ascending."""
        return [list(range(n))]

    def class_fields(self) -> bytes:
        return b""


@dataclass(frozen=True)
class Classed(Rans):
    """rANS with a model for each class; the thresholds are for source lead alone."""

    source: ClassSource = ClassSource.LEAD
    thresholds: tuple[int, ...] = ()
    mode = Mode.CLASSED_RANS

    @property
    def n_classes(self) -> int:
        return len(self.thresholds) + 1 if self.source == ClassSource.LEAD else 4

    def yields(self, plane: bytes, around: Around) -> bytes:
        if self.source == ClassSource.LEAD:
            return plane
        pairs = zip(plane, around.predictions, strict=True)
        return bytes((byte - q // 4 + 128) % 256 for byte, q in pairs)

    def members(self, n: int, around: Around) -> list[list[int]]:
        members: list[list[int]] = [[] for _ in range(self.n_classes)]
        for unit in range(n):
            members[self._class(unit, around)].append(unit)
        return members

    def _class(self, unit: int, around: Around) -> int:
        if self.source == ClassSource.PREDICTION:
            return around.predictions[unit] % 4
        return len([t for t in self.thresholds if t <= around.lead[unit]])

    def class_fields(self) -> bytes:
        thresholds = bytes(self.thresholds).ljust(3, b"\0")
        return bytes([self.source, self.n_classes]) + thresholds + bytes(3)
