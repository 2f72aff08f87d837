"""How the elements of any NumPy array are packed: as a dtype of the format, or as their bytes.

numcodecs and zarr hand over arrays of more dtypes than the format has. Those that are made of a
known dtype are packed as such; all others of a fixed size are packed as bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - gives np.dtype() the names "bfloat16", "float8_e4m3fn" and so on
import numpy as np

from packhorse.arguments import resolve_level
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.numpy import FRAMEWORK

__all__ = ["Elements", "bytes_of", "dtype_text", "elements_of", "level_text"]


_OF_OTHERS = 2  # `np.dtype.isbuiltin` of a dtype that ml_dtypes defines


class Elements(NamedTuple):
    """How each element is packed.

    Attributes:
        dtype: safetensors' name of the dtype of the frame.
        shape: further dimensions of the frame, if an element takes more than one of that dtype.
    """

    dtype: str
    shape: tuple[int, ...]


def elements_of(dtype: np.dtype[Any]) -> Elements:
    """Finds out how elements of a dtype are packed. Elements of foreign byte order are packed as
    bytes.

    Raises:
        TypeError: elements of the dtype are Python objects or have no fixed size.
    """
    if dtype.hasobject:
        raise TypeError(
            f"Packhorse packs numbers and other elements of a fixed size, not {dtype}; use another "
            "codec for this array"
        )
    if dtype.isnative and dtype.kind in "mM":
        return Elements("I64", ())
    if dtype == np.complex128 and dtype.isnative:
        return Elements("F64", (2,))
    name = _own_name(dtype)
    if name is None or not dtype.isnative:
        return Elements("U8", (dtype.itemsize,))
    return Elements(name, ())


def _own_name(dtype: np.dtype[Any]) -> str | None:
    """The format's name of a dtype; None if NumPy stores its elements in another way."""
    try:
        name, _ = FRAMEWORK.describe(np.empty(0, dtype))
    except TypeError:
        return None
    return name if DTYPE_BY_NAME[name].bits == 8 * dtype.itemsize else None


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Views a C-contiguous array as one-dimensional bytes."""
    return array.reshape(-1).view(np.uint8)


def dtype_text(dtype: Any) -> str | None:
    """Checks the argument `dtype` of a codec, and writes it as text for JSON.

    Args:
        dtype: whatever `np.dtype` takes, in any byte order, or a name of ml_dtypes; or None.

    Returns:
        Text that `np.dtype` takes; None for None.

    Raises:
        TypeError: there is no such dtype, or the format has none for it.
    """
    if dtype is None:
        return None
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype is {dtype!r}, which NumPy does not know") from None
    if found.kind not in "mM" and found != np.complex128 and _own_name(found) is None:
        raise TypeError(f"dtype is {dtype!r}, which would be packed as bytes; leave it out")
    # The text that NumPy gives the dtypes of other packages does not name them.
    text: str = found.name if found.isbuiltin == _OF_OTHERS else found.str
    return text


def level_text(level: Level | str | int) -> str:
    """Checks the argument `level` of a codec, and writes it as text for JSON.

    Raises:
        ValueError: there is no such level.
    """
    return resolve_level(level).name.lower()
