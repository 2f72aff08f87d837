"""How a tensor of a shelf is cut into chunks.

A chunk is a run of whole rows, or, if a row is long, a part of one row. So each chunk is a box of
the tensor whose elements are consecutive in C order. Chunks are numbered along the rows, so rows
that are appended never change the numbers of earlier chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from packhorse.layout import DTYPE_BY_NAME

__all__ = ["Grid", "Piece", "chunk_shape"]

_TARGET_NBYTES = 1 << 17
_MAX_ROW_NBYTES = 1 << 19
_PART_NBYTES = 1 << 19
_MIN_NBYTES, _MAX_NBYTES = 1 << 12, 1 << 24
_ALIGNMENT = 8  # elements: parts of elements of 4 and 6 bits end at a byte


def chunk_shape(
    dtype: str, shape: tuple[int, ...], nbytes: int | None, *, by_row: bool
) -> tuple[int, ...]:
    """Choose the chunks of a new tensor.

    Args:
        dtype: safetensors' name of the dtype.
        shape: the shape of the tensor.
        nbytes: about how many decoded bytes a chunk has; None for 128 KiB of short rows, and up to
            512 KiB of a long row.
        by_row: whether a chunk must not have more than one row.

    Raises:
        ValueError: `nbytes` is not from 4 KiB to 16 MiB.
    """
    if nbytes is not None and not _MIN_NBYTES <= nbytes <= _MAX_NBYTES:
        raise ValueError(
            f"chunk_nbytes is {nbytes}; it must be from {_MIN_NBYTES} to {_MAX_NBYTES}"
        )
    if not shape:
        return ()
    bits = DTYPE_BY_NAME[dtype].bits
    row = math.prod(shape[1:])
    row_nbytes = max(1, row * bits // 8)
    if row_nbytes <= max(nbytes or 0, _MAX_ROW_NBYTES):
        rows = 1 if by_row else max(1, (nbytes or _TARGET_NBYTES) // row_nbytes)
        if bits < 8 and not by_row:
            rows = -(-rows // _ALIGNMENT) * _ALIGNMENT
        return (rows, *(max(1, size) for size in shape[1:]))
    part = (nbytes or _PART_NBYTES) * 8 // bits
    inner = row
    for axis in range(1, len(shape)):
        inner //= shape[axis]
        if inner <= part:
            n_parts = -(-shape[axis] // max(1, part // inner))
            size = -(-shape[axis] // n_parts)  # parts of about the same length
            size = min(shape[axis], -(-size // _ALIGNMENT) * _ALIGNMENT) if inner == 1 else size
            return (*(1,) * axis, size, *shape[axis + 1 :])
    raise AssertionError(shape)  # the last axis has inner == 1


class Piece(NamedTuple):
    """A chunk, or the part of it that a request needs.

    Attributes:
        number: the number of the chunk.
        first_row: its first row.
        start: the first element of a row that it has.
        stop: one past the last element of a row that it has.
    """

    number: int
    first_row: int
    start: int
    stop: int


class Grid:
    """The chunks of a tensor.

    Attributes:
        n_rows: the size of the first axis; 1 without axes.
        row_numel: the elements of a row.
        rows_per_chunk: rows of a chunk; 1 if a row has several chunks.
        chunks_per_row: chunks of a row; 1 if a chunk has whole rows.
        n_chunks: how many chunks the tensor has.
    """

    __slots__ = (
        "_inner", "_line", "_per_line", "_size", "chunks_per_row", "n_chunks", "n_rows",
        "row_numel", "rows_per_chunk",
    )  # fmt: skip

    def __init__(self, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
        """Args:
        shape: the shape of the tensor.
        chunk: the shape of a chunk, from `chunk_shape`.
        """
        dims = shape or (1,)
        sizes = chunk or (1,)
        self.n_rows, self.row_numel = dims[0], math.prod(dims[1:])
        axis = next((i for i in range(1, len(dims)) if sizes[i] < dims[i]), 0)
        self.rows_per_chunk = sizes[0] if axis == 0 else 1
        self._inner = math.prod(dims[axis + 1 :]) if axis else 0
        self._size = sizes[axis] * self._inner
        self._line = dims[axis] * self._inner
        self._per_line = -(-dims[axis] // sizes[axis]) if axis else 1
        self.chunks_per_row = math.prod(dims[1:axis]) * self._per_line if axis else 1
        runs = -(-self.n_rows // self.rows_per_chunk)
        self.n_chunks = runs * self.chunks_per_row if self.row_numel else 0

    def piece(self, number: int) -> Piece:
        """The chunk of a number."""
        run, part = divmod(number, self.chunks_per_row)
        start, stop = self._part(part)
        return Piece(number, run * self.rows_per_chunk, start, stop)

    def _part(self, part: int) -> tuple[int, int]:
        if self.chunks_per_row == 1:
            return 0, self.row_numel
        line, place = divmod(part, self._per_line)
        start = line * self._line + place * self._size
        return start, min(start + self._size, (line + 1) * self._line)

    def n_rows_in(self, number: int) -> int:
        """How many rows of the tensor a chunk has."""
        first = number // self.chunks_per_row * self.rows_per_chunk
        return min(self.rows_per_chunk, self.n_rows - first)

    def numel_of(self, number: int) -> int:
        """How many elements a chunk has."""
        start, stop = self._part(number % self.chunks_per_row)
        return self.n_rows_in(number) * (stop - start)

    def parts(self, low: int, high: int) -> Iterator[Piece]:
        """The parts of row 0 that have elements from `low` to `high`."""
        if low >= high:
            return
        if self.chunks_per_row == 1:
            yield Piece(0, 0, 0, self.row_numel)
            return
        line, rest = divmod(low, self._line)
        part = line * self._per_line + rest // self._size
        while part < self.chunks_per_row:
            start, stop = self._part(part)
            if start >= high:
                return
            yield Piece(part, 0, start, stop)
            part += 1
