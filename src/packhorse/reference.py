"""The slow reader of frames and files, written from docs/format.md alone and in its order.

It is the oracle that the fast paths are tested against, so it shares no code with them: plain
integers and bytes, the constants of `layout.py`, and xxhash and zstandard for what other standards
define. Clarity comes before speed: expect one or two MB/s.

Every rule is checked where the page states it: the whole header before any chunk is touched, a CRC
before its streams. Offsets in messages count from the frame; `decode_file` adds name and place.
"""

import base64
import json
import math
import struct
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import xxhash
import zstandard

from packhorse import layout
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, TruncationError
from packhorse.layout import DType, Mode, Split

__all__ = ["DecodedTensor", "content_hash", "decode_file", "decode_frame"]


@dataclass(frozen=True)
class DecodedTensor:
    """What a frame holds.

    Attributes:
        dtype: safetensors' name, "BF16".
        shape: the dimensions, outermost first.
        data: the tensor's bytes in C order, little-endian.
        content_hash: 16 bytes; `data` was checked against it.
        level: the level byte as it stands, information only.
        split: how units became planes.
        modes: for each chunk, the mode of each plane.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    content_hash: bytes
    level: int
    split: Split
    modes: tuple[tuple[Mode, ...], ...]


def decode_frame(data: bytes, *, max_nbytes: int | None = None) -> DecodedTensor:
    """Decode one frame and check all of it, content hash included.

    Args:
        data: the frame, exactly.
        max_nbytes: refuse a tensor of more decoded bytes than this; None for no limit.

    Returns:
        The tensor's dtype, shape and bytes.

    Raises:
        CorruptionError: the bytes break a rule of docs/format.md, or the tensor is over the limit.
        TruncationError: bytes are missing at the end.
        CompatibilityError: the version, the dtype, a flag or a mode is unknown.
    """
    fixed, units, shape, chunks = _read_header(data, max_nbytes)
    decoded = b"".join(_decode_chunk(data, units, chunk) for chunk in chunks)
    _equal(fixed.content_hash, content_hash(decoded), "content hash", 24)
    modes = tuple(tuple(mode for mode, _ in chunk.streams) for chunk in chunks)
    name = units.dtype.name
    return DecodedTensor(name, shape, decoded, fixed.content_hash, fixed.level, units.split, modes)


# Section 1: words, and the three kinds of check.
def _equal(found: Any, allowed: Any, what: str, offset: int) -> None:
    if found != allowed:
        show = [value.hex() if isinstance(value, bytes) else value for value in (found, allowed)]
        raise CorruptionError(f"{what} at byte offset {offset} is {show[0]}, but must be {show[1]}")


def _zero(found: bytes, what: str, offset: int) -> None:
    if any(found):
        raise CorruptionError(f"{what} at byte offset {offset} are not zero: {found[:16].hex()}")


def _within(found: int, least: int, most: int, what: str, offset: int) -> None:
    if not least <= found <= most:
        limits = f"allowed: {least} to {most}"
        raise CorruptionError(f"{what} at byte offset {offset} is {found}, {limits}")


def _need(data: bytes, nbytes: int, what: str) -> None:
    if len(data) < nbytes:
        raise TruncationError(f"{what} ends at byte offset {nbytes}, the data at {len(data)}")


def _crc32c_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


_CRC32C_TABLE = _crc32c_table()


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C_TABLE[crc & 0xFF ^ byte]
    return crc ^ 0xFFFFFFFF


def _padded(nbytes: int) -> int:
    return -(-nbytes // layout.FRAME_ALIGNMENT) * layout.FRAME_ALIGNMENT


# Section 2: the frame.

_Fixed = namedtuple(
    "_Fixed",
    "magic version dtype_code n_dims split flags level chunk_log header_nbytes frame_nbytes "
    "content_hash n_chunks crc",
)


class _Units(NamedTuple):
    dtype: DType
    split: Split
    n_planes: int
    item_nbytes: int  # of an item of a plane


class _Chunk(NamedTuple):
    offset: int
    nbytes: int  # with its padding
    crc: int
    n_units: int
    streams: list[tuple[Mode, int]]  # mode and bytes of each, in plane order


def _read_header(data: bytes, max_nbytes: int | None) -> tuple[_Fixed, _Units, Any, list[_Chunk]]:
    fixed = _read_fixed(data)
    units = _read_units(fixed)
    shape_end = layout.FIXED_HEADER_NBYTES + 8 * fixed.n_dims
    table_end = shape_end + 4 * fixed.n_chunks * (1 + units.n_planes)
    _equal(fixed.header_nbytes, _padded(table_end), "header_nbytes", 12)
    _need(data, fixed.header_nbytes, "the header")
    at = layout.HEADER_CRC_OFFSET
    crc = _crc32c(data[:at] + bytes(4) + data[at + 4 : fixed.header_nbytes])
    _equal(fixed.crc, crc, "header CRC", at)
    _zero(data[table_end : fixed.header_nbytes], "padding bytes of the header", table_end)
    shape = struct.unpack(f"<{fixed.n_dims}Q", data[layout.FIXED_HEADER_NBYTES : shape_end])
    nbytes = _logical_nbytes(units.dtype, shape)
    n_units = nbytes // units.dtype.unit_nbytes
    _equal(fixed.n_chunks, -(-n_units // (1 << fixed.chunk_log)), "n_chunks", 40)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(f"the tensor takes {nbytes} bytes, the caller allows {max_nbytes}")
    chunks = _read_chunk_table(data[:table_end], shape_end, fixed, units, n_units)
    frame_nbytes = fixed.header_nbytes + sum(chunk.nbytes for chunk in chunks)
    _equal(fixed.frame_nbytes, frame_nbytes, "frame_nbytes", 16)
    _need(data, frame_nbytes, "the frame")
    _equal(len(data), frame_nbytes, "the end of the frame, the length of the data,", frame_nbytes)
    return fixed, units, shape, chunks


def _read_fixed(data: bytes) -> _Fixed:
    _need(data, layout.FIXED_HEADER_NBYTES, "the fixed part of the header")
    fixed = _Fixed._make(layout.FIXED_HEADER.unpack_from(data))
    _equal(fixed.magic, layout.FRAME_MAGIC, "magic", 0)
    if fixed.version > layout.FRAME_VERSION:
        found, known = fixed.version, layout.FRAME_VERSION
        raise CompatibilityError(f"version at byte offset 4 is {found}, known: {known}; upgrade")
    _equal(fixed.version, layout.FRAME_VERSION, "version", 4)
    _within(fixed.n_dims, 0, layout.MAX_DIMS, "n_dims", 6)
    return fixed


def _read_units(fixed: _Fixed) -> _Units:
    if fixed.flags & ~layout.CRITICAL_FLAGS:
        raise CompatibilityError(f"unknown flags {fixed.flags:#x} at byte offset 8; upgrade")
    if fixed.dtype_code not in layout.DTYPE_BY_CODE:
        raise CompatibilityError(f"unknown dtype {fixed.dtype_code} at byte offset 5; upgrade")
    dtype = layout.DTYPE_BY_CODE[fixed.dtype_code]
    if fixed.split not in dtype.splits:
        allowed = [int(split) for split in dtype.splits]
        raise CorruptionError(f"split at byte offset 7 is {fixed.split}, allowed: {allowed}")
    most = (layout.MAX_CHUNK_NBYTES // dtype.unit_nbytes).bit_length() - 1  # at most 21
    _within(fixed.chunk_log, layout.MIN_CHUNK_LOG, most, f"chunk_log of {dtype.name}", 11)
    n_planes = 1 if fixed.split == Split.WHOLE else dtype.unit_nbytes
    return _Units(dtype, Split(fixed.split), n_planes, dtype.unit_nbytes // n_planes)


def _logical_nbytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Section 3; a dimension of 0 hides no overflow of the others."""
    largest = math.prod(max(dim, 1) for dim in shape)
    if largest * dtype.bits >= layout.MAX_BITS:
        raise CorruptionError(f"shape {shape} at byte offset 48 takes 2^63 bits or more")
    n_bits = math.prod(shape) * dtype.bits
    _equal(n_bits % 8, 0, f"bits beyond the last byte of {shape} {dtype.name}", 48)
    return n_bits // 8


