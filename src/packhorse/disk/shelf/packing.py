"""Packing chunks of a shelf, alike ones by the plan of one before.

The frame of a chunk has rows and columns, so that the codec sees the rows; elements that do not end
at a byte are filled up with zeros.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.shelf.arrays import Array, bytes_of
from packhorse.disk.shelf.cache import Stored
from packhorse.disk.shelf.records import TensorRecord
from packhorse.frame import Frame, Plan, compress_buffer
from packhorse.frame.template import Template
from packhorse.layout import DTYPE_BY_NAME, Level

__all__ = ["SHORT_NBYTES", "Packed", "Planner", "pack_chunk"]

Shape: TypeAlias = tuple[int, ...]
_USES_OF_PLAN, _SHORT_USES = 31, 127  # the second for short chunks, which take a trial of Zstandard
_LONGER, _BETTER = 1.2, 1.1
_MAX_PLANS = 1024
SHORT_NBYTES = 1 << 16  # of a chunk for which the fixed cost of a call counts


class Packed(NamedTuple):
    """A chunk that was packed.

    Attributes:
        frame: the bytes of its frame.
        content_hash: of its elements.
        has_base: whether the frame is a delta.
    """

    frame: bytes
    content_hash: bytes
    has_base: bool


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
    """The plans of frames that were made, to be used again for the next chunks of a tensor.

    A plan is made from samples, which for a short chunk takes about as long as packing it. The
    chunks of a tensor are alike, so a plan is used some times. If a frame comes out longer than
    the one that the plan was made for, the chunk is planned anew. The new plan is used from then on
    if it is better; otherwise only this chunk is harder to pack than others.
    """

    def __init__(self) -> None:
        """Knows no plans."""
        self._patterns: OrderedDict[tuple[int, int], _Pattern] = OrderedDict()

    def pack(
        self, record: TensorRecord, data: ByteArray, shape: Shape, level: Level, threads: int = 1
    ) -> Packed:
        """Pack a chunk.

        Args:
            record: the tensor.
            data: the bytes of the chunk.
            shape: of the chunk.
            level: how hard to try.
            threads: how many to use.

        Returns:
            The frame.
        """
        key = record.id, data.size
        pattern = self._patterns.get(key)
        packed = None
        if pattern is not None and pattern.n_left > 0:
            if pattern.template is not None:
                packed = Packed(*pattern.template.pack(data), False)
            else:
                packed = _packed(_compress(record, data, shape, level, threads, pattern.plan))
            if len(packed.frame) <= pattern.nbytes * _LONGER:
                pattern.n_left -= 1
                return packed
        frame = _compress(record, data, shape, level, threads, None)
        if pattern is not None and packed and len(packed.frame) <= frame.nbytes * _BETTER:
            pattern.nbytes = len(packed.frame)
        elif frame.plan is not None:
            template = Template.of(frame) if data.size < SHORT_NBYTES else None
            n_uses = _SHORT_USES if template is not None and frame.plan.zstd else _USES_OF_PLAN
            self._patterns[key] = _Pattern(frame.plan, frame.nbytes, n_uses, template)
            while len(self._patterns) > _MAX_PLANS:
                self._patterns.popitem(last=False)
        return packed if packed and len(packed.frame) <= frame.nbytes else _packed(frame)


def _compress(
    record: TensorRecord,
    data: ByteArray,
    shape: Shape,
    level: Level,
    threads: int,
    plan: Plan | None,
) -> Frame:
    return compress_buffer(data, record.dtype, shape, level=level, threads=threads, like=plan)


def _packed(frame: Frame) -> Packed:
    return Packed(frame.to_bytes(), frame.content_hash, frame.base_hash is not None)


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
    bits, n_rows = DTYPE_BY_NAME[record.dtype].bits, _n_rows(record, chunk.size)
    shape: Shape = (n_rows, chunk.size // n_rows)
    if chunk.size * bits % 8:
        chunk = np.concatenate([chunk, np.zeros(-chunk.size % 8, chunk.dtype)])
        shape = (chunk.size,)
    data = chunk.view(np.uint8) if bits >= 8 else bytes_of(chunk)
    if base is None or base.data.size != chunk.size:
        return planner.pack(record, data, shape, level, threads)
    frame = compress_buffer(
        data, record.dtype, shape, level=level, threads=threads, base=bytes_of(base.data),
        base_hash=base.content_hash, base_is_fixed=True,
    )  # fmt: skip
    return _packed(frame)


def _n_rows(record: TensorRecord, numel: int) -> int:
    """The rows of a chunk of whole rows; 1 for a part of a row."""
    row = record.grid.row_numel
    return numel // row if row and numel % row == 0 else 1
