"""Sections 4, 5 and 7 of docs/format.md: from the chunks of a frame to the tensor's bytes.

The base is checked before the first chunk, and the content hash at the end. So the result is the
tensor, or an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import xxhash

from packhorse import layout
from packhorse.errors import BaseMismatchError, CorruptionError
from packhorse.layout import Mode, Split
from packhorse.reference.delta import base_units, decode_delta
from packhorse.reference.header import (
    BaseBlock,
    Chunk,
    Header,
    SideStream,
    Units,
    check_nested,
    read_header,
)
from packhorse.reference.matches import Nested, decode_matches
from packhorse.reference.rans import Place, decode_nibbles
from packhorse.reference.sparse import decode_sparse_delta
from packhorse.reference.streams import decode_stream
from packhorse.reference.words import Reader, crc32c, equal, zero

_NESTED_DTYPES = {
    layout.DTYPE_BY_NAME[name].unit_nbytes: layout.DTYPE_BY_NAME[name]
    for name in ("U8", "U16", "U32", "U64")
}

__all__ = ["DecodedTensor", "base_check", "content_hash", "content_sum", "decode_frame"]


@dataclass(frozen=True)
class DecodedTensor:
    """What a frame holds.

    Attributes:
        dtype: safetensors' name, "BF16".
        shape: the dimensions, outermost first.
        data: the tensor's bytes in C order, little-endian.
        content_hash: 16 bytes; `data` was checked against it.
        level: the level byte as it is stored; it is information only.
        split: how units became planes.
        modes: the mode of each plane, for each chunk; a chunk of differences has one mode only.
        side_mode: the mode of the side data; None if there are none.
        base_hash: the content hash of the base; None if there is none.
        base_dtype: safetensors' name of the base's dtype; None if there is none.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    content_hash: bytes
    level: int
    split: Split
    modes: tuple[tuple[Mode, ...], ...]
    side_mode: Mode | None
    base_hash: bytes | None
    base_dtype: str | None


def decode_frame(
    data: bytes, *, max_nbytes: int | None = None, base: bytes | None = None
) -> DecodedTensor:
    """Decodes one frame and checks all of it, content hash included.

    Args:
        data: exactly the frame.
        max_nbytes: the most decoded bytes that are allowed; None for no limit.
        base: the bytes of the base, for a frame that has one; other frames ignore it.

    Returns:
        The tensor's dtype, shape and bytes.

    Raises:
        CorruptionError: the bytes break a rule of docs/format.md, or the tensor is over the limit.
        TruncationError: bytes are missing at the end.
        CompatibilityError: the version, a dtype, a flag or a mode is unknown.
        BaseMismatchError: the frame has a base, and none was given, or another one.
    """
    header = read_header(data, max_nbytes)
    digest = content_sum if header.has_sum else content_hash
    _check_base(header.base, base, digest)
    chunk_base = partial(_chunk_base, header, base or b"")
    side = _decode_side(data, header.side) if header.side else None
    decoded = b"".join(
        _decode_chunk(data, header.units, side, chunk, chunk_base) for chunk in header.chunks
    )
    equal(header.content_hash, digest(decoded), "content hash", 24)
    if header.base and header.has_sum:
        found = base_check(header, base or b"", decoded)
        if found != header.base.check:
            named = f"the base check is {found:08x}, and the frame says {header.base.check:08x}"
            raise BaseMismatchError(named)
    return DecodedTensor(
        dtype=header.units.dtype.name,
        shape=header.shape,
        data=decoded,
        content_hash=header.content_hash,
        level=header.level,
        split=header.units.split,
        modes=tuple(tuple(mode for mode, _ in chunk.streams) for chunk in header.chunks),
        side_mode=header.side.mode if header.side else None,
        base_hash=header.base.content_hash if header.base else None,
        base_dtype=header.base.dtype.name if header.base else None,
    )


def _check_base(
    block: BaseBlock | None, base: bytes | None, digest: Callable[[bytes], bytes]
) -> None:
    """Checks that the base is the one that the frame names."""
    if block is None:
        return
    needed = f"of {block.nbytes} bytes {block.dtype.name} with content hash"
    needed = f"the frame needs the base {needed} {block.content_hash.hex()}"
    if base is None:
        raise BaseMismatchError(f"{needed}, but none was given")
    if len(base) != block.nbytes:
        raise BaseMismatchError(f"{needed}, but the one given has {len(base)} bytes")
    found = digest(base)
    if found != block.content_hash:
        raise BaseMismatchError(f"{needed}, but the one given has {found.hex()}")


