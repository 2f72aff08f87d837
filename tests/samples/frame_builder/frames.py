"""Frames around the streams: header, chunk table, side data, payload (docs/format.md, 2 to 5)."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from frame_builder.codings import Around, Coding, Stored
from frame_builder.deltas import Base
from frame_builder.planes import split_planes
from packhorse.layout import DTYPE_BY_NAME, Mode, Split

__all__ = [
    "SIDE",
    "BuiltFrame",
    "Edit",
    "Side",
    "build_chunk",
    "build_frame",
    "content_hash",
    "crc32c",
    "descriptor",
]

SIDE = -1  # what an edit gets for chunk and plane with the stream of the side data
VERSIONS = {Mode.SPARSE_DELTA: 2, Mode.MATCHES: 3, Mode.NIBBLES: 4}  # of the modes that came later
FIELDS = {
    "magic": (0, "4s"),
    "version": (4, "B"),
    "dtype_code": (5, "B"),
    "n_dims": (6, "B"),
    "split": (7, "B"),
    "flags": (8, "H"),
    "level": (10, "B"),
    "chunk_log": (11, "B"),
    "header_nbytes": (12, "I"),
    "frame_nbytes": (16, "Q"),
    "content_hash": (24, "16s"),
    "n_chunks": (40, "I"),
    "header_crc": (44, "I"),
    "n_row_dims": (48, "B"),
    "reserved": (49, "3s"),
    "side_descriptor": (52, "I"),
}


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


_CRC_OF_BYTE = [_crc_of_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def content_hash(data: bytes) -> bytes:
    leaves = [data[i : i + 262144] for i in range(0, len(data), 262144)]
    digests = [xxhash.xxh3_128(leaf).digest() for leaf in leaves]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128(b"".join(digests)).digest()


def pad64(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


Edit = Callable[[int, int, bytes], bytes]


@dataclass
class BuiltFrame:
    """A frame's bytes and the places of its parts."""

    data: bytearray
    header_nbytes: int
    table_offset: int
    row_nbytes: int
    chunks: list[tuple[int, int]]  # offset and padded bytes of each
    streams: dict[tuple[int, int], tuple[int, int]]  # (chunk, plane) or SIDE twice -> offset, bytes
    source: bytes = field(repr=False)
    base: bytes | None = field(default=None, repr=False)  # what it is decoded with

    @property
    def base_offset(self) -> int:
        """Where the base is described, if there is one."""
        return self.table_offset - 24

    def lie(self, *, seal: bool = True, **fields: int | bytes) -> "BuiltFrame":
        """Overwrite header fields by name; `seal` recomputes the header's CRC."""
        for name, value in fields.items():
            offset, code = FIELDS[name]
            struct.pack_into(f"<{code}", self.data, offset, value)
        return self.seal(chunks=False) if seal else self

    def patch(self, offset: int, replacement: bytes, *, seal: bool = True) -> "BuiltFrame":
        """Overwrite bytes anywhere; `seal` recomputes every CRC."""
        self.data[offset : offset + len(replacement)] = replacement
        return self.seal() if seal else self

    def patch_stream(
        self, plane: int, at: int, replacement: bytes, *, chunk: int = 0
    ) -> "BuiltFrame":
        return self.patch(self.streams[chunk, plane][0] + at, replacement)

    def seal(self, *, chunks: bool = True) -> "BuiltFrame":
        for index, (offset, nbytes) in enumerate(self.chunks if chunks else []):
            crc = crc32c(self.data[offset : offset + nbytes])
            struct.pack_into("<I", self.data, self.table_offset + index * self.row_nbytes, crc)
        struct.pack_into("<I", self.data, 44, 0)
        crc = crc32c(self.data[: self.header_nbytes])
        struct.pack_into("<I", self.data, 44, crc)
        return self

    def __bytes__(self) -> bytes:
        return bytes(self.data)


@dataclass(frozen=True)
class Side:
    """Side data of a matrix; `predictions` are those of all its units, row by row."""

    rows: bytes
    columns: bytes
    n_row_dims: int = 1
    coding: Coding = field(default_factory=Stored)

    @property
    def predictions(self) -> list[int]:
        return [(row + column) % 256 for row in self.rows for column in self.columns]


def build_chunk(
    planes: list[bytes], codings: Sequence[Coding], around: Around, carry: bool
) -> list[bytes]:
    """The streams of one chunk, in plane order."""
    if codings[0].mode in (Mode.DELTA, Mode.SPARSE_DELTA):
        return [codings[0].encode(planes[0], around)]
    stored = [p for p, coding in enumerate(codings) if coding.mode == Mode.STORED]
    n_carried = sum(coding.n_carried for coding in codings) if carry and stored else 0
    if stored and n_carried > len(planes[stored[-1]]):
        n_carried = 0
    pool = planes[stored[-1]][-n_carried:] if n_carried else b""
    around = replace(around, lead=codings[0].yields(planes[0], around))
    streams = []
    for plane, coding in zip(planes, codings, strict=True):
        carried, pool = pool[: coding.n_carried], pool[coding.n_carried :]
        streams.append(coding.encode(plane, replace(around, carried=carried)))
    if n_carried:
        streams[stored[-1]] = streams[stored[-1]][:-n_carried]
    return streams


