"""Long rows: each iterate of a training run is appended, then all rows are read in one pass.

Training and appending take turns: the rows are never on the disk before. Only the appends are
timed, each until its row is on the disk. Afterwards every store is opened again and shows all rows,
which are compared with the run's by their hashes. The pass is the sum of all rows with a weight for
each, with the files in the system's cache and without.

A limit of memory is imitated, because a real one needs rights on the system. Each store comes twice
then, and one of the two loses all its files from the system's cache after as many bytes of rows as
the limit. A real limit would keep the pages that are used most. The memory of the process itself is
not limited: the limits that a process can set count what it reserves, not what it uses.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.common.files import cached_nbytes, evict
from benchmarks.shelf.contenders import Contender, enter, in_turn, summary
from benchmarks.shelf.iterates import WIDTH, Training
from benchmarks.shelf.memmap_store import EPOCH
from benchmarks.shelf.store import Array, Layout
from benchmarks.shelf.stores import COLUMNS, SOME, STORES

__all__ = ["COMMON_ROWS", "measure_limited", "measure_rows"]

CACHE_NBYTES = 128 << 20
COMMON_ROWS = 48  # the first rows, of which all stores but the slowest are compared
PASSES = 3
TOLERANCE = 1e-4  # of the sums, whose order differs from store to store


def measure_rows(names: list[str], n_rows: int, folder: Path) -> dict[str, Any]:
    """Append, check and sum the rows in all stores.

    Args:
        names: keys of `STORES`.
        n_rows: rows to append.
        folder: for the stores.

    Returns:
        The figures of report.py.

    Raises:
        RuntimeError: a store does not return the rows.
    """
    contenders, absent = enter(names, "rows", folder, Layout(WIDTH, n_rows, 1, CACHE_NBYTES))
    run = _append_all([contenders], n_rows)
    _sum_all(contenders, run)
    return {
        "rows": n_rows,
        "width": WIDTH,
        "nbytes": 4 * WIDTH,
        "sha256": run.digest,
        "absent": absent,
        "stores": [_figures(c, n_rows) for c in contenders],
    }


def measure_limited(names: list[str], n_rows: int, folder: Path) -> dict[str, Any]:
    """Append the rows with half the memory that they take, and without a limit.

    Args:
        names: keys of `STORES`.
        n_rows: rows to append.
        folder: for the stores.

    Returns:
        The figures of report.py.

    Raises:
        RuntimeError: a store does not return the rows.
    """
    names = [name for name in names if name != COLUMNS]
    n_rows = min(n_rows, SOME)
    limit_nbytes = max(1, n_rows * 4 * WIDTH // 2)
    layout = Layout(WIDTH, n_rows, 1, CACHE_NBYTES)
    free, limited = (enter(names, "rows", folder / side, layout)[0] for side in ("a", "b"))
    _append_all([free, limited], n_rows, limit_nbytes)
    pairs = zip(free, limited, strict=True)
    return {
        "rows": n_rows,
        "limit_nbytes": limit_nbytes,
        "stores": [
            {"store": a.name, "free": _appends(a), "limited": _appends(b)} for a, b in pairs
        ],
    }


def _append_all(sides: list[list[Contender]], n_rows: int, limit_nbytes: int = 0) -> "_Run":
    """Train, append every iterate to all stores, and check them; those of the second side have a
    limit of memory."""
    run, training = _Run(n_rows), Training()
    for i in range(n_rows):
        training.step()
        row = training.row()
        run.note(row)
        for k, side in enumerate(sides):
            for contender in in_turn(side, i):
                if i < _share(contender.name, n_rows):
                    contender.time("append", contender.store.append, row[None])
                if k and _is_full(i, row.nbytes, limit_nbytes):
                    evict(contender.folder)
        if i % 16 == 15:
            print(f"row {i + 1} of {n_rows} is in all stores", flush=True)
    for contender in itertools.chain(*sides):
        _check(contender, run)
    return run


def _is_full(i: int, nbytes: int, limit_nbytes: int) -> bool:
    """Whether row `i` fills the memory once more."""
    return (i + 1) * nbytes // limit_nbytes > i * nbytes // limit_nbytes


class _Run:
    """What is known of the rows: their hashes, and their weighted sums."""

    def __init__(self, n_rows: int) -> None:
        self.weights = np.random.default_rng(0).standard_normal(n_rows).astype(np.float32)
        self.hashes: list[int] = []
        self._ends = {_share(name, n_rows) for name in STORES}
        self._sum = np.zeros(WIDTH)
        self.sums: dict[int, Array] = {}

    def note(self, row: Array) -> None:
        """Take the next row."""
        self.hashes.append(xxhash.xxh3_64_intdigest(row))
        n = len(self.hashes)
        self._sum += np.float64(self.weights[n - 1]) * row
        if n in self._ends:
            self.sums[n] = self._sum.astype(np.float32)

    @property
    def digest(self) -> str:
        """One hash for the whole run."""
        return xxhash.xxh3_64_hexdigest(np.array(self.hashes, np.uint64))


def _share(name: str, n_rows: int) -> int:
    return min(n_rows, STORES[name].max_rows or n_rows)


def _check(contender: Contender, run: _Run) -> None:
    n = len(contender.seconds["append"])
    found: list[int] = []
    for block in contender.store.blocks():
        found += [xxhash.xxh3_64_intdigest(np.ascontiguousarray(row)) for row in block]
    if found != run.hashes[:n]:
        raise RuntimeError(f"{contender.name} does not return the rows of the run")


def _sum_all(contenders: list[Contender], run: _Run) -> None:
    for i in range(PASSES):
        for contender in in_turn(contenders, i):
            contender.reopen(cold=True)
            left = cached_nbytes(contender.folder)
            if left > contender.nbytes // 100:
                print(f"{contender.name}: {left} bytes stay in the cache", file=sys.stderr)
            _sum(contender, run, "sum, cold")
            contender.reopen()
            _sum(contender, run, "sum, warm")


def _sum(contender: Contender, run: _Run, what: str) -> None:
    n = len(contender.seconds["append"])
    found = contender.time(what, contender.store.weighted_sum, run.weights[:n])
    if not np.allclose(found, run.sums[n], rtol=TOLERANCE, atol=TOLERANCE):
        raise RuntimeError(f"{contender.name} returns another sum")


def _appends(contender: Contender) -> dict[str, float]:
    return summary(contender.seconds["append"])


def _figures(contender: Contender, n_rows: int) -> dict[str, Any]:
    seconds = contender.seconds
    appends = seconds["append"]
    # The file of columns has room for all rows from its first row on, and is read as a whole.
    stored = min(n_rows, EPOCH) if contender.name == COLUMNS else len(appends)
    row: dict[str, Any] = {
        "store": contender.name,
        "rows": len(appends),
        "nbytes_per_row": round(contender.nbytes / stored),
        "append": summary(appends),
        "append_common": summary(appends[:COMMON_ROWS]),
    }
    for what in ("sum, cold", "sum, warm"):
        if what in seconds:
            row[what] = summary([(cpu / stored, wall / stored) for cpu, wall in seconds[what]])
    return row
