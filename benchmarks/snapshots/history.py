"""The cost of a history of checkpoints in each store: bytes, time to take, time to restore.

The checkpoints are whole states of the training run, a few steps apart: fp32 masters, their bf16
copy and both moments (training.py). They pass one after the other through the same tensors in
memory, as in a run. Every store (stores.py) takes each checkpoint before the next one comes; the
order of the stores changes from checkpoint to checkpoint. Afterwards the newest checkpoint, the
oldest, and one with a long chain of differences are restored into those tensors: first to
be compared bit for bit with the files of the run, then timed in rounds.

All stores have one thread, pinned to a core. A take ends when its files are on the disk: files
that a store has not flushed itself are flushed within the timed part. Restored files have been read
before, so they come from the system's cache.
"""

import gc
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.codecs.measure import Seconds, cores, time_call
from benchmarks.common.files import flush
from benchmarks.data import sets
from benchmarks.snapshots.stores import MAX_DELTAS, STORES, Live, PackhorseStore, Store

__all__ = ["measure_history"]

ROUNDS = 3


def measure_history() -> dict[str, Any]:
    """Measure all stores that are installed.

    Returns:
        The figures from which history_report.py makes the table and the picture.

    Raises:
        FileNotFoundError: the training run has no history, or does not exist.
        RuntimeError: a store does not restore a checkpoint exactly.
    """
    steps, digest = _history()
    live = Live(steps[0])
    result: dict[str, Any] = {
        "steps": steps,
        "sha256": digest,
        "nbytes": live.nbytes,
        "n_tensors": len(live.flat),
        "max_deltas": MAX_DELTAS,
        "stores": {name: entry.how for name, entry in STORES.items()},
        "rows": [],
        "absent": {},
    }
    with tempfile.TemporaryDirectory(prefix="packhorse-history-") as folder, _one_thread():
        contenders = []
        for name in STORES:
            try:
                contenders.append(_Contender(name, Path(folder) / name, live))
            except ImportError as reason:
                result["absent"][name] = str(reason)
        _take_all(contenders, live, steps)
        last = len(steps) - 1
        chosen = {"newest": last, "oldest": 0, "long chain": min(MAX_DELTAS - 1, last)}
        _restore_all(contenders, live, steps, chosen)
        ours = (c.store for c in contenders if isinstance(c.store, PackhorseStore))
        result["ratios"] = next((store.ratios(1) for store in ours), {})
    result["rows"] = [contender.row for contender in contenders]
    return result


def _history() -> tuple[list[int], str]:
    """The steps of the history, and a hash of the hashes of its files."""
    path = sets.training_folder() / sets.TRAINING_MANIFEST
    manifest = json.loads(path.read_text()) if path.exists() else {}
    if "history" not in manifest:
        raise FileNotFoundError(
            f"there is no history of checkpoints in {path.parent}; make it in about 2 minutes, or "
            "with a whole run in about 17, with: make training ARGS=--resume"
        )
    steps = manifest["history"]["steps"]
    files = manifest["files"] | manifest["history"]["files"]
    whole = hashlib.sha256()
    for name in sorted(files):
        if int(name.partition("_")[2].partition(".")[0]) in steps:
            whole.update(bytes.fromhex(files[name]["sha256"]))
    return steps, whole.hexdigest()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cores(1), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    finally:
        torch.set_num_threads(threads)


class _Contender:
    """A store and its measurements.

    Attributes:
        row: bytes of all files after each checkpoint, and the processor and wall seconds of each
            take, and of each restoration in each round.
    """

    def __init__(self, name: str, folder: Path, live: Live) -> None:
        folder.mkdir()
        self.name = name
        self.store: Store = STORES[name].make(folder, live)
        self._folder = folder
        self._flushed: set[Path] = set()
        self.row: dict[str, Any] = {"store": name, "sizes": [], "take": [], "restore": {}}

    def take(self, i: int) -> None:
        self.row["take"].append(_time(self._take, i))
        files = (path for path in self._folder.rglob("*") if path.is_file())
        self.row["sizes"].append(sum(path.stat().st_size for path in files))

    def restore(self, i: int, what: str) -> None:
        self.row["restore"].setdefault(what, []).append(_time(self.store.restore, i))

    def _take(self, i: int) -> None:
        self.store.take(i)
        new = set(self._folder.rglob("*")) - self._flushed
        flush([*new, self._folder])
        self._flushed |= new


def _time(work: Callable[[int], None], i: int) -> Seconds:
    _, seconds = time_call(work, i)
    return seconds


def _take_all(contenders: list[_Contender], live: Live, steps: list[int]) -> None:
    for i, step in enumerate(steps):
        live.load(step)
        if i == 1:
            for contender in contenders:
                contender.store.look()
        wanted = live.copy()
        gc.collect()
        first = i % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            contender.take(i)
        live.check(wanted, "a store has changed the state")
        print(f"checkpoint {i + 1} of {len(steps)} was taken by all stores", flush=True)


def _restore_all(
    contenders: list[_Contender], live: Live, steps: list[int], chosen: dict[str, int]
) -> None:
    for what, i in chosen.items():
        live.load(steps[i])
        wanted = live.copy()
        for contender in contenders:
            live.poison()
            contender.store.restore(i)
            live.check(wanted, contender.name)
        for _ in range(ROUNDS):
            gc.collect()
            for contender in contenders:
                contender.restore(i, what)
        print(f"the {what} was restored by all stores", flush=True)
