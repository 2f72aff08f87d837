"""Packs short tensors of one dtype and shape by the plan of a frame that was made before.

For a tensor of a few kilobytes, checking arguments and choosing sizes takes longer than packing.
All that depends on dtype, shape and plan alone is done once here. The frames have the same bytes
as those of `compress_buffer(..., like=plan)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import empty_leaves, finish_leaves, hash_root
from packhorse.codecs.plan import Plan
from packhorse.frame.frame import Frame
from packhorse.frame.header import FrameHeader, Table, header_bytes, padded
from packhorse.layout import STREAM_NBYTES_BITS, Mode

__all__ = ["Template"]


class Template(NamedTuple):
    """What the frames of alike tensors have in common.

    Attributes:
        plan: the plan; of one chunk, without a base and side data.
        header: the header of one of the frames.
        long_matches: whether Zstandard searches for them.
    """

    plan: Plan
    header: FrameHeader
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
        far = zstd.seeks_long_matches(plan.level, plan.nbytes, plan.estimated_nbytes)
        return cls(plan, header, far)

    def pack(self, data: ByteArray) -> tuple[bytes, bytes]:
        """Packs a tensor.

        Args:
            data: its bytes, C-contiguous and as many as the frame's tensor has.

        Returns:
            The frame and its content hash. If the bytes change meanwhile, the frame holds those
            that were read, old or new.
        """
        table = np.empty_like(self.header.table)
        leaves = empty_leaves(data.size)
        payload = self._payload(data, table, leaves)
        digest = hash_root(finish_leaves(leaves, data.size))
        header = self.header._replace(
            content_hash=digest,
            frame_nbytes=self.header.header_nbytes + len(payload),
            table=table,
        )
        return header_bytes(header) + payload, digest

    def _payload(self, data: ByteArray, table: Table, leaves: ByteArray) -> bytes:
        plan = self.plan
        copy = np.empty(padded(data.size), np.uint8)
        if not plan.zstd:
            context = _core.EncodeContext(plan.level, None, None, 0)
            output = _core.EncodeOutput(copy, table, leaves, None)
            return copy[: _core.encode_chunks(data, plan.geometry, context, output, 1)].tobytes()
        piece = copy[: data.size]
        _core.copy_with_leaves(data, piece, leaves)
        packed = zstd.compress_chunk(piece, plan.level, long_matches=self.long_matches)
        mode = Mode.ZSTD
        if len(packed) >= data.size:
            mode, packed = Mode.STORED, piece.tobytes()
        table[0, 1] = mode << STREAM_NBYTES_BITS | len(packed)
        payload = packed.ljust(padded(len(packed)), b"\0")
        table[0, 0] = _core.crc32c(payload)
        return payload
