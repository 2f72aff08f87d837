"""Packing chunks of a shelf: alike ones by the plan of one before, short ones together.

The frame of a chunk has rows and columns, so that the codec sees the rows; elements that do not end
at a byte are filled up with zeros.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.disk.shelf.arrays import Array, bytes_of
from packhorse.disk.shelf.cache import Stored
from packhorse.disk.shelf.records import CHUNK_HEAD_NBYTES, TensorRecord
from packhorse.frame import Frame, Plan, compress_buffer, max_frame_nbytes
from packhorse.frame.compress import pack_plain
from packhorse.frame.template import Template
from packhorse.layout import DTYPE_BY_NAME, Level, Mode

__all__ = ["SHORT_NBYTES", "Content", "FrameMemory", "Packed", "Planner", "pack_chunk"]

_Shape: TypeAlias = tuple[int, ...]
_USES_OF_PLAN, _SHORT_USES = 31, 127  # the second for short chunks, which take a trial of Zstandard
_LONGER, _BETTER = 1.2, 1.1
_LONGER_DELTA = 1.5  # deltas become longer from row to row, and their plan says little about them
_MAX_PLANS = 1024
_MAX_HELD_NBYTES = 1 << 24  # of memory with frames, and of free memory for frames
SHORT_NBYTES = 1 << 16  # of a chunk for which the fixed cost of a call counts


class Packed(NamedTuple):
    """A chunk that was packed.

    Attributes:
        frame: the bytes of its frame.
        content_hash: of its elements.
        has_base: whether the frame is a delta.
        memory: of the planner's `FrameMemory`, which begins with room for `CHUNK_HEAD_NBYTES`
            bytes and goes on with the frame; None if the frame has bytes of its own.
    """

    frame: bytes | ByteArray
    content_hash: bytes
    has_base: bool
    memory: ByteArray | None = None


class Content(NamedTuple):
    """What the frame of a chunk holds.

    Attributes:
        record: the tensor.
        data: the bytes of the chunk.
        shape: of the frame.
    """

    record: TensorRecord
    data: ByteArray
    shape: _Shape

    @classmethod
    def of(cls, record: TensorRecord, chunk: Array) -> Content:
        """That of the elements of a chunk, one-dimensional."""
        bits, n_rows = DTYPE_BY_NAME[record.dtype].bits, _n_rows(record, chunk.size)
        shape: _Shape = (n_rows, chunk.size // n_rows)
        if chunk.size * bits % 8:
            chunk = np.concatenate([chunk, np.zeros(-chunk.size % 8, chunk.dtype)])
            shape = (chunk.size,)
        return cls(record, chunk.view(np.uint8) if bits >= 8 else bytes_of(chunk), shape)


class FrameMemory:
    """Memory to build frames in, which is used again.

    How long a frame becomes is known when it is done, so it takes memory for the longest. New
    memory of that size would come from the system for each chunk, and the system clears its pages.
    Frames stay where they were built until they are committed, as long as that is not too much.
    """

    def __init__(self) -> None:
        """Has no memory."""
        self._lock = threading.Lock()
        self._free: list[ByteArray] = []
        self._free_nbytes = self._held_nbytes = 0
        self._max_nbytes = _MAX_HELD_NBYTES

    def begin(self, cache_nbytes: int) -> None:
        """Begin a transaction: those before hold no memory any longer.

        Args:
            cache_nbytes: what the shelf may keep in its cache, and at most here, too.
        """
        with self._lock:
            self._held_nbytes = 0
            self._max_nbytes = min(_MAX_HELD_NBYTES, cache_nbytes)

    def take(self, nbytes: int) -> ByteArray:
        """Memory of at least so many bytes, which nobody else has."""
        with self._lock:
            memory = self._free.pop() if self._free else None
            self._free_nbytes -= 0 if memory is None else memory.size
        if memory is None or memory.size < nbytes:
            return np.empty(nbytes, np.uint8)
        return memory

    def hold(self, memory: ByteArray) -> bool:
        """Whether a frame may stay in its memory until it is committed."""
        with self._lock:
            may_stay = self._held_nbytes + memory.size <= self._max_nbytes
            self._held_nbytes += memory.size if may_stay else 0
            return may_stay

    def give(self, memory: ByteArray, *, was_held: bool) -> None:
        """Take back memory in which there is nothing that is needed any longer."""
        with self._lock:
            self._held_nbytes -= memory.size if was_held else 0
            if self._free_nbytes + memory.size <= self._max_nbytes:
                self._free.append(memory)
                self._free_nbytes += memory.size


@dataclass(slots=True)
class _Pattern:
    """How a chunk was packed, to pack alike ones in the same way.

    Attributes:
        plan: of its frame.
        nbytes: of its frame.
        n_left: how many more chunks may be packed so.
        template: for short chunks.
    """

    plan: Plan
    nbytes: int
    n_left: int
    template: Template | None


class Planner:
    """The plans of frames that were made, to be used again for the next chunks of a tensor, and
    memory for frames.

    A plan is made from samples, which for a short chunk takes about as long as packing it. The
    chunks of a tensor are alike, so a plan is used some times. If a frame comes out longer than
    the one that the plan was made for, the chunk is planned anew. The new plan is used from then on
    if it is better; otherwise only this chunk is harder to pack than others.

    Attributes:
        memory: for the frames of chunks that are not short.
    """

    def __init__(self) -> None:
        """Knows no plans."""
        self._patterns: OrderedDict[tuple[int, str, _Shape, bool], _Pattern] = OrderedDict()
        self.memory = FrameMemory()

    def pack(
        self, content: Content, level: Level, threads: int = 1, base: Stored | None = None
    ) -> Packed:
        """Pack a chunk.

        Args:
            content: of the chunk.
            level: how hard to try.
            threads: how many to use.
            base: the chunk to code it against, of as many elements; None for none.

        Returns:
            The frame; without a base if the base does not help.
        """
        key = _key(content, base)
        pattern = self._patterns.get(key)
        packed = None
        if pattern is not None and pattern.n_left > 0:
            if pattern.template is not None:
                packed = Packed(*pattern.template.pack(content.data), False)
            else:
                packed, _ = self._compress(content, level, threads, pattern.plan, base)
            if len(packed.frame) <= pattern.nbytes * (_LONGER if base is None else _LONGER_DELTA):
                pattern.n_left -= 1
                return packed
        fresh, frame = self._compress(content, level, threads, None, base)
        nbytes = len(fresh.frame)
        if pattern is not None and packed and len(packed.frame) <= nbytes * _BETTER:
            pattern.nbytes = len(packed.frame)
        elif frame.plan is not None and fresh.has_base == (base is not None):
            template = Template.of(frame) if content.data.size < SHORT_NBYTES else None
            by_zstd = frame.plan.whole == Mode.ZSTD
            n_uses = _SHORT_USES if template is not None and by_zstd else _USES_OF_PLAN
            self._patterns[key] = _Pattern(frame.plan, nbytes, n_uses, template)
            while len(self._patterns) > _MAX_PLANS:
                self._patterns.popitem(last=False)
        if packed is None:
            return fresh
        kept, other = (packed, fresh) if len(packed.frame) <= nbytes else (fresh, packed)
        if other.memory is not None:
            self.memory.give(other.memory, was_held=True)
        return kept

    def pack_short(
        self, contents: Sequence[Content], level: Level, threads: int
    ) -> list[Packed | None]:
        """Pack short chunks in one call of the core.

        Args:
            contents: of the chunks.
            level: how hard to try.
            threads: how many to use.

        Returns:
            The frames; None for a chunk that is to be packed by a plan, or needs one.
        """
        views = _core.views_of_buffers(
            [content.data for content in contents],
            [DTYPE_BY_NAME[content.record.dtype].code for content in contents],
            [content.shape for content in contents],
        )
        for i, content in enumerate(contents):
            if _key(content, None) in self._patterns:
                views.forget(i)
        return [
            None if frame is None else Packed(frame.to_bytes(), frame.content_hash, False)
            for frame in pack_plain(views, None, None, level, threads)
        ]

    def _compress(
        self,
        content: Content,
        level: Level,
        threads: int,
        plan: Plan | None,
        base: Stored | None,
    ) -> tuple[Packed, Frame]:
        """Pack a chunk, by a plan or against a base if they are given.

        Returns:
            The packed chunk, and its frame, the bytes of which may be overwritten.
        """
        dtype, whole, out = content.record.dtype, None, None
        if content.data.size >= SHORT_NBYTES:
            nbytes = CHUNK_HEAD_NBYTES + max_frame_nbytes(dtype, content.shape)
            whole = self.memory.take(nbytes)
            out = whole[CHUNK_HEAD_NBYTES:]
        frame = compress_buffer(
            content.data, dtype, content.shape, level=level, threads=threads, out=out, like=plan,
            base=None if base is None else bytes_of(base.data),
            base_hash=base and base.content_hash, base_is_fixed=base is not None,
        )  # fmt: skip
        has_base = frame.base_hash is not None
        if whole is not None and out is not None and self.memory.hold(whole):
            return Packed(out[: frame.nbytes], frame.content_hash, has_base, whole), frame
        packed = Packed(frame.to_bytes(), frame.content_hash, has_base)
        if whole is not None:
            self.memory.give(whole, was_held=False)
        return packed, frame


def pack_chunk(
    record: TensorRecord,
    chunk: Array,
    level: Level,
    base: Stored | None,
    planner: Planner,
    threads: int = 1,
) -> Packed:
    """Pack a chunk.

    Args:
        record: the tensor.
        chunk: the elements of the chunk, one-dimensional.
        level: how hard to try.
        base: the chunk to code it against; None for none.
        planner: knows the plans of the chunks before.
        threads: how many to use.

    Returns:
        The frame; without a base if the base does not help.
    """
    content = Content.of(record, chunk)
    fits = base is not None and base.data.size == math.prod(content.shape)
    return planner.pack(content, level, threads, base if fits else None)


def _key(content: Content, base: Stored | None) -> tuple[int, str, _Shape, bool]:
    """What chunks have in common that are packed by the same plan."""
    # Also the dtype and the shape, which a template writes: if a transaction is not committed, the
    # number of its new tensor goes to another one.
    return content.record.id, content.record.dtype, content.shape, base is not None


def _n_rows(record: TensorRecord, numel: int) -> int:
    """The rows of a chunk of whole rows; 1 for a part of a row."""
    row = record.grid.row_numel
    return numel // row if row and numel % row == 0 else 1
