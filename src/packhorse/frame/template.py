"""Packs short tensors of one dtype and shape by the plan of a frame that was made before.

For a tensor of a few kilobytes, checking arguments and choosing sizes takes longer than packing.
All that depends on dtype, shape and plan alone is done once here. The frames have the same bytes
as those of `compress_buffer(..., like=plan)`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import empty_leaves, finish_leaves, hash_root
from packhorse.codecs.plan import Plan
from packhorse.frame.frame import Frame
from packhorse.frame.header import header_bytes, padded
from packhorse.layout import (
    FIXED_HEADER_NBYTES,
    FRAME_NBYTES_OFFSET,
    HEADER_CRC_OFFSET,
    STREAM_NBYTES_BITS,
    Mode,
)

__all__ = ["Template"]

_CRC = struct.Struct("<I")
_LENGTH_AND_HASH = struct.Struct("<Q16s")
_ZSTD_ROW = struct.Struct("<II")  # of the table: CRC32C and the descriptor of the one stream


class Template(NamedTuple):
    """What the frames of alike tensors have in common.

    Attributes:
        plan: the plan; of one chunk, without a base and side data.
        header: the bytes of a header, with a CRC of 0.
        table: where the one row of the table stands in the header.
        long_matches: whether Zstandard searches for them.
    """

    plan: Plan
    header: bytes
    table: slice
    long_matches: bool

    @classmethod
    def of(cls, frame: Frame) -> Template | None:
        """The template of a frame.

        Args:
            frame: was made by `compress_buffer`.

        Returns:
            The template; None if such frames have several chunks, a base, side data or no elements.
        """
        plan, header = frame.plan, frame.header
        if plan is None or plan.plain_nbytes or plan.side.n_row_dims or len(header.table) != 1:
            return None
        text = bytearray(header_bytes(header))
        _CRC.pack_into(text, HEADER_CRC_OFFSET, 0)
        start = FIXED_HEADER_NBYTES + 8 * len(header.shape)
        table = slice(start, start + header.table.nbytes)
        far = zstd.seeks_long_matches(plan.level, plan.nbytes, plan.estimated_nbytes)
        return cls(plan, bytes(text), table, far)

    def pack(self, data: ByteArray) -> tuple[bytes, bytes]:
        """Packs a tensor.

        Args:
            data: its bytes, C-contiguous and as many as the frame's tensor has.

        Returns:
            The frame and its content hash. If the bytes change meanwhile, the frame holds those
            that were read, old or new.
        """
        leaves = empty_leaves(data.size)
        code = self._zstd if self.plan.whole == Mode.ZSTD else self._chunks
        row, payload = code(data, leaves)
        digest = hash_root(finish_leaves(leaves, data.size))
        header = bytearray(self.header)
        nbytes = len(header) + len(payload)
        _LENGTH_AND_HASH.pack_into(header, FRAME_NBYTES_OFFSET, nbytes, digest)
        header[self.table] = row
        _CRC.pack_into(header, HEADER_CRC_OFFSET, _core.crc32c(bytes(header)))
        return b"".join((header, payload)), digest

    def _chunks(self, data: ByteArray, leaves: ByteArray) -> tuple[bytes, bytes]:
        """The row of the table, and the payload, of a tensor that the core codes."""
        plan, memory = self.plan, np.empty(padded(data.size), np.uint8)
        table = np.empty((1, 1 + plan.geometry.n_planes), np.uint32)
        context = _core.EncodeContext(plan.level, None, None, 0, whole=plan.whole)
        output = _core.EncodeOutput(memory, table, leaves, None)
        nbytes = _core.encode_chunks(data, plan.geometry, context, output, 1)
        return table.tobytes(), memory[:nbytes].tobytes()

    def _zstd(self, data: ByteArray, leaves: ByteArray) -> tuple[bytes, bytes]:
        """As `_chunks`, of a tensor that Zstandard codes."""
        copy = np.empty(data.size, np.uint8)
        _core.copy_with_leaves(data, copy, leaves)
        stream = zstd.compress_chunk(copy, self.plan.level, long_matches=self.long_matches)
        mode = Mode.ZSTD
        if len(stream) >= data.size:
            mode, stream = Mode.STORED, copy.tobytes()
        payload = stream.ljust(padded(len(stream)), b"\0")
        row = _ZSTD_ROW.pack(_core.crc32c(payload), mode << STREAM_NBYTES_BITS | len(stream))
        return row, payload
