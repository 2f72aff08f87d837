"""Measure the cost of a store with many snapshots: `python benchmarks/growth.py`.

A store of tiny tensors is made by real takes, each of which changes some of them. Then each verb
runs in fresh processes, imports not counted, and prints its median wall and processor time and
the peak of its memory. Commands are timed whole, with imports. The last figure comes from a
different store: it is for taking a state whose tensors are each in a different snapshot.

The command exits 1 if `list`, `show` or `take` of one changed tensor needs more than `LIMIT_S`
of processor time, or any verb more than `LIMIT_NBYTES`.

`--python` measures another installation on the same store. Manifests are the same in all releases,
and those that have no catalogue ignore it.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packhorse.disk import SnapshotStore

LIMIT_S = 0.3
LIMIT_NBYTES = 100_000_000
LIMITED = ("list", "show", "take")
NAME = "measured"

# VmHWM belongs to the program that runs now; ru_maxrss would carry over the peak of the process
# that forked it.
CHILD = """
import sys, time
import numpy as np
from packhorse.cli.snapshots import actions
from packhorse.disk import SnapshotStore
verb, url, name = sys.argv[1:4]
opened, state = SnapshotStore(url, threads=1), None
if verb == "take":
    state = SnapshotStore(url).restore(SnapshotStore(url).names()[-1])
    state[next(iter(state))] = np.random.default_rng().standard_normal(16).astype(np.float32)
if verb == "gather":
    state = {name: SnapshotStore(url).restore(name)["x"] for name in SnapshotStore(url).names()}
middle = SnapshotStore(url).names()[len(SnapshotStore(url).names()) // 2]
work = {
    "names": lambda: opened.names(),
    "list": lambda: actions.listed(opened, url),
    "show": lambda: actions.show(opened, url, middle),
    "restore": lambda: opened.restore(middle),
    "stored": lambda: opened.stored_nbytes(),
    "take": lambda: opened.take(name, state),
    "gather": lambda: opened.take(name, state),
    "delete": lambda: opened.delete(name),
    "prune": lambda: opened.prune(keep=opened.names()[-3:]),
}[verb]
wall, own = time.perf_counter(), time.process_time()
work()
wall, own = time.perf_counter() - wall, time.process_time() - own
status = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
print(wall, own, peak)
"""
VERBS = ("names", "list", "show", "restore", "stored", "take", "delete")
COMMANDS = ("list", "show")


class Figure(NamedTuple):
    """The time and memory that a verb took.

    Attributes:
        wall_s: seconds by the wall clock.
        own_s: seconds of the processor.
        peak_nbytes: the largest resident memory of the process.
    """

    wall_s: float
    own_s: float
    peak_nbytes: float


def main(argv: list[str]) -> int:
    """Make the store, measure, print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if a limit is exceeded.
    """
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        url = args.store or f"{folder}/store"
        if not Path(url).exists():
            _make(url, args.snapshots, args.tensors, args.changed)
        figures = {verb: _median(args.python, url, verb, args.rounds) for verb in VERBS}
        for verb, figure in figures.items():
            _print(verb, figure)
        for verb in COMMANDS:
            print(f"packhorse snapshot {verb}: {_command(args.python, url, verb):.2f} s, whole")
        copy = shutil.copytree(url, f"{folder}/copy")
        _print("prune to three", _run(args.python, copy, "prune"))
        shutil.rmtree(Path(copy), ignore_errors=True)
        shutil.copytree(url, copy)
        shutil.rmtree(Path(copy) / "catalog", ignore_errors=True)
        _print("list without a catalogue", _run(args.python, copy, "list"))
        _make_scattered(f"{folder}/scattered", args.snapshots)
        _print("take from all", _run(args.python, f"{folder}/scattered", "gather"))
    limited = [figures[verb] for verb in LIMITED]
    return int(any(f.own_s > LIMIT_S or f.peak_nbytes > LIMIT_NBYTES for f in limited))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of a store with many snapshots.")
    parser.add_argument("--snapshots", type=int, default=1000, metavar="N")
    parser.add_argument("--tensors", type=int, default=1000, metavar="N", help="of each")
    parser.add_argument(
        "--changed", type=int, default=1, metavar="N", help="of each, since the last"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--store", metavar="PATH", help="made there and kept, or used if it is there"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="that has packhorse"
    )
    return parser.parse_args(argv)


def _make(url: str, n_snapshots: int, n_tensors: int, n_changed: int) -> None:
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.weight": _tensor(rng) for i in range(n_tensors)}
    names, begun = list(state), time.perf_counter()
    with SnapshotStore(url, level="fast", threads=1) as store:
        for i in range(n_snapshots):
            for k in range(i * n_changed, (i + 1) * n_changed):
                state[names[k % n_tensors]] = _tensor(rng)
            store.take(f"step-{i:06d}", state)
    print(f"made in {time.perf_counter() - begun:.0f} s")


def _make_scattered(url: str, n_snapshots: int) -> None:
    """Make a store of snapshots that have nothing in common."""
    rng = np.random.default_rng(1)
    with SnapshotStore(url, level="fast", threads=1) as store:
        for i in range(n_snapshots):
            store.take(f"step-{i:06d}", {"x": _tensor(rng)}, base=None)


def _tensor(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(16).astype(np.float32)


def _median(python: str, url: str, verb: str, rounds: int) -> Figure:
    found = [_run(python, url, verb, f"{NAME}-{i}") for i in range(rounds)]  # taken, then deleted
    return Figure(*map(statistics.median, zip(*found, strict=True)))


def _run(python: str, url: str, verb: str, name: str = NAME) -> Figure:
    command = [python, "-c", CHILD, verb, url, name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Figure(*map(float, done.stdout.split()))


def _command(python: str, url: str, verb: str) -> float:
    begun = time.perf_counter()
    command = [python, "-m", "packhorse", "snapshot", verb, url, "--json"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def _print(verb: str, figure: Figure) -> None:
    print(
        f"{verb}: {figure.wall_s:.3f} s, {figure.own_s:.3f} s of the processor, "
        f"{figure.peak_nbytes / 1e6:.0f} MB at most",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
