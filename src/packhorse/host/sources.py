"""The rows of a table that is to be packed, as bytes: from NumPy, PyTorch, a file or a shelf.

Only blocks of rows are read, so the source may be larger than memory.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.table_plan import sample_places
from packhorse.framework import framework_of
from packhorse.layout import DTYPE_BY_NAME
from packhorse.table_layout import MAX_TABLE_COLUMNS

__all__ = ["RowSource"]

_BLOCK_NBYTES = 16 << 20  # plain rows that are read at once
_Bytes = NDArray[np.uint8]


class RowSource:
    """A matrix that is read by rows.

    Args:
        source: a matrix of NumPy (also a memmap) or PyTorch; or an object whose slices are such
            matrices, and which has `shape`, or `get_shape()` as slices of safetensors files have
            it: a slice of a packed or plain file, or a tensor of a shelf.

    Attributes:
        dtype: safetensors' name of the dtype.
        n_rows: its rows.
        n_columns: its columns.

    Raises:
        TypeError: it is none of these, or no matrix of elements of 8, 16, 32 or 64 bits.
        ValueError: it has no columns, or more than 65,536.
    """

    def __init__(self, source: Any) -> None:
        shape = _shape_of(source)
        if shape is None or not hasattr(source, "__getitem__"):
            raise TypeError(
                f"a table is packed from a matrix of NumPy or PyTorch, a slice of a file or a "
                f"tensor of a shelf, not from {type(source).__name__}"
            )
        if len(shape) != 2:
            raise TypeError(f"a table has rows and columns, not shape {shape}; reshape it first")
        self._source = source
        self.n_rows, self.n_columns = shape
        if not 1 <= self.n_columns <= MAX_TABLE_COLUMNS:
            raise ValueError(f"a table has 1 to {MAX_TABLE_COLUMNS} columns, not {self.n_columns}")
        first = source[0:0]
        framework = framework_of(first)
        if framework is None:
            raise TypeError(
                f"slices of a table must be matrices of NumPy or PyTorch, not "
                f"{type(first).__name__}"
            )
        self._framework = framework
        self.dtype, _ = framework.describe(first)
        bits = DTYPE_BY_NAME[self.dtype].bits
        if bits not in (8, 16, 32, 64):
            raise TypeError(f"a table has elements of 8, 16, 32 or 64 bits, not {self.dtype}")
        self.element_nbytes = bits // 8

    @property
    def row_nbytes(self) -> int:
        """Bytes of a plain row."""
        return self.n_columns * self.element_nbytes

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return max(1, _BLOCK_NBYTES // self.row_nbytes)

    def blocks(self) -> Iterator[_Bytes]:
        """All rows, block by block: uint8, (rows of the block, row_nbytes)."""
        for start in range(0, self.n_rows, self.block_rows):
            yield self.read(start, min(start + self.block_rows, self.n_rows))

    def read(self, start: int, stop: int) -> _Bytes:
        """Rows [start, stop): uint8, (stop - start, row_nbytes)."""
        data, dtype, shape = self._framework.readable(self._source[start:stop])
        if dtype != self.dtype or shape != (stop - start, self.n_columns):
            raise TypeError(
                f"rows {start} to {stop} of the source are {dtype} of shape {shape}; expected"
                f" {self.dtype} of shape {(stop - start, self.n_columns)}"
            )
        return data.reshape(stop - start, self.row_nbytes)

    def sample(self) -> NDArray[Any]:
        """Some rows, evenly spread, as unsigned integers: at most 8 MiB."""
        runs = [self.read(*place) for place in sample_places(self.n_rows, self.row_nbytes)]
        rows = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return np.ascontiguousarray(rows).view(f"<u{self.element_nbytes}")


def _shape_of(source: Any) -> tuple[int, ...] | None:
    if hasattr(source, "get_shape"):
        return tuple(source.get_shape())
    shape = getattr(source, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)