def _read_chunk_table(
    header: bytes, start: int, fixed: _Fixed, units: _Units, n_units: int
) -> list[_Chunk]:
    row = struct.Struct(f"<{1 + units.n_planes}I")
    chunks: list[_Chunk] = []
    offset = fixed.header_nbytes
    for at in range(start, len(header), row.size):
        crc, *descriptors = row.unpack_from(header, at)
        n = min(1 << fixed.chunk_log, n_units - (len(chunks) << fixed.chunk_log))
        streams = [_read_descriptor(word, units, at) for word in descriptors]
        _check_stored(streams, n * units.item_nbytes, at)
        nbytes = _padded(sum(nbytes for _, nbytes in streams))
        chunks.append(_Chunk(offset, nbytes, crc, n, streams))
        offset += nbytes
    return chunks


def _read_descriptor(word: int, units: _Units, at: int) -> tuple[Mode, int]:
    code, nbytes = word >> layout.STREAM_NBYTES_BITS, word & layout.STREAM_NBYTES_MASK
    if code not in list(Mode):
        raise CompatibilityError(f"unknown mode {code} in table row at byte offset {at}; upgrade")
    mode = Mode(code)
    byte_only = mode in (Mode.PALETTE, Mode.RANS)
    if (byte_only and units.item_nbytes > 1) or (mode == Mode.ZSTD and units.split != Split.WHOLE):
        what = f"mode {mode.name.lower()} in table row at byte offset {at}"
        raise CorruptionError(f"{what} is not allowed for {units.dtype.name} split {units.split}")
    if mode == Mode.CONSTANT:
        _equal(nbytes, units.item_nbytes, "length of a constant stream in table row", at)
    return mode, nbytes


