"""Many tensors in one call: the frames are those of one call for each, whatever the threads and the
code path, and errors name the tensor."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
from codec_battery import FLOATS, ISAS, forced, make_data, second_moment, tensor_shape
from real_model import real_tensors

import packhorse.numpy
import packhorse.torch
from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.frame import Frame, compress_buffer, plan_buffer
from packhorse.frame.many import PackJob, UnpackJob, compress_many, decompress_many
from packhorse.frame.verbs import read_frames
from packhorse.layout import (
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    DTYPES,
    FIRST_STREAM,
    STREAM_NBYTES_MASK,
    Level,
)

tells_views = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="needs PyTorch 2.9"
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", [(1_500_000,), (3_000, 1_500_000, 9_000, 700_000), (400_000, 0)])
def test_more_workers_change_no_byte(sizes: tuple[int, ...], isa: str) -> None:
    jobs = [PackJob(make_data("weights", "BF16", n), "BF16", (n,)) for n in sizes]
    # One of them needs a plan, and no worker may wait for it forever.
    jobs.append(PackJob(make_data("constant", "BF16", 600_000), "BF16", (600_000,)))
    with forced(isa):
        expected = [compress_buffer(*job[:3], threads=1).to_bytes() for job in jobs]
        for threads in (2, 3, 8):
            frames = compress_many(jobs, threads=threads)
            assert [frame.to_bytes() for frame in frames] == expected


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


def test_short_frames_are_moved_together() -> None:
    memory = np.arange(100, dtype=np.uint8)
    pieces = _core.close_gaps(memory, [20, 10, 30, 40], [5, 3, 25, 4], 10)
    assert pieces == [(0, 8), (30, 59)]
    assert memory[:8].tolist() == [0, 1, 2, 3, 4, 20, 21, 22]
    assert memory[30:59].tolist() == [*range(30, 55), 60, 61, 62, 63]
    assert _core.close_gaps(memory, [], [], 10) == []
    for rooms, lengths in (([20, 81], [20, 81]), ([20], [21]), ([20], [20, 20])):
        with pytest.raises(ValueError, match=r"a frame lies elsewhere|needs a room"):
            _core.close_gaps(memory, rooms, lengths, 10)


def test_the_core_knows_where_plain_arrays_lie() -> None:
    plain = np.arange(24, dtype=np.float32).reshape(4, 6)
    read_only = plain.copy()
    read_only.flags.writeable = False
    known = [plain, plain[1:3], plain[:0], np.array(3.0, np.float16), read_only]
    known += [np.zeros(5, ml_dtypes.bfloat16), np.zeros(3, bool), np.zeros(2, np.complex64)]
    unknown = [
        plain.T, plain[:, :3], plain.astype(">f4"), np.zeros(4, ml_dtypes.float4_e2m1fn),
        np.zeros(2, "U3"), np.zeros(2, object), np.ma.array(plain), plain.view(np.recarray), [1.0],
    ]  # fmt: skip
    views = packhorse.numpy.FRAMEWORK.views([*known, *unknown])
    assert views.unknown() == list(range(len(known), len(known) + len(unknown)))
    assert [views.nbytes(i) for i in range(len(known))] == [array.nbytes for array in known]
    forms, numbers = _core.forms_of_views(views.part(range(len(known))))
    described = [(DTYPE_BY_CODE[forms[k][0]].name, forms[k][1]) for k in numbers]
    assert described == [packhorse.numpy.FRAMEWORK.describe(array) for array in known]
    frames = packhorse.numpy.compress_all([plain, plain[1:3]])
    assert _core.misfits([frame.opened for frame in frames], views.part([0, 0])) == [1]
    assert _core.misfits([frames[0].opened], views.part([4])) == [0]  # read-only
    views.forget(0)
    assert 0 in views.unknown()
    with pytest.raises(ValueError, match="no such tensor"):
        views.part([100])


@tells_views
def test_memory_that_a_tensor_gives_up_meanwhile_is_kept() -> None:
    """As `module.to()` does to parameters, perhaps in another thread."""
    tensor = torch.nn.Parameter(torch.randn(400_000))
    expected = tensor.detach().clone()
    views = packhorse.torch.FRAMEWORK.views([tensor])
    tensor.data = torch.empty(0)
    others = [torch.full((400_000,), 7.0) for _ in range(4)]  # would take memory that is free
    (frame,) = _core.pack_views(views, None, lambda n: np.empty(n, np.uint8), 1, 1)
    assert len(others) == 4
    assert frame is not None
    assert torch.equal(packhorse.torch.decompress(frame.memory[: frame.frame_nbytes]), expected)


@tells_views
def test_tensors_without_all_of_their_memory_are_not_plain() -> None:
    whole = torch.randn(1000)
    short = torch.randn(1000)[10:]
    short.untyped_storage().resize_(400)
    sparse = torch.eye(3).to_sparse()
    views = packhorse.torch.FRAMEWORK.views([whole, short, sparse, whole[3:10], torch.empty(0, 3)])
    assert views.unknown() == [1, 2]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_the_core_knows_where_plain_tensors_lie(
    has_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_exchange:  # as in PyTorch before 2.9
        monkeypatch.setattr("packhorse.torch_framework._EXCHANGE", None)
    plain = torch.arange(24.0).reshape(4, 6)
    half = torch.zeros(3, dtype=torch.complex64).conj()
    known = [plain, plain[1:3], plain[:0], torch.tensor(3.0), torch.nn.Parameter(plain)]
    known += [plain.to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64)]
    known.append(torch.zeros(5, dtype=torch.bool))
    unknown = [
        plain.T, plain[:, :3], torch._neg_view(plain), half, half.imag, plain.to_sparse(),
        torch.empty(3, device="meta"), torch.zeros(1).expand(4), "no",
        torch.empty(4, dtype=torch.uint4),
    ]  # fmt: skip
    views = packhorse.torch.FRAMEWORK.views([*known, *unknown])
    assert views.unknown() == list(range(len(known), len(known) + len(unknown)))
    forms, numbers = _core.forms_of_views(views.part(range(len(known))))
    described = [(DTYPE_BY_CODE[forms[k][0]].name, forms[k][1]) for k in numbers]
    assert described == [packhorse.torch.FRAMEWORK.describe(tensor) for tensor in known]
    frames = packhorse.torch.compress_all([*known, *unknown[:5]])
    outs = [torch.empty_like(tensor) for tensor in known]
    versions = [out._version for out in outs]
    packhorse.torch.decompress_all(frames[: len(known)], outs=outs)
    for tensor, out, version in zip(known, outs, versions, strict=True):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), out.reshape(-1).view(torch.uint8))
        assert out._version > version
    for tensor, again in zip(unknown[:5], packhorse.torch.decompress_all(frames[-5:]), strict=True):
        assert torch.equal(tensor.resolve_conj().resolve_neg(), again)


def test_new_frames_and_tensors_have_memory_of_their_own() -> None:
    arrays = [np.full(400, i, np.float32) for i in range(9)] + [np.zeros(1 << 20, np.float32)]
    frames = packhorse.numpy.compress_all(arrays)
    for frame in frames[:9]:
        assert len(frame.buffer()) == frame.nbytes == len(frame.opened.memory)
        assert frame.buffer().readonly
        assert not frame.data.flags.writeable
    again = packhorse.numpy.decompress_all(frames)
    assert all(array.flags.owndata and array.flags.writeable for array in again)
    tensors = packhorse.torch.decompress_all(frames)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    for frame, same in zip(frames, pickle.loads(pickle.dumps(frames)), strict=True):
        assert frame.to_bytes() == same.to_bytes()


def test_frames_in_memory_that_could_be_resized_are_held() -> None:
    array = np.linspace(0, 1, 999, dtype=np.float32)
    data = bytearray(packhorse.numpy.compress(array).to_bytes())
    (frame,) = read_frames([data], None)
    with pytest.raises(BufferError):
        data.clear()
    assert np.array_equal(packhorse.numpy.decompress(frame), array)
    (frame,) = read_frames([np.frombuffer(data, np.uint8).reshape(2, -1)], None)
    assert frame.buffer() == bytes(data)
    wide = np.frombuffer(data, np.uint32)  # not a buffer of bytes by its format
    for given in (data, memoryview(data), np.frombuffer(data, np.uint8), wide):
        assert np.array_equal(packhorse.numpy.decompress_all([given])[0], array)


def test_a_bad_frame_among_many_is_named() -> None:
    frames = [
        compress_buffer(make_data("weights", "F32", n), "F32", (n,)).to_bytes()
        for n in (100, 70_000, 1_500_000)  # enough bytes for three threads
    ]
    damaged = bytearray(frames[2])
    for place in (-200_000, -2_500_000):  # the first fault is named, whichever is found first
        damaged[place] ^= 1
    for threads in (1, 3):
        with pytest.raises(CorruptionError, match=r"^frame 2: byte \d+: chunk 11 of 23: "):
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
