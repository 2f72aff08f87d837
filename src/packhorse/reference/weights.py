"""Section 12 of docs/format.md: weights in memory, encoded and decoded the slow way, with NumPy.

Written from the page alone: the C++ packer and the kernels are tested against it. What the encoder
of the page writes is defined to the bit, so it is here too.
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

    mantissas: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    first_exponents: NDArray[np.uint8]
    exception_starts: NDArray[np.int32]
    exceptions: NDArray[np.int32]


def encode_weights(elements: NDArray[np.uint16], form: WeightFormat) -> WeightArrays:
    """The arrays of a matrix, given as the bits of its BF16 elements."""
    n_rows, n_columns = elements.shape
    exponents = (elements >> _MANTISSA_BITS & 0xFF).astype(np.int64)
    signs_mantissas = (elements >> 8 & 0x80 | elements & 0x7F).astype(np.uint8)
    zeros = (elements & 0x7FFF == 0) if form.first_code else np.zeros(elements.shape, bool)
    firsts = np.array(
        [_choose_first(row[~is_zero], form) for row, is_zero in zip(exponents, zeros, strict=True)],
        np.int64,
    )
    codes = exponents - firsts[:, None]
    inside = (codes >= form.first_code) & (codes < 1 << form.code_bits)
    exceptional = ~inside & ~zeros
    padding = ((0, 0), (0, form.n_padded(n_columns) - n_columns))
    rows, columns = np.nonzero(exceptional)
    entries = elements[rows, columns].astype(np.uint32) << 16 | columns.astype(np.uint32)
    counts = np.bincount(rows, minlength=n_rows)
    return WeightArrays(
        np.pad(np.where(exceptional, 0, signs_mantissas), padding).astype(np.uint8),
        _join_codes(np.pad(np.where(inside, codes, 0), padding), form),
        firsts.astype(np.uint8),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        entries.astype(np.uint32).view(np.int32),
    )


def _choose_first(exponents: NDArray[np.int64], form: WeightFormat) -> int:
    """Of all windows that leave the fewest exceptions, the lowest."""
    counts = np.bincount(exponents, minlength=_SPECIAL_EXPONENT + 1)
    firsts = range(form.min_first, form.max_first + 1)
    covered = [counts[f + form.first_code : f + (1 << form.code_bits)].sum() for f in firsts]
    return form.min_first + int(np.argmax(covered))


def _join_codes(codes: NDArray[np.int64], form: WeightFormat) -> NDArray[np.uint8]:
    slices = np.split(codes, form.n_slices, axis=1)
    if form is layout.W12:
        return (slices[0] | slices[1] << 4).astype(np.uint8)
    low = np.bitwise_or.reduce([(code & 1) << i for i, code in enumerate(slices)])
    # Slices 2i and 2i + 1 side by side are a slice of the upper bits.
    pairs = [np.concatenate(slices[i : i + 2], axis=1) for i in range(0, 8, 2)]
    high = np.bitwise_or.reduce([(pair >> 1) << 2 * i for i, pair in enumerate(pairs)])
    return np.concatenate([low, high], axis=1).astype(np.uint8)


def _part_codes(codes: NDArray[np.uint8], form: WeightFormat) -> NDArray[np.uint8]:
    """A row of codes for each row, padding included."""
    if form is layout.W12:
        return np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.uint8)
    n_steps = codes.shape[1] // 3
    low = np.concatenate([codes[:, :n_steps] >> i & 1 for i in range(8)], axis=1)
    high = np.concatenate([codes[:, n_steps:] >> 2 * i & 3 for i in range(4)], axis=1)
    codes = low | high << 1
    return codes


def decode_weights(arrays: WeightArrays, form: WeightFormat, n_columns: int) -> NDArray[np.uint16]:
    """The bits of the BF16 elements, n_rows x n_columns.

    Raises:
        CorruptionError: the arrays break a rule of the page.
    """
    check_weights(arrays, form, n_columns)
    codes = _part_codes(arrays.codes, form).astype(np.uint16)
    exponents = np.where(
        codes >= form.first_code, arrays.first_exponents[:, None] + codes, np.uint16(0)
    )
    mantissas = arrays.mantissas.astype(np.uint16)
    elements = (mantissas & 0x80) << 8 | exponents << _MANTISSA_BITS | mantissas & 0x7F
    rows, columns, values = _exceptions(arrays)
    elements[rows, columns] = values
    return elements[:, :n_columns].astype(np.uint16)


def _exceptions(
    arrays: WeightArrays,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint16]]:
    """Row, column and element of each."""
    entries = arrays.exceptions.view(np.uint32)
    counts = np.diff(arrays.exception_starts)
    rows = np.repeat(np.arange(counts.size), counts)
    return rows, (entries & 0xFFFF).astype(np.int64), (entries >> 16).astype(np.uint16)


def check_weights(arrays: WeightArrays, form: WeightFormat, n_columns: int) -> None:
    """Every rule of the page for arrays from elsewhere.

    Raises:
        CorruptionError: a rule is broken.
    """
    n_rows = arrays.first_exponents.size
    shapes = [
        (n_rows, form.n_padded(n_columns)),
        (n_rows, form.n_code_bytes(n_columns)),
        (n_rows,),
        (n_rows + 1,),
        (arrays.exceptions.size,),
    ]
    dtypes = [np.uint8, np.uint8, np.uint8, np.int32, np.int32]
    held: list[NDArray[Any]] = list(arrays)
    for name, array, dtype, shape in zip(WeightArrays._fields, held, dtypes, shapes, strict=True):
        _require(array.dtype == dtype and array.shape == shape, f"{name} has another shape")
    firsts = arrays.first_exponents
    in_range = (firsts >= form.min_first) & (firsts <= form.max_first)
    _require(bool(in_range.all()), "a first exponent is out of range")
    starts = arrays.exception_starts.astype(np.int64)
    _require(starts[0] == 0 and starts[-1] == arrays.exceptions.size, "the starts do not fit")
    _require(bool((np.diff(starts) >= 0).all()), "the starts descend")
    rows, columns, _ = _exceptions(arrays)
    _require(bool((columns < n_columns).all()), "a column is out of range")
    same_row = rows[1:] == rows[:-1]
    _require(bool((columns[1:] > columns[:-1])[same_row].all()), "columns do not ascend")
    codes = _part_codes(arrays.codes, form)
    holes = (codes == 0) & (arrays.mantissas == 0)
    _require(bool(holes[rows, columns].all()), "an exception has no hole")
    if form.first_code:
        signed_zeros = (codes > 0) | (arrays.mantissas & 0x7F == 0)
        _require(bool(signed_zeros.all()), "code 0 has a mantissa")
    _require(bool(holes[:, n_columns:].all()), "padding is not zero")


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise CorruptionError(f"packed weight: {fault}")