def _check_stored(streams: list[tuple[Mode, int]], plane_nbytes: int, at: int) -> None:
    """A stored stream is its whole plane, but for the carrier where there are rANS streams."""
    stored = [nbytes for mode, nbytes in streams if mode == Mode.STORED]
    if stored and any(mode == Mode.RANS for mode, _ in streams) and stored[-1] < plane_nbytes:
        stored.pop()  # `_restore_carrier` checks this one
    for nbytes in stored:
        _equal(nbytes, plane_nbytes, "length of a stored stream in table row", at)


# Section 4: splits.
def _merge(planes: list[bytes], units: _Units) -> bytes:
    if units.split == Split.WHOLE:
        return planes[0]
    if units.split == Split.FLOAT:
        k = 4 if units.dtype.name == "F64" else 7
        m = 0xFF >> (8 - k)
        pairs = zip(planes[0], planes[1], strict=True)
        tops = [(one & ~m & 0xFF) << 8 | zero << k | (one & m) for zero, one in pairs]
        planes = [bytes(t >> 8 for t in tops), bytes(t & 0xFF for t in tops), *planes[2:]]
    return bytes(byte for unit in zip(*reversed(planes), strict=True) for byte in unit)


# Section 5: chunks and streams.
class _Reader:
    """Takes bytes from the front of a stream, never beyond its end."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.start = self.offset = offset
        self._data = data

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > len(self._data):
            left = f"the stream has {len(self._data)} left"
            raise CorruptionError(f"{what} at byte offset {self.offset} take {nbytes}, {left}")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        self.offset += nbytes
        return taken

    def rest(self) -> bytes:
        return self.take(len(self._data), "rest")


def _decode_chunk(data: bytes, units: _Units, chunk: _Chunk) -> bytes:
    crc = _crc32c(data[chunk.offset : chunk.offset + chunk.nbytes])
    _equal(crc, chunk.crc, "CRC of the chunk", chunk.offset)
    streams = _cut_streams(data, chunk)
    plane_nbytes = chunk.n_units * units.item_nbytes
    planes, carried = [], b""
    for stream, (mode, _) in zip(streams, chunk.streams, strict=True):
        plane, more = _decode_stream(stream, mode, chunk.n_units, plane_nbytes)
        planes.append(plane)
        carried += more
    carriers = [plane for plane, (mode, _) in enumerate(chunk.streams) if mode == Mode.STORED]
    if carriers and len(planes[carriers[-1]]) < plane_nbytes:
        planes[carriers[-1]] += carried
        found, what = len(planes[carriers[-1]]), "length of the carrier with its carried bytes"
        _equal(found, plane_nbytes, what, streams[carriers[-1]].start)
    elif any(carried):
        at = f"the chunk at byte offset {chunk.offset}"
        raise CorruptionError(f"a last rANS state is not 2^16 though nothing is carried in {at}")
    return _merge(planes, units)


def _cut_streams(data: bytes, chunk: _Chunk) -> list[_Reader]:
    """The streams in plane order; in the payload those of mode stored come first."""
    offset = chunk.offset
    cut: dict[int, _Reader] = {}
    for stored in (True, False):
        for plane, (mode, nbytes) in enumerate(chunk.streams):
            if (mode == Mode.STORED) == stored:
                cut[plane] = _Reader(data[offset : offset + nbytes], offset)
                offset += nbytes
    _zero(data[offset : chunk.offset + chunk.nbytes], "padding bytes of the chunk", offset)
    return [cut[plane] for plane in range(len(cut))]


# Section 6: modes.


def _decode_stream(reader: _Reader, mode: Mode, n: int, plane_nbytes: int) -> tuple[bytes, bytes]:
    """A plane (all of it but what is carried), and the bytes that this stream carries."""
    if mode == Mode.STORED:
        return reader.rest(), b""
    if mode == Mode.CONSTANT:
        return reader.rest() * n, b""
    if mode == Mode.PALETTE:
        return _decode_palette(reader, n), b""
    if mode == Mode.ZSTD:
        return _decode_zstd(reader, plane_nbytes, plane_nbytes), b""
    return _decode_rans(reader, n)


def _decode_zstd(reader: _Reader, least: int, most: int) -> bytes:
    """One Zstandard frame, whose declared content size is checked before it is decoded."""
    frame = reader.rest()
    _equal(frame[:4], zstandard.FRAME_HEADER, "Zstandard magic", reader.start)
    try:
        parameters = zstandard.get_frame_parameters(frame)
        _equal(parameters.dict_id, 0, "Zstandard dictionary", reader.start)
        size = parameters.content_size  # where none is declared it reads as 2^64 - 1
        _within(size, least, most, "Zstandard content size", reader.start)
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"Zstandard frame at byte offset {reader.start}: {error}") from error


def _decode_palette(reader: _Reader, n: int) -> bytes:
    """Section 6.3."""
    head = struct.unpack("<BBHI16s", reader.take(24, "palette header"))
    code_bits, has_escape, reserved, n_escapes, palette = head
    _within(code_bits, 1, 4, "code_bits", reader.start)
    _within(has_escape, 0, 1, "has_escape", reader.start + 1)
    _equal(reserved, 0, "reserved field", reader.start + 2)
    if not has_escape:
        _equal(n_escapes, 0, "n_escapes without has_escape", reader.start + 4)
    n_entries = (1 << code_bits) - has_escape
    _zero(palette[n_entries:], "unused palette entries", reader.start + 8 + n_entries)
    bit_planes = [reader.take(8 * -(-n // 64), "bytes of a bit plane") for _ in range(code_bits)]
    escapes = reader.take(n_escapes, "escapes")
    _equal(len(reader.rest()), 0, "number of bytes behind the escapes", reader.offset)
    values = [*palette[:n_entries], *[None] * has_escape]
    codes = [
        sum((bits[i // 8] >> i % 8 & 1) << j for j, bits in enumerate(bit_planes)) for i in range(n)
    ]
    return _resolve_escapes([values[code] for code in codes], escapes, reader.start)


def _resolve_escapes(values: list[int | None], escapes: bytes, start: int) -> bytes:
    """Each None takes the next escape; there must be as many of both."""
    _equal(len(escapes), values.count(None), "n_escapes", start + 4)
    following = iter(escapes)
    return bytes(next(following) if value is None else value for value in values)


def _decode_rans(reader: _Reader, n: int) -> tuple[bytes, bytes]:
    """Section 6.4: the plane, and the carried bytes in the low halves of the last states."""
    head = struct.unpack("<BBHI32s", reader.take(40, "bytes of the rANS header"))
    lanes_log, prob_bits, reserved, n_escapes, symbol_map = head
    _within(lanes_log, 2, 7, "lanes_log", reader.start)
    _equal(prob_bits, layout.PROB_BITS, "prob_bits", reader.start + 1)
    _equal(reserved, 0, "reserved field", reader.start + 2)
    symbols = [value for value in range(256) if symbol_map[value // 8] >> value % 8 & 1]
    frequencies = _read_frequencies(reader, len(symbols))
    n_lanes = 1 << lanes_log
    at = reader.offset
    states = list(struct.unpack(f"<{n_lanes}I", reader.take(4 * n_lanes, "bytes of states")))
    _equal([x for x in states if x < layout.STATE_LOWER_BOUND], [], "list of states below 2^16", at)
    escapes = reader.take(n_escapes, "escapes")
    reader.take(n_escapes % 2, "padding bytes of the escapes")
    at = reader.offset
    words = reader.rest()
    _equal(len(words) % 2, 0, "half a word behind the words", at)
    words_iterator = iter(struct.unpack(f"<{len(words) // 2}H", words))
    codes = _decode_codes(words_iterator, states, frequencies, n, at)
    _equal(
        [x for x in states if x >= 2 * layout.STATE_LOWER_BOUND],
        [],
        "list of last states of 2^17 or more",
        at,
    )
    values = [*symbols, None]
    plane = _resolve_escapes([values[code] for code in codes], escapes, reader.start)
    return plane, struct.pack(
        f"<{n_lanes}H", *(state - layout.STATE_LOWER_BOUND for state in states)
    )


def _read_frequencies(reader: _Reader, n_symbols: int) -> list[int]:
    """The frequencies of the codes that exist: the symbols', then the escape's if it is not 0."""
    at = reader.offset
    packed = reader.take(-(-3 * (n_symbols + 1) // 2), "bytes of frequencies")
    bits = int.from_bytes(packed, "little")
    *frequencies, escape = [bits >> 12 * i & 0xFFF for i in range(n_symbols + 1)]
    _equal(bits >> 12 * (n_symbols + 1), 0, "half byte behind the frequencies", at)
    _equal(frequencies.count(0), 0, "number of mapped values of frequency 0", at)
    _equal(sum(frequencies) + escape, layout.PROB_SUM, "sum of the frequencies", at)
    if n_symbols == 256:
        _equal(escape, 0, "frequency of an escape beside 256 mapped values", at)
    return [*frequencies, escape] if escape else frequencies


def _slot_owners(frequencies: list[int]) -> list[int]:
    """The code that each of the 4096 slots belongs to."""
    if len(frequencies) > layout.BUCKETS:
        return [code for code, frequency in enumerate(frequencies) for _ in range(frequency)]
    rest = frequencies + [0] * (layout.BUCKETS - len(frequencies))
    threshold, alias = [layout.BUCKET_SLOTS] * layout.BUCKETS, list(range(layout.BUCKETS))
    low = [code for code in range(layout.BUCKETS) if rest[code] < layout.BUCKET_SLOTS]
    high = [code for code in range(layout.BUCKETS) if rest[code] > layout.BUCKET_SLOTS]
    while low:
        s, h = low.pop(), high[-1]
        threshold[s], alias[s] = rest[s], h
        rest[h] -= layout.BUCKET_SLOTS - rest[s]
        if rest[h] <= layout.BUCKET_SLOTS:
            high.pop()
            if rest[h] < layout.BUCKET_SLOTS:
                low.append(h)
    pairs = [
        (bucket, slot) for bucket in range(layout.BUCKETS) for slot in range(layout.BUCKET_SLOTS)
    ]
    return [bucket if slot < threshold[bucket] else alias[bucket] for bucket, slot in pairs]


def _decode_codes(
    words: Iterator[int], states: list[int], frequencies: list[int], n: int, at: int
) -> list[int]:
    """Decode `n` codes and leave the last states in `states`; every word must be used."""
    owners = _slot_owners(frequencies)
    counters = [count() for _ in frequencies]
    ranks = [next(counters[code]) for code in owners]
    n_lanes, q = len(states), len(states) // 4
    positions = [4 * (lane % q) + lane // q for lane in range(n_lanes)]
    codes = [0] * n
    for start in range(0, n, n_lanes):
        for lane, position in enumerate(positions):
            if start + position >= n:
                continue
            x = states[lane]
            slot = x & (layout.PROB_SUM - 1)
            codes[start + position] = code = owners[slot]
            x = frequencies[code] * (x >> layout.PROB_BITS) + ranks[slot]
            if x < layout.STATE_LOWER_BOUND:
                word = next(words, None)
                if word is None:
                    raise CorruptionError(f"no word is left of those at byte offset {at}")
                x = x << 16 | word
            states[lane] = x
    _equal(len(list(words)), 0, "number of unused words of those", at)
    return codes


# Section 7: the content hash.
def content_hash(data: bytes) -> bytes:
    """The 16 bytes that identify a tensor's logical bytes (C order, little-endian)."""
    if len(data) <= layout.CONTENT_LEAF_NBYTES:
        return xxhash.xxh3_128_digest(data)
    starts = range(0, len(data), layout.CONTENT_LEAF_NBYTES)
    leaves = [data[start : start + layout.CONTENT_LEAF_NBYTES] for start in starts]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(leaf) for leaf in leaves))


