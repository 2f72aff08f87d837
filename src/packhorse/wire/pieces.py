"""Pieces: how up to 1 MiB of a tensor becomes a message, and how a message becomes a piece again.

A message is a head of 16 bytes and a body. The head holds, in this order:

    u32  CRC32C of the rest of the head, and of the body apart from a frame in it
    u32  length of the message
    u8   kind of the body
    7    zeros

The body is, by its kind:

    0  the bytes themselves
    1  a frame of them (docs/format.md), which has checksums of its own
    2  the bytes, without a checksum: for transfers that stand in for PyTorch's own, which have none
    3  rows, of which each new one is sent: u16 length of a row, u16 bytes before the first whole
       row, u32 length of the tokens, then tokens, which say where rows come from
       (csrc/repeats/tokens.hpp), and literals, which are what lies before the first whole row, the
       new rows, and what lies after the last whole row
    4  the same with a frame of the literals in their place

A receiver knows the dtype and the size of each piece, and no message is longer than a head and the
piece's bytes, so nothing that a message says decides how much memory is taken. Repeats may lie in
earlier pieces, which the receiver has checked.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from packhorse import _core
from packhorse._core import Geometry
from packhorse.codecs.base import ByteArray
from packhorse.codecs.plan import Plan
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.wire.repeats import Found, RowFinder, max_tokens_nbytes

__all__ = [
    "HEAD_NBYTES",
    "Kind",
    "PieceEncoder",
    "capacity_of",
    "decode_piece",
    "message_in",
    "seal",
]

_HEAD = struct.Struct("<IIB7s")
HEAD_NBYTES = _HEAD.size
_CRC = struct.Struct("<I")
_ZEROS = bytes(7)
_ROWS = struct.Struct("<HHI")
# A piece that would save less travels as it is.
_MIN_SAVING = 1 / 32
# After a piece that was not worth packing, so many follow as they are before one is tried again.
_N_UNTRIED = 7


class Kind(IntEnum):
    """What the body of a message is."""

    RAW = 0
    FRAME = 1
    UNCHECKED = 2
    ROWS = 3
    ROWS_FRAME = 4


def capacity_of(dtype: str, nbytes: int) -> int:
    """The memory that a message is made in, in bytes; the message itself may be shorter."""
    rows = _ROWS.size + max_tokens_nbytes(nbytes)
    return HEAD_NBYTES + rows + max_frame_nbytes(dtype, _shape_of(dtype, nbytes))


def _shape_of(dtype: str, nbytes: int) -> tuple[int, ...]:
    return (nbytes * 8 // DTYPE_BY_NAME[dtype].bits,)


class PieceEncoder:
    """Makes messages of the pieces of one operation.

    The plan of the first piece serves all pieces of a similar length.

    Args:
        dtype: of the pieces, as frames name it.
        level: how hard to try; None to pack nothing, and to add no checksums.
        threads: how many to use for a piece.
        finder: finds rows that repeat; None to send all rows.

    Attributes:
        nbytes: bytes that were encoded.
        encoded_nbytes: bytes of the messages made of them.
    """

    def __init__(
        self, dtype: str, level: Level | None, threads: int, finder: RowFinder | None = None
    ) -> None:
        self.nbytes = 0
        self.encoded_nbytes = 0
        self._dtype = dtype
        self._level = level
        self._threads = threads
        self._finder = finder
        self._plan: Plan | None = None
        self._n_untried = 0

    def encode(self, part: ByteArray, start: int, memory: ByteArray, rank: int = 0) -> int:
        """Makes the message of a piece.

        Args:
            part: all bytes that go to the receiver, up to the end of the piece.
            start: where the piece begins, which has one byte at least.
            memory: of `capacity_of` bytes at least.
            rank: the receiver. Its pieces come in order.

        Returns:
            The length of the message.
        """
        piece = part[start:]
        kind, length = Kind.UNCHECKED, 0
        if self._level is not None:
            kind, length = self._pack(part, start, memory[HEAD_NBYTES:], rank, self._level)
        if not length:
            length = piece.size
            memory[HEAD_NBYTES : HEAD_NBYTES + length] = piece
        length += HEAD_NBYTES
        _HEAD.pack_into(memory, 0, 0, length, kind, _ZEROS)
        seal(memory[:length])
        self.nbytes += piece.size
        self.encoded_nbytes += length
        return length

    def _pack(
        self, part: ByteArray, start: int, body: ByteArray, rank: int, level: Level
    ) -> tuple[Kind, int]:
        """Packs a piece, if that is worth it. Returns the kind and the length of its body, or a
        length of 0."""
        nbytes = part.size - start
        if self._finder is not None:
            found = self._finder.find(rank, part, start, body[_ROWS.size :])
            if found is not None:
                at = _ROWS.size + found.tokens_nbytes
                if at + found.literals.size < nbytes * (1 - _MIN_SAVING):
                    return self._pack_rows(found, body, at, level)
        length = self._pack_frame(part[start:], body, level)
        return (Kind.FRAME if length else Kind.RAW), length

    def _pack_rows(self, found: Found, body: ByteArray, at: int, level: Level) -> tuple[Kind, int]:
        """Completes a body of rows, whose literals go to `at`."""
        _ROWS.pack_into(body, 0, found.row_nbytes, found.skipped_nbytes, found.tokens_nbytes)
        length = self._pack_frame(found.literals, body[at:], level)
        if length:
            return Kind.ROWS_FRAME, at + length
        end = at + found.literals.size
        body[at:end] = found.literals
        return Kind.ROWS, end

    def _pack_frame(self, data: ByteArray, memory: ByteArray, level: Level) -> int:
        """Packs bytes into a frame, if that is worth it. Returns the length of the frame, or 0."""
        if self._n_untried:
            self._n_untried -= 1
            return 0
        if not data.size:
            return 0
        shape = _shape_of(self._dtype, data.size)
        plan = self._plan and _resized(self._plan, data.size)
        if plan is None:
            plan = plan_buffer(data, self._dtype, shape, level=level)
        self._plan = plan
        limit = data.size * (1 - _MIN_SAVING)
        length = plan.estimated_nbytes
        if length < limit:
            length = compress_buffer(
                data, self._dtype, shape, level=level, threads=self._threads, out=memory, like=plan
            ).nbytes
        if length < limit:
            return length
        self._plan, self._n_untried = None, _N_UNTRIED
        return 0


def _resized(plan: Plan, nbytes: int) -> Plan | None:
    """A plan for values like those of another plan; None if the lengths differ much."""
    if plan.nbytes == nbytes:
        return plan
    if not plan.nbytes / 2 <= nbytes <= plan.nbytes * 2:
        return None
    cut = plan.geometry
    geometry = Geometry(cut.unit_nbytes, cut.split, cut.chunk_log, nbytes)
    estimate = plan.estimated_nbytes * nbytes // plan.nbytes
    return plan._replace(geometry=geometry, estimated_nbytes=estimate)


def seal(message: ByteArray) -> None:
    """Puts the checksum into a message, which is complete but for it."""
    _CRC.pack_into(message, 0, _crc_of(message, message[8]))


def _crc_of(message: ByteArray, kind: int) -> int:
    covered = message[4:]
    if kind in (Kind.FRAME, Kind.UNCHECKED):
        covered = message[4:HEAD_NBYTES]
    elif kind == Kind.ROWS_FRAME and message.size >= HEAD_NBYTES + _ROWS.size:
        tokens_nbytes = _ROWS.unpack_from(message, HEAD_NBYTES)[2]
        covered = message[4 : HEAD_NBYTES + _ROWS.size + tokens_nbytes]
    return _core.crc32c(covered)


def message_in(memory: ByteArray, nbytes: int) -> ByteArray:
    """The message at the beginning of some memory, whose end a receiver does not know.

    Args:
        memory: as it was received in; more may follow.
        nbytes: of the piece in the message.

    Raises:
        CorruptionError: the message says that it has more bytes than one of such a piece can have.
    """
    length: int = _HEAD.unpack_from(memory)[1]
    if not HEAD_NBYTES < length <= HEAD_NBYTES + nbytes:
        raise CorruptionError(f"the message has {length} bytes, for a piece of {nbytes} bytes")
    return memory[:length]


def decode_piece(
    message: ByteArray, dtype: str, memory: ByteArray, threads: int, start: int = 0
) -> None:
    """Makes the piece of a message again.

    Args:
        message: its bytes, at least a head.
        dtype: of the piece, as frames name it.
        memory: earlier pieces of the same part, then room for exactly the bytes of this one.
        threads: how many to use.
        start: where the piece begins in the memory. Nothing before is written.

    Raises:
        CorruptionError: the message is damaged.
    """
    crc, _, kind, zeros = _HEAD.unpack_from(message)
    if zeros != _ZEROS or kind not in Kind.__members__.values() or crc != _crc_of(message, kind):
        raise CorruptionError("the checksum of the message does not match")
    body, piece = message[HEAD_NBYTES:], memory[start:]
    if kind in (Kind.ROWS, Kind.ROWS_FRAME):
        _decode_rows(body, dtype, memory, start, threads, is_frame=kind == Kind.ROWS_FRAME)
    elif kind == Kind.FRAME:
        _decompress(_frame_of(body, dtype, piece.size), piece, threads)
    elif body.size != piece.size:
        raise CorruptionError(f"it has {body.size} bytes, and the piece {piece.size}")
    else:
        np.copyto(piece, body)


def _decode_rows(
    body: ByteArray, dtype: str, memory: ByteArray, start: int, threads: int, *, is_frame: bool
) -> None:
    """Decodes literals to the end of the piece, from where rows move to their places."""
    if body.size < _ROWS.size:
        raise CorruptionError(f"it has {body.size} bytes, too few for rows")
    row_nbytes, skipped, tokens_nbytes = _ROWS.unpack_from(body)
    end, room = _ROWS.size + tokens_nbytes, memory.size - start
    tokens, coded = body[_ROWS.size : end], body[end:]
    frame = _frame_of(coded, dtype, room) if is_frame else None
    literals_nbytes = coded.size if frame is None else frame.logical_nbytes
    if end > body.size or literals_nbytes > room:
        raise CorruptionError(
            f"its {tokens_nbytes} bytes of tokens and {literals_nbytes} bytes of rows do not fit a "
            f"piece of {room} bytes"
        )
    literals = memory[memory.size - literals_nbytes :]
    if frame is None:
        np.copyto(literals, coded)
    else:
        _decompress(frame, literals, threads)
    if not _core.restore_rows(memory, start, literals_nbytes, row_nbytes, skipped, tokens):
        raise CorruptionError(f"its rows of {row_nbytes} bytes do not make a piece of {room} bytes")


def _frame_of(body: ByteArray, dtype: str, max_nbytes: int) -> Frame:
    """The frame that a body is."""
    try:
        frame = Frame.from_buffer(body, max_nbytes=max_nbytes)
    except PackhorseError as error:
        raise CorruptionError(str(error)) from error
    if frame.dtype != dtype:
        raise CorruptionError(f"it holds {frame.dtype}, and the piece is of {dtype}")
    return frame


def _decompress(frame: Frame, target: ByteArray, threads: int) -> None:
    if frame.logical_nbytes != target.size:
        raise CorruptionError(
            f"it holds {frame.logical_nbytes} bytes, and {target.size} are expected"
        )
    try:
        frame.decompress_into(target, threads=threads)
    except PackhorseError as error:
        raise CorruptionError(str(error)) from error
