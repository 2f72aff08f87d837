"""Where a fit keeps what it computes: a `Shelf`, or the same few operations in memory.

`MemoryShelf` has the operations of `packhorse.disk.Shelf` that a fit uses, so that there is one
code for both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from packhorse.framework import framework_of, to_array
from packhorse.learn.bases import Array

__all__ = [
    "MemoryShelf",
    "MemoryTensor",
    "Rows",
    "Shelf",
    "Tensors",
    "as_arrays",
    "blocks_of",
    "check_shelf",
    "checked_rows",
    "chunk_rows",
    "float_dtype",
]


class Rows(Protocol):
    """A matrix whose rows can be read: an array, a `ShelfTensor` or a `MemoryTensor`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""

    @property
    def dtype(self) -> Any:
        """Of the elements."""

    def __getitem__(self, index: Any, /) -> Any:
        """The rows that a slice or an array of integers names."""


class Tensors(Protocol):
    """What a shelf and memory both do with tensors."""

    def create(
        self, name: str, shape: tuple[int, ...], dtype: Any, *, chunk_nbytes: int | None = None
    ) -> Any:
        """A new tensor."""

    def __getitem__(self, name: str, /) -> Any:
        """The tensor of that name."""

    def __delitem__(self, name: str, /) -> None:
        """Removes a tensor."""

    def __contains__(self, name: str, /) -> bool:
        """Whether there is such a tensor."""


class Shelf(Tensors, Protocol):
    """What an interrupted fit needs besides."""

    def keys(self, prefix: str = "") -> Any:
        """The names that begin so."""

    def transaction(self) -> AbstractContextManager[Any]:
        """One durable commit of all that happens inside."""

    def save(self, name: str, state: Any, /) -> Any:
        """Keeps nested values."""

    def load(self, name: str, /) -> Any:
        """Nested values that were kept."""


class MemoryTensor:
    """A matrix in memory that grows by rows. Room for as many rows again is kept ahead."""

    def __init__(self, width: int, dtype: Any) -> None:
        """An empty matrix.

        Args:
            width: the number of columns.
            dtype: of the elements.
        """
        self._buffer: Array = np.empty((0, width), dtype)
        self._n_rows = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        dtype: np.dtype[Any] = self._buffer.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return (self._n_rows, self._buffer.shape[1])

    def append(self, rows: Array) -> None:
        """Adds rows at the end.

        Args:
            rows: with as many columns as there are.
        """
        end = self._n_rows + len(rows)
        if end > len(self._buffer):
            grown = np.empty((max(end, 2 * self._n_rows), self.shape[1]), self._buffer.dtype)
            grown[: self._n_rows] = self._buffer[: self._n_rows]
            self._buffer = grown
        self._buffer[self._n_rows : end] = rows
        self._n_rows = end

    def __getitem__(self, index: Any) -> Array:
        """A view of some rows, or a copy of those that an array of integers names."""
        rows: Array = self._buffer[: self._n_rows][index]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        """Without the room that is kept ahead."""
        return {"_buffer": self[:].copy(), "_n_rows": self._n_rows}


class MemoryShelf:
    """The tensors of a fit in memory, by name."""

    def __init__(self) -> None:
        """Makes an empty one."""
        self._tensors: dict[str, MemoryTensor] = {}

    def create(
        self, name: str, shape: tuple[int, ...], dtype: Any, *, chunk_nbytes: int | None = None
    ) -> MemoryTensor:
        """A new matrix without rows.

        Args:
            name: its name.
            shape: no rows, and the number of columns.
            dtype: of the elements.
            chunk_nbytes: not used; memory has no chunks.

        Returns:
            The matrix.
        """
        self._tensors[name] = MemoryTensor(shape[1], dtype)
        return self._tensors[name]

    def __getitem__(self, name: str) -> MemoryTensor:
        """The tensor of that name."""
        return self._tensors[name]

    def __delitem__(self, name: str) -> None:
        """Removes a tensor."""
        del self._tensors[name]

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors


def as_arrays(matrix: Any) -> Any:
    """The same matrix in NumPy: a tensor of a shelf gives arrays, whatever its shelf gives.
    A tensor of PyTorch is copied, as NumPy reads no bfloat16 of it. Anything else stays as it is.

    Args:
        matrix: points, or a tensor of a fit.
    """
    if hasattr(matrix, "as_framework"):
        return matrix.as_framework("np")
    framework = framework_of(matrix)
    if framework is None or framework.name == "np":
        return matrix
    return to_array(matrix, framework)


