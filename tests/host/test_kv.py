"""Keys and values packed in memory of the host: they come back bit for bit, whatever is done to the
sequences, and memory is what was said."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

from packhorse.host.kv import KVStore, WorkingMemory
from packhorse.host.kv_device import DevicePages
from packhorse.host.kv_pages import PackedPages, PageRoom, choose_page_format
from packhorse.table_layout import TableMode

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def states(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def odd_bits(*shape: int) -> torch.Tensor:
    """BF16 elements of all exponents, which no slot holds."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    return words.view(torch.bfloat16)


def check(store: KVStore, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert store.n_tokens == keys.shape[2]
    for found, wanted in zip(store.read(WorkingMemory(), 3), (keys, values), strict=True):
        found = found[:, :, : keys.shape[2]].contiguous()
        assert found.dtype == wanted.dtype
        assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", [(48, 32), (128, 128), (20, 7)], ids=str)
def test_tokens_come_back(dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    store = KVStore(page_tokens=16)
    keys, values = (states(3, 2, 90, size, dtype=dtype, seed=size) for size in head_dims)
    for start, stop in pairwise((0, 40, 41, 47, 48, 90)):
        store.append(keys[:, :, start:stop], values[:, :, start:stop])
        check(store, keys[:, :, :stop], values[:, :, :stop])
    order = torch.tensor([2, 0, 0, 1])
    store.select(order)
    keys, values = keys[order], values[order]
    check(store, keys, values)
    for n in (0, 3, 10, 50):
        store.crop(n)
        keys, values = (each[:, :, : each.shape[2] - n] for each in (keys, values))
        check(store, keys, values)
    assert store.size.n_refused == 0


def test_memory_is_three_quarters() -> None:
    store = KVStore()
    store.append(states(1, 8, 4096, 128), states(1, 8, 4096, 128, seed=1))
    size = store.size
    assert size.n_pages == 128
    assert size.tail_nbytes == size.n_refused == 0
    assert size.host_nbytes < 0.76 * size.plain_nbytes


def test_sequences_share_pages() -> None:
    store = KVStore(page_tokens=16)
    keys, values = states(1, 2, 80, 64), states(1, 2, 80, 64, seed=1)
    store.append(keys, values)
    before = store.size.host_nbytes
    store.select(torch.zeros(5, dtype=torch.long))
    assert store.size.host_nbytes == before
    copied = copy.deepcopy(store)
    store.append(states(5, 2, 16, 64), states(5, 2, 16, 64))
    store.select(torch.tensor([4]))
    assert store.size.n_pages == 12  # of the others, pages without a holder are free
    check(copied, keys.repeat(5, 1, 1, 1), values.repeat(5, 1, 1, 1))
    store.crop(store.n_tokens)
    check(copied, keys.repeat(5, 1, 1, 1), values.repeat(5, 1, 1, 1))
    assert copied.size.n_pages == 10


def test_pages_that_no_slot_takes_are_kept_plain() -> None:
    store = KVStore(page_tokens=16)
    usual, odd = states(2, 2, 32, 64), odd_bits(2, 2, 40, 64)
    store.append(usual, usual)
    store.append(odd, usual.repeat(1, 1, 2, 1)[:, :, :40])
    keys, values = torch.cat([usual, odd], 2), usual.repeat(1, 1, 3, 1)[:, :, :72]
    check(store, keys, values)
    assert store.size.n_refused == 4
    plain_page = 2 * 16 * 64 * 2
    assert store.size.host_nbytes < 0.85 * 16 * plain_page + 4 * plain_page
    store.crop(30)
    check(store, keys[:, :, :42], values[:, :, :42])
    assert store.size.n_refused == 0  # their places are free


def test_memory_that_grows_page_by_page_is_seldom_moved() -> None:
    store, page, memories = KVStore(page_tokens=16), states(1, 2, 16, 64), []
    for _ in range(40):
        store.append(page, page)
        pages = store._sides[0].pages
        assert pages is not None
        memories += [pages.memory] if pages.memory not in memories else []
        assert pages.n_slots <= 1.25 * pages.n_pages
    assert len(memories) == 16
    check(store, page.repeat(1, 1, 40, 1), page.repeat(1, 1, 40, 1))


def test_a_store_with_a_room_refuses_more_tokens() -> None:
    store = KVStore(page_tokens=16, room_tokens=64)
    keys, odd = states(1, 2, 40, 64), odd_bits(1, 2, 40, 64)
    store.append(keys, keys)
    assert store.room == PageRoom(n_slots=2, n_plain=1)
    nbytes = store.size.host_nbytes
    for new in ((odd, keys), (keys, odd)):
        with pytest.raises(MemoryError, match="0 of 2 free slots take one, and 0 places"):
            store.append(*new)
        check(store, keys, keys)
    assert store.room == PageRoom(n_slots=2, n_plain=1)
    store.append(keys, keys)
    check(store, keys.repeat(1, 1, 2, 1), keys.repeat(1, 1, 2, 1))
    assert store.room == PageRoom(n_slots=0, n_plain=0)
    assert store.size.host_nbytes == nbytes


def test_arguments_are_checked() -> None:
    store = KVStore()
    keys = states(1, 2, 8, 16)
    with pytest.raises(ValueError, match="no tokens"):
        store.read(WorkingMemory())
    with pytest.raises(ValueError, match="with equal"):
        store.append(keys, keys[:, :1])
    with pytest.raises(TypeError, match="complex128"):
        store.append(keys, keys.to(torch.complex128))
    store.append(keys, keys)
    with pytest.raises(TypeError, match="float32"):
        store.append(keys, keys.float())
    with pytest.raises(ValueError, match=r"\(1, 2, 8, 15\)"):
        store.append(keys, keys[..., 1:])
    with pytest.raises(ValueError, match="9 tokens"):
        store.crop(9)
    with pytest.raises(IndexError):
        store.select(torch.tensor([1]))
    check(store, keys, keys)
    with pytest.raises(ValueError, match="page_tokens is 0"):
        KVStore(page_tokens=0)
    with pytest.raises(ValueError, match="room_tokens is -1"):
        KVStore(room_tokens=-1)


def test_kernels_read_pages() -> None:
    shape = (2, 16, 32)
    usual = states(5, *shape)
    usual[3, 1, 5:7, 30:] *= 2.0**-60
    words = torch.cat([usual, odd_bits(1, *shape)]).view(torch.int16).numpy()
    pages = words.view(np.uint16)
    format = choose_page_format(pages[:5].reshape(-1, 32), "BF16", shape)
    assert format.rows.mode is TableMode.DENSE
    held = PackedPages(format, shape)
    numbers = held.add(pages).reshape(2, 3)
    assert (numbers < 0).sum() == 1
    assert held.exceptions(numbers, (2, 2, 64, 32))[0].size > 0
    out = torch.zeros(2, 2, 64, 32, dtype=torch.int16)
    plan = DevicePages(held, numbers, out)
    plan.read_into(out)
    wanted = words.reshape(2, 3, *shape).transpose(0, 2, 1, 3, 4).reshape(2, 2, 48, 32)
    np.testing.assert_array_equal(out[:, :, :48].numpy(), wanted)
    again = torch.zeros_like(out)
    plan.read_into(again)
    assert torch.equal(again[:, :, :48], out[:, :, :48])
    assert plan.suits(held, numbers, again)
    assert not plan.suits(held, numbers.copy(), out)
    assert not plan.suits(held, numbers, out[:, :, :48])
    held.reserve(100)
    assert not plan.suits(held, numbers, out)  # the slots lie elsewhere now
