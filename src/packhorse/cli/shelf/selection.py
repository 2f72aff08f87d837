"""An index on the command line, such as `10:20, 3`: read as NumPy would, and cut to its beginning.

A tensor of a shelf may be larger than memory, so an index is cut before anything is read: of each
axis that it keeps, only the first places are left.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import TypeAlias

from packhorse.cli.failures import UsageError

__all__ = ["Item", "beginning", "parse_index"]

Item: TypeAlias = int | slice | EllipsisType

_LAST_AXES = (6, 8)  # places that are left of the last two axes
_OTHER_AXES = 2


def parse_index(text: str) -> tuple[Item, ...]:
    """Read an index: integers, slices and `...`, with commas between.

    Raises:
        UsageError: it is something else.
    """
    found = tuple(_item(word.strip(), text) for word in text.split(","))
    if found.count(...) > 1:
        raise UsageError(f"index {text!r}: an index has at most one `...`")
    return found


def _item(word: str, text: str) -> Item:
    if word == "...":
        return ...
    try:
        if ":" not in word:
            return int(word)
        bounds = [int(bound) if bound.strip() else None for bound in word.split(":")]
        if len(bounds) <= 3 and bounds[2:] != [0]:
            return slice(*bounds)
    except ValueError:
        pass
    raise UsageError(
        f"index {text!r}: give integers, slices and `...`, with commas between, such as 3 or "
        "10:20,0 or ...,::2"
    )


def beginning(
    index: Sequence[Item], shape: tuple[int, ...]
) -> tuple[tuple[int | slice, ...], tuple[int, ...]]:
    """Cut an index to the first places of each axis that it keeps.

    Args:
        index: from `parse_index`; empty for everything.
        shape: the shape of the tensor.

    Returns:
        The cut index, with an item for each axis, and the shape of what the whole index selects.

    Raises:
        UsageError: the index has more items than the tensor has axes, or a place that the axis
            lacks.
    """
    items = _for_all_axes(index, shape)
    for axis, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, int) and not -size <= item < size:
            raise UsageError(f"index {item} is out of bounds for axis {axis} with size {size}")
    ranges = [
        range(size)[item]
        for item, size in zip(items, shape, strict=True)
        if isinstance(item, slice)
    ]
    n_others = max(0, len(ranges) - len(_LAST_AXES))
    limits = [_OTHER_AXES] * n_others + [*_LAST_AXES[len(_LAST_AXES) - len(ranges) + n_others :]]
    kept = iter([_slice_of(places[:limit]) for places, limit in zip(ranges, limits, strict=True)])
    cut = tuple(next(kept) if isinstance(item, slice) else item for item in items)
    return cut, tuple(map(len, ranges))


def _for_all_axes(index: Sequence[Item], shape: tuple[int, ...]) -> list[int | slice]:
    """The index with an item for each axis."""
    given = [item for item in index if not isinstance(item, EllipsisType)]
    if len(given) > len(shape):
        raise UsageError(f"the index has {len(given)} items, but the tensor has {len(shape)} axes")
    at = index.index(...) if ... in index else len(given)
    whole = [slice(None)] * (len(shape) - len(given))
    return [*given[:at], *whole, *given[at:]]


def _slice_of(places: range) -> slice:
    """The slice that selects these places, which has no end if it ends in front of place 0."""
    stop = places.stop if places.stop >= 0 else None
    return slice(places.start, stop, places.step) if places else slice(0, 0)
