"""Many tensors in one call: the frames are those of one call for each, whatever the threads and the
code path, and errors name the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from codec_battery import FLOATS, ISAS, forced, make_data, second_moment, tensor_shape
from real_model import real_tensors

import packhorse.numpy
from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.frame import Frame, compress_buffer, plan_buffer
from packhorse.frame.many import PackJob, UnpackJob, compress_many, decompress_many
from packhorse.layout import (
    DTYPE_BY_NAME,
    DTYPES,
    FIRST_STREAM,
    STREAM_NBYTES_MASK,
    Level,
)

UNITS = (1, 17, 1000, 5000, 131_072, 200_000, 420_000)  # of a chunk and less, and of several


def mixed_jobs() -> list[PackJob]:
    """Tensors of all dtypes, sizes and kinds, of no elements, and of rows that predict."""
    jobs = []
    for number, dtype in enumerate(DTYPES):
        for kind in ("weights", "noise", "constant"):
            data = make_data(kind, dtype.name, UNITS[number % len(UNITS)])
            jobs.append(PackJob(data, dtype.name, tensor_shape(data, dtype.name)))
    jobs += [PackJob(b"", "F32", (0, 3)), PackJob(b"", "BF16", (4, 0))]
    for name in ("BF16", "F16", "F32", "F64", "F8_E5M2"):
        moment = second_moment((200, 300)).astype(FLOATS[name])
        jobs.append(PackJob(moment.tobytes(), name, moment.shape))
    return jobs


@pytest.fixture(scope="module")
def jobs() -> list[PackJob]:
    return mixed_jobs()


@pytest.fixture(scope="module")
def one_by_one(jobs: list[PackJob]) -> dict[str, list[bytes]]:
    return {
        level: [compress_buffer(*job[:3], level=level, threads=1).to_bytes() for job in jobs]
        for level in ("fast", "default")
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("level", ["fast", "default"])
def test_the_frames_are_those_of_one_call_for_each(
    jobs: list[PackJob], one_by_one: dict[str, list[bytes]], level: str, threads: int, isa: str
) -> None:
    with forced(isa):
        frames = compress_many(jobs, level=level, threads=threads)
        assert [frame.to_bytes() for frame in frames] == one_by_one[level]
        read = [Frame.from_buffer(data) for data in one_by_one[level]]
        targets = [bytearray(frame.logical_nbytes) for frame in read]
        decompress_many(
            [UnpackJob(frame, target) for frame, target in zip(read, targets, strict=True)],
            threads=threads,
        )
    assert targets == [job.src for job in jobs]


def test_frames_of_a_model_say_what_they_are() -> None:
    tensors = list(real_tensors().values())
    frames = packhorse.numpy.compress_all(tensors)
    back = packhorse.numpy.decompress_all(frames)
    for tensor, frame, again in zip(tensors, frames, back, strict=True):
        assert (frame.shape, frame.logical_nbytes) == (tensor.shape, tensor.nbytes)
        assert again.dtype == tensor.dtype
        assert again.tobytes() == tensor.tobytes()
        plan = plan_buffer(tensor.tobytes(), frame.dtype, frame.shape)
        assert frame.plan is not None
        assert frame.plan.geometry == plan.geometry
        assert abs(frame.plan.estimated_nbytes - plan.estimated_nbytes) <= 0.05 * tensor.nbytes + 64
        if frame.dtype == "BF16" and frame.plan.nbytes > 4096:  # packed without a plan
            streams = frame.header.table[:, FIRST_STREAM:] & STREAM_NBYTES_MASK
            assert [n for _, n in frame.plan.planes] == streams.sum(axis=0).tolist()


def test_what_needs_a_plan() -> None:
    def needs_none(data: bytes, dtype: str, shape: tuple[int, ...], level: Level) -> bool:
        memory = np.frombuffer(data, np.uint8)
        return _core.needs_no_plan(memory, DTYPE_BY_NAME[dtype].code, shape, level)

    weights = make_data("weights", "BF16", 60_000)
    assert needs_none(weights, "BF16", (200, 300), Level.DEFAULT)
    assert needs_none(weights, "BF16", (200, 300), Level.FAST)
    assert not needs_none(weights, "BF16", (200, 300), Level.MAX)
    for kind in ("constant", "noise", "few", "sorted"):
        assert not needs_none(make_data(kind, "BF16", 60_000), "BF16", (200, 300), Level.DEFAULT)
    moment = second_moment((200, 300)).astype(np.float32)
    assert not needs_none(moment.tobytes(), "F32", moment.shape, Level.DEFAULT)  # side data
    assert not needs_none(bytes(4096), "U8", (4096,), Level.DEFAULT)


def test_the_look_while_encoding_is_the_glance() -> None:
    """Short tensors are refused by the encoder exactly if a plan would not be skipped for them."""
    found = set()
    for dtype in ("BF16", "F16", "F32", "F8_E4M3"):
        code = DTYPE_BY_NAME[dtype].code
        for kind in ("weights", "noise", "constant", "few", "sorted"):
            for n in (1, 2, 63, 384, 1023, 1024, 4095, 4096, 4097):
                src = np.frombuffer(make_data(kind, dtype, n), np.uint8)
                for level in (Level.FAST, Level.DEFAULT):
                    views = _core.views_of_buffers([src], [code], [(n,)])
                    (frame,) = _core.pack_views(views, None, None, level, 1)
                    needs_none = _core.needs_no_plan(src, code, (n,), level)
                    assert (frame is not None) == needs_none, (dtype, kind, n)
                    found.add(needs_none)
    assert found == {True, False}


def test_memory_is_apart_or_not() -> None:
    def are_apart(written: list[ByteArray], *read: list[ByteArray]) -> bool:
        views = [_core.views_of_buffers(buffers, [], []) for buffers in (written, *read)]
        return _core.are_apart(views[:1], views[1:])

    memory = np.zeros(100, np.uint8)
    parts = [memory[at : at + 10] for at in range(0, 100, 10)]
    assert are_apart(parts)
    assert are_apart(parts[:5], [*parts[5:], memory[50:], memory[60:60]])
    assert are_apart(parts[:5], parts[5:], [memory[50:], memory[60:60]])
    assert not are_apart(parts[:5], [memory[49:]])
    assert not are_apart(parts[:5], [], [memory[49:]])
    assert not are_apart([memory, parts[9]])
    assert are_apart([parts[3]], [memory[:30], memory[:20], parts[4]])
    assert not are_apart([parts[3]], [memory, memory[:5]])


def test_a_bad_frame_among_many_is_named() -> None:
    frames = [
        compress_buffer(make_data("weights", "F32", n), "F32", (n,)).to_bytes()
        for n in (100, 70_000, 300_000)
    ]
    damaged = bytearray(frames[2])
    damaged[-200_000] ^= 1
    for threads in (1, 3):
        with pytest.raises(CorruptionError, match=r"^frame 2: byte \d+: chunk \d of 5: "):
            packhorse.numpy.decompress_all([*frames[:2], damaged], threads=threads)
    with pytest.raises(CorruptionError, match=r"^frame 1: byte 44: the header's checksum"):
        packhorse.numpy.decompress_all([frames[0], frames[1][:17] + b"\xff" + frames[1][18:]])


def test_a_bad_tensor_among_many_is_named() -> None:
    good = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=r"^array 1: safetensors has no dtype"):
        packhorse.numpy.compress_all([good, np.zeros(3, "U2")])
    with pytest.raises(ValueError, match=r"^array 1: out has 10 bytes"):
        packhorse.numpy.compress_all([good, good], outs=[bytearray(4096), bytearray(10)])
    jobs = [PackJob(bytes(4), "F32", (1,)), PackJob(bytes(5), "F32", (1,))]
    with pytest.raises(ValueError, match=r"^tensor 1: F32 of shape"):
        compress_many(jobs, name_of=lambda i: f"tensor {i}")
    short = [UnpackJob(compress_buffer(bytes(4), "F32", (1,)), bytearray(3))]
    with pytest.raises(ValueError, match=r"^frame 0: dst has 3 bytes"):
        decompress_many(short, name_of=lambda i: f"frame {i}")


def test_copies_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.frame.verbs._COPIED_NBYTES", 1000)
    tensors = [np.arange(n * 7.0).reshape(n, 7).T for n in (1, 5, 30, 2, 50, 3)]
    frames = packhorse.numpy.compress_all(tensors)
    for tensor, again in zip(tensors, packhorse.numpy.decompress_all(frames), strict=True):
        assert np.array_equal(tensor, again)


@pytest.mark.parametrize("isa", ISAS)
def test_the_core_computes_xxh3(isa: str) -> None:
    data = np.random.default_rng(3).integers(0, 256, 5000, np.uint8)
    with forced(isa):
        for n in [*range(300), 1023, 1024, 1025, 2048, 5000]:
            assert _core.xxh3_128(data[:n]) == xxhash.xxh3_128_digest(data[:n].tobytes()), n
