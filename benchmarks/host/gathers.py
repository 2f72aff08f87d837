"""How fast rows are gathered on the CPU: ours beside PyTorch, NumPy and rows of IBP, in turns."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.host import ibp
from benchmarks.host.ratios import pack
from benchmarks.host.tables import Table
from packhorse.codecs.table_plan import choose_way
from packhorse.codecs.tables import gather_into

__all__ = ["measure"]

ROUNDS = 9
BATCH_NBYTES = 24 << 20  # of gathered rows
HOT_NBYTES = 128 << 10  # plain rows that stay in L2 whatever the table
LARGE_NBYTES = 512 << 20  # a plain table far beyond the caches


def measure(table: Table, threads: int) -> list[dict[str, Any]]:
    """Speeds of a table: with rows that are in the cache, and from a table larger than it."""
    raw = table.words.shape[1] * table.words.itemsize
    copies = max(1, LARGE_NBYTES // (len(table.words) * raw))
    words = np.tile(table.words, (copies, 1))
    return [
        _measure(table, words, max(1, HOT_NBYTES // raw), "rows in the cache", threads),
        _measure(table, words, len(words), "larger than the cache", threads),
    ]


def _measure(
    table: Table, words: NDArray[Any], n_used: int, what: str, threads: int
) -> dict[str, Any]:
    way = choose_way(table.words, table.dtype)
    arrays = pack(words, way)
    rows = words.view(np.uint8).reshape(len(words), -1)
    n = max(1, BATCH_NBYTES // rows.shape[1])
    ids = np.random.default_rng(1).integers(0, n_used, n)
    out, other = np.empty((n, rows.shape[1]), np.uint8), np.empty((n, rows.shape[1]), np.uint8)
    as_tensor, as_ids, as_out = (torch.from_numpy(array) for array in (rows, ids, other))
    torch.set_num_threads(threads)
    ways: dict[str, Callable[[], object]] = {
        "packhorse": lambda: gather_into(arrays, way.format, ids, out, threads=threads),
        "index_select": lambda: torch.index_select(as_tensor, 0, as_ids, out=as_out),
        "take": lambda: np.take(rows, ids, 0, other),
    }
    ways["packhorse"]()
    if not np.array_equal(out, rows[ids]):
        raise AssertionError(f"{table.name}: rows differ")
    fit = ibp.find_best(table.words.view(np.uint8).reshape(len(table.words), -1))
    if fit is not None and ibp.is_available():
        packed = ibp.IbpRows(rows, fit[0])
        ways["ibp"] = lambda: packed.gather(ids, other, threads)
        ways["ibp"]()
        if not np.array_equal(other, rows[ids]):
            raise AssertionError(f"{table.name}: rows of IBP differ")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS):
        names = list(ways)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return {
        "table": table.name,
        "what": what,
        "way": way.words,
        "threads": threads,
        "row_nbytes": rows.shape[1],
        "gbps": {name: out.nbytes / float(np.median(s)) / 1e9 for name, s in seconds.items()},
        "times": float(np.median(seconds["packhorse"]) / np.median(seconds["index_select"])),
    }
