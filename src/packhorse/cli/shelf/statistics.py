"""Values of tensors: what one pass over blocks of them finds, and how they are told in JSON.

Complex numbers count by their magnitudes.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from packhorse.cli.shelf.rows import StatisticsRow

__all__ = ["describe_values", "plain_values"]


def describe_values(blocks: Iterable[Any]) -> StatisticsRow:
    """Describe values in one pass.

    Args:
        blocks: arrays of one dtype, of NumPy or of ml_dtypes.
    """
    n_values = n_nan = n_infinite = n_zero = 0
    low, high, total = None, None, np.longdouble(0)
    for block in blocks:
        values = _real(block)
        n_values += values.size
        n_zero += values.size - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            n_nan += int(np.count_nonzero(np.isnan(values)))
            n_infinite += int(np.count_nonzero(np.isinf(values)))
            values = values[np.isfinite(values)]
        if values.size:
            low = values.min() if low is None else min(low, values.min())
            high = values.max() if high is None else max(high, values.max())
            total += _sum(values)
    n_finite = n_values - n_nan - n_infinite
    if low is None or high is None:
        return StatisticsRow(n_values, n_nan, n_infinite, n_zero, None, None, None)
    mean = float(total / n_finite)
    return StatisticsRow(n_values, n_nan, n_infinite, n_zero, low.item(), high.item(), mean)


def _real(values: Any) -> Any:
    """Real numbers of a dtype that NumPy computes with, of the same values."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    if values.dtype.kind == "c":
        return np.abs(values.astype(np.complex128))  # whose magnitude cannot overflow
    return _numbers(values)


def _numbers(values: Any) -> Any:
    """Floats of 16 bits and less that only ml_dtypes has are exact in float32."""
    return values.astype(np.float32) if values.dtype.kind == "V" else values


def _sum(values: Any) -> Any:
    with np.errstate(over="ignore"):
        total = values.sum(dtype=np.float64)
    return total if np.isfinite(total) else values.sum(dtype=np.longdouble)


def plain_values(values: Any) -> Any:
    """An array as nested lists of numbers and booleans that JSON has; all else becomes strings."""
    return _plain(_numbers(values).tolist())


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
