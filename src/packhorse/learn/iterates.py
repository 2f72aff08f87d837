"""What SWAG keeps on a shelf: iterates as rows, and their mean and variance.

    NAME/about                what the rows are of, as JSON
    NAME/rows                 an iterate in each row, fp32; differences from the row before
    NAME/mean                 float64, of the first iterates
    NAME/squares              float64, their summed squared deviations from the mean
    NAME/counts               int64: all iterates, the last step, the iterates in mean and squares

All of it changes in one transaction. Mean and squares take four times the bytes of a row, so they
are written with every 256th row, and at the end. The rows since then are added to them
when they are read. That gives the same bits, because they are added in the same order.

If only the last K iterates are kept, the rows are a ring. A row that others build on cannot be
overwritten alone, or they would all have to be coded again. So the ring has some rows more than K,
and with such a row those that build on it are overwritten too: they are no longer used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packhorse.errors import CompatibilityError
from packhorse.learn.moments import Moments, Row

if TYPE_CHECKING:
    from packhorse.disk import Shelf

__all__ = ["Iterates", "Layout", "difference"]

# Names and shapes of the parameters in a row.
Layout: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

_VERSION = 1
_MOMENTS_EVERY = 256  # rows; to read and add as many takes one or two seconds at 11 MB a row
_RING_MOMENTS_EVERY = 16  # rows; a ring has as many rows at least
_KEYFRAME_EVERY = 16  # rows
_RING_KEYFRAME_EVERY = 4  # rows; so many may be kept needlessly
# Rows are read as a whole, so long chunks are no loss, and each chunk has a fixed cost.
_CHUNK_NBYTES = 1 << 22
_READ_AT_ONCE = 4  # rows that are added to the moments together


class Iterates:
    """Iterates on a shelf."""

    def __init__(self, shelf: Shelf, name: str, layout: Layout, max_rank: int | None) -> None:
        """Nothing is written before the first iterate.

        Args:
            shelf: where they are, or will be.
            name: the prefix of their names.
            layout: what a row holds.
            max_rank: how many of the last iterates are kept; None for all.

        Raises:
            ValueError: the iterates on the shelf are of another model, or another number of them
                is kept.
            CompatibilityError: they were written by a later release.
        """
        self._shelf = shelf
        self._name = name
        self._layout = layout
        self._max_rank = max_rank
        self._moments: Moments | None = None  # those of all committed rows
        self._is_behind = False  # whether this object has written rows, and no moments since
        self.numel = sum(int(np.prod(shape)) for _, shape in layout)
        self._ring = None if max_rank is None else _ring_rows(max_rank)
        self._moments_every = _MOMENTS_EVERY if max_rank is None else _RING_MOMENTS_EVERY
        if self._key("about") in shelf:
            self._check_about(json.loads(bytes(np.asarray(shelf[self._key("about")]))))

    @property
    def count(self) -> int:
        """How many iterates were collected."""
        return self._counts()[0]

    @property
    def last_step(self) -> int:
        """The step of the newest iterate that has one; -1 if none has."""
        return self._counts()[1]

    @property
    def rank(self) -> int:
        """How many iterates are kept."""
        return self.count if self._max_rank is None else min(self.count, self._max_rank)

    def moments(self) -> Moments:
        """Mean and variance of all iterates that were collected."""
        if self._moments is None or self._moments.count != self.count:
            self._moments = self._read_moments()
        return self._moments

    def add(self, rows: Sequence[tuple[Row, int | None]]) -> None:
        """Append iterates, in one transaction.

        Args:
            rows: iterates, each with its step, if it has one.
        """
        moments, self._moments = self.moments(), None  # if this fails they are read again
        with self._shelf.transaction():
            self._begin()
            _, last_step, n_stored = self._counts()
            for index, (row, step) in enumerate(rows, moments.count):
                self._place(row, index)
                last_step = last_step if step is None else step
            moments.add(*(row for row, _ in rows))
            if moments.count // self._moments_every > n_stored // self._moments_every:
                n_stored = self._write_moments(moments)
            self._write_counts(moments.count, last_step, n_stored)
        self._moments = moments
        self._is_behind = n_stored < moments.count

    def settle(self) -> None:
        """Write mean and squares, if rows were added since they were."""
        if not self._is_behind:
            return
        moments = self.moments()
        with self._shelf.transaction():
            self._write_counts(moments.count, self.last_step, self._write_moments(moments))
        self._is_behind = False

    def blocks(
        self, weights: NDArray[np.float32], nbytes: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The rows in one pass, each with its weights.

        Args:
            weights: one column for each iterate that is kept, the oldest first.
            nbytes: about how many bytes of rows to give at once.

        Yields:
            Columns of weights, and the rows that they are for.
        """
        rows = self._shelf[self._key("rows")].as_framework("np")
        places = np.arange(self.count - self.rank, self.count)
        placed = np.zeros((len(weights), len(rows)), np.float32)
        placed[:, places if self._ring is None else places % self._ring] = weights
        start = 0
        for block in rows.iter_chunks(nbytes):
            columns = placed[:, start : start + len(block)]
            start += len(block)
            if columns.any():
                yield columns, block

    def _key(self, part: str) -> str:
        return f"{self._name}/{part}"

    def _counts(self) -> tuple[int, int, int]:
        if self._key("counts") not in self._shelf:
            return 0, -1, 0
        count, last_step, n_stored = np.asarray(self._shelf[self._key("counts")]).tolist()
        return count, last_step, n_stored

    def _begin(self) -> None:
        """Create what is missing."""
        if self._key("about") in self._shelf:
            return
        text = json.dumps(self._about())
        self._shelf[self._key("about")] = np.frombuffer(text.encode(), np.uint8)
        every = _KEYFRAME_EVERY if self._ring is None else _RING_KEYFRAME_EVERY
        self._shelf.create(
            self._key("rows"), (0, self.numel), "float32",
            base="previous", keyframe_every=every, chunk_nbytes=_CHUNK_NBYTES,
        )  # fmt: skip
        for name in ("mean", "squares"):
            self._shelf.create(
                self._key(name), (self.numel,), "float64", chunk_nbytes=_CHUNK_NBYTES
            )
        self._shelf[self._key("counts")] = np.array([0, -1, 0])

    def _about(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "max_rank": self._max_rank,
            "parameters": [[name, list(shape)] for name, shape in self._layout],
        }

    def _check_about(self, about: dict[str, Any]) -> None:
        if about["version"] > _VERSION:
            raise CompatibilityError(
                f"the posterior {self._name!r} is of version {about['version']}; this release "
                f"reads up to {_VERSION}"
            )
        before = tuple((name, tuple(shape)) for name, shape in about["parameters"])
        if before != self._layout:
            raise ValueError(
                f"the posterior {self._name!r} was begun with another model: "
                f"{difference(before, self._layout)}; give that model, or another name="
            )
        if about["max_rank"] != self._max_rank:
            raise ValueError(
                f"the posterior {self._name!r} was begun with max_rank={about['max_rank']}, not "
                f"{self._max_rank}; give that, or another name="
            )

    def _place(self, row: Row, index: int) -> None:
        rows = self._shelf[self._key("rows")]
        place = index if self._ring is None else index % self._ring
        if place == len(rows):
            rows.append(row[None])
        elif place % _RING_KEYFRAME_EVERY:
            rows[place] = row
        else:
            rows[place : place + _RING_KEYFRAME_EVERY] = row

    def _write_moments(self, moments: Moments) -> int:
        self._shelf[self._key("mean")][...] = moments.mean
        self._shelf[self._key("squares")][...] = moments.squares
        return moments.count

    def _write_counts(self, *counts: int) -> None:
        self._shelf[self._key("counts")][...] = np.array(counts)

    def _read_moments(self) -> Moments:
        with self._shelf.reading():
            count, _, n_stored = self._counts()
            if not count:
                return Moments(0, np.zeros(self.numel), np.zeros(self.numel))
            mean, squares = (np.array(self._shelf[self._key(x)]) for x in ("mean", "squares"))
            moments = Moments(n_stored, mean, squares)
            rows = self._shelf[self._key("rows")].as_framework("np")
            for start in range(n_stored, count, _READ_AT_ONCE):
                places = range(start, min(start + _READ_AT_ONCE, count))
                moments.add(*(rows[i if self._ring is None else i % self._ring] for i in places))
        return moments


def _ring_rows(max_rank: int) -> int:
    """The rows of a ring. The first row of a group takes the rest of the group with it; even then
    there are all rows that are kept, and those that mean and squares do not hold yet."""
    needed = max(max_rank, _RING_MOMENTS_EVERY) + _RING_KEYFRAME_EVERY - 1
    return -(-needed // _RING_KEYFRAME_EVERY) * _RING_KEYFRAME_EVERY


def difference(before: Layout, now: Layout) -> str:
    """The first difference of two layouts, in words."""
    for (old_name, old_shape), (name, shape) in zip(before, now, strict=False):
        if old_name != name:
            return f"its parameter {old_name!r} is {name!r} now"
        if old_shape != shape:
            return f"its parameter {name!r} had the shape {old_shape}, and has {shape} now"
    return f"it had {len(before)} parameters, and has {len(now)} now"
