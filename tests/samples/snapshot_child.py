"""A writer that will be killed. It takes, prunes and deletes at random, and writes a line of JSON
to a file before each step (`begin`) and after it (`end`)."""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from packhorse.disk import SnapshotStore

__all__ = ["make_state", "write_until_killed"]


def make_state(seed: int) -> dict[str, Any]:
    """The state of a snapshot: tensors that drift from seed to seed, and some that do not."""
    fixed, own = np.random.default_rng(7), np.random.default_rng(seed)
    weights = fixed.standard_normal((60, 50)).astype(np.float32) + np.float32(1e-5) * seed
    return {
        "half": weights.astype(np.float16),
        "weights": weights,
        "frozen": fixed.standard_normal(2000),
        "moments": [own.standard_normal(500).astype(np.float32) for _ in range(3)],
        "seed": seed,
    }


def steps(rng: random.Random, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Chooses the next step, given the snapshots that exist."""
    while True:
        kind = rng.choice(["take"] * 5 + ["replace"] * 2 + ["prune"] * 4 + ["delete"] * 3)
        if kind == "take":
            yield kind, (f"n{rng.randrange(10**9)}", rng.randrange(10**6))
        elif kind == "replace" and names:
            yield kind, (rng.choice(names), rng.randrange(10**6))
        elif kind == "delete" and names:
            yield kind, rng.choice(names)
        elif kind == "prune" and names:
            yield kind, sorted(rng.sample(names, rng.randint(1, min(4, len(names)))))


def do(store: SnapshotStore, kind: str, what: Any, names: list[str]) -> None:
    if kind == "prune":
        store.prune(keep=what)
        names[:] = [name for name in names if name in what]
    elif kind == "delete":
        store.delete(what)
        names.remove(what)
    else:
        name, seed = what
        store.take(name, make_state(seed), replace=kind == "replace")
        names[:] = [*(other for other in names if other != name), name]


def write_until_killed(folder: str, log: str, seed: int, names: list[str]) -> None:
    """Work on a store until somebody ends this process.

    Args:
        folder: of the store.
        log: the file to which steps are written.
        seed: the seed of the random steps.
        names: the snapshots that exist.
    """
    report = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    store = SnapshotStore(folder, threads=1, max_chain=3)
    for kind, what in steps(random.Random(seed), names):
        os.write(report, json.dumps(["begin", kind, what]).encode() + b"\n")
        do(store, kind, what, names)
        os.write(report, json.dumps(["end", kind, what]).encode() + b"\n")
