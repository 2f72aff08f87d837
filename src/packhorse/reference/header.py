"""Sections 2 and 3 of docs/format.md: the header of a frame, checked whole and in the page's order.

The payload is not read, and no field is used before its check. Lengths are computed from the fields
and compared with the lengths that the header declares.
"""

import math
import struct
from collections import namedtuple
from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import DType, Mode, Split
from packhorse.reference.words import crc32c, equal, need, padded, within, zero

__all__ = ["BaseBlock", "Chunk", "Header", "SideStream", "Units", "check_nested", "read_header"]

_RANS_MODES = (Mode.RANS, Mode.CLASSED_RANS)
_SIDE_MODES = (Mode.STORED, Mode.PALETTE, Mode.RANS)

_Fixed = namedtuple(
    "_Fixed",
    "magic version dtype_code n_dims split flags level chunk_log header_nbytes frame_nbytes "
    "content_hash n_chunks crc n_row_dims reserved side_descriptor",
)


class Units(NamedTuple):
    """What a tensor consists of."""

    dtype: DType
    split: Split
    n_planes: int
    item_nbytes: int  # of an item of a plane


class SideStream(NamedTuple):
    """The place of the side data, and the rows and columns that they describe."""

    n_rows: int
    n_columns: int
    mode: Mode
    offset: int
    nbytes: int


class BaseBlock(NamedTuple):
    """How the frame describes its base."""

    content_hash: bytes
    dtype: DType
    check: int  # of section 7.2
    nbytes: int  # computed from the frame's shape


class Chunk(NamedTuple):
    """A row of the chunk table."""

    offset: int
    nbytes: int  # with its padding
    crc: int
    first_unit: int
    n_units: int
    streams: list[tuple[Mode, int]]  # mode and bytes, in plane order; differences have one


class Header(NamedTuple):
    """A header, after all its fields were checked."""

    content_hash: bytes
    has_sum: bool  # whether content hashes are sums
    level: int
    units: Units
    shape: tuple[int, ...]
    base: BaseBlock | None
    side: SideStream | None
    chunks: list[Chunk]


