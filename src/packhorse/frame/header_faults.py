"""What is wrong with the header of a frame, in words.

The core checks headers (csrc/frame/header.hpp) and returns a number for the fault, the byte where
it is, and what it found. Here that becomes an error for people.
"""

from __future__ import annotations

from typing import NamedTuple

from packhorse.codecs.base import ByteArray
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, TruncationError
from packhorse.layout import (
    DTYPE_BY_CODE,
    FIXED_HEADER_NBYTES,
    FRAME_MAGIC,
    HeaderFault,
)

__all__ = ["Found", "header_error"]

_UPGRADE = "; upgrade packhorse"
_WORDS = {
    HeaderFault.FIXED_PART: "a frame header needs {expected} bytes, {found} are left; the data is "
    "cut off",
    HeaderFault.MAGIC: "magic is {magic}, a frame begins with {known_magic}",
    HeaderFault.VERSION_ZERO: "frame version is 0, versions begin with 1",
    HeaderFault.VERSION: "frame version is {found}, this release reads {expected}" + _UPGRADE,
    HeaderFault.FLAGS: "critical flags are {found:#06x}, this release knows {expected:#06x}"
    + _UPGRADE,
    HeaderFault.DTYPE: "dtype code {found} is unknown to this release" + _UPGRADE,
    HeaderFault.SPLIT: "split {found} is not allowed for {dtype}",
    HeaderFault.DIMS: "{found} dimensions, at most {expected} are allowed",
    HeaderFault.CHUNK_LOG: "chunk_log is {found}, out of range for {dtype}",
    HeaderFault.HEADER_LENGTH: "header_nbytes is {found}, which other fields contradict",
    HeaderFault.CUT_OFF: "the header needs {expected} bytes, {found} are left; the data is cut off",
    HeaderFault.CHECKSUM: "the header's checksum does not match",
    HeaderFault.OVERFLOW: "shape {shape} overflows",
    HeaderFault.PARTIAL_BYTE: "{found} elements of {dtype} are not a whole number of bytes",
    HeaderFault.CHUNKS: "n_chunks is {found}, which shape {shape} contradicts",
    HeaderFault.LIMIT: "the tensor has {found} bytes, more than max_nbytes = {expected}",
    HeaderFault.RESERVED: "reserved bytes are not zero",
    HeaderFault.BASE_DTYPE: "the base's dtype code {found} is unknown to this release" + _UPGRADE,
    HeaderFault.BASE_CAST: "a base of {base} is not allowed for {dtype}",
    HeaderFault.BASE_SUM: "a base that is named by its sum has another dtype",
    HeaderFault.BASE_RESERVED: "reserved bytes of the base are not zero",
    HeaderFault.HALF_SIDE: "only one of n_row_dims and side descriptor is zero",
    HeaderFault.SIDE_PLACE: "side data after {found} dimensions are not allowed for split {split}, "
    "shape {shape}",
    HeaderFault.SIDE_LENGTH: "side data would have {found} bytes, at most 2 MiB are allowed",
    HeaderFault.SIDE_STREAM: "mode or length of the side data is not allowed",
    HeaderFault.PADDING: "padding of the header is not zero",
    HeaderFault.UNKNOWN_MODE: "descriptor of chunk {found}, plane {expected}: its mode is unknown "
    "to this release, or to the frame's version" + _UPGRADE,
    HeaderFault.DESCRIPTOR: "descriptor of chunk {found}, plane {expected}: its mode or length is "
    "not allowed here",
    HeaderFault.FRAME_LENGTH: "frame_nbytes is {found}, but its chunks make it {expected}",
    HeaderFault.FRAME_CUT_OFF: "the frame needs {expected} bytes, {found} are left; the data is "
    "cut off",
    HeaderFault.TRAILING: "{found} bytes follow the end of the frame",
}
_TRUNCATIONS = {HeaderFault.FIXED_PART, HeaderFault.CUT_OFF, HeaderFault.FRAME_CUT_OFF}
_NEWER = {
    *(HeaderFault.VERSION, HeaderFault.FLAGS, HeaderFault.DTYPE),
    *(HeaderFault.BASE_DTYPE, HeaderFault.UNKNOWN_MODE),
}


class Found(NamedTuple):
    """What the core found.

    Attributes:
        fault: what is wrong.
        at: the byte of the frame where it is.
        found: the number that stands there, or another one for the message.
        expected: what would fit, or another number for the message.
    """

    fault: int
    at: int
    found: int
    expected: int


def header_error(data: ByteArray, found: Found, label: str, offset: int) -> PackhorseError:
    """The error for a fault.

    Args:
        data: the bytes that were read.
        found: the fault.
        label: the beginning of the message, which names the tensor.
        offset: where the frame lies in its file.

    Returns:
        CompatibilityError, CorruptionError or TruncationError.
    """
    fault = HeaderFault(found.fault)
    kind: type[PackhorseError] = CorruptionError
    if fault in _TRUNCATIONS:
        kind = TruncationError
    elif fault in _NEWER:
        kind = CompatibilityError
    words = _WORDS[fault].format(**found._asdict(), **_context(data, found.found))
    return kind(f"{label}byte {offset + found.at}: {words}")


def _context(data: ByteArray, found: int) -> dict[str, object]:
    """What messages say beside numbers. All of it may have changed since the core read it."""
    start = data[:FIXED_HEADER_NBYTES].tobytes().ljust(FIXED_HEADER_NBYTES, b"\0")
    sizes = data[FIXED_HEADER_NBYTES : FIXED_HEADER_NBYTES + 8 * start[6]].tobytes()
    return {
        "magic": start[:4].hex(),
        "known_magic": FRAME_MAGIC.hex(),
        "dtype": _name(start[5]),
        "base": _name(found),
        "split": start[7],
        "shape": tuple(int.from_bytes(sizes[i : i + 8], "little") for i in range(0, len(sizes), 8)),
    }


def _name(code: int) -> str:
    dtype = DTYPE_BY_CODE.get(code)
    return f"dtype {code}" if dtype is None else dtype.name
