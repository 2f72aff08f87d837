"""Plans that tell kernels how to decode the chunks of a frame; the core makes them.

`plan_chunks` takes the payload as bytes and the chunk table, and trusts neither. It returns small
arrays of numbers. They say where the bytes of every plane of every chunk come from, and where the
parts of every coded stream are, with lane states and tables. A kernel that follows these arrays
reads only inside the payload and writes only inside its outputs, whatever the payload says, even if
it changes later. Only decoding can check words, last states and the number of escapes, so the
kernels do that, and write a status for each stream.

The arrays are stored one after the other in one piece of memory, which is uploaded as it is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse._core import Geometry
from packhorse.codecs.base import STATUS_WORDS, ByteArray
from packhorse.errors import CorruptionError
from packhorse.layout import (
    FIRST_STREAM,
    MAX_CODE_BITS,
    MAX_LANES_LOG,
    PLAN_FIELDS,
    PROB_SUM,
    STREAM_NBYTES_BITS,
    Mode,
    Split,
    Status,
)

__all__ = [
    "ChunkPlan",
    "Ints",
    "RansGroup",
    "Unsupported",
    "Words",
    "plan_chunks",
    "why_unsupported",
]

Ints: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint32]

_N_LANES = 1 << MAX_LANES_LOG
_LAST_MODE = int(Mode.RANS)  # stored, constant and palette come before


class Unsupported(Exception):
    """Kernels cannot decode this frame, but the host can."""


@dataclass(frozen=True)
class RansGroup:
    """Streams of mode rANS that one launch decodes.

    Attributes:
        n_buckets: 32 or 64 for the alias layout, or 4096 for a table of all slots.
        streams: i64 (S, 8): `layout.StreamField` names the columns.
        states: u32 (S, 4, 32): those of the lanes `g * quarter + t` at `[g, t]`.
        tables: u32 (S, 3, `n_buckets`): for each bucket, the slot at which its second part begins,
            the entry of its first part, and the entry of its second part. Or u32 (S, 4096): the
            entry of each slot. An entry has the frequency in its lowest bits, the rank of a slot
            minus the slot (modulo 4096) from `ENTRY_RANK_SHIFT` on, and the value from
            `ENTRY_VALUE_SHIFT` on.
        places: i64 (S, 2): chunk and plane, for messages.
    """

    n_buckets: int
    streams: Ints
    states: Words
    tables: Words
    places: Ints


@dataclass(frozen=True)
class ChunkPlan:
    """Everything that kernels need to decode a payload.

    Attributes:
        geometry: how the tensor is cut.
        planes: i64 (chunks, planes, 8): `layout.PlaneField` names the columns.
        rans: the streams of mode rANS.
        palettes: i64 (P, 8): `layout.PaletteField` names the columns.
        entries: u8 (P, 16): the byte of each code, the marker for the escape.
        escaped: i64 (E, 8): planes in the scratch memory with escapes; `layout.EscapedField` names
            the columns.
        escaped_places: i64 (E, 2): chunk and plane, for messages.
        scratch_nbytes: bytes of the scratch memory, a multiple of 128.
        memory: u8, all `arrays` one after the other, as they are uploaded.
    """

    geometry: Geometry
    planes: Ints
    rans: tuple[RansGroup, ...]
    palettes: Ints
    entries: ByteArray
    escaped: Ints
    escaped_places: Ints
    scratch_nbytes: int
    memory: ByteArray

    def arrays(self) -> list[NDArray[Any]]:
        """The arrays that kernels read beside the payload: planes, palettes, entries, escaped; then
        streams, states and tables of each group."""
        arrays: list[NDArray[Any]] = [self.planes, self.palettes, self.entries, self.escaped]
        for group in self.rans:
            arrays += (group.streams, group.states, group.tables)
        return arrays


def why_unsupported(table: Words, geometry: Geometry) -> str | None:
    """Why kernels cannot decode a frame; None if they can.

    Args:
        table: the chunk table, as `packhorse.frame.header` reads it: u32 (chunks, 1 + planes).
        geometry: how the tensor is cut.
    """
    if geometry.split == Split.WHOLE and geometry.unit_nbytes > 1:
        return f"units of {geometry.unit_nbytes} bytes that are not split into planes"
    modes = table[:, FIRST_STREAM:] >> STREAM_NBYTES_BITS
    if modes.max() <= _LAST_MODE:
        return None
    others = sorted({int(mode) for mode in np.unique(modes)} - set(range(_LAST_MODE + 1)))
    names = [Mode(mode).name.lower() for mode in others if mode in Mode.__members__.values()]
    return f"a plane of mode {', '.join(names) or others[0]}"


def plan_chunks(payload: ByteArray, table: Words, geometry: Geometry, origin: int = 0) -> ChunkPlan:
    """Plans the chunks of a payload. Reads every stream's fields, without Python's lock.

    Args:
        payload: all chunks, u8, contiguous; only read.
        table: the chunk table: u32 (chunks, 1 + planes).
        geometry: how the tensor is cut.
        origin: where the payload begins in the frame, for messages.

    Raises:
        CorruptionError: a rule of the format is broken; names chunk, plane and byte.
        Unsupported: kernels cannot decode the frame, as `why_unsupported` says.
    """
    reason = why_unsupported(table, geometry)
    if reason is not None:
        raise Unsupported(reason)
    if table.shape != (geometry.n_chunks, FIRST_STREAM + geometry.n_planes):
        raise ValueError(f"a table of shape {table.shape} does not fit {geometry}")
    found, memory, shape = _core.plan_chunks(payload, table, geometry)
    fault = _Fault(*found)
    if fault.status != Status.OK:
        raise _error_of(fault, payload.size, geometry, origin)
    return _view_plan(geometry, memory, *shape)


class _Fault(NamedTuple):
    """The first thing that the core found wrong with a payload.

    Attributes:
        status: a `Status`.
        chunk: its number; the number of chunks if the length of the payload is wrong.
        plane: its number; the number of planes if the padding behind them is wrong.
        at: offset in the payload; the length of all chunks if that of the payload is wrong.
    """

    status: int
    chunk: int
    plane: int
    at: int


def _error_of(fault: _Fault, nbytes: int, geometry: Geometry, origin: int) -> CorruptionError:
    if fault.chunk == geometry.n_chunks:
        lengths = f"the payload has {nbytes} bytes, its chunks {fault.at}"
        return CorruptionError(f"byte {origin}: {lengths}")
    where = f"byte {origin + fault.at}: chunk {fault.chunk} of {geometry.n_chunks}"
    if fault.plane == geometry.n_planes:
        return CorruptionError(f"{where}: the padding behind its streams is not zero")
    return CorruptionError(f"{where}: plane {fault.plane}: {STATUS_WORDS[fault.status]}")


class _Reader:
    """Reads arrays that are stored one after the other.

    Attributes:
        at: offset of the next array.
    """

    def __init__(self, memory: ByteArray) -> None:
        self._memory, self.at = memory, 0

    def take(self, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
        array = np.ndarray(shape, dtype, self._memory, self.at)
        self.at += array.nbytes
        return array


def _view_plan(
    geometry: Geometry,
    memory: ByteArray,
    n_palettes: int,
    n_escaped: int,
    n_bucketed: int,
    n_plain: int,
    n_buckets: int,
    scratch_nbytes: int,
) -> ChunkPlan:
    """The arrays of a plan, in the order in which csrc/tensor/plan.hpp writes them."""
    reader = _Reader(memory)
    planes = reader.take(np.int64, geometry.n_chunks, geometry.n_planes, PLAN_FIELDS)
    palettes = reader.take(np.int64, n_palettes, PLAN_FIELDS)
    entries = reader.take(np.uint8, n_palettes, 1 << MAX_CODE_BITS)
    escaped = reader.take(np.int64, n_escaped, PLAN_FIELDS)
    kinds = [(n_bucketed, n_buckets, (3, n_buckets)), (n_plain, PROB_SUM, (PROB_SUM,))]
    groups = [
        (
            width,
            reader.take(np.int64, n, PLAN_FIELDS),
            reader.take(np.uint32, n, 4, _N_LANES // 4),
            reader.take(np.uint32, n, *table),
        )
        for n, width, table in kinds
    ]
    uploaded = memory[: reader.at]
    escaped_places = reader.take(np.int64, n_escaped, 2)
    rans = [RansGroup(*group, reader.take(np.int64, len(group[1]), 2)) for group in groups]
    return ChunkPlan(
        geometry,
        planes,
        tuple(group for group in rans if len(group.streams)),
        palettes,
        entries,
        escaped,
        escaped_places,
        scratch_nbytes,
        uploaded,
    )
