"""Fuzzes the slow decoder against the fast one: both give the same tensor, or both give a
documented error of the same kind.

`reference.py` follows docs/format.md rule by rule, and the fuzzer sees which of its lines an input
reaches, so the inputs that are found here cover the page. An input is a control byte and a frame.
"""

from collections.abc import Callable

import harness
from harness import Frame, PackhorseError

from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.reference import decode_frame

Tensor = tuple[str, tuple[int, ...], bytes, bytes]  # dtype, shape, data, content hash
_MAX_NBYTES = 1 << 13  # the slow decoder makes a megabyte a second


def main(data: bytes) -> None:
    """One input."""
    control, frame = data[0] if data else 0, data[1:]
    if harness.is_fixed(control):
        frame = harness.seal(harness.repair(frame) if control & 4 else frame)
    harness.choose_isa(control >> 3 & 3)
    slow, fast = outcome(decode_slowly, frame), outcome(decode_fast, frame)
    assert slow == fast, f"slow: {slow}, fast: {fast}"


def outcome(decode: Callable[[bytes], Tensor], frame: bytes) -> Tensor | type[PackhorseError]:
    """What a decoder makes of a frame: a tensor, or an error of which only the kind counts. A mode
    that nobody knows and a length that is wrong count as the same, because the page leaves open in
    what order the descriptors of a chunk are looked at."""
    try:
        return decode(frame)
    except CompatibilityError:
        return CorruptionError
    except PackhorseError as error:
        return type(error)


def decode_slowly(frame: bytes) -> Tensor:
    """What the reference makes of it."""
    tensor = decode_frame(frame, max_nbytes=_MAX_NBYTES, base=harness.base_of(frame))
    return tensor.dtype, tensor.shape, tensor.data, tensor.content_hash


def decode_fast(frame: bytes) -> Tensor:
    """What the core makes of it, content hash checked."""
    read = Frame.from_buffer(frame, max_nbytes=_MAX_NBYTES)
    decoded = bytearray(read.logical_nbytes)
    base = harness.base_of(frame)
    read.decompress_into(decoded, threads=1, base=base)
    read.verify(threads=1, base=base)
    return read.dtype, read.shape, bytes(decoded), read.content_hash


if __name__ == "__main__":
    harness.fuzz(main)
