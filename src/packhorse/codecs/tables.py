"""Packs tables whose rows are read one by one (docs/format.md, section 14), gathers rows,
and checks tables that come from elsewhere.

A table holds the bytes of its elements, row by row, so rows are uint8 here, whatever the dtype.
`TablePacker` takes blocks of rows and writes to memory that the caller gives, so that a table from
a file never lies in memory as a whole beside the packed one. `gather_into` never reads or writes
outside of an array, even if nothing was checked.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs.content import crc32c
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import DTYPE_BY_CODE
from packhorse.table_layout import (
    LIST_END,
    MAX_TABLE_COLUMNS,
    MAX_TABLE_EXCEPTIONS,
    MAX_TABLE_ROWS,
    TABLE_CRC_OFFSET,
    TABLE_HEADER,
    TABLE_MAGIC,
    TABLE_STRIDE_ALIGNMENT,
    TABLE_VERSION,
    TRIPLE_CODE_BITS,
    TRIPLE_CODES,
    TableFlag,
    TableFormat,
    TableMode,
)

__all__ = [
    "TableArrays",
    "TableHeader",
    "TablePacker",
    "check_arrays",
    "checksums",
    "decode_header",
    "encode_header",
    "gather_into",
    "rank_marks",
    "replace_rows",
    "sum_into",
]

_Bytes = NDArray[np.uint8]
_Words32 = NDArray[np.uint32]
_Words64 = NDArray[np.uint64]
_BITS_OF_BYTES = np.array([number.bit_count() for number in range(256)], np.uint8)


class TableArrays(NamedTuple):
    """The arrays of a packed table (docs/format.md, section 14).

    Attributes:
        rows: uint8, (n_rows, stride).
        marks: uint32, a bit for each row: whether it has exceptions.
        ranks: uint32, the marked rows before each 32nd row.
        exception_starts: uint32, (marked rows + 1,).
        exception_columns: uint16, (n_exceptions,).
        exception_elements: uint8, (n_exceptions * bytes of an element,).
    """

    rows: _Bytes
    marks: NDArray[np.uint32]
    ranks: NDArray[np.uint32]
    exception_starts: NDArray[np.uint32]
    exception_columns: NDArray[np.uint16]
    exception_elements: _Bytes

    @property
    def fast_nbytes(self) -> int:
        """Bytes of all arrays but the rows."""
        return sum(array.nbytes for array in self[1:])


class TableHeader(NamedTuple):
    """The header of a packed table.

    Attributes:
        dtype: safetensors' name of the dtype.
        format: how rows are packed.
        n_rows: rows.
        n_marked: rows with exceptions.
        n_exceptions: exceptions of all rows.
    """

    dtype: str
    format: TableFormat
    n_rows: int
    n_marked: int
    n_exceptions: int


def _fields_of(format: TableFormat) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """A format as the core takes it."""
    fields = (
        *(format.mode, format.element_nbytes, format.n_columns, format.rest_bits, format.shift),
        *(format.has_sign, format.capacity, format.background, format.has_row_value),
        *(format.has_triples, format.stride),
    )
    return np.array(fields, np.uint64), np.array(format.values, np.uint64)


class TablePacker:
    """Packs a table block by block of rows, from the first row to the last.

    Args:
        format: how rows are packed.
        rows: uint8, (n_rows, stride), C-contiguous and writable: receives the packed rows.
        threads: how many threads of the core work on a block.

    Raises:
        ValueError: the fields of the format do not fit each other.
        TypeError: `rows` is not such an array.
    """

    def __init__(self, format: TableFormat, rows: _Bytes, *, threads: int = 1) -> None:
        words = _why_invalid(format)
        if words is not None:
            raise ValueError(f"packed table: {words}")
        _require_rows(rows, format.stride, "rows")
        if not rows.flags.writeable:
            raise TypeError("rows is read-only; give a writable array")
        self._format, self._rows, self._threads = format, rows, threads
        self._fields = _fields_of(format)
        self._counts = np.zeros(len(rows), np.uint32)
        self._columns: list[NDArray[np.uint16]] = []
        self._elements: list[_Bytes] = []
        self._n_done = 0

    @property
    def n_rows_left(self) -> int:
        """Rows that are still to be added."""
        return len(self._rows) - self._n_done

    @property
    def marked(self) -> NDArray[np.bool_]:
        """Whether each row has exceptions; False for rows that are still to be added."""
        return self._counts > 0

    def add(self, rows: _Bytes) -> None:
        """Packs the next rows: uint8, (any number, bytes of a plain row), C-contiguous.

        Raises:
            TypeError: `rows` is not such an array.
            ValueError: rows have another length, or there are more than are left.
        """
        _require_rows(rows, self._format.row_nbytes, "rows")
        if len(rows) > self.n_rows_left:
            raise ValueError(f"there are {len(rows)} rows more; only {self.n_rows_left} are left")
        part = slice(self._n_done, self._n_done + len(rows))
        columns, elements = _core.pack_table_rows(
            *self._fields, rows, self._rows[part], self._counts[part], self._threads
        )
        self._n_done = part.stop
        if columns.size:
            self._columns.append(columns)
            self._elements.append(elements)

    def finish(self) -> TableArrays:
        """The arrays, once all rows were added.

        Raises:
            ValueError: rows are left, or there are more than 2^32 - 1 exceptions.
        """
        if self.n_rows_left:
            raise ValueError(f"{self.n_rows_left} rows are left; add them first")
        columns = np.concatenate([np.empty(0, np.uint16), *self._columns])
        _require_few(columns.size)
        marks, ranks = _mark(self.marked)
        counts = self._counts[self.marked]
        starts = np.zeros(len(counts) + 1, np.uint32)
        np.cumsum(counts, out=starts[1:], dtype=np.uint32)
        elements = np.concatenate([np.empty(0, np.uint8), *self._elements])
        return TableArrays(self._rows, marks, ranks, starts, columns, elements)


def replace_rows(
    arrays: TableArrays, format: TableFormat, numbers: NDArray[np.int64], plain: _Bytes
) -> tuple[_Bytes, TableArrays]:
    """What a table has once some rows are replaced. The arrays that are given stay as they are.

    Args:
        arrays: a packed table.
        format: its format.
        numbers: int64, ascending, (n,): rows.
        plain: uint8, (n, bytes of a plain row), C-contiguous: what they become.

    Returns:
        The packed rows, uint8 (n, stride), and arrays that have the exceptions of all rows but the
        rows that were given: the caller puts the packed ones there.

    Raises:
        ValueError: there are more than 2^32 - 1 exceptions then.
    """
    packed = np.empty((len(numbers), format.stride), np.uint8)
    packer = TablePacker(format, packed)
    packer.add(plain)
    new = packer.finish()
    rows = [_rows_of(arrays), numbers[_rows_of(new)]]
    stays = ~np.isin(rows[0], numbers)
    rows[0] = rows[0][stays]
    order = np.argsort(np.concatenate(rows), kind="stable")
    exception_rows = np.concatenate(rows)[order]
    _require_few(exception_rows.size)
    old_columns = arrays.exception_columns[stays]
    columns = np.concatenate([old_columns, new.exception_columns])[order]
    old, added = (
        held.exception_elements.reshape(-1, format.element_nbytes) for held in (arrays, new)
    )
    elements = np.concatenate([old[stays], added])[order].reshape(-1)
    marked_rows, first = np.unique(exception_rows, return_index=True)
    marked = np.zeros(len(arrays.rows), np.bool_)
    marked[marked_rows] = True
    marks, ranks = _mark(marked)
    starts = np.append(first, exception_rows.size).astype(np.uint32)
    return packed, TableArrays(arrays.rows, marks, ranks, starts, columns, elements)


def _rows_of(arrays: TableArrays) -> NDArray[np.int64]:
    """The row of each exception."""
    bits = np.unpackbits(arrays.marks.view(np.uint8), bitorder="little")
    starts = arrays.exception_starts.astype(np.int64)
    return np.repeat(np.flatnonzero(bits), starts[1:] - starts[:-1])


def _require_few(n_exceptions: int) -> None:
    if n_exceptions > MAX_TABLE_EXCEPTIONS:
        raise ValueError(
            f"the table has {n_exceptions} exceptions; a packed table holds at most"
            f" {MAX_TABLE_EXCEPTIONS}: pack it in another way, or raw"
        )


def _mark(marked: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The marks of rows, and their ranks."""
    padded = np.pad(marked, (0, -len(marked) % 32))
    marks = np.packbits(padded, bitorder="little").view(np.uint32)
    return marks, rank_marks(marks)


