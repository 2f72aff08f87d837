"""Manifests that nobody can read, or whose numbers are odd. They never decide which snapshot is the
newest, and nothing is pruned while such a manifest exists."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_samples import Ended, run_command
from snapshot_samples import assert_same

from packhorse.codecs.content import crc32c
from packhorse.disk import SnapshotStore
from packhorse.errors import CompatibilityError, CorruptionError

LARGEST = 10**12 - 1


def state_of(i: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(i).standard_normal(500), "n": i}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three snapshots that share nothing."""
    store = SnapshotStore(tmp_path / "store")
    for i in range(3):
        store.take(f"s{i}", state_of(i))
    return tmp_path / "store"


def put_stray(folder: Path, name: str, order: int = LARGEST, text: bytes = b"stray") -> Path:
    path = folder / "snapshots" / name / f"{order:012d}-000001-{'ab' * 8}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    return path


def manifest_of(folder: Path, name: str) -> Path:
    (path,) = (folder / "snapshots" / name).iterdir()
    return path


def renumber(path: Path, **changes: Any) -> Path:
    """Give a manifest another order or generation, in its text and in its name."""
    document = {**json.loads(path.read_text()), **changes, "crc32c": "0" * 8}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    path.unlink()
    path = path.with_name(
        f"{document['order']:012d}-{document['generation']:06d}-{path.name[-21:]}"
    )
    path.write_bytes(text.replace("0" * 8, f"{crc32c(text.encode()):08x}", 1).encode())
    return path


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock"}


def refuse_to_prune(folder: Path, words: str, kind: type[Exception] = CorruptionError) -> None:
    before = files_of(folder)
    for keep in (1, 2, ["s2"], lambda info: info.name == "s2"):
        with pytest.raises(kind, match=words):
            SnapshotStore(folder).prune(keep=keep)
    assert files_of(folder) == before


# Manifests that cannot be read.


def test_a_stray_manifest_neither_counts_nor_lets_anything_be_pruned(folder: Path) -> None:
    stray = put_stray(folder, "zzz")
    store = SnapshotStore(folder)
    assert store.take("s3", state_of(3)).order == 4
    assert store.take("s4", state_of(3)).order == 5
    refuse_to_prune(folder, rf"snapshot 'zzz': .*{stray.name}.*: delete snapshot 'zzz' first")
    store.delete("zzz")
    assert store.prune(keep=1).removed == ("s0", "s1", "s2", "s3")
    assert_same(store.restore("s4"), state_of(3))


def test_the_command_says_so_and_fails(folder: Path) -> None:
    stray = put_stray(folder, "zzz")
    before = files_of(folder)
    done = run_command("snapshot", "prune", folder, "--keep", "1", "--yes")
    assert done.code == 1
    assert stray.name in done.err
    assert "delete snapshot 'zzz' first" in done.err
    assert files_of(folder) == before


def test_a_stray_beside_a_good_manifest_does_not_make_it_the_newest(folder: Path) -> None:
    stray = put_stray(folder, "s0")
    store = SnapshotStore(folder)
    assert store.names() == ["s0", "s1", "s2"]
    assert_same(store.restore("s0"), state_of(0))
    assert [each.name for each in store.overview().snapshots] == ["s0", "s1", "s2"]
    assert store.take("s3", state_of(2)).stored_nbytes == 0
    refuse_to_prune(folder, rf"remove {re.escape(str(stray))}, or delete snapshot 's0' first")
    assert store.take("s0", state_of(0), replace=True).order == 5
    assert not stray.exists()
    assert store.names() == ["s1", "s2", "s3", "s0"]
    assert store.prune(keep=1).removed == ("s1", "s2", "s3")


