"""New tensors of PyTorch get huge pages, if the system has them and the process few mappings."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import _core
from packhorse.huge_pages import LEAST_NBYTES, HugePages
from packhorse.torch import compress_all, decompress, decompress_all

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()
pytestmark = pytest.mark.skipif(not HAS_HUGE_PAGES, reason="needs transparent huge pages")
NBYTES = LEAST_NBYTES + 8192


def wants_huge_pages(memory: Any) -> bool:
    """Whether the mapping that holds the middle of a tensor or an array has the flag."""
    array = np.asarray(memory)
    middle, is_inside = array.ctypes.data + array.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            is_inside = start <= middle < stop
        elif is_inside and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError("no mapping holds the memory")


def mapped() -> np.ndarray:
    """New memory that nobody has asked anything about."""
    return np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)


def test_new_tensors_have_huge_pages() -> None:
    values = torch.randn(3, NBYTES // 4)
    frames = compress_all([*values])
    assert all(map(wants_huge_pages, decompress_all(frames)))
    assert wants_huge_pages(decompress(frames[0]))


def test_memory_of_the_caller_is_left_as_it_is() -> None:
    frames = compress_all([torch.randn(NBYTES // 4) for _ in range(3)])
    outs = [torch.from_numpy(mapped().view(np.float32)) for _ in frames]
    decompress_all(frames, outs=outs)
    assert not any(map(wants_huge_pages, outs))


def test_a_process_with_many_mappings_asks_for_none() -> None:
    n_mappings = 2
    pages = HugePages(most_mappings=3, asked_between=2, count=lambda: n_mappings)

    def ask() -> bool:
        memory = mapped()
        pages.want(memory)
        return wants_huge_pages(memory)

    assert ask()
    n_mappings = 3
    assert [ask() for _ in range(3)] == [True, False, False]
    n_mappings = 2
    assert ask()


def test_mappings_are_counted() -> None:
    before = _core.count_mappings()
    kept = [mmap.mmap(-1, 4096, prot=(i % 2) + 1) for i in range(400)]
    assert 300 <= _core.count_mappings() - before <= 500
    assert len(kept) == 400


def test_memory_of_any_length_may_be_asked_for() -> None:
    for nbytes in (0, 1, 4095, 4096, NBYTES):
        memory = np.zeros(nbytes, np.uint8)
        HugePages().want(memory)
        assert not memory.any()
