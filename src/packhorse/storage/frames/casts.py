"""Finds tensors that are rounded copies of others, such as bfloat16 weights of float32 masters.

A copy is packed as a delta against its master, and then takes next to no space. The first elements
of the tensors decide which one is taken for a copy of which. The encoder then compares all
elements, so a wrong guess costs no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.storage.frames.refs import TensorSpec

__all__ = ["find_casts", "packing_order"]

_MIN_NUMEL = 1024  # below this there is nothing to gain
_SAMPLE = 64  # elements


def find_casts(
    specs: Sequence[TensorSpec], head: Callable[[int, int], ByteArray]
) -> dict[int, int]:
    """For each tensor that seems to be a rounded copy, the number of its master.

    Args:
        specs: the tensors.
        head: returns the bytes of a tensor's first elements, given the tensor's number and how many
            elements are wanted. It is called for few elements, and only for tensors whose shape
            occurs in both widths.
    """
    large = [i for i, spec in enumerate(specs) if math.prod(spec.shape) >= _MIN_NUMEL]
    copies = [i for i in large if specs[i].dtype in ("BF16", "F16")]
    shapes = {specs[i].shape for i in copies}
    masters: dict[tuple[str, tuple[int, ...], bytes], int] = {}
    for j in large:
        if specs[j].dtype == "F32" and specs[j].shape in shapes:
            values = head(j, _SAMPLE).view(np.float32)
            for dtype in ("BF16", "F16"):
                masters.setdefault((dtype, specs[j].shape, _rounded(values, dtype)), j)
    shapes = {shape for _, shape, _ in masters}
    casts = {}
    for i in copies:
        if specs[i].shape in shapes:
            sample = head(i, _SAMPLE).view(np.uint16)
            master = masters.get((specs[i].dtype, specs[i].shape, sample.tobytes()))
            # Tensors that begin with one repeated value, such as zeros, match by chance.
            if master is not None and (sample != sample[0]).any():
                casts[i] = master
    return casts


def _rounded(values: np.ndarray[tuple[int], np.dtype[np.float32]], dtype: str) -> bytes:
    """The numbers, rounded to nearest, ties to even. NaN may become anything."""
    if dtype == "F16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def packing_order(n_tensors: int, casts: dict[int, int]) -> list[list[int]]:
    """The numbers of the tensors in the order in which they are packed. Each group is a tensor and
    its copies, which must be packed together."""
    copies: dict[int, list[int]] = {}
    for i, j in casts.items():
        copies.setdefault(j, []).append(i)
    return [[j, *copies.get(j, ())] for j in range(n_tensors) if j not in casts]
