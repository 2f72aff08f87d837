"""Codes elements within an error bound (docs/format.md, section 13).

A message holds segments: runs of elements, each with a bound of its own, such as the tables of an
embedding layer. An element becomes a code of 1 to 16 bits that stands for a number of steps from a
center. What is not a number, or does not fit, or would come back with a larger error than the bound
is an *escape* and is kept exactly. So `abs(x - decoded) <= bound` holds for every finite x, and
infinities and NaNs come back bit by bit.

Choose `bits` with `bits_for`, from the spread of the values: escapes are correct, but each costs
its element on top of its code. Elements of 16 bits have few digits themselves, so give them bounds
that are powers of two: their errors are multiples of their own spacing, and a bound just below such
a multiple makes a quarter of them escapes.

`encode_fixed` writes messages whose length is known in advance. If more elements escape than a
message has slots for, it doubles the bound until they fit, and reports it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes, as_writable_bytes
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import (
    BOUNDED_ALIGNMENT,
    BOUNDED_BLOCK,
    BOUNDED_DTYPES,
    BOUNDED_ENTRY,
    BOUNDED_FREE_SLOTS,
    BOUNDED_HEADER,
    BOUNDED_LANES,
    BOUNDED_SLOT_SHARE,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    MAX_BOUNDED_BITS,
    MAX_BOUNDED_LENGTH,
    BoundedFault,
    DType,
    Rounding,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FixedMessage",
    "Rounding",
    "Segment",
    "SegmentEntry",
    "bits_for",
    "decode_bounded",
    "decode_fixed",
    "encode_bounded",
    "encode_fixed",
    "fixed_nbytes",
    "max_encoded_nbytes",
    "raise_message_fault",
    "read_segments",
]

_PLAIN = -1  # for the core: not the fixed form
_MAX_SEED = (1 << 64) - 1


class Segment(NamedTuple):
    """A run of elements in a message.

    Attributes:
        n: its length in elements.
        bound: the largest error of a finite element, absolute and above 0.
        bits: of a code, 1 to 16. `2^bits - 1` values have codes.
        center: the value in the middle of them. It is rounded to F32 unless elements are F64.
    """

    n: int
    bound: float
    bits: int
    center: float = 0.0


class SegmentEntry(NamedTuple):
    """What a message says about a segment.

    Attributes:
        n: its length in elements.
        n_escapes: the elements among them that are kept exactly.
        step: the difference of neighbouring codes' values.
        center: the value of the middle code.
        bound: the largest error of a finite element.
        bits: of a code.
        doublings: how often the fixed form doubled the bound that was asked for.
    """

    n: int
    n_escapes: int
    step: float
    center: float
    bound: float
    bits: int
    doublings: int


class FixedMessage(NamedTuple):
    """A message of the fixed form.

    Attributes:
        data: the message.
        bound: the error bound that holds: the segment's, doubled `doublings` times.
        doublings: how often the bound was doubled until the escapes fit their slots.
        n_escapes: elements that are kept exactly.
    """

    data: ByteArray
    bound: float
    doublings: int
    n_escapes: int


def bits_for(spread: float, bound: float, rounding: Rounding = Rounding.NEAREST) -> int:
    """The fewest bits whose codes cover `center - spread` to `center + spread` within a bound.

    Args:
        spread: the largest distance of values from the center, not negative.
        bound: the error bound, above 0.
        rounding: stochastic rounding needs steps of half the size.

    Raises:
        ValueError: a number is out of range, or 16 bits do not suffice.

    Example:
        >>> from packhorse.codecs.bounded import bits_for
        >>> bits_for(spread=0.12, bound=0.01)
        4
    """
    if not 0 <= spread < np.inf:
        raise ValueError(f"spread is {spread}; it must be a finite number that is not negative")
    _require_bound(bound)
    for bits in range(1, MAX_BOUNDED_BITS + 1):
        if _reach(bound, bits, rounding) >= spread:
            return bits
    raise ValueError(
        f"values up to {spread} from the center need more than {MAX_BOUNDED_BITS} bits at a bound"
        f" of {bound}; raise the bound, or send the elements as they are"
    )


def _reach(bound: float, bits: int, rounding: Rounding) -> float:
    """The largest distance from center 0 at which F32 elements surely have a code."""
    most: int = 2 ** (bits - 1) - 1
    # The margin of the step, and the digits that it lacks (docs/format.md, section 13).
    step = bound * (1 - 2.0 ** (bits - 24) - 2.0 ** (bits - 23))
    return most * step if rounding == Rounding.STOCHASTIC else (2 * most + 1) * step


def _require_bound(bound: float) -> None:
    if not 0 < bound < np.inf:
        raise ValueError(f"bound is {bound}; it must be a finite number above 0")


def max_encoded_nbytes(segments: Sequence[Segment], dtype: str) -> int:
    """The most bytes of a message of these segments: those if every element is an escape.

    Raises:
        TypeError: a field of a segment is not a number.
        ValueError: a length or a number of bits is out of range, or the dtype is not F16, BF16,
            F32 or F64.
    """
    nbytes, _ = _sizes(segments, _dtype(dtype))
    return nbytes


def encode_bounded(
    values: "Buffer | Any",
    dtype: str,
    segments: Sequence[Segment],
    *,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    out: "Buffer | Any | None" = None,
    threads: int = 1,
) -> ByteArray:
    """Encodes the elements of all segments to one message.

    Args:
        values: the elements: those of the first segment, then those of the second, and so on.
        dtype: their type: "F16", "BF16", "F32" or "F64".
        segments: what to do with them. Their lengths sum to the number of elements.
        rounding: to the nearest value; or to one of the two neighbours at random, so that the mean
            of an element over many seeds is the element.
        seed: of the random bits, 0 to 2^64 - 1. Use each seed once: the same seed rounds equal
            messages in the same way.
        out: memory for the message, of at least `max_encoded_nbytes`. Without it, memory is
            allocated.
        threads: how many threads of the core work on it.

    Returns:
        The message: the front of `out`, if it is given.

    Raises:
        TypeError: `values` is not a C-contiguous buffer, or `out` not a writable one.
        ValueError: a segment's bound is 0, negative or not finite, or so small that no value but
            the center has a code, or another number is out of range. The message names the segment.

    Example:
        >>> import numpy as np
        >>> from packhorse.codecs.bounded import Segment, decode_bounded, encode_bounded
        >>> rows = np.linspace(-1, 1, 1000, dtype=np.float32)
        >>> message = encode_bounded(rows, "F32", [Segment(1000, bound=0.05, bits=5)])
        >>> decoded = np.empty_like(rows)
        >>> decode_bounded(message, decoded, dtype="F32")
        >>> message.nbytes < rows.nbytes / 5, bool(np.abs(rows - decoded).max() <= 0.05)
        (True, True)
    """
    kind = _dtype(dtype)
    src = as_bytes(values, "values")
    capacity = _capacity(src, segments, kind)
    dst = _output(out, capacity)
    nbytes = _encode(src, segments, kind, rounding, seed, _PLAIN, dst, threads)
    return dst[:nbytes]


def decode_bounded(
    message: "Buffer | Any", out: "Buffer | Any", *, dtype: str, threads: int = 1
) -> None:
    """Decodes a message, of the plain or the fixed form.

    Args:
        message: exactly the bytes of a message.
        out: receives the elements of all segments, one after the other. It must not share memory
            with the message.
        dtype: the type of the elements.
        threads: how many threads of the core work on it.

    Raises:
        TruncationError: bytes are missing at the end.
        CorruptionError: the message breaks a rule of docs/format.md, section 13. The content of
            `out` is then undefined.
        CompatibilityError: the message is of a later version.
        TypeError: `message` is not a C-contiguous buffer, or `out` not a writable one.
        ValueError: the message holds another dtype, or another number of elements than `out`.
    """
    kind = _dtype(dtype)
    src, dst = as_bytes(message, "message"), as_writable_bytes(out, "out")
    fault, segment, code, n = _core.decode_bounded(src, kind.code, dst, threads)
    if fault:
        raise_message_fault(BoundedFault(fault), segment, src)
    if code != kind.code:
        raise ValueError(f"the message holds {DTYPE_BY_CODE[code].name}, not {kind.name}")
    if n * kind.unit_nbytes != dst.size:
        raise ValueError(
            f"the message holds {n} elements of {kind.name}, which take {n * kind.unit_nbytes}"
            f" bytes; out has {dst.size}"
        )


def fixed_nbytes(n: int, bits: int, dtype: str) -> int:
    """The length of a message of the fixed form: that of its codes, and of slots for one escape in
    256 elements and 16 more.

    Raises:
        ValueError: `n` or `bits` are out of range, or the dtype is not F16, BF16, F32 or F64.
    """
    kind = _dtype(dtype)
    _require_sizes(n, bits, "the message")
    head = -(-(BOUNDED_HEADER.size + BOUNDED_ENTRY.size) // BOUNDED_ALIGNMENT) * BOUNDED_ALIGNMENT
    whole, rest = divmod(n, BOUNDED_BLOCK)
    n_rows = -(-rest // BOUNDED_LANES)
    n_words = whole * bits + (n_rows * bits + 31) // 32
    counts = -(-2 * -(-n // BOUNDED_BLOCK) // 8) * 8
    n_slots = min(n, BOUNDED_FREE_SLOTS + n // BOUNDED_SLOT_SHARE)
    return head + 4 * BOUNDED_LANES * n_words + counts + n_slots * kind.unit_nbytes


def encode_fixed(
    values: "Buffer | Any",
    dtype: str,
    segment: Segment,
    *,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    out: "Buffer | Any | None" = None,
    threads: int = 1,
) -> FixedMessage:
    """Encodes one segment to a message of exactly `fixed_nbytes` bytes.

    If more elements escape than the message has slots for, the bound is doubled until they fit.
    So the bound that holds is that of the result, which the message holds, too.

    Args:
        values: the elements.
        dtype: their type: "F16", "BF16", "F32" or "F64".
        segment: what to do with them.
        rounding: as for `encode_bounded`.
        seed: as for `encode_bounded`.
        out: memory for the message, of at least `fixed_nbytes`. Without it, memory is allocated.
        threads: how many threads of the core work on it.

    Raises:
        TypeError: `values` is not a C-contiguous buffer, or `out` not a writable one.
        ValueError: as for `encode_bounded`; or more elements are infinite or NaN than there are
            slots.
    """
    kind = _dtype(dtype)
    src = as_bytes(values, "values")
    _capacity(src, [segment], kind)
    nbytes = fixed_nbytes(segment.n, segment.bits, dtype)
    dst = _output(out, nbytes)
    doublings = 0
    while not _encode(
        src, [_widen(segment, doublings)], kind, rounding, seed, doublings, dst, threads
    ):
        if doublings == 0:
            _require_few_not_finite(src, kind, segment)
        doublings += 1
    (entry,) = read_segments(dst[:nbytes])
    return FixedMessage(dst[:nbytes], entry.bound, doublings, entry.n_escapes)


def _widen(segment: Segment, doublings: int) -> Segment:
    try:
        return segment._replace(bound=math.ldexp(segment.bound, doublings))
    except OverflowError:
        raise ValueError(
            f"more elements escape than the fixed form has slots for, whatever the bound;"
            f" {segment.bits} bits are too few: use encode_bounded"
        ) from None


def _require_few_not_finite(src: ByteArray, kind: DType, segment: Segment) -> None:
    """Elements that are infinite or NaN escape whatever the bound is."""
    n_slots = min(segment.n, BOUNDED_FREE_SLOTS + segment.n // BOUNDED_SLOT_SHARE)
    n_odd = _count_not_finite(src, kind)
    if n_odd > n_slots:
        raise ValueError(
            f"{n_odd} of {segment.n} elements are infinite or NaN; the fixed form keeps at most"
            f" {n_slots} elements exactly: use encode_bounded"
        )


# The bits of infinities, by dtype; a larger magnitude is NaN.
_INFINITY = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def _count_not_finite(src: ByteArray, kind: DType) -> int:
    units = src.view(f"<u{kind.unit_nbytes}")
    magnitudes = units & ((1 << kind.bits - 1) - 1)
    return int(np.count_nonzero(magnitudes >= _INFINITY[kind.name]))


def decode_fixed(
    message: "Buffer | Any", out: "Buffer | Any", *, dtype: str, threads: int = 1
) -> None:
    """Decodes a message of the fixed form; the same as `decode_bounded`."""
    decode_bounded(message, out, dtype=dtype, threads=threads)


def read_segments(message: "Buffer | Any") -> list[SegmentEntry]:
    """What the table of a message says. Only its length is checked; decode it to check the rest.

    Raises:
        TruncationError: the message ends before its table does.
        TypeError: `message` is not a C-contiguous buffer.
    """
    data = as_bytes(message, "message")
    if data.size < BOUNDED_HEADER.size:
        raise TruncationError(f"the message has {data.size} bytes, fewer than its header")
    n_segments = BOUNDED_HEADER.unpack(data[: BOUNDED_HEADER.size].tobytes())[5]
    end = BOUNDED_HEADER.size + n_segments * BOUNDED_ENTRY.size
    if data.size < end:
        raise TruncationError(f"the message has {data.size} bytes; its table ends at {end}")
    rows = BOUNDED_ENTRY.iter_unpack(data[BOUNDED_HEADER.size : end].tobytes())
    return [
        SegmentEntry(n, n_escapes, step, center, bound, bits, doublings)
        for n, n_escapes, step, center, bound, bits, _, doublings, _ in rows
    ]


def _dtype(name: str) -> DType:
    kind = DTYPE_BY_NAME.get(name)
    if kind not in BOUNDED_DTYPES:
        names = ", ".join(dtype.name for dtype in BOUNDED_DTYPES)
        raise ValueError(f"dtype is {name!r}; bounded codes are for {names}")
    return kind


def _output(out: "Buffer | Any | None", nbytes: int) -> ByteArray:
    if out is None:
        return np.empty(nbytes, np.uint8)
    dst = as_writable_bytes(out, "out")
    if dst.size < nbytes:
        raise ValueError(f"out has {dst.size} bytes; it must have {nbytes}")
    return dst


def _sizes(segments: Sequence[Segment], kind: DType) -> tuple[int, int]:
    """The most bytes of a message, and its elements."""
    try:
        fault, at, nbytes, n = _core.max_bounded_nbytes(segments, kind.code)
    except TypeError:
        _refuse_types(segments)
        raise
    if fault:
        _raise_segment_fault(BoundedFault(fault), at, segments[at])
    return nbytes, n


def _capacity(src: ByteArray, segments: Sequence[Segment], kind: DType) -> int:
    nbytes, n = _sizes(segments, kind)
    if n * kind.unit_nbytes != src.size:
        raise ValueError(
            f"the segments have {n} elements of {kind.name}, which take {n * kind.unit_nbytes}"
            f" bytes; values has {src.size}"
        )
    return nbytes


def _encode(
    src: ByteArray,
    segments: Sequence[Segment],
    kind: DType,
    rounding: Rounding,
    seed: int,
    doublings: int,
    dst: ByteArray,
    threads: int,
) -> int:
    """The bytes of the message; 0 if the fixed form has too few slots."""
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed is {seed}; it must be 0 to 2^64 - 1")
    fault, at, nbytes = _core.encode_bounded(
        src, segments, kind.code, int(Rounding(rounding)), seed, doublings, dst, threads
    )
    if fault == BoundedFault.ESCAPES:
        return 0
    if fault:
        _raise_segment_fault(BoundedFault(fault), at, segments[at])
    return nbytes


def _refuse_types(segments: Sequence[Segment]) -> None:
    """Raises the error for the first segment that the core cannot read."""
    for i, segment in enumerate(segments):
        if len(segment) != 4:
            raise TypeError(f"segment {i} is {segment!r}; give n, bound, bits and center")
        n, bound, bits, center = segment
        _require_sizes(n, bits, f"segment {i}")
        if not isinstance(bound, int | float | np.floating):
            raise TypeError(f"segment {i} has a bound of type {type(bound)}; give a number")
        if not isinstance(center, int | float | np.floating):
            raise TypeError(f"segment {i} has a center of type {type(center)}; give a number")


def _require_sizes(n: int, bits: int, what: str) -> None:
    for name, value in (("length", n), ("number of bits", bits)):
        if not isinstance(value, int | np.integer):
            raise TypeError(f"{what} has a {name} of type {type(value)}; give an integer")
    if not 0 <= n <= MAX_BOUNDED_LENGTH:
        raise ValueError(
            f"{what} has {n} elements; allowed are 0 to {MAX_BOUNDED_LENGTH}: cut it in several"
        )
    if not 1 <= bits <= MAX_BOUNDED_BITS:
        raise ValueError(f"{what} has codes of {bits} bits; allowed are 1 to {MAX_BOUNDED_BITS}")


def _raise_segment_fault(fault: BoundedFault, at: int, segment: Segment) -> None:
    n, bound, bits, center = Segment(*segment)
    _require_sizes(n, bits, f"segment {at}")
    words = {
        BoundedFault.BOUND: f"has the bound {bound}; it must be a finite number above 0",
        BoundedFault.CENTER: f"has the center {center}, which is not a finite number of its dtype",
        BoundedFault.TINY_BOUND: (
            f"has the bound {bound}, which no step of {bits} bits can keep; raise the bound, or"
            " send its elements as they are"
        ),
        BoundedFault.NOTHING_FITS: (
            f"has the bound {bound}: codes of {bits} bits then reach no value but the center"
            f" {center}; raise the bound or the bits, or move the center to 0"
        ),
    }[fault]
    raise ValueError(f"segment {at} {words}")


# What is wrong with a message, in words; `{segment}` is the segment where it was found.
_MESSAGE_WORDS = {
    BoundedFault.MAGIC: "the first bytes are not those of a bounded message",
    BoundedFault.VERSION_ZERO: "the version is 0",
    BoundedFault.OTHER_DTYPE: "the dtype is none of F16, BF16, F32 and F64",
    BoundedFault.FIELD: "a field of the header is outside of its range",
    BoundedFault.TABLE: "a field of segment {segment} is outside of its range",
    BoundedFault.RESERVED: "reserved bytes are not zero, at or behind segment {segment}",
    BoundedFault.SIZE: "its length is not the one that its header and its table make",
    BoundedFault.CHECKSUM: "its checksum does not match",
    BoundedFault.STREAM: "a stream of codes is not valid",
    BoundedFault.ESCAPE_COUNT: "the escapes of segment {segment} are not as many as declared",
}


def raise_message_fault(fault: BoundedFault, segment: int, src: ByteArray) -> None:
    """Raises the error for what is wrong with a message."""
    if fault == BoundedFault.SHORT:
        raise TruncationError(
            f"bounded message: it has {src.size} bytes, fewer than its header declares"
        )
    if fault == BoundedFault.VERSION:
        raise CompatibilityError(
            f"bounded message: version {src[4]}; this release reads version 1: update packhorse"
        )
    raise CorruptionError(f"bounded message: {_MESSAGE_WORDS[fault].format(segment=segment)}")
