"""Templates: frames of many short tensors by one plan, the same as `compress_buffer` makes."""

import numpy as np
import pytest
from codec_battery import make_data

from packhorse.frame import Frame, compress_buffer
from packhorse.frame.template import Template
from packhorse.layout import Mode

CASES = {
    "planes": ("F32", "weights", 800),
    "planes of 16 bits": ("BF16", "weights", 5000),
    "zstd": ("I64", "sorted", 400),
    "noise": ("U8", "noise", 3000),
    "constant": ("F64", "constant", 100),
    "few bytes": ("F32", "weights", 3),
    "a leaf of 240 bytes": ("U8", "noise", 240),
    "a leaf of 241 bytes": ("U8", "noise", 241),
}


def frame_of(data: bytes, dtype: str, **how: object) -> Frame:
    return compress_buffer(data, dtype, (1, len(data) // np.dtype(SIZES[dtype]).itemsize), **how)


SIZES = {"F32": "f4", "BF16": "u2", "I64": "i8", "U8": "u1", "F64": "f8"}


@pytest.mark.parametrize("level", ["fast", "default", "max"])
@pytest.mark.parametrize("case", CASES)
def test_frames_are_the_same(case: str, level: str) -> None:
    dtype, kind, n = CASES[case]
    first = frame_of(make_data(kind, dtype, n), dtype, level=level)
    template = Template.of(first)
    assert template is not None
    for seed in range(5):
        data = make_data(kind, dtype, n, seed)
        frame, digest = template.pack(np.frombuffer(data, np.uint8))
        like = frame_of(data, dtype, level=level, like=first.plan)
        assert frame == like.to_bytes()
        assert digest == like.content_hash
        again = bytearray(len(data))
        Frame.from_buffer(frame).decompress_into(again)
        assert again == data


def test_what_zstandard_cannot_pack_is_stored() -> None:
    first = frame_of(make_data("ids", "U8", 3200), "U8")
    template = Template.of(first)
    assert template is not None
    assert template.plan.whole == Mode.ZSTD
    noise = np.random.default_rng(0).integers(0, 256, 3200).astype(np.uint8)
    frame = Frame.from_buffer(template.pack(noise)[0])
    assert frame.planes()[0].modes == {Mode.STORED: 1}
    assert frame.to_bytes() == frame_of(noise.tobytes(), "U8", like=first.plan).to_bytes()


def test_other_frames_have_none() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    long = compress_buffer(values, "F32", values.shape)
    short = values[:1000]
    delta = compress_buffer(short, "F32", short.shape, base=short)
    read = Frame.from_buffer(compress_buffer(short, "F32", short.shape).to_bytes())
    empty = compress_buffer(b"", "F32", (0,))
    assert long.n_chunks > 1
    assert delta.base_hash is not None
    assert [Template.of(frame) for frame in (long, delta, read, empty)] == [None] * 4
