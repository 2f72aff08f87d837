"""However a writer ends, the snapshots that it reported are whole, and the store keeps working.

`PACKHORSE_KILLS=500 pytest tests/snapshots/test_killed.py` kills 500 writers.
"""

import json
import os
import random
import shutil
from pathlib import Path

from forked import fork_context
from killed_writer import run_and_kill
from snapshot_child import make_state, write_until_killed
from snapshot_ledger import Ledger

from packhorse.disk import SnapshotStore

N_KILLS = int(os.environ.get("PACKHORSE_KILLS", "15"))


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rng = random.Random(int(os.environ.get("PACKHORSE_SEED", "0")))
    expected, killed_in = Ledger(), dict.fromkeys(("take", "replace", "prune", "delete"), 0)
    for i in range(N_KILLS):
        names, after_s = list(expected.seeds), rng.choice([0.005, 0.05, 0.3]) * rng.random()
        args = str(folder), str(tmp_path / "log"), rng.getrandbits(32), names
        writer = fork_context().Process(target=write_until_killed, args=args)
        lines = run_and_kill(writer, tmp_path / "log", after_s)
        kind = expected.read(lines)
        if kind is not None:
            killed_in[kind] += 1
        expected.check(SnapshotStore(folder))
        if i % 5 == 4:
            writer = SnapshotStore(folder)
            writer.take(f"after {i}", make_state(i))
            expected.seeds[f"after {i}"] = i
            assert writer.verify() == []
            check_no_leftovers(folder, writer)
            check_catalogue(folder, tmp_path / "plain")
        if len(expected.seeds) > 12:
            SnapshotStore(folder).prune(keep=6)
            expected.seeds = dict(list(expected.seeds.items())[-6:])
            expected.check(SnapshotStore(folder))
    print(f"killed in: {killed_in}")
    assert killed_in["take"] > N_KILLS // 6


def check_catalogue(folder: Path, to: Path) -> None:
    """The catalogue agrees with the manifests."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("catalog", "writer.lock"))
    assert SnapshotStore(folder).overview() == SnapshotStore(to).overview()
    shutil.rmtree(to)


def check_no_leftovers(folder: Path, store: SnapshotStore) -> None:
    """The store has only files that its snapshots need."""
    manifests = list(folder.glob("snapshots/*/*"))
    assert len(manifests) == len(store.names())
    needed = {pack for path in manifests for pack in json.loads(path.read_text())["packs"]}
    assert {path.name.split(".")[0] for path in folder.glob("packs/*")} == needed
    assert {path.name for path in folder.glob("*")} == {
        "catalog", "packs", "snapshots", "store.json", "writer.lock",
    }  # fmt: skip
    assert not list(folder.rglob(".packhorse-*"))
