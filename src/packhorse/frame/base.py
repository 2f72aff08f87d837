"""The base of a frame: another tensor, of which the frame holds differences (docs/format.md, 6.6).

The frame names it by content hash. A caller brings it for packing and again for unpacking, and it
is compared with the name before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from packhorse import _core
from packhorse._core import Base, Geometry
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.content import content_hash
from packhorse.codecs.plan import Plan, choose_plan
from packhorse.codecs.source import Source, cut
from packhorse.errors import BaseMismatchError
from packhorse.layout import (
    BASE_BLOCK_NBYTES,
    CLASSED_CHUNK_NBYTES,
    DTYPE_BY_NAME,
    FRAME_ALIGNMENT,
    DType,
    Level,
    Split,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BaseName",
    "allowed_casts",
    "checked_base",
    "matching_base",
    "part_of",
    "plan_delta",
]

# What a frame may be the cast of, and the core's number for it.
_CASTS = {("F32", "BF16"): 1, ("F32", "F16"): 2}
_CAST_NBYTES = 4  # bytes of a unit of the base then
_CLEARLY_LESS = 0.7
_MUST_SAVE = 1 / 64  # of what the tensor takes without its base: to restore it takes both
_NAME_NBYTES = BASE_BLOCK_NBYTES + FRAME_ALIGNMENT  # what naming a base may add to a frame


class BaseName(NamedTuple):
    """What a frame says of its base.

    Attributes:
        content_hash: 16 bytes (docs/format.md, section 7).
        dtype: the base's dtype.
    """

    content_hash: bytes
    dtype: DType


def allowed_casts(dtype: DType) -> list[DType]:
    """The dtypes that a base of a frame may have."""
    sources = [source for source, target in _CASTS if target == dtype.name]
    return [dtype, *(DTYPE_BY_NAME[source] for source in sources)]


def _base(data: ByteArray, dtype: DType, base_dtype: DType) -> Base:
    return Base(data, Split.FLOAT in dtype.splits, _CASTS.get((base_dtype.name, dtype.name), 0))


def part_of(base: Base, dtype: DType, first: int, n_units: int) -> Base:
    """The base of units [first, first + n_units) of a frame of a dtype."""
    unit_nbytes = _CAST_NBYTES if base.cast else dtype.unit_nbytes
    start = first * unit_nbytes
    return Base(base.data[start : start + n_units * unit_nbytes], base.is_float, base.cast)


def checked_base(buffer: Buffer, base_dtype: str | None, source: Source) -> tuple[Base, DType]:
    """A base that a caller gives for a tensor, and its dtype.

    Raises:
        TypeError: not a C-contiguous buffer.
        ValueError: its dtype does not go with the tensor's, or it has another number of elements.
    """
    data, dtype = as_bytes(buffer, "base"), source.dtype
    row = dtype if base_dtype is None else DTYPE_BY_NAME.get(base_dtype)
    allowed = allowed_casts(dtype)
    if row not in allowed:
        names = " or ".join(known.name for known in allowed)
        raise ValueError(f"the base of {dtype.name} must be {names}, and is {base_dtype}")
    expected = source.geometry.n_units * row.unit_nbytes
    if data.size != expected:
        raise ValueError(
            f"the base has {data.size} bytes of {row.name}; as many elements as the tensor take "
            f"{expected}"
        )
    return _base(data, dtype, row), row


def matching_base(
    buffer: Buffer | None,
    name: BaseName,
    dtype: DType,
    geometry: Geometry,
    threads: int,
    known_hash: bytes | None = None,
) -> Base:
    """The base of a frame for unpacking, once it is known to be the one that the frame names.

    Args:
        buffer: what the caller gave.
        name: what the frame says.
        dtype: of the frame.
        geometry: how the frame's tensor is cut.
        threads: how many to use.
        known_hash: of the buffer's content; None to compute it.

    Raises:
        BaseMismatchError: none was given, or another.
        TypeError: not a C-contiguous buffer.
    """
    wanted = f"a base of {name.dtype.name} with content hash {name.content_hash.hex()} is needed"
    if buffer is None:
        raise BaseMismatchError(f"{wanted}, and none was given; pass it as base=")
    data = as_bytes(buffer, "base")
    expected = geometry.n_units * name.dtype.unit_nbytes
    if data.size != expected:
        raise BaseMismatchError(f"{wanted}, of {expected} bytes; the one given has {data.size}")
    found = content_hash(data, threads=threads) if known_hash is None else known_hash
    if found != name.content_hash:
        raise BaseMismatchError(f"{wanted}; the one given has {found.hex()}")
    return _base(data, dtype, name.dtype)


def plan_delta(source: Source, level: Level, base: Base) -> Plan:
    """The plan for a tensor as differences from a base, or without one where that is as good.

    Args:
        source: the tensor.
        level: how hard to try.
        base: the base.
    """
    data, dtype, _, _ = source
    if data.size == 0:
        return choose_plan(source, level)
    geometry = cut(dtype, dtype.splits[-1], data.size, CLASSED_CHUNK_NBYTES)
    plain = choose_plan(source, level, with_side=False)

    def estimate() -> int:
        nbytes = _core.estimate_delta(data, geometry, base, plain.estimated_nbytes, level)
        return max(nbytes, 1)  # equal to its base, a tensor takes nothing but a header

    nbytes = estimate()
    if nbytes >= plain.estimated_nbytes * _CLEARLY_LESS:  # side data might make up for it
        if not plain.zstd:
            plain = choose_plan(source, level)
            nbytes = estimate()
        if nbytes >= plain.estimated_nbytes * (1 - _MUST_SAVE):
            return plain
    if nbytes + _NAME_NBYTES >= plain.estimated_nbytes:
        return plain if plain.zstd else choose_plan(source, level)
    return Plan(geometry, level, False, nbytes, plain_nbytes=plain.estimated_nbytes)
