"""Chains of frames are decoded range by range: round trips, casts, Zstandard, and damage."""

import ml_dtypes
import numpy as np
import pytest
from codec_battery import ISAS, forced

from packhorse.frame import Frame, compress_buffer
from packhorse.frame.chain import can_decode_chain, decode_chain

RNG = np.random.default_rng(23)
KINDS = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
         "F8_E4M3": ml_dtypes.float8_e4m3fn, "I32": np.int32}  # fmt: skip


def states(dtype: str, n: int, share: float, n_states: int = 4) -> list[bytes]:
    """The states of a tensor, of which each step changes a share of the values."""
    kind = KINDS[dtype]
    if dtype == "I32":
        values = RNG.integers(0, 1000, n).astype(np.float64)
        size = 5.0
    else:
        values, size = RNG.standard_normal(n) * 0.02, 1e-3
    found = []
    for _ in range(n_states):
        found.append(values.astype(kind).tobytes())
        moved = RNG.random(n) < share
        values = values + np.where(moved, RNG.standard_normal(n) * size, 0)
    return found


def chain_of(dtype: str, found: list[bytes], **options: str) -> list[Frame]:
    """The frames of states, the newest first; each is packed against the one before it."""
    shape = (len(found[0]) // np.dtype(KINDS[dtype]).itemsize,)
    frames = [compress_buffer(found[0], dtype, shape, **options)]
    for new, old in zip(found[1:], found, strict=False):
        frames.append(compress_buffer(new, dtype, shape, base=old, **options))
    return [Frame.from_buffer(frame.to_bytes()) for frame in reversed(frames)]


def decoded(frames: list[Frame], threads: int = 2) -> bytes:
    assert can_decode_chain(frames)
    target = np.full(frames[0].logical_nbytes, 0x5A, np.uint8)
    fault = decode_chain(frames, target, threads)
    if fault is not None:
        raise fault.error
    return target.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_chain_gives_the_last_state(isa, dtype, share):
    found = states(dtype, 700_001, share)
    with forced(isa):
        frames = chain_of(dtype, found)
        assert all(frame.base_hash is not None for frame in frames[:-1])
        for threads in (1, 3):
            assert decoded(frames, threads) == found[-1]


@pytest.mark.parametrize("n", [0, 1, 63, 300, 5000])
def test_small_tensors(n):
    found = states("F32", n, 0.3)
    frames = chain_of("F32", found)
    if can_decode_chain(frames):  # frames of a few values are shorter without a base
        assert decoded(frames) == found[-1]


@pytest.mark.parametrize("level", ["fast", "max"])
def test_links_may_have_chunks_of_any_length(level):
    found = states("BF16", 1_500_000, 0.3)
    frames = chain_of("BF16", found)
    full = compress_buffer(found[0], "BF16", (1_500_000,), level=level)
    assert full.chunk_nbytes != frames[0].chunk_nbytes or level == "max"
    assert decoded([*frames[:-1], full]) == found[-1]
    short = compress_buffer(found[0][:1000], "BF16", (500,))
    assert not can_decode_chain([*frames[:-1], short])


def test_a_rounded_copy_follows_its_master():
    found = states("F32", 400_000, 1.0)
    copy = np.frombuffer(found[-1], np.float32).astype(ml_dtypes.bfloat16).tobytes()
    frame = compress_buffer(copy, "BF16", (400_000,), base=found[-1], base_dtype="F32")
    assert decoded([frame, *chain_of("F32", found)]) == copy


def test_only_the_full_frame_may_have_zstandard():
    # Repeats that matches would find as well, but those are not tried for bytes.
    words = np.random.default_rng(4).integers(0, 256, (40, 500), np.uint8)
    old = words[np.random.default_rng(5).integers(0, 40, 1600)].tobytes()
    new = bytearray(old)
    new[8000] ^= 1
    full = compress_buffer(old, "U8", (len(old),))
    assert full.opened.has_zstd
    frame = compress_buffer(bytes(new), "U8", (len(old),), base=old)
    assert frame.base_hash is not None
    assert decoded([frame, full]) == new


@pytest.mark.parametrize("number", range(4))
def test_the_damaged_frame_is_named(number):
    found = states("BF16", 1_200_000, 0.3)
    frames = chain_of("BF16", found)
    data = bytearray(frames[number].to_bytes())
    data[-100] ^= 4
    frames[number] = Frame.from_buffer(bytes(data), name="w")
    target = np.empty(frames[0].logical_nbytes, np.uint8)
    fault = decode_chain(frames, target, 2)
    assert fault is not None
    assert fault.number == number
    assert "tensor 'w': byte" in str(fault.error)


def test_other_bases_are_no_chain():
    found = states("F32", 100_000, 0.3)
    frames = chain_of("F32", found)
    assert can_decode_chain(frames)
    assert not can_decode_chain(frames[:-1])  # the last has a base
    assert not can_decode_chain([frames[0], *frames[2:]])  # a link is missing
