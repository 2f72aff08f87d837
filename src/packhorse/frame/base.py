"""The base of a frame: another tensor, from which the frame holds differences (docs/format.md,
section 6.6).

A frame names its base by content hash. The caller passes the base for packing and again for
unpacking, where its hash is compared with the one in the frame before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from packhorse import _core
from packhorse._core import Base, Geometry
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.content import content_hash, content_sum
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
    "kind_of_base",
    "matching_base",
    "part_of",
    "plan_delta",
    "unnamed_base",
]

# A base's dtype and the dtype that its values are rounded to, with the core's number for the cast.
_CASTS = {("F32", "BF16"): 1, ("F32", "F16"): 2}
_CAST_NBYTES = 4  # bytes of a unit of such a base
_CLEARLY_LESS = 0.7
_MUST_SAVE = 1 / 32  # of the size without the base, because restoring then takes the base too
_NAME_NBYTES = BASE_BLOCK_NBYTES + FRAME_ALIGNMENT  # the most that naming a base adds to a frame


class BaseName(NamedTuple):
    """How a frame names its base.

    Attributes:
        content_hash: 16 bytes (docs/format.md, section 7).
        dtype: the base's dtype.
        check: the base check of section 7.2, if the content hash is a sum.
    """

    content_hash: bytes
    dtype: DType
    check: int = 0


def allowed_casts(dtype: DType) -> list[DType]:
    """Returns the dtypes that the base of a frame may have."""
    sources = [source for source, target in _CASTS if target == dtype.name]
    return [dtype, *(DTYPE_BY_NAME[source] for source in sources)]


def _base(data: ByteArray, dtype: DType, base_dtype: DType) -> Base:
    return Base(data, *kind_of_base(dtype, BaseName(b"", base_dtype)))


def kind_of_base(dtype: DType, name: BaseName | None) -> tuple[bool, int]:
    """Tells the core what the units of a frame and its base are.

    Args:
        dtype: the frame's dtype.
        name: how it names its base; None for a frame without one.

    Returns:
        Whether the units are floats, and the core's number for the cast of the base.
    """
    cast = 0 if name is None else _CASTS.get((name.dtype.name, dtype.name), 0)
    return Split.FLOAT in dtype.splits, cast


def part_of(base: Base, dtype: DType, first: int, n_units: int) -> Base:
    """Returns the base of units [first, first + n_units) of a frame of a dtype."""
    unit_nbytes = _CAST_NBYTES if base.cast else dtype.unit_nbytes
    start = first * unit_nbytes
    return Base(base.data[start : start + n_units * unit_nbytes], base.is_float, base.cast)


def checked_base(buffer: Buffer, base_dtype: str | None, source: Source) -> tuple[Base, DType]:
    """Checks a base that a caller gives for a tensor, and returns it with its dtype.

    Raises:
        TypeError: not a C-contiguous buffer.
        ValueError: its dtype does not fit the tensor's, or it has another number of elements.
    """
    data, dtype = as_bytes(buffer, "base"), source.dtype
    row = dtype if base_dtype is None else DTYPE_BY_NAME.get(base_dtype)
    allowed = allowed_casts(dtype)
    if row not in allowed:
        names = " or ".join(known.name for known in allowed)
        raise ValueError(f"the base of {dtype.name} must be {names}, but is {base_dtype}")
    expected = source.geometry.n_units * row.unit_nbytes
    if data.size != expected:
        raise ValueError(
            f"the base has {data.size} bytes of {row.name}; as many elements as in the tensor take "
            f"{expected} bytes"
        )
    return _base(data, dtype, row), row


def matching_base(
    buffer: Buffer | None,
    name: BaseName,
    dtype: DType,
    geometry: Geometry,
    threads: int,
    known_hash: bytes | None = None,
    *,
    has_sum: bool = False,
) -> Base:
    """Checks that a base is the one that a frame names, and returns it for unpacking.

    Args:
        buffer: what the caller gave.
        name: how the frame names its base.
        dtype: the frame's dtype.
        geometry: how the frame's tensor is cut.
        threads: how many to use.
        known_hash: the content hash of the buffer; None to compute it.
        has_sum: whether the frame names it by its content sum.

    Raises:
        BaseMismatchError: no base was given, or another one.
        TypeError: not a C-contiguous buffer.
    """
    kind = "sum" if has_sum else "hash"
    wanted = f"a base of {name.dtype.name} with content {kind} {name.content_hash.hex()} is needed"
    if buffer is None:
        raise BaseMismatchError(f"{wanted}, and none was given; pass it as base=")
    data = as_bytes(buffer, "base")
    expected = geometry.n_units * name.dtype.unit_nbytes
    if data.size != expected:
        raise BaseMismatchError(f"{wanted}, of {expected} bytes; the one given has {data.size}")
    found = known_hash
    if found is None:
        found = (content_sum if has_sum else content_hash)(data, threads=threads)
    if found != name.content_hash:
        raise BaseMismatchError(f"{wanted}; the one given has {found.hex()}")
    return _base(data, dtype, name.dtype)


def unnamed_base(buffer: Buffer, dtype: DType, geometry: Geometry) -> Base:
    """Returns a tensor to compare a frame with that names no base.

    Raises:
        TypeError: not a C-contiguous buffer.
        ValueError: it is not as long as the frame's tensor.
    """
    data = as_bytes(buffer, "base")
    if data.size != geometry.nbytes:
        raise ValueError(f"the base has {data.size} bytes, the tensor {geometry.nbytes}")
    return _base(data, dtype, dtype)


def plan_delta(source: Source, level: Level, base: Base) -> Plan:
    """Plans a tensor as differences from a base, or without the base if that is as good.

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
        return max(nbytes, 1)  # a tensor that equals its base takes only a header

    nbytes = estimate()
    if nbytes >= plain.estimated_nbytes * _CLEARLY_LESS:  # side data might save as much
        if plain.planes:
            plain = choose_plan(source, level)
            nbytes = estimate()
        if nbytes >= plain.estimated_nbytes * (1 - _MUST_SAVE):
            return plain
    if nbytes + _NAME_NBYTES >= plain.estimated_nbytes:
        return choose_plan(source, level) if plain.planes else plain
    return Plan(geometry, level, nbytes, plain_nbytes=plain.estimated_nbytes)
