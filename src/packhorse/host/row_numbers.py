"""Numbers of rows as callers give them, checked."""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from packhorse.framework import framework_of

__all__ = ["numbers_of", "require_rows"]

_INT64 = np.iinfo(np.int64)


def numbers_of(ids: Any) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Ids as a contiguous vector in host memory, and their shape.

    Raises:
        IndexError: an id is beyond all numbers of 64 bits with a sign.
        TypeError: they are not integers.
    """
    if framework_of(ids) is not None and not isinstance(ids, np.ndarray):
        ids = ids.detach().cpu().numpy()
    try:
        array = np.asarray(ids)
    except ValueError:
        raise TypeError("ids must have a shape; these are lists of different lengths") from None
    if array.size == 0 and not isinstance(ids, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        _refuse(ids, array)
    if array.dtype == np.uint64 and array.size and array.max() > _INT64.max:
        raise IndexError(f"id {array.max()} is out of range")
    return np.ascontiguousarray(array.reshape(-1), np.int64), array.shape


def _refuse(ids: Any, array: NDArray[Any]) -> NoReturn:
    """Says why ids are no integers. NumPy makes objects or floats of Python's large ones."""
    is_array = isinstance(ids, np.ndarray)
    for each in () if is_array else np.asarray(ids, object).flat:
        if type(each) is int and not _INT64.min <= each <= _INT64.max:
            raise IndexError(f"id {each} is out of range")
    what = array.dtype if is_array or array.dtype.kind in "bfc" else type(ids).__name__
    remedy = "; mask.nonzero() has the numbers of a mask" if array.dtype.kind == "b" else ""
    raise TypeError(f"ids must be integers, not {what}{remedy}")


def require_rows(numbers: NDArray[np.int64], n_rows: int) -> None:
    """Checks that a table has rows.

    Raises:
        IndexError: it has not.
    """
    bad = (numbers < 0) | (numbers >= n_rows)
    if bad.any():
        raise IndexError(f"id {numbers[bad][0]} is out of range: the table has {n_rows} rows")
