"""Differences from a base: round trips, sizes, the base's name, casts, and frames without a
base."""

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_battery import ISAS, forced
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import BaseMismatchError, CorruptionError, Level, PackhorseError
from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.frame import Frame, compress_buffer, content_hash, max_frame_nbytes
from packhorse.layout import DTYPES, Mode

RNG = np.random.default_rng(11)


def steps(dtype: str, n: int, *, share: float = 0.3, size: float = 1e-3) -> tuple[bytes, bytes]:
    """A tensor of floats, before and after an optimizer's step that changes a share of it."""
    old = RNG.standard_normal(n) * np.exp(RNG.standard_normal(n)) * 0.02
    new = old + np.where(RNG.random(n) < share, RNG.standard_normal(n) * size, 0)
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
            "F8_E4M3": ml_dtypes.float8_e4m3fn}[dtype]  # fmt: skip
    return new.astype(kind).tobytes(), old.astype(kind).tobytes()


def pack(new: bytes, old: bytes, dtype: str, *, threads: int = 2, **options: str) -> Frame:
    """Packs a tensor against a base, and reads the frame back from its bytes."""
    bits = {row.name: row.bits for row in DTYPES}[dtype]
    frame = compress_buffer(
        new, dtype, (len(new) * 8 // bits,), base=old, threads=threads, **options
    )
    return Frame.from_buffer(frame.to_bytes())


def unpack(frame: Frame, old: bytes) -> bytes:
    target = bytearray(frame.logical_nbytes)
    frame.decompress_into(target, base=old, threads=2)
    return bytes(target)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3"])
@pytest.mark.parametrize(("share", "size"), [(0.01, 1e-3), (0.3, 1e-4), (1.0, 1e-2)])
def test_a_step_of_training_comes_back(isa, dtype, share, size):
    new, old = steps(dtype, 700_001, share=share, size=size)
    with forced(isa):
        frame = pack(new, old, dtype)
        if size < 1e-2:  # which is as large as the values
            assert (frame.base_hash, frame.base_dtype) == (content_hash(old), dtype)
        assert unpack(frame, old) == new
        frame.verify(base=old)
        part = bytearray(3000)  # across two chunks of some dtypes
        frame.decompress_into(part, start=523_000, stop=526_000, base=old)
        assert part == new[523_000:526_000]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I32", "U8"])
def test_every_path_and_number_of_threads_writes_the_same_bytes(dtype):
    if dtype in ("BF16", "F32"):
        new, old = steps(dtype, 1_300_000)
    else:
        kind = {"I32": np.int32, "U8": np.uint8}[dtype]
        base = RNG.integers(0, 100, 1_300_000).astype(kind)
        moved = base + (RNG.random(base.size) < 0.1).astype(kind)
        new, old = moved.tobytes(), base.tobytes()
    frames = set()
    for isa in ISAS:
        with forced(isa):
            frames |= {pack(new, old, dtype, threads=threads).to_bytes() for threads in (1, 3)}
    assert len(frames) == 1


def test_differences_are_many_times_smaller():
    new, old = steps("BF16", 1_000_000, share=0.01)
    frame = pack(new, old, "BF16")
    assert frame.ratio > 60
    assert {mode for plane in frame.planes()[:1] for mode in plane.modes} == {Mode.SPARSE_DELTA}
    assert (
        "differences from the base take"
        in compress_buffer(new, "BF16", (1_000_000,), base=old).plan.reason
    )


@pytest.mark.parametrize("dtype", [row.name for row in DTYPES if row.bits == 8 * row.unit_nbytes])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 70_000])
def test_any_bytes_against_any_base(dtype, n):
    unit = {row.name: row.unit_nbytes for row in DTYPES}[dtype]
    old = RNG.integers(0, 256, n * unit, np.uint8)
    near = old.copy()
    near[RNG.integers(0, near.size, 1 + near.size // 50)] += 1
    noise = RNG.integers(0, 256, n * unit, np.uint8)
    for new in (near, noise, old):
        frame = pack(new.tobytes(), old.tobytes(), dtype)
        assert unpack(frame, old.tobytes()) == new.tobytes()


def test_all_patterns_against_shuffled_ones():
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype in ("BF16", "F16", "I16", "U16"):
        for base in (patterns[::-1], RNG.permutation(patterns), patterns ^ 1, patterns + 300):
            old = np.ascontiguousarray(base).tobytes()
            assert unpack(pack(patterns.tobytes(), old, dtype), old) == patterns.tobytes()


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300),
    change=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    dtype=st.sampled_from(["F64", "I64", "F32", "U32", "BF16", "I16", "U8", "F8_E5M2", "C64"]),
)
def test_hypothesis_finds_no_units_that_do_not_come_back(words, change, dtype):
    base = np.array(words, np.uint64)
    new = base + np.resize(np.array(change, np.int64).view(np.uint64), base.size)
    frame = pack(new.tobytes(), base.tobytes(), dtype)
    assert unpack(frame, base.tobytes()) == new.tobytes()


