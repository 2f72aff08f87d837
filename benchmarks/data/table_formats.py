"""Formats of packed tables, as docs/benchmarks_host.md has them, for models of time and counts of
instructions."""

from dataclasses import replace

from packhorse.table_layout import TableFormat, TableMode

__all__ = ["FORMATS"]

_BF16, _F32 = 7, 23  # bits of a mantissa


def _exponents(bits: int, n_columns: int, mantissa: int, first: int = 112) -> TableFormat:
    values = tuple(e << mantissa for e in range(first, first + 16))
    rest = mantissa + 1
    return TableFormat(TableMode.DENSE, bits, n_columns, values, rest, 0, True)


def _triples(format: TableFormat) -> TableFormat:
    values = format.values[:10] + format.values[:1] * 6
    return replace(format, values=values, has_triples=True, stride=0)


FORMATS = {
    "BF16, codes of 4 bits": _exponents(16, 384, _BF16),
    "FP32, codes of 4 bits": _exponents(32, 384, _F32),
    "BF16, three codes in 10 bits": _triples(_exponents(16, 384, _BF16)),
    "bitmap and indices": TableFormat(TableMode.BITMAP, 32, 784, tuple(range(256)), capacity=400),
    "list and row value": TableFormat(TableMode.LIST, 32, 3703, capacity=14, has_row_value=True),
    "FP32, three codes in 10 bits": _triples(_exponents(32, 384, _F32)),
    "BF16, 2,048 columns": _exponents(16, 2048, _BF16),
    "raw": TableFormat(TableMode.RAW, 16, 384, rest_bits=16),
}