def check_shelf(shelf: Any, name: Any, *, writes: bool) -> None:
    """Make sure that a caller gave a shelf, and the beginning of names there.

    Args:
        shelf: the shelf, or the state of a tag.
        name: the beginning.
        writes: whether something will be written.

    Raises:
        TypeError: one of them is something else.
        ValueError: no tensor can have such a name.
        PermissionError: a tag cannot be written to.
    """
    if not (hasattr(shelf, "reading") and hasattr(shelf, "load")):
        raise TypeError(f"shelf is a {type(shelf).__name__}; it must be a packhorse.disk.Shelf")
    if writes and not hasattr(shelf, "create"):
        raise PermissionError("shelf is the state of a tag, which cannot change; give the shelf")
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it must be a string")
    shelf.keys(f"{name}/")  # refuses what no name can begin with


def chunk_rows(width: int, dtype: Any, nbytes: int) -> int:
    """The rows of a chunk of a matrix on a shelf.

    Args:
        width: the number of its columns.
        dtype: of its elements.
        nbytes: about how many bytes a chunk has.
    """
    return max(1, int(nbytes // max(1, width * np.dtype(dtype).itemsize)))


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype to compute in: float32 for itself and floats of fewer bits, otherwise float64.

    Args:
        dtype: of the points.

    Raises:
        ValueError: they are complex numbers.
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        raise ValueError(f"X has complex numbers ({dtype}); GMRA needs real numbers")
    narrow = dtype.kind == "f" and dtype.itemsize <= 4
    narrow = narrow or dtype.name in ("bfloat16", *_FLOAT8)
    return np.dtype(np.float32 if narrow else np.float64)


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3")


def checked_rows(rows: Any, first: int | Array, dtype: Any) -> Array:
    """Rows as a contiguous array of floats, which must be finite.

    Args:
        rows: as they were read.
        first: the number of the first, or of each, for the message.
        dtype: to compute in.

    Raises:
        ValueError: one of them has NaN or infinity, or they are complex.
    """
    float_dtype(rows.dtype)
    found: Array = np.ascontiguousarray(rows, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(found.sum()):  # NaN and infinity stay in a sum; to look at each takes longer
            return found
    finite = np.isfinite(found).all(axis=1)
    if finite.all():
        return found
    place = int(np.argmin(finite))
    row = first + place if isinstance(first, int) else first[place]
    raise ValueError(f"row {row} of X has NaN or infinity; GMRA needs finite numbers")


def blocks_of(rows: Rows, first: int, block_rows: int, dtype: Any) -> Generator[Array]:
    """All rows, in blocks of one size.

    A tensor of a shelf reads the next rows while some are used. The blocks are the same as those of
    an array, so that all that is computed from them is the same bit for bit.

    Args:
        rows: a matrix.
        first: the row to begin with.
        block_rows: the rows of a block; the last one may have fewer.
        dtype: to compute in, and for `checked_rows`; None for rows that were checked.
    """
    for block in _read_blocks(rows, first, block_rows):
        yield block if dtype is None else checked_rows(block, first, dtype)
        first += len(block)


def _read_blocks(rows: Any, first: int, block_rows: int) -> Iterator[Array]:
    if first or not hasattr(rows, "as_framework"):  # also of h5py, whose chunks are something else
        return (rows[i : i + block_rows] for i in range(first, rows.shape[0], block_rows))
    nbytes = block_rows * rows.shape[1] * np.dtype(rows.dtype).itemsize
    return _cut_again(rows.iter_chunks(nbytes), block_rows)


def _cut_again(runs: Iterator[Array], block_rows: int) -> Iterator[Array]:
    """Blocks of one size, from runs of rows of any size."""
    left: list[Array] = []
    n_left = 0
    for run in runs:
        start = 0
        while n_left + len(run) - start >= block_rows:
            stop = start + block_rows - n_left
            yield np.concatenate([*left, run[start:stop]]) if left else run[start:stop]
            left, n_left, start = [], 0, stop
        if start < len(run):
            left.append(run[start:])
            n_left += len(run) - start
    if left:
        yield np.concatenate(left)
