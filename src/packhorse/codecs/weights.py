"""Packs weights in memory (docs/format.md, section 12), unpacks them by rows, and checks them.

A matrix holds the bits of BF16 elements as uint16, row by row. `pack` takes a whole matrix.
`WeightPacker` takes blocks of rows, so that a matrix from a packed file never lies in memory as a
whole. `count_exceptions` and `packed_nbytes` give the size in a format without packing.

`check` checks arrays from elsewhere against every rule of that section. `unpack_into` never reads
or writes outside of an array, even if nothing was checked. But arrays that break other rules unpack
to wrong elements without an error. So check arrays from elsewhere once, before use.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.errors import CorruptionError
from packhorse.layout import MAX_WEIGHT_COLUMNS, WeightFault, WeightFormat

__all__ = [
    "WeightArrays",
    "WeightPacker",
    "check",
    "count_exceptions",
    "pack",
    "packed_nbytes",
    "unpack_into",
]

_MAX_EXCEPTIONS = np.iinfo(np.int32).max
_Elements = NDArray[np.uint16]


class WeightArrays(NamedTuple):
    """The arrays of a packed weight (docs/format.md, section 12).

    Attributes:
        low_bytes: uint8, (n_rows, n_padded): bits 7 to 0 of the packed elements.
        high_bits: uint8, (n_rows, n_high_bytes): their bits above bit 7.
        first_exponents: uint8, (n_rows,): the start of each row's window.
        exception_starts: int32, (n_rows + 1,): where the exceptions of each row begin.
        exceptions: int32, (n_exceptions,): the column in the lower half, the element in the upper.
    """

    low_bytes: NDArray[np.uint8]
    high_bits: NDArray[np.uint8]
    first_exponents: NDArray[np.uint8]
    exception_starts: NDArray[np.int32]
    exceptions: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self)


def pack(elements: _Elements, format: WeightFormat, *, threads: int = 1) -> WeightArrays:
    """Packs a matrix to the arrays that docs/format.md defines.

    Args:
        elements: uint16, (n_rows, n_columns), C-contiguous: the bits of BF16 elements. They are
            only read.
        format: `layout.W12` or `layout.W11`.
        threads: how many threads of the core work on it.

    Raises:
        TypeError: `elements` is not a C-contiguous uint16 matrix.
        ValueError: it has no columns or more than 65,536, or more than 2^31 - 1 exceptions.
    """
    _require_matrix(elements, "elements")
    n_rows, n_columns = elements.shape
    packer = WeightPacker(n_rows, n_columns, format, threads=threads)
    packer.add(elements)
    return packer.finish()


class WeightPacker:
    """Packs a matrix block by block of rows, from the first row to the last.

    The arrays for the whole matrix are allocated at once, except for the exceptions. Their number
    is unknown at first, so they are kept block by block, and `finish` joins them.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns, 1 to 65,536.
        format: `layout.W12` or `layout.W11`.
        threads: how many threads of the core work on a block.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, n_rows: int, n_columns: int, format: WeightFormat, *, threads: int = 1
    ) -> None:
        _require_columns(n_columns)
        if n_rows < 0:
            raise ValueError(f"n_rows is {n_rows}; it must not be negative")
        self._format, self._n_columns, self._threads = format, n_columns, threads
        self._low_bytes = np.empty((n_rows, format.n_padded(n_columns)), np.uint8)
        self._high_bits = np.empty((n_rows, format.n_high_bytes(n_columns)), np.uint8)
        self._first_exponents = np.empty(n_rows, np.uint8)
        self._counts = np.empty(n_rows, np.int32)
        self._exceptions: list[NDArray[np.int32]] = []
        self._n_done = 0

    @property
    def n_rows_left(self) -> int:
        """Rows that are still to be added."""
        return len(self._counts) - self._n_done

    def add(self, rows: _Elements) -> None:
        """Packs the next rows: uint16, (any number, n_columns), C-contiguous.

        Raises:
            TypeError: `rows` is not a C-contiguous uint16 matrix.
            ValueError: it has another number of columns, or more rows than are left.
        """
        _require_matrix(rows, "rows")
        if rows.shape[1] != self._n_columns:
            raise ValueError(f"rows has {rows.shape[1]} columns; the matrix has {self._n_columns}")
        if len(rows) > self.n_rows_left:
            raise ValueError(f"rows has {len(rows)} rows; only {self.n_rows_left} are left")
        part = slice(self._n_done, self._n_done + len(rows))
        exceptions = _core.pack_weights(
            rows,
            self._format.bits,
            self._low_bytes[part],
            self._high_bits[part],
            self._first_exponents[part],
            self._counts[part],
            self._threads,
        )
        self._n_done = part.stop
        self._exceptions.append(exceptions)

    def finish(self) -> WeightArrays:
        """The arrays, once all rows were added.

        Raises:
            ValueError: rows are left, or there are more than 2^31 - 1 exceptions.
        """
        if self.n_rows_left:
            raise ValueError(f"{self.n_rows_left} rows are left; add them first")
        n_exceptions = sum(block.size for block in self._exceptions)
        if n_exceptions > _MAX_EXCEPTIONS:
            raise ValueError(
                f"the matrix has {n_exceptions} exceptions; {self._format.name} holds at most"
                f" {_MAX_EXCEPTIONS}: leave the matrix plain"
            )
        starts = np.zeros(len(self._counts) + 1, np.int32)
        np.cumsum(self._counts, out=starts[1:])
        if len(self._exceptions) != 1:
            self._exceptions = [np.concatenate([np.empty(0, np.int32), *self._exceptions])]
        return WeightArrays(
            self._low_bytes, self._high_bits, self._first_exponents, starts, self._exceptions[0]
        )