# Section 8: the file.
class _Entry(NamedTuple):
    start: int  # byte offsets in the data section
    stop: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def decode_file(data: bytes, *, max_nbytes: int | None = None) -> bytes:
    """Decode a packed file to the original safetensors file, byte for byte.

    Args:
        data: the whole packed file.
        max_nbytes: refuse a tensor of more decoded bytes than this; None for no limit.

    Returns:
        The original file.

    Raises:
        PackhorseError: as `decode_frame`, with the tensor's name in the message.
    """
    _need(data, 8, "the length of the file's header")
    data_offset = 8 + int.from_bytes(data[:8], "little")
    if data_offset > 8 + layout.MAX_FILE_HEADER_NBYTES:
        raise CorruptionError(f"file header takes {data_offset - 8} bytes, allowed are 100,000,000")
    _need(data, data_offset, "the file's header")
    entries, metadata = _parse_header(data[8:data_offset], "the file's header")
    end = data_offset + max((entry.stop for entry in entries), default=0)
    _need(data, end, "the file")
    _equal(len(data), end, "the end of the file, the length of the data,", end)
    recorded = _recorded_header(metadata)
    originals, pairs = _parse_header(recorded, "the recorded header")
    frames = {entry.name: entry for entry in entries}
    odd = frames.keys() ^ {entry.name for entry in originals}
    pairs.pop(layout.FILE_METADATA_KEY, None)
    odd |= {key for key, value in pairs.items() if metadata.get(key) != value}
    if odd:
        raise CorruptionError(f"{sorted(odd)[:5]} differ in the file and in the recorded header")
    tensors = [_decode_entry(data, data_offset, frames[e.name], e, max_nbytes) for e in originals]
    return struct.pack("<Q", len(recorded)) + recorded + b"".join(tensors)


