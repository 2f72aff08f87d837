"""Finds the elements of a tensor that an index needs, and the index that remains to be applied.

An index of integers, slices and `...` is reduced to a *box*: the smallest run of consecutive
elements of the form [i, j, a:b, :, :] that holds all selected elements. The box is decoded, and the
framework applies the remaining index to it. For every other index (lists, masks, None) the box is
the whole tensor, so that the framework alone decides what the index means.
"""

import math
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Box", "cut_index"]

_Item: TypeAlias = int | slice


@dataclass(frozen=True, slots=True)
class Box:
    """Consecutive elements of a tensor, and the index to apply to them.

    Attributes:
        start: index of the first element, in C order.
        shape: dimensions of the box; their product is the number of elements.
        inner: the index into the box that selects the wanted elements.
        is_view: whether `inner` may select a view: only some elements of the box, or its elements
            in another order.
        is_all: whether the index selects all elements of the tensor in order.
    """

    start: int
    shape: tuple[int, ...]
    inner: Any
    is_view: bool
    is_all: bool = False


def cut_index(index: Any, shape: tuple[int, ...]) -> Box:
    """Reduce an index to the elements it needs.

    Args:
        index: the object in the brackets.
        shape: the dimensions of the tensor.

    Returns:
        The box; the whole tensor if no smaller box is known to be enough.

    Raises:
        IndexError: an integer is out of range, or there are more indices than dimensions.
        TypeError, ValueError: a slice is wrong, as for Python's own sequences.
    """
    items = _basic_items(index, shape)
    if items is None:
        return Box(0, shape, index, is_view=False)
    start, box, inner, is_view = 0, [], [], False
    stride = math.prod(shape)
    is_prefix = True  # all axes so far select a single element
    for size, item in zip(shape, items, strict=True):
        stride = stride // size if size else 0
        low, count, rest = _cut_axis(item, size) if is_prefix else (0, size, item)
        start += low * stride
        box.append(count)
        inner.append(rest)
        is_view = is_view or not (count == 1 or rest in (slice(None), slice(0, count, 1)))
        is_prefix = is_prefix and count == 1
    # The dots keep NumPy from turning a single element into a scalar.
    is_all = not is_view and tuple(box) == shape
    return Box(start, tuple(box), (*inner, ...), is_view, is_all)


def _basic_items(index: Any, shape: tuple[int, ...]) -> list[_Item] | None:
    """The index as one integer or slice for each axis; None if it contains anything else."""
    parts = index if isinstance(index, tuple) else (index,)
    dots = [place for place, part in enumerate(parts) if isinstance(part, EllipsisType)]
    if len(dots) > 1 or not all(_is_basic(part) for part in parts):
        return None
    missing = len(shape) - (len(parts) - len(dots))
    if missing < 0:
        raise IndexError(f"{len(parts) - len(dots)} indices for {len(shape)} dimensions")
    place = dots[0] if dots else len(parts)
    items = [*parts[:place], *[slice(None)] * missing, *parts[place + len(dots) :]]
    return [
        _checked(item, size, axis)
        for axis, (item, size) in enumerate(zip(items, shape, strict=True))
    ]


def _is_basic(part: Any) -> bool:
    # A bool is a mask for the frameworks, though Python calls it an integer.
    is_integer = isinstance(part, int | np.integer) and not isinstance(part, bool)
    return is_integer or isinstance(part, slice | EllipsisType)


def _checked(item: Any, size: int, axis: int) -> _Item:
    if isinstance(item, slice):
        item.indices(size)  # raises what Python's sequences raise
        return item
    place = operator.index(item)
    if not -size <= place < size:
        raise IndexError(f"index {place} is out of range for axis {axis} of size {size}")
    return place % size


def _cut_axis(item: _Item, size: int) -> tuple[int, int, _Item]:
    """The first element needed on an axis, how many are needed, and the remaining index."""
    if isinstance(item, int):
        return item, 1, 0
    places = range(*item.indices(size))
    if not places:
        return 0, 0, slice(0, 0, places.step)
    low, high = min(places[0], places[-1]), max(places[0], places[-1])
    # A backward slice may end before element 0, which only None can express.
    stop = None if places.step < 0 else places[-1] - low + 1
    return low, high - low + 1, slice(places[0] - low, stop, places.step)
