"""What an index of NumPy's needs of a tensor: some rows, and a run of elements of each row.

An index on the first axis by an integer, a slice, integers in an array or a mask, with integers and
slices on the other axes, is reduced to that, and to an index into the block that is read. For any
other index whole rows are read, and NumPy applies the index to them. The errors are NumPy's own,
because NumPy applies a wrong index to an array that takes no memory.
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from packhorse.disk.shelf.arrays import Array
from packhorse.disk.shelf.rows import RowIds
from packhorse.disk.slices import cut_index

__all__ = ["Selection", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What an index needs.

    Attributes:
        rows: the rows. To write they ascend, and none comes twice.
        low: the first element of each row.
        high: one past the last.
        box: the shape of the elements from `low` to `high` of a row.
        order: the index to apply to the rows that were read; None for all of them in order.
        inner: the index to apply to the other axes; None for all elements.
        whole: the index to apply to all axes at once, in place of the two; None if there is none.
        has_dots: whether the index has `...`, which makes an array even of a single element.
    """

    rows: RowIds
    low: int
    high: int
    box: tuple[int, ...]
    order: Any = None
    inner: tuple[Any, ...] | None = None
    whole: Any = None
    has_dots: bool = False

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return (len(self.rows), *self.box)

    @property
    def is_plain(self) -> bool:
        """Whether the index selects all that is read, in order."""
        return self.order is None and self.inner is None and self.whole is None

    def view(self, block: Array) -> Any:
        """What the index selects, for a block that was read. It may be a view of the block."""
        if self.whole is not None:
            return block[self.whole]
        if self.inner is not None:
            block = block[(slice(None), *self.inner)]
        found = block if self.order is None else block[self.order]
        return np.asarray(found) if self.has_dots else found

    def assign(self, block: Array, value: Array) -> None:
        """Write values to what the index selects of a block."""
        if self.whole is not None:
            block[self.whole] = value
            return
        if self.inner is not None:
            block = block[(slice(None), *self.inner)]
        block[... if self.order is None else self.order] = value


def select(index: Any, shape: tuple[int, ...], *, writes: bool = False) -> Selection:
    """Find out what an index needs.

    Args:
        index: the object in the brackets.
        shape: the shape of the tensor, which has an axis at least.
        writes: whether it is needed to write.

    Raises:
        IndexError, TypeError, ValueError: NumPy's own, for a wrong index.
    """
    items = tuple(map(_as_number, index if isinstance(index, tuple) else (index,)))
    found = _simple(items, shape, writes)
    if found is None:
        _probe(index, shape)  # raises NumPy's errors
        found = _general(items, shape)
    return found


def _probe(index: Any, shape: tuple[int, ...]) -> None:
    np.broadcast_to(np.zeros((), np.bool_), shape)[index]


def _simple(items: tuple[Any, ...], shape: tuple[int, ...], writes: bool) -> Selection | None:
    """The selection of an index of the usual forms; None for others, and for wrong ones."""
    if not items or any(not _is_basic(item) for item in items[1:]):
        return None
    if sum(isinstance(item, EllipsisType) for item in items) > 1:
        return None
    first, rest = items[0], items[1:]
    if isinstance(first, EllipsisType):
        if len(rest) == len(shape):
            first, rest = rest[0], rest[1:]
        else:
            first, rest = slice(None), items
    n_rows, order = shape[0], None
    rows: RowIds
    if isinstance(first, slice):
        rows, order = _slice_rows(first, n_rows)
    elif _is_integer(first):
        place = operator.index(first)
        if not -n_rows <= place < n_rows:
            return None
        rows, order = range(place % n_rows, place % n_rows + 1), 0
    else:
        found = _listed_rows(first, n_rows, writes)
        if found is None:
            return None
        rows, order = found
    has_dots = any(isinstance(item, EllipsisType) for item in items)
    if not rest:
        return Selection(rows, 0, math.prod(shape[1:]), shape[1:], order, has_dots=has_dots)
    try:
        box = cut_index(rest, shape[1:])
    except (IndexError, TypeError, ValueError):
        return None
    inner = box.inner[:-1] if box.is_view or 0 in box.shape else None
    if any(isinstance(item, int) for item in box.inner[:-1]):
        inner = box.inner[:-1]
    stop = box.start + math.prod(box.shape)
    return Selection(rows, box.start, stop, box.shape, order, inner, has_dots=has_dots)


