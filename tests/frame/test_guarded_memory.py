"""Input is only read, and no access goes beyond input or output: tests with read-only and unmapped
pages.

A write to the input, or an access beyond a buffer, ends the test run with a fault
(`test_guarded_memory_is_guarded`). The battery in `codecs/test_codecs.py` does this for every kind
of data and size. This file tests all dtypes at all levels, parts of tensors, odd addresses, and the
functions that users call.
"""

import mmap
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_battery import (
    ISAS,
    SAMPLES,
    check_tensor,
    forced,
    guarded,
    guarded_output,
    make_data,
    sample,
    tensor_shape,
)
from disk_samples import sample_tensors

from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.codecs.content import content_hash
from packhorse.errors import PackhorseError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.layout import DTYPES

LEVELS = ("fast", "default", "max")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_packing_and_unpacking_stay_in_bounds(dtype: str, level: str) -> None:
    """Runs every code path, with sizes that end within, at and behind a vector and a block."""
    for n in (3, 64, 4097, 12_345):
        data = make_data("weights", dtype, n)
        frame = check_tensor(data, dtype, level=level)
        source = guarded(data)
        plan_buffer(source, dtype, frame.shape, level=level)
        assert content_hash(source, threads=2) == frame.content_hash


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_part_is_decoded_within_its_bounds(name: str, isa: str) -> None:
    good, rng = sample(name), random.Random(name)
    frame, n = Frame.from_buffer(guarded(good.frame)), len(good.source)
    base = None if good.base is None else guarded(good.base)
    with forced(isa):
        for _ in range(20):
            start, stop = sorted((rng.randint(0, n), rng.randint(0, n)))
            target = guarded_output(stop - start)
            frame.decompress_into(target, start=start, stop=stop, base=base)
            assert target == good.source[start:stop]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_frame_and_its_tensor_may_lie_at_any_address(name: str, isa: str) -> None:
    """A tool that rewrites a file may move a frame to any byte of it."""
    good = sample(name)
    with forced(isa):
        for shift in (1, 2, 3, 5, 8, 17, 31, 33, 63):
            memory = bytearray(shift) + good.frame
            target = bytearray(shift + len(good.source))
            frame = Frame.from_buffer(memoryview(memory)[shift:])
            base = None if good.base is None else memoryview(bytes(shift) + good.base)[shift:]
            frame.decompress_into(memoryview(target)[shift:], base=base)
            assert target[shift:] == good.source


@pytest.mark.parametrize("isa", ISAS)
def test_large_outputs_that_go_past_the_cache_are_written_where_they_belong(isa: str) -> None:
    """Stores that bypass the cache need aligned addresses, and buffers may lie anywhere."""
    n = 12 * 2**20 + 12_345
    data = np.random.default_rng(n).bytes(n)
    source, room = guarded(data), max_frame_nbytes("U8", (n,))
    packed = compress_buffer(source, "U8", (n,), threads=1).to_bytes()
    with forced(isa):
        for shift, threads in ((0, 1), (1, 2), (63, 1)):
            memory = guarded_output(room + shift)
            out = memory[shift:] if shift == 63 else memory[:room]
            frame = compress_buffer(source, "U8", (n,), threads=threads, out=out)
            assert frame.buffer() == packed
            target = guarded_output(n + shift)
            frame.decompress_into(target[:n], threads=threads)
            assert target[:n] == data
            assert bytes(target[n:]) == b"\xa5" * shift


def test_output_over_the_input_is_refused() -> None:
    """The input would be overwritten while it is read."""
    good = sample("rans")
    memory = bytearray(1000)
    memory[: len(good.frame)] = good.frame
    frame = Frame.from_buffer(memoryview(memory)[: len(good.frame)])
    for start in (0, len(good.frame) - 1):
        with pytest.raises(ValueError, match="share memory"):
            frame.decompress_into(memoryview(memory)[start : start + len(good.source)])
        with pytest.raises(ValueError, match="share memory"):
            compress_buffer(memoryview(memory)[start:][:60], "U8", (60,), out=memory)
    frame.decompress_into(memoryview(memory)[len(good.frame) :][: len(good.source)])
    assert memory[: len(good.frame)] == good.frame


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "kind", "level"),
    [("BF16", "weights", "default"), ("BF16", "weights", "fast"), ("U8", "few", "max")],
)
def test_bytes_that_change_while_they_are_decoded_do_no_harm(
    dtype: str, kind: str, level: str, isa: str
) -> None:
    """Another thread, or a process that maps the same file, writes to the frame meanwhile."""
    data = make_data(kind, dtype, 150_000)
    good = compress_buffer(data, dtype, tensor_shape(data, dtype), level=level).to_bytes()
    memory, done, rng = guarded_output(len(good)), threading.Event(), random.Random(kind)
    memory[:] = good
    first = int.from_bytes(good[12:16], "little")

    def disturb() -> None:
        while not done.is_set():
            at = first + int(rng.random() ** 3 * (len(good) - first))
            memory[at] = rng.randrange(256)
            memory[at] = good[at]

    frame, target = Frame.from_buffer(memory), guarded_output(len(data))
    with forced(isa), ThreadPoolExecutor(1) as pool:
        writer = pool.submit(disturb)
        try:
            for _ in range(60):
                with suppress(PackhorseError):
                    frame.decompress_into(target, check=False, threads=1)
        finally:
            done.set()
        writer.result()
    frame.decompress_into(target)
    assert target == data


@pytest.mark.parametrize("level", LEVELS)
def test_arrays_and_tensors_in_read_only_memory_are_packed(level: str) -> None:
    for array in sample_tensors().values():
        memory = np.frombuffer(guarded(array.tobytes()), array.dtype).reshape(array.shape)
        packed = ph_numpy.compress(memory, level=level).to_bytes()
        assert packed == ph_numpy.compress(array, level=level).to_bytes()
        assert ph_numpy.decompress(guarded(packed)).tobytes() == array.tobytes()
        assert ph_torch.decompress(guarded(packed)).numpy().tobytes() == array.tobytes()


def test_tensors_of_a_file_that_is_mapped_for_reading_are_packed(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    path = tmp_path / "raw"
    path.write_bytes(array.tobytes())
    mapped = np.memmap(path, np.float32, "r")
    with path.open("rb") as file:
        region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert np.array_equal(ph_numpy.decompress(ph_numpy.compress(mapped)), array)
    frame = compress_buffer(region, "F32", (5000,))
    assert torch.equal(ph_torch.decompress(frame), torch.from_numpy(array))
    assert path.read_bytes() == array.tobytes()


def test_a_packed_file_in_read_only_memory_is_loaded() -> None:
    tensors = sample_tensors()
    packed = guarded(ph_numpy.save(tensors))
    for name, array in ph_numpy.load(packed).items():
        assert array.tobytes() == tensors[name].tobytes()
    for name, tensor in ph_torch.load(packed).items():
        assert tensor.numpy().tobytes() == tensors[name].tobytes()
