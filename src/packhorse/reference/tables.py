"""Section 14 of docs/format.md: tables in memory, encoded and decoded the slow way, with NumPy.

This module is written from the page alone; the C++ codec and the kernels are tested against it. The
page defines every bit that an encoder writes for given fields, so an encoder is here too.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse.errors import CorruptionError
from packhorse.table_layout import LIST_END, TRIPLE_CODES, TableFormat, TableMode

__all__ = ["TableArrays", "check_table", "decode_table", "encode_table"]

_Elements = NDArray[Any]  # unsigned, of the bits of an element


class TableArrays(NamedTuple):
    """The arrays of a packed table; shapes and element types are those of the page."""

    rows: NDArray[np.uint8]
    marks: NDArray[np.uint32]
    ranks: NDArray[np.uint32]
    exception_starts: NDArray[np.uint32]
    exception_columns: NDArray[np.uint16]
    exception_elements: _Elements


def encode_table(elements: _Elements, format: TableFormat) -> TableArrays:
    """The arrays of a table, given as the bits of its elements: n_rows x n_columns."""
    n_rows = len(elements)
    fill = 0xFF if format.mode is TableMode.LIST else 0
    rows = np.full((n_rows, format.stride), fill, np.uint8)
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(elements):
        words = [int(element) for element in row]
        content, left = _encode_row(words, format)
        rows[number, : len(content)] = np.frombuffer(content, np.uint8)
        found += [(number, column, words[column]) for column in left]
    return _with_exceptions(rows, found, format)


def _encode_row(words: list[int], format: TableFormat) -> tuple[bytes, list[int]]:
    """The content of a row, and the columns of its exceptions."""
    if format.mode is TableMode.RAW:
        return b"".join(_bytes(word, format.element_nbytes) for word in words), []
    if format.mode is TableMode.DENSE:
        packed = [_pack(word, format) for word in words]
        left = [column for column, element in enumerate(packed) if element is None]
        return _join_planes([element or 0 for element in packed], format), left
    return _encode_sparse_row(words, format)


def _pack(word: int, format: TableFormat) -> int | None:
    """The packed element of an element; None if there is none."""
    for code, value in enumerate(format.values):
        if word & ~format.rest_mask == value:
            moved = format.rest_bits - format.has_sign
            rest = word >> format.shift & (1 << moved) - 1
            if format.has_sign:
                rest |= word >> format.element_bits - 1 << moved
            return code << format.rest_bits | rest
    return None


def _join_planes(packed: list[int], format: TableFormat) -> bytes:
    whole = format.plane_bits // 8
    content = b"".join(bytes(p >> 8 * i & 0xFF for p in packed) for i in range(whole))
    lowest = 8 * whole
    for bits in format.narrow_planes:
        content += _narrow_plane([p >> lowest for p in packed], bits)
        lowest += bits
    if format.has_triples:
        codes = [p >> format.rest_bits for p in packed]
        t = format.n_triples
        codes += [0] * (3 * t - len(codes))
        triples = [codes[i] + 10 * codes[i + t] + 100 * codes[i + 2 * t] for i in range(t)]
        content += bytes(triple & 0xFF for triple in triples)
        content += _narrow_plane([triple >> 8 for triple in triples], 2)
    return content


def _narrow_plane(numbers: list[int], bits: int) -> bytes:
    """The lowest bits of numbers."""
    slice_nbytes = bits * -(-len(numbers) // 8)
    plane = bytearray(slice_nbytes)
    for column, number in enumerate(numbers):
        field = number & (1 << bits) - 1
        plane[column % slice_nbytes] |= field << bits * (column // slice_nbytes)
    return bytes(plane)


def _encode_sparse_row(words: list[int], format: TableFormat) -> tuple[bytes, list[int]]:
    differing = [column for column, word in enumerate(words) if word != format.background]
    row_value = words[differing[0]] if differing else 0
    stored: list[tuple[int, bytes]] = []
    for column in differing:
        entry = _stored_bytes(words[column], row_value, format)
        if entry is not None and len(stored) < format.capacity:
            stored.append((column, entry))
    content = _bytes(row_value, format.element_nbytes) if format.has_row_value else b""
    if format.mode is TableMode.LIST:
        content += b"".join(_bytes(column, 2) + entry for column, entry in stored)
    else:
        bitmap = bytearray(8 * -(-format.n_columns // 64))
        for column, _ in stored:
            bitmap[column // 8] |= 1 << column % 8
        content += bitmap + b"".join(entry for _, entry in stored)
    held = {column for column, _ in stored}
    return content, [column for column in differing if column not in held]


def _stored_bytes(word: int, row_value: int, format: TableFormat) -> bytes | None:
    """What a sparse row stores of an element besides its column; None if it cannot."""
    if format.has_row_value:
        return b"" if word == row_value else None
    packed = _pack(word, format)
    return None if packed is None else _bytes(packed, format.packed_bits // 8)


def _with_exceptions(
    rows: NDArray[np.uint8], found: list[tuple[int, int, int]], format: TableFormat
) -> TableArrays:
    n_rows = len(rows)
    marks = np.zeros(-(-n_rows // 32), np.uint32)
    marked = sorted({row for row, _, _ in found})
    for row in marked:
        marks[row // 32] |= np.uint32(1 << row % 32)
    starts = np.zeros(len(marked) + 1, np.uint32)
    counts = {row: 0 for row in marked}
    for row, _, _ in found:
        counts[row] += 1
    starts[1:] = np.cumsum(list(counts.values()), dtype=np.uint32)
    elements = np.array([word for _, _, word in found], f"u{format.element_nbytes}")
    columns = np.array([column for _, column, _ in found], np.uint16)
    return TableArrays(rows, marks, _ranks(marks), starts, columns, elements)


def _ranks(marks: NDArray[np.uint32]) -> NDArray[np.uint32]:
    counts = [int(word).bit_count() for word in marks]
    return np.array([sum(counts[:i]) for i in range(len(counts))], np.uint32)


def decode_table(arrays: TableArrays, format: TableFormat) -> _Elements:
    """The bits of the elements, n_rows x n_columns.

    Raises:
        CorruptionError: the arrays break a rule of the page.
    """
    check_table(arrays, format)
    n_rows = len(arrays.rows)
    out = np.zeros((n_rows, format.n_columns), f"u{format.element_nbytes}")
    for number in range(n_rows):
        out[number] = _decode_row(arrays.rows[number].tobytes(), format)
    for k, row in enumerate(_marked_rows(arrays.marks)):
        span = slice(arrays.exception_starts[k], arrays.exception_starts[k + 1])
        out[row, arrays.exception_columns[span]] = arrays.exception_elements[span]
    return out


def _decode_row(row: bytes, format: TableFormat) -> list[int]:
    size, n = format.element_nbytes, format.n_columns
    if format.mode is TableMode.RAW:
        return [_number(row[size * i : size * (i + 1)]) for i in range(n)]
    if format.mode is TableMode.DENSE:
        return [_unpack(packed, format) for packed in _part_planes(row, format)]
    words = [format.background] * n
    value_nbytes = size if format.has_row_value else 0
    row_value = _number(row[:value_nbytes])
    at, packed_nbytes = format.first_nbytes, format.packed_bits // 8
    if format.mode is TableMode.BITMAP:
        bitmap = row[value_nbytes:at]
        columns = [c for c in range(n) if bitmap[c // 8] >> c % 8 & 1]
        _require(len(columns) <= format.capacity, "a bitmap has too many bits")
        places = [at + i * packed_nbytes for i in range(len(columns))]
    else:
        entries = range(at, at + format.capacity * format.entry_nbytes, format.entry_nbytes)
        columns = [_number(row[place : place + 2]) for place in entries]
        columns = columns[: columns.index(LIST_END)] if LIST_END in columns else columns
        _require(all(c < n for c in columns), "a column is out of range")
        places = [place + 2 for place in entries]
    for column, place in zip(columns, places, strict=False):
        packed = _number(row[place : place + packed_nbytes])
        words[column] = row_value if format.has_row_value else _unpack(packed, format)
    return words


def _part_planes(row: bytes, format: TableFormat) -> list[int]:
    n, whole = format.n_columns, format.plane_bits // 8
    packed = [sum(row[i * n + c] << 8 * i for i in range(whole)) for c in range(n)]
    at, lowest = n * whole, 8 * whole
    for bits in format.narrow_planes:
        for c, field in enumerate(_part_narrow_plane(row[at:], bits, n)):
            packed[c] |= field << lowest
        at, lowest = at + format.narrow_nbytes(bits), lowest + bits
    if format.has_triples:
        t = format.n_triples
        for i, high in enumerate(_part_narrow_plane(row[at + t :], 2, t)):
            triple = row[at + i] | high << 8
            _require(triple < 1000, "a triple has no codes")
            for column, code in ((i, triple), (i + t, triple // 10), (i + 2 * t, triple // 100)):
                if column < n:
                    packed[column] |= code % TRIPLE_CODES << format.rest_bits
    return packed


def _part_narrow_plane(plane: bytes, bits: int, n: int) -> list[int]:
    nbytes = bits * -(-n // 8)
    return [plane[c % nbytes] >> bits * (c // nbytes) & (1 << bits) - 1 for c in range(n)]


def _unpack(packed: int, format: TableFormat) -> int:
    rest = packed & (1 << format.rest_bits) - 1
    element = format.values[packed >> format.rest_bits]
    moved = format.rest_bits - format.has_sign
    if format.has_sign:
        element |= rest >> moved << format.element_bits - 1
    return element | (rest & (1 << moved) - 1) << format.shift


def check_table(arrays: TableArrays, format: TableFormat) -> None:
    """Checks arrays from elsewhere against every rule of the page that its checksums leave open.

    Raises:
        CorruptionError: a rule is broken.
    """
    for value in format.values:
        _require(value & format.rest_mask == 0, "a value has a bit of the rest")
    if format.has_triples:
        others = format.values[TRIPLE_CODES:]
        _require(others == 6 * format.values[:1], "a triple has more than 10 values")
    n_rows = len(arrays.rows)
    _require(arrays.rows.shape == (n_rows, format.stride), "rows have another stride")
    _require(len(arrays.marks) == -(-n_rows // 32), "there is another number of marks")
    marked = _marked_rows(arrays.marks)
    _require(all(row < n_rows for row in marked), "a mark is beyond the rows")
    _require(np.array_equal(arrays.ranks, _ranks(arrays.marks)), "the ranks do not fit")
    starts = arrays.exception_starts.astype(np.int64)
    n = len(arrays.exception_columns)
    _require(len(starts) == len(marked) + 1, "there is another number of starts")
    _require(starts[0] == 0 and starts[-1] == n, "the starts do not fit")
    _require(len(arrays.exception_elements) == n, "there is another number of elements")
    _require(bool((np.diff(starts) > 0).all()), "the starts do not ascend")
    columns = arrays.exception_columns.astype(np.int64)
    _require(bool((columns < format.n_columns).all()), "a column is out of range")
    for first, stop in pairwise(starts.tolist()):
        _require(bool((np.diff(columns[first:stop]) > 0).all()), "columns do not ascend")


def _marked_rows(marks: NDArray[np.uint32]) -> list[int]:
    return [32 * i + bit for i, word in enumerate(marks) for bit in range(32) if word >> bit & 1]


def _bytes(number: int, nbytes: int) -> bytes:
    return number.to_bytes(nbytes, "little")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise CorruptionError(f"packed table: {fault}")
