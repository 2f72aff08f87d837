"""The arrays of a shelf's decoded elements: their type, their dtype, their bytes, and zeros."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.base import ByteArray
from packhorse.framework import resolve_framework

__all__ = ["Array", "bytes_of", "clear", "dtype_of"]

Array: TypeAlias = NDArray[Any]


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of safetensors."""
    dtype: np.dtype[Any] = resolve_framework("np").empty(name, (0,)).dtype
    return dtype


def clear(out: Array) -> None:
    """Let all bits of an array be zero. This is no number 0 for F8_E8M0, which has none."""
    out[...] = np.zeros((), out.dtype)


def bytes_of(chunk: Array) -> ByteArray:
    """The bytes of an array, without a copy."""
    return resolve_framework("np").readable(chunk)[0]
