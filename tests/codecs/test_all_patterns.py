"""Every bit pattern is an ordinary value: all patterns of 8 and 16 bits, and unusual patterns of
wide floats."""

import struct

import numpy as np
import pytest
from codec_battery import check_tensor, tensor_shape

from packhorse.frame import compress_buffer
from packhorse.layout import DTYPES
from packhorse.reference import decode_frame

LEVELS = ("fast", "default", "max")
ONE_BYTE = [dtype.name for dtype in DTYPES if dtype.unit_nbytes == 1]
TWO_BYTES = [dtype.name for dtype in DTYPES if dtype.unit_nbytes == 2]
PATTERNS = np.arange(1 << 16, dtype="<u2")
ORDERS = {
    "sorted": PATTERNS,
    "shuffled": np.random.default_rng(0).permutation(PATTERNS),
    "repeated": np.repeat(PATTERNS, 3),
    # Common exponents are common here too, so that planes are coded and the rare values escape.
    "among weights": np.insert(
        np.repeat(np.arange(0x3C00, 0x3D00, dtype="<u2"), 1000), 77_000, PATTERNS
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TWO_BYTES)
def test_every_16_bit_pattern(dtype: str, order: str, level: str) -> None:
    check_tensor(ORDERS[order].tobytes(), dtype, level=level)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_pattern_in_the_slow_decoder(dtype: str, order: str) -> None:
    data = ORDERS[order].tobytes()
    frame = compress_buffer(data, dtype, tensor_shape(data, dtype), level="max")
    assert decode_frame(frame.to_bytes()).data == data


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_patterns_among_weights_are_coded(dtype: str) -> None:
    data = ORDERS["among weights"].tobytes()
    assert compress_buffer(data, dtype, tensor_shape(data, dtype), level="max").ratio > 1.2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_every_8_bit_pattern(dtype: str, level: str) -> None:
    patterns = np.arange(256, dtype=np.uint8)
    check_tensor(patterns.tobytes() * 3, dtype, level=level)
    check_tensor(np.repeat(patterns, 30).tobytes(), dtype, level=level)
    skewed = np.repeat(patterns, np.maximum(1, 2000 >> np.arange(256) // 20))
    check_tensor(np.random.default_rng(1).permutation(skewed).tobytes() * 3, dtype, level=level)


def special_values(exponent_bits: int, mantissa_bits: int) -> list[int]:
    """Patterns at the edges of a float: both signs of zeros, subnormals, ones, infinities, NaNs."""
    top = (1 << exponent_bits) - 1
    quiet = 1 << mantissa_bits - 1
    mantissas = (0, 1, 2, quiet - 1, quiet, quiet + 1, 2 * quiet - 2, 2 * quiet - 1)
    exponents = (0, 1, top // 2, top - 1, top)
    return [
        sign << exponent_bits + mantissa_bits | exponent << mantissa_bits | mantissa
        for sign in (0, 1)
        for exponent in exponents
        for mantissa in mantissas
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "code", "exponent_bits", "mantissa_bits"),
    [("F32", "I", 8, 23), ("C64", "I", 8, 23), ("F64", "Q", 11, 52)],
)
def test_special_values(
    dtype: str, code: str, exponent_bits: int, mantissa_bits: int, level: str
) -> None:
    values = special_values(exponent_bits, mantissa_bits)
    few = struct.pack(f"<{len(values)}{code}", *values)
    check_tensor(few, dtype, level=level)
    unit = struct.calcsize(code)
    weights = np.random.default_rng(2).standard_normal(20_000).astype(f"<f{unit}").tobytes()
    check_tensor(weights[: 8000 * unit] + few + weights[8000 * unit :], dtype, level=level)


def test_the_special_values_are_what_they_say() -> None:
    values = special_values(8, 23)
    floats = np.array(values, "<u4").view("<f4")
    assert len(set(values)) == len(values) == 80
    assert np.isnan(floats).sum() == 14
    assert np.isinf(floats).sum() == 2
    assert (floats == 0).sum() == 2
    assert np.signbit(floats).sum() == 40
