"""Packed tables in C++: the bytes and elements of the slow coder, on every instruction set."""

import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import each
from codec_battery import ISAS, forced, guarded, guarded_output
from numpy.typing import NDArray
from table_samples import broken_tables, dense_formats, named_tables, noise

from packhorse.codecs.content import crc32c
from packhorse.codecs.tables import (
    TableArrays,
    TableHeader,
    TablePacker,
    check_arrays,
    checksums,
    decode_header,
    encode_header,
    gather_into,
)
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reference.tables import encode_table
from packhorse.table_layout import TABLE_CRC_OFFSET, TableFormat, TableMode

TABLES = named_tables()
ROWS = np.empty((0, 32), np.uint8)
Rows = NDArray[np.unsignedinteger]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


def bytes_of(rows: Rows) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def pack(rows: Rows, format: TableFormat, threads: int = 1) -> TableArrays:
    """Packs between pages that must not be touched."""
    n = len(rows)
    memory = np.frombuffer(guarded_output(n * format.stride), np.uint8).reshape(n, format.stride)
    packer = TablePacker(format, memory, threads=threads)
    source = np.frombuffer(guarded(rows.tobytes()), np.uint8)
    packer.add(source.reshape(n, format.row_nbytes))
    return packer.finish()


def gather(arrays: TableArrays, format: TableFormat, ids: NDArray[np.int64]) -> Rows:
    """Gathers between pages that must not be touched."""
    dst = np.frombuffer(guarded_output(len(ids) * format.row_nbytes), np.uint8)
    gather_into(arrays, format, ids, dst.reshape(len(ids), format.row_nbytes))
    return dst.view(f"u{format.element_nbytes}").reshape(len(ids), format.n_columns)


def check(rows: Rows, format: TableFormat) -> None:
    """The arrays are those of the slow coder, and rows come back in any order."""
    arrays, slow = pack(rows, format), encode_table(rows, format)
    for name, array in arrays._asdict().items():
        assert array.tobytes() == getattr(slow, name).tobytes(), name
    ids = np.random.default_rng(2).integers(0, len(rows), 2 * len(rows) + 1)
    np.testing.assert_array_equal(gather(arrays, format, ids), rows[ids])


@each("name", TABLES)
def test_arrays_are_those_of_the_slow_coder(name: str, isa: str) -> None:
    check(*TABLES[name])


@pytest.mark.parametrize("n_columns", [1, 2, 15, 16, 17, 63, 64, 65, 131])
def test_odd_numbers_of_columns(n_columns: int, isa: str) -> None:
    for rows, format in named_tables(3, n_columns).values():
        check(rows, format)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_all_packed_sizes(bits: int, isa: str) -> None:
    rows = noise(bits, 3, 35)
    for code_bits in (0, 1, 3, 4, 5, 8):
        # Every instruction set has formats of every size; they take turns with the rest.
        for format in [*dense_formats(bits, 35, code_bits)][ISAS.index(isa) :: len(ISAS)]:
            arrays = pack(rows, format)
            ids = np.array([2, 0, 1, 2])
            np.testing.assert_array_equal(gather(arrays, format, ids), rows[ids])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_stored_elements_may_have_codes_of_8_bits_and_a_rest(bits: int, isa: str) -> None:
    values = tuple(value << bits - 8 for value in range(256))
    rows = np.where(noise(8, 5, 70) < 40, noise(bits, 5, 70), 0).astype(f"u{bits // 8}")
    for mode in (TableMode.BITMAP, TableMode.LIST):
        check(rows, TableFormat(mode, bits, 70, values, rest_bits=bits - 8, capacity=9))


def test_all_patterns_of_16_bits_come_back(isa: str) -> None:
    rows = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128)
    check(rows, replace(TABLES["BF16 exponents of 4 bits"][1], n_columns=128, stride=0))


def test_blocks_and_threads_make_no_difference() -> None:
    rows, format = named_tables(3000, 37)["BF16 exponents of 3 bits"]
    whole = pack(rows, format)
    memory = np.empty_like(whole.rows)
    packer = TablePacker(format, memory, threads=3)
    for start in range(0, 3000, 700):
        packer.add(bytes_of(rows[start : start + 700]))
    for one, other in zip(whole, packer.finish(), strict=True):
        np.testing.assert_array_equal(one, other)
    dst = np.empty((9000, format.row_nbytes), np.uint8)
    ids = np.random.default_rng(1).integers(0, 3000, 9000)
    gather_into(whole, format, ids, dst, threads=3)
    np.testing.assert_array_equal(dst, bytes_of(rows)[ids])