@pytest.mark.parametrize("order", [0, 2, LARGEST])
@pytest.mark.parametrize("name", ["s1", "zzz"])
def test_list_verify_and_prune_tell_of_the_same_manifest(
    folder: Path, name: str, order: int
) -> None:
    """This holds with or without a good manifest beside it, and after the catalogue was written
    again."""
    stray = put_stray(folder, name, order)
    for _ in range(2):
        found = [*SnapshotStore(folder).overview().damaged, *SnapshotStore(folder).verify()]
        assert [(p.snapshot, p.tensor, p.file) for p in found] == [(name, None, str(stray))] * 2
        assert SnapshotStore(folder).verify(name) == found[:1]
        assert SnapshotStore(folder).verify("s0") == []
        refuse_to_prune(folder, re.escape(str(stray)))
        SnapshotStore(folder).take("s3", state_of(3), replace=True)
    assert_same(SnapshotStore(folder).restore("s1"), state_of(1))


def test_the_command_tells_of_a_manifest_beside_a_good_one(
    folder: Path, run: Callable[..., Ended]
) -> None:
    stray = put_stray(folder, "s1", 0)
    for verb, key in (("list", "damaged"), ("show", "damaged"), ("verify", "problems")):
        done = run("snapshot", verb, folder)
        assert done.code == 1
        (line,) = [line for line in done.out.splitlines() if line.startswith("bad: ")]
        assert line.startswith(f"bad: snapshot 's1': {stray}: ")
        done = run("snapshot", verb, folder, "--json")
        assert done.code == 1
        (row,) = json.loads(done.out)["results"][0][key]
        assert (row["snapshot"], row["file"]) == ("s1", str(stray))


@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_told_and_harms_nothing_else(
    folder: Path, target: str
) -> None:
    """It must not be treated as missing, because the snapshots behind it may need packs."""
    stray = put_stray(folder, "s1", 7)
    stray.unlink()
    stray.symlink_to("nowhere" if target == "nowhere" else stray.name)
    store = SnapshotStore(folder)
    found = [*store.overview().damaged, *store.verify()]
    words = f"snapshot 's1': {stray}: a link that leads nowhere"
    assert [problem.message for problem in found] == [words] * 2
    refuse_to_prune(folder, re.escape(words))
    assert_same(store.restore("s1"), state_of(1))
    store.take("s3", state_of(3))
    store.delete("s1")
    assert store.verify() == []


def test_messages_of_verify_name_no_tensor_that_is_none(folder: Path) -> None:
    def move(document: dict[str, Any]) -> None:
        document["frames"][0][1] = 1 << 40

    def grow(document: dict[str, Any]) -> None:
        document["frames"][0][5] = document["tensors"][0][2][0] = 1 << 40

    for name, change in (("s0", move), ("s1", grow)):
        path = manifest_of(folder, name)
        document = json.loads(path.read_text())
        change(document)
        renumber(path, **document)
    problems = SnapshotStore(folder).verify()
    assert {problem.snapshot for problem in problems} == {"s0", "s1"}
    assert not [problem for problem in problems if "None" in problem.message]


def test_what_a_writer_did_not_get_to_remove_is_no_damage(folder: Path) -> None:
    """A good manifest that was replaced by another."""
    store = SnapshotStore(folder)
    old = manifest_of(folder, "s1")
    text = old.read_bytes()
    store.take("s1", state_of(1), replace=True)
    old.parent.mkdir(exist_ok=True)
    old.write_bytes(text)
    assert SnapshotStore(folder).verify() == SnapshotStore(folder).overview().damaged == []
    assert SnapshotStore(folder).prune(keep=1).removed == ("s0", "s2")


def test_a_manifest_of_a_newer_release_stops_a_prune_too(folder: Path) -> None:
    text = json.dumps({"crc32c": "0" * 8, "kind": "packhorse snapshot", "version": 2})
    text = text.replace(": ", ":").replace(", ", ",")
    put_stray(folder, "new", 9, text.replace("0" * 8, f"{crc32c(text.encode()):08x}", 1).encode())
    refuse_to_prune(folder, "version 2.*delete snapshot 'new' first", CompatibilityError)
    assert SnapshotStore(folder).take("s3", {}).order == 4


def test_a_damaged_manifest_keeps_its_number_to_itself(folder: Path) -> None:
    """If somebody repairs it, no other snapshot has the same number."""
    path = manifest_of(folder, "s2")
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    assert SnapshotStore(folder).take("s3", state_of(3)).order == 4
    path.write_bytes(good)
    assert SnapshotStore(folder).names() == ["s0", "s1", "s2", "s3"]
    assert SnapshotStore(folder).prune(keep=1).removed == ("s0", "s1", "s2")