def _parse_header(text: bytes, what: str) -> tuple[list[_Entry], dict[str, str]]:
    """The tensors of a safetensors header in the order of their data, and its metadata."""
    fields = _parse_json(text, what)
    metadata = {} if fields.get("__metadata__") is None else fields["__metadata__"]
    fields.pop("__metadata__", None)
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise CorruptionError(f"__metadata__ in {what} is not a map of strings")
    entries = sorted(_parse_entry(name, field, what) for name, field in fields.items())
    end = 0
    for entry in entries:
        _equal(entry.start, end, f"start of tensor {entry.name!r} in {what}, in the data", end)
        end = entry.stop
    return entries, metadata


def _parse_json(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"duplicate key among {[name for name, _ in pairs][:20]}")
        for text in (text for pair in pairs for text in pair if isinstance(text, str)):
            text.encode()  # a lone surrogate is a ValueError
        return dict(pairs)

    if text[:1] != b"{":
        raise CorruptionError(f"{what} starts with {text[:1]!r}, an opening brace is allowed")
    try:
        # Python reads NaN and Infinity, JSON has neither: int() refuses the words.
        fields = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=int)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{what} is not valid JSON: {error}") from error
    return dict(fields)


def _parse_entry(name: str, field: Any, what: str) -> _Entry:
    try:
        dtype, shape, (start, stop) = field["dtype"], field["shape"], field["data_offsets"]
        fine = type(dtype) is str and type(shape) is list
        fine &= all(type(x) is int and 0 <= x < 1 << 64 for x in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        fine = False
    if not fine or start > stop:
        raise CorruptionError(f"tensor {name!r} in {what} lacks valid dtype, shape, data_offsets")
    return _Entry(start, stop, name, dtype, tuple(shape))


def _recorded_header(metadata: dict[str, str]) -> bytes:
    key = layout.FILE_METADATA_KEY
    if key not in metadata:
        raise CorruptionError(f"no key {key!r} in __metadata__: this is not a packed file")
    fields = _parse_json(metadata[key].encode(), f"metadata key {key!r}")
    version, header = fields.get("version"), fields.get("header")
    if type(version) is int and version > layout.FILE_VERSION:
        known = layout.FILE_VERSION
        raise CompatibilityError(f"file version is {version}, known: {known}; upgrade packhorse")
    if type(version) is not int or version != layout.FILE_VERSION or type(header) is not str:
        raise CorruptionError(f"metadata key {key!r} lacks version 1 or a header, has {version!r}")
    try:
        frame = base64.b64decode(header, validate=True)
        if base64.b64encode(frame).decode() != header:
            raise ValueError("stray bits in the last digit")
    except ValueError as error:
        raise CorruptionError(f"header in metadata key {key!r} is not base64: {error}") from error
    return _decode_zstd(_Reader(frame, 0), 0, layout.MAX_FILE_HEADER_NBYTES)


def _decode_entry(
    data: bytes, data_offset: int, packed: _Entry, original: _Entry, max_nbytes: int | None
) -> bytes:
    start, stop = data_offset + packed.start, data_offset + packed.stop
    where = f"tensor {packed.name!r} at byte offset {start}"
    try:
        _equal((packed.dtype, packed.shape), ("U8", (stop - start,)), "dtype and shape", 0)
        tensor = decode_frame(data[start:stop], max_nbytes=max_nbytes)
        found = (tensor.dtype, tensor.shape, len(tensor.data))
        allowed = (original.dtype, original.shape, original.stop - original.start)
        _equal(found, allowed, "dtype, shape, nbytes of the frame", 0)
    except PackhorseError as error:
        raise type(error)(f"{where}: {error}") from error
    return tensor.data
