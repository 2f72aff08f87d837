"""Choosing how to pack a tensor: which split, which chunk size, planes or zstd. The core then
chooses a mode for every plane of every chunk.

A plan is made from samples: a few times 4096 units spread over the tensor for the planes, and a few
pieces for zstd where repetition is likely. What seems to take far less than weights do is looked at
again, as samples may have missed most of it. It costs well under a tenth of packing, it does not
depend on the number of threads, and it says why.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import ByteArray
from packhorse.codecs.side import NO_SIDE_DATA, SideData, choose_side
from packhorse.layout import (
    CHUNK_NBYTES,
    CLASSED_CHUNK_NBYTES,
    ZSTD_CHUNK_NBYTES,
    DType,
    Level,
    Mode,
    Split,
)

__all__ = ["Plan", "choose_plan", "chunk_log_for", "natural_split"]

_SAMPLE_EVERY_NBYTES = 4 << 20  # one run of 4096 units for each 4 MiB
_MAX_SAMPLES = 16
_ZSTD_PIECE_NBYTES = 1 << 17
_MAX_ZSTD_PIECES = 3
_VERY_REPETITIVE = 1 / 8  # at this share or less pieces are as long as chunks
_MIN_SAVING = 1 / 256  # below this a tensor is stored as it is, at copy speed
_ZSTD_MUST_SAVE = 0.02  # of the planes' size: it is slower, so it has to earn its place
_REPETITIVE = 7 / 8  # a float's last plane at this share of its size or less hints at repetition


class Plan(NamedTuple):
    """How a tensor is packed, and why.

    Attributes:
        split: how units become planes.
        level: the level asked for.
        zstd: whether chunks are coded by Zstandard instead of plane by plane.
        chunk_log: log2 of the units of a chunk.
        nbytes: bytes of the tensor.
        estimated_nbytes: expected encoded bytes, headers not counted; from samples.
        planes: expected mode and bytes of each plane without side data; empty if the tensor is not
            coded plane by plane.
        side: what predicts the exponents from row and column; often nothing.
        plain_nbytes: what would be expected without a base; 0 where none is used.
    """

    split: Split
    level: Level
    zstd: bool
    chunk_log: int
    nbytes: int
    estimated_nbytes: int
    planes: tuple[tuple[int, int], ...] = ()
    side: SideData = NO_SIDE_DATA
    plain_nbytes: int = 0

    @property
    def reason(self) -> str:
        """One line for people."""
        if self.nbytes == 0:
            return "no elements"
        if self.plain_nbytes:
            share = self.estimated_nbytes / self.plain_nbytes
            return f"differences from the base take {share:.1%} of what the tensor would"
        if self.zstd:
            return f"repetitive: zstd takes {self.estimated_nbytes / self.nbytes:.1%} of a sample"
        if not self.planes:
            return "incompressible in a sample: stored"
        bits = 8 / (self.nbytes // len(self.planes))  # a unit has a byte for each plane
        words = ", ".join(f"{Mode(mode).name.lower()} {n * bits:.2f}" for mode, n in self.planes)
        saved = f"; row and column save {self.side.saving * bits:.2f}" if self.side.saving else ""
        return f"planes in bits: {words}{saved}"

    def __repr__(self) -> str:
        return f"Plan({self.level.name}, {self.estimated_nbytes} bytes, {self.reason!r})"


def chunk_log_for(unit_nbytes: int, n_units: int, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """Log2 of the units of a chunk. A tensor of at most one and a half chunks is one chunk, so that
    no short rest is left."""
    log = (chunk_nbytes // unit_nbytes).bit_length() - 1
    if 1 << log < n_units <= 3 << (log - 1) and chunk_nbytes < ZSTD_CHUNK_NBYTES:
        return log + 1
    return log


def _chunk_nbytes(level: Level) -> int:
    return CLASSED_CHUNK_NBYTES if level == Level.MAX else CHUNK_NBYTES


def natural_split(dtype: DType) -> Split:
    """The split that separates what the dtype mixes: its last in the table of docs/format.md."""
    return dtype.splits[-1]


def choose_plan(
    data: ByteArray,
    dtype: DType,
    shape: Sequence[int],
    level: Level,
    isa: int,
    *,
    with_side: bool = True,
) -> Plan:
    """Plans for a tensor's bytes.

    Args:
        data: all bytes of the tensor, one-dimensional.
        dtype: its dtype.
        shape: its shape.
        level: how hard to try.
        isa: the number of the instruction set of the call.
        with_side: whether to see if side data pay.
    """
    split = natural_split(dtype)
    n_units = data.size // dtype.unit_nbytes
    chunk_log = chunk_log_for(dtype.unit_nbytes, n_units, _chunk_nbytes(level))
    if data.size == 0:
        return Plan(split, level, False, chunk_log, 0, 0)
    n_samples = min(_MAX_SAMPLES, 1 + data.size // _SAMPLE_EVERY_NBYTES)
    estimates, is_odd = _core.estimate_planes(data, dtype.unit_nbytes, split, level, n_samples, isa)
    planes_nbytes = sum([nbytes for _, nbytes in estimates])
    if _may_repeat(dtype, estimates, is_odd, data.size):
        zstd_nbytes = _estimate_zstd(data, level)
        if zstd_nbytes < planes_nbytes * (1 - _ZSTD_MUST_SAVE):
            chunk_log = chunk_log_for(dtype.unit_nbytes, n_units, ZSTD_CHUNK_NBYTES)
            return Plan(Split.WHOLE, level, True, chunk_log, data.size, zstd_nbytes)
    if planes_nbytes > data.size * (1 - _MIN_SAVING):
        return Plan(Split.WHOLE, level, False, chunk_log, data.size, data.size)
    side = NO_SIDE_DATA
    if with_side:
        side = choose_side(data, dtype, shape, level, isa, estimates[0][1])
    if side.saving:
        chunk_log = chunk_log_for(dtype.unit_nbytes, n_units, CLASSED_CHUNK_NBYTES)
        planes_nbytes -= side.saving
    return Plan(split, level, False, chunk_log, data.size, planes_nbytes, tuple(estimates), side)


def _may_repeat(dtype: DType, estimates: list[tuple[int, int]], is_odd: bool, nbytes: int) -> bool:
    """Whether a trial of zstd is worth its time. The last plane of real weights is noise; where it
    is not, or the samples saw less than there is, the data is not weights."""
    share = _REPETITIVE if dtype.unit_nbytes > 1 else _REPETITIVE / 2
    is_noise = Split.FLOAT in dtype.splits and estimates[-1][1] * dtype.unit_nbytes > nbytes * share
    if is_noise and not is_odd:
        return False
    return any([mode != Mode.CONSTANT for mode, _ in estimates])


def _estimate_zstd(data: ByteArray, level: Level) -> int:
    nbytes = _zstd_nbytes(data, level, _ZSTD_PIECE_NBYTES)
    if nbytes > data.size * _VERY_REPETITIVE:
        return nbytes
    return _zstd_nbytes(data, level, ZSTD_CHUNK_NBYTES)  # it is soon done, and matches are long


def _zstd_nbytes(data: ByteArray, level: Level, piece_nbytes: int) -> int:
    n_pieces = min(_MAX_ZSTD_PIECES, math.ceil(data.size / piece_nbytes))
    last = max(0, data.size - piece_nbytes)
    starts = [i * last // max(1, n_pieces - 1) for i in range(n_pieces)]
    # Copies, since a library that nobody wrote for it must not see bytes change.
    pieces = [data[start : start + piece_nbytes].copy() for start in starts]
    packed = sum(zstd.estimate_nbytes(piece, level) for piece in pieces)
    return int(packed * (data.size / sum(piece.size for piece in pieces)))
