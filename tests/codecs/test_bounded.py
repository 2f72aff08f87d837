"""Bounded codes: the bound holds for every finite element, all code paths and the slow coder write
the same bytes, and callers' mistakes are named."""

import ctypes
import ctypes.util
import platform
from typing import Any

import numpy as np
import pytest
from bounded_samples import (
    NUMPY,
    ROUNDINGS,
    all_patterns,
    assert_within,
    raw,
    reference_entries,
    round_trip,
    table_rows,
)
from codec_battery import ISAS, forced, guarded, guarded_output
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    bits_for,
    decode_bounded,
    encode_bounded,
    max_encoded_nbytes,
    read_segments,
)
from packhorse.layout import MAX_BOUNDED_BITS, MAX_BOUNDED_LENGTH
from packhorse.reference.bounded import decode_message, encode_message

DTYPES = pytest.mark.parametrize("dtype", NUMPY)
BOTH = pytest.mark.parametrize("rounding", ROUNDINGS, ids=["nearest", "stochastic"])


# Bounds from below the smallest numbers to beyond the largest, powers of two and others, and next
# to what the types can hold.
BOUNDS = (
    *(2.0**-149, 1e-42, 2.0**-126, 6e-8, 2.0**-24, 3.1e-5, 0.0078125, 0.01, 0.5, 1.0, 3.7, 255.9),
    *(65504.0, 65536.0, 1e30, 3.3e38, 1e39, 1.7e308),
)
CENTERS = (0.0, 1.0, -0.3, 1000.0, 6e-8)


@BOTH
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8, 16])
def test_the_bound_holds_for_every_element_of_16_bits(
    dtype: str, bits: int, rounding: Rounding
) -> None:
    patterns, n_coded = all_patterns(dtype), 0
    for bound in BOUNDS:
        for center in CENTERS:
            segments = [Segment(patterns.size, bound, bits, center)]
            try:
                message, decoded = round_trip(patterns, dtype, segments, rounding=rounding, seed=3)
            except ValueError as error:
                if "reach no value but the center" not in str(error) and "no step" not in str(
                    error
                ):
                    raise
                continue
            n_coded += read_segments(message)[0].n_escapes < patterns.size
            for isa in ISAS[:-1]:
                with forced(isa):
                    again = encode_bounded(
                        raw(patterns), dtype, segments, rounding=rounding, seed=3
                    )
                    assert again.tobytes() == message.tobytes()
                    other = np.empty_like(patterns)
                    decode_bounded(message, raw(other), dtype=dtype)
                    assert raw(other).tobytes() == raw(decoded).tobytes()
    assert n_coded > len(BOUNDS)


