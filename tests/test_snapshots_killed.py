"""Whatever ends a writer, what was reported as taken is whole, and the store goes on.

`PACKHORSE_KILLS=500 pytest tests/test_snapshots_killed.py` kills as many writers as that.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from snapshot_child import make_state, write_until_killed
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore

# A process that has imported all it needs, and forks.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["packhorse.disk"])
N_KILLS = int(os.environ.get("PACKHORSE_KILLS", "30"))


class Expected:
    """What must be in the store, by what writers said on their way."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}  # of what must be there
        self.either: dict[str, set[int | None]] = {}  # of what may be there, None: not

    def read(self, lines: list[str]) -> str | None:
        """Follow what a writer said; the kind of step that it was killed in, if any."""
        running = None
        for line in lines:
            event, kind, what = json.loads(line)
            running = (kind, what) if event == "begin" else None
            if event == "end":
                self._done(kind, what)
        if running is not None:
            self._half_done(*running)
            return str(running[0])
        return None

    def _done(self, kind: str, what: Any) -> None:
        if kind == "prune":
            self.seeds = {name: seed for name, seed in self.seeds.items() if name in what}
        elif kind == "delete":
            del self.seeds[what]
        else:
            self.seeds.pop(what[0], None)
            self.seeds[what[0]] = what[1]

    def _half_done(self, kind: str, what: Any) -> None:
        if kind == "prune":
            gone = [name for name in self.seeds if name not in what]
        else:
            gone = [what] if kind == "delete" else [what[0]]
        for name in gone:
            before = self.seeds.pop(name, None)
            after = what[1] if kind in ("take", "replace") else None
            self.either[name] = {before, after}

    def check(self, store: SnapshotStore) -> None:
        """Compare with what is there, which from now on must stay."""
        found = {}
        for name in store.names():
            state = store.restore(name)
            assert_same(state, make_state(state["seed"]))
            found[name] = state["seed"]
        for name, seeds in self.either.items():
            assert found.get(name) in seeds, name
        assert {n: s for n, s in found.items() if n not in self.either} == self.seeds
        self.seeds, self.either = found, {}


def run_and_kill(folder: Path, log: Path, seed: int, names: list[str], after_s: float) -> list[str]:
    """Start a writer, kill it some time after it has begun to write; what it said."""
    log.unlink(missing_ok=True)
    child = PROCESSES.Process(target=write_until_killed, args=(str(folder), str(log), seed, names))
    child.start()
    while not (log.exists() and log.stat().st_size):
        assert child.is_alive()
        time.sleep(0.0005)
    time.sleep(after_s)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return log.read_text().split("\n")[:-1]


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rng = random.Random(int(os.environ.get("PACKHORSE_SEED", "0")))
    expected, killed_in = Expected(), dict.fromkeys(("take", "replace", "prune", "delete"), 0)
    for i in range(N_KILLS):
        names, after_s = list(expected.seeds), rng.choice([0.005, 0.05, 0.3]) * rng.random()
        lines = run_and_kill(folder, tmp_path / "log", rng.getrandbits(32), names, after_s)
        kind = expected.read(lines)
        if kind is not None:
            killed_in[kind] += 1
        expected.check(SnapshotStore(folder))
        if i % 10 == 9:
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
    """It says what the manifests say."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("catalog", "writer.lock"))
    assert SnapshotStore(folder).overview() == SnapshotStore(to).overview()
    shutil.rmtree(to)


def check_no_leftovers(folder: Path, store: SnapshotStore) -> None:
    """Nothing lies in the store but what its snapshots need."""
    manifests = list(folder.glob("snapshots/*/*"))
    assert len(manifests) == len(store.names())
    needed = {pack for path in manifests for pack in json.loads(path.read_text())["packs"]}
    assert {path.name.split(".")[0] for path in folder.glob("packs/*")} == needed
    assert {path.name for path in folder.glob("*")} == {
        "catalog", "packs", "snapshots", "store.json", "writer.lock",
    }  # fmt: skip
    assert not list(folder.rglob(".packhorse-*"))