def _chunk_base(header: Header, base: bytes, chunk: Chunk) -> list[int]:
    """Returns the units of the base that a chunk differs from."""
    assert header.base, "differences are allowed beside a base only"
    size = header.base.dtype.unit_nbytes
    start, stop = chunk.first_unit * size, (chunk.first_unit + chunk.n_units) * size
    return base_units(base[start:stop], header.base.dtype, header.units.dtype)


class _SideData(NamedTuple):
    """Section 2: the side data."""

    row: bytes
    column: bytes

    def predictions(self, first_unit: int, n: int) -> list[int]:
        """Section 6.5: returns `q` of each of `n` units."""
        units = range(first_unit, first_unit + n)
        places = (divmod(unit, len(self.column)) for unit in units)
        return [(self.row[i] + self.column[j]) % 256 for i, j in places]


def _decode_side(data: bytes, stream: SideStream) -> _SideData:
    reader = Reader(data[stream.offset : stream.offset + stream.nbytes], stream.offset)
    n = stream.n_rows + stream.n_columns
    decoded = decode_stream(reader, stream.mode, Place(plane=0, n=n, plane_nbytes=n))
    _check_nothing_carried(decoded.carried, "the side data", reader.start)
    return _SideData(decoded.plane[: stream.n_rows], decoded.plane[stream.n_rows :])


# Section 4: splits.
def _merge(planes: list[bytes], units: Units) -> bytes:
    if units.split == Split.WHOLE:
        return planes[0]
    if units.split == Split.FLOAT and len(planes) == 1:
        return bytes((byte >> 1 | byte << 7) & 0xFF for byte in planes[0])
    if units.split == Split.FLOAT:
        r = 4 if units.dtype.name == "F64" else 1
        rotated = [high << 8 | low for high, low in zip(planes[0], planes[1], strict=True)]
        tops = [(v >> r | v << (16 - r)) & 0xFFFF for v in rotated]
        planes = [bytes(t >> 8 for t in tops), bytes(t & 0xFF for t in tops), *planes[2:]]
    return bytes(byte for unit in zip(*reversed(planes), strict=True) for byte in unit)


# Section 5: chunks and streams.
def _decode_chunk(
    data: bytes,
    units: Units,
    side: _SideData | None,
    chunk: Chunk,
    chunk_base: Callable[[Chunk], list[int]],
) -> bytes:
    crc = crc32c(data[chunk.offset : chunk.offset + chunk.nbytes])
    equal(crc, chunk.crc, "CRC of the chunk", chunk.offset)
    streams = _cut_streams(data, chunk)
    if chunk.streams[0][0] == Mode.DELTA:
        return decode_delta(streams[0], units.dtype, chunk_base(chunk))
    if chunk.streams[0][0] == Mode.SPARSE_DELTA:
        return decode_sparse_delta(streams[0], units.dtype, chunk_base(chunk))
    if chunk.streams[0][0] == Mode.MATCHES:
        size = units.dtype.unit_nbytes
        return decode_matches(streams[0], chunk.n_units, size, _decode_nested)
    if chunk.streams[0][0] == Mode.NIBBLES:
        return decode_nibbles(streams[0], chunk.n_units * units.dtype.unit_nbytes)
    return _decode_planes(streams, units, side, chunk)


def _decode_planes(
    streams: list[Reader], units: Units, side: _SideData | None, chunk: Chunk
) -> bytes:
    plane_nbytes = chunk.n_units * units.item_nbytes
    predictions: Callable[[], list[int]] | None = None
    if side:
        predictions = partial(side.predictions, chunk.first_unit, chunk.n_units)
    place = Place(0, chunk.n_units, plane_nbytes, predictions)
    planes, carried = [], b""
    for plane, (mode, _) in enumerate(chunk.streams):
        decoded = decode_stream(streams[plane], mode, place._replace(plane=plane))
        if plane == 0 and mode != Mode.STORED:
            place = place._replace(lead=decoded.yielded)
        planes.append(decoded.plane)
        carried += decoded.carried
    _restore_carrier(planes, carried, plane_nbytes, chunk)
    return _merge(planes, units)


