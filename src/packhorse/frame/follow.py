"""Packs the versions of a tensor, one after the other, each against the version before.

A follower keeps a copy of the version that it packed last. One pass over the tensor compares it
with the copy, hashes it, encodes what has changed, and brings the copy up to date. Each byte is
read once, and frame, hash and copy are made from what was read. So they agree with each other even
if the tensor is written to meanwhile: the frame then holds some values from before and some from
after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from packhorse import _core
from packhorse.codecs.content import (
    copy_with_hash,
    empty_leaves,
    finish_leaves,
    hash_root,
)
from packhorse.codecs.plan import choose_plan
from packhorse.codecs.source import Source, cut, natural_geometry
from packhorse.frame.base import BaseName
from packhorse.frame.compress import compress_buffer
from packhorse.frame.frame import Frame
from packhorse.frame.header import (
    FrameHeader,
    Table,
    frame_header_nbytes,
    padded,
    write_header,
)
from packhorse.layout import (
    BASE_MODES,
    CLASSED_CHUNK_NBYTES,
    DTYPE_BY_NAME,
    FIRST_STREAM,
    STREAM_NBYTES_BITS,
    Level,
    Split,
)

if TYPE_CHECKING:
    from packhorse.codecs.base import ByteArray

__all__ = ["Follower"]

# A frame of differences that takes more than this share of the tensor's own frame is compared with
# a new one of those, whose size may have changed.
_CLEARLY_LESS = 0.7
_LAST_MODES = frozenset(map(int, BASE_MODES))  # no mode comes after them


class Follower:
    """Packs the versions of one tensor.

    Attributes:
        content_hash: of the version that was packed last; empty if there is none.

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
        self.content_hash = b""
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
        self.content_hash = copy_with_hash(data, self._memory)
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
        self.content_hash = copy_with_hash(data, self._memory)
        return self.full(threads)

    def full(self, threads: int = 1) -> Frame:
        """Packs the version that was packed last once more, without the one before.

        Args:
            threads: how many to use.
        """
        frame = compress_buffer(
            self._memory, self._dtype.name, self._shape, level=self._level, threads=threads,
            name=self._name,
        )  # fmt: skip
        self._plain_nbytes = frame.nbytes
        return frame

    def follow(self, data: ByteArray, threads: int = 1) -> Frame | None:
        """Packs a version against the one before.

        Args:
            data: its bytes, as many as the tensor has.
            threads: how many to use.

        Returns:
            The frame, which has no base if it is as short without one; None if no byte has changed.
        """
        geometry, before = self._geometry, self.content_hash
        table = np.empty((geometry.n_chunks, 1 + geometry.n_planes), np.uint32)
        leaves = empty_leaves(data.size)
        memory = np.empty(self._header_nbytes + padded(data.size), np.uint8)
        context = _core.EncodeContext(self._level, None, self._base, self._plain_nbytes)
        output = _core.EncodeOutput(
            memory[self._header_nbytes :], table, leaves, None, self._memory
        )
        nbytes = _core.encode_chunks(data, geometry, context, output, threads)
        self.content_hash = hash_root(finish_leaves(leaves, data.size))
        if self.content_hash == before:
            return None
        nbytes += self._header_nbytes
        header = FrameHeader(
            self._dtype, self._shape, geometry, int(self._level), self.content_hash,
            self._header_nbytes, nbytes, table, 0, 0, b"", BaseName(before, self._dtype),
        )  # fmt: skip
        if nbytes > _CLEARLY_LESS * self._plain_nbytes or not _has_delta(table):
            frame = self.full(threads)
            if frame.nbytes <= nbytes or not _has_delta(table):
                return frame
        write_header(header, memory[: self._header_nbytes])
        return Frame(memory[:nbytes], header, self._name, 0)


def _has_delta(table: Table) -> bool:
    return int(table[:, FIRST_STREAM].max(initial=0)) >> STREAM_NBYTES_BITS in _LAST_MODES
