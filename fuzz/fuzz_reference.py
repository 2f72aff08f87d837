"""Fuzz the slow decoder against the fast one: both must give the same tensor, or both a documented
error of the same kind.

`reference/` follows docs/format.md rule by rule, and the fuzzer sees which lines of it an input
reaches. So the inputs that the fuzzer finds cover all rules of the page. An input is a control byte
and a frame.
"""

from collections.abc import Callable

import harness
from harness import Frame, PackhorseError

from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.reference import decode_frame

Tensor = tuple[str, tuple[int, ...], bytes, bytes]  # dtype, shape, data, content hash
_MAX_NBYTES = 1 << 13  # the slow decoder decodes a megabyte a second


def main(data: bytes) -> None:
    """Run one input."""
    control, frame = data[0] if data else 0, data[1:]
    if harness.is_fixed(control):
        frame = harness.seal(harness.repair(frame) if control & 4 else frame)
    harness.choose_isa(control >> 3 & 3)
    slow, fast = outcome(decode_slowly, frame), outcome(decode_fast, frame)
    assert slow == fast, f"slow: {slow}, fast: {fast}"


def outcome(decode: Callable[[bytes], Tensor], frame: bytes) -> Tensor | type[PackhorseError]:
    """The result of a decoder: a tensor, or the kind of an error. An unknown mode and a wrong
    length count as the same kind, because the page does not say in which order the descriptors of
    a chunk are checked."""
    try:
        return decode(frame)
    except CompatibilityError:
        return CorruptionError
    except PackhorseError as error:
        return type(error)


def decode_slowly(frame: bytes) -> Tensor:
    """The result of the slow decoder."""
    tensor = decode_frame(frame, max_nbytes=_MAX_NBYTES, base=harness.base_of(frame))
    return tensor.dtype, tensor.shape, tensor.data, tensor.content_hash


def decode_fast(frame: bytes) -> Tensor:
    """The result of the core, with the content hash checked."""
    read = Frame.from_buffer(frame, max_nbytes=_MAX_NBYTES)
    decoded = bytearray(read.logical_nbytes)
    base = harness.base_of(frame)
    read.decompress_into(decoded, threads=1, base=base)
    read.verify(threads=1, base=base)
    return read.dtype, read.shape, bytes(decoded), read.content_hash


if __name__ == "__main__":
    harness.fuzz(main)
