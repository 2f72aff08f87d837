"""Deleting and pruning: removed snapshots are gone, the others are whole, and leftovers are
found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_samples import Run, assert_same

import packhorse
from packhorse.disk import SnapshotStore
from packhorse.errors import CorruptionError


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a store."""
    if request.param == "folder":
        return str(tmp_path / "snapshots")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path.name}/snapshots"


def take_run(store: SnapshotStore, n: int = 6) -> dict[str, Any]:
    """Snapshots of a run, step by step, some of whose tensors never change."""
    run, taken = Run(), {}
    frozen = np.random.default_rng(1).standard_normal(3000)
    for i in range(n):
        run.step()
        state = {**run.state(), "frozen": frozen, "index": np.arange(i * 1000)}
        store.take(f"s{i}", state)
        taken[f"s{i}"] = {**run.copy(), "frozen": frozen, "index": np.arange(i * 1000)}
    return taken


def check(store: SnapshotStore, taken: dict[str, Any], names: list[str]) -> None:
    """These snapshots are there, whole, for this store and for another."""
    url = store._storage.label()
    for one in (store, SnapshotStore(url)):
        assert one.names() == names
        assert one.verify() == []
        for name in names:
            assert_same(one.restore(name, framework="pt"), taken[name])


def test_deleting_keeps_what_others_need(url: str) -> None:
    store = SnapshotStore(url)
    taken = take_run(store)
    left = list(taken)
    for name in ("s3", "s0", "s5", "s1"):
        assert store.delete(name) >= 0
        left.remove(name)
        check(store, taken, left)
    with pytest.raises(ValueError, match="no snapshot is named 's3'"):
        store.delete("s3")


def test_deleting_all_leaves_an_empty_store(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    take_run(store, 2)
    for name in store.names():
        store.delete(name)
    assert files_of(tmp_path) == {"store.json", "writer.lock"}
    assert store.names() == []
    take_run(store, 1)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, ["s4", "s5"]),
        (1, ["s5"]),
        (99, ["s0", "s1", "s2", "s3", "s4", "s5"]),
        (["s0", "s5"], ["s0", "s5"]),
        ("s2", ["s2"]),
        (lambda info: info.order % 3 == 0, ["s2", "s5"]),
    ],
    ids=["newest", "last", "all", "names", "name", "predicate"],
)
def test_pruning_keeps_what_is_asked_for(url: str, keep: Any, left: list[str]) -> None:
    store = SnapshotStore(url)
    taken = take_run(store)
    infos = {name: store.info(name) for name in left}
    result = store.prune(keep=keep)
    assert result.removed == tuple(name for name in taken if name not in left)
    assert set(result.rewritten) <= set(left)
    check(store, taken, left)
    for name, info in infos.items():  # all but the frames are as they were
        now = store.info(name)
        assert (now.time, now.order, now.metadata) == (info.time, info.order, info.metadata)
    again = store.prune(keep=left)
    assert (again.removed, again.rewritten, again.freed_nbytes) == ((), (), 0)


def test_pruning_frees_what_only_removed_snapshots_need(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "many")
    taken = take_run(store)
    before = bytes_of(tmp_path / "many" / "packs")
    result = store.prune(keep=1)
    after = bytes_of(tmp_path / "many" / "packs")
    assert result.freed_nbytes == before - after
    alone = SnapshotStore(tmp_path / "one")
    alone.take("s5", taken["s5"])
    assert after < 1.1 * bytes_of(tmp_path / "one" / "packs")


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (0, "keep at least 1"),
        (True, "keep at least 1"),
        ([], "would leave no snapshot"),
        (["s0", "s9"], "names 's9'"),
        (lambda info: False, "would leave no snapshot"),
    ],
)
def test_pruning_refuses_what_is_probably_a_mistake(tmp_path: Path, keep: Any, words: str) -> None:
    store = SnapshotStore(tmp_path)
    taken = take_run(store, 2)
    with pytest.raises(ValueError, match=words):
        store.prune(keep=keep)
    check(store, taken, ["s0", "s1"])


def test_pruning_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    assert store.prune(keep=3).removed == ()
    assert not (tmp_path / "store").exists()
    store.take("a", {})
    store.delete("a")
    assert store.prune(keep=3).removed == ()


def test_pruning_refuses_a_damaged_manifest(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    taken = take_run(store, 3)
    (manifest,) = (tmp_path / "snapshots" / "s1").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-1])
    before = files_of(tmp_path)
    fresh = SnapshotStore(tmp_path)
    with pytest.raises(packhorse.CorruptionError, match=r"snapshot 's1': .*checksum"):
        fresh.prune(keep=1)
    assert files_of(tmp_path) == before
    # Nobody knows which packs this snapshot needs, so no pack is removed before the snapshot is.
    fresh.delete("s0")
    assert files_of(tmp_path / "packs") == {Path(f).name for f in before if f.startswith("packs")}
    fresh.delete("s1")
    fresh.prune(keep=1)
    check(fresh, taken, ["s2"])
    assert len(files_of(tmp_path / "packs")) == 1


