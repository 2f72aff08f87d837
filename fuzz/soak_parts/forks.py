"""Forks while threads work, and forks that hand open files and stores to workers.

A child that is forked while threads work does its own work, and must end in time. In a parent that
has just started, threads still import modules at first use, and a child that inherited the lock of
an import would wait forever. To test that, some parents are new processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from packhorse import numpy as packhorse_numpy
from packhorse import open_file
from packhorse.disk import SnapshotStore
from soak_parts.case import Case, Finding, Part, Place, claim
from soak_parts.children import run_child, start_child
from soak_parts.operations import Operations

__all__ = ["PART", "work_and_fork"]

_LIMIT_S = 20.0  # for a child that has a few milliseconds of work
_PARENT_S = 50.0
_TASKS = ("compress", "file", "store", "take", "list", "state", "torch file")
_PROGRAM = "import sys, soak_parts.forks as f; f.work_and_fork(*sys.argv[1:])"


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    if rng.random() < 0.2:
        how, what = rng.choice(("fork", "forkserver", "spawn")), rng.choice(("file", "store"))
        return {"kind": "workers", "how": how, "what": what}
    tasks = [rng.choice(_TASKS) for _ in range(rng.randint(1, 3))]
    delays = [rng.choice((0.0, 1e-4, 1e-3, 5e-3, 5e-2)) * rng.random() for _ in range(6)]
    return {"kind": "threads", "tasks": tasks, "in child": rng.choice(_TASKS), "delays": delays,
            "fresh": rng.random() < 0.3}  # fmt: skip


def run(case: Case, place: Place) -> None:
    """Run a case."""
    if case["kind"] == "workers":
        _workers(case, place)
        return
    _make_inputs(place.folder)
    if case["fresh"]:
        _run_fresh(case, place)
    else:  # a new process, which has used nothing yet
        ended = run_child(lambda: _fork_beside(case, place), place.folder, limit_s=_PARENT_S)
        claim(ended.is_good, f"of a process that forks: {ended.last_line}", ended.err)
    place.accept()


# A process with threads, and its children.


def _run_fresh(case: Case, place: Place) -> None:
    path = os.pathsep.join(sys.path)
    args = [sys.executable, "-c", _PROGRAM, json.dumps(case), str(place.folder)]
    done = subprocess.run(
        args,
        capture_output=True,
        text=True,
        timeout=_PARENT_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    last = next(iter(reversed(done.stderr.splitlines())), "")
    claim(done.returncode == 0, f"of a new process that forks: {last}", done.stderr)


def work_and_fork(case: str, folder: str) -> None:
    """The work of a new process."""
    try:
        _fork_beside(json.loads(case), Place(Path(folder), Operations()))
    except Finding as finding:
        sys.stderr.write(finding.trace)
        raise


def _fork_beside(case: Case, place: Place) -> None:
    """Start threads that work, and fork children meanwhile."""
    done = threading.Event()

    def work(task: str, number: int) -> None:
        folder = place.folder / f"thread-{number}"
        folder.mkdir()
        while not done.is_set():
            _do(task, place.folder, folder)

    threads = [
        threading.Thread(target=work, args=(task, i), daemon=True)
        for i, task in enumerate(case["tasks"])
    ]
    for thread in threads:
        thread.start()
    children = []
    for i, delay in enumerate(case["delays"]):
        time.sleep(delay)
        own = place.folder / f"child-{i}"
        own.mkdir()

        def live(own: Path = own) -> None:
            _do(case["in child"], place.folder, own, place.operations)

        children.append(start_child(live, place.folder))
    try:
        for child in children:
            ended = child.wait(case.get("limit_s", _LIMIT_S))
            claim(ended.is_good, f"a forked child: {ended.last_line}", ended.err)
    finally:
        done.set()
        for child in children:
            child.end(signal.SIGKILL)
        # Do not leave this to the end of Python: PyTorch's own calls in other threads do not
        # survive that.
        for thread in threads:
            thread.join(case.get("limit_s", _LIMIT_S))


def _make_inputs(folder: Path) -> None:
    """Make the files that tasks read. This happens in a child, so that the process that forks has
    not used anything yet."""

    def make() -> None:
        packhorse_numpy.save_file({"x": _array()}, folder / "in.ph.safetensors")
        with SnapshotStore(folder / "store") as store:
            for n in range(2):
                store.take(f"n{n}", {"x": _array() + np.float32(n)})

    ended = run_child(make, folder)
    claim(ended.is_good, f"making inputs: {ended.last_line}", ended.err)


def _array() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((256, 300)).astype(np.float32)


def _do(task: str, inputs: Path, own: Path, operations: Operations | None = None) -> None:
    """Do a task: a little work on the files in two folders."""
    operations = operations or Operations()
    array = _array()
    if task == "compress":
        frames = packhorse_numpy.compress_all([array] * 3, threads=2)
        assert np.array_equal(operations.decompress(frames[0]), array)
    elif task in ("file", "torch file"):
        framework = "pt" if task.startswith("torch") else "np"
        with open_file(inputs / "in.ph.safetensors", framework) as file:
            assert np.array_equal(np.asarray(file.get_slice("x")[3:50]), array[3:50])
    elif task in ("store", "list"):
        store = SnapshotStore(inputs / "store")
        assert store.names() == ["n0", "n1"]
        store.info("n0")
        if task == "store":
            assert np.array_equal(operations.restore(store, "n0")["x"], array)
    elif task == "take":
        name = os.urandom(4).hex()
        operations.take(SnapshotStore(own / "own"), name, {"x": array})
    else:
        packhorse_numpy.save_file({"x": array}, own / "out")


# Workers that get an open file or a store.


def _workers(case: Case, place: Place) -> None:
    """Hand open files or stores to workers, as a data loader does."""
    _make_inputs(place.folder)
    context: Any = multiprocessing.get_context(case["how"])
    if case["what"] == "file":
        with open_file(place.folder / "in.ph.safetensors") as opened:
            _hand_over(context, _read_file, opened, case)
    else:
        _hand_over(context, _read_store, SnapshotStore(place.folder / "store"), case)
    place.accept()


def _hand_over(context: Any, target: Callable[..., None], opened: Any, case: Case) -> None:
    worker = context.Process(target=target, args=(opened,))
    worker.start()
    worker.join(_PARENT_S)
    code = worker.exitcode
    worker.kill()
    worker.join()
    claim(code == 0, f"a worker by {case['how']} with an open {case['what']} ends with {code}")


def _read_file(file: Any) -> None:
    signal.alarm(int(_PARENT_S))
    assert np.array_equal(file.get_tensor("x"), _array())
    assert np.array_equal(file.get_slice("x")[:9], _array()[:9])


def _read_store(store: SnapshotStore) -> None:
    signal.alarm(int(_PARENT_S))
    assert np.array_equal(store.restore("n0")["x"], _array())
    assert store.verify() == []


PART = Part(
    "forks", "forks beside threads, and workers that get open files and stores", draw, run,
    limit_s=90.0, is_exact=False,
)  # fmt: skip
