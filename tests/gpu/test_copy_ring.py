"""The ring of copies on a device whose streams run in any order that events allow."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from packhorse.gpu.copy_ring import CopyRing


class Block:
    def __init__(self, value: int, nbytes: int) -> None:
        self.stored = torch.full((nbytes,), value, dtype=torch.uint8)
        self.name = f"block {value}"


class LateDevice:
    """A device whose streams do nothing until `run`, and then what is ready, at random. An event is
    a list that gets an item when it passes. `current` is the stream that work is launched on."""

    def __init__(self) -> None:
        names = "work", "other work", "side"
        self.streams: dict[str, list[tuple[Any, Callable[[], object]]]] = {n: [] for n in names}
        self.current = "work"
        self.n_copies = 0

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        self.n_copies += 1
        passed: list[int] = []
        self.streams["side"].append((after, lambda: target.copy_(source)))
        self.streams["side"].append((None, lambda: passed.append(1)))
        return passed

    def wait(self, event: Any) -> None:
        self.streams[self.current].append((event, lambda: None))

    def mark(self) -> Any:
        passed: list[int] = []
        self.streams[self.current].append((None, lambda: passed.append(1)))
        return passed

    def is_capturing(self) -> bool:
        return False

    def launch(self, work: Callable[[], object]) -> None:
        self.streams[self.current].append((None, work))

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        while any(self.streams.values()):
            ready = [s for s in self.streams.values() if s and (s[0][0] is None or s[0][0])]
            assert ready, "the streams wait for each other"
            choose.choice(ready).pop(0)[1]()


@pytest.mark.parametrize("seed", range(30))
def test_work_always_finds_its_block(seed: int) -> None:
    device, choose = LateDevice(), random.Random(seed)
    blocks = [Block(i, choose.choice([1, 50, 64])) for i in range(choose.choice([1, 2, 5]))]
    ring = CopyRing(64, "cpu", engine=device)
    if seed % 2:
        ring.expect(blocks)
    found, expected = [], []
    for _ in range(40):
        # Mostly in order, as layers of a model; sometimes not, as layers that are left out.
        i = (expected[-1] + 1 if expected else 0) % len(blocks)
        i = choose.randrange(len(blocks)) if choose.random() < 0.2 else i
        expected.append(i)
        with ring.lend(blocks[i]) as copied:
            assert copied.shape == blocks[i].stored.shape
            device.launch(lambda seen=copied: found.append(set(seen.tolist())))  # type: ignore[misc]
    device.run(seed)
    assert found == [{i} for i in expected]


@pytest.mark.parametrize("seed", range(30))
def test_work_of_two_streams_always_finds_its_block(seed: int) -> None:
    device, choose = LateDevice(), random.Random(seed)
    blocks = [Block(i, 64) for i in range(3)]
    ring = CopyRing(64, "cpu", engine=device)
    found: list[tuple[int, set[int]]] = []
    for _ in range(40):
        device.current = choose.choice(["work", "other work"])
        i = choose.randrange(len(blocks))
        with ring.lend(blocks[i]) as copied:
            device.launch(lambda i=i, seen=copied: found.append((i, set(seen.tolist()))))  # type: ignore[misc]
    device.run(seed)
    assert all(seen == {i} for i, seen in found)


def test_a_pass_over_layers_copies_each_once_and_ahead() -> None:
    device, blocks = LateDevice(), [Block(i, 64) for i in range(5)]
    ring = CopyRing(64, "cpu", engine=device)
    ring.expect(blocks)
    for n in range(15):
        with ring.lend(blocks[n % 5]):
            assert device.n_copies == n + 2, "this block, and the one that follows"


def test_the_order_is_learnt() -> None:
    device, blocks = LateDevice(), [Block(i, 64) for i in range(4)]
    ring = CopyRing(64, "cpu", engine=device)
    order = [0, 2, 1, 3]
    for i in [*order, *order]:
        with ring.lend(blocks[i]):
            pass
    before = device.n_copies
    for i in [*order, *order]:
        with ring.lend(blocks[i]):
            pass
    assert device.n_copies == before + 8


def test_a_block_that_changes_or_goes_away_is_not_taken_from_a_buffer() -> None:
    ring, blocks = CopyRing(64, "cpu"), [Block(1, 64), Block(2, 64)]
    ring.expect(blocks)
    with ring.lend(blocks[0]):
        pass
    blocks[1].stored.fill_(9)
    ring.forget(blocks[1])
    with ring.lend(blocks[1]) as copied:
        assert copied.unique().tolist() == [9]
    blocks[0] = Block(7, 64)  # may get the address of the one before
    with ring.lend(blocks[0]) as copied:
        assert copied.unique().tolist() == [7]


def test_a_copy_that_fails_leaves_nothing_behind() -> None:
    class Refuses(LateDevice):
        fails = True

        def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
            if self.fails:
                raise RuntimeError("no more copies")
            return super().copy(target, source, after)

    device, block = Refuses(), Block(3, 8)
    ring = CopyRing(8, "cpu", engine=device)
    with pytest.raises(RuntimeError, match="no more copies") as refused, ring.lend(block):
        pass
    assert refused.value.__notes__ == ["block 3 was being copied to the device"]
    device.fails = False
    found: list[int] = []
    with ring.lend(block) as copied:
        device.launch(lambda: found.extend(copied.tolist()))
    device.run(0)
    assert found == [3] * 8
