"""Chooses how to pack a tensor: its split, its chunk size, and planes, nibbles, matches or zstd.
The core then chooses a mode for every plane of every chunk.

A plan is made from samples: a few times 4096 units spread over the tensor for the planes, and a few
pieces for matches and zstd where repetition is likely. If a tensor seems to take far less than
weights do, more of it is examined, because samples may have missed most of it. Planning costs well
under a tenth of packing for weights, and up to a third for integers. A plan does not depend on the
number of threads, and it says why it was chosen.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from packhorse import _core
from packhorse._core import Geometry
from packhorse.codecs import zstd
from packhorse.codecs.base import ByteArray
from packhorse.codecs.side import NO_SIDE_DATA, SideData, choose_side
from packhorse.codecs.source import Source, cut
from packhorse.layout import (
    CLASSED_CHUNK_NBYTES,
    FRAME_ALIGNMENT,
    NIBBLE_CHUNK_NBYTES,
    ZSTD_CHUNK_NBYTES,
    Level,
    Mode,
    Split,
)

__all__ = ["Plan", "choose_plan", "plan_of_streams"]

_SAMPLE_EVERY_NBYTES = 4 << 20  # one run of 4096 units for each 4 MiB
_MAX_SAMPLES = 16
_PIECE_NBYTES = 1 << 17
_LEAST_PIECE_NBYTES = 1 << 16  # of a short tensor, a trial takes less than its whole
_MAX_PIECES = 3
_MORE_PIECES = 4  # of integers, if three take about what planes do, ...
_ABOUT = 1 / 8  # ... more or less this share
_ALIKE = 1 / 256  # three pieces whose sizes differ by less tell that the others do, too
_PIECE_PART = 32  # a piece is at most this part of a tensor, ...
# ... and a long one, which only says how good matches are, this part, but no shorter than others
_LONG_PIECE_PART = 48
_VERY_REPETITIVE = 1 / 8  # at this share or less, pieces are as long as chunks
_MIN_SAVING = 1 / 256  # a tensor that saves less is stored as it is, at copy speed
_NIBBLES_TAKE = 1 / 2  # of the bytes; what takes less by planes has more structure than nibbles
_NIBBLES_MUST_SAVE = {Level.FAST: 1 / 32, Level.DEFAULT: 1 / 64, Level.MAX: 1 / 1024}  # as a plane
_MAY_TAKE = 1 + 1 / 512  # of what models of bytes take, because they are packed twice as fast
_ABOUT_EQUAL = 1 + 1 / 64  # a sample of 4096 units flatters models of 256 values by as much
_WHOLE_MUST_SAVE = 0.04  # of the planes' size, because matches and zstd are slower
_FEW = 1 / 64  # at this share or less, zstd is faster than matches, ...
_MATCHES_MUST_SAVE = 1 / 16  # ... which must save this share of its size; but bytes ...
# ... decode faster by matches, which may take this many times its size below level `max`
_BYTES_MAY_TAKE = 2
# Matches that take this share of what zstd takes in one piece are better. At level `max` level 9 of
# zstd is asked: level 12 took at least .84 of what it takes.
_CLEARLY_LESS = {Level.FAST: 0.75, Level.DEFAULT: 0.75, Level.MAX: 0.84}
_REPETITIVE = 7 / 8  # a float's last plane that takes this share or less hints at repetition
_NOISE = 7 / 8  # planes that take more look like noise: a glance comes before the trials


class Plan(NamedTuple):
    """How a tensor is packed, and why.

    Attributes:
        geometry: how the tensor is cut.
        level: the level asked for.
        estimated_nbytes: expected bytes of the payload, estimated from samples.
        planes: expected mode and bytes of each plane without side data; empty if the tensor is not
            coded plane by plane.
        side: the side data, which predict exponents from row and column; often there are none.
        plain_nbytes: bytes expected without the base; 0 if no base is used.
        whole: how chunks of whole units are coded: by Zstandard, matches or nibbles; stored if
            chunks are coded plane by plane.
    """

    geometry: Geometry
    level: Level
    estimated_nbytes: int
    planes: tuple[tuple[int, int], ...] = ()
    side: SideData = NO_SIDE_DATA
    plain_nbytes: int = 0
    whole: Mode = Mode.STORED

    @property
    def split(self) -> Split:
        """How units become planes."""
        return Split(self.geometry.split)

    @property
    def chunk_log(self) -> int:
        """Log2 of the units of a chunk."""
        return self.geometry.chunk_log

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.geometry.nbytes

    @property
    def reason(self) -> str:
        """Why the plan was chosen, in one line."""
        if self.nbytes == 0:
            return "no elements"
        if self.plain_nbytes:
            share = self.estimated_nbytes / self.plain_nbytes
            return f"differences from the base take {share:.1%} of what the tensor would"
        part = f"{self.estimated_nbytes / self.nbytes:.1%} of a sample"
        if self.whole == Mode.NIBBLES:
            return f"pairs of 4-bit numbers: take {part}"
        if self.whole:
            coder = "zstd takes" if self.whole == Mode.ZSTD else "matches take"
            return f"repetitive: {coder} {part}"
        if not self.planes:
            is_short = self.nbytes <= FRAME_ALIGNMENT  # then padding takes what packing saves
            return "too short to pack: stored" if is_short else "incompressible in a sample: stored"
        bits = 8 / (self.nbytes // len(self.planes))  # a unit has one byte for each plane
        words = ", ".join(f"{Mode(mode).name.lower()} {n * bits:.2f}" for mode, n in self.planes)
        saved = f"; row and column save {self.side.saving * bits:.2f}" if self.side.saving else ""
        return f"planes in bits: {words}{saved}"

    def __repr__(self) -> str:
        return f"Plan({self.level.name}, {self.estimated_nbytes} bytes, {self.reason!r})"


def choose_plan(source: Source, level: Level, *, with_side: bool = True) -> Plan:
    """Chooses how a tensor is packed.

    Args:
        source: the tensor.
        level: how hard to try.
        with_side: whether to try side data.
    """
    data, dtype, shape, geometry = source
    nbytes, split = data.size, dtype.splits[-1]
    if level == Level.MAX:
        geometry = cut(dtype, split, nbytes, CLASSED_CHUNK_NBYTES)
    if nbytes == 0:
        return Plan(geometry, level, 0)
    short = _core.plan_short(data, dtype.code, len(shape), level)
    if short is not None:
        geometry, streams = short
        return plan_of_streams(geometry, level, streams)
    n_samples = min(_MAX_SAMPLES, 1 + nbytes // _SAMPLE_EVERY_NBYTES)
    look = None
    if Split.FLOAT not in dtype.splits:
        look = _core.estimate_nibbles(data, dtype.unit_nbytes, level, 1)
        if look[1] >= nbytes * _NOISE:  # then planes take about as much
            nibbles = _nibbles_plan(source, level, look, look[1], n_samples)
            if nibbles is not None:
                return _plan_of_whole(source, level, look[1], nibbles.estimated_nbytes) or nibbles
    estimates, is_odd = _core.estimate_planes(data, geometry, level, n_samples)
    planes_nbytes = sum([nbytes for _, nbytes in estimates])
    if _core.needs_no_plan(data, dtype.code, shape, level):  # then the core does not ask for one
        return Plan(geometry, level, planes_nbytes, tuple(estimates))
    nibbles = None
    if look is not None and planes_nbytes >= nbytes * _NIBBLES_TAKE:
        nibbles = _nibbles_plan(source, level, look, planes_nbytes, n_samples)
    best_nbytes = planes_nbytes if nibbles is None else nibbles.estimated_nbytes
    if all([mode == Mode.CONSTANT for mode, _ in estimates]):  # a chunk takes one row and no time
        geometry = cut(dtype, split, nbytes, CLASSED_CHUNK_NBYTES)
    elif not _is_noise(source, estimates, is_odd):
        whole = _plan_of_whole(source, level, planes_nbytes, best_nbytes)
        if whole is not None:
            return whole
    if nibbles is not None:
        return nibbles
    if planes_nbytes > nbytes * (1 - _MIN_SAVING):
        as_it_is = Geometry(dtype.unit_nbytes, Split.WHOLE, geometry.chunk_log, nbytes)
        return Plan(as_it_is, level, nbytes)
    side = NO_SIDE_DATA
    if with_side:
        side = choose_side(source, level, estimates[0][1])
    if side.saving:
        geometry = cut(dtype, split, nbytes, CLASSED_CHUNK_NBYTES)
        planes_nbytes -= side.saving
    return Plan(geometry, level, planes_nbytes, tuple(estimates), side)


def plan_of_streams(geometry: Geometry, level: Level, streams: Sequence[tuple[int, int]]) -> Plan:
    """The plan that a tensor would have had which the core has packed without one.

    Args:
        geometry: how it is cut.
        level: the level asked for.
        streams: mode and bytes of each plane, or of the whole units.
    """
    nbytes, first = sum([n for _, n in streams]), Mode(streams[0][0])
    if geometry.split == Split.WHOLE and first in (Mode.STORED, Mode.MATCHES, Mode.NIBBLES):
        return Plan(geometry, level, nbytes, whole=first)
    return Plan(geometry, level, nbytes, tuple(streams))


def _nibbles_plan(
    source: Source, level: Level, look: tuple[int, int], planes_nbytes: int, n_samples: int
) -> Plan | None:
    """The plan that codes bytes as pairs of numbers of four bits, as quantised weights are stored;
    None if that does not pay. `look` is the estimate from one sample."""
    data = source.data
    most = data.size * (1 - _NIBBLES_MUST_SAVE[level])
    nbytes, alike_nbytes = look
    if nbytes >= (most + data.size) / 2:  # the look is enough for noise
        return None
    if n_samples > 1:
        unit_nbytes = source.dtype.unit_nbytes
        nbytes, alike_nbytes = _core.estimate_nibbles(data, unit_nbytes, level, n_samples)
    if level is not Level.FAST:  # there, bytes have no models
        most = min(most, alike_nbytes * _MAY_TAKE)
        planes_nbytes = int(planes_nbytes * _ABOUT_EQUAL)
    if nbytes >= min(most, planes_nbytes):
        return None
    geometry = cut(source.dtype, Split.WHOLE, data.size, NIBBLE_CHUNK_NBYTES)
    return Plan(geometry, level, nbytes, whole=Mode.NIBBLES)


def _is_noise(source: Source, estimates: list[tuple[int, int]], is_odd: bool) -> bool:
    """Whether the last plane is noise, as that of real weights is. If it is not, or if the samples
    missed much of the tensor, the data is not weights."""
    dtype = source.dtype
    share = _REPETITIVE if dtype.unit_nbytes > 1 else _REPETITIVE / 2
    if Split.FLOAT not in dtype.splits or is_odd:
        return False
    return estimates[-1][1] * dtype.unit_nbytes > source.data.size * share


def _plan_of_whole(
    source: Source, level: Level, planes_nbytes: int, best_nbytes: int
) -> Plan | None:
    """The plan that codes whole units by matches or zstd; None if that does not pay.

    If all planes seem to be noise, or units are bytes, a glance shows whether anything repeats more
    than by chance, or rises, before there are trials; but at level `fast`, zstd is all there is
    against such planes.
    """
    data, dtype = source.data, source.dtype
    looks_like_noise = dtype.unit_nbytes == 1 or planes_nbytes > data.size * _NOISE
    if (
        looks_like_noise
        and level != Level.FAST
        and not _core.may_match(data, dtype.unit_nbytes, min(planes_nbytes, data.size))
    ):
        return None
    nbytes, coder = _estimate_whole(source, level, best_nbytes)
    if nbytes >= best_nbytes * (1 - _WHOLE_MUST_SAVE):
        return None
    geometry = cut(dtype, Split.WHOLE, data.size, ZSTD_CHUNK_NBYTES)
    return Plan(geometry, level, nbytes, whole=coder)


def _estimate_whole(source: Source, level: Level, planes_nbytes: int) -> tuple[int, Mode]:
    """Estimates the bytes that whole units take, and whether by matches or by zstd. If planes
    clearly take less, all bytes of the tensor stand for what these take."""
    data, unit_nbytes = source.data, source.dtype.unit_nbytes

    def match_nbytes(piece: ByteArray) -> int:
        return _core.estimate_matches(piece, unit_nbytes, level)

    def match_nbytes_soon(piece: ByteArray) -> int:
        return _core.estimate_matches(piece, unit_nbytes, min(level, Level.DEFAULT))

    def zstd_nbytes(piece: ByteArray) -> int:
        return zstd.estimate_nbytes(piece, level)

    def zstd_nbytes_soon(piece: ByteArray) -> int:
        return zstd.estimate_nbytes(piece, level, is_quick=True)

    part = max(_LEAST_PIECE_NBYTES, min(_PIECE_NBYTES, data.size // _PIECE_PART // 8 * 8))
    by_matches = data.size  # other bytes than masks are better with zstd
    are_alike, n_pieces = False, _MAX_PIECES
    if unit_nbytes > 1:
        packed = _pack_pieces(data, match_nbytes, part)
        by_matches = _scale_pieces(data, packed, part)
        is_long = data.size > _MAX_PIECES * part
        are_alike = is_long and max(packed) - min(packed) < min(packed) * _ALIKE
        is_close = abs(by_matches - planes_nbytes) < planes_nbytes * _ABOUT
        if is_close and is_long and not are_alike and Split.FLOAT not in source.dtype.splits:
            n_pieces = _MORE_PIECES
            by_matches = _estimate_pieces(data, match_nbytes, part, n_pieces)
    by_zstd = _estimate_pieces(data, zstd_nbytes_soon, part, most=1)
    if are_alike and level < Level.MAX and min(by_matches, by_zstd) > planes_nbytes:
        return data.size, Mode.ZSTD  # more pieces would say the same
    if by_matches >= by_zstd * _CLEARLY_LESS[level]:
        by_zstd = _estimate_pieces(data, zstd_nbytes, part)
    if min(by_zstd, by_matches) <= data.size * _FEW:  # both are fast there, and matches are long
        by_zstd = _estimate_pieces(data, zstd_nbytes, ZSTD_CHUNK_NBYTES)
        by_matches = _estimate_pieces(data, match_nbytes, ZSTD_CHUNK_NBYTES)
        share = 1 - _MATCHES_MUST_SAVE
        if unit_nbytes == 1:
            share = 1 if level is Level.MAX else _BYTES_MAY_TAKE
        matches = by_matches < by_zstd * share
        return (by_matches, Mode.MATCHES) if matches else (by_zstd, Mode.ZSTD)
    if by_matches < by_zstd:
        long = max(_PIECE_NBYTES, data.size // _LONG_PIECE_PART // 8 * 8)
        long = min(ZSTD_CHUNK_NBYTES, long)
        if long > part and by_matches <= data.size * _VERY_REPETITIVE:
            by_matches = _estimate_pieces(data, match_nbytes_soon, long, n_pieces)
        return by_matches, Mode.MATCHES
    if by_zstd <= data.size * _VERY_REPETITIVE:
        by_zstd = _estimate_pieces(data, zstd_nbytes, ZSTD_CHUNK_NBYTES)
    return by_zstd, Mode.ZSTD


def _estimate_pieces(
    data: ByteArray,
    estimate: Callable[[ByteArray], int],
    piece_nbytes: int,
    most: int = _MAX_PIECES,
) -> int:
    """Estimates the bytes of a tensor from those of a few pieces."""
    packed = _pack_pieces(data, estimate, piece_nbytes, most)
    return _scale_pieces(data, packed, piece_nbytes)


def _pack_pieces(
    data: ByteArray,
    estimate: Callable[[ByteArray], int],
    piece_nbytes: int,
    most: int = _MAX_PIECES,
) -> list[int]:
    """Estimates the bytes of a few pieces of a tensor: from the middles of as many equal parts, so
    that the first units stand for no more than themselves. Pieces as long as chunks go from end to
    end, so that the first one is a chunk: masks look better or worse elsewhere."""
    n_pieces = min(most, math.ceil(data.size / piece_nbytes))
    last = max(0, data.size - piece_nbytes)
    if piece_nbytes == ZSTD_CHUNK_NBYTES:
        starts = [i * last // max(1, n_pieces - 1) for i in range(n_pieces)]
    else:
        middles = [(2 * i + 1) * data.size // (2 * n_pieces) for i in range(n_pieces)]
        starts = [min(max(0, middle - piece_nbytes // 2), last) for middle in middles]
    starts = [start // 8 * 8 for start in starts]  # whole units
    # Copies, because the library is not written for bytes that change while it reads them.
    return [estimate(data[start : start + piece_nbytes].copy()) for start in starts]


def _scale_pieces(data: ByteArray, packed: list[int], piece_nbytes: int) -> int:
    """What a tensor takes if it is like its pieces."""
    return int(sum(packed) * (data.size / (len(packed) * min(piece_nbytes, data.size))))
