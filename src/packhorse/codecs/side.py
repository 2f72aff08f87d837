"""Side data: a byte for each row and each column of a tensor, which predict its exponents
(docs/format.md, sections 2 and 6.5).

Optimizer states gain most: the size of a gradient follows its row and its column. A sample decides
whether a tensor gains enough. Levels below `max` demand a large gain, because classed decoding is
slower.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packhorse import _core
from packhorse._core import Side
from packhorse.codecs.base import ByteArray, as_bytes, decode_plane, encode_plane
from packhorse.codecs.source import Source
from packhorse.errors import CorruptionError
from packhorse.layout import (
    STREAM_NBYTES_BITS,
    STREAM_NBYTES_MASK,
    DType,
    Level,
    Mode,
    Split,
)

__all__ = ["NO_SIDE_DATA", "SideData", "choose_side", "decode_side", "matrix_of", "side_capacity"]


class SideData(NamedTuple):
    """The side data of a frame.

    Attributes:
        n_row_dims: how many leading dimensions make the rows; 0 for no side data.
        n_rows: product of those dimensions.
        values: n_rows + n_columns bytes; empty for no side data.
        stream: the values as they stand in the header.
        descriptor: mode and length of the stream.
        saving: estimated bytes that the side data save in plane 0, minus their own size.
    """

    n_row_dims: int
    n_rows: int
    values: bytes
    stream: bytes
    descriptor: int
    saving: int

    def view(self) -> Side | None:
        """The values in the form that the core takes; None for no side data."""
        return Side(np.frombuffer(self.values, np.uint8), self.n_rows) if self.n_row_dims else None


NO_SIDE_DATA = SideData(0, 0, b"", b"", 0, 0)


def matrix_of(dtype: DType, shape: Sequence[int], n_row_dims: int) -> tuple[int, int]:
    """Returns the rows and columns, in units, of a tensor of at least one element."""
    rows = math.prod(shape[:n_row_dims])
    units = math.prod(shape) * dtype.bits // (8 * dtype.unit_nbytes)
    return rows, units // rows


def side_capacity(dtype: DType, shape: Sequence[int]) -> int:
    """Returns the most bytes that the side data of such a tensor can take in its header."""
    return max([sum(matrix_of(dtype, shape, dims)) for dims in _views(dtype, shape)], default=0)


def _views(dtype: DType, shape: Sequence[int]) -> list[int]:
    """Returns the `n_row_dims` that are worth trying: 1, and all dimensions but the last."""
    if len(shape) < 2 or Split.FLOAT not in dtype.splits:
        return []
    return _core.side_views(shape, math.prod(shape) * dtype.bits // (8 * dtype.unit_nbytes))


def choose_side(source: Source, level: Level, lead_nbytes: int) -> SideData:
    """Makes the side data of a tensor, if they pay off.

    Args:
        source: the tensor.
        level: how hard to try; `fast` never uses side data.
        lead_nbytes: expected bytes of plane 0 without side data.

    Returns:
        The side data; `NO_SIDE_DATA` if they do not pay off.
    """
    if level == Level.FAST:
        return NO_SIDE_DATA
    data, dtype, shape, geometry = source
    must_save, sample_rows, sample_columns = _core.side_rule(level)
    best, best_saving, best_share = 0, 0, 0.0
    for dims in _views(dtype, shape):
        rows, columns = matrix_of(dtype, shape, dims)
        plain, predicted = _core.estimate_side_data(
            data, geometry, rows, sample_rows, sample_columns
        )
        saving = plain - predicted
        if saving > max(best_saving, plain // must_save):
            best, best_saving, best_share = dims, saving, saving / plain
    if not best:
        return NO_SIDE_DATA
    rows, columns = matrix_of(dtype, shape, best)
    values = np.empty(rows + columns, np.uint8)
    _core.make_side_data(data, geometry, rows, values)
    mode, stream = _encode(values)
    if len(stream) >= best_saving:
        return NO_SIDE_DATA
    descriptor = mode << STREAM_NBYTES_BITS | len(stream)
    # `lead_nbytes` comes from another sample, so the saving by this sample may exceed it.
    saving = min(best_saving, int(lead_nbytes * best_share)) - len(stream)
    if saving <= 0:
        return NO_SIDE_DATA
    return SideData(best, rows, values.tobytes(), stream, descriptor, saving)


def _encode(values: ByteArray) -> tuple[Mode, bytes]:
    streams = [(Mode.STORED, values.tobytes())]
    for mode in (Mode.RANS, Mode.PALETTE):
        stream = encode_plane(values, mode)
        if stream is not None:
            streams.append((mode, stream))
    return min(streams, key=lambda item: len(item[1]))


def decode_side(descriptor: int, stream: ByteArray, nbytes: int) -> ByteArray:
    """Decodes side data.

    Args:
        descriptor: from the header.
        stream: its bytes.
        nbytes: rows plus columns.

    Returns:
        The values, a byte for each row and each column.

    Raises:
        CorruptionError: the stream breaks a rule of its mode.
    """
    mode = Mode(descriptor >> STREAM_NBYTES_BITS)
    if mode == Mode.STORED:
        if descriptor & STREAM_NBYTES_MASK != nbytes:
            raise CorruptionError(f"side data have {len(stream)} bytes; there must be {nbytes}")
        return as_bytes(stream, "stream")
    return decode_plane(stream, mode, nbytes)