@pytest.mark.parametrize("keep", [1, ["s2"]])
def test_damage_that_leaves_no_trace_stops_a_prune(folder: Path, keep: Any) -> None:
    """A bit that flips on the disk changes neither size nor time of a file."""
    path = manifest_of(folder, "s0")
    status, data = path.stat(), bytearray(path.read_bytes())
    data[data.index(b"packs") - 9] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = files_of(folder)
    with pytest.raises(CorruptionError, match=r"snapshot 's0': .*checksum"):
        SnapshotStore(folder).prune(keep=keep)
    assert [problem.file for problem in SnapshotStore(folder).verify()] == [str(path)]
    assert files_of(folder) == before
    SnapshotStore(folder).delete("s1")  # nobody knows what s0 needs, so no pack goes
    assert len(list((folder / "packs").iterdir())) == 3
    SnapshotStore(folder).delete("s0")
    assert len(list((folder / "packs").iterdir())) == 1
    assert SnapshotStore(folder).verify() == []


# Numbers.


def test_after_the_largest_number_there_is_no_newer_snapshot(folder: Path) -> None:
    renumber(manifest_of(folder, "s1"), order=LARGEST)
    store = SnapshotStore(folder)
    assert store.names() == ["s0", "s2", "s1"]
    before = files_of(folder)
    for name in ("s3", "s1"):
        with pytest.raises(ValueError, match=rf"than 's1', which has {LARGEST}; delete that"):
            store.take(name, state_of(1), replace=True)
    assert {path.parent.name for path in files_of(folder) - before} <= {"catalog"}
    store.delete("s1")
    assert store.take("s3", state_of(3)).order == 4


def test_a_manifest_that_was_written_anew_too_often_is_not_pruned(folder: Path) -> None:
    store = SnapshotStore(folder)
    for i in (3, 4):
        store.take(f"s{i}", {"w": state_of(0)["w"] + 1e-12 * i, "n": i}, base="s0")
    renumber(manifest_of(folder, "s4"), generation=10**6 - 1)
    before = files_of(folder)
    with pytest.raises(ValueError, match="'s4': no number is left for another manifest; take the"):
        SnapshotStore(folder).prune(keep=["s3", "s4"])
    assert files_of(folder) == before


def test_of_two_with_one_number_nobody_knows_which_is_newer(folder: Path) -> None:
    renumber(manifest_of(folder, "s1"), order=3)
    store = SnapshotStore(folder)
    with pytest.raises(ValueError, match=r"keep is 1, but the snapshots 's[12]' and 's[12]' have"):
        store.prune(keep=1)
    assert set(store.names()) == {"s0", "s1", "s2"}
    assert store.prune(keep=2).removed == ("s0",)
    assert store.prune(keep=["s2"]).removed == ("s1",)


def test_removing_by_name_keeps_what_comes_meanwhile(folder: Path) -> None:
    store = SnapshotStore(folder)
    doomed = store.names()[:2]
    SnapshotStore(folder).take("s3", state_of(3))
    assert store.prune(remove=doomed).removed == ("s0", "s1")
    assert store.names() == ["s2", "s3"]
    assert store.prune(remove="s0").removed == ()  # somebody was faster
    with pytest.raises(ValueError, match="would leave no snapshot"):
        store.prune(remove=["s2", "s3"])
    for wrong in ({}, {"keep": 1, "remove": ["s2"]}):
        with pytest.raises(TypeError, match="either `keep` or `remove`"):
            store.prune(**wrong)
    assert store.verify() == []


def test_a_copy_of_a_store_is_as_good(folder: Path, tmp_path: Path) -> None:
    """The copy's files have other times than the catalogue records."""
    other = tmp_path / "copy"
    shutil.copytree(folder, other, copy_function=shutil.copyfile)
    store = SnapshotStore(other)
    assert store.overview() == SnapshotStore(folder).overview()
    assert store.take("s3", state_of(0)).stored_nbytes == 0
    assert store.prune(keep=1).removed == ("s0", "s1", "s2")
    assert store.verify() == []
