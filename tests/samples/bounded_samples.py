"""Elements for the tests of bounded codes, and what must be true of every message."""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.bounded import Segment, decode_bounded, encode_bounded, read_segments
from packhorse.layout import Rounding

__all__ = ["NUMPY", "all_patterns", "assert_within", "raw", "round_trip", "table_rows"]

NUMPY = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
Elements = NDArray[Any]


def raw(elements: Elements) -> NDArray[np.uint8]:
    """The bytes of elements; BF16 of ml_dtypes has no buffer."""
    return elements.reshape(-1).view(np.uint8)


def all_patterns(dtype: str) -> Elements:
    """Every bit pattern of 16 bits, shuffled, so that escapes lie anywhere."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    np.random.default_rng(16).shuffle(patterns)
    return patterns.view(NUMPY[dtype])


def table_rows(n_rows: int, n_columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows like those of a trained embedding table: each with a scale of its own."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(-4.5, 1.0, (n_rows, 1)))
    return (scales * rng.standard_normal((n_rows, n_columns))).astype(np.float32)


def assert_within(x: Elements, y: Elements, bound: float) -> None:
    """Finite elements are within the bound, in exact arithmetic; all others have the same bits."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide, other = x.astype(np.float64), y.astype(np.float64)
    finite = np.isfinite(wide)
    assert raw(x[~finite]).tobytes() == raw(y[~finite]).tobytes()
    assert np.isfinite(other[finite]).all()
    with np.errstate(over="ignore"):
        error = np.abs(wide[finite] - other[finite])
    assert (error <= bound).all()  # otherwise the exact error is beyond the bound, too
    # Where it equals the bound, it may have been rounded down to it.
    x_at, y_at = wide[finite][error == bound], other[finite][error == bound]
    difference = x_at - y_at
    unproved = (x_at - difference != y_at) | (y_at + difference != x_at)
    for a, b in zip(x_at[unproved], y_at[unproved], strict=True):
        assert abs(Fraction(float(a)) - Fraction(float(b))) <= Fraction(bound), (a, b, bound)


def round_trip(
    elements: Elements, dtype: str, segments: list[Segment], *, threads: int = 1, **how: Any
) -> tuple[NDArray[np.uint8], Elements]:
    """The message of elements and what it decodes to, after checking what it promises."""
    before = raw(elements).tobytes()
    message = encode_bounded(raw(elements), dtype, segments, threads=threads, **how)
    assert raw(elements).tobytes() == before
    decoded = np.empty_like(elements)
    raw(decoded)[:] = 0xA5
    decode_bounded(message, raw(decoded), dtype=dtype, threads=threads)
    at = 0
    for segment, entry in zip(segments, read_segments(message), strict=True):
        part = slice(at, at + segment.n)
        assert_within(elements[part], decoded[part], segment.bound)
        assert (entry.n, entry.bound, entry.bits) == segment[:3]
        at += segment.n
    return message, decoded


def reference_entries(segments: list[Segment]) -> list[Any]:
    """What the slow coder is asked for."""
    from packhorse.reference.bounded import Entry

    return [Entry(*segment) for segment in segments]


ROUNDINGS = tuple(Rounding)