def test_an_equal_tensor_takes_a_few_bytes():
    old = steps("F32", 600_000)[1]
    frame = pack(old, old, "F32")
    assert frame.nbytes <= 256
    assert unpack(frame, old) == old
    small = pack(b"\x01\x02" * 10, b"\x01\x02" * 10, "BF16")
    assert unpack(small, b"\x01\x02" * 10) == b"\x01\x02" * 10


def test_a_base_that_does_not_help_is_not_needed():
    new = RNG.standard_normal(300_000).astype(np.float32).tobytes()
    frame = pack(new, RNG.standard_normal(300_000).astype(np.float32).tobytes(), "F32")
    assert frame.base_hash is None
    assert frame.base_dtype is None
    target = bytearray(len(new))
    frame.decompress_into(target)
    assert target == new


def test_a_base_that_helps_only_where_the_plan_looks_is_not_needed():
    n = 200_000
    new = (RNG.standard_normal(n) * 0.02).astype(np.float32)
    old = (RNG.standard_normal(n) * 10 ** RNG.uniform(-30, 30, n)).astype(np.float32)
    for first in range(0, n - 63, (n - 64) // 31):  # the runs that are sampled to plan
        old[first : first + 64] = new[first : first + 64]
    frame = pack(new.tobytes(), old.tobytes(), "F32")
    assert frame.base_hash is None
    assert unpack(frame, None) == new.tobytes()


def mixed_steps(n: int, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """BF16 values with one exponent for each size, and differences of these sizes."""
    which = RNG.integers(0, len(sizes), n)
    old = ((100 + 3 * which) << 7 | RNG.integers(0, 128, n)).astype(np.int64)
    change = (RNG.standard_normal(n) * np.array(sizes)[which]).astype(np.int64)
    new = np.where(
        RNG.random(n) < 0.02, RNG.integers(0, 1 << 15, n), np.clip(old + change, 0, 32767)
    )
    return new.astype(np.uint16).tobytes(), old.astype(np.uint16).tobytes()


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 0, 0, 0),  # no class has raw bits
        (900, 1, 1, 1, 1, 1, 1, 1),  # the first one has
        (1, 1, 300, 1, 1, 1),  # one in the middle, so that those before are moved as units as well
        (1, 1, 1, 500),  # the last one
        (400, 400, 700, 900, 500, 400, 800, 600),  # all
    ],
)
@pytest.mark.parametrize("n", [31, 2047, 2048, 70_001])
def test_any_mix_of_classes_with_raw_bits_and_without(sizes, n):
    new, old = mixed_steps(n, sizes)
    frames = set()
    for isa in ISAS:
        with forced(isa):
            frame = pack(new, old, "BF16")
            frames.add(frame.to_bytes())
            assert unpack(frame, old) == new
    assert len(frames) == 1


def test_steps_of_one_size_are_found_in_chunks_of_any_length():
    # Each exponent then has its own size of steps, and must not share a class with another one.
    old = RNG.standard_normal(600_000).astype(np.float32) * 0.04
    old = old.astype(ml_dtypes.bfloat16).astype(np.float32)
    sizes = []
    for seed in range(4):
        signs = np.random.default_rng(seed).choice(np.float32([-1e-4, 1e-4]), old.size)
        new = (old + signs).astype(ml_dtypes.bfloat16)
        for n in (old.size, 1 << 19):
            base = old[:n].astype(ml_dtypes.bfloat16).tobytes()
            sizes.append(pack(new[:n].tobytes(), base, "BF16").nbytes / n)
    assert max(sizes) < 1.1 * min(sizes)


