"""How tensors are distributed among a call's threads, and what happens when a tensor fails."""

import threading
import time
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse import CorruptionError
from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.frame import max_frame_nbytes
from packhorse.threads import batches, map_tensors, one_ahead

MIB = 1 << 20


def test_tensors_of_about_one_size_go_to_one_thread_each():
    both_there = threading.Barrier(2, timeout=10)

    def work(i: int, n_threads: int) -> tuple[int, int]:
        if i < 2:
            both_there.wait()
        return n_threads, threading.get_ident()

    seen = map_tensors(work, [MIB] * 10, 2)
    assert {n for n, _ in seen} == {1}
    assert len({ident for _, ident in seen}) == 2


def test_a_tensor_larger_than_all_others_is_shared():
    seen: list[tuple[int, int]] = []
    map_tensors(lambda i, n: seen.append((i, n)), [MIB, 90 * MIB, MIB, 2 * MIB], 2)
    assert seen[0] == (1, 2)
    assert {n for i, n in seen if i in (0, 2)} == {1}


def test_small_tensors_are_the_callers():
    here = threading.get_ident()
    results = map_tensors(lambda i, n: (i, n, threading.get_ident()), [700] * 50, 4)
    assert results == [(i, 1, here) for i in range(50)]


@given(sizes=st.lists(st.integers(0, 4 * MIB), max_size=40), threads=st.integers(1, 5))
def test_every_tensor_is_called_once_and_results_are_in_order(sizes, threads):
    calls: list[int] = []

    def work(i: int, n_threads: int) -> int:
        assert n_threads in (1, threads)
        calls.append(i)
        return i * i

    assert map_tensors(work, sizes, threads) == [i * i for i in range(len(sizes))]
    assert sorted(calls) == list(range(len(sizes)))


def test_after_an_error_nothing_is_begun_and_all_threads_end():
    before = threading.active_count()
    begun = []

    def work(i: int, _: int) -> None:
        begun.append(i)
        time.sleep(0.001)
        raise KeyError(i)

    with pytest.raises(KeyError):
        map_tensors(work, [MIB] * 100, 3)
    assert len(begun) <= 3
    assert threading.active_count() == before


def test_an_interrupt_ends_all_threads():
    before = threading.active_count()
    main = threading.get_ident()
    done = []

    def work(i: int, _: int) -> None:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        time.sleep(0.005)
        done.append(i)

    with pytest.raises(KeyboardInterrupt):
        map_tensors(work, [MIB] * 1000, 2)
    assert len(done) < 1000
    assert threading.active_count() == before


def test_work_is_done_where_no_thread_starts(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_tensors(lambda i, n: (i, n), [MIB] * 4, 4) == [(i, 1) for i in range(4)]


@given(sizes=st.lists(st.integers(0, 50 * MIB)))
def test_batches_cover_all_and_stay_below_their_limit(sizes):
    runs = list(batches(sizes))
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[i] for i in run) <= 32 * MIB for run in runs)
    # None could have taken the next one's first tensor.
    for run, after in pairwise(runs):
        assert sum(sizes[i] for i in (*run, after[0])) > 32 * MIB


# compress_all and decompress_all.


def weights(n_tensors: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = [(600, 500), (300,), (40, 1000), (), (0, 3), (2, 700, 600)]
    return [
        np.asarray(rng.standard_normal(shapes[i % len(shapes)]) * 0.02, np.float32)
        for i in range(n_tensors)
    ]


@pytest.mark.parametrize("threads", [1, 2, 5, None])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_many_tensors_come_back_and_give_the_frames_of_each(framework, threads):
    module = {"numpy": ph_numpy, "torch": ph_torch}[framework]
    tensors: list = weights(13)
    if framework == "torch":
        tensors = [torch.from_numpy(np.array(tensor)).to(torch.bfloat16) for tensor in tensors]
    frames = module.compress_all(tensors, level="fast", threads=threads)
    alone = [module.compress(tensor, level="fast", threads=1) for tensor in tensors]
    assert [frame.to_bytes() for frame in frames] == [frame.to_bytes() for frame in alone]
    mixed = [frame if i % 2 else frame.buffer() for i, frame in enumerate(frames)]
    back = module.decompress_all(mixed, threads=threads)
    for tensor, restored in zip(tensors, back, strict=True):
        assert (tensor.dtype, tensor.shape) == (restored.dtype, restored.shape)
        assert bool((tensor == restored).all())


def test_many_tensors_go_to_the_callers_memory():
    tensors = weights(6)
    rooms = [np.empty(max_frame_nbytes("F32", tensor.shape), np.uint8) for tensor in tensors]
    frames = ph_numpy.compress_all(tensors, outs=rooms, threads=2)
    for frame, room in zip(frames, rooms, strict=True):
        assert np.shares_memory(np.frombuffer(frame.buffer(), np.uint8), room)
    targets = [np.empty_like(tensor) for tensor in tensors]
    back = ph_numpy.decompress_all(frames, outs=targets, threads=2)
    assert all(a is b for a, b in zip(back, targets, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(tensors, targets, strict=True))


def test_messages_say_which_of_many_is_wrong():
    tensors = weights(4)
    with pytest.raises(TypeError, match=r"array 2: safetensors has no dtype for complex128"):
        ph_numpy.compress_all([*tensors[:2], np.zeros(3, np.complex128)], threads=2)
    with pytest.raises(TypeError, match=r"tensor 1: a dense PyTorch tensor is needed, not int"):
        ph_torch.compress_all([torch.zeros(3), 7], threads=2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="outs has 1 members; there are 4 arrays"):
        ph_numpy.compress_all(tensors, outs=[np.empty(9, np.uint8)])
    frames = [frame.to_bytes() for frame in ph_numpy.compress_all(tensors)]
    with pytest.raises(CorruptionError, match="frame 3: "):
        ph_numpy.decompress_all([*frames[:3], frames[3][:-64] + bytes(64)], threads=2)
    damaged = bytearray(frames[0])
    damaged[-1000] ^= 1
    with pytest.raises(CorruptionError, match=r"frame 1: byte .*checksum"):
        ph_numpy.decompress_all([frames[1], bytes(damaged), frames[2]], threads=2)
    with pytest.raises(CorruptionError, match="the frames hold 1361204 bytes together, more than"):
        ph_numpy.decompress_all(frames, max_nbytes=1_000_000)


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_a_thread_takes_the_next_result_while_one_is_used(nbytes):
    taken = []

    def results():
        for i in range(5):
            taken.append((i, threading.get_ident()))
            yield i

    used = []
    with closing(one_ahead(results(), nbytes)) as found:
        for i in found:
            used.append(i)
            assert max(taken)[0] <= i + 1
    assert used == list(range(5))
    is_alone = {thread for _, thread in taken} == {threading.get_ident()}
    assert is_alone == (nbytes == 0)


def test_an_error_of_the_next_result_comes_in_its_turn():
    def results():
        yield 1
        raise ValueError("second")

    found = one_ahead(results(), 1 << 30)
    assert next(found) == 1
    with pytest.raises(ValueError, match="second"):
        next(found)


def test_closing_waits_for_the_thread():
    is_done = []

    def results():
        yield 1
        time.sleep(0.1)
        is_done.append(True)
        yield 2

    found = one_ahead(results(), 1 << 30)
    assert next(found) == 1
    found.close()
    assert is_done
