"""Which bytes of a stored shard a box of its elements needs.

A box that is not a run of consecutive elements is covered by pieces, each a run. Between two
elements of a piece there is never a whole chunk that the box does not need, and a chunk is what a
frame can decode on its own; so taking finer pieces would not decode less. Pieces that are no runs
of wanted elements alone take memory, so long ones are cut once more, at the price of decoding the
chunk twice in which the cut lies. A piece is looked at through the strides of the shard, and
nothing is gathered element by element.
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
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    chunk_numel: int,
    max_numel: int,
) -> list[Piece]:
    """Cover a box with runs.

    Args:
        shape: of the shard.
        offsets: of the box in it; with `lengths` inside of `shape`.
        lengths: of the box.
        chunk_numel: elements of a chunk.
        max_numel: elements of a run that holds unwanted ones too, as far as rows allow.

    Returns:
        The pieces, in the order of the elements; none if the box is empty.
    """
    if 0 in lengths:
        return []
    n_dims = len(shape)
    strides = strides_of(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # Elements from the first to the last of the box on the axes from each one on.
    spans = [1] * (n_dims + 1)
    for axis in reversed(range(n_dims)):
        spans[axis] = (lengths[axis] - 1) * strides[axis] + spans[axis + 1]
    # Further out the gaps between runs only grow.
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
