"""However a writer of a shelf ends, the shelf has exactly one of the states that it committed.

`PACKHORSE_KILLS=1000 pytest tests/shelf/test_killed.py` kills 1,000 writers.
"""

import os
import random
from collections import Counter
from pathlib import Path

from forked import fork_context
from killed_writer import run_and_kill
from shelf_workload import Ledger, Model, work_until_killed

from packhorse.disk import Shelf

N_KILLS = int(os.environ.get("PACKHORSE_KILLS", "15"))


def work(folder: Path, log: Path, seed: int, after_s: float) -> Ledger:
    """Let a writer begin, and kill it some time later."""
    writer = fork_context().Process(target=work_until_killed, args=(str(folder), str(log), seed))
    return Ledger(run_and_kill(writer, log, after_s))


def check(shelf: Shelf, ledger: Ledger, seed: int) -> None:
    """The shelf has a state that it may have, and each part of it is whole."""
    found = Model.read(shelf).digest()
    assert found in ledger.allowed, f"seed {seed}, killed in {ledger.running}"
    assert not shelf.verify()


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data.shelf"
    rng = random.Random(int(os.environ.get("PACKHORSE_SEED", "0")))
    killed_in, n_steps = Counter[str](), 0
    for _ in range(N_KILLS):
        seed, after_s = rng.getrandbits(32), rng.choice([0.005, 0.03, 0.15]) * rng.random()
        ledger = work(folder, tmp_path / "log", seed, after_s)
        with Shelf(folder, "r") as shelf:
            check(shelf, ledger, seed)
        killed_in[str(ledger.running)] += 1
        n_steps += ledger.n_done
    print(f"killed in: {dict(killed_in)}; steps: {n_steps}")
    assert killed_in.total() - killed_in["None"] > N_KILLS // 5  # how many depends on the machine


def test_writers_are_killed_beside_a_reader(tmp_path: Path) -> None:
    """The lock that a dead writer held is taken over by the next one while others still read."""
    folder = tmp_path / "data.shelf"
    with Shelf(folder) as shelf:
        shelf["first"] = [1, 2, 3]
    rng = random.Random(1)
    with Shelf(folder, "r") as reader:
        for _ in range(max(5, N_KILLS // 8)):
            seed = rng.getrandbits(32)
            ledger = work(folder, tmp_path / "log", seed, 0.05 * rng.random())
            check(reader, ledger, seed)
