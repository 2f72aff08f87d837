"""Few differences from a base (mode sparse delta): every dtype and path, the choice of the mode,
patches in place, and lists of changes."""

import random
from collections.abc import Iterator
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
import torch
from base_samples import checkpoints
from codec_battery import ISAS, forced
from frame_builder import (
    DELTAS,
    Base,
    BuiltFrame,
    Stored,
    build_frame,
    crc32c,
    draw_delta_frame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import CorruptionError
from packhorse.codecs.content import base_check, content_sum
from packhorse.errors import BaseMismatchError, PackhorseError
from packhorse.frame import Frame, compress_buffer, content_hash, plan_buffer
from packhorse.frame.header import header_bytes
from packhorse.frame.patch import Patch
from packhorse.gpu.plans import why_unsupported
from packhorse.layout import DTYPES, STREAM_NBYTES_BITS, STREAM_NBYTES_MASK, Mode, Split
from packhorse.reference import decode_frame

WHOLE = [row for row in DTYPES if row.bits % 8 == 0]
UNITS = {row.name: np.dtype(f"<u{row.unit_nbytes}") for row in DTYPES}
CHUNK = 1 << 20  # bytes of a full chunk of differences


def sparse_pair(dtype: str, n: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Units, and others of which about a share is some steps away; a few steps are long."""
    rng = np.random.default_rng([seed, n])
    kind = UNITS[dtype]
    floats = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    if dtype in floats:
        old = (rng.standard_normal(n) * 0.02).astype(floats[dtype]).view(kind)
    else:
        old = rng.integers(0, 1 << 8 * kind.itemsize, n, np.uint64, endpoint=False).astype(kind)
    steps = np.where(rng.random(n) < 0.8, rng.choice([-1, 1], n), rng.integers(-900, 900, n))
    new = old + np.where(rng.random(n) < share, steps, 0).astype(np.int64).astype(kind)
    return old, new


def pack(
    new: np.ndarray, old: np.ndarray, dtype: str, *, threads: int = 1, level: str = "default"
) -> Frame:
    units = {row.name: row.bits // 8 // row.unit_nbytes for row in DTYPES}[dtype]
    frame = compress_buffer(
        new, dtype, (new.size // units,), base=old, threads=threads, level=level
    )
    return Frame.from_buffer(frame.to_bytes())


def modes(frame: Frame) -> set[Mode]:
    return set(frame.planes()[0].modes)


def check(frame: Frame, new: np.ndarray, old: np.ndarray, threads: int = 2) -> None:
    """Every way to use a frame gives the tensor."""
    whole = np.zeros_like(new)
    frame.decompress_into(whole, base=old, threads=threads)
    np.testing.assert_array_equal(whole, new)
    target = old.copy()
    if frame.base_hash is None:
        target[:] = 0
    frame.patch_into(target, threads=threads)
    np.testing.assert_array_equal(target, new)
    if frame.base_hash is not None:
        check_patch(summed(frame, new, old), new, old, threads)
    indices, values = frame.changes(old, threads=threads)
    assert (indices.dtype, values.dtype) == (np.uint32, new.dtype)
    np.testing.assert_array_equal(indices, np.flatnonzero(new != old))
    np.testing.assert_array_equal(values, new[indices])


def check_of_base(frame: Frame, new: np.ndarray, old: np.ndarray) -> int:
    """The base check of a frame (docs/format.md, section 7.2)."""
    replaced, units = np.zeros_like(old), 1 << frame.header.chunk_log
    for chunk, row in enumerate(frame.header.table.tolist()):
        mode, nbytes = row[1] >> STREAM_NBYTES_BITS, row[1] & STREAM_NBYTES_MASK
        at = slice(chunk * units, (chunk + 1) * units)
        if mode == Mode.SPARSE_DELTA:
            replaced[at] = np.where(old[at] != new[at], old[at], 0)
        elif mode != Mode.DELTA or nbytes:
            replaced[at] = old[at]
    return base_check(int.from_bytes(content_sum(replaced)[:8], "little"))


def summed(frame: Frame, new: np.ndarray, old: np.ndarray) -> Frame:
    """The same frame with content sums, which patches need."""
    header = frame.header
    base = header.base
    if base is not None:
        base = base._replace(content_hash=content_sum(old), check=check_of_base(frame, new, old))
    header = header._replace(content_hash=content_sum(new), base=base, has_sum=True)
    payload = bytes(frame.buffer())[header.header_nbytes :]
    return Frame.from_buffer(header_bytes(header) + payload)


def check_patch(frame: Frame, new: np.ndarray, old: np.ndarray, threads: int = 1) -> Patch:
    """A patch is made without a write to the base, and can be written more than once."""
    target = old.copy()
    target.flags.writeable = False
    patch = frame.prepare_patch(target, threads=threads)
    assert patch is not None
    assert patch.content_sum == content_sum(new) == frame.content_hash
    np.testing.assert_array_equal(target, old)
    target.flags.writeable = True
    for _ in range(2):
        patch.write(target, threads)
        np.testing.assert_array_equal(target, new)
    return patch


def dtypes_and_paths() -> Iterator[tuple[str, str]]:
    """Each path with each size of a unit, for integers and for floats; the other dtypes, which go
    through the same code, with one path each, in turn."""
    known: set[object] = set()
    for row, one in zip(WHOLE, cycle(ISAS), strict=False):
        kind = (row.unit_nbytes, row.bits, Split.FLOAT in row.splits)
        yield from ((row.name, isa) for isa in ([one] if kind in known else ISAS))
        known.add(kind)


@pytest.mark.parametrize(("dtype", "isa"), [*dtypes_and_paths()])
def test_every_dtype_and_path(dtype: str, isa: str) -> None:
    n = 2 * CHUNK // UNITS[dtype].itemsize + 2 * 77  # three chunks
    old, new = sparse_pair(dtype, n, 0.01)
    new[-1] = old[-1] ^ 1
    with forced(isa):
        frame = pack(new, old, dtype)
        assert modes(frame) == {Mode.SPARSE_DELTA}
        check(frame, new, old)


@pytest.mark.parametrize("dtype", [row.name for row in WHOLE])
def test_every_path_writes_the_same_bytes_and_the_slow_decoder_reads_them(dtype: str) -> None:
    old, new = sparse_pair(dtype, 20_000, 0.02)
    frames = set()
    for isa in ISAS:
        for level in ("default", "max"):
            with forced(isa):
                frames.add((level, pack(new, old, dtype, level=level).to_bytes()))
    assert len(frames) == 2
    for _, frame in frames:
        assert frame[4] == 2
        assert decode_frame(frame, base=old.tobytes()).data == new.tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I64", "C64"])
@pytest.mark.parametrize("n", [0, 2, 62, 64, 66, 1000, 4096 + 62])
def test_any_number_of_units_and_any_place_of_one_change(dtype: str, n: int) -> None:
    old, _ = sparse_pair(dtype, n, 0)
    check(pack(old, old, dtype), old, old)
    for place in sorted({0, n // 2, n - 1}) if n else []:
        for step in (1, -1, 77):
            new = old.copy()
            new[place] += np.array(step).astype(new.dtype)
            check(pack(new, old, dtype), new, old)
    check(pack(~old, old, dtype), ~old, old)  # all change


@pytest.mark.parametrize("isa", ISAS)
def test_changes_at_the_ends_of_chunks(isa: str) -> None:
    old, _ = sparse_pair("BF16", 3 * CHUNK // 2 + 5, 0)
    new, per_chunk = old.copy(), CHUNK // 2
    for place in (0, per_chunk - 1, per_chunk, 2 * per_chunk - 1, new.size - 1):
        new[place] ^= 1
    with forced(isa):
        check(pack(new, old, "BF16"), new, old)


def test_odd_floats() -> None:
    """NaNs with payloads, both zeros, subnormals and infinities, as bases and as values."""
    for dtype, kind, odd in (
        ("BF16", "<u2", [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81]),
        ("F16", "<u2", [0, 0x8000, 1, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x7C01]),
        ("F32", "<u4", [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF]),
    ):
        old = np.zeros(4000, kind)
        old[: 40 * len(odd)] = np.repeat(np.array(odd, kind), 40)
        new = old.copy()
        for i, value in enumerate(odd):
            for j in range(len(odd)):
                new[40 * j + i] = value
        frame = pack(new, old, dtype)
        check(frame, new, old)
        assert decode_frame(frame.to_bytes(), base=old.tobytes()).data == new.tobytes()


def test_rows_of_an_embedding() -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((4000, 256)).astype(np.float32)
    after = table.copy()
    rows = rng.choice(4000, 60, replace=False)
    after[rows] += rng.standard_normal((60, 256)).astype(np.float32) * 1e-4
    old, new = table.reshape(-1).view("<u4"), after.reshape(-1).view("<u4")
    frame = pack(new, old, "F32")
    assert modes(frame) == {Mode.SPARSE_DELTA}
    n_changed = int((new != old).sum())
    assert frame.nbytes < 4 * n_changed  # less than the values alone
    check(frame, new, old)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_base_of_f32_is_rounded(dtype: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}[dtype]
    master = (rng.standard_normal(1_100_000) * 0.02).astype(np.float32)
    new = master.astype(kind).view("<u2").copy()
    new[rng.integers(0, new.size, 9000)] += 1
    with forced(isa):
        frame = compress_buffer(new, dtype, new.shape, base=master, base_dtype="F32")
        assert modes(frame) == {Mode.SPARSE_DELTA}
        out = np.zeros_like(new)
        frame.decompress_into(out, base=master)
        indices, values = frame.changes(master)
    np.testing.assert_array_equal(out, new)
    np.testing.assert_array_equal(indices, np.flatnonzero(master.astype(kind).view("<u2") != new))
    np.testing.assert_array_equal(values, new[indices])
    with pytest.raises(ValueError, match="whose base is F32 cannot be patched in place"):
        frame.patch_into(bytearray(new.nbytes))


def test_real_steps_of_training() -> None:
    """Real weights and optimizer states, and updates too small for most BF16 weights."""
    before, after = checkpoints()
    n_sparse = 0
    for name, tensor in after.items():
        if tensor.dim() != 2 or name not in before or before[name].shape != tensor.shape:
            continue
        if not tensor.is_floating_point():
            continue
        master, step = before[name].float(), tensor.float() - before[name].float()
        old = master.bfloat16()
        new = (master + 1e-3 * step).bfloat16()
        old_units, new_units = (
            x.flatten().contiguous().view(torch.int16).numpy().view("<u2") for x in (old, new)
        )
        frame = pack(new_units, old_units, "BF16")
        n_sparse += Mode.SPARSE_DELTA in modes(frame)
        check(frame, new_units, old_units)
    assert n_sparse > 3


@pytest.mark.parametrize(("share", "wanted"), [(0.001, 7), (0.03, 7), (0.12, 6), (0.6, 6)])
def test_the_density_of_a_chunk_chooses_its_mode(share: float, wanted: int) -> None:
    old, new = sparse_pair("BF16", 600_000, share)
    frame = pack(new, old, "BF16")
    assert modes(frame) == {Mode(wanted)}
    assert frame.to_bytes()[4] == (2 if wanted == 7 else 1)
    check(frame, new, old)


def test_kernels_leave_such_frames_to_the_host() -> None:
    old, new = sparse_pair("BF16", 5000, 0.01)
    header = pack(new, old, "BF16").header
    assert why_unsupported(header.table, header.geometry) == "a plane of mode sparse_delta"


def test_each_chunk_chooses_by_its_own_counts() -> None:
    n = CHUNK // 2
    old, few = sparse_pair("BF16", 6 * n, 0.01)
    _, many = sparse_pair("BF16", 6 * n, 0.5)
    new = old.copy()
    new[n : 2 * n], new[3 * n : 4 * n] = few[n : 2 * n], many[3 * n : 4 * n]
    new[5 * n :] = np.random.default_rng(1).integers(0, 65536, n)
    for threads in (1, 3):
        frame = pack(new, old, "BF16", threads=threads)
        assert {Mode.DELTA, Mode.SPARSE_DELTA} < modes(frame)
        check(frame, new, old, threads)


def test_a_source_that_turns_dense_late_is_still_exact() -> None:
    """A chunk that is given up in the middle of its list of changes."""
    n = CHUNK // 2
    old, dense = sparse_pair("BF16", n, 0.7)
    for turn in (n // 2, n - n // 5, n - 4000):
        new = old.copy()
        new[turn:] = dense[turn:]
        new[:turn:97] ^= 1
        check(pack(new, old, "BF16"), new, old)


def test_plans_tell_how_long_sparse_frames_get() -> None:
    for share in (0.0005, 0.005, 0.04):
        old, new = sparse_pair("BF16", 5_000_000, share)
        plan = plan_buffer(new, "BF16", new.shape, base=old)
        frame = compress_buffer(new, "BF16", new.shape, base=old, like=plan)
        assert 0.8 < plan.estimated_nbytes / frame.nbytes < 1.25


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 3000),
    dtype=st.sampled_from(["BF16", "F16", "F32", "F64", "F8_E5M2", "U8", "I16", "I32", "U64"]),
    share=st.floats(0, 0.06),
)
def test_hypothesis_finds_no_pair_that_does_not_come_back(
    seed: int, n: int, dtype: str, share: float
) -> None:
    old, new = sparse_pair(dtype, n, share, seed)
    frame = pack(new, old, dtype)
    check(frame, new, old)
    assert decode_frame(frame.to_bytes(), base=old.tobytes()).data == new.tobytes()


# Patches.
def frames_to_patch() -> dict[str, tuple[Frame, np.ndarray, np.ndarray]]:
    n = CHUNK // 2
    old, few = sparse_pair("BF16", 3 * n + 100, 0.01)
    _, many = sparse_pair("BF16", old.size, 0.4)
    mixed = few.copy()
    mixed[n : 2 * n] = many[n : 2 * n]
    mixed[2 * n : 3 * n] = np.random.default_rng(2).integers(0, 65536, n)
    return {
        "few": (pack(few, old, "BF16"), old, few),
        "many": (pack(many, old, "BF16"), old, many),
        "mixed": (pack(mixed, old, "BF16"), old, mixed),
        "full": (Frame.from_buffer(compress_buffer(few, "BF16", few.shape).to_bytes()), old, few),
    }


PATCHES = frames_to_patch()


def damaged(frame: Frame, at: int) -> Frame:
    data = bytearray(frame.to_bytes())
    data[at] ^= 4
    return Frame.from_buffer(bytes(data))


def test_a_patch_keeps_few_changes_as_a_list_and_many_as_the_chunk() -> None:
    frame, old, few = PATCHES["few"]
    patch = check_patch(summed(frame, few, old), few, old)
    assert patch.nbytes == 6 * np.count_nonzero(few != old)
    frame, old, many = PATCHES["many"]
    assert check_patch(summed(frame, many, old), many, old).nbytes >= frame.logical_nbytes * 0.9
    assert check_patch(summed(pack(old, old, "BF16"), old, old), old, old).nbytes == 0


def test_a_patch_shows_whether_elements_that_change_were_others() -> None:
    frame, old, few = PATCHES["few"]
    frame = summed(frame, few, old)
    for changes in (True, False):
        other = old.copy()
        other[np.flatnonzero((few != old) == changes)[-1]] ^= 1
        with pytest.raises(BaseMismatchError, match="content sum"):
            frame.prepare_patch(other)
        if changes:
            with pytest.raises(BaseMismatchError, match="something else wrote to the base"):
                frame.prepare_patch(other, base_hash=frame.base_hash)
        else:
            assert frame.prepare_patch(other, base_hash=frame.base_hash) is not None


def test_targets_of_patches_are_checked() -> None:
    frame, old, few = PATCHES["few"]
    patch = summed(frame, few, old).prepare_patch(old)
    assert patch is not None
    with pytest.raises(ValueError, match="target must be as long"):
        patch.write(bytearray(2))
    with pytest.raises(TypeError):
        patch.write(old.tobytes())
    assert frame.prepare_patch(old) is None
    assert PATCHES["full"][0].prepare_patch(old) is None


@pytest.mark.parametrize("name", PATCHES)
def test_a_bad_frame_leaves_the_target_as_it_was(name: str) -> None:
    frame, old, new = PATCHES[name]
    offsets = frame.header.chunk_offsets()
    for at in (*offsets[:-1], int(offsets[-1]) - 1, (offsets[0] + offsets[-1]) // 2):
        target = old.copy()
        with pytest.raises(CorruptionError):
            damaged(frame, int(at)).patch_into(target)
        if frame.base_hash is not None:
            with pytest.raises(CorruptionError):
                damaged(summed(frame, new, old), int(at)).prepare_patch(target)
        np.testing.assert_array_equal(target, old)


@pytest.mark.parametrize("name", ["few", "many", "mixed"])
def test_a_wrong_target_is_refused_and_stays(name: str) -> None:
    frame, old, new = PATCHES[name]
    for other in (new, old ^ 1):
        target = other.copy()
        with pytest.raises(BaseMismatchError, match="a base of BF16 with content hash"):
            frame.patch_into(target)  # also: patched twice
        with pytest.raises(BaseMismatchError):
            frame.patch_into(target, base_hash=content_hash(target))
        with pytest.raises(BaseMismatchError):
            frame.changes(target)
        np.testing.assert_array_equal(target, other)
    target = old.copy()
    frame.patch_into(target, base_hash=content_hash(old))
    np.testing.assert_array_equal(target, new)


def test_targets_that_do_not_fit() -> None:
    frame, old, _ = PATCHES["few"]
    with pytest.raises(ValueError, match=r"target has 2 bytes, the tensor \d+"):
        frame.patch_into(bytearray(2))
    with pytest.raises(TypeError):
        frame.patch_into(old.tobytes())
    full, _, new = PATCHES["full"]
    with pytest.raises(ValueError, match="the base has 2 bytes"):
        full.changes(bytes(2))
    memory = np.zeros(full.nbytes + new.nbytes, np.uint8)
    memory[: full.nbytes] = np.frombuffer(full.to_bytes(), np.uint8)
    inside = Frame.from_buffer(memory[: full.nbytes])
    with pytest.raises(ValueError, match="share memory"):
        inside.patch_into(memory[64 : 64 + new.nbytes])


def test_a_frame_without_elements_is_a_patch() -> None:
    built = build_frame(b"", "BF16", (0, 3), codings=[Stored()], base=Base(b"", "BF16"))
    frame = Frame.from_buffer(bytes(built))
    frame.patch_into(bytearray())
    indices, values = frame.changes(b"")
    assert (indices.size, values.size) == (0, 0)


@pytest.mark.parametrize("isa", ISAS)
def test_built_frames_are_patched_and_compared(isa: str) -> None:
    """Frames of any legal form, of all modes of differences and others beside them."""
    drawn = {f"seed {seed}": draw_delta_frame(random.Random(seed)) for seed in range(150)}
    with forced(isa):
        for name, built in ({name: build() for name, build in DELTAS.items()} | drawn).items():
            check_built(name, built)


def check_built(name: str, built: BuiltFrame) -> None:
    frame, old = Frame.from_buffer(bytes(built)), built.base
    kind = UNITS[frame.dtype]
    new = np.frombuffer(built.source, kind)
    whole = bytearray(frame.logical_nbytes)
    frame.decompress_into(whole, base=old)
    assert whole == built.source, name
    if frame.base_dtype == frame.dtype:
        target = bytearray(old)
        frame.patch_into(target)
        assert target == built.source, name
        before = np.frombuffer(old, kind)
        check_patch(summed(frame, new, before), new, before, threads=2)
    assert frame.prepare_patch(old) is None, name
    rounded = np.frombuffer(Base(old, frame.base_dtype).units(frame.dtype), kind)
    indices, values = frame.changes(old)
    np.testing.assert_array_equal(indices, np.flatnonzero(new != rounded), name)
    np.testing.assert_array_equal(values, new[indices], name)


@pytest.mark.parametrize(("dtype", "mode"), [("U8", Mode.ZSTD), ("U64", Mode.MATCHES)])
def test_frames_of_whole_units_are_patched_and_compared(dtype: str, mode: Mode) -> None:
    kind = UNITS[dtype]
    old = np.tile(np.random.default_rng(0).integers(0, 250, 5000).astype(kind), 60)
    new = old + 1
    frame = compress_buffer(new, dtype, new.shape)
    assert modes(frame) == {mode}
    target = np.zeros_like(old)
    frame.patch_into(target)
    np.testing.assert_array_equal(target, new)
    new[7] = old[7]
    frame = compress_buffer(new, dtype, new.shape)
    indices, values = frame.changes(old)
    np.testing.assert_array_equal(indices, np.flatnonzero(new != old))
    np.testing.assert_array_equal(values, new[indices])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_stream_never_harms(data: st.DataObject) -> None:
    """Any bytes as a stream, with right checksums: every path refuses, or all give the same."""
    dtype = data.draw(st.sampled_from(["BF16", "F32", "U8", "I64"]))
    old, new = sparse_pair(dtype, data.draw(st.sampled_from([64, 700, 5000])), 0.03)
    good = bytearray(pack(new, old, dtype).to_bytes())
    frame = Frame.from_buffer(bytes(good))
    if modes(frame) != {Mode.SPARSE_DELTA}:
        return
    start = frame.header.header_nbytes
    length = int(frame.header.table[0, 1]) & 0xFFFFFF
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, length - 1) | st.integers(0, min(60, length - 1)))
        good[start + at] = data.draw(st.integers(0, 255))
    resealed = reseal(good, frame)
    results = set()
    for isa in ISAS:
        with forced(isa):
            results.add(outcome(resealed, old))
    assert len(results) == 1


def reseal(data: bytearray, frame: Frame) -> bytes:
    """Makes the checksums of a frame of one chunk right."""
    header = frame.header
    at = 56 + 8 * len(frame.shape) + 24
    data[at : at + 4] = crc32c(bytes(data[header.header_nbytes :])).to_bytes(4, "little")
    data[44:48] = bytes(4)
    data[44:48] = crc32c(bytes(data[: header.header_nbytes])).to_bytes(4, "little")
    return bytes(data)


def outcome(data: bytes, old: np.ndarray) -> bytes | None:
    """What a frame decodes to, or None if it is refused; patching must agree."""
    frame, target = Frame.from_buffer(data), old.copy()
    try:
        frame.patch_into(target)
    except PackhorseError:
        np.testing.assert_array_equal(target, old)
        with pytest.raises(PackhorseError):
            frame.decompress_into(np.empty_like(old), base=old)
        with pytest.raises(PackhorseError):
            frame.changes(old)
        with pytest.raises(PackhorseError):
            summed(frame, old, old).prepare_patch(old)
        return None
    out = np.empty_like(old)
    frame.decompress_into(out, base=old)
    np.testing.assert_array_equal(out, target)
    indices, values = frame.changes(old)
    changed = old.copy()
    changed[indices] = values
    np.testing.assert_array_equal(changed, target)
    return target.tobytes()