def read_header(data: bytes, max_nbytes: int | None) -> Header:
    """Checks the header of a frame, and that `data` has exactly the frame's length."""
    fixed = _read_fixed(data)
    units = _read_units(fixed)
    shape_end = layout.FIXED_HEADER_NBYTES + 8 * fixed.n_dims
    table_start = shape_end + (layout.BASE_BLOCK_NBYTES if fixed.flags & layout.FLAG_BASE else 0)
    table_end = table_start + 4 * fixed.n_chunks * (1 + units.n_planes)
    end = table_end + (fixed.side_descriptor & layout.STREAM_NBYTES_MASK)
    equal(fixed.header_nbytes, padded(end), "header_nbytes", 12)
    need(data, fixed.header_nbytes, "the header")
    _check_crc(data[: fixed.header_nbytes], fixed.crc)
    shape = struct.unpack(f"<{fixed.n_dims}Q", data[layout.FIXED_HEADER_NBYTES : shape_end])
    nbytes = _logical_nbytes(units.dtype, shape)
    n_units = nbytes // units.dtype.unit_nbytes
    equal(fixed.n_chunks, -(-n_units // (1 << fixed.chunk_log)), "n_chunks", 40)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(f"the tensor takes {nbytes} bytes; the caller allows {max_nbytes}")
    zero(fixed.reserved, "reserved bytes", 49)
    base = None
    if fixed.flags & layout.FLAG_BASE:
        block = data[shape_end:table_start]
        base = _read_base(block, shape_end, units.dtype, n_units, fixed.flags)
    side = _read_side(fixed, units, shape, table_end)
    zero(data[end : fixed.header_nbytes], "padding bytes of the header", end)
    chunks = _read_chunk_table(data[:table_end], table_start, fixed, units, n_units)
    frame_nbytes = fixed.header_nbytes + sum(chunk.nbytes for chunk in chunks)
    equal(fixed.frame_nbytes, frame_nbytes, "frame_nbytes", 16)
    need(data, frame_nbytes, "the frame")
    equal(len(data), frame_nbytes, "the end of the frame, the length of the data,", frame_nbytes)
    has_sum = fixed.flags & layout.FLAG_SUM > 0
    return Header(fixed.content_hash, has_sum, fixed.level, units, shape, base, side, chunks)


def _read_fixed(data: bytes) -> _Fixed:
    need(data, layout.FIXED_HEADER_NBYTES, "the fixed part of the header")
    fixed = _Fixed._make(layout.FIXED_HEADER.unpack_from(data))
    equal(fixed.magic, layout.FRAME_MAGIC, "magic", 0)
    if fixed.version > layout.FRAME_VERSION:
        found, known = fixed.version, layout.FRAME_VERSION
        raise CompatibilityError(f"version at byte offset 4 is {found}, known: {known}; upgrade")
    within(fixed.version, 1, layout.FRAME_VERSION, "version", 4)
    return fixed


def _read_units(fixed: _Fixed) -> Units:
    if fixed.flags & ~layout.CRITICAL_FLAGS:
        raise CompatibilityError(f"unknown flags {fixed.flags:#x} at byte offset 8; upgrade")
    if fixed.dtype_code not in layout.DTYPE_BY_CODE:
        raise CompatibilityError(f"unknown dtype {fixed.dtype_code} at byte offset 5; upgrade")
    dtype = layout.DTYPE_BY_CODE[fixed.dtype_code]
    if fixed.split not in dtype.splits:
        allowed = [int(split) for split in dtype.splits]
        raise CorruptionError(f"split at byte offset 7 is {fixed.split}, allowed: {allowed}")
    within(fixed.n_dims, 0, layout.MAX_DIMS, "n_dims", 6)
    most = (layout.MAX_CHUNK_NBYTES // dtype.unit_nbytes).bit_length() - 1  # at most 21
    within(fixed.chunk_log, layout.MIN_CHUNK_LOG, most, f"chunk_log of {dtype.name}", 11)
    n_planes = 1 if fixed.split == Split.WHOLE else dtype.unit_nbytes
    return Units(dtype, Split(fixed.split), n_planes, dtype.unit_nbytes // n_planes)


def _check_crc(header: bytes, stored: int) -> None:
    at = layout.HEADER_CRC_OFFSET
    equal(stored, crc32c(header[:at] + bytes(4) + header[at + 4 :]), "header CRC", at)


def _logical_nbytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Section 3. A dimension of 0 must not hide that the others overflow."""
    at = layout.FIXED_HEADER_NBYTES
    if math.prod(max(dim, 1) for dim in shape) * dtype.bits >= layout.MAX_BITS:
        raise CorruptionError(f"shape {shape} at byte offset {at} takes 2^63 bits or more")
    n_bits = math.prod(shape) * dtype.bits
    equal(n_bits % 8, 0, f"bits beyond the last byte of {shape} {dtype.name}", at)
    return n_bits // 8


def _read_base(block: bytes, at: int, dtype: DType, n_units: int, flags: int) -> BaseBlock:
    content_hash, code, reserved, check = layout.BASE_BLOCK.unpack(block)
    if code not in layout.DTYPE_BY_CODE:
        raise CompatibilityError(f"unknown base dtype {code} at byte offset {at + 16}; upgrade")
    base = layout.DTYPE_BY_CODE[code]
    has_sum = flags & layout.FLAG_SUM > 0
    may_round = dtype.name in ("BF16", "F16") and not has_sum
    allowed = (dtype.name, "F32") if may_round else (dtype.name,)
    if base.name not in allowed:
        what = f"base dtype at byte offset {at + 16}"
        raise CorruptionError(f"{what} is {base.name}, allowed: {', '.join(allowed)}")
    unused = reserved if has_sum else block[17:]
    zero(unused, "reserved bytes of the base", at + 17)
    return BaseBlock(content_hash, base, check, n_units * base.unit_nbytes)


def _read_side(
    fixed: _Fixed, units: Units, shape: tuple[int, ...], offset: int
) -> SideStream | None:
    """Returns place, mode and length of the side data, as `_read_chunk_table` does for chunks."""
    code = fixed.side_descriptor >> layout.STREAM_NBYTES_BITS
    nbytes = fixed.side_descriptor & layout.STREAM_NBYTES_MASK
    present = fixed.n_row_dims > 0
    equal(fixed.side_descriptor > 0, present, "whether there is a side descriptor", 52)
    if not present:
        return None
    equal(int(units.split), int(Split.FLOAT), "split beside side data", 7)
    within(fixed.n_row_dims, 1, fixed.n_dims - 1, "n_row_dims", 48)
    equal(0 in shape, False, "whether a tensor with side data is empty", 48)
    units_per_element = units.dtype.bits // 8 // units.dtype.unit_nbytes
    n_rows = math.prod(shape[: fixed.n_row_dims])
    n_columns = math.prod(shape[fixed.n_row_dims :]) * units_per_element
    within(n_rows + n_columns, 2, layout.MAX_SIDE_NBYTES, "rows and columns of the side data", 48)
    if code not in _SIDE_MODES:
        raise CorruptionError(f"mode {code} of the side data at byte offset 52 is not allowed")
    if code == Mode.STORED:
        equal(nbytes, n_rows + n_columns, "length of stored side data", 52)
    return SideStream(n_rows, n_columns, Mode(code), offset, nbytes)


def _read_chunk_table(
    header: bytes, start: int, fixed: _Fixed, units: Units, n_units: int
) -> list[Chunk]:
    row = struct.Struct(f"<{1 + units.n_planes}I")
    chunks: list[Chunk] = []
    offset = fixed.header_nbytes
    for at in range(start, len(header), row.size):
        crc, *descriptors = row.unpack_from(header, at)
        first = len(chunks) << fixed.chunk_log
        n = min(1 << fixed.chunk_log, n_units - first)
        streams = _read_descriptors(descriptors, fixed, units, at)
        _check_stored(streams, n * units.item_nbytes, at)
        nbytes = padded(sum(nbytes for _, nbytes in streams))
        chunks.append(Chunk(offset, nbytes, crc, first, n, streams))
        offset += nbytes
    return chunks


def _read_descriptors(
    words: list[int], fixed: _Fixed, units: Units, at: int
) -> list[tuple[Mode, int]]:
    """Returns mode and length of each stream of a chunk."""
    has_base = fixed.flags & layout.FLAG_BASE > 0
    for word in words:
        _read_mode(word, fixed.version, at)
    first = _read_descriptor(words[0], units, has_base, at)
    if first[0] not in layout.BASE_MODES:
        return [first, *(_read_descriptor(word, units, False, at) for word in words[1:])]
    equal(words[1:], [0] * (units.n_planes - 1), "descriptors beside mode delta in table row", at)
    return [first]


def _read_mode(word: int, version: int, at: int) -> Mode:
    code = word >> layout.STREAM_NBYTES_BITS
    if code > layout.LAST_MODES[version]:
        where = f"in table row at byte offset {at} of a frame of version {version}"
        raise CompatibilityError(f"unknown mode {code} {where}; upgrade")
    return Mode(code)


def _read_descriptor(word: int, units: Units, may_differ: bool, at: int) -> tuple[Mode, int]:
    """Reads one descriptor of a known mode; `may_differ` says whether modes of differences are
    allowed: in plane 0, beside a base."""
    mode, nbytes = Mode(word >> layout.STREAM_NBYTES_BITS), word & layout.STREAM_NBYTES_MASK
    if not (may_differ if mode in layout.BASE_MODES else _allowed(mode, units)):
        what = f"mode {mode.name.lower()} in table row at byte offset {at}"
        raise CorruptionError(f"{what} is not allowed for {units.dtype.name} split {units.split}")
    if mode == Mode.CONSTANT:
        equal(nbytes, units.item_nbytes, "length of a constant stream in table row", at)
    return mode, nbytes


def _allowed(mode: Mode, units: Units) -> bool:
    """The table of section 6, without the modes of differences."""
    if mode in (Mode.PALETTE, Mode.RANS):
        return units.item_nbytes == 1
    if mode in (Mode.ZSTD, Mode.MATCHES, Mode.NIBBLES):
        return units.split == Split.WHOLE
    return mode != Mode.CLASSED_RANS or units.split != Split.WHOLE


def check_nested(streams: list[tuple[Mode, int]], n: int, at: int) -> None:
    """Checks the lengths of constant and stored streams of a nested chunk of section 6.8."""
    for mode, nbytes in streams:
        if mode == Mode.CONSTANT:
            equal(nbytes, 1, "length of a constant stream of the nested chunk", at)
    _check_stored(streams, n, at)


def _check_stored(streams: list[tuple[Mode, int]], plane_nbytes: int, at: int) -> None:
    """Checks that a stored stream is its whole plane; beside rANS streams, the carrier may be
    shorter."""
    stored = [nbytes for mode, nbytes in streams if mode == Mode.STORED]
    if stored and any(mode in _RANS_MODES for mode, _ in streams) and stored[-1] < plane_nbytes:
        stored.pop()  # its length is checked when the chunk is decoded
    for nbytes in stored:
        equal(nbytes, plane_nbytes, "length of a stored stream in table row", at)