def floats(dtype: str) -> st.SearchStrategy[float]:
    width = 32 if dtype == "F32" else 64
    return st.floats(width=width, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("dtype", ["F32", "F64"])
@given(data=st.data())
@settings(deadline=None, max_examples=250)
def test_the_bound_holds_for_any_elements(dtype: str, data: st.DataObject) -> None:
    """Elements anywhere, and elements around the middles between two codes' values."""
    bits = data.draw(st.integers(1, MAX_BOUNDED_BITS))
    bound = data.draw(st.floats(min_value=5e-324, allow_infinity=False, exclude_min=False))
    center = data.draw(st.floats(-(2.0**100), 2.0**100, width=32))
    rounding = data.draw(st.sampled_from(ROUNDINGS))
    anywhere = data.draw(st.lists(floats(dtype), max_size=30))
    halves = data.draw(st.lists(st.integers(-(1 << 17), 1 << 17), max_size=30))
    with np.errstate(all="ignore"):
        near = [np.nextafter(center + half * bound, np.inf) for half in halves]
        near += [center + half * bound for half in halves]
        elements = np.array([*anywhere, *near], NUMPY[dtype])
    segments = [Segment(elements.size, bound, bits, center)]
    try:
        message, _ = round_trip(elements, dtype, segments, rounding=rounding, seed=bits)
    except ValueError as error:
        if "bound" not in str(error):
            raise
        return
    if elements.size:
        slow = encode_message(dtype, elements, reference_entries(segments), rounding, bits)
        assert message.tobytes() == slow


@BOTH
@DTYPES
def test_all_code_paths_write_the_bytes_of_the_slow_coder(dtype: str, rounding: Rounding) -> None:
    rng = np.random.default_rng(5)
    for bits in range(1, MAX_BOUNDED_BITS + 1):
        segments = [
            Segment(n, bound, bits, center)
            for n, bound, center in ((0, 1.0, 0.0), (1, 1.0, 0.0), (15, 0.01, 0.5), (513, 0.3, 0.0))
        ]
        segments += [Segment(530 + bits, 0.125, (bits + 4) % 16 + 1, -1.0)]
        n = sum(segment.n for segment in segments)
        elements = (rng.standard_normal(n) * 2.0 ** rng.integers(-6, 4, n)).astype(NUMPY[dtype])
        elements[rng.integers(0, n, 9)] = [np.nan, np.inf, -np.inf, 0, -0.0, 1, 2, 3, 60000]
        entries = reference_entries(segments)
        expected = encode_message(dtype, elements, entries, rounding, seed=bits)
        name, _, values = decode_message(expected)
        assert name == dtype
        for isa in ISAS:
            with forced(isa):
                message, decoded = round_trip(
                    elements, dtype, segments, rounding=rounding, seed=bits
                )
            assert message.tobytes() == expected, (isa, bits)
            assert raw(decoded).tobytes() == raw(values).tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_or_written_beyond_buffers(isa: str) -> None:
    rng = np.random.default_rng(9)
    for n in (1, 15, 16, 17, 100, 511, 512, 1025):
        elements = rng.standard_normal(n).astype(np.float32)
        elements[:: n // 8 + 1] = np.nan
        segments = [Segment(n, 0.1, 5)]
        with forced(isa):
            src = guarded(elements.tobytes())
            dst = guarded_output(max_encoded_nbytes(segments, "F32"))
            message = encode_bounded(src, "F32", segments, out=dst)
            assert np.shares_memory(message, np.frombuffer(dst, np.uint8))
            copy = guarded(message.tobytes())
            out = guarded_output(4 * n)
            decode_bounded(copy, out, dtype="F32")
        assert_within(elements, np.frombuffer(out, np.float32), 0.1)


@pytest.mark.parametrize("isa", ISAS)
@BOTH
def test_threads_write_the_same_bytes(isa: str, rounding: Rounding) -> None:
    elements = table_rows(3000, 64)
    elements[::7, 3], elements[5::11, 1] = np.nan, 1e9
    segments = [Segment(n, 0.004, bits) for n, bits in ((70_001, 4), (99, 6), (121_900, 8))]
    with forced(isa):
        alone, _ = round_trip(elements.reshape(-1), "F32", segments, rounding=rounding)
        shared, _ = round_trip(elements.reshape(-1), "F32", segments, rounding=rounding, threads=4)
    assert alone.tobytes() == shared.tobytes()


def test_a_message_without_escapes_has_no_counts_and_no_escapes() -> None:
    elements = np.linspace(-1, 1, 5120, dtype=np.float32)
    message, _ = round_trip(elements, "F32", [Segment(elements.size, 0.1, 4)])
    assert message.nbytes == 128 + 5120 * 4 // 8


@DTYPES
def test_the_largest_message_is_the_one_of_escapes_only(dtype: str) -> None:
    elements = np.full(1000, np.nan, NUMPY[dtype])
    segments = [Segment(600, 0.1, 4), Segment(0, 0.1, 4), Segment(400, 0.1, 16)]
    message, _ = round_trip(elements, dtype, segments)
    assert message.nbytes == max_encoded_nbytes(segments, dtype)


# By machine: the word of glibc's fenv_t that tells the processor to flush subnormal numbers to
# zero, and its bits (MXCSR: flush to zero, denormals are zero; FPCR: flush to zero).
FLUSHING = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in FLUSHING, reason="another fenv_t"
)
def test_subnormal_numbers_count_even_where_the_thread_flushes_them() -> None:
    """PyTorch's `set_flush_denormal` and other libraries set the processor to treat them as 0."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    environment = (ctypes.c_uint32 * 8)()
    assert libm.fegetenv(environment) == 0
    elements = np.array([1e-40, -3e-40, 1.2e-38, 7e-41], np.float32)
    segments = [Segment(4, 1e-41, 8)]
    expected, decoded = round_trip(elements, "F32", segments)
    flushing = (ctypes.c_uint32 * 8)(*environment)
    word, bits = FLUSHING[platform.machine()]
    flushing[word] |= bits
    assert libm.fesetenv(flushing) == 0
    try:
        message = encode_bounded(elements, "F32", segments)
        again = np.empty_like(elements)
        decode_bounded(message, again, dtype="F32")
        kept = (ctypes.c_uint32 * 8)()
        assert libm.fegetenv(kept) == 0
    finally:
        libm.fesetenv(environment)
    assert kept[word] & bits == bits
    assert message.tobytes() == expected.tobytes()
    assert again.tobytes() == decoded.tobytes()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stochastic_rounding_has_the_right_mean(dtype: str) -> None:
    """The mean over many seeds is the element, also at the edge, where some would be escapes."""
    n_seeds, bound, bits = 4000, 0.25, 4
    elements = np.linspace(-2.2, 2.2, 112).astype(NUMPY[dtype])
    total = np.zeros(elements.size)
    moved = np.zeros(elements.size, bool)
    for seed in range(n_seeds):
        message = encode_bounded(
            raw(elements),
            dtype,
            [Segment(elements.size, bound, bits)],
            rounding=Rounding.STOCHASTIC,
            seed=seed,
        )
        decoded = np.empty_like(elements)
        decode_bounded(message, raw(decoded), dtype=dtype)
        total += decoded.astype(np.float64)
        moved |= decoded != elements
    assert 5 < elements.size - moved.sum() < elements.size  # some escape, and most do not
    error = total / n_seeds - elements.astype(np.float64)
    # A rounding to two values a step apart has a deviation of at most half a step.
    deviation = bound / 2 / np.sqrt(n_seeds)
    assert np.abs(error).max() < 4.5 * deviation
    assert abs(error.mean()) < 4.5 * deviation / np.sqrt(elements.size)


def test_random_bits_differ_between_segments_seeds_and_elements() -> None:
    elements = np.full(20_000, 0.125, np.float32)
    how: dict[str, Any] = {"rounding": Rounding.STOCHASTIC}
    segments = [Segment(10_000, 0.25, 4), Segment(10_000, 0.25, 4)]
    _, first = round_trip(elements, "F32", segments, seed=0, **how)
    _, second = round_trip(elements, "F32", segments, seed=2**64 - 1, **how)
    ups = np.array([first[:10_000], first[10_000:], second[:10_000], second[10_000:]]) > 0.125
    assert np.abs(ups.mean(axis=1) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(ups) - np.eye(4)).max() < 0.05
    assert abs(np.corrcoef(ups[0, 1:], ups[0, :-1])[0, 1]) < 0.05


@BOTH
def test_bits_for_covers_the_spread(rounding: Rounding) -> None:
    for bound in (0.01, 1 / 3, 7e-9):
        for reach in (0.3, 0.9, 5.5, 40.0, 126.5, 1000.0, 15000.0):
            bits = bits_for(reach * bound, bound, rounding)
            elements = np.linspace(-reach * bound, reach * bound, 999).astype(np.float32)
            message, _ = round_trip(elements, "F32", [Segment(999, bound, bits)], rounding=rounding)
            assert read_segments(message)[0].n_escapes <= 2
            if bits > 1:
                message, _ = round_trip(
                    elements, "F32", [Segment(999, bound, bits - 1)], rounding=rounding
                )
                assert read_segments(message)[0].n_escapes > 2


@pytest.mark.parametrize(
    ("spread", "bound", "match"),
    [
        (1.0, 0.0, "bound is 0"),
        (1.0, -1.0, "above 0"),
        (1.0, float("nan"), "bound is nan"),
        (-1.0, 1.0, "spread is -1"),
        (float("inf"), 1.0, "spread is inf"),
        (1e6, 1.0, "need more than 16 bits"),
    ],
)
def test_bits_for_refuses(spread: float, bound: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        bits_for(spread, bound)


@pytest.mark.parametrize(
    ("segment", "match"),
    [
        (Segment(4, 0.0, 4), "segment 1 has the bound 0.0; it must be a finite number above 0"),
        (Segment(4, -2.0, 4), "segment 1 has the bound -2.0"),
        (Segment(4, float("nan"), 4), "segment 1 has the bound nan"),
        (Segment(4, float("inf"), 4), "segment 1 has the bound inf"),
        (Segment(4, 1e-46, 4), "no step of 4 bits can keep; raise the bound"),
        (Segment(4, 1e-12, 4, 1.0), "reach no value but the center 1.0; raise the bound"),
        (Segment(4, 0.1, 0), "segment 1 has codes of 0 bits; allowed are 1 to 16"),
        (Segment(4, 0.1, 17), "segment 1 has codes of 17 bits"),
        (Segment(4, 0.1, -1), "segment 1 has codes of -1 bits"),
        (Segment(-1, 0.1, 4), "segment 1 has -1 elements"),
        (Segment(MAX_BOUNDED_LENGTH + 1, 0.1, 4), "segment 1 has 4294967296 elements"),
        (Segment(4, 0.1, 4, float("nan")), "segment 1 has the center nan"),
        (Segment(4, 0.1, 4, 1e39), r"segment 1 has the center 1e\+39"),
    ],
)
def test_segments_that_cannot_be_coded_are_refused(segment: Segment, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        encode_bounded(np.zeros(9, np.float32), "F32", [Segment(5, 1.0, 4), segment])


@pytest.mark.parametrize(
    ("segment", "match"),
    [
        ((4, "a", 4, 0.0), "segment 0 has a bound of type"),
        ((4.5, 1.0, 4, 0.0), "segment 0 has a length of type"),
        ((4, 1.0, None, 0.0), "segment 0 has a number of bits of type"),
        ((4, 1.0, 4, None), "segment 0 has a center of type"),
        ((4, 1.0, 4), "give n, bound, bits and center"),
    ],
)
def test_fields_of_other_types_are_refused(segment: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        encode_bounded(np.zeros(4, np.float32), "F32", [segment])


def test_calls_with_mistakes_are_refused() -> None:
    elements = np.zeros(100, np.float32)
    segments = [Segment(100, 0.1, 4)]
    message = encode_bounded(elements, "F32", segments)
    with pytest.raises(ValueError, match=r"dtype is 'I32'; bounded codes are for F16, BF16"):
        encode_bounded(elements, "I32", segments)
    with pytest.raises(ValueError, match="100 elements of F32, which take 400 bytes; values has 8"):
        encode_bounded(np.zeros(2, np.float32), "F32", segments)
    with pytest.raises(ValueError, match=r"out has 10 bytes; it must have \d+"):
        encode_bounded(elements, "F32", segments, out=bytearray(10))
    with pytest.raises(TypeError, match="out is read-only"):
        encode_bounded(elements, "F32", segments, out=bytes(1000))
    with pytest.raises(ValueError, match="seed is -1"):
        encode_bounded(elements, "F32", segments, seed=-1)
    with pytest.raises(ValueError, match="the message holds F32, not F64"):
        decode_bounded(message, np.empty(100, np.float64), dtype="F64")
    with pytest.raises(ValueError, match="the message holds 100 elements of F32"):
        decode_bounded(message, np.empty(99, np.float32), dtype="F32")
    with pytest.raises(TypeError, match="out is read-only"):
        decode_bounded(message, bytes(400), dtype="F32")
