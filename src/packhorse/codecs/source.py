"""A tensor that is to be packed, and how a tensor is cut into chunks.

A call makes the geometry of a tensor once and hands it down. A `Source` has the geometry that
follows from its dtype and its length alone; a plan has the geometry that was chosen.
"""

from typing import NamedTuple

from packhorse import _core
from packhorse._core import Geometry
from packhorse.codecs.base import ByteArray
from packhorse.layout import CHUNK_NBYTES, DType, Split

__all__ = ["Source", "cut", "natural_geometry"]


class Source(NamedTuple):
    """A tensor that is to be packed.

    Attributes:
        data: all its bytes, one-dimensional.
        dtype: its dtype.
        shape: its shape.
        geometry: `natural_geometry` of it.
    """

    data: ByteArray
    dtype: DType
    shape: tuple[int, ...]
    geometry: Geometry


def natural_geometry(dtype: DType, nbytes: int) -> Geometry:
    """Cuts a tensor by its dtype alone: into chunks of the usual size, by the split that separates
    the parts of its elements best. This is the last split of the dtype's row in docs/format.md."""
    return cut(dtype, dtype.splits[-1], nbytes)


def cut(dtype: DType, split: Split, nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> Geometry:
    """Cuts a tensor of `nbytes` bytes into chunks of about `chunk_nbytes`. A tensor of at most one
    and a half chunks is a single chunk, so that no short chunk is left over."""
    return _core.cut_tensor(dtype.unit_nbytes, split, nbytes, chunk_nbytes)
