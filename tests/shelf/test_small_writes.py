"""What makes small commits fast: nothing is read, decoded, planned or noted that need not be."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse.frame.compress as frame_module
from packhorse.disk import Shelf, ShelfTensor
from packhorse.disk.shelf import packing, patches
from packhorse.disk.shelf.packing import Content, Planner
from packhorse.disk.shelf.records import StateRecord, TensorRecord
from packhorse.disk.shelf.versions import State
from packhorse.frame import Frame
from packhorse.frame.base import plan_delta
from packhorse.layout import Level

WIDTH, PER_CHUNK, N_ROWS = 64, 256, 2000


class Undo(Exception):
    """Ends a transaction."""


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as shelf:
        yield shelf


def filled(shelf: Shelf) -> tuple[ShelfTensor, np.ndarray]:
    array = np.random.default_rng(0).standard_normal((N_ROWS, WIDTH)).astype(np.float32)
    x = shelf.create("x", array.shape, "float32", chunk_nbytes=1 << 16)
    x[...] = array
    assert x.chunks == (PER_CHUNK, WIDTH)
    return x, array


def n_shares(shelf: Shelf) -> int:
    with shelf._session.state() as state:
        return len(list(state.shares()))


def test_a_patch_leaves_no_record_of_uses(shelf: Shelf) -> None:
    x, array = filled(shelf)
    for at in (5, 5, 300, 6, 1999):
        x[at] = array[at] = at
        assert n_shares(shelf) == 0
        assert shelf.verify() == []
    shelf.tag("now")
    x[7] = array[7] = 1  # the chunk that both patches need is shared
    assert n_shares(shelf) == 1
    shelf.untag("now")
    assert n_shares(shelf) == 0
    assert np.array_equal(x, array)
    assert shelf.verify() == []


def refuse(*_: object) -> None:
    raise AssertionError("a patch was decoded")


def test_rows_of_patches_are_in_memory(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    x, array = filled(shelf)
    x[3] = array[3] = 1
    monkeypatch.setattr(patches, "patch_rows", refuse)
    for step in range(5):
        ids = [3 + step, 4, 500]
        x[ids] = array[ids] = 10 + step
    monkeypatch.undo()
    assert np.array_equal(x, array)
    with suppress(Undo), shelf.transaction():
        x[4] = 0
        raise Undo
    x[5] = array[5] = 3  # their rows are decoded, as the transaction had taken them
    assert np.array_equal(x, array)
    assert shelf.verify() == []


def test_rows_of_patches_need_no_memory(tmp_path: Path) -> None:
    with Shelf(tmp_path / "x.shelf", cache_nbytes=0) as shelf:
        x, array = filled(shelf)
        for step in range(5):
            ids = [3 + step, 4, 500]
            x[ids] = array[ids] = 10 + step
        assert shelf._session.settings.cache.nbytes == 0
        assert np.array_equal(x, array)
        assert shelf.verify() == []


def test_pointers_are_read_once(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    x, array = filled(shelf)
    read: list[int] = []
    plain = State._read_pointers

    def note(self: State, record: TensorRecord, numbers: list[int], label: str) -> object:
        read.extend(numbers)
        return plain(self, record, numbers, label)

    monkeypatch.setattr(State, "_read_pointers", note)
    assert np.array_equal(x, array)
    assert sorted(read) == list(range(8))
    read.clear()
    with Shelf(shelf.path, "r") as other:
        for at in range(0, N_ROWS, 100):
            x[at] = array[at] = at
            assert np.array_equal(x[at - 3 : at + 3], array[at - 3 : at + 3])
        assert read == []
        x.append(array[:1])
        x.resize(N_ROWS - 300)
        assert np.array_equal(x, array[: N_ROWS - 300])
        assert np.array_equal(other["x"], array[: N_ROWS - 300])
    shelf.tag("now")
    x[...] = 0
    assert not np.asarray(x).any()
    shelf.rollback("now")
    assert np.array_equal(x, array[: N_ROWS - 300])


def test_a_held_state_stays_beside_commits(shelf: Shelf) -> None:
    x, array = filled(shelf)
    before = array.copy()
    with x.reading():
        assert np.array_equal(x[:10], before[:10])
        with shelf.transaction():
            x[5] = array[5] = 1
        assert np.array_equal(x, before)
        with shelf.transaction():
            x[6] = array[6] = 1
            assert np.array_equal(x, array)
        assert np.array_equal(x, before)
    assert np.array_equal(x, array)


def test_a_plan_stays_if_one_chunk_is_harder() -> None:
    rng = np.random.default_rng(0)
    record = TensorRecord(1, "F32", (100, 1000), (1, 1000))
    planner = Planner()

    def pack(share: float) -> int:
        """The bytes of a chunk of which a share is no zero."""
        values = rng.integers(1, 256, 1000) / 255 * (rng.random(1000) < share)
        data = values.astype(np.float32).view(np.uint8)
        return len(planner.pack(Content(record, data, (1, 1000)), Level.DEFAULT).frame)

    easy = [pack(0.1) for _ in range(3)]
    hard = [pack(0.9), pack(0.9)]
    after = [pack(0.1) for _ in range(3)]
    assert max(easy) * 2 < min(hard)
    assert max(after) < min(easy) * 1.2


@pytest.mark.parametrize("numel", [1000, 100_000])
def test_a_number_that_was_not_committed_goes_to_a_tensor_of_another_dtype(
    shelf: Shelf, numel: int
) -> None:
    """Its chunks have as many bytes, so how the first ones were packed would seem to fit."""

    def abandon(name: str, array: np.ndarray) -> None:
        with shelf.transaction():
            shelf[name] = array
            raise InterruptedError

    for _ in range(3):
        with pytest.raises(InterruptedError):
            abandon("a", np.arange(2 * numel, dtype=np.int16))
    for name, shape in (("b", (numel,)), ("c", (numel // 10, 10))):
        array = np.arange(numel, dtype=np.float32).reshape(shape)
        with pytest.raises(InterruptedError):
            abandon(name, array.T)
        shelf[name] = array
        assert np.array_equal(shelf[name], array)
    assert shelf.verify() == []


def test_the_plan_of_deltas_is_used_again(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    """Also after rows that are far from their keyframe, which are planned anew."""
    plans: list[int] = []

    def counted(source: Any, level: Level, base: Any) -> Any:
        plans.append(source.data.size)
        return plan_delta(source, level, base)

    monkeypatch.setattr(frame_module, "plan_delta", counted)
    rng = np.random.default_rng(0)
    x = shelf.create("x", (0, 300_000), "float32", base="previous", keyframe_every=12)
    rows = [rng.standard_normal(300_000).astype(np.float32)]
    for step in (1e-6, 1e-6, 1e-6, 1e-6, 1e-2, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6):
        rows.append(rows[0] + np.float32(step) * rng.standard_normal(300_000).astype(np.float32))
    for row in rows:
        x.append(row[None])
    assert x.chunks[0] == 1
    assert 2 <= len(plans) <= 10  # of 33 chunks
    assert np.array_equal(x, rows)
    assert x.ratio > 1.8
    assert shelf.verify() == []


def test_short_chunks_are_packed_in_one_call(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {
        **{f"bias {i}": rng.standard_normal(384).astype(np.float32) for i in range(20)},
        "ids": rng.integers(0, 50, 500),  # need a plan
        "mask": rng.random(700) < 0.5,
        "nothing": np.empty(0, np.float16),
        "scalar": np.array(3, np.float32),
        "large": rng.standard_normal((300, 400)).astype(np.float16),
    }
    n_planned = 0
    compress = packing.compress_buffer

    def counted(*args: Any, **kwargs: Any) -> Frame:
        nonlocal n_planned
        n_planned += 1
        return compress(*args, **kwargs)

    monkeypatch.setattr(packing, "compress_buffer", counted)
    shelf.save("state", state)
    for name, array in state.items():
        assert np.array_equal(shelf.load("state")[name], array)
    assert n_planned < 10

    def alone(_: Planner, contents: list[Content], *__: Any) -> list[None]:
        return [None] * len(contents)

    monkeypatch.setattr(Planner, "pack_short", alone)
    n_planned = 0
    with Shelf(tmp_path / "other.shelf") as other:
        other.save("state", state)
        assert n_planned > 20
        assert stored_frames(other) == stored_frames(shelf)


def stored_frames(shelf: Shelf) -> list[bytes]:
    with shelf._session.state() as state:
        entry = state.entry("state")
        assert isinstance(entry, StateRecord)
        pointers = [
            pointer.chunk
            for record in entry.tensors
            for _, pointer in state.all_pointers(record.id, 0, 10, "state")
            if pointer.chunk
        ]
        return [bytes(chunk.frame) for chunk in state.chunks(pointers)]
