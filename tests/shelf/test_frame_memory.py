"""Frames are built in memory that is used again: no frame overwrites another that is needed."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from packhorse.disk.shelf import Shelf
from packhorse.disk.shelf.cache import stored
from packhorse.disk.shelf.packing import FrameMemory, Packed, Planner, pack_chunk
from packhorse.disk.shelf.records import ChunkRecord, TensorRecord, chunk_value, parse_chunk
from packhorse.frame import compress_buffer
from packhorse.layout import Level

N = 1 << 16  # elements of a row: 256 KiB
RECORD = TensorRecord(1, "F32", (9, N), (1, N), "previous")


def row(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def give_back(planner: Planner, packed: Packed) -> None:
    assert packed.memory is not None
    planner.memory.give(packed.memory, was_held=True)


def test_frames_have_the_same_bytes_as_in_new_memory() -> None:
    planner = Planner()
    for seed in range(3):
        chunk, base = row(seed), row(99)
        near = base + np.float32(1e-6) * chunk
        for values, against in ((chunk, None), (near, base)):
            expected = compress_buffer(
                values, "F32", (1, N), threads=1, base=against, base_is_fixed=True,
                base_hash=None if against is None else b"0" * 16,
            )  # fmt: skip
            found = None if against is None else stored(against, b"0" * 16)
            packed = pack_chunk(RECORD, values, Level.DEFAULT, found, planner)
            assert bytes(packed.frame) == expected.to_bytes()
            assert packed.has_base == (against is not None)
            give_back(planner, packed)


@pytest.mark.parametrize("places", [None, (0, 3)])
def test_the_record_is_the_same_in_place_and_joined(places: tuple[int, ...] | None) -> None:
    packed = pack_chunk(RECORD, row(1), Level.DEFAULT, None, Planner())
    frame = bytes(packed.frame)
    in_place = chunk_value(7, ChunkRecord(5, places, packed.frame, packed.memory))
    assert bytes(in_place) == chunk_value(7, ChunkRecord(5, places, frame))
    assert bytes(parse_chunk(7, in_place).frame) == frame == bytes(packed.frame)


def test_what_frames_hold_and_what_is_free_is_bounded() -> None:
    planner, held = Planner(), []
    for seed in range(100):
        held.append(pack_chunk(RECORD, row(seed), Level.DEFAULT, None, planner))
    kept = [packed.memory for packed in held if packed.memory is not None]
    assert 10 < len(kept) < 100
    assert sum(memory.nbytes for memory in kept) <= 1 << 24
    assert len({memory.ctypes.data for memory in kept}) == len(kept)
    for packed in held:
        if packed.memory is not None:
            give_back(planner, packed)
    free = FrameMemory()
    for memory in [np.empty(1 << 22, np.uint8) for _ in range(9)]:
        free.give(memory, was_held=False)
    assert sum(memory.nbytes for memory in free._free) == free._free_nbytes == 1 << 24
    free = FrameMemory()
    free.begin(100)
    assert not free.hold(np.empty(101, np.uint8))
    free.give(np.empty(101, np.uint8), was_held=False)
    assert not free._free


def test_threads_never_get_the_same_memory() -> None:
    memory, wrong = FrameMemory(), []

    def work(i: int) -> None:
        for _ in range(300):
            mine = memory.take(1 << 12)
            was_held = memory.hold(mine)
            mine[:] = i
            if (mine != i).any():
                wrong.append(i)
            memory.give(mine, was_held=was_held)

    threads = [Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("cache_nbytes", [0, 1 << 22, 1 << 26])
def test_rows_that_are_written_again_and_dropped_in_transactions(
    tmp_path: Path, cache_nbytes: int
) -> None:
    with Shelf(tmp_path / "s", cache_nbytes=cache_nbytes) as shelf:
        tensor = shelf.create("rows", (0, N), "float32", base="previous", chunk_nbytes=1 << 17)
        expected: list[np.ndarray] = []
        for turn in range(4):
            before = list(expected)
            with pytest.raises(KeyError) if turn == 2 else shelf.transaction(), shelf.transaction():
                for seed in range(30):
                    values = row(100 * turn + seed)
                    copy = values.copy()
                    tensor.append(values[None])
                    expected.append(copy)
                    assert np.array_equal(values, copy)
                for i in range(0, len(expected), 3):
                    expected[i] = row(7000 + 100 * turn + i)
                    tensor[i] = expected[i]
                assert np.array_equal(tensor[:], np.stack(expected))
                if turn == 2:
                    raise KeyError
            expected = before if turn == 2 else expected
            assert np.array_equal(tensor[:], np.stack(expected))
    with Shelf(tmp_path / "s") as shelf:
        assert np.array_equal(shelf["rows"][:], np.stack(expected))
        shelf.verify()
