"""Outputs of 12 MiB and more, which the core writes past the cache."""

import numpy as np
import pytest
from codec_battery import ISAS, forced, make_data, tensor_shape

from packhorse.frame import Frame, compress_buffer

NBYTES = (12 << 20) + 4096
OFFSETS = (0, 16, 32, 48, 4)  # of an output from a multiple of 64 bytes
SENTINEL = 0xA5


def coded_units(raw_bits: int) -> bytes:
    """Units of two bytes, split as floats are: below a symbol, plane 0 has so many bits of noise,
    and a few values are rare."""
    rng = np.random.default_rng(raw_bits)
    n = NBYTES // 2
    top = np.minimum(rng.geometric(0.6, n) - 1, (1 << (7 - raw_bits)) - 1) << raw_bits
    plane = top | rng.integers(0, 1 << raw_bits, n)
    plane[rng.integers(0, n, 50)] = 0xFF
    rotated = (plane << 8 | rng.integers(0, 256, n)).astype(np.uint16)
    return (rotated >> 1 | rotated << 15).astype("<u2").tobytes()


def check_output(frame: Frame, data: bytes, offset: int, threads: int) -> None:
    memory = np.full(len(data) + 192, SENTINEL, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    frame.decompress_into(memory[begin : begin + len(data)], threads=threads)
    assert memory[begin : begin + len(data)].tobytes() == data
    assert set(memory[:begin]) | set(memory[begin + len(data) :]) == {SENTINEL}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["weights", "few", "noise", "31 values"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "F8_E4M3", "I16", "U8"])
def test_large_outputs_at_every_offset(dtype: str, kind: str, isa: str) -> None:
    unit_nbytes = {"F32": 4, "F64": 8, "F8_E4M3": 1, "U8": 1}.get(dtype, 2)
    data = make_data(kind, dtype, NBYTES // unit_nbytes + 77)
    frame = compress_buffer(data, dtype, tensor_shape(data, dtype))
    with forced(isa):
        for i, offset in enumerate(OFFSETS if kind == "weights" else OFFSETS[1:2]):
            check_output(frame, data, offset, 1 + i % 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("raw_bits", range(6))
def test_large_outputs_with_raw_bits(raw_bits: int, isa: str) -> None:
    data = coded_units(raw_bits)
    frame = compress_buffer(data, "F16", tensor_shape(data, "F16"))
    assert frame.ratio > 1.1
    with forced(isa):
        check_output(frame, data, 16, 1)