# Files that killed writers leave.


def test_leftovers_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    taken = take_run(store, 2)
    good = files_of(tmp_path)
    leftovers = [
        "packs/0123456789abcdef0123456789abcdef.ph.safetensors",
        "packs/.packhorse-0123456789abcdef.tmp",
        "snapshots/s1/.packhorse-0123456789abcdef.tmp",
        ".packhorse-0123456789abcdef.tmp",
    ]
    for name in (*leftovers, "packs/readme.txt", "snapshots/foreign/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "snapshots" / "never").mkdir()
    check(store, taken, ["s0", "s1"])  # readers change nothing
    assert set(leftovers) < files_of(tmp_path)
    fresh = SnapshotStore(tmp_path)
    fresh.take("s2", {})
    ours = ("snapshots/s2", "catalog/")
    new = {name for name in files_of(tmp_path) - good if not name.startswith(ours)}
    assert new == {"packs/readme.txt", "snapshots/foreign/x.json"}
    assert not (tmp_path / "snapshots" / "never").exists()
    check(fresh, {**taken, "s2": {}}, ["s0", "s1", "s2"])


def test_an_older_manifest_counts_until_the_new_one_is_good(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"x": np.arange(1000)})
    (old,) = (tmp_path / "snapshots" / "a").iterdir()
    kept = old.read_bytes()
    packs = {path: path.read_bytes() for path in (tmp_path / "packs").iterdir()}
    store.take("a", {"x": np.arange(5000)}, replace=True)
    (new,) = (tmp_path / "snapshots" / "a").iterdir()
    old.write_bytes(kept)  # as if the writer was killed before it removed it
    for path, data in packs.items():
        path.write_bytes(data)
    assert len(SnapshotStore(tmp_path).restore("a")["x"]) == 5000
    good = new.read_bytes()
    new.write_bytes(good[:100])
    damaged = SnapshotStore(tmp_path)
    assert len(damaged.restore("a")["x"]) == 1000
    assert "checksum" in damaged.verify("a")[0].message
    damaged.take("b", {})  # which does not remove the older one now
    assert old.exists()
    new.write_bytes(good)
    cleaned = SnapshotStore(tmp_path)
    cleaned.take("c", {})
    assert not old.exists()
    assert len(cleaned.restore("a")["x"]) == 5000
    assert cleaned.verify() == []


def test_another_process_s_changes_are_seen(tmp_path: Path) -> None:
    one, other = SnapshotStore(tmp_path), SnapshotStore(tmp_path)
    x = np.random.default_rng(0).standard_normal(4000)
    one.take("a", {"x": x})
    assert other.take("b", {"x": x}).stored_nbytes == 0
    one.delete("a")
    one.delete("b")
    assert other.take("c", {"x": x}).stored_nbytes > 4000  # not in the store any more
    assert_same(one.restore("c"), {"x": x})
    assert one.verify() == []


def test_verifying_while_snapshots_are_removed_finds_nothing_wrong(tmp_path: Path) -> None:
    """A listed snapshot is gone. That is not damage, but a reason to list again."""
    store, writer = SnapshotStore(tmp_path), SnapshotStore(tmp_path)
    run = Run()
    for i in range(3):
        writer.take(str(i), run.step().state())
    real, removals = store._storage.open, [lambda: writer.prune(keep=2), lambda: writer.delete("1")]

    def open_after_removal(path: str) -> Any:
        if removals:
            removals.pop(0)()
        return real(path)

    store._storage.open = open_after_removal  # type: ignore[method-assign]
    assert store.verify() == []
    assert removals == []
    assert store.names() == ["2"]


def test_pruning_says_which_pack_is_lost(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"w": np.arange(999.0)})
    store.take("b", {"w": np.arange(888.0)})
    lost = min((tmp_path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    lost.unlink()
    with pytest.raises(
        CorruptionError, match=rf"snapshot 'a': .*{lost.name}: the pack does not exist; first"
    ):
        store.prune(keep=2)
    store.delete("a")
    store.prune(keep=1)
    assert store.verify() == []


def test_pruning_does_not_put_a_damaged_frame_in_the_place_of_a_good_one(tmp_path: Path) -> None:
    """The damaged one is older, and its snapshot is kept too."""
    states = {name: {"x": np.random.default_rng(0).standard_normal(9000)} for name in "abc"}
    store = SnapshotStore(tmp_path)
    lost = np.random.default_rng(1).integers(0, 1 << 40, 50_000)
    store.take("a", {**states["a"], "lost": lost})
    (pack,) = tmp_path.glob("packs/*")
    with pack.open("r+b") as file:
        file.truncate(pack.stat().st_size // 10)
    store.take("b", {**states["b"], "more": np.arange(70_000)[::-1]})  # the tensor is stored anew
    store.take("c", states["c"])
    assert store.verify("b") == store.verify("c") == []
    for keep in (["a", "b", "c"], ["a", "c"]):
        store.prune(keep=keep)
        assert store.verify("c") == []
        assert np.array_equal(store.restore("c")["x"], states["c"]["x"])