@dataclass
class _Payload:
    """Chunks, one behind the other, and their table."""

    data: bytes = b""
    table: bytes = b""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    streams: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, streams: list[bytes], codings: Sequence[Coding], n_planes: int) -> None:
        chunk, start = len(self.chunks), len(self.data)
        for p in sorted(range(len(streams)), key=lambda p: (codings[p].mode != Mode.STORED, p)):
            self.streams[chunk, p] = (len(self.data), len(streams[p]))
            self.data += streams[p]
        self.data = pad64(self.data)
        self.chunks.append((start, len(self.data) - start))
        self.table += bytes(4)
        for coding, stream in zip(codings, streams, strict=True):
            self.table += descriptor(coding, stream)
        self.table += bytes(4 * (n_planes - len(streams)))


def descriptor(coding: Coding, stream: bytes) -> bytes:
    return struct.pack("<I", len(stream) | coding.mode << 24)


def build_frame(
    data: bytes,
    dtype: str = "U8",
    shape: Sequence[int] | None = None,
    *,
    codings: Sequence[Coding] | Callable[[int], Sequence[Coding]],
    split: int = 0,
    chunk_log: int = 6,
    level: int = 2,
    carry: bool = True,
    side: Side | None = None,
    base: Base | None = None,
    edit: Edit | None = None,
) -> BuiltFrame:
    """Build a frame of `data`.

    Args:
        data: the tensor's bytes.
        dtype: safetensors' name.
        shape: one dimension if None.
        codings: one for each plane, used in every chunk, or a function that gives them for a
            chunk's number; a mode of differences is the only one of its chunk.
        split: section 4.
        chunk_log: log2 of the units of a chunk.
        level: the level byte.
        carry: let the rANS streams carry the end of the last stored plane, if it is long enough.
        side: side data; the predictions of all units follow from them.
        base: the base of chunks of differences.
        edit: gets chunk, plane and stream, and returns the stream to write instead.

    Returns:
        The frame, sealed.
    """
    row = DTYPE_BY_NAME[dtype]
    shape = (len(data) * 8 // row.bits,) if shape is None else shape
    step = row.unit_nbytes << chunk_log
    item_nbytes = row.unit_nbytes if split == Split.WHOLE else 1
    n_planes = row.unit_nbytes // item_nbytes
    edit = edit or (lambda chunk, plane, stream: stream)
    predictions, payload = side.predictions if side else [], _Payload()
    base_units = base.units(dtype) if base else b""
    version = 1
    for c, start in enumerate(range(0, len(data), step)):
        units = data[start : start + step]
        first = start // row.unit_nbytes
        around = Around(
            item_nbytes,
            predictions=predictions[first : first + (1 << chunk_log)],
            dtype=dtype,
            units=units,
            base=base_units[start : start + len(units)],
        )
        chosen = codings(c) if callable(codings) else codings
        streams = build_chunk(split_planes(units, row, split), chosen, around, carry)
        edited = [edit(c, p, stream) for p, stream in enumerate(streams)]
        payload.add(edited, chosen, n_planes)
        version = max(version, VERSIONS.get(chosen[0].mode, 1))
    built = _assemble(data, shape, payload, 4 + 4 * n_planes, side, base, edit)
    return built.lie(
        seal=False,
        magic=b"\x89PHF",
        version=version,
        dtype_code=row.code,
        n_dims=len(shape),
        split=split,
        flags=int(base is not None),
        level=level,
        chunk_log=chunk_log,
        header_nbytes=built.header_nbytes,
        frame_nbytes=len(built.data),
        content_hash=content_hash(data),
        n_chunks=len(payload.chunks),
    ).seal()


def _assemble(
    data: bytes,
    shape: Sequence[int],
    payload: _Payload,
    row_nbytes: int,
    side: Side | None,
    base: Base | None,
    edit: Edit,
) -> BuiltFrame:
    """The parts joined; of the fixed part, only the fields about the side data."""
    stream, fixed, block = b"", bytes(56), b""
    if base:
        code = DTYPE_BY_NAME[base.dtype].code
        block = content_hash(base.data) + bytes([code]) + bytes(7)
    if side:
        plane = side.rows + side.columns
        stream = edit(SIDE, SIDE, side.coding.encode(plane, Around()))
        fixed = fixed[:48] + bytes([side.n_row_dims, 0, 0, 0]) + descriptor(side.coding, stream)
    front = fixed + struct.pack(f"<{len(shape)}Q", *shape) + block + payload.table
    header = pad64(front + stream)
    start = len(header)
    streams = {key: (start + at, nbytes) for key, (at, nbytes) in payload.streams.items()}
    return BuiltFrame(
        bytearray(header + payload.data),
        start,
        len(front) - len(payload.table),
        row_nbytes,
        [(start + offset, nbytes) for offset, nbytes in payload.chunks],
        {**streams, (SIDE, SIDE): (len(front), len(stream))},
        data,
        base.data if base else None,
    )
