"""Section 12 of docs/format.md: weights in memory, encoded and decoded the slow way, with NumPy.

This module is written from the page alone; the C++ packer and the kernels are tested against it.
The page defines every bit that an encoder writes, so an encoder is here too.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import WeightFormat

__all__ = ["WeightArrays", "check_weights", "decode_weights", "encode_weights"]

_MANTISSA_BITS = 7
_SPECIAL_EXPONENT = 255  # of infinities and NaNs


class WeightArrays(NamedTuple):
    """The arrays of a packed weight; shapes and element types are those of the page."""

    low_bytes: NDArray[np.uint8]
    high_bits: NDArray[np.uint8]
    first_exponents: NDArray[np.uint8]
    exception_starts: NDArray[np.int32]
    exceptions: NDArray[np.int32]


def encode_weights(elements: NDArray[np.uint16], format: WeightFormat) -> WeightArrays:
    """The arrays of a matrix, given as the bits of its BF16 elements."""
    n_rows, n_columns = elements.shape
    exponents = (elements >> _MANTISSA_BITS & 0xFF).astype(np.int64)
    zeros = (elements & 0x7FFF == 0) if format.first_code else np.zeros(elements.shape, bool)
    firsts = np.array(
        [
            _choose_first(row[~is_zero], format)
            for row, is_zero in zip(exponents, zeros, strict=True)
        ],
        np.int64,
    )
    codes = exponents - firsts[:, None]
    inside = (codes >= format.first_code) & (codes < 1 << format.code_bits)
    exceptional = ~inside & ~zeros
    signs = (elements >> 15).astype(np.int64)
    packed = (
        signs << format.bits - 1 | np.where(inside, codes, 0) << _MANTISSA_BITS | elements & 0x7F
    )
    packed[exceptional] = 0
    packed = np.pad(packed, ((0, 0), (0, format.n_padded(n_columns) - n_columns)))
    rows, columns = np.nonzero(exceptional)
    entries = elements[rows, columns].astype(np.uint32) << 16 | columns.astype(np.uint32)
    counts = np.bincount(rows, minlength=n_rows)
    return WeightArrays(
        (packed & 0xFF).astype(np.uint8),
        _join_high_bits(packed >> 8, format),
        firsts.astype(np.uint8),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        entries.astype(np.uint32).view(np.int32),
    )


def _choose_first(exponents: NDArray[np.int64], format: WeightFormat) -> int:
    """The lowest of the windows that leave the fewest exceptions."""
    counts = np.bincount(exponents, minlength=_SPECIAL_EXPONENT + 1)
    firsts = range(format.min_first, format.max_first + 1)
    covered = [counts[f + format.first_code : f + (1 << format.code_bits)].sum() for f in firsts]
    return format.min_first + int(np.argmax(covered))


def _join_high_bits(high: NDArray[np.int64], format: WeightFormat) -> NDArray[np.uint8]:
    slices = np.split(high, format.n_slices, axis=1)
    if format is layout.W12:
        return (slices[0] | slices[1] << 4).astype(np.uint8)
    signs = np.bitwise_or.reduce([(part >> 2) << i for i, part in enumerate(slices)])
    # Slices 2i and 2i + 1 side by side are a slice of the bits below.
    pairs = [np.concatenate(slices[i : i + 2], axis=1) for i in range(0, 8, 2)]
    rest = np.bitwise_or.reduce([(pair & 3) << 2 * i for i, pair in enumerate(pairs)])
    return np.concatenate([signs, rest], axis=1).astype(np.uint8)


def _packed_elements(arrays: WeightArrays, format: WeightFormat) -> NDArray[np.uint16]:
    """The packed elements, n_rows x n_padded."""
    bits = arrays.high_bits
    if format is layout.W12:
        high = np.concatenate([bits & 15, bits >> 4], axis=1)
    else:
        n_steps = bits.shape[1] // 3
        signs = np.concatenate([bits[:, :n_steps] >> i & 1 for i in range(8)], axis=1)
        rest = np.concatenate([bits[:, n_steps:] >> 2 * i & 3 for i in range(4)], axis=1)
        high = signs << 2 | rest
    packed: NDArray[np.uint16] = high.astype(np.uint16) << np.uint16(8) | arrays.low_bytes
    return packed


def decode_weights(
    arrays: WeightArrays, format: WeightFormat, n_columns: int
) -> NDArray[np.uint16]:
    """The bits of the BF16 elements, n_rows x n_columns.

    Raises:
        CorruptionError: the arrays break a rule of the page.
    """
    check_weights(arrays, format, n_columns)
    packed = _packed_elements(arrays, format)
    codes = packed >> _MANTISSA_BITS & (1 << format.code_bits) - 1
    exponents = np.where(
        codes >= format.first_code, arrays.first_exponents[:, None] + codes, np.uint16(0)
    )
    signs = packed >> format.bits - 1
    elements = signs << 15 | exponents << _MANTISSA_BITS | packed & 0x7F
    rows, columns, values = _exceptions(arrays)
    elements[rows, columns] = values
    return elements[:, :n_columns].astype(np.uint16)


def _exceptions(
    arrays: WeightArrays,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint16]]:
    """The row, column and element of each exception."""
    entries = arrays.exceptions.view(np.uint32)
    counts = np.diff(arrays.exception_starts)
    rows = np.repeat(np.arange(counts.size), counts)
    return rows, (entries & 0xFFFF).astype(np.int64), (entries >> 16).astype(np.uint16)


def check_weights(arrays: WeightArrays, format: WeightFormat, n_columns: int) -> None:
    """Checks arrays from elsewhere against every rule of the page.

    Raises:
        CorruptionError: a rule is broken.
    """
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
    for name, array, dtype, shape in zip(WeightArrays._fields, held, dtypes, shapes, strict=True):
        _require(array.dtype == dtype and array.shape == shape, f"{name} has another shape")
    firsts = arrays.first_exponents
    in_range = (firsts >= format.min_first) & (firsts <= format.max_first)
    _require(bool(in_range.all()), "a first exponent is out of range")
    starts = arrays.exception_starts.astype(np.int64)
    _require(starts[0] == 0 and starts[-1] == arrays.exceptions.size, "the starts do not fit")
    _require(bool((np.diff(starts) >= 0).all()), "the starts descend")
    rows, columns, _ = _exceptions(arrays)
    _require(bool((columns < n_columns).all()), "a column is out of range")
    same_row = rows[1:] == rows[:-1]
    _require(bool((columns[1:] > columns[:-1])[same_row].all()), "columns do not ascend")
    packed = _packed_elements(arrays, format)
    _require(bool((packed[rows, columns] == 0).all()), "an exception has no hole")
    if format.first_code:
        magnitudes = packed & (1 << format.bits - 1) - 1
        _require(
            bool((magnitudes[magnitudes < 1 << _MANTISSA_BITS] == 0).all()), "code 0 has a mantissa"
        )
    _require(bool((packed[:, n_columns:] == 0).all()), "padding is not zero")


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise CorruptionError(f"packed weight: {fault}")
