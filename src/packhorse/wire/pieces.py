"""Pieces: how up to 1 MiB of a tensor becomes a message, and how a message becomes a piece again.

A message is a head of 16 bytes and a body. The head holds, in this order:

    u32  CRC32C of the rest of the head, and of the body unless it is a frame
    u32  length of the message after the next one, to the same rank; 0 if there is none
    u8   kind of the body: 0 the bytes themselves, 1 a frame of them, 2 bytes without a checksum
    7    zeros

A frame (docs/format.md) has checksums of its own. Kind 2 is for transfers that stand in for
PyTorch's own, which have no checksum either. A receiver knows the dtype and the size of each piece,
and no message is longer than a head and the piece's bytes, so nothing that a message says decides
how much memory is taken.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.codecs.plan import Plan
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.layout import DTYPE_BY_NAME, Level

__all__ = ["HEAD_NBYTES", "Kind", "PieceEncoder", "capacity_of", "decode_piece", "finish", "peek"]

_HEAD = struct.Struct("<IIB7s")
HEAD_NBYTES = _HEAD.size
_CRC = struct.Struct("<I")
_ZEROS = bytes(7)
# A piece that would save less travels as it is.
_MIN_SAVING = 1 / 32
# After a piece that was not worth packing, so many follow as they are before one is tried again.
_N_UNTRIED = 7


class Kind(IntEnum):
    """What the body of a message is."""

    RAW = 0
    FRAME = 1
    UNCHECKED = 2


def capacity_of(dtype: str, nbytes: int) -> int:
    """The memory that a message is made in, in bytes; the message itself may be shorter."""
    return HEAD_NBYTES + max_frame_nbytes(dtype, _shape_of(dtype, nbytes))


def _shape_of(dtype: str, nbytes: int) -> tuple[int, ...]:
    return (nbytes * 8 // DTYPE_BY_NAME[dtype].bits,)


class PieceEncoder:
    """Makes messages of the pieces of one operation.

    The plan of the first piece serves all pieces of the same length.

    Args:
        dtype: of the pieces, as frames name it.
        level: how hard to try; None to pack nothing, and to add no checksums.
        threads: how many to use for a piece.

    Attributes:
        nbytes: bytes that were encoded.
        encoded_nbytes: bytes of the messages made of them.
    """

    def __init__(self, dtype: str, level: Level | None, threads: int) -> None:
        self.nbytes = 0
        self.encoded_nbytes = 0
        self._dtype = dtype
        self._level = level
        self._threads = threads
        self._plan: Plan | None = None
        self._n_untried = 0

    def encode(self, piece: ByteArray, memory: ByteArray) -> int:
        """Makes the message of a piece, up to the length of a later message in it (`finish`).

        Args:
            piece: its bytes, at least one.
            memory: of `capacity_of` bytes at least.

        Returns:
            The length of the message.
        """
        kind, length = Kind.UNCHECKED, piece.size
        if self._level is not None:
            length = self._pack(piece, memory[HEAD_NBYTES:], self._level)
            kind = Kind.FRAME if length else Kind.RAW
        if kind != Kind.FRAME:
            length = piece.size
            memory[HEAD_NBYTES : HEAD_NBYTES + length] = piece
        _HEAD.pack_into(memory, 0, 0, 0, kind, _ZEROS)
        self.nbytes += piece.size
        self.encoded_nbytes += HEAD_NBYTES + length
        return HEAD_NBYTES + length

    def _pack(self, piece: ByteArray, memory: ByteArray, level: Level) -> int:
        """Packs a piece, if that is worth it. Returns the length of its frame, or 0."""
        if self._n_untried:
            self._n_untried -= 1
            return 0
        shape = _shape_of(self._dtype, piece.size)
        if self._plan is None or self._plan.nbytes != piece.size:
            self._plan = plan_buffer(piece, self._dtype, shape, level=level)
        limit = piece.size * (1 - _MIN_SAVING)
        length = self._plan.estimated_nbytes
        if length < limit:
            length = compress_buffer(
                piece, self._dtype, shape, level=level, threads=self._threads, out=memory,
                like=self._plan,
            ).nbytes  # fmt: skip
        if length < limit:
            return length
        self._plan, self._n_untried = None, _N_UNTRIED
        return 0


def finish(message: ByteArray, next_nbytes: int) -> None:
    """Completes a message.

    Args:
        message: as `PieceEncoder.encode` left it, without memory behind it.
        next_nbytes: the length of the message that the head announces.
    """
    kind = message[8]
    _HEAD.pack_into(message, 0, 0, next_nbytes, kind, _ZEROS)
    _CRC.pack_into(message, 0, _crc_of(message, kind))


def _crc_of(message: ByteArray, kind: int) -> int:
    return _core.crc32c(message[4:] if kind == Kind.RAW else message[4:HEAD_NBYTES])


def peek(message: ByteArray) -> int:
    """The length that the head of a message announces. The head is not checked before
    `decode_piece`, so the length may be anything."""
    next_nbytes: int = _HEAD.unpack_from(message)[1]
    return next_nbytes


def decode_piece(message: ByteArray, dtype: str, piece: ByteArray, threads: int) -> None:
    """Makes the piece of a message again.

    Args:
        message: its bytes, at least a head.
        dtype: of the piece, as frames name it.
        piece: where its bytes go; exactly as many as it has.
        threads: how many to use.

    Raises:
        CorruptionError: the message is damaged.
    """
    crc, _, kind, zeros = _HEAD.unpack_from(message)
    if zeros != _ZEROS or kind not in Kind.__members__.values() or crc != _crc_of(message, kind):
        raise CorruptionError("the checksum of the message does not match")
    body = message[HEAD_NBYTES:]
    if kind != Kind.FRAME:
        if body.size != piece.size:
            raise CorruptionError(f"it has {body.size} bytes, and the piece {piece.size}")
        np.copyto(piece, body)
        return
    try:
        frame = Frame.from_buffer(body, max_nbytes=piece.size)
        if frame.dtype != dtype or frame.logical_nbytes != piece.size:
            raise CorruptionError(
                f"it holds {frame.logical_nbytes} bytes of {frame.dtype}, and the piece is "
                f"{piece.size} bytes of {dtype}"
            )
        frame.decompress_into(piece, threads=threads)
    except PackhorseError as error:
        raise CorruptionError(str(error)) from error
