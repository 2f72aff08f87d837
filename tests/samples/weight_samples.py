"""Matrices of BF16 elements that packed weights must hold, and packed weights that are broken."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from packhorse.layout import WeightFormat
from packhorse.reference.weights import WeightArrays

__all__ = ["MATRICES", "broken_arrays", "model_rows"]


def model_rows(n_rows: int, n_columns: int, seed: int = 7) -> NDArray[np.uint16]:
    """Normal rows with log-normal scales, as in the linear layers of language models."""
    rng = np.random.default_rng(seed)
    scale = 0.02 * np.exp(0.4 * rng.standard_normal((n_rows, 1)))
    values = (scale * rng.standard_normal((n_rows, n_columns))).astype(ml_dtypes.bfloat16)
    return values.view(np.uint16)


def _with_specials() -> NDArray[np.uint16]:
    """Rows of models with a few elements of every kind that no window holds."""
    elements = model_rows(9, 611).copy()
    rng = np.random.default_rng(3)
    specials = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0080]
    for row in elements[:8]:
        row[rng.choice(row.size, 20, replace=False)] = np.repeat(specials, 2)
    elements[4] = 0
    elements[5] = 0x8000
    elements[6] = 0x7FC1
    elements[7] = 0x0003
    return elements


def _any_patterns(n_rows: int, n_columns: int) -> NDArray[np.uint16]:
    return np.random.default_rng(1).integers(0, 1 << 16, (n_rows, n_columns), np.uint16)


def _near_the_ends() -> NDArray[np.uint16]:
    """Rows with exponents at both ends of their range."""
    exponents = np.array([[0, 1, 2, 15, 16], [254, 253, 240, 239, 255], [254, 254, 247, 246, 1]])
    return np.repeat(exponents << 7 | 0x55, 7, axis=1).astype(np.uint16)


MATRICES: dict[str, Callable[[], NDArray[np.uint16]]] = {
    "rows of models": lambda: model_rows(64, 4096),
    "all patterns": lambda: np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024),
    "all patterns in a row": lambda: np.arange(1 << 16, dtype=np.uint16).reshape(1, 1 << 16),
    "any patterns, odd rows": lambda: _any_patterns(63, 333),
    "one column": lambda: _any_patterns(1000, 1),
    "one element": lambda: np.array([[0x3F80]], np.uint16),
    "no rows": lambda: np.empty((0, 40), np.uint16),
    "specials": _with_specials,
    "zeros": lambda: np.zeros((5, 100), np.uint16),
    "ends of the exponents": _near_the_ends,
    **{f"{n} columns": lambda n=n: model_rows(3, n) for n in (15, 16, 17, 31, 33, 127, 129, 255)},
}


def broken_arrays(arrays: WeightArrays, format: WeightFormat) -> list[tuple[str, WeightArrays]]:
    """Arrays with faults, each with a pattern that the message must match. The matrix must have
    exceptions in its first row, and padding."""
    broken: list[tuple[str, WeightArrays]] = []

    def change(what: str, field: str, index: object, value: object) -> None:
        array = getattr(arrays, field).copy()
        array[index] = value
        broken.append((what, arrays._replace(**{field: array})))

    for field in WeightArrays._fields:
        array = getattr(arrays, field)
        shape = "shape|fit"
        broken.append((shape, arrays._replace(**{field: array[:-1]})))
        broken.append((shape, arrays._replace(**{field: array.astype(np.int64)})))
    change("first exponent", "first_exponents", 1, format.max_first + 1)
    if format.min_first:
        change("first exponent", "first_exponents", 0, format.min_first - 1)
    change("fit", "exception_starts", 0, 1)
    change("descend", "exception_starts", 2, arrays.exceptions.size + 1)
    change("descend", "exception_starts", 2, -1)
    column = int(arrays.exceptions[0]) & 0xFFFF
    change("column|hole|ascend", "exceptions", 0, 0x7F80FFFF)
    change("hole", "low_bytes", (_row_of(arrays, 0), column), 0x80)
    change("ascend", "exceptions", slice(0, 2), arrays.exceptions[1::-1])
    if format.first_code:
        row, column = np.argwhere(arrays.high_bits & 7 == 0)[-1]
        change("mantissa|hole", "low_bytes", (row, column), 0x01)
    change("padding|mantissa", "low_bytes", (0, -1), 1)
    change("padding", "high_bits", (0, -1), 0xFF)
    return broken


def _row_of(arrays: WeightArrays, index: int) -> int:
    return int(np.searchsorted(arrays.exception_starts, index, side="right")) - 1
