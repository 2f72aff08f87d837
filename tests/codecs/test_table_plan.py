"""The way to pack a table: what a sample of its rows promises is what packing gives."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from packhorse.codecs.table_plan import choose_way, list_ways
from packhorse.codecs.tables import TablePacker
from packhorse.table_layout import TableMode


def normal_rows(dtype: object, n_columns: int, scale: float = 0.05) -> NDArray[np.unsignedinteger]:
    """Rows like those of embeddings."""
    rng = np.random.default_rng(6)
    rows = (scale * rng.standard_normal((3000, n_columns))).astype(np.dtype(dtype))
    return rows.view(f"u{rows.dtype.itemsize}")


def word_rows() -> NDArray[np.uint32]:
    """Words of texts, each with the same weight, as bags of words have them."""
    rng = np.random.default_rng(6)
    rows = np.zeros((3000, 3703), np.float32)
    for row in rows:
        words = rng.choice(3703, 1 + rng.poisson(4), replace=False)
        row[words] = 1 / len(words)
    return rows.view(np.uint32)


@pytest.mark.parametrize(
    ("rows", "dtype", "mode", "pulled"),
    [
        (normal_rows(ml_dtypes.bfloat16, 384), "BF16", TableMode.DENSE, 544),
        (normal_rows(np.float16, 384), "F16", TableMode.DENSE, 704),
        (normal_rows(np.float32, 384), "F32", TableMode.DENSE, 1312),
        (normal_rows(ml_dtypes.bfloat16, 384).astype(np.uint32) << 16, "F32", TableMode.DENSE, 576),
        (normal_rows(ml_dtypes.float8_e4m3fn, 128), "F8_E4M3", TableMode.RAW, 128),
        (np.random.default_rng(1).integers(0, 256, (900, 384), np.uint8), "I8", TableMode.RAW, 384),
        (word_rows(), "F32", TableMode.LIST, 33),
        (np.full((100, 64), 5, np.int64).view(np.uint64), "I64", TableMode.DENSE, 32),
        (np.arange(80_000, dtype=np.uint32).reshape(-1, 8) % 1000, "U32", TableMode.RAW, 32),
        (np.arange(80_000, dtype=np.uint32).reshape(-1, 80) % 1000, "U32", TableMode.DENSE, 128),
        (np.arange(192_000, dtype=np.uint8).reshape(-1, 192) % 9, "U8", TableMode.DENSE, 96),
    ],
    ids=[
        *("bf16", "f16", "f32", "bf16 as f32", "f8", "i8", "words", "constant", "short rows"),
        *("integers", "few values"),
    ],
)
def test_the_fewest_bytes_are_pulled(
    rows: NDArray[np.unsignedinteger], dtype: str, mode: TableMode, pulled: int
) -> None:
    way = choose_way(rows, dtype)
    assert way.format.mode is mode
    assert pulled - 1 <= way.pulled[32] <= pulled + 1


def test_packing_gives_what_the_plan_promises() -> None:
    samples = [(word_rows(), "F32"), (normal_rows(ml_dtypes.bfloat16, 384), "BF16")]
    for rows, dtype in samples:
        for way in list_ways(rows, dtype):
            packed = np.empty((len(rows), way.format.stride), np.uint8)
            packer = TablePacker(way.format, packed)
            packer.add(rows.view(np.uint8))
            arrays = packer.finish()
            promised = way.fast_nbytes * len(rows)
            assert arrays.fast_nbytes <= 1.01 * promised + 2000, way
            # Exceptions of dense rows may be in fewer rows than by chance.
            assert arrays.fast_nbytes >= 0.7 * promised - 2000, way


def test_lines_of_128_bytes_change_the_choice() -> None:
    rows = normal_rows(ml_dtypes.float8_e4m3fn, 256)
    assert choose_way(rows, "F8_E4M3", 32).pulled[32] == 224
    assert choose_way(rows, "F8_E4M3", 128).format.mode is TableMode.RAW


def test_exceptions_in_fast_memory_are_limited() -> None:
    rows = normal_rows(ml_dtypes.bfloat16, 384)
    ways = {way.words: way for way in list_ways(rows, "BF16")}
    three, ten = ways["exponents, codes of 3 bits"], ways["exponents, three codes in 10 bits"]
    assert three.format.content_nbytes < ten.format.content_nbytes
    assert not three.is_allowed
    assert ten.is_allowed


def test_a_table_without_rows_is_raw() -> None:
    assert choose_way(np.empty((0, 5), np.uint16), "BF16").format.mode is TableMode.RAW
