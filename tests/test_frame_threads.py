"""Frames in several threads, after a fork, and in the worker of a data loader."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from codec_battery import make_data, tensor_shape
from torch.utils.data import DataLoader, Dataset

from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.frame import Frame, compress_buffer

CASES = [
    ("BF16", "weights", 400_001),
    ("F32", "weights", 200_001),
    ("I64", "sorted", 50_001),
    ("U8", "few", 700_001),
    ("F16", "noise", 100_000),
    ("F64", "sparse", 70_000),
]


def pack_and_unpack(i: int, threads: int | None) -> bytes:
    dtype, kind, n = CASES[i % len(CASES)]
    data = make_data(kind, dtype, n)
    packed = compress_buffer(data, dtype, tensor_shape(data, dtype), threads=threads).to_bytes()
    target = bytearray(len(data))
    frame = Frame.from_buffer(packed)
    frame.decompress_into(target, threads=threads)
    frame.verify(threads=threads)
    assert target == data
    return packed


@pytest.mark.parametrize("threads", [1, 3, None])
def test_eight_threads_pack_and_unpack_at_once(threads: int | None) -> None:
    alone = [pack_and_unpack(i, 1) for i in range(len(CASES))]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: pack_and_unpack(i, threads), range(24)))
    assert together == [alone[i % len(CASES)] for i in range(24)]


def test_eight_threads_read_one_frame_at_once() -> None:
    array = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    frame = ph_numpy.compress(array)
    with ThreadPoolExecutor(8) as pool:
        for back in pool.map(lambda _: ph_numpy.decompress(frame, threads=2), range(16)):
            assert np.array_equal(back, array)


def test_the_caller_may_change_the_tensor_after_packing() -> None:
    array = np.random.default_rng(0).standard_normal(10_000)
    frame, copy = ph_numpy.compress(array), array.copy()
    array[:] = 0
    assert np.array_equal(ph_numpy.decompress(frame), copy)


def test_a_forked_child_packs_and_unpacks() -> None:
    expected = pack_and_unpack(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, from 3.12
        child = os.fork()
    if child == 0:
        code = 1
        try:
            same = pack_and_unpack(0, 2) == expected
            code = 0 if same and pack_and_unpack(2, 3) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class PackedRows(Dataset):
    """A data set whose items are kept packed, and unpacked when they are asked for."""

    def __init__(self, n_items: int) -> None:
        self.frames = [
            ph_torch.compress(torch.full((50, 40), i, dtype=torch.bfloat16)).to_bytes()
            for i in range(n_items)
        ]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int) -> torch.Tensor:
        return ph_torch.decompress(self.frames[i], threads=2)


def test_a_worker_of_a_data_loader_unpacks() -> None:
    pack_and_unpack(0, 2)  # the parent has used threads before its worker is forked
    loader = DataLoader(PackedRows(6), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batches = list(loader)
    assert [batch[:, 0, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(batch.dtype == torch.bfloat16 for batch in batches)
