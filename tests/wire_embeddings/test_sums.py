"""Keys grouped and rows added up by the core: the bits are those of PyTorch's own operators."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from packhorse import _core
from packhorse.wire.embeddings import sums
from packhorse.wire.embeddings.sums import group, join_ids, segment_sums, sum_blocks

Keys = st.lists(st.integers(0, 40) | st.integers(0, 1 << 33), max_size=60)


@given(Keys)
def test_groups_are_those_of_a_stable_sort(numbers: list[int]) -> None:
    keys = torch.tensor(numbers, dtype=torch.int64)
    for found, wanted in zip(group(keys), sums._group_by_comparing(keys), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("most", [1, 2000, 1 << 20, (1 << 32) - 1])
def test_many_keys_are_grouped(most: int) -> None:
    keys = torch.randint(0, most + 1, (30_000,), generator=torch.Generator().manual_seed(most))
    keys[17] = most
    found = group(keys)
    assert torch.equal(found.unique[found.inverse], keys)
    for got, wanted in zip(found, sums._group_by_comparing(keys), strict=True):
        assert torch.equal(got, wanted)


def test_keys_of_more_than_32_bits_are_left_to_pytorch() -> None:
    for key in (1 << 32, -1):
        keys = np.array([3, key], np.int64)
        rest = [np.empty(2, np.int64) for _ in range(3)]
        assert _core.group_keys(keys, *rest, np.empty(3, np.int64)) == -1
    assert group(torch.tensor([1 << 40, 3, 1 << 40])).unique.tolist() == [3, 1 << 40]


@pytest.mark.parametrize("width", [1, 7, 16, 32, 75])
@pytest.mark.parametrize("n_threads", [1, 4])
def test_sums_have_the_bits_of_embedding_bag(width: int, n_threads: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(900, width, generator=generator) * 1e3
    rows[5], rows[6, 0], rows[7, 0] = -0.0, float("nan"), float("inf")
    lengths = torch.randint(0, 5, (9000,), generator=generator)
    lengths[:20] = 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    order = torch.randint(0, 900, (int(starts[-1]),), generator=generator)
    order[:3] = torch.tensor([5, 6, 7])
    wanted = functional.embedding_bag(order, rows, starts, mode="sum", include_last_offset=True)
    assert bits(segment_sums(rows, order, starts, None)) == bits(wanted)
    via = torch.randperm(900, generator=generator)
    blocks = torch.split(rows[via.argsort()], [1, 0, 500, 399])
    found = [np.empty((n, width), np.float32) for n in (4000, 0, 5000)]
    _core.sum_rows(
        *sums._places(blocks), order.numpy(), via.argsort().numpy(), starts.numpy(),
        *places(found), width, n_threads,
    )  # fmt: skip
    order_of_blocks = via.argsort()[order]
    joined = torch.cat(blocks)
    again = functional.embedding_bag(
        order_of_blocks, joined, starts, mode="sum", include_last_offset=True
    )
    assert bits(torch.from_numpy(np.concatenate(found))) == bits(again)


def places(blocks: list[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
    addresses = np.array([block.ctypes.data for block in blocks], np.uint64)
    return addresses, np.array([len(block) for block in blocks], np.uint64)


def bits(rows: torch.Tensor) -> bytes:
    return rows.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("order", "via", "starts"),
    [
        ([0, 5], None, [0, 1, 2]),
        ([0, -1], None, [0, 1, 2]),
        ([0, 1], [4, 5], [0, 1, 2]),
        ([0, 2], [4, 4], [0, 1, 2]),
        ([0, 1], None, [0, 1, 3]),
        ([0, 1], None, [1, 1, 2]),
        ([0, 1], None, [0, 3, 2]),
        ([0, 1], None, [0, 2]),
    ],
)
def test_rows_that_are_not_there_are_refused(order: Any, via: Any, starts: Any) -> None:
    tensors = [None if part is None else torch.tensor(part) for part in (order, via, starts)]
    with pytest.raises(ValueError, match=r"outside|one longer"):
        sum_blocks([torch.zeros(5, 3)], tensors[0], tensors[1], tensors[2], [2])


def test_ids_become_keys_or_name_their_feature() -> None:
    ids = [torch.tensor([0, 4]), torch.empty(0, dtype=torch.int64), torch.tensor([[2, 1]]).T[:, 0]]
    keys, wrong = join_ids(ids, [5, 1, 3], [0, 10, 100])
    assert keys.tolist() == [0, 4, 102, 101]
    assert wrong is None
    assert join_ids(ids, [5, 1, 2], [0, 0, 0])[1] == 2
    assert join_ids([torch.tensor([3, -1]), *ids], [5, 5, 1, 2], [0] * 4)[1] == 0
