"""Rows that packed tables must hold, formats for them, and packed tables that are broken."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from packhorse.reference.tables import TableArrays
from packhorse.table_layout import TableFormat, TableMode

__all__ = [
    "answer_from_table",
    "broken_tables",
    "dense_formats",
    "float_rows",
    "integer_rows",
    "named_tables",
    "noise",
    "sparse_rows",
]

_Rows = NDArray[np.unsignedinteger]
_EXPONENTS = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52), "F8_E4M3": (4, 3)}
_TYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def float_rows(dtype: str, n_rows: int, n_columns: int, seed: int = 7) -> _Rows:
    """The bits of floats as embeddings have them, with zeros and a few of every special kind."""
    rng = np.random.default_rng(seed)
    values = 0.05 * rng.standard_normal((n_rows, n_columns))
    values[rng.random(values.shape) < 0.01] = 0.0
    special = [np.inf, -np.inf, np.nan, -0.0, 1e-30, 300.0]
    for row, value in enumerate(special[:n_rows]):
        values[row, row % n_columns] = value
    kind = np.dtype(_TYPES[dtype])
    with np.errstate(over="ignore"):
        return values.astype(kind).view(f"u{kind.itemsize}")


def integer_rows(bits: int, n_rows: int, n_columns: int, seed: int = 5) -> _Rows:
    """Small numbers, and a few large ones."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 100, (n_rows, n_columns)).astype(f"u{bits // 8}")
    rows[rng.random(rows.shape) < 0.02] = (1 << bits) - 1
    return rows


def sparse_rows(
    bits: int, n_rows: int, n_columns: int, background: int = 0, seed: int = 3
) -> _Rows:
    """Rows of a background with a few other elements; one row has none, and one has many."""
    rng = np.random.default_rng(seed)
    rows = np.full((n_rows, n_columns), background, f"u{bits // 8}")
    differs = rng.random(rows.shape) < 0.04
    differs[:1] = False
    differs[1:2] = rng.random(n_columns) < 0.6
    rows[differs] = rng.integers(0, 200, int(differs.sum()))
    rows[-1] = np.where(rows[-1] != background, 9, background)  # equal elements
    return rows


def noise(bits: int, n_rows: int, n_columns: int, seed: int = 1) -> _Rows:
    """Any bits."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 1 << bits, (n_rows, n_columns), dtype=np.uint64, endpoint=False).astype(
            f"u{bits // 8}"
        )
        if bits < 64
        else rng.integers(0, 1 << 63, (n_rows, n_columns), dtype=np.uint64) * 2 + 1
    )


def _exponent_format(dtype: str, n_columns: int, code_bits: int) -> TableFormat:
    exponent_bits, mantissa_bits = _EXPONENTS[dtype]
    bits = 1 + exponent_bits + mantissa_bits
    last = (1 << exponent_bits - 1) - 4  # about 0.05
    first = max(last - (1 << code_bits) + 3, 0)
    values = tuple(e << mantissa_bits for e in range(first, first + (1 << code_bits)))
    return TableFormat(
        TableMode.DENSE, bits, n_columns, values, rest_bits=mantissa_bits + 1, has_sign=True
    )


def _with_triples(format: TableFormat) -> TableFormat:
    """The same with at most 10 values, in triples."""
    values = format.values[2:12]
    return replace(format, values=values + values[:1] * 6, has_triples=True, stride=0)


def named_tables(n_rows: int = 40, n_columns: int = 37) -> dict[str, tuple[_Rows, TableFormat]]:
    """Tables of every mode, dtype and kind of stored element, each with exceptions if it can have
    any."""
    found: dict[str, tuple[_Rows, TableFormat]] = {}
    for dtype, code_bits in product(_EXPONENTS, (3, 4)):
        format = _exponent_format(dtype, n_columns, code_bits)
        if format.packed_bits < format.element_bits:
            rows = float_rows(dtype, n_rows, n_columns)
            found[f"{dtype} exponents of {code_bits} bits"] = rows, format
        if code_bits == 4 and format.rest_bits % 8 <= 4:
            rows = float_rows(dtype, n_rows, n_columns)
            found[f"{dtype} exponents in triples"] = rows, _with_triples(format)
    for bits in (8, 16, 32, 64):
        rows = integer_rows(bits, n_rows, n_columns)
        raw = TableFormat(TableMode.RAW, bits, n_columns, rest_bits=bits)
        found[f"raw, {bits} bits"] = rows, raw
        found[f"small integers, {bits} bits"] = (
            rows,
            TableFormat(TableMode.DENSE, bits, n_columns, (0,), rest_bits=7),
        )
        indices = TableFormat(TableMode.DENSE, bits, n_columns, tuple(range(3, 67)))
        found[f"indices, {bits} bits"] = rows, indices
        found[f"indices in triples, {bits} bits"] = rows, _with_triples(indices)
        found |= _sparse_tables(bits, n_rows, n_columns)
    shifted = float_rows("BF16", n_rows, n_columns).astype(np.uint32) << np.uint32(16)
    values = tuple(e << 23 for e in range(110, 126))
    found["BF16 kept as F32"] = (
        shifted,
        TableFormat(TableMode.DENSE, 32, n_columns, values, 8, 16, True),
    )
    return found


def _sparse_tables(
    bits: int, n_rows: int, n_columns: int
) -> Iterator[tuple[str, tuple[_Rows, TableFormat]]]:
    codes = tuple(range(min(256, 1 << bits)))
    for mode in (TableMode.BITMAP, TableMode.LIST):
        room = {"capacity": min(6, n_columns), "background": 7}
        kinds = {
            "elements": TableFormat(mode, bits, n_columns, rest_bits=bits, **room),
            "one element": TableFormat(mode, bits, n_columns, (9,), **room),
            "row values": TableFormat(mode, bits, n_columns, has_row_value=True, **room),
        }
        if bits > 8:
            kinds["indices"] = TableFormat(mode, bits, n_columns, codes[:128] * 2, **room)
        rows = sparse_rows(bits, n_rows, n_columns, background=7)
        for name, format in kinds.items():
            yield f"{mode.name.lower()} and {name}, {bits} bits", (rows, format)


def dense_formats(bits: int, n_columns: int, code_bits: int) -> Iterator[TableFormat]:
    """Dense formats of every number of packed bits, with the rest at the bottom, in the middle and
    at the top, with and without a sign. The codes stand for the highest bits that are free."""
    for packed_bits in range(max(1, code_bits), bits + 1):
        rest_bits = packed_bits - code_bits
        shifts = {0, (bits - rest_bits) // 2, bits - rest_bits}
        for shift, has_sign in product(sorted(shifts), (False, True)):
            if has_sign and not 1 <= rest_bits <= bits - shift:
                continue
            base = TableFormat(TableMode.DENSE, bits, n_columns, (0,), rest_bits, shift, has_sign)
            free = [bit for bit in range(bits) if not base.rest_mask >> bit & 1][::-1][:code_bits]
            values = tuple(
                sum((code >> i & 1) << bit for i, bit in enumerate(free))
                for code in range(1 << code_bits)
            )
            format = TableFormat(
                *(TableMode.DENSE, bits, n_columns, values, rest_bits, shift, has_sign),
            )
            yield format
            if code_bits == 4 and rest_bits % 8 <= 4:
                values = values[:10] + values[:1] * 6
                yield replace(format, values=values, has_triples=True, stride=0)


def broken_tables(arrays: TableArrays, format: TableFormat) -> Iterator[tuple[str, TableArrays]]:
    """Arrays that break one rule each, and the words of the fault. The table has exceptions in two
    rows at least, and two in one of them."""
    n_rows = len(arrays.rows)
    marks = arrays.marks.copy()
    marks[-1] |= np.uint32(1 << n_rows % 32)
    yield "mark", arrays._replace(marks=marks)
    yield "ranks", arrays._replace(ranks=arrays.ranks + np.uint32(1))
    starts = arrays.exception_starts.copy()
    starts[0] = 1
    yield "starts", arrays._replace(exception_starts=starts)
    starts = arrays.exception_starts.copy()
    starts[1] = starts[2]
    yield "starts", arrays._replace(exception_starts=starts)
    columns = arrays.exception_columns.copy()
    columns[0] = format.n_columns
    yield "columns?", arrays._replace(exception_columns=columns)
    counts = np.diff(arrays.exception_starts.astype(np.int64))
    first = int(arrays.exception_starts[int(np.argmax(counts > 1))])
    columns = arrays.exception_columns.copy()
    columns[first + 1] = columns[first]
    yield "ascend", arrays._replace(exception_columns=columns)


def answer_from_table(connection: Connection, table: Any) -> None:
    """Gathers rows of BF16 for another process, until it sends None."""
    while (ids := connection.recv()) is not None:
        connection.send(table.gather(ids).view(np.int16))