def _as_number(item: Any) -> Any:
    """An object that is no array, but says which integer it stands for, as that integer."""
    if not isinstance(item, int | np.generic | np.ndarray) and hasattr(item, "__index__"):
        with suppress(TypeError, ValueError):  # NumPy takes it for an array then
            return operator.index(item)
    return item


def _is_integer(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _is_basic(item: Any) -> bool:
    return isinstance(item, slice | EllipsisType) or _is_integer(item)


def _slice_rows(item: slice, n_rows: int) -> tuple[RowIds, Any]:
    """The rows of a slice, and the order in which they are wanted."""
    places = range(*item.indices(n_rows))
    if not places:
        return range(0), None
    rows = places if places.step > 0 else places[::-1]
    order = None if places.step > 0 else slice(None, None, -1)
    return (rows if rows.step == 1 else np.arange(rows.start, rows.stop, rows.step)), order


def _listed_rows(item: Any, n_rows: int, writes: bool) -> tuple[RowIds, Any] | None:
    """The rows of an array of integers or a mask; None if it is something else, or wrong."""
    if item is None or isinstance(item, bool | np.bool_):
        return None
    listed = _listed(item)
    if listed.dtype == np.bool_ and listed.shape == (n_rows,):
        return np.flatnonzero(listed), None
    if listed.dtype.kind not in "iu" or listed.ndim == 0:
        return None
    if listed.size == 0:
        return range(0), np.zeros(listed.shape, np.intp)
    least = listed.min()
    if least < -n_rows or listed.max() >= n_rows:
        return None
    places = listed.astype(np.intp)
    if least < 0:
        places[places < 0] += n_rows
    if places.ndim == 1:
        if not writes or places.size == 1 or bool((places[1:] > places[:-1]).all()):
            return places, None
    elif not writes:
        return places.ravel(), np.arange(places.size).reshape(places.shape)
    rows, order = _sorted(places.ravel())
    return rows, order.reshape(listed.shape)


def _listed(item: Any) -> Array:
    """An array or a list as an array. As in NumPy, an empty list is one of integers."""
    listed = np.asarray(item)
    is_empty_list = not isinstance(item, np.ndarray) and listed.size == 0
    return listed.astype(np.intp) if is_empty_list else listed


def _sorted(places: Array) -> tuple[Array, Array]:
    """The different numbers in ascending order, and where each of the given ones is among them."""
    order = places.argsort()
    rows = places[order]
    if not (rows[1:] != rows[:-1]).all():
        rows, order = np.unique(places, return_inverse=True)
        return rows, order
    where = np.empty_like(order)
    where[order] = np.arange(order.size)
    return rows, where


def _general(items: tuple[Any, ...], shape: tuple[int, ...]) -> Selection:
    """The selection of any index that is not wrong: whole rows."""
    places: list[Any] = []
    for item in items:
        listed = item
        if not (item is None or isinstance(item, slice | EllipsisType)):
            listed = _listed(item)
            if listed.dtype == np.bool_ and listed.ndim > 0:
                places += listed.nonzero()
                continue
            listed = item if listed.ndim == 0 else listed
        places.append(listed)
    numel = math.prod(shape[1:])
    first = places[0] if places else None
    if isinstance(first, np.ndarray) and first.dtype.kind in "iu" and first.ndim and first.size:
        rows, order = np.unique(np.where(first < 0, first + shape[0], first), return_inverse=True)
        whole = (order.reshape(first.shape), *places[1:])
        return Selection(rows, 0, numel, shape[1:], None, None, whole)
    return Selection(range(shape[0]), 0, numel, shape[1:], None, None, tuple(places))
