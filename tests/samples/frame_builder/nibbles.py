"""Chunks of mode nibbles (docs/format.md, section 6.9)."""

from dataclasses import dataclass

from frame_builder.codings import Around, Rans
from packhorse.layout import Mode

__all__ = ["Nibbles"]


@dataclass(frozen=True)
class Nibbles(Rans):
    """rANS of the halves of bytes, each in the upper half of a byte of its own."""

    raw_bits: int = 4
    mode = Mode.NIBBLES

    @property
    def n_carried(self) -> int:
        return 0

    def encode(self, plane: bytes, around: Around) -> bytes:
        halves = bytes(half << 4 for byte in plane for half in (byte & 15, byte >> 4))
        return super().encode(halves, around)
