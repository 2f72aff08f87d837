"""Which bytes of a stored shard a box of its elements needs.

A box that is not a run of consecutive elements is covered by pieces, each a run. Between two
elements of a piece there is never a whole chunk that the box does not need, and a chunk is what a
frame can decode on its own; so taking finer pieces would not decode less. A piece is looked at
through the strides of the shard, and nothing is gathered element by element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "cut_box", "strides_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a box, and the run of elements that holds it.

    Attributes:
        offsets: of the part, from the beginning of the box.
        lengths: of the part.
        start: index of its first element in the shard, in C order.
        stop: one past its last element.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_run(self) -> bool:
        """Whether the run holds nothing else."""
        return self.stop - self.start == math.prod(self.lengths)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one place on an axis to the next, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut_box(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], chunk_numel: int
) -> list[Piece]:
    """Cover a box with runs.

    Args:
        shape: of the shard.
        offsets: of the box in it; with `lengths` inside of `shape`.
        lengths: of the box.
        chunk_numel: elements of a chunk.

    Returns:
        The pieces, in the order of the elements; none if the box is empty.
    """
    if 0 in lengths:
        return []
    strides = strides_of(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # Elements from the first to the last of the box on the axes from each one on.
    spans = [1] * (len(shape) + 1)
    for axis in reversed(range(len(shape))):
        spans[axis] = (lengths[axis] - 1) * strides[axis] + spans[axis + 1]
    # Further out the gaps between runs only grow.
    n_cut = 0
    while n_cut < len(shape) and strides[n_cut] - spans[n_cut + 1] >= chunk_numel:
        n_cut += 1
    rest = tuple(lengths[n_cut:])
    pieces = []
    for place in itertools.product(*(range(length) for length in lengths[:n_cut])):
        start = first + sum(i * stride for i, stride in zip(place, strides[:n_cut], strict=True))
        inner = (*place, *(0 for _ in rest)), (*(1 for _ in place), *rest)
        pieces.append(Piece(*inner, start, start + spans[n_cut]))
    return pieces
