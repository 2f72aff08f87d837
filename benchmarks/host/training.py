"""A real training with features that are plain, packed, or a file that is mapped: GraphSAGE on
WordNet (graphsage.py), without a limit of memory and with one that the features do not fit.

Each run is a process of its own, and begins with a file of features that the system has not cached.
All runs must have the same losses, bit for bit.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.files import evict, read_ahead_kib
from benchmarks.common.memory_limit import memory_limit, obstacle
from benchmarks.data import wordnet

__all__ = ["check_losses", "measure", "write_graph"]

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("plain", "packed", "memmap", "memmap, random")
KILLED = -9
CACHED_SHARE = 4  # beside what a run with packed features needs, a quarter of the plain ones fits
LIMITED = {"epochs": 1, "batches": 10}  # a run that reads the disk all the time takes very long
# The process joins its group before it imports anything, so that all that it allocates counts.
CHILD = """
import json, sys
if sys.argv[1]:
    with open(sys.argv[1], "w") as entrance:
        entrance.write("0")
from pathlib import Path
from benchmarks.host.graphsage import Settings, run
settings = Settings(**json.loads(sys.argv[4]))
print(json.dumps(run(sys.argv[2], Path(sys.argv[3]), settings)))
"""


def measure(settings: dict[str, Any] | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Trains in all ways.

    Args:
        settings: of graphsage.py, where they are not the usual ones.
        folder: on the disk where the features are to lie.

    Returns:
        The figures of report.py.

    Raises:
        AssertionError: losses differ.
        FileNotFoundError: `make data` was not run.
    """
    settings = {"n_words": 3703} | (settings or {})
    with tempfile.TemporaryDirectory(prefix="packhorse-host-", dir=folder) as name:
        place = Path(name)
        graph = wordnet.load()
        write_graph(place, graph.labels, graph.edges, _features(settings["n_words"]))
        read_ahead = read_ahead_kib(place)
        runs = [_run(arm, place, settings, None) for arm in ARMS]
        reason, limit = obstacle(), None
        if reason is None:
            features = (place / "features.bin").stat().st_size
            packed = next(run for run in runs if run["arm"] == "packed")
            limit = packed["own_nbytes"] + features // CACHED_SHARE
            runs += [_run(arm, place, settings | LIMITED, limit) for arm in ARMS]
    check_losses(runs)
    return {
        "settings": settings,
        "n_nodes": len(graph.labels),
        "n_edges": graph.edges.shape[1],
        "limit_nbytes": limit,
        "not_limited": reason,
        "read_ahead_kib": read_ahead,
        "runs": runs,
    }


def _features(n_words: int) -> Iterator[NDArray[np.float32]]:
    """The share of each word in each gloss, some rows at a time."""
    n, step = len(wordnet.load().labels), 1 << 14
    for start in range(0, n, step):
        yield wordnet.features(n_words, "share", slice(start, start + step))


def write_graph(
    folder: Path,
    labels: NDArray[np.int64],
    edges: NDArray[np.int64],
    features: Iterable[NDArray[np.float32]],
) -> None:
    """Writes what runs read.

    Args:
        folder: where.
        labels: of the nodes.
        edges: (2, n): from a node, to a node.
        features: the rows of all nodes, in parts.
    """
    np.savez(folder / "graph.npz", labels=labels, edges=edges)
    with (folder / "features.bin").open("wb") as file:
        for rows in features:
            rows.tofile(file)


def _run(arm: str, folder: Path, settings: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """One process; with a limit, it may be killed."""
    evict(folder)
    words = [arm, str(folder), json.dumps(settings)]
    with nullcontext() if limit is None else memory_limit(limit) as group:
        entrance = "" if group is None else str(group.entrance)
        done = subprocess.run(
            [sys.executable, "-c", CHILD, entrance, *words], stdout=subprocess.PIPE, cwd=ROOT
        )
        peak = None if group is None else group.peak_nbytes()
    found = {"arm": arm, "limited": limit is not None, "group_nbytes": peak}
    killed = limit is not None and done.returncode == KILLED
    if not killed:
        done.check_returncode()
        found |= json.loads(done.stdout)
    print(f"trained: {arm}{'' if limit is None else ', limited'}{', killed' * killed}", flush=True)
    return found | {"killed": killed}


def check_losses(runs: list[dict[str, Any]]) -> None:
    """Compares the losses of runs that were not killed, as far as they went; only the first keeps
    them.

    Raises:
        AssertionError: they differ.
    """
    ended = [run for run in runs if not run["killed"]]
    for run in ended[1:]:
        losses = run.pop("losses")
        if losses != ended[0]["losses"][: len(losses)]:
            raise AssertionError(f"{run['arm']}: losses differ from those of {ended[0]['arm']}")
