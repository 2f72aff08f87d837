"""Reads the streams of a frame's chunks on the host, for kernels that decode them.

`plan_chunks` takes the payload as bytes and the chunk table, believes nothing, and returns small
arrays of numbers: for every plane of every chunk where its bytes come from, and for every coded
stream where its parts lie, with lane states and tables. A kernel that follows them reads only
inside the payload and writes only inside its outputs, whatever the payload says, even if it changes
later. What only decoding shows (words, last states, the number of escapes) is left to the kernels,
which write a status number for each stream. NumPy alone; all streams of a frame are read together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.kernels.models import (
    PLAIN_BUCKETS,
    Codes,
    Ints,
    Words,
    bucket_tables,
    n_buckets_of,
    plain_table,
)
from packhorse.layout import (
    FRAME_ALIGNMENT,
    MAX_CODE_BITS,
    MAX_LANES_LOG,
    MAX_PALETTE_RAW_BITS,
    MAX_RANS_RAW_BITS,
    MIN_LANES_LOG,
    MODEL_OFFSET,
    PALETTE_HEADER_NBYTES,
    PROB_BITS,
    PROB_SUM,
    STATE_LOWER_BOUND,
    STREAM_NBYTES_BITS,
    STREAM_NBYTES_MASK,
    Mode,
    Split,
)

__all__ = [
    "CONSTANT",
    "FROM_PAYLOAD",
    "FROM_SCRATCH",
    "N_FIELDS",
    "ROUND",
    "ChunkPlan",
    "Geometry",
    "RansGroup",
    "Unsupported",
    "plan_chunks",
    "why_unsupported",
]

N_FIELDS = 8  # numbers of a row that describes a plane or a stream to a kernel
ROUND = 1 << MAX_LANES_LOG  # scratch memory of a plane is a multiple of the longest round
FROM_PAYLOAD, FROM_SCRATCH, CONSTANT = range(3)  # where the bytes of a plane come from

_MODES = (Mode.STORED, Mode.CONSTANT, Mode.PALETTE, Mode.RANS)
_STORED, _CONSTANT, _PALETTE, _RANS = (int(mode) for mode in _MODES)
_QUARTERS, _QUARTER = 4, ROUND // 4


class Geometry(NamedTuple):
    """How a tensor is cut.

    Attributes:
        n_units: units of the tensor, at least 1.
        unit_nbytes: 1, 2, 4 or 8.
        split: section 4 of docs/format.md.
        chunk_log: log2 of the units of a chunk.
    """

    n_units: int
    unit_nbytes: int
    split: Split
    chunk_log: int

    @property
    def n_planes(self) -> int:
        """Planes of a chunk."""
        return 1 if self.split == Split.WHOLE else self.unit_nbytes

    @property
    def rotation(self) -> int:
        """Bits by which the first planes are rotated to the right to be the top of a unit."""
        if self.split != Split.FLOAT:
            return 0
        return 4 if self.unit_nbytes == 8 else 1


class Unsupported(Exception):
    """No kernel decodes this frame; the decoder of the host does."""


@dataclass(frozen=True)
class RansGroup:
    """Streams of mode rANS that one launch decodes.

    Attributes:
        n_buckets: 32 or 64 of the alias layout, or 4096, a table of all slots.
        streams: i64 (S, 8): offset of the words in the payload; number of words; a quarter of the
            lanes; units; offset of the plane in the scratch memory; offset of the carried bytes
            there, or -1 if nothing may be carried; and two numbers that are not used.
        states: u32 (S, 4, 32): those of the lanes `g * quarter + t` at `[g, t]`.
        tables: u32 (S, 3, `n_buckets`), or (S, 4096): see `models`.
        places: i64 (S, 2): chunk and plane, for messages.
    """

    n_buckets: int
    streams: Ints
    states: Words
    tables: Words
    places: Ints


@dataclass(frozen=True)
class ChunkPlan:
    """All that kernels must know to decode a payload.

    Attributes:
        geometry: how the tensor is cut.
        planes: i64 (chunks, planes, 8): source; offset there, or the constant; units that are
            there; offset in the scratch memory of those that are carried; raw bits; raw mask;
            offset of the raw bit planes in the payload; and a number that is not used.
        rans: the streams of mode rANS.
        palettes: i64 (P, 8): offset of the bit planes of codes in the payload; bits of a code;
            units; offset of the plane in the scratch memory; and four numbers that are not used.
        entries: u8 (P, 16): the byte of each code, the marker for the escape.
        escaped: i64 (E, 8): planes in the scratch memory with escapes: their offset; units; the
            marker; offset of the escapes in the payload; their number; raw bits; and two numbers
            that are not used.
        escaped_places: i64 (E, 2): chunk and plane, for messages.
        scratch_nbytes: bytes of the scratch memory, a multiple of 128.
    """

    geometry: Geometry
    planes: Ints
    rans: tuple[RansGroup, ...]
    palettes: Ints
    entries: ByteArray
    escaped: Ints
    escaped_places: Ints
    scratch_nbytes: int

    def arrays(self) -> list[NDArray[Any]]:
        """What kernels read beside the payload: planes, palettes, entries, escaped; then streams,
        states and tables of each group."""
        arrays: list[NDArray[Any]] = [self.planes, self.palettes, self.entries, self.escaped]
        for group in self.rans:
            arrays += (group.streams, group.states, group.tables)
        return arrays


def why_unsupported(table: Words, geometry: Geometry) -> str | None:
    """What in a frame no kernel decodes, in words; None if all can be.

    Args:
        table: the chunk table, as `packhorse.frame_header` reads it: u32 (chunks, 1 + planes).
        geometry: how the tensor is cut.
    """
    if geometry.split == Split.WHOLE and geometry.unit_nbytes > 1:
        return f"units of {geometry.unit_nbytes} bytes that are not split into planes"
    modes = np.unique(table[:, 1:] >> STREAM_NBYTES_BITS)
    others = sorted({int(mode) for mode in modes} - {int(mode) for mode in _MODES})
    names = [Mode(mode).name.lower() for mode in others if mode in Mode.__members__.values()]
    return f"a plane of mode {', '.join(names) or others[0]}" if others else None


def plan_chunks(payload: ByteArray, table: Words, geometry: Geometry, origin: int = 0) -> ChunkPlan:
    """Reads every stream's fields; section numbers are those of docs/format.md.

    Args:
        payload: all chunks, u8, contiguous; only read.
        table: the chunk table: u32 (chunks, 1 + planes).
        geometry: how the tensor is cut.
        origin: where the payload begins in the frame, for messages.

    Raises:
        CorruptionError: a rule of the format is broken; names chunk, plane and byte.
        Unsupported: `why_unsupported` says more than None.
    """
    reason = why_unsupported(table, geometry)
    if reason is not None:
        raise Unsupported(reason)
    return _Planner(payload, table, geometry, origin).plan()


@dataclass(frozen=True)
class _Streams:
    """Streams of one mode: arrays of one number for each."""

    payload: ByteArray
    origin: int
    chunk: Ints
    plane: Ints
    at: Ints  # in the payload
    nbytes: Ints
    n: Ints  # units

    def require(self, good: Any, words: str) -> None:
        if good.all():
            return
        i = int(np.argmin(good))
        where = f"chunk {self.chunk[i]}, plane {self.plane[i]}"
        raise CorruptionError(f"byte {self.origin + self.at[i]}: {where}: {words}")

    def take(self, rows: NDArray[np.intp]) -> "_Streams":
        arrays = (self.chunk, self.plane, self.at, self.nbytes, self.n)
        return _Streams(self.payload, self.origin, *(array[rows] for array in arrays))

    def window(self, offset: Ints | int, width: int) -> ByteArray:
        """Bytes from an offset of each stream on, (S, width); not to be believed beyond its end.

        Slices one by one are copied ten times faster than indices are gathered.
        """
        windows = np.zeros((len(self.at), width), np.uint8)
        for row, start in zip(windows, (self.at + offset).tolist(), strict=True):
            part = self.payload[start : start + width]
            row[: part.size] = part
        return windows


class _Planner:
    """Reads mode by mode; hands out scratch memory, and fills in the rows of the planes."""

    def __init__(self, payload: ByteArray, table: Words, geometry: Geometry, origin: int) -> None:
        self.payload, self.table, self.geometry, self.origin = payload, table, geometry, origin
        n_chunks, n_planes = len(self.table), self.geometry.n_planes
        if self.table.shape != (-(-self.geometry.n_units >> self.geometry.chunk_log), 1 + n_planes):
            raise ValueError(f"a table of shape {self.table.shape} does not fit {self.geometry}")
        self.modes = (self.table[:, 1:] >> STREAM_NBYTES_BITS).astype(np.int64)
        self.nbytes = (self.table[:, 1:] & STREAM_NBYTES_MASK).astype(np.int64)
        chunk_units = 1 << self.geometry.chunk_log
        self.n = np.full(n_chunks, chunk_units, np.int64)
        self.n[-1] = self.geometry.n_units - (n_chunks - 1) * chunk_units
        self.at = self._place_streams()
        self.planes = np.zeros((n_chunks, n_planes, N_FIELDS), np.int64)
        self.scratch_nbytes = 0

    def _place_streams(self) -> Ints:
        """Section 5: where each stream begins; those that are stored come first."""
        used = self.nbytes.sum(axis=1)
        lengths = -(-used // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
        starts = np.cumsum(lengths) - lengths
        if int(lengths.sum()) != self.payload.size:
            words = f"the payload has {self.payload.size} bytes, its chunks {int(lengths.sum())}"
            raise CorruptionError(f"byte {self.origin}: {words}")
        self._check_padding(starts + used, lengths - used)
        stored = self.modes == _STORED
        first = np.where(stored, self.nbytes, 0)
        then = np.where(stored, 0, self.nbytes)
        before = np.where(stored, np.cumsum(first, axis=1) - first, np.cumsum(then, axis=1) - then)
        behind: Ints = np.where(stored, 0, first.sum(axis=1, keepdims=True))
        places: Ints = starts[:, None] + before + behind
        return places

    def _check_padding(self, ends: Ints, n_padding: Ints) -> None:
        steps = np.arange(FRAME_ALIGNMENT)
        index = np.minimum(ends[:, None] + steps, max(self.payload.size - 1, 0))
        if self.payload.size and self.payload[index][steps < n_padding[:, None]].any():
            words = "padding behind the streams of a chunk is not zero"
            raise CorruptionError(f"byte {self.origin}: {words}")

    def plan(self) -> ChunkPlan:
        palettes, entries, escaped_palettes = self._plan_palettes()
        groups, escaped_rans = self._plan_rans()
        self._plan_constants()
        escaped = np.concatenate([escaped_palettes, escaped_rans])
        return ChunkPlan(
            self.geometry,
            self.planes,
            groups,
            palettes,
            entries,
            escaped[:, 2:].copy(),
            escaped[:, :2].copy(),
            self.scratch_nbytes,
        )

    def _streams(self, mode: int) -> _Streams:
        chunk, plane = np.nonzero(self.modes == mode)
        at, nbytes = self.at[chunk, plane], self.nbytes[chunk, plane]
        return _Streams(self.payload, self.origin, chunk, plane, at, nbytes, self.n[chunk])

    def _take_scratch(self, streams: _Streams) -> Ints:
        """Memory for the planes of streams, each a multiple of the longest round."""
        nbytes = -(-streams.n // ROUND) * ROUND
        offsets = self.scratch_nbytes + np.cumsum(nbytes) - nbytes
        self.scratch_nbytes += int(nbytes.sum())
        self.planes[streams.chunk, streams.plane, 0] = FROM_SCRATCH
        self.planes[streams.chunk, streams.plane, 1] = offsets
        self.planes[streams.chunk, streams.plane, 2] = streams.n
        return offsets

    def _plan_constants(self) -> None:
        streams = self._streams(_CONSTANT)
        streams.require(streams.nbytes == 1, "a constant is one byte long")
        here = (streams.chunk, streams.plane)
        self.planes[(*here, 0)] = CONSTANT
        self.planes[(*here, 1)] = streams.window(0, 1)[:, 0] if streams.n.size else 0
        self.planes[(*here, 2)] = streams.n

    def _note_raw_bits(self, streams: _Streams, raw_bits: Ints, mask: Ints, at: Ints) -> None:
        for field, numbers in ((4, raw_bits), (5, mask), (6, streams.at + at)):
            self.planes[streams.chunk, streams.plane, field] = numbers

    def _plan_palettes(self) -> tuple[Ints, ByteArray, Ints]:
        """Section 6.3."""
        streams = self._streams(_PALETTE)
        none = np.empty((0, N_FIELDS), np.int64)
        if not streams.n.size:
            return none, np.empty((0, 1 << MAX_CODE_BITS), np.uint8), np.empty((0, 10), np.int64)
        streams.require(streams.nbytes >= PALETTE_HEADER_NBYTES, "the palette's header is cut off")
        head = streams.window(0, PALETTE_HEADER_NBYTES)
        code_bits, has_escape, raw_bits, raw_mask = head[:, :4].astype(np.int64).T
        n_escapes = head[:, 4:8].copy().view("<u4")[:, 0].astype(np.int64)
        streams.require(code_bits <= MAX_CODE_BITS, f"code_bits is above {MAX_CODE_BITS}")
        allowed = has_escape <= (code_bits > 0)
        streams.require(allowed, "has_escape is neither 0 nor 1, or an escape of no bits")
        _check_raw_bits(streams, raw_bits, raw_mask, MAX_PALETTE_RAW_BITS)
        streams.require((has_escape > 0) | (n_escapes == 0), "escapes without a code for them")
        entries = head[:, 8:].astype(np.int64)
        own = np.arange(1 << MAX_CODE_BITS) < ((1 << code_bits) - has_escape)[:, None]
        streams.require(~(entries * ~own).any(axis=1), "entries beyond the palette are not zero")
        in_range = entries < (256 >> raw_bits)[:, None]
        streams.require(in_range.all(axis=1), "a symbol of the palette is too large")
        plane_nbytes = 8 * -(-streams.n // 64)
        raw_at = PALETTE_HEADER_NBYTES + code_bits * plane_nbytes
        escapes_at = raw_at + _bit_count(raw_mask) * plane_nbytes
        exact = streams.nbytes == escapes_at + n_escapes
        streams.require(exact, "the palette is longer or shorter than its fields say")
        _check_escapes(streams, escapes_at, n_escapes, raw_bits)
        values = entries << raw_bits[:, None]
        marker = _markers(values, raw_bits)
        values = np.where(own, values, marker[:, None])
        out = self._take_scratch(streams)
        self._note_raw_bits(streams, raw_bits, raw_mask, raw_at)
        rows = _rows(streams.at + PALETTE_HEADER_NBYTES, code_bits, streams.n, out)
        escaped = _escaped(streams, out, marker, escapes_at, n_escapes, raw_bits)
        return rows, values.astype(np.uint8), escaped[has_escape > 0]

    def _plan_rans(self) -> tuple[tuple[RansGroup, ...], Ints]:
        """Section 6.4, and the carried bytes of section 5."""
        streams = self._streams(_RANS)
        if not streams.n.size:
            nothing = np.zeros(len(self.n), np.int64)
            self._plan_stored(nothing, nothing)
            return (), np.empty((0, 10), np.int64)
        heads = _read_heads(streams)
        words_at = heads.escapes_at + heads.n_escapes
        n_free = streams.nbytes - words_at
        streams.require(n_free >= 0, "a stream is shorter than its own fields say")
        streams.require(n_free % 2 == 0, "half a word is behind the words")
        states = _read_states(streams, heads)
        _check_escapes(streams, heads.escapes_at, heads.n_escapes, heads.raw_bits)
        out = self._take_scratch(streams)
        self._note_raw_bits(streams, heads.raw_bits, heads.raw_mask, heads.raw_at)
        carried_at = self._plan_carried(streams, heads.n_lanes)
        rows = _rows(
            streams.at + words_at, n_free // 2, heads.n_lanes // 4, streams.n, out, carried_at
        )
        escaped = _escaped(
            streams, out, heads.marker, heads.escapes_at, heads.n_escapes, heads.raw_bits
        )
        return _rans_groups(streams, heads.codes, rows, states), escaped[heads.has_escape]

    def _plan_carried(self, streams: _Streams, n_lanes: Ints) -> Ints:
        """Where in scratch memory each stream leaves what it carries, or -1 if that is nothing."""
        nbytes = 2 * n_lanes
        of_chunk = np.bincount(streams.chunk, nbytes, len(self.n)).astype(np.int64)
        starts = self.scratch_nbytes + np.cumsum(of_chunk) - of_chunk
        offsets = self.scratch_nbytes + np.cumsum(nbytes) - nbytes  # streams are in this order too
        self.scratch_nbytes += -(-int(nbytes.sum()) // ROUND) * ROUND
        lends = self._plan_stored(of_chunk, starts)
        carried_at: Ints = np.where(lends[streams.chunk], offsets, -1)
        return carried_at

    def _plan_stored(self, n_carried: Ints, carried_at: Ints) -> NDArray[np.bool_]:
        """Section 5: the last stored plane of a chunk may lend its end; tells where it does."""
        stored, n = self.modes == _STORED, self.n[:, None]
        is_last = stored & (np.cumsum(stored[:, ::-1], axis=1)[:, ::-1] == 1)
        lends = is_last & (n_carried > 0)[:, None] & (self.nbytes == n - n_carried[:, None])
        exact = (self.nbytes == n) | lends
        self._streams(_STORED).require(
            exact[stored], "a stored stream has another length than its plane"
        )
        self.planes[..., 0][stored] = FROM_PAYLOAD
        self.planes[..., 1][stored] = self.at[stored]
        self.planes[..., 2][stored] = self.nbytes[stored]
        self.planes[..., 3] = np.where(stored, carried_at[:, None], 0)
        any_lends: NDArray[np.bool_] = lends.any(axis=1)
        return any_lends


class _Heads(NamedTuple):
    """The fields of S rANS streams; offsets count from the start of a stream."""

    n_lanes: Ints
    raw_bits: Ints
    raw_mask: Ints
    n_escapes: Ints
    states_at: Ints
    raw_at: Ints
    escapes_at: Ints
    has_escape: NDArray[np.bool_]
    marker: Ints  # a byte that no code yields
    codes: Codes


def _read_heads(streams: _Streams) -> _Heads:
    streams.require(streams.nbytes >= MODEL_OFFSET + 2, "the rANS header is cut off")
    head = streams.window(0, MODEL_OFFSET + 2)
    lanes_log, prob_bits, raw_bits, raw_mask = head[:, :4].astype(np.int64).T
    n_escapes = head[:, 4:8].copy().view("<u4")[:, 0].astype(np.int64)
    in_range = (lanes_log >= MIN_LANES_LOG) & (lanes_log <= MAX_LANES_LOG)
    streams.require(in_range, f"lanes_log is not in {MIN_LANES_LOG} to {MAX_LANES_LOG}")
    streams.require(prob_bits == PROB_BITS, f"prob_bits is not {PROB_BITS}")
    _check_raw_bits(streams, raw_bits, raw_mask, MAX_RANS_RAW_BITS)
    first, n_symbols = head[:, 8].astype(np.int64), head[:, 9].astype(np.int64) + 1
    in_range = first + n_symbols <= 256 >> raw_bits
    streams.require(in_range, "the model's symbols reach beyond what there are")
    states_at = MODEL_OFFSET + 2 + -(-3 * (n_symbols + 1) // 2)
    streams.require(streams.nbytes >= states_at, "the model is cut off")
    freqs = _read_freqs(streams, n_symbols)
    codes, has_escape, marker = _read_codes(streams, freqs, first, n_symbols, raw_bits)
    streams.require(has_escape | (n_escapes == 0), "escapes without a code for them")
    n_lanes = 1 << lanes_log
    raw_at = states_at + 4 * n_lanes
    escapes_at = raw_at + _bit_count(raw_mask) * 8 * -(-streams.n // 64)
    return _Heads(
        n_lanes,
        raw_bits,
        raw_mask,
        n_escapes,
        states_at,
        raw_at,
        escapes_at,
        has_escape,
        marker,
        codes,
    )


def _read_freqs(streams: _Streams, n_symbols: Ints) -> Ints:
    """Section 6.2: the frequencies of the symbols and, at `n_symbols`, of the escape."""
    n_pairs = int(n_symbols.max()) // 2 + 1
    packed = streams.window(MODEL_OFFSET + 2, 3 * n_pairs).astype(np.int64)
    low, middle, high = packed[:, 0::3], packed[:, 1::3], packed[:, 2::3]
    pairs = [low | (middle & 15) << 8, middle >> 4 | high << 4]
    freqs = np.stack(pairs, axis=2).reshape(len(packed), -1)
    rows = np.arange(len(packed))
    odd = n_symbols % 2 == 0  # an odd number of frequencies leaves half a byte over
    left = packed[rows, 3 * (n_symbols // 2) + 1] >> 4
    streams.require(~odd | (left == 0), "the half byte behind the frequencies is not zero")
    freqs *= np.arange(freqs.shape[1]) <= n_symbols[:, None]
    streams.require(freqs.sum(axis=1) == PROB_SUM, f"the frequencies do not sum to {PROB_SUM}")
    return freqs


def _read_codes(
    streams: _Streams, freqs: Ints, first: Ints, n_symbols: Ints, raw_bits: Ints
) -> tuple[Codes, NDArray[np.bool_], Ints]:
    """The codes of models, which of them have an escape, and the byte that marks it."""
    rows = np.arange(len(freqs))
    has_escape = freqs[rows, n_symbols] > 0
    present = freqs > 0
    n_codes = present.sum(axis=1)
    beside_all = has_escape & (n_codes == (256 >> raw_bits) + 1)
    streams.require(~beside_all, "an escape beside codes for all symbols")
    values = (first[:, None] + np.arange(freqs.shape[1])) << raw_bits[:, None]
    own = present.copy()
    own[rows, n_symbols] = False
    marker = _markers(np.where(own, values, -1), raw_bits)
    values[rows, n_symbols] = marker
    order = np.argsort(~present, axis=1, kind="stable")
    codes = Codes(
        n_codes,
        np.take_along_axis(freqs, order, 1),
        np.take_along_axis(np.where(present, values, 0), order, 1),
    )
    return codes, has_escape, marker


def _markers(values: Ints, raw_bits: Ints) -> Ints:
    """For each row of values a byte that is none of them, or 0 if all are there.

    Values have no raw bits, so one with some is free; else the first gap is looked for.
    """
    taken = np.zeros((len(values), 257), np.bool_)
    taken[np.arange(len(values))[:, None], np.where(values < 0, 256, values)] = True
    return np.where(raw_bits > 0, 1, np.argmin(taken[:, :256], axis=1))


def _read_states(streams: _Streams, heads: _Heads) -> Words:
    """The states of all lanes, (S, 4, 32); of lanes that are not there, the lower bound."""
    nbytes = heads.states_at + 4 * heads.n_lanes
    streams.require(streams.nbytes >= nbytes, "the states are cut off")
    packed = streams.window(heads.states_at, 4 * ROUND)
    states = packed.view("<u4").astype(np.uint32)
    there = np.arange(ROUND) < heads.n_lanes[:, None]
    good = (states >= STATE_LOWER_BOUND) | ~there
    streams.require(good.all(axis=1), f"a state is below {STATE_LOWER_BOUND}")
    quarter = heads.n_lanes // _QUARTERS
    t = np.arange(_QUARTER)
    index = np.arange(_QUARTERS)[:, None] * quarter[:, None, None] + t
    rows = np.arange(len(states))[:, None, None]
    lanes: Words = states[rows, np.minimum(index, ROUND - 1)]
    lanes[np.broadcast_to(t >= quarter[:, None, None], lanes.shape)] = STATE_LOWER_BOUND
    return lanes


def _rans_groups(
    streams: _Streams, codes: Codes, rows: Ints, states: Words
) -> tuple[RansGroup, ...]:
    """One group for all models of the alias layout, and one for those of the plain layout."""
    n_buckets = n_buckets_of(codes.n_codes)
    places = np.stack([streams.chunk, streams.plane], axis=1)
    groups = []
    for is_plain in (False, True):
        members = np.flatnonzero((n_buckets == PLAIN_BUCKETS) == is_plain)
        if not members.size:
            continue
        mine = codes.take(members)
        widest = PLAIN_BUCKETS if is_plain else int(n_buckets[members].max())
        tables = plain_table(mine) if is_plain else bucket_tables(mine, widest)
        groups.append(RansGroup(widest, rows[members], states[members], tables, places[members]))
    return tuple(groups)


def _check_raw_bits(streams: _Streams, raw_bits: Ints, raw_mask: Ints, most: int) -> None:
    streams.require(raw_bits <= most, f"raw_bits is above {most}")
    streams.require(raw_mask >> np.minimum(raw_bits, 8) == 0, "raw_mask reaches beyond raw_bits")


def _check_escapes(streams: _Streams, at: Ints, n_escapes: Ints, raw_bits: Ints) -> None:
    """Section 6.1: symbols have no more bits than are left for them."""
    good = np.ones(n_escapes.size, np.bool_)
    for i in np.flatnonzero((n_escapes > 0) & (raw_bits > 0) & (at + n_escapes <= streams.nbytes)):
        start = streams.at[i] + at[i]
        good[i] = streams.payload[start : start + n_escapes[i]].max() < 256 >> raw_bits[i]
    streams.require(good, "an escape is too large")


def _escaped(
    streams: _Streams, out: Ints, marker: Ints, at: Ints, n_escapes: Ints, raw_bits: Ints
) -> Ints:
    """Rows of `ChunkPlan.escaped`, with chunk and plane before them."""
    rows = _rows(out, streams.n, marker, streams.at + at, n_escapes, raw_bits)
    return np.concatenate([streams.chunk[:, None], streams.plane[:, None], rows], axis=1)


def _rows(*fields: Ints) -> Ints:
    rows = np.zeros((len(fields[0]), N_FIELDS), np.int64)
    for i, numbers in enumerate(fields):
        rows[:, i] = numbers
    return rows


def _bit_count(mask: Ints) -> Ints:
    bits: Ints = (mask[:, None] >> np.arange(8) & 1).sum(axis=1)
    return bits
