"""Fuzz `decode_piece`: any message must become exactly its piece, or raise the documented error.

An input is a control byte, a byte that chooses the dtype, two bytes of the piece's size, and
a message (src/packhorse/wire/pieces.py). Unless the two low bits of the control byte are zero, the
frame in the message and the message itself get the checksums that fit them. Nothing may be written
beside the piece, and every code path must give the same.
"""

import struct

import harness
import numpy as np
from harness import PackhorseError

with harness.instrumented():
    from packhorse.codecs.content import crc32c
    from packhorse.layout import DTYPES
    from packhorse.wire.pieces import HEAD_NBYTES, Kind, decode_piece

__all__ = ["WHOLE"]

WHOLE = [dtype for dtype in DTYPES if dtype.bits % 8 == 0]
_GUARD = 64


def main(data: bytes) -> None:
    """Run one input."""
    if len(data) < 4 + HEAD_NBYTES:
        return
    control, dtype = data[0], WHOLE[data[1] % len(WHOLE)]
    nbytes = struct.unpack_from("<H", data, 2)[0] * dtype.bits // 8
    message = data[4:]
    if harness.is_fixed(control):
        message = sealed(message)
    harness.choose_isa(control >> 3 & 3)
    found = decode(message, dtype.name, nbytes)
    harness.choose_isa(0)
    assert found == decode(message, dtype.name, nbytes), "the code paths differ"


def sealed(message: bytes) -> bytes:
    """A message with right checksums."""
    kind = message[8]
    if kind == Kind.FRAME:
        message = message[:HEAD_NBYTES] + harness.seal(message[HEAD_NBYTES:])
    covered = message[4:] if kind == Kind.RAW else message[4:HEAD_NBYTES]
    return struct.pack("<I", crc32c(covered)) + message[4:]


def decode(message: bytes, dtype: str, nbytes: int) -> bytes | None:
    """The piece, or None for the documented error."""
    memory = np.full(nbytes + 2 * _GUARD, 0xA5, np.uint8)
    try:
        piece = memory[_GUARD : _GUARD + nbytes]
        decode_piece(np.frombuffer(message, np.uint8), dtype, piece, 1)
    except PackhorseError:
        piece = None
    edges = np.concatenate([memory[:_GUARD], memory[_GUARD + nbytes :]])
    assert (edges == 0xA5).all(), "bytes beside the piece were written"
    return None if piece is None else piece.tobytes()


if __name__ == "__main__":
    harness.fuzz(main)
