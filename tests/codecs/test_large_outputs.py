"""Outputs of 12 MiB and more, which the core writes past the cache if their memory was used
before."""

import mmap

import numpy as np
import pytest
from codec_battery import ISAS, forced, make_data, tensor_shape

from packhorse.frame import Frame, compress_buffer
from packhorse.frame.many import UnpackJob, decompress_many

NBYTES = (12 << 20) + 4096
OFFSETS = (0, 16, 32, 48, 4, 62, 7)  # of an output from a multiple of 64 bytes
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


def check_output(frame: Frame, data: bytes, offset: int, threads: int, isa: str) -> None:
    memory = np.full(len(data) + 192, SENTINEL, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    frame.decompress_into(memory[begin : begin + len(data)], threads=threads)
    assert memory[begin : begin + len(data)].tobytes() == data, (isa, offset)
    assert set(memory[:begin]) | set(memory[begin + len(data) :]) == {SENTINEL}, (isa, offset)


@pytest.mark.parametrize("kind", ["weights", "few", "noise", "31 values"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "F8_E4M3", "I16", "U8"])
def test_large_outputs_at_every_offset(dtype: str, kind: str) -> None:
    unit_nbytes = {"F32": 4, "F64": 8, "F8_E4M3": 1, "U8": 1}.get(dtype, 2)
    data = make_data(kind, dtype, NBYTES // unit_nbytes + 77)
    frame = compress_buffer(data, dtype, tensor_shape(data, dtype))
    for isa in ISAS:
        with forced(isa):
            for i, offset in enumerate(OFFSETS if kind == "weights" else OFFSETS[1:2]):
                check_output(frame, data, offset, 1 + i % 2, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_many_tensors_at_every_offset(isa: str) -> None:
    sizes = [70_000, 131_072, 131_200, 32_775, 300_001, 17, 0, 1_000_001]
    data = [
        make_data("weights", dtype, n)
        for dtype in ("BF16", "F32", "F16", "I32", "F8_E5M2", "F64")
        for n in sizes
    ]
    dtypes = [dtype for dtype in ("BF16", "F32", "F16", "I32", "F8_E5M2", "F64") for _ in sizes]
    frames = [
        compress_buffer(some, dtype, tensor_shape(some, dtype))
        for some, dtype in zip(data, dtypes, strict=True)
    ]
    memory = np.full(sum(map(len, data)) + 256 * len(data), SENTINEL, np.uint8)
    places, at = [], 64
    for i, some in enumerate(data):
        places.append(slice(at + i, at + i + len(some)))
        at = places[-1].stop + 64
    assert sum(map(len, data)) > 12 << 20
    jobs = [UnpackJob(frame, memory[place]) for frame, place in zip(frames, places, strict=True)]
    with forced(isa):
        for threads in (1, 2):
            memory[:] = SENTINEL
            decompress_many(jobs, threads=threads)
            for some, place in zip(data, places, strict=True):
                assert memory[place].tobytes() == some
                memory[place] = SENTINEL
            assert (memory == SENTINEL).all()


def test_new_memory_is_right_too() -> None:
    data = make_data("weights", "F32", NBYTES // 4)
    frame = compress_buffer(data, "F32", tensor_shape(data, "F32"))
    for _ in range(2):
        memory = mmap.mmap(-1, len(data) + 8192)
        frame.decompress_into(memoryview(memory)[100 : 100 + len(data)])
        assert memory[100 : 100 + len(data)] == data
        assert not any(memory[:100])
        assert not any(memory[100 + len(data) :])


@pytest.mark.parametrize("raw_bits", range(6))
def test_large_outputs_with_raw_bits(raw_bits: int) -> None:
    data = coded_units(raw_bits)
    frame = compress_buffer(data, "F16", tensor_shape(data, "F16"))
    assert frame.ratio > 1.1
    for isa in ISAS:
        with forced(isa):
            check_output(frame, data, 16, 1, isa)
