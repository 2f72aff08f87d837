"""Predicts a frame before it is made: the plan for a tensor, and sizes.

Nothing here encodes. Plans come from samples of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packhorse._core import Geometry
from packhorse.arguments import resolve_level
from packhorse.codecs.base import as_bytes
from packhorse.codecs.plan import Plan, choose_plan, plan_of_streams
from packhorse.codecs.side import side_capacity
from packhorse.codecs.source import Source, natural_geometry
from packhorse.frame.base import checked_base, plan_delta
from packhorse.frame.header import FrameHeader, checked_nbytes, frame_header_nbytes, padded
from packhorse.layout import (
    FIRST_STREAM,
    STREAM_NBYTES_BITS,
    STREAM_NBYTES_MASK,
    DType,
    Level,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "Form",
    "checked_source",
    "form_of",
    "max_frame_nbytes",
    "max_header_nbytes",
    "plan_buffer",
    "plan_of",
    "planned_frame_nbytes",
]


def max_frame_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the length of the longest frame of a tensor of this dtype and shape.

    Args:
        dtype: safetensors' name, such as "BF16".
        shape: the tensor's shape.

    Returns:
        Bytes, enough at any level and with any base.

    Raises:
        ValueError: unknown dtype or impossible shape.

    Example:
        >>> from packhorse.frame import compress_buffer, max_frame_nbytes
        >>> memory = bytearray(max_frame_nbytes("F32", (1024,)))
        >>> frame = compress_buffer(bytes(4096), "F32", (1024,), out=memory)
        >>> frame.nbytes <= len(memory)
        True
    """
    return form_of(dtype, tuple(shape)).capacity


def max_header_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the length of the longest header of a frame of a tensor of this dtype and shape, for
    frames that this release makes."""
    return form_of(dtype, tuple(shape)).header_capacity


class Form(NamedTuple):
    """What follows from the dtype and the shape of a tensor. No plan has more chunks or planes than
    its natural geometry.

    Attributes:
        dtype: the dtype.
        geometry: the natural geometry.
        header_capacity: bytes of the longest header.
        capacity: bytes of the longest frame.
    """

    dtype: DType
    geometry: Geometry
    header_capacity: int
    capacity: int


# The tensors of a model have few shapes, and checking one takes as long as packing a short tensor.
@lru_cache(maxsize=4096)
def form_of(dtype: str, shape: tuple[int, ...]) -> Form:
    """What follows from a dtype and a shape.

    Raises:
        ValueError: unknown dtype or impossible shape.
    """
    row, nbytes = checked_nbytes(dtype, shape)
    natural = natural_geometry(row, nbytes)
    side_nbytes = side_capacity(row, shape)
    header_nbytes = frame_header_nbytes(
        len(shape), natural.n_chunks, natural.n_planes, side_nbytes, has_base=True
    )
    return Form(row, natural, header_nbytes, header_nbytes + padded(natural.nbytes))


def plan_buffer(
    src: Buffer,
    dtype: str,
    shape: Sequence[int],
    *,
    level: Level | str = "default",
    base: Buffer | None = None,
    base_dtype: str | None = None,
) -> Plan:
    """Chooses what `compress_buffer` would choose for a tensor and a base, without encoding.

    Args:
        src: the tensor's bytes in C order; only read.
        dtype: safetensors' name, such as "BF16".
        shape: the tensor's shape.
        level: "fast", "default" or "max".
        base: the bytes of another tensor of as many elements, as for `compress_buffer`.
        base_dtype: the base's dtype, if it differs.

    Returns:
        The plan; `plan.reason` is one line about it.

    Raises:
        TypeError: a buffer is not C-contiguous.
        ValueError: unknown dtype or level, or a buffer is not as long as dtype and shape say.

    Example:
        >>> from packhorse.frame import plan_buffer
        >>> plan = plan_buffer(bytes(4096), "F32", (1024,), level="max")
        >>> plan.estimated_nbytes < plan.nbytes
        True
    """
    source = checked_source(src, dtype, shape)
    if base is None:
        return choose_plan(source, resolve_level(level))
    units, _ = checked_base(base, base_dtype, source)
    return plan_delta(source, resolve_level(level), units)


def planned_frame_nbytes(plan: Plan, dtype: str, shape: Sequence[int]) -> int:
    """Estimates the length of the frame that a plan would make, header and padding included.

    Args:
        plan: from `plan_buffer`.
        dtype: safetensors' name, such as "BF16".
        shape: the tensor's shape.

    Returns:
        Bytes.

    Raises:
        ValueError: unknown dtype or impossible shape.

    Example:
        >>> from packhorse.frame import plan_buffer, planned_frame_nbytes
        >>> plan = plan_buffer(bytes(4096), "F32", (1024,))
        >>> planned_frame_nbytes(plan, "F32", (1024,)) < 4096
        True
    """
    _, nbytes = checked_nbytes(dtype, shape)
    n_chunks = plan.geometry.n_chunks
    header_nbytes = frame_header_nbytes(
        len(shape), n_chunks, plan.geometry.n_planes, len(plan.side.stream),
        has_base=plan.plain_nbytes > 0,
    )  # fmt: skip
    payload = max(0, min(plan.estimated_nbytes, nbytes))
    return header_nbytes + n_chunks * padded(-(-payload // max(n_chunks, 1)))


def plan_of(header: FrameHeader) -> Plan:
    """The plan of a frame that the core packed without one: the sizes are those of the frame."""
    streams = header.table[:, FIRST_STREAM:]
    lengths = (streams & STREAM_NBYTES_MASK).astype(np.int64)
    longest = lengths.argmax(axis=0)
    planes = tuple(
        (int(streams[longest[p], p]) >> STREAM_NBYTES_BITS, int(lengths[:, p].sum()))
        for p in range(header.n_planes)
    )
    return plan_of_streams(header.geometry, Level(header.level), planes)


def checked_source(src: Buffer, dtype: str, shape: Sequence[int]) -> Source:
    """Checks a tensor that a caller gives.

    Raises:
        TypeError: the buffer is not C-contiguous.
        ValueError: unknown dtype, or the buffer is not as long as dtype and shape say.
    """
    sizes = tuple(shape)
    row, geometry, _, _ = form_of(dtype, sizes)
    data = as_bytes(src, "src")
    if data.size != geometry.nbytes:
        raise ValueError(f"{dtype} of shape {sizes} has {geometry.nbytes} bytes, src {data.size}")
    return Source(data, row, sizes, geometry)