def test_a_table_without_rows() -> None:
    for rows, format in TABLES.values():
        arrays = pack(rows[:0], format)
        assert gather(arrays, format, np.empty(0, np.int64)).shape == (0, format.n_columns)
        with pytest.raises(IndexError, match="id 0, number 0 of 1, is out of range"):
            gather(arrays, format, np.zeros(1, np.int64))


@pytest.mark.parametrize("bad", [-1, 40, 1 << 40, -(1 << 62)])
def test_ids_out_of_range_are_refused_before_anything_is_written(bad: int) -> None:
    rows, format = TABLES["raw, 16 bits"]
    arrays = pack(rows, format)
    dst = np.full((3, format.row_nbytes), 0xAA, np.uint8)
    with pytest.raises(IndexError, match=f"id {bad}, number 1 of 3, .* has 40 rows"):
        gather_into(arrays, format, np.array([5, bad, 7]), dst)
    assert (dst == 0xAA).all()


@each("name", TABLES)
def test_damaged_rows_never_leave_their_output(name: str, isa: str) -> None:
    """Also with exceptions that point anywhere."""
    rows, format = TABLES[name]
    arrays = pack(rows, format)
    rng = np.random.default_rng(4)
    ids = np.arange(len(rows))
    for _ in range(20):
        wild = TableArrays(*(_randomised(array, rng) for array in arrays))
        guarded = np.full((len(ids) + 2, format.row_nbytes), 0xAA, np.uint8)
        gather_into(wild, format, ids, guarded[1:-1])
        assert (guarded[[0, -1]] == 0xAA).all()


def _randomised(array: NDArray[np.generic], rng: np.random.Generator) -> NDArray[np.generic]:
    wild = array.copy()
    data = wild.reshape(-1).view(np.uint8)
    n = max(1, data.size // 4)
    data[rng.integers(0, max(data.size, 1), n if data.size else 0)] = rng.integers(
        0, 256, n if data.size else 0
    )
    return wild


def _header(name: str) -> tuple[TableHeader, bytes]:
    rows, format = TABLES[name]
    arrays = pack(rows, format)
    dtype = {8: "U8", 16: "BF16", 32: "F32", 64: "F64"}[format.element_bits]
    n_marked, n = len(arrays.exception_starts) - 1, len(arrays.exception_columns)
    header = TableHeader(dtype, format, len(rows), n_marked, n)
    return header, encode_header(header, DTYPE_BY_NAME[dtype].code)


@each("name", TABLES)
def test_headers_come_back(name: str) -> None:
    header, data = _header(name)
    assert decode_header(data) == header
    for length in range(len(data)):
        with pytest.raises(TruncationError):
            decode_header(data[:length])
    with pytest.raises(CorruptionError):
        decode_header(data + b"\0")


def test_any_flipped_bit_of_a_header_is_found() -> None:
    _, data = _header("BF16 exponents of 3 bits")
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptionError, CompatibilityError)):
            decode_header(bytes(wrong))


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"\x88", "begins with"),
        (4, b"\0", "version 0"),
        (5, b"\xff", "dtype code 255"),
        (5, b"\x18", "dtype code 24"),  # F4
        (6, b"\x04", "mode 4"),
        (7, b"\x09", "flags 0x9"),
        (7, b"\x05", "triples of codes of 3 bits"),
        (8, b"\x09", "codes of 9 bits"),
        (9, b"\x0f", "a rest of 15 bits"),
        (9, b"\0", "a rest of 0 bits"),
        (10, b"\x09", "moved by 9 bits"),
        (11, b"\x01", "reserved"),
        (12, b"\0\0\0\0", "0 columns"),
        (12, b"\x01\0\x01\0", "65537 columns"),
        (16, b"\xff" * 8, "rows"),
        (24, b"\0\0\0\0", "stride 0"),
        (24, b"\x21\0\0\0", "stride 33"),
        (24, b"\x20\0\0\0", "less than its rows need"),
        (28, b"\x01\0\0\0", "a background"),
        (32, b"\x01", "a background"),
        (40, b"\xff", "marked rows of 40"),
        (48, b"\0\0", "exceptions in"),
        (56, b"\x01", "reserved"),
        (64, b"\x01", "a bit of the rest"),
    ],
)
def test_fields_that_break_a_rule_are_refused(offset: int, value: bytes, words: str) -> None:
    _, data = _header("BF16 exponents of 3 bits")
    wrong = bytearray(data)
    wrong[offset : offset + len(value)] = value
    struct.pack_into("<I", wrong, TABLE_CRC_OFFSET, 0)
    struct.pack_into("<I", wrong, TABLE_CRC_OFFSET, crc32c(wrong))
    with pytest.raises(CorruptionError, match=words):
        decode_header(bytes(wrong))


