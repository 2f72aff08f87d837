"""Packed tables by the slow coder: every row is restored, and broken arrays are refused."""

import numpy as np
import pytest
from table_samples import broken_tables, dense_formats, named_tables, noise

from packhorse.errors import CorruptionError
from packhorse.reference.tables import decode_table, encode_table
from packhorse.table_layout import TableFormat, TableMode

TABLES = named_tables()


@pytest.mark.parametrize("name", TABLES)
def test_every_row_comes_back(name: str) -> None:
    rows, format = TABLES[name]
    np.testing.assert_array_equal(decode_table(encode_table(rows, format), format), rows)


@pytest.mark.parametrize("n_columns", [1, 2, 7, 9, 64, 65])
def test_odd_numbers_of_columns_come_back(n_columns: int) -> None:
    for rows, format in named_tables(5, n_columns).values():
        np.testing.assert_array_equal(decode_table(encode_table(rows, format), format), rows)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_all_packed_sizes_come_back(bits: int) -> None:
    rows = noise(bits, 2, 9)
    for code_bits in (0, 2, 5):
        for format in dense_formats(bits, 9, code_bits):
            np.testing.assert_array_equal(decode_table(encode_table(rows, format), format), rows)


def test_rows_are_as_short_as_the_page_says() -> None:
    window = tuple(e << 7 for e in range(16))
    for code_bits, content, stride in ((4, 576, 576), (3, 528, 544)):
        values = window[: 1 << code_bits]
        format = TableFormat(TableMode.DENSE, 16, 384, values, rest_bits=8, has_sign=True)
        assert (format.content_nbytes, format.stride) == (content, stride)
    glosses = TableFormat(TableMode.LIST, 32, 3703, capacity=14, has_row_value=True)
    assert glosses.stride == glosses.content_nbytes == 32
    pictures = TableFormat(TableMode.BITMAP, 32, 784, tuple(range(256)), capacity=500)
    assert pictures.content_nbytes == 104 + 500


def test_broken_arrays_are_refused() -> None:
    rows, format = TABLES["BF16 exponents of 3 bits"]
    for what, wrong in broken_tables(encode_table(rows, format), format):
        with pytest.raises(CorruptionError, match=what):
            decode_table(wrong, format)


def test_a_value_with_a_bit_of_the_rest_is_refused() -> None:
    rows, format = TABLES["raw, 16 bits"]
    wrong = TableFormat(TableMode.RAW, 16, 37, (1,), rest_bits=16)
    with pytest.raises(CorruptionError, match="a bit of the rest"):
        decode_table(encode_table(rows, format), wrong)
