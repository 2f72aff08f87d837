"""After a power loss at any moment, every snapshot that was reported as taken is there."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from power_loss import Recorder
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore


def state_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    fixed, weights = rng.standard_normal(100), rng.standard_normal(300).astype(np.float32)
    return {"fixed": fixed, "weights": weights * np.float32(1 + seed / 1000), "seed": seed}


def work(store: SnapshotStore, recorder: Recorder) -> None:
    """A sequence of steps of a store; marks are (names that must exist, names that may exist), with
    seeds."""
    sure: dict[str, int] = {}
    for name, seed, replace in [("a", 1, False), ("b", 2, False), ("a", 3, True), ("c", 4, False)]:
        before = {name: sure.pop(name, None)}
        recorder.tell((dict(sure), {name: {before[name], seed}}))
        store.take(name, state_of(seed), replace=replace)
        sure[name] = seed
        recorder.tell((dict(sure), {}))
    recorder.tell(({"a": 3, "c": 4}, {"b": {2, None}}))
    store.delete("b")
    recorder.tell(({"a": 3, "c": 4}, {}))
    recorder.tell(({"c": 4}, {"a": {3, None}}))
    store.prune(keep=["c"])
    recorder.tell(({"c": 4}, {}))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The record of these steps."""
    folder = tmp_path_factory.mktemp("recorded")
    recorder = Recorder(folder)
    with recorder.recording():
        work(SnapshotStore(folder, threads=1), recorder)
    return recorder


def chance(seed: int) -> Callable[[int], bool]:
    rng = random.Random(seed)
    coins = [rng.random() < 0.5 for _ in range(10_000)]
    return coins.__getitem__


@pytest.mark.parametrize(
    "survives",
    [lambda i: False, lambda i: True, *(chance(seed) for seed in range(3))],
    ids=["nothing", "everything", "a", "b", "c"],
)
def test_power_may_go_at_any_moment(
    images_folder: Path, recorder: Recorder, survives: Callable[[int], bool]
) -> None:
    assert len(recorder.ops) > 80
    for n_ops in range(len(recorder.ops) + 1):
        folder = images_folder / "store"
        folder.mkdir()
        told = recorder.replay(n_ops, survives, folder)
        sure, maybe = told[-1] if told else ({}, {})
        store = SnapshotStore(folder, threads=1)
        check(store, sure, maybe)
        if n_ops % 8 == 0:
            store.take("next", state_of(9))
            assert_same(store.restore("next"), state_of(9))
            assert store.verify() == []
        shutil.rmtree(folder)


def check(store: SnapshotStore, sure: dict[str, int], maybe: dict[str, set[int | None]]) -> None:
    found = {}
    for name in store.names():
        state = store.restore(name)
        assert_same(state, state_of(state["seed"]))
        found[name] = state["seed"]
    for name, seeds in maybe.items():
        assert found.pop(name, None) in seeds, name
    assert found == sure
    overview = store.overview()  # by a catalogue that may be torn, old or ahead
    assert [each.name for each in overview.snapshots] == store.names()
    assert [each.nbytes for each in overview.snapshots] == [
        store.info(name).nbytes for name in store.names()
    ]


def test_the_record_has_the_catalogue(recorder: Recorder) -> None:
    """The catalogue is never flushed, so it may be torn at any of the moments above."""
    folders = {str(op.key) for op in recorder.ops if getattr(op, "kind", "") == "name"}
    synced = {str(op.key) for op in recorder.ops if getattr(op, "kind", "") == "sync_folder"}
    assert "catalog" in folders
    assert "catalog" not in synced
