"""The rANS codec on one plane: an order-0 entropy coder of interleaved lanes (docs/format.md,
section 6.4).

A frame's chunks are coded by the core in one pass; this is the step on its own, from a full
histogram.
"""

from packhorse.codecs.base import ByteArray, decode_plane, encode_plane
from packhorse.layout import Mode

__all__ = ["decode", "encode"]


def encode(plane: object) -> bytes | None:
    """The stream of a plane of 1 to 2 Mi bytes, or None if it would not be smaller.

    Raises:
        TypeError: `plane` is not a C-contiguous buffer.
        ValueError: it is empty or too long.
    """
    return encode_plane(plane, Mode.RANS)


def decode(stream: object, n: int) -> ByteArray:
    """The `n` bytes of the plane that a stream holds.

    Raises:
        CorruptionError: the stream breaks a rule of docs/format.md.
        TypeError: `stream` is not a C-contiguous buffer.
        ValueError: `n` is not in 1 to 2 Mi.
    """
    return decode_plane(stream, Mode.RANS, n)
