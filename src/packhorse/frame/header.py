"""The header of a frame: written, and read with distrust (docs/format.md, section 2).

`read_header` checks every field before it is used, in the order of the document, and never looks at
the payload. Sizes that follow from other fields are computed here, for writing and for reading.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse._core import Geometry
from packhorse.codecs.base import ByteArray
from packhorse.codecs.side import matrix_of
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.frame.base import BaseName, allowed_casts
from packhorse.layout import (
    BASE_BLOCK,
    BASE_BLOCK_NBYTES,
    BASE_MODES,
    CRITICAL_FLAGS,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    FIRST_STREAM,
    FIXED_HEADER,
    FIXED_HEADER_NBYTES,
    FLAG_BASE,
    FLAG_SUM,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    FRAME_VERSION,
    HEADER_CRC_OFFSET,
    LAST_MODES,
    MAX_BITS,
    MAX_CHUNK_LOG,
    MAX_CHUNK_NBYTES,
    MAX_DIMS,
    MAX_SIDE_NBYTES,
    MIN_CHUNK_LOG,
    STREAM_NBYTES_BITS,
    STREAM_NBYTES_MASK,
    DType,
    Mode,
    Split,
)

__all__ = [
    "FrameHeader",
    "PlaneSummary",
    "Table",
    "checked_nbytes",
    "frame_header_nbytes",
    "header_bytes",
    "label",
    "n_planes_of",
    "padded",
    "payload_nbytes",
    "plane_summaries",
    "read_header",
    "write_header",
]

_CRC = struct.Struct("<I")
_SHAPES = tuple(struct.Struct(f"<{n_dims}Q") for n_dims in range(MAX_DIMS + 1))
_TABLE_DTYPE = np.dtype("<u4")
_SPLITS = tuple(Split)  # by number
_SIDE_AT = 48  # offset of n_row_dims; the descriptor is 4 bytes further on

Table = NDArray[np.uint32]  # a row for each chunk: CRC32C, then a descriptor for each plane


class FrameHeader(NamedTuple):
    """The checked header of a frame. `has_sum` says whether its content hashes are sums."""

    dtype: DType
    shape: tuple[int, ...]
    geometry: Geometry
    level: int
    content_hash: bytes
    header_nbytes: int
    frame_nbytes: int
    table: Table
    n_row_dims: int
    side_descriptor: int
    side_stream: bytes
    base: BaseName | None = None
    has_sum: bool = False

    @property
    def version(self) -> int:
        """The first version of the format that has all modes of the frame."""
        if self.base is None and self.split != Split.WHOLE:  # newer modes need either
            return 1
        last = int(self.table[:, FIRST_STREAM].max(initial=0)) >> STREAM_NBYTES_BITS
        return next(version for version, mode in LAST_MODES.items() if last <= mode)

    @property
    def split(self) -> Split:
        """How units become planes."""
        return _SPLITS[self.geometry.split]

    @property
    def chunk_log(self) -> int:
        """Log2 of the units of a chunk."""
        return self.geometry.chunk_log

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the side data; zeros if there are none."""
        return matrix_of(self.dtype, self.shape, self.n_row_dims) if self.n_row_dims else (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self.geometry.nbytes

    @property
    def n_planes(self) -> int:
        """Planes of each chunk."""
        return self.geometry.n_planes

    def chunk_offset(self, chunk: int) -> int:
        """Returns the offset of a chunk, in bytes from the start of the frame."""
        return self.header_nbytes + payload_nbytes(self.table[:chunk])

    def chunk_offsets(self) -> NDArray[np.int64]:
        """Returns the offset of each chunk, and the end of the last one; for many chunks."""
        ends = np.cumsum(_chunk_nbytes(self.table))
        return self.header_nbytes + np.concatenate([np.zeros(1, np.int64), ends])


def n_planes_of(dtype: DType, split: Split) -> int:
    """Returns the number of planes that a split makes of a unit."""
    return 1 if split == Split.WHOLE else dtype.unit_nbytes


def padded(n: int) -> int:
    """Rounds `n` bytes up to the alignment of a frame."""
    return -(-n // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def frame_header_nbytes(
    n_dims: int, n_chunks: int, n_planes: int, side_nbytes: int, *, has_base: bool
) -> int:
    """Returns the bytes of a header, padding included."""
    fields = FIXED_HEADER_NBYTES + 8 * n_dims + BASE_BLOCK_NBYTES * has_base
    return padded(fields + 4 * n_chunks * (1 + n_planes) + side_nbytes)


def payload_nbytes(table: Table) -> int:
    """Returns the bytes of the chunks in a table, padding included."""
    if table.shape == (1, 2):  # short tensors, without NumPy's cost of a call
        return padded(table.item(0, FIRST_STREAM) & STREAM_NBYTES_MASK)
    return int(_chunk_nbytes(table).sum())


def _chunk_nbytes(table: Table) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = (table[:, FIRST_STREAM:] & STREAM_NBYTES_MASK).sum(
        axis=1, dtype=np.int64
    )
    return -(-lengths // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def checked_nbytes(dtype_name: str, shape: Sequence[int]) -> tuple[DType, int]:
    """Checks a dtype and a shape from a caller, and returns the dtype and the tensor's bytes."""
    dtype, numel = DTYPE_BY_NAME.get(dtype_name), math.prod(shape)
    if dtype is None:
        raise ValueError(f"dtype {dtype_name!r} is unknown; known are {', '.join(DTYPE_BY_NAME)}")
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise ValueError(f"shape {tuple(shape)} must have at most {MAX_DIMS} dimensions, none < 0")
    if _overflows(shape, numel, dtype):
        raise ValueError(f"shape {tuple(shape)} of {dtype_name} has 2^63 bits or more")
    if numel * dtype.bits % 8:
        raise ValueError(f"{numel} elements of {dtype_name} are not a whole number of bytes")
    return dtype, numel * dtype.bits // 8


def _overflows(shape: Sequence[int], numel: int, dtype: DType) -> bool:
    """Whether a tensor has too many bits. A dimension of zero must not hide that the others
    overflow."""
    return (numel or math.prod(max(dim, 1) for dim in shape)) * dtype.bits >= MAX_BITS


def header_bytes(header: FrameHeader) -> bytes:
    """Returns the bytes of a header, with its CRC."""
    fixed = FIXED_HEADER.pack(
        FRAME_MAGIC,
        header.version,
        header.dtype.code,
        len(header.shape),
        header.geometry.split,
        FLAG_BASE * (header.base is not None) | FLAG_SUM * header.has_sum,
        header.level,
        header.geometry.chunk_log,
        header.header_nbytes,
        header.frame_nbytes,
        header.content_hash,
        len(header.table),
        0,
        header.n_row_dims,
        bytes(3),
        header.side_descriptor,
    )
    text = fixed + _SHAPES[len(header.shape)].pack(*header.shape)
    if header.base is not None:
        text += BASE_BLOCK.pack(
            header.base.content_hash, header.base.dtype.code, bytes(3), header.base.check
        )
    text += header.table.tobytes() + header.side_stream
    text = text.ljust(header.header_nbytes, b"\0")
    crc = _CRC.pack(_core.crc32c(text))
    return text[:HEADER_CRC_OFFSET] + crc + text[HEADER_CRC_OFFSET + _CRC.size :]


def write_header(header: FrameHeader, dst: ByteArray) -> None:
    """Writes a header with its CRC to memory of exactly its length."""
    memoryview(dst)[:] = header_bytes(header)


def label(name: str | None) -> str:
    """Returns the beginning of messages about a tensor."""
    return "" if name is None else f"tensor {name!r}: "


def read_header(
    data: ByteArray, name: str | None, offset: int, max_nbytes: int | None
) -> FrameHeader:
    """Reads and checks a header; arguments and errors as in `Frame.from_buffer`."""
    return _Reader(data, name, offset).read(max_nbytes)


class _Reader:
    """Checks a frame's header in the order of docs/format.md, section 2, and uses no field before
    its check."""

    def __init__(self, data: ByteArray, name: str | None, offset: int) -> None:
        self.data = data
        self.name = name
        self.offset = offset

    def fail(self, at: int, words: str, kind: type[Exception] = CorruptionError) -> Exception:
        return kind(f"{label(self.name)}byte {self.offset + at}: {words}")

    def need(self, nbytes: int, what: str) -> None:
        if self.data.size < nbytes:
            words = f"{what} needs {nbytes} bytes, {self.data.size} are left; the data is cut off"
            raise self.fail(self.data.size, words, TruncationError)

    def read(self, max_nbytes: int | None) -> FrameHeader:
        self.need(FIXED_HEADER_NBYTES, "a frame header")
        fields = FIXED_HEADER.unpack_from(self.data)
        magic, version, code, n_dims, split_code, flags, level, chunk_log = fields[:8]
        header_nbytes, frame_nbytes, digest, n_chunks, crc = fields[8:13]
        n_row_dims, reserved, side_descriptor = fields[13:]
        if magic != FRAME_MAGIC:
            raise self.fail(0, f"magic is {magic.hex()}, a frame begins with {FRAME_MAGIC.hex()}")
        if version == 0:
            raise self.fail(4, "frame version is 0, versions begin with 1")
        if version > FRAME_VERSION:
            words = f"frame version is {version}, this release reads {FRAME_VERSION}"
            raise self.fail(4, words + "; upgrade packhorse", CompatibilityError)
        if flags & ~CRITICAL_FLAGS:
            words = f"critical flags are {flags:#06x}, this release knows {CRITICAL_FLAGS:#06x}"
            raise self.fail(8, words + "; upgrade packhorse", CompatibilityError)
        has_base = bool(flags & FLAG_BASE)
        dtype, split = self.read_kind(code, split_code)
        if n_dims > MAX_DIMS:
            raise self.fail(6, f"{n_dims} dimensions, at most {MAX_DIMS} are allowed")
        if not MIN_CHUNK_LOG <= chunk_log <= MAX_CHUNK_LOG or (
            dtype.unit_nbytes << chunk_log > MAX_CHUNK_NBYTES
        ):
            raise self.fail(11, f"chunk_log is {chunk_log}, out of range for {dtype.name}")
        n_planes = n_planes_of(dtype, split)
        side_nbytes = side_descriptor & STREAM_NBYTES_MASK
        if header_nbytes != frame_header_nbytes(
            n_dims, n_chunks, n_planes, side_nbytes, has_base=has_base
        ):
            raise self.fail(12, f"header_nbytes is {header_nbytes}, which other fields contradict")
        self.need(header_nbytes, "the header")
        text = self.data[:header_nbytes].tobytes()  # a copy: checked bytes must not change later
        without_crc = text[:HEADER_CRC_OFFSET] + bytes(4) + text[HEADER_CRC_OFFSET + 4 :]
        if _core.crc32c(without_crc) != crc:
            raise self.fail(HEADER_CRC_OFFSET, "the header's checksum does not match")
        shape, nbytes = self.read_shape(text, n_dims, dtype)
        geometry = Geometry(dtype.unit_nbytes, split, chunk_log, nbytes)
        if n_chunks != geometry.n_chunks:
            raise self.fail(40, f"n_chunks is {n_chunks}, which shape {shape} contradicts")
        if max_nbytes is not None and nbytes > max_nbytes:
            words = f"the tensor has {nbytes} bytes, more than max_nbytes = {max_nbytes}"
            raise self.fail(FIXED_HEADER_NBYTES, words)
        if reserved != bytes(3):
            raise self.fail(_SIDE_AT + 1, "reserved bytes are not zero")
        table_at = FIXED_HEADER_NBYTES + 8 * n_dims
        base = None
        if has_base:
            base = self.read_base(text, table_at, dtype, flags)
            table_at += BASE_BLOCK_NBYTES
        self.check_side(n_row_dims, side_descriptor, dtype, split, shape)
        table_end = table_at + 4 * n_chunks * (1 + n_planes)
        table: Table = np.ndarray((n_chunks, 1 + n_planes), _TABLE_DTYPE, text, table_at)
        side_end = table_end + side_nbytes
        if text[side_end:].strip(b"\0"):
            raise self.fail(side_end, "padding of the header is not zero")
        header = FrameHeader(
            dtype,
            shape,
            geometry,
            level,
            digest,
            header_nbytes,
            frame_nbytes,
            table,
            n_row_dims,
            side_descriptor,
            text[table_end:side_end],
            base,
            bool(flags & FLAG_SUM),
        )
        self.check_length(header, self.check_descriptors(header, table_at, LAST_MODES[version]))
        return header

    def read_kind(self, code: int, split_code: int) -> tuple[DType, Split]:
        if code not in DTYPE_BY_CODE:
            words = f"dtype code {code} is unknown to this release; upgrade packhorse"
            raise self.fail(5, words, CompatibilityError)
        dtype = DTYPE_BY_CODE[code]
        if split_code not in dtype.splits:
            raise self.fail(7, f"split {split_code} is not allowed for {dtype.name}")
        return dtype, _SPLITS[split_code]

    def read_shape(self, text: bytes, n_dims: int, dtype: DType) -> tuple[tuple[int, ...], int]:
        shape = _SHAPES[n_dims].unpack_from(text, FIXED_HEADER_NBYTES)
        numel = math.prod(shape)
        if _overflows(shape, numel, dtype):
            raise self.fail(FIXED_HEADER_NBYTES, f"shape {shape} overflows")
        if numel * dtype.bits % 8:
            words = f"{numel} elements of {dtype.name} are not a whole number of bytes"
            raise self.fail(FIXED_HEADER_NBYTES, words)
        return shape, numel * dtype.bits // 8

    def read_base(self, text: bytes, at: int, dtype: DType, flags: int) -> BaseName:
        digest, code, reserved, check = BASE_BLOCK.unpack_from(text, at)
        if code not in DTYPE_BY_CODE:
            words = f"the base's dtype code {code} is unknown to this release; upgrade packhorse"
            raise self.fail(at + 16, words, CompatibilityError)
        if DTYPE_BY_CODE[code] not in allowed_casts(dtype):
            name = DTYPE_BY_CODE[code].name
            raise self.fail(at + 16, f"a base of {name} is not allowed for {dtype.name}")
        if flags & FLAG_SUM and code != dtype.code:
            raise self.fail(at + 16, "a base that is named by its sum has another dtype")
        if reserved != bytes(3) or (check and not flags & FLAG_SUM):
            raise self.fail(at + 17, "reserved bytes of the base are not zero")
        return BaseName(digest, DTYPE_BY_CODE[code], check)

    def check_side(
        self, n_row_dims: int, descriptor: int, dtype: DType, split: Split, shape: tuple[int, ...]
    ) -> None:
        """Checks what the header says about side data, but not their stream."""
        if (n_row_dims == 0) != (descriptor == 0):
            raise self.fail(_SIDE_AT, "only one of n_row_dims and side descriptor is zero")
        if n_row_dims == 0:
            return
        if split != Split.FLOAT or n_row_dims >= len(shape) or 0 in shape:
            words = f"side data after {n_row_dims} dimensions are not allowed for"
            raise self.fail(_SIDE_AT, f"{words} split {int(split)}, shape {shape}")
        nbytes = sum(matrix_of(dtype, shape, n_row_dims))
        if nbytes > MAX_SIDE_NBYTES:
            words = f"side data would have {nbytes} bytes, at most {MAX_SIDE_NBYTES} are allowed"
            raise self.fail(_SIDE_AT, words)
        mode, length = descriptor >> STREAM_NBYTES_BITS, descriptor & STREAM_NBYTES_MASK
        if mode not in (Mode.STORED, Mode.PALETTE, Mode.RANS) or (
            mode == Mode.STORED and length != nbytes
        ):
            raise self.fail(_SIDE_AT + 4, "mode or length of the side data is not allowed")

    def check_descriptors(self, header: FrameHeader, table_at: int, last_mode: Mode) -> int:
        """Checks mode and length of every stream, and returns the length of the payload. Modes
        after `last_mode` are unknown to the frame's version."""
        what, chunk, plane, payload = _core.check_table(
            header.table, header.geometry, header.base is not None, last_mode
        )
        if what:
            at = table_at + 4 * (chunk * (header.n_planes + 1) + 1 + plane)
            words = f"descriptor of chunk {chunk}, plane {plane}: "
            if what == 1:
                words += "its mode is unknown to this release, or to the frame's version; upgrade"
                words += " packhorse"
                raise self.fail(at, words, CompatibilityError)
            raise self.fail(at, words + "its mode or length is not allowed here")
        return payload

    def check_length(self, header: FrameHeader, payload: int) -> None:
        if header.frame_nbytes != header.header_nbytes + payload:
            words = f"frame_nbytes is {header.frame_nbytes}, but its chunks make it"
            raise self.fail(16, f"{words} {header.header_nbytes + payload}")
        self.need(header.frame_nbytes, "the frame")
        if self.data.size > header.frame_nbytes:
            extra = self.data.size - header.frame_nbytes
            raise self.fail(header.frame_nbytes, f"{extra} bytes follow the end of the frame")


@dataclass(frozen=True)
class PlaneSummary:
    """How one plane is coded, over all chunks of a frame.

    Attributes:
        index: 0 is the exponent, or the most significant byte.
        name: a short name for people.
        nbytes: encoded bytes.
        logical_nbytes: bytes before encoding.
        modes: how many chunks were coded in which mode. A chunk of mode delta or sparse delta,
            which code whole units at once, counts for the first plane only.
    """

    index: int
    name: str
    nbytes: int
    logical_nbytes: int
    modes: dict[Mode, int]


def plane_summaries(header: FrameHeader) -> tuple[PlaneSummary, ...]:
    """Sums up each plane over all chunks."""
    lengths = (header.table[:, FIRST_STREAM:] & STREAM_NBYTES_MASK).sum(axis=0, dtype=np.int64)
    modes = header.table[:, FIRST_STREAM:] >> STREAM_NBYTES_BITS
    # Differences are of whole units, so the other planes of such a chunk have no streams.
    counted = [modes[:, :1], modes[~np.isin(modes[:, 0], BASE_MODES), 1:]]
    logical = header.nbytes // header.n_planes
    return tuple(
        PlaneSummary(
            p,
            _plane_name(header.dtype, header.split, p),
            int(lengths[p]),
            logical,
            {
                Mode(int(m)): int(n)
                for m, n in zip(
                    *np.unique(counted[p > 0][:, max(p - 1, 0)], return_counts=True), strict=True
                )
            },
        )
        for p in range(header.n_planes)
    )


def _plane_name(dtype: DType, split: Split, plane: int) -> str:
    if split == Split.WHOLE:
        return "all"
    if split == Split.FLOAT and plane < 2:
        return ("exponent", "mantissa+sign")[plane] if dtype.unit_nbytes > 1 else "all"
    kind = "mantissa" if split == Split.FLOAT else "byte"
    return f"{kind} {dtype.unit_nbytes - 1 - plane}"