def _decode_nested(nested: Nested) -> bytes:
    """Section 6.8: decodes a chunk inside of a stream, which has no CRC and no padding."""
    size = nested.unit_nbytes
    units = Units(_NESTED_DTYPES[size], Split.BYTES if size > 1 else Split.WHOLE, size, 1)
    streams = list(nested.streams)
    check_nested(streams, nested.n_units, nested.offset)
    chunk = Chunk(nested.offset, len(nested.data), 0, 0, nested.n_units, streams)
    placed = bytes(nested.offset) + nested.data  # offsets are those in the frame
    return _decode_planes(_cut_streams(placed, chunk), units, None, chunk)


def _cut_streams(data: bytes, chunk: Chunk) -> list[Reader]:
    """Returns the streams in the order of planes; in the payload, stored streams come first."""
    offset = chunk.offset
    cut: dict[int, Reader] = {}
    for stored in (True, False):
        for plane, (mode, nbytes) in enumerate(chunk.streams):
            if (mode == Mode.STORED) == stored:
                cut[plane] = Reader(data[offset : offset + nbytes], offset)
                offset += nbytes
    zero(data[offset : chunk.offset + chunk.nbytes], "padding bytes of the chunk", offset)
    return [cut[plane] for plane in range(len(cut))]


def _restore_carrier(planes: list[bytes], carried: bytes, plane_nbytes: int, chunk: Chunk) -> None:
    """Appends the end of the last stored plane to it, if the rANS streams carry that end."""
    carriers = [plane for plane, (mode, _) in enumerate(chunk.streams) if mode == Mode.STORED]
    if not carriers or len(planes[carriers[-1]]) == plane_nbytes:
        return _check_nothing_carried(carried, "the chunk", chunk.offset)
    planes[carriers[-1]] += carried
    found, what = len(planes[carriers[-1]]), "length of the carrier with its carried bytes"
    equal(found, plane_nbytes, f"{what} in the chunk", chunk.offset)


def _check_nothing_carried(carried: bytes, what: str, offset: int) -> None:
    if any(carried):
        where = f"{what} at byte offset {offset}"
        raise CorruptionError(f"a last rANS state in {where} is not 2^16, but nothing is carried")


# Section 7: the content hash.
def content_hash(data: bytes) -> bytes:
    """Computes the 16 bytes that identify a tensor's logical bytes (C order, little-endian)."""
    if len(data) <= layout.CONTENT_LEAF_NBYTES:
        return xxhash.xxh3_128_digest(data)
    starts = range(0, len(data), layout.CONTENT_LEAF_NBYTES)
    leaves = [data[start : start + layout.CONTENT_LEAF_NBYTES] for start in starts]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(leaf) for leaf in leaves))


def content_sum(data: bytes) -> bytes:
    """Computes the 16 bytes of section 7.2, which identify a tensor's logical bytes, too."""
    low = high = 0
    for i in range(0, len(data), 4):
        word, key = int.from_bytes(data[i : i + 4], "little"), _key(i // 4)
        low += word * (key % 2**32)
        high += word * (key >> 32)
    return b"".join((number % 2**64).to_bytes(8, "little") for number in (low, high))


def base_check(header: Header, base: bytes, decoded: bytes) -> int:
    """Computes the base check of section 7.2: what is replaced, as bytes among zeros, gives `B`."""
    size, replaced = header.units.dtype.unit_nbytes, bytearray(len(base))
    for chunk in header.chunks:
        mode, nbytes = chunk.streams[0]
        for unit in range(chunk.first_unit, chunk.first_unit + chunk.n_units):
            at = slice(unit * size, (unit + 1) * size)
            if mode == Mode.SPARSE_DELTA:
                is_replaced = base[at] != decoded[at]
            else:
                is_replaced = mode != Mode.DELTA or nbytes > 0
            if is_replaced:
                replaced[at] = base[at]
    return _key(int.from_bytes(content_sum(bytes(replaced))[:8], "little")) >> 32


def _key(i: int) -> int:
    z = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
