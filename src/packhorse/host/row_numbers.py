"""Numbers of rows as callers give them, checked."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse.framework import framework_of

__all__ = ["numbers_of", "require_rows"]


def numbers_of(ids: Any) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Ids as a contiguous vector in host memory, and their shape.

    Raises:
        IndexError: an id is beyond all numbers of 64 bits with a sign.
        TypeError: they are not integers.
    """
    if framework_of(ids) is not None and not isinstance(ids, np.ndarray):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.size == 0 and not isinstance(ids, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"id {array.max()} is out of range")
    return np.ascontiguousarray(array.reshape(-1), np.int64), array.shape


def require_rows(numbers: NDArray[np.int64], n_rows: int) -> None:
    """Checks that a table has rows.

    Raises:
        IndexError: it has not.
    """
    bad = (numbers < 0) | (numbers >= n_rows)
    if bad.any():
        raise IndexError(f"id {numbers[bad][0]} is out of range: the table has {n_rows} rows")
