"""Invariant Bit Packing, the rival: rows come back, and have the size that its rules give."""

import numpy as np
import pytest
from table_samples import float_rows, noise, sparse_rows

from packhorse.reference.ibp import decode_row, encode_row, fit_best, fit_ibp, row_nbytes

TABLES = {
    "BF16 in words of 64 bits": float_rows("BF16", 60, 64).view(np.uint64),
    "BF16 in words of 32 bits": float_rows("BF16", 60, 66).view(np.uint32),
    "F32": float_rows("F32", 60, 33),
    "sparse": sparse_rows(32, 60, 70),
    "noise": noise(32, 20, 5),
    "one column": noise(64, 20, 1),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_come_back_and_have_the_size_that_is_said(name: str) -> None:
    words = TABLES[name]
    for fit in (fit_best(words), fit_ibp(words, 0.8)):
        sizes = row_nbytes(words, fit)
        for row, nbytes in zip(words, sizes, strict=True):
            data = encode_row(row, fit)
            if data is None:
                assert nbytes == row.nbytes
                continue
            assert len(data) == nbytes
            np.testing.assert_array_equal(decode_row(data, len(row), fit), row)


def test_a_bit_is_invariant_if_more_than_the_threshold_agree() -> None:
    words = np.array([[0b1100], [0b1100], [0b1101], [0b1010]], np.uint32)
    fit = fit_ibp(words, 0.7)
    # Bits 3 and above 3 are the same in all rows; bits 0, 1 and 2 in three of four.
    assert fit.mask.tolist() == [0xFFFFFFFF]
    assert fit.value.tolist() == [0b1100]
    assert fit_ibp(words, 0.75).mask.tolist() == [0xFFFFFFF8]
    assert fit_ibp(words, 1.0).mask.tolist() == [0]  # never more than all


def test_embeddings_become_a_fourth_shorter() -> None:
    """The ratio that the authors' method has on BF16 weights is about 1.3."""
    rng = np.random.default_rng(5)
    rows = (0.02 * rng.standard_normal((2000, 384))).astype(np.float32).view(np.uint32) >> 16
    words = rows.astype(np.uint16).view(np.uint64)
    ratio = words.nbytes / row_nbytes(words, fit_best(words)).sum()
    assert 1.25 < ratio < 1.35
