"""Finds the bytes of a stored shard that a box of its elements needs.

A box whose elements are not contiguous is covered by pieces, and each piece is decoded as a run of
elements. A run never contains a whole chunk that the box does not need. A frame decodes whole
chunks, so finer pieces would not decode less. A run that also contains unwanted elements takes
memory, so a long one is cut once more; the chunk at the cut is then decoded twice. A piece is
viewed through the strides of the shard, and no elements are gathered one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "cut_box", "strides_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a box, and the run of elements that contains it.

    Attributes:
        offsets: where the part begins, relative to the box.
        lengths: the lengths of the part.
        start: index of the part's first element in the shard, in C order.
        stop: one past the index of its last element.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_run(self) -> bool:
        """Whether the run contains only elements of the part."""
        return self.stop - self.start == math.prod(self.lengths)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a shape in elements, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut_box(
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    chunk_numel: int,
    max_numel: int,
) -> list[Piece]:
    """Cover a box with runs.

    Args:
        shape: the shape of the shard.
        offsets: where the box begins in the shard. The box must be inside the shard.
        lengths: the lengths of the box.
        chunk_numel: elements of a chunk.
        max_numel: the most elements of a run that also contains unwanted ones. A run of one row may
            be longer.

    Returns:
        The pieces, in the order of their elements; none if the box is empty.
    """
    if 0 in lengths:
        return []
    n_dims = len(shape)
    if tuple(lengths) == tuple(shape):
        return [Piece((0,) * n_dims, tuple(lengths), 0, math.prod(lengths))]
    strides = strides_of(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # spans[axis]: elements from the first to the last of the box, on this axis and those after it.
    spans = [1] * (n_dims + 1)
    for axis in reversed(range(n_dims)):
        spans[axis] = (lengths[axis] - 1) * strides[axis] + spans[axis + 1]
    # Gaps between runs only grow towards the outer axes.
    n_cut = 0
    while n_cut < n_dims and strides[n_cut] - spans[n_cut + 1] >= chunk_numel:
        n_cut += 1
    is_run = spans[n_cut] == math.prod(lengths[n_cut:])
    while n_cut < n_dims and not is_run and spans[n_cut + 1] > max_numel:
        n_cut += 1
    step = lengths[n_cut] if n_cut < n_dims else 1
    if n_cut < n_dims and not is_run:
        step = min(step, 1 + max(0, max_numel - spans[n_cut + 1]) // strides[n_cut])
    pieces = []
    for place in itertools.product(*(range(length) for length in lengths[:n_cut])):
        start = first + sum(i * stride for i, stride in zip(place, strides[:n_cut], strict=True))
        if n_cut == n_dims:
            pieces.append(Piece(place, (1,) * n_dims, start, start + 1))
            continue
        for low in range(0, lengths[n_cut], step):
            count = min(step, lengths[n_cut] - low)
            begin = start + low * strides[n_cut]
            end = begin + (count - 1) * strides[n_cut] + spans[n_cut + 1]
            inner = tuple(lengths[n_cut + 1 :])
            at = (*place, low, *(0 for _ in inner))
            pieces.append(Piece(at, (*(1 for _ in place), count, *inner), begin, end))
    return pieces
