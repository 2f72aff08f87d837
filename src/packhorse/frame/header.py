"""The header of a frame: written, and read with distrust (docs/format.md, section 2).

The core checks every field before it is used, in the order of the document, and never looks at
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
from packhorse._core import Geometry, OpenFrame
from packhorse.codecs.base import ByteArray
from packhorse.codecs.side import matrix_of
from packhorse.frame.base import BaseName
from packhorse.frame.header_faults import Found, header_error
from packhorse.layout import (
    BASE_BLOCK,
    BASE_BLOCK_NBYTES,
    BASE_MODES,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    FIRST_STREAM,
    FIXED_HEADER,
    FIXED_HEADER_NBYTES,
    FLAG_BASE,
    FLAG_SUM,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    HEADER_CRC_OFFSET,
    LAST_MODES,
    MAX_BITS,
    MAX_DIMS,
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
    "header_of",
    "label",
    "n_planes_of",
    "open_frame",
    "padded",
    "payload_nbytes",
    "plane_summaries",
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


def open_frame(data: ByteArray, name: str | None, offset: int, max_nbytes: int | None) -> OpenFrame:
    """Reads and checks a header; arguments and errors as in `Frame.from_buffer`."""
    opened = _core.open_frame(data, max_nbytes)
    if isinstance(opened, OpenFrame):
        return opened
    raise header_error(data, Found(*opened), label(name), offset)


def header_of(opened: OpenFrame) -> FrameHeader:
    """The fields of a header that was checked."""
    text = opened.text
    fields = FIXED_HEADER.unpack_from(text)
    _, _, code, n_dims, _, flags, level, _, header_nbytes, frame_nbytes, digest = fields[:11]
    n_row_dims, _, side_descriptor = fields[13:]
    geometry, dtype = opened.geometry, DTYPE_BY_CODE[code]
    table_at = FIXED_HEADER_NBYTES + 8 * n_dims
    base = None
    if flags & FLAG_BASE:
        base_hash, base_code, _, check = BASE_BLOCK.unpack_from(text, table_at)
        base = BaseName(base_hash, DTYPE_BY_CODE[base_code], check)
        table_at += BASE_BLOCK_NBYTES
    shape = (geometry.n_chunks, 1 + geometry.n_planes)
    table: Table = np.ndarray(shape, _TABLE_DTYPE, text, table_at)
    side_at = table_at + table.nbytes
    side_stream = text[side_at : side_at + (side_descriptor & STREAM_NBYTES_MASK)]
    return FrameHeader(
        dtype, opened.shape, geometry, level, digest, header_nbytes, frame_nbytes, table,
        n_row_dims, side_descriptor, side_stream, base, bool(flags & FLAG_SUM),
    )  # fmt: skip


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