def test_chunks_choose_for_themselves():
    """A tensor whose second half is unrelated to its base."""
    new, old = steps("BF16", 2_000_000, share=0.05)
    half = len(new) // 2
    noise = (RNG.standard_normal(half // 2) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    mixed = new[:half] + noise
    frame = pack(mixed, old, "BF16")
    modes = {mode for mode in frame.planes()[0].modes}
    assert {Mode.DELTA, Mode.RANS} <= modes
    assert unpack(frame, old) == mixed


# The base's name.


def test_no_base_or_another_is_refused_before_any_output():
    new, old = steps("BF16", 50_000)
    frame = pack(new, old, "BF16")
    target = bytearray(b"\xaa" * len(new))
    named = f"content hash {content_hash(old).hex()} is needed"
    for base, words in (
        (None, "none was given; pass it as base="),
        (new, f"the one given has {content_hash(new).hex()}"),
        (old[:-2], f"of {len(old)} bytes; the one given has {len(old) - 2}"),
    ):
        for work in (
            lambda base=base: frame.decompress_into(target, base=base),
            lambda base=base: frame.verify(base=base),
        ):
            with pytest.raises(BaseMismatchError, match=named) as raised:
                work()
            assert words in str(raised.value)
    assert target == b"\xaa" * len(new)


@pytest.mark.parametrize("isa", ISAS)
def test_a_known_hash_is_compared_and_not_computed(isa):
    new, old = steps("BF16", 70_000)
    frame = pack(new, old, "BF16")
    target = bytearray(b"x" * len(new))
    with pytest.raises(BaseMismatchError, match="the one given has 0000"):
        frame.decompress_into(target, base=old, base_hash=bytes(16))
    assert target == b"x" * len(new)
    with pytest.raises(BaseMismatchError, match="of 140000 bytes; the one given has 139998"):
        frame.decompress_into(target, base=old[2:], base_hash=frame.base_hash)
    with pytest.raises(BaseMismatchError, match="none was given"):
        frame.decompress_into(target, base_hash=frame.base_hash)
    with forced(isa):
        frame.decompress_into(target, base=old, base_hash=content_hash(old))
        assert target == new
        for lie in (new, bytes(len(old)), b"\xff" * len(old), RNG.bytes(len(old))):
            target[:] = bytes(len(new))
            with suppress(CorruptionError):
                frame.decompress_into(target, base=lie, base_hash=frame.base_hash)
            assert target != new
    plain = compress_buffer(new, "BF16", (70_000,))
    plain.decompress_into(target, base_hash=bytes(16))  # which needs no base
    assert target == new


def test_a_base_is_not_written_over():
    new, old = steps("BF16", 50_000)
    room = np.zeros(2 * max_frame_nbytes("BF16", (50_000,)), np.uint8)
    base = room[1000 : 1000 + len(old)]
    base[:] = np.frombuffer(old, np.uint8)
    with pytest.raises(ValueError, match="out and base share memory"):
        compress_buffer(new, "BF16", (50_000,), base=base, out=room)
    frame = pack(new, old, "BF16")
    with pytest.raises(ValueError, match="dst and the base share memory"):
        frame.decompress_into(room[500 : 500 + len(old)], base=base)
    assert bytes(base) == old


def test_a_base_must_have_a_dtype_and_size_that_fit():
    new, old = steps("BF16", 100)
    with pytest.raises(ValueError, match=r"the base has 198 bytes of BF16; .* take 200"):
        compress_buffer(new, "BF16", (100,), base=old[:-2])
    with pytest.raises(ValueError, match="the base of BF16 must be BF16 or F32, but is F16"):
        compress_buffer(new, "BF16", (100,), base=old, base_dtype="F16")
    with pytest.raises(ValueError, match="the base of F32 must be F32, but is BF16"):
        compress_buffer(new, "F32", (50,), base=old, base_dtype="BF16")


def test_a_base_of_another_shape_is_as_good():
    new, old = (np.frombuffer(part, ml_dtypes.bfloat16) for part in steps("BF16", 60_000))
    frame = ph_numpy.compress(new.reshape(200, 300), base=old)
    assert frame.base_hash is not None
    back = ph_numpy.decompress(frame.to_bytes(), base=old.reshape(300, 200))
    assert back.tobytes() == new.tobytes()


# Casts.


def test_a_rounded_copy_takes_a_few_bytes():
    master = (RNG.standard_normal((500, 700)) * 0.02).astype(np.float32)
    for kind in (ml_dtypes.bfloat16, np.float16):
        copy = master.astype(kind)
        frame = ph_numpy.compress(copy, base=master)
        assert frame.base_dtype == "F32"
        assert frame.nbytes <= 256
        assert ph_numpy.decompress(frame, base=master).tobytes() == copy.tobytes()
        copy[3, 4] += kind(1)
        frame = ph_numpy.compress(copy, base=master)
        assert frame.nbytes < 4096
        assert ph_numpy.decompress(frame, base=master).tobytes() == copy.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_casts_round_as_the_frameworks_do(isa):
    """Ties, subnormals, overflow and infinities, in a sweep of all exponents; NaNs as this
    processor and the format define them."""
    top = np.repeat(np.arange(65536, dtype=np.uint32) << 16, 12)
    low = [0, 1, 0x1000, 0x0FFF, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x2000, 0x3000, 0xEFFF, 0xFFFF]
    values = RNG.permutation(top | np.tile(np.array(low, np.uint32), 65536)).view(np.float32)
    tensor = torch.from_numpy(values.copy())
    is_nan = np.isnan(values)
    with forced(isa):
        for kind in (torch.bfloat16, torch.float16):
            copy = tensor.to(kind)
            numbers = copy.view(torch.int16).numpy().copy()
            word = values.view(np.uint32)[is_nan]
            numbers[is_nan] = (
                (
                    (word >> 16 | 0x40)
                    if kind == torch.bfloat16
                    else (word >> 16 & 0x8000 | 0x7E00 | word >> 13 & 0x1FF)
                )
                .astype(np.uint16)
                .view(np.int16)
            )
            copy = torch.from_numpy(numbers).view(kind)
            frame = ph_torch.compress(copy, base=tensor)
            assert frame.base_dtype == "F32"
            assert frame.planes()[0].nbytes == 0, "no differences"
            back = ph_torch.decompress(frame, base=tensor)
            assert torch.equal(back.view(torch.int16), copy.view(torch.int16))


# Many at once, and hostile bytes.


def test_many_with_bases():
    pairs = [steps("F32", n) for n in (100_000, 10, 300_000)]
    news, olds = (
        [np.frombuffer(part, np.float32) for part in side] for side in zip(*pairs, strict=True)
    )
    bases = [olds[0], None, olds[2]]
    frames = ph_numpy.compress_all(news, bases=bases, threads=2)
    assert [frame.base_hash is None for frame in frames] == [False, True, False]
    back = ph_numpy.decompress_all(frames, bases=bases, threads=2)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(news, back, strict=True))
    with pytest.raises(BaseMismatchError, match=r"frame [02]: a base of F32"):
        ph_numpy.decompress_all(frames)
    with pytest.raises(ValueError, match="bases has 1 members; there are 3 frames"):
        ph_numpy.decompress_all(frames, bases=bases[:1])


def test_every_flipped_bit_of_a_small_delta_is_noticed():
    new, old = steps("BF16", 700, share=1.0, size=1e-2)
    data = bytearray(pack(new, old, "BF16").to_bytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackhorseError):
            check_and_unpack(bytes(data), old)
        data[bit // 8] ^= 1 << bit % 8


def check_and_unpack(data: bytes, old: bytes) -> None:
    frame = Frame.from_buffer(data)
    if frame.level is None or frame.level != Level.DEFAULT:  # the only field that is ignored
        raise CorruptionError("another level")
    unpack(frame, old)


SMALL_NEW, SMALL_OLD = steps("BF16", 3000, share=1.0, size=1e-2)
SMALL_FRAME = pack(SMALL_NEW, SMALL_OLD, "BF16").to_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_stream_never_harms(data):
    """Without the chunks' checksums, the checks of the stream must suffice."""
    frame = bytearray(SMALL_FRAME)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(128, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    target = bytearray(len(SMALL_NEW))
    try:
        Frame.from_buffer(bytes(frame)).decompress_into(target, base=SMALL_OLD, check=False)
    except CorruptionError:
        return
