"""The plane filter alone, for tests: units to one-byte planes and back (docs/format.md, section 4).

Frames do this inside the core, chunk by chunk.
"""

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.layout import MIN_CHUNK_LOG, Split

__all__ = ["merge", "split"]


def split(src: object, unit_nbytes: int, how: Split) -> ByteArray:
    """Splits units into planes.

    Args:
        src: C-contiguous buffer of n units.
        unit_nbytes: 2, 4 or 8.
        how: `Split.BYTES` or `Split.FLOAT`.

    Returns:
        uint8 array of shape (unit_nbytes, n).

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
        ValueError: sizes that do not fit each other.
    """
    data = as_bytes(src, "src")
    planes = np.empty(data.size, np.uint8)
    _core.split(data, _geometry(unit_nbytes, how, data.size), planes)
    return planes.reshape(unit_nbytes, -1)


def merge(planes: ByteArray, how: Split) -> ByteArray:
    """Merges planes of shape (unit_nbytes, n) into the bytes of n units; undoes `split`.

    Raises:
        TypeError: `planes` is not C-contiguous.
        ValueError: not a two-dimensional array of 2, 4 or 8 planes.
    """
    if planes.ndim != 2:
        raise ValueError(f"planes must have two dimensions (planes, units), not {planes.ndim}")
    dst = np.empty(planes.size, np.uint8)
    data = as_bytes(planes, "planes")
    _core.merge(data, _geometry(planes.shape[0], how, data.size), dst)
    return dst


def _geometry(unit_nbytes: int, how: Split, nbytes: int) -> _core.Geometry:
    return _core.Geometry(unit_nbytes, how, MIN_CHUNK_LOG, nbytes)