def test_values_that_triples_cannot_have_are_refused() -> None:
    _, format = TABLES["BF16 exponents in triples"]
    with pytest.raises(ValueError, match="triples of more than 10 values"):
        TablePacker(replace(format, values=format.values[:10] + format.values[:6][::-1]), ROWS)
    with pytest.raises(ValueError, match="triples of codes of 4 bits beside 7 bits"):
        TablePacker(replace(format, rest_bits=7), ROWS)
    sparse = replace(TABLES["bitmap and one element, 16 bits"][1], has_triples=True)
    with pytest.raises(ValueError, match="bitmap rows cannot have triples"):
        TablePacker(sparse, ROWS)


def test_raw_rows_have_no_exceptions() -> None:
    _, data = _header("raw, 16 bits")
    wrong = bytearray(data)
    wrong[40] = wrong[48] = 1
    struct.pack_into("<I", wrong, TABLE_CRC_OFFSET, 0)
    struct.pack_into("<I", wrong, TABLE_CRC_OFFSET, crc32c(wrong))
    with pytest.raises(CorruptionError, match="exceptions of raw rows"):
        decode_header(bytes(wrong))


def test_a_later_version_is_told() -> None:
    _, data = _header("raw, 16 bits")
    with pytest.raises(CompatibilityError, match="version 2; this release reads up to 1"):
        decode_header(data[:4] + b"\x02" + data[5:])


@each("name", TABLES)
def test_arrays_from_elsewhere_are_checked(name: str) -> None:
    header, _ = _header(name)
    rows, format = TABLES[name]
    arrays = pack(rows, format)
    crcs = checksums(arrays, format)
    check_arrays(header, arrays, crcs)
    for field, array in arrays._asdict().items():
        if not array.size:
            continue
        wrong = array.copy()
        wrong.reshape(-1).view(np.uint8)[-1] ^= 0x80
        with pytest.raises(CorruptionError, match=field if field != "rows" else "rows 0 to 39"):
            check_arrays(header, arrays._replace(**{field: wrong}), crcs)
        with pytest.raises(CorruptionError, match=f"{field} has shape"):
            check_arrays(header, arrays._replace(**{field: array[:-1]}), crcs)


def test_broken_arrays_with_good_checksums_are_refused() -> None:
    header, _ = _header("BF16 exponents of 3 bits")
    rows, format = TABLES["BF16 exponents of 3 bits"]
    for what, wrong in broken_tables(encode_table(rows, format), format):
        flat = wrong.exception_elements.view(np.uint8)
        arrays = TableArrays(*wrong[:-1], flat)
        with pytest.raises(CorruptionError, match=what):
            check_arrays(header, arrays, checksums(arrays, format))


def test_the_damaged_block_is_named() -> None:
    rows, format = named_tables(20_000, 37)["raw, 64 bits"]
    arrays = pack(rows, format)
    header = TableHeader("F64", format, len(rows), 0, 0)
    crcs = checksums(arrays, format)
    assert len(crcs) > 6
    first = 2 * format.block_rows
    arrays.rows[first + 5, 3] ^= 1
    last = first + format.block_rows - 1
    with pytest.raises(CorruptionError, match=f"rows {first} to {last} do not match"):
        check_arrays(header, arrays, crcs)


def test_wrong_arguments_are_refused() -> None:
    rows, format = TABLES["raw, 16 bits"]
    arrays = pack(rows, format)
    with pytest.raises(ValueError, match="raw rows cannot have codes or parts of elements"):
        TablePacker(replace(format, values=(0, 0)), arrays.rows)
    with pytest.raises(ValueError, match="rows of 80 bytes; they must have 96"):
        TablePacker(format, np.ascontiguousarray(arrays.rows[:, :80]))
    with pytest.raises(TypeError, match="uint8 matrix"):
        TablePacker(format, arrays.rows.view(np.int8))
    packer = TablePacker(format, arrays.rows.copy())
    with pytest.raises(ValueError, match="40 rows are left; add them first"):
        packer.finish()
    packer.add(bytes_of(rows))
    with pytest.raises(ValueError, match="1 rows more; only 0 are left"):
        packer.add(bytes_of(rows[:1]))
    dst = np.empty((1, 74), np.uint8)
    with pytest.raises(TypeError, match="int64"):
        gather_into(arrays, format, np.zeros(1, np.int32), dst)
    dst.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        gather_into(arrays, format, np.zeros(1, np.int64), dst)
    assert format.mode is TableMode.RAW
