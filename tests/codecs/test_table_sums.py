"""Sums of packed rows, beside sums of the plain ones."""

from collections.abc import Iterator

import numpy as np
import pytest
from codec_battery import ISAS, forced
from numpy.typing import NDArray
from table_samples import named_tables

from packhorse.codecs.tables import TableArrays, TablePacker, sum_into
from packhorse.table_layout import TableFormat

TABLES = {
    name: (rows, format)
    for name, (rows, format) in named_tables().items()
    if format.element_nbytes in (2, 4)
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


def pack(rows: NDArray[np.unsignedinteger], format: TableFormat) -> TableArrays:
    packer = TablePacker(format, np.zeros((len(rows), format.stride), np.uint8))
    packer.add(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))
    return packer.finish()


def sums_of(
    rows: NDArray[np.unsignedinteger], ids: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.unsignedinteger]:
    """Added up one by one in fp32. BF16 is rounded to the nearest, half away from zero."""
    is_bf16 = rows.dtype == np.uint16
    wide = rows.astype(np.uint32) << 16 if is_bf16 else rows
    numbers = wide.view(np.float32)
    sums = np.zeros((len(starts) - 1, rows.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for bag in range(len(sums)):
            for i in range(starts[bag], starts[bag + 1]):
                sums[bag] += numbers[ids[i]]
    bits = sums.view(np.uint32)
    return ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16) if is_bf16 else bits


def are_alike(a: NDArray[np.unsignedinteger], b: NDArray[np.unsignedinteger]) -> bool:
    """The same bits; but processors choose the bits of what is not a number."""
    kind = np.uint32(0x7F80) if a.dtype == np.uint16 else np.uint32(0x7F800000)
    is_number = (a & kind) != kind
    return np.array_equal(a[is_number], b[is_number])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_are_those_of_plain_rows(name: str, threads: int, isa: str) -> None:
    rows, format = TABLES[name]
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 9, 70)
    counts[:3], counts[-2:] = 0, 0  # empty bags at both ends
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = rng.integers(0, len(rows), int(starts[-1]))
    dst = np.full((len(counts) + 2, format.row_nbytes), 0xAA, np.uint8)
    sum_into(pack(rows, format), format, ids, starts, dst[1:-1], threads=threads)
    assert (dst[[0, -1]] == 0xAA).all()
    assert are_alike(dst[1:-1].view(rows.dtype), sums_of(rows, ids, starts))


@pytest.mark.parametrize("name", TABLES)
def test_starts_that_point_anywhere_never_leave_the_output(name: str, isa: str) -> None:
    rows, format = TABLES[name]
    arrays, rng = pack(rows, format), np.random.default_rng(5)
    ids = rng.integers(0, len(rows), 30)
    for _ in range(20):
        starts = rng.integers(-(1 << 62), 1 << 62, 9) >> rng.integers(0, 60, 9)
        dst = np.full((10, format.row_nbytes), 0xAA, np.uint8)
        sum_into(arrays, format, ids, starts, dst[1:-1])
        assert (dst[[0, -1]] == 0xAA).all()


def test_a_bad_id_is_refused_before_anything_is_written() -> None:
    rows, format = next(iter(TABLES.values()))
    dst = np.full((1, format.row_nbytes), 0xAA, np.uint8)
    with pytest.raises(IndexError, match=f"id {len(rows)}, number 1 of 2"):
        sum_into(pack(rows, format), format, np.array([0, len(rows)]), np.array([0, 2]), dst)
    assert (dst == 0xAA).all()


def test_wrong_arguments_are_refused() -> None:
    rows, format = next(iter(TABLES.values()))
    arrays, ids = pack(rows, format), np.zeros(2, np.int64)
    dst = np.zeros((1, format.row_nbytes), np.uint8)
    with pytest.raises(ValueError, match="a start for each bag, and an end"):
        sum_into(arrays, format, ids, np.array([0, 1, 2]), dst)
    with pytest.raises(TypeError, match="int64 vector"):
        sum_into(arrays, format, ids.astype(np.int32), np.array([0, 2]), dst)
    rows, format = next(each for each in named_tables().values() if each[1].element_nbytes == 1)
    dst = np.zeros((1, format.row_nbytes), np.uint8)
    with pytest.raises(ValueError, match="FP32 or BF16"):
        sum_into(pack(rows, format), format, ids, np.array([0, 2]), dst)
