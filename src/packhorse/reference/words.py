"""Section 1 of docs/format.md: CRC32C, and the few checks that all rules consist of.

A check names what it found, what is allowed, and the byte offset. `Reader` takes the fields of a
stream one after the other and never reads beyond its end.
"""

from typing import Any

from packhorse import layout
from packhorse.errors import CorruptionError, TruncationError

__all__ = ["Reader", "crc32c", "equal", "need", "padded", "within", "zero"]


def equal(found: Any, allowed: Any, what: str, offset: int) -> None:
    """Checks a field that has only one allowed value."""
    if found != allowed:
        show = [value.hex() if isinstance(value, bytes) else value for value in (found, allowed)]
        raise CorruptionError(f"{what} at byte offset {offset} is {show[0]}, but must be {show[1]}")


def zero(found: bytes, what: str, offset: int) -> None:
    """Checks bytes that must be zero."""
    if any(found):
        raise CorruptionError(f"{what} at byte offset {offset} are not zero: {found[:16].hex()}")


def within(found: int, least: int, most: int, what: str, offset: int) -> None:
    """Checks a range; both ends are allowed."""
    if not least <= found <= most:
        limits = f"allowed: {least} to {most}"
        raise CorruptionError(f"{what} at byte offset {offset} is {found}, {limits}")


def need(data: bytes, nbytes: int, what: str) -> None:
    """Checks that there are at least `nbytes` bytes; no other check reports truncation."""
    if len(data) < nbytes:
        raise TruncationError(f"{what} ends at byte offset {nbytes}, but the data at {len(data)}")


def _crc32c_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


_CRC32C_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    """Computes the Castagnoli CRC."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C_TABLE[crc & 0xFF ^ byte]
    return crc ^ 0xFFFFFFFF


def padded(nbytes: int) -> int:
    """Rounds up to a multiple of 64 bytes."""
    return -(-nbytes // layout.FRAME_ALIGNMENT) * layout.FRAME_ALIGNMENT


class Reader:
    """Takes bytes from the front of a stream, never beyond its end.

    Attributes:
        start: where the stream begins, from the start of the frame.
        offset: where the next byte lies.
    """

    def __init__(self, data: bytes, offset: int) -> None:
        self.start = self.offset = offset
        self._data = data

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return not self._data

    def take(self, nbytes: int, what: str) -> bytes:
        """Takes the next bytes. Too few bytes are corruption: the header declared the length."""
        if nbytes > len(self._data):
            left = f"but the stream has {len(self._data)} left"
            raise CorruptionError(f"{what} at byte offset {self.offset} take {nbytes}, {left}")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        self.offset += nbytes
        return taken

    def rest(self) -> bytes:
        """Takes all that is left."""
        return self.take(len(self._data), "rest")