def count_exceptions(
    elements: _Elements, format: WeightFormat, *, threads: int = 1, max_rows: int | None = None
) -> int:
    """The number of exceptions that a matrix would have.

    Args:
        elements: as for `pack`.
        format: as for `pack`.
        threads: as for `pack`.
        max_rows: if given, the number is estimated from at most this many rows, evenly spread.

    Raises:
        TypeError: `elements` is not a C-contiguous uint16 matrix.
        ValueError: it has no columns or more than 65,536, or `max_rows` is not positive.
    """
    _require_matrix(elements, "elements")
    _require_columns(elements.shape[1])
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; it must be positive")
    n_rows = len(elements)
    step = 1 if max_rows is None else max(1, -(-n_rows // max_rows))
    count = _core.count_weight_exceptions(elements, format.bits, step, threads)
    n_samples = -(-n_rows // step)
    return count if n_samples == n_rows else round(count * n_rows / n_samples)


def packed_nbytes(n_rows: int, n_columns: int, n_exceptions: int, format: WeightFormat) -> int:
    """Bytes of all arrays of a packed weight with a number of exceptions."""
    row_nbytes = format.n_padded(n_columns) + format.n_high_bytes(n_columns) + 1 + 4
    return n_rows * row_nbytes + 4 + 4 * n_exceptions


def unpack_into(
    arrays: WeightArrays,
    format: WeightFormat,
    n_columns: int,
    dst: _Elements,
    *,
    row_start: int = 0,
    row_stop: int | None = None,
    threads: int = 1,
) -> None:
    """Unpacks rows [row_start, row_stop), or all rows from `row_start` on if `row_stop` is None.

    Memory is safe whatever the arrays hold, but only checked arrays give the right elements.

    Args:
        arrays: a packed weight.
        format: its format.
        n_columns: columns of the matrix, without padding.
        dst: uint16, (row_stop - row_start, n_columns), C-contiguous: receives the bits of BF16
            elements. It must not share memory with the arrays.
        row_start: the first row.
        row_stop: one past the last row.
        threads: how many threads of the core work on it.

    Raises:
        CorruptionError: the shapes or dtypes of the arrays break the rules, or exceptions
            of these rows lie outside of the matrix. The content of `dst` is then undefined.
        TypeError: `dst` is not a C-contiguous uint16 matrix, or is read-only.
        ValueError: the rows do not exist, or `dst` has another shape.
    """
    _require_shapes(arrays, format, n_columns)
    _require_matrix(dst, "dst")
    n_rows = arrays.first_exponents.size
    stop = n_rows if row_stop is None else row_stop
    if not 0 <= row_start <= stop <= n_rows:
        raise ValueError(f"rows {row_start} to {stop} are not within the matrix's {n_rows} rows")
    if dst.shape != (stop - row_start, n_columns):
        raise ValueError(f"dst has shape {dst.shape}; it must be {(stop - row_start, n_columns)}")
    if not dst.flags.writeable:
        raise TypeError("dst is read-only; give a writable array")
    row = _core.unpack_weights(*arrays, format.bits, row_start, dst, threads)
    if row != n_rows:
        raise CorruptionError(f"packed weight: exceptions of row {row} lie outside of the row")


# Messages for the faults that the core reports (csrc/rows/weights_unpack.hpp).
_FAULT_WORDS: dict[int, str] = {
    WeightFault.FIRST_EXPONENT: (
        "first_exponents: row {row} has first exponent {found}, which is out of range"
    ),
    WeightFault.ENDS: (
        "exception_starts: number {row} is {found}, which does not fit: it must be {place}"
    ),
    WeightFault.DESCEND: (
        "exception_starts: row {row} has {place} to {found}, which descend or lie outside"
    ),
    WeightFault.COLUMN: (
        "exceptions: number {place}, of row {row}, has column {found}, which is out of range"
    ),
    WeightFault.ASCEND: (
        "exceptions: number {place}, of row {row}, has column {found}; columns must ascend"
    ),
    WeightFault.HOLE: (
        "column {place} of row {row} is an exception and holds {found:#x} instead of a hole"
    ),
    WeightFault.MANTISSA: "column {place} of row {row} holds {found:#x}: code 0 and a mantissa",
    WeightFault.PADDING: (
        "column {place} of row {row} is padding and holds {found:#x} instead of 0"
    ),
}


def check(arrays: WeightArrays, format: WeightFormat, n_columns: int) -> None:
    """Checks arrays from elsewhere against every rule of docs/format.md, section 12.

    Raises:
        CorruptionError: a rule is broken; the message names the array, the row and what was found.
    """
    _require_shapes(arrays, format, n_columns)
    fault, row, place, found = _core.check_weights(*arrays, format.bits, n_columns)
    if fault != WeightFault.NONE:
        words = _FAULT_WORDS[fault].format(row=row, place=place, found=found)
        raise CorruptionError(f"packed weight: {words}")


def _require_shapes(arrays: WeightArrays, format: WeightFormat, n_columns: int) -> None:
    _require_columns(n_columns)
    n_rows = arrays.first_exponents.size
    shapes = [
        (n_rows, format.n_padded(n_columns)),
        (n_rows, format.n_high_bytes(n_columns)),
        (n_rows,),
        (n_rows + 1,),
        (arrays.exceptions.size,),
    ]
    dtypes = [np.uint8, np.uint8, np.uint8, np.int32, np.int32]
    held: list[NDArray[Any]] = list(arrays)
    for field, array, shape, dtype in zip(WeightArrays._fields, held, shapes, dtypes, strict=True):
        if array.shape != shape or array.dtype != dtype:
            raise CorruptionError(
                f"packed weight: {field} has shape {array.shape} and dtype {array.dtype}; it must"
                f" be {shape} and {np.dtype(dtype)}"
            )
        if not array.flags.c_contiguous:
            raise TypeError(f"{field} must be C-contiguous; copy it first")


def _require_columns(n_columns: int) -> None:
    if not 1 <= n_columns <= MAX_WEIGHT_COLUMNS:
        raise ValueError(f"a packed weight has 1 to {MAX_WEIGHT_COLUMNS} columns, not {n_columns}")


def _require_matrix(elements: _Elements, what: str) -> None:
    if not isinstance(elements, np.ndarray) or elements.dtype != np.uint16 or elements.ndim != 2:
        raise TypeError(f"{what} must be a uint16 matrix, the bits of BF16 elements")
    if not elements.flags.c_contiguous:
        raise TypeError(f"{what} must be C-contiguous; copy it first")
