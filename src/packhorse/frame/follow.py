"""Packs the versions of a tensor, one after the other, each against the version before.

A follower keeps a copy of the version that it packed last. One pass over the tensor compares it
with the copy, encodes what has changed, and brings the copy and its content sum up to date. Each
byte is read once, and frame, sum and copy are made from what was read. So they agree with each
other even if the tensor is written to meanwhile: the frame then holds some values from before and
some from after. What has not changed need not be hashed, neither here nor where the frame is
applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from packhorse import _core
from packhorse.codecs.content import base_check, changed_sum, content_sum
from packhorse.codecs.plan import choose_plan
from packhorse.codecs.source import Source, cut, natural_geometry
from packhorse.frame.base import BaseName
from packhorse.frame.compress import compress_buffer
from packhorse.frame.frame import Frame, new_frame
from packhorse.frame.header import (
    FrameHeader,
    Table,
    frame_header_nbytes,
    padded,
    write_header,
)
from packhorse.frame.plan import max_frame_nbytes
from packhorse.layout import (
    BASE_MODES,
    CLASSED_CHUNK_NBYTES,
    DTYPE_BY_NAME,
    FIRST_STREAM,
    STREAM_NBYTES_BITS,
    Level,
    Mode,
    Split,
)

if TYPE_CHECKING:
    from packhorse.codecs.base import ByteArray

__all__ = ["Follower"]

# A frame of differences that takes more than this share of the tensor's own frame is compared with
# a new one of those, whose size may have changed.
_CLEARLY_LESS = 0.7
_LAST_MODES = frozenset(map(int, BASE_MODES))  # no mode comes after them
# Classes of units make few differences up to a third shorter, and cost a pass over the base on both
# sides, which takes longer than sending what they save wherever a link is faster than 100 Mb/s.
_ONE_CLASS, _ANY_CLASSES = 1, 0
_SAME = Mode.DELTA << STREAM_NBYTES_BITS  # the descriptor of a chunk that equals its base


class Follower:
    """Packs the versions of one tensor.

    Attributes:
        content_sum: of the version that was packed last; empty if there is none.

    Example:
        >>> import numpy as np
        >>> from packhorse.frame.follow import Follower
        >>> from packhorse.layout import Level
        >>> values = np.zeros(4096, np.uint8)
        >>> follower = Follower("U8", values.shape, np.empty_like(values), Level.DEFAULT)
        >>> follower.keep(values)
        >>> values[7] = 1
        >>> frame = follower.follow(values)
        >>> frame.nbytes, follower.follow(values)
        (192, None)
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        memory: ByteArray,
        level: Level,
        name: str | None = None,
    ) -> None:
        """
        Args:
            dtype: safetensors' name, such as "BF16".
            shape: the tensor's shape.
            memory: for the copy, exactly as long as the tensor; nothing else may write to it.
            level: how hard to try.
            name: the tensor's name, for messages.
        """
        self.content_sum = b""
        self._dtype, self._shape, self._memory = DTYPE_BY_NAME[dtype], shape, memory
        self._level, self._name = level, name
        self._geometry = cut(self._dtype, self._dtype.splits[-1], memory.size, CLASSED_CHUNK_NBYTES)
        self._base = _core.Base(memory, Split.FLOAT in self._dtype.splits, 0)
        self._plain_nbytes = memory.size  # of the tensor in a frame of its own, about
        self._header_nbytes = frame_header_nbytes(
            len(shape), self._geometry.n_chunks, self._geometry.n_planes, 0, has_base=True
        )

    def keep(self, data: ByteArray) -> None:
        """Takes a version as the one that the next is compared with, without packing it."""
        self._copy(data)
        if data.size:
            natural = natural_geometry(self._dtype, data.size)
            source = Source(self._memory, self._dtype, self._shape, natural)
            self._plain_nbytes = choose_plan(source, self._level, with_side=False).estimated_nbytes

    def begin(self, data: ByteArray, threads: int = 1) -> Frame:
        """Packs a version without the one before.

        Args:
            data: its bytes, as many as the tensor has.
            threads: how many to use.
        """
        self._copy(data)
        return self.full(threads)

    def _copy(self, data: ByteArray) -> None:
        self._memory[:] = data
        self.content_sum = content_sum(self._memory)

    def full(self, threads: int = 1) -> Frame:
        """Packs the version that was packed last once more, without the one before.

        Args:
            threads: how many to use.
        """
        dtype, shape = self._dtype.name, self._shape
        memory = np.empty(max_frame_nbytes(dtype, shape), np.uint8)
        frame = compress_buffer(
            self._memory, dtype, shape, level=self._level, threads=threads, out=memory
        )
        self._plain_nbytes = frame.nbytes
        header = frame.header._replace(content_hash=self.content_sum, has_sum=True)
        write_header(header, memory[: header.header_nbytes])
        return new_frame(memory[: frame.nbytes], self._name)

    def follow(self, data: ByteArray, threads: int = 1) -> Frame | None:
        """Packs a version against the one before.

        Args:
            data: its bytes, as many as the tensor has.
            threads: how many to use.

        Returns:
            The frame, which has no base if it is as short without one; None if no byte has changed.
        """
        geometry, before = self._geometry, self.content_sum
        table = np.empty((geometry.n_chunks, 1 + geometry.n_planes), np.uint32)
        changes = np.empty((geometry.n_chunks, 3), np.uint64)
        memory = np.empty(self._header_nbytes + padded(data.size), np.uint8)
        context = _core.EncodeContext(
            self._level, None, self._base, self._plain_nbytes,
            max_classes=_ANY_CLASSES if self._level == Level.MAX else _ONE_CLASS,
        )  # fmt: skip
        output = _core.EncodeOutput(
            memory[self._header_nbytes :], table, None, None, self._memory,
            changes.reshape(-1).view(np.uint8),
        )  # fmt: skip
        nbytes = _core.encode_chunks(data, geometry, context, output, threads)
        if (table[:, FIRST_STREAM] == _SAME).all():
            return None
        low, high, replaced = changes.sum(axis=0, dtype=np.uint64).tolist()
        self.content_sum = changed_sum(before, low, high)
        nbytes += self._header_nbytes
        header = FrameHeader(
            self._dtype, self._shape, geometry, int(self._level), self.content_sum,
            self._header_nbytes, nbytes, table, 0, 0, b"",
            BaseName(before, self._dtype, base_check(replaced)), True,
        )  # fmt: skip
        if nbytes > _CLEARLY_LESS * self._plain_nbytes or not _has_delta(table):
            frame = self.full(threads)
            if frame.nbytes <= nbytes or not _has_delta(table):
                return frame
        write_header(header, memory[: self._header_nbytes])
        return new_frame(memory[:nbytes], self._name)


def _has_delta(table: Table) -> bool:
    return int(table[:, FIRST_STREAM].max(initial=0)) >> STREAM_NBYTES_BITS in _LAST_MODES
