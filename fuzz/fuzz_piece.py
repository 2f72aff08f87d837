"""Fuzz `decode_piece`: any message must become exactly its piece, or raise the documented error.

An input is a control byte, a byte that chooses the dtype, two bytes of the piece's size, and
a message (src/packhorse/wire/pieces.py). Unless the two low bits of the control byte are zero, the
frame in the message and the message itself get the checksums that fit them. Its three high bits say
how many times 64 bytes of earlier pieces lie before the piece. Nothing may be written beside the
piece, and every code path must give the same.
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
_UNIT = 64


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
    past_nbytes = (control >> 5) * _UNIT
    found = decode(message, dtype.name, nbytes, past_nbytes)
    harness.choose_isa(0)
    assert found == decode(message, dtype.name, nbytes, past_nbytes), "the code paths differ"


def sealed(message: bytes) -> bytes:
    """A message with right checksums."""
    kind, end = message[8], len(message)
    if kind in (Kind.FRAME, Kind.UNCHECKED):
        end = HEAD_NBYTES
    elif kind == Kind.ROWS_FRAME and len(message) >= HEAD_NBYTES + 8:
        end = min(end, HEAD_NBYTES + 8 + struct.unpack_from("<I", message, HEAD_NBYTES + 4)[0])
    if kind in (Kind.FRAME, Kind.ROWS_FRAME):
        message = message[:end] + harness.seal(message[end:])
    return struct.pack("<I", crc32c(message[4:end])) + message[4:]


def decode(message: bytes, dtype: str, nbytes: int, past_nbytes: int) -> bytes | None:
    """The piece, or None for the documented error."""
    start, stop = _GUARD + past_nbytes, _GUARD + past_nbytes + nbytes
    memory = np.full(stop + _GUARD, 0xA5, np.uint8)
    memory[_GUARD:start] = past = np.arange(past_nbytes, dtype=np.uint8)
    piece = memory[start:stop]
    try:
        decode_piece(np.frombuffer(message, np.uint8), dtype, memory[_GUARD:stop], 1, past_nbytes)
    except PackhorseError:
        piece = None
    edges = np.concatenate([memory[:_GUARD], memory[stop:]])
    assert (edges == 0xA5).all(), "bytes beside the piece were written"
    assert (memory[_GUARD:start] == past).all(), "an earlier piece was written"
    return None if piece is None else piece.tobytes()


if __name__ == "__main__":
    harness.fuzz(main)