def rank_marks(marks: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The marked rows before each 32nd row."""
    ranks = np.zeros(len(marks), np.uint32)
    np.cumsum(_count_bits(marks[:-1]), out=ranks[1:], dtype=np.uint32)
    return ranks


def _count_bits(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bits of each word that are set. (NumPy has a function for it since 2.0.)"""
    counts: NDArray[np.uint32] = (
        _BITS_OF_BYTES[words.view(np.uint8)].reshape(-1, 4).sum(1, dtype=np.uint32)
    )
    return counts


def gather_into(
    arrays: TableArrays,
    format: TableFormat,
    ids: NDArray[np.int64],
    dst: _Bytes,
    *,
    threads: int = 1,
) -> None:
    """Unpacks rows by number.

    Args:
        arrays: a packed table.
        format: its format.
        ids: int64, (n,): the numbers of the rows, in any order, each as often as wanted.
        dst: uint8, (n, bytes of a plain row), C-contiguous and writable: receives the rows. It must
            not share memory with the arrays.
        threads: how many threads of the core work on it.

    Raises:
        IndexError: there is no such row. Nothing was written.
        TypeError: an array is not of this kind.
        ValueError: an array has another length.
    """
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise TypeError("ids must be a contiguous int64 vector")
    _require_rows(dst, format.row_nbytes, "dst")
    if not dst.flags.writeable:
        raise TypeError("dst is read-only; give a writable array")
    bad = _core.gather_table_rows(*_in_memory(arrays, format), ids, dst, threads)
    _require_found(bad, ids, len(arrays.rows))


def sum_into(
    arrays: TableArrays,
    format: TableFormat,
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    dst: _Bytes,
    *,
    threads: int = 1,
) -> None:
    """Adds up rows, bag by bag, in the order of the ids and in fp32. Elements of 4 bytes are FP32;
    those of 2 bytes are BF16, and sums are rounded as FBGEMM does: half goes away from zero.

    Args:
        arrays: a packed table.
        format: its format.
        ids: int64, (n,): the numbers of the rows, in any order, each as often as wanted.
        starts: int64, (n_bags + 1,): where each bag begins among the ids, and where the last one
            ends; ascending, at most n. A bag may be empty.
        dst: uint8, (n_bags, bytes of a plain row), C-contiguous and writable: receives the sums. It
            must not share memory with the arrays.
        threads: how many threads of the core work on it.

    Raises:
        IndexError: there is no such row. Nothing was written.
        TypeError: an array is not of this kind.
        ValueError: an array has another length, or the elements have another size.
    """
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise TypeError("ids must be a contiguous int64 vector")
    _require_rows(dst, format.row_nbytes, "dst")
    bad = _core.sum_table_rows(*_in_memory(arrays, format), ids, starts, dst, threads)
    _require_found(bad, ids, len(arrays.rows))


def _in_memory(
    arrays: TableArrays, format: TableFormat
) -> tuple[_Words64, _Words64, _Bytes, _Words32, _Words32, _Words32, NDArray[np.uint16], _Bytes]:
    """A packed table as the core takes it."""
    return (
        *_fields_of(format),
        arrays.rows,
        arrays.marks,
        arrays.ranks,
        arrays.exception_starts,
        arrays.exception_columns,
        arrays.exception_elements,
    )


def _require_found(bad: int, ids: NDArray[np.int64], n_rows: int) -> None:
    if bad != len(ids):
        raise IndexError(
            f"id {ids[bad]}, number {bad} of {len(ids)}, is out of range: the table has"
            f" {n_rows} rows"
        )


def checksums(arrays: TableArrays, format: TableFormat) -> NDArray[np.uint32]:
    """The checksums of a table, as its file has them."""
    n_rows, step = len(arrays.rows), format.block_rows
    others: list[NDArray[Any]] = [arrays.marks, *arrays[3:]]
    blocks = [arrays.rows[start : start + step] for start in range(0, n_rows, step)]
    return np.array([crc32c(_bytes_of(array)) for array in (*others, *blocks)], np.uint32)


def _bytes_of(array: NDArray[Any]) -> _Bytes:
    return array.reshape(-1).view(np.uint8)


def encode_header(header: TableHeader, dtype_code: int) -> bytes:
    """The bytes of a header."""
    format = header.format
    flags = (
        TableFlag.SIGN * format.has_sign
        | TableFlag.ROW_VALUE * format.has_row_value
        | TableFlag.TRIPLES * format.has_triples
    )
    bits = format.code_bits, format.rest_bits, format.shift
    fixed = TABLE_HEADER.pack(
        *(TABLE_MAGIC, TABLE_VERSION, dtype_code, format.mode, flags, *bits, 0, format.n_columns),
        *(header.n_rows, format.stride, format.capacity, format.background, header.n_marked),
        *(header.n_exceptions, 0, 0),
    )
    values = np.array(format.values, f"<u{format.element_nbytes}").tobytes()
    data = bytearray(fixed + values + bytes(-len(values) % 8))
    struct.pack_into("<I", data, TABLE_CRC_OFFSET, crc32c(data))
    return bytes(data)


def decode_header(data: bytes) -> TableHeader:
    """The header that bytes are, checked against every rule of the page.

    Raises:
        CompatibilityError: it is of a later version.
        CorruptionError: it breaks a rule.
        TruncationError: it is too short.
    """
    if len(data) < TABLE_HEADER.size:
        raise TruncationError(
            f"table header: {len(data)} bytes; there must be {TABLE_HEADER.size} at least"
        )
    (magic, version, dtype_code, mode, flags, code_bits, rest_bits, shift, reserved, *rest) = (
        TABLE_HEADER.unpack_from(data)
    )
    n_columns, n_rows, stride, capacity, background, n_marked, n_exceptions, zero, crc = rest
    _require(magic == TABLE_MAGIC, 0, f"begins with {magic!r} instead of {TABLE_MAGIC!r}")
    _require(version != 0, 4, "has version 0; versions begin with 1")
    if version > TABLE_VERSION:
        raise CompatibilityError(
            f"table header: has version {version}; this release reads up to {TABLE_VERSION}:"
            " update Packhorse"
        )
    dtype = DTYPE_BY_CODE.get(dtype_code)
    _require(
        dtype is not None and dtype.bits in (8, 16, 32, 64),
        5,
        f"has dtype code {dtype_code}, which no table has",
    )
    assert dtype is not None
    _require(mode in TableMode.__members__.values(), 6, f"has mode {mode}; it must be 0 to 3")
    _require(flags < 8, 7, f"has flags {flags:#x}; only bits 0 to 2 may be set")
    _require(code_bits <= 8, 8, f"has codes of {code_bits} bits; 8 is the most")
    _require(reserved == zero == 0, 11, "has reserved bytes that are not 0")
    nbytes = dtype.bits // 8 << code_bits
    n_total = TABLE_HEADER.size + nbytes + -nbytes % 8
    if len(data) < n_total:
        raise TruncationError(f"table header: {len(data)} bytes; it says that it has {n_total}")
    _require(len(data) == n_total, 0, f"has {len(data)} bytes instead of {n_total}")
    held = bytearray(data)
    struct.pack_into("<I", held, TABLE_CRC_OFFSET, 0)
    _require(crc == crc32c(held), TABLE_CRC_OFFSET, "does not match its checksum")
    values = np.frombuffer(data, f"<u{dtype.bits // 8}", 1 << code_bits, TABLE_HEADER.size)
    _require(not any(data[TABLE_HEADER.size + nbytes :]), 64, "has padding that is not 0")
    _require(stride != 0, 24, "has stride 0")
    format = TableFormat(
        *(TableMode(mode), dtype.bits, n_columns, tuple(map(int, values)), rest_bits, shift),
        *(bool(flags & TableFlag.SIGN), capacity, background, bool(flags & TableFlag.ROW_VALUE)),
        *(bool(flags & TableFlag.TRIPLES), stride),
    )
    words = _why_invalid(format)
    _require(words is None, 6, str(words))
    _require(n_rows <= MAX_TABLE_ROWS, 16, f"has {n_rows} rows; {MAX_TABLE_ROWS} is the most")
    _require(n_marked <= n_rows, 40, f"has {n_marked} marked rows of {n_rows}")
    _require(format.mode is not TableMode.RAW or n_marked == 0, 40, "has exceptions of raw rows")
    _require(
        n_marked <= n_exceptions <= min(MAX_TABLE_EXCEPTIONS, n_marked * n_columns),
        48,
        f"has {n_exceptions} exceptions in {n_marked} rows",
    )
    return TableHeader(dtype.name, format, n_rows, n_marked, n_exceptions)


def _require(condition: bool, offset: int, words: str) -> None:
    if not condition:
        raise CorruptionError(f"table header: {words} (byte {offset})")


def _why_invalid(format: TableFormat) -> str | None:
    """Which rule the fields of a format break; None if they break none."""
    mode, w, b = format.mode, format.element_bits, format.packed_bits
    n, is_list = format.n_columns, format.mode is TableMode.LIST
    plain = (format.code_bits, format.shift, format.has_sign, format.values) == (0, 0, False, (0,))
    most = LIST_END if is_list else MAX_TABLE_COLUMNS
    rules = [
        (w in (8, 16, 32, 64), f"elements of {w} bits"),
        (1 <= n <= most, f"{n} columns; there must be 1 to {most}"),
        (
            mode is not TableMode.RAW or (plain and format.rest_bits == w),
            "codes or parts of elements",
        ),
        (len(format.values) in (1 << i for i in range(9)), f"{len(format.values)} values"),
        (
            format.has_sign <= format.rest_bits <= w - format.code_bits,
            f"a rest of {format.rest_bits} bits",
        ),
        (format.shift + format.rest_bits <= w, f"a rest that is moved by {format.shift} bits"),
        (all(0 <= value < 1 << w for value in format.values), "values of more bits than elements"),
        (
            all(value & format.rest_mask == 0 for value in format.values),
            "values with a bit of the rest",
        ),
        (mode is not TableMode.DENSE or b >= 1, "packed elements without a bit"),
        (mode is TableMode.DENSE or not format.has_triples, "triples"),
        (
            not format.has_triples
            or (format.code_bits == TRIPLE_CODE_BITS and format.rest_bits % 8 <= 4),
            f"triples of codes of {format.code_bits} bits beside {format.rest_bits} bits",
        ),
        (
            not format.has_triples or set(format.values[TRIPLE_CODES:]) == set(format.values[:1]),
            f"triples of more than {TRIPLE_CODES} values",
        ),
        (mode is TableMode.DENSE or not format.has_sign, "a sign of the rest"),
        (not format.is_sparse or b in (0, 8, w), f"stored elements of {b} bits"),
        (not format.has_row_value or (format.is_sparse and b == 0), "row values beside elements"),
        (format.is_sparse or format.capacity == format.background == 0, "a background or capacity"),
        (not format.is_sparse or 1 <= format.capacity <= n, f"room for {format.capacity} elements"),
        (0 <= format.background < 1 << w, "a background of more bits than elements"),
        (format.stride % TABLE_STRIDE_ALIGNMENT == 0, f"stride {format.stride}"),
        (
            format.stride >= format.content_nbytes,
            f"stride {format.stride}, less than its rows need",
        ),
        (format.stride < 1 << 32, f"stride {format.stride}"),
    ]
    return next(
        (f"{mode.name.lower()} rows cannot have {words}" for holds, words in rules if not holds),
        None,
    )


def check_arrays(header: TableHeader, arrays: TableArrays, crcs: NDArray[np.uint32]) -> None:
    """Checks the arrays of a table from elsewhere against every rule of the page.

    Raises:
        CorruptionError: a rule is broken; the message names the array, and the rows of a damaged
            block.
    """
    format, n_rows = header.format, header.n_rows
    _check_lengths(header, arrays, crcs)
    names = ("marks", "exception_starts", "exception_columns", "exception_elements")
    found = checksums(arrays, format)
    for i in np.flatnonzero(found != crcs):
        if i < len(names):
            raise CorruptionError(f"packed table: {names[i]} does not match its checksum")
        first = (int(i) - len(names)) * format.block_rows
        last = min(first + format.block_rows, n_rows) - 1
        raise CorruptionError(f"packed table: rows {first} to {last} do not match their checksum")
    marks, starts = arrays.marks, arrays.exception_starts.astype(np.int64)
    if n_rows % 32 and marks[-1] >> np.uint32(n_rows % 32):
        raise CorruptionError("packed table: marks go beyond the last row")
    if int(_count_bits(marks).sum()) != header.n_marked:
        raise CorruptionError(f"packed table: marks are not those of {header.n_marked} rows")
    if not np.array_equal(arrays.ranks, rank_marks(marks)):
        raise CorruptionError("packed table: ranks do not follow from marks")
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != header.n_exceptions or (counts <= 0).any():
        raise CorruptionError("packed table: exception_starts do not ascend from 0 to the last one")
    columns = arrays.exception_columns.astype(np.int64)
    if (columns >= format.n_columns).any():
        raise CorruptionError(
            f"packed table: exception_columns has {columns.max()}, and the table has"
            f" {format.n_columns} columns"
        )
    ascends = np.diff(columns) > 0
    ascends[starts[1:-1] - 1] = True  # a row begins
    if not ascends.all():
        number = int(np.argmin(ascends)) + 1
        raise CorruptionError(f"packed table: exception_columns does not ascend at number {number}")


def _check_lengths(header: TableHeader, arrays: TableArrays, crcs: NDArray[np.uint32]) -> None:
    format, n_rows = header.format, header.n_rows
    words = -(-n_rows // 32)
    expected = [
        ((n_rows, format.stride), np.uint8),
        ((words,), np.uint32),
        ((words,), np.uint32),
        ((header.n_marked + 1,), np.uint32),
        ((header.n_exceptions,), np.uint16),
        ((header.n_exceptions * format.element_nbytes,), np.uint8),
        ((4 + -(-n_rows // format.block_rows),), np.uint32),
    ]
    names = (*TableArrays._fields, "crcs")
    held: list[NDArray[Any]] = [*arrays, crcs]
    for name, array, (shape, dtype) in zip(names, held, expected, strict=True):
        if array.shape != shape or array.dtype != dtype:
            raise CorruptionError(
                f"packed table: {name} has shape {array.shape} and dtype {array.dtype}; it must be"
                f" {shape} and {np.dtype(dtype)}"
            )
        if not array.flags.c_contiguous:
            raise TypeError(f"{name} must be C-contiguous; copy it first")


def _require_rows(rows: _Bytes, nbytes: int, what: str) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
        raise TypeError(f"{what} must be a uint8 matrix, the bytes of rows")
    if not rows.flags.c_contiguous:
        raise TypeError(f"{what} must be C-contiguous; copy it first")
    if rows.shape[1] != nbytes:
        raise ValueError(f"{what} has rows of {rows.shape[1]} bytes; they must have {nbytes}")
