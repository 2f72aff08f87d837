"""What all codecs share: views of buffers as bytes, streams of single planes, and the names of
instruction sets.

The core has no state. Every call of it uses the best instruction set of this machine, unless the
environment variable `PACKHORSE_SIMD` names another one (`portable`, `neon`, `avx2`,
`avx512` or `avx512_vbmi2`), as tests and benchmarks do. All of them write the same bytes.
"""

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.errors import CorruptionError
from packhorse.layout import MAX_CHUNK_NBYTES, Mode, Status

if TYPE_CHECKING:
    from collections.abc import Buffer  # Python 3.12; the name is for readers and type checkers

__all__ = [
    "ISA_VARIABLE",
    "STATUS_WORDS",
    "ByteArray",
    "Isa",
    "as_bytes",
    "as_writable_bytes",
    "available_isas",
    "choose_isa",
    "decode_plane",
    "encode_plane",
]

ISA_VARIABLE = "PACKHORSE_SIMD"  # the core reads it (csrc/bind/isa.hpp)

ByteArray = NDArray[np.uint8]
_FIELD_NAME = re.compile(":[^:]*:")  # in a buffer's format, after the code of the field's type


class Isa(IntEnum):
    """Instruction sets of the core, weakest first. A machine has those of one architecture."""

    PORTABLE = 0
    NEON = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_VBMI2 = 4


_UINT8 = np.dtype(np.uint8)


def choose_isa() -> Isa:
    """Returns the instruction set that the core uses for a call, for reports.

    Raises:
        ValueError: `PACKHORSE_SIMD` is set to an unknown name.
        MissingBackendError: `PACKHORSE_SIMD` names an instruction set that this machine lacks.
    """
    return Isa(_core.choose_isa())


def available_isas() -> list[Isa]:
    """The instruction sets that this machine has, weakest first, whatever the environment says."""
    return [isa for isa in Isa if _core.has_isa(isa)]


def as_bytes(buffer: "Buffer | Any", what: str = "buffer") -> ByteArray:
    """Views any C-contiguous buffer as one-dimensional uint8, read-only or writable; never copies.

    Raises:
        TypeError: the object has no buffer, or its buffer is not C-contiguous, or it holds Python
            objects, which are addresses that nobody may overwrite.
    """
    if type(buffer) is np.ndarray and buffer.dtype is _UINT8 and buffer.ndim == 1:
        if buffer.flags.c_contiguous:
            return buffer.view()  # a view of our own, which nobody else reshapes
        raise TypeError(f"{what} must be C-contiguous; copy it first")
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"{what} must offer the buffer protocol, not {type(buffer)}") from None
    if not view.c_contiguous:
        raise TypeError(f"{what} must be C-contiguous; copy it first")
    if "O" in view.format and "O" in _FIELD_NAME.sub("", view.format):
        raise TypeError(f"{what} holds Python objects; give an array of numbers")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def as_writable_bytes(buffer: "Buffer | Any", what: str = "buffer") -> ByteArray:
    """Does what `as_bytes` does, for a buffer to write to.

    Raises:
        TypeError: not a C-contiguous buffer, or a read-only one.
    """
    view = as_bytes(buffer, what)
    if view.size and not view.flags.writeable:
        raise TypeError(f"{what} is read-only; give a writable buffer")
    return view


# What the core's Status numbers (csrc/common/layout.hpp) mean to a person.
STATUS_WORDS: dict[int, str] = {
    Status.CHECKSUM: "its checksum does not match",
    Status.STREAM_LENGTH: "a stream is longer or shorter than its own fields say",
    Status.RESERVED: "a reserved field is not zero",
    Status.BAD_FIELD: "a field is outside of its range",
    Status.FREQUENCIES: "a frequency is zero, or the frequencies do not sum to 4096",
    Status.WORDS_EXHAUSTED: "the rANS coder ran out of words",
    Status.WORDS_LEFT: "rANS words are left over at the end",
    Status.FINAL_STATE: "an rANS lane ends in a state that no encoder leaves",
    Status.ESCAPE_COUNT: "the number of escapes is not the one declared",
    Status.EXTRA_BITS: "the number of extra bits is not the one declared",
}


def encode_plane(plane: object, mode: Mode) -> bytes | None:
    """Encodes one plane, from a full histogram and with nothing carried.

    Args:
        plane: buffer of 1 to 2 Mi bytes.
        mode: `Mode.PALETTE` or `Mode.RANS`.

    Returns:
        The stream; None if it would not be smaller than the plane, or, for rANS, if all values of
        the plane are equal.

    Raises:
        TypeError: `plane` is not a C-contiguous buffer.
        ValueError: `plane` is empty or too long, or the mode is another one.
    """
    data = as_bytes(plane, "plane")
    dst = np.empty(data.size, np.uint8)
    nbytes = _core.encode_plane(data, int(mode), dst)
    return dst[:nbytes].tobytes() if nbytes else None


def decode_plane(stream: object, mode: Mode, n: int) -> ByteArray:
    """Decodes a stream to the `n` bytes of its plane.

    Raises:
        CorruptionError: the stream breaks a rule of its mode.
        TypeError: `stream` is not a C-contiguous buffer.
        ValueError: `n` is not in 1 to 2 Mi.
    """
    if not 0 < n <= MAX_CHUNK_NBYTES:
        raise ValueError(f"n is {n}; a plane has 1 to {MAX_CHUNK_NBYTES} bytes")
    dst = np.empty(n, np.uint8)
    status = _core.decode_plane(as_bytes(stream, "stream"), int(mode), dst)
    if status:
        raise CorruptionError(f"{mode.name.lower()} stream: {STATUS_WORDS[status]}")
    return dst
