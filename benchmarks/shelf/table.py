"""Many short rows: the images of Fashion-MNIST, gathered and overwritten at random.

All stores are filled with the same rows and show them all, bit for bit. Then the rounds go from
store to store, with the same row numbers for all: 1,000 random rows are read, first from warm
stores, then from stores that were opened again and whose files have left the system's cache.
At last 16 random rows are overwritten in each of many durable transactions, and all rows are
compared once more.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import fashion_mnist
from benchmarks.shelf.contenders import Contender, enter, in_turn, summary
from benchmarks.shelf.store import Array, Layout

__all__ = ["GATHERED", "OVERWRITTEN", "TRANSACTIONS", "images", "measure_table"]

CACHE_NBYTES = 256 << 20
CHUNK_ROWS = 41  # 128 KiB, as many as ours has in its chunks
FILLED = 64 * CHUNK_ROWS  # rows of one append
GATHERED, OVERWRITTEN = 1000, 16
WARM_ROUNDS, COLD_ROUNDS, TRANSACTIONS = 15, 5, 64


def images() -> Array:
    """All 70,000 images as rows of 784 fp32 between 0 and 1."""
    loaded = fashion_mnist.load()[0]
    return np.float32(loaded.reshape(len(loaded), -1)) / 255


def measure_table(names: list[str], folder: Path, rows: Array | None = None) -> dict[str, Any]:
    """Fill, gather from and overwrite rows in all stores.

    Args:
        names: keys of `STORES`.
        folder: for the stores.
        rows: the rows, if not all images.

    Returns:
        The figures of report.py.

    Raises:
        RuntimeError: a store does not return what was written.
    """
    rows = images() if rows is None else rows
    layout = Layout(rows.shape[1], len(rows), CHUNK_ROWS, CACHE_NBYTES)
    contenders, absent = enter(names, "table", folder, layout)
    random = np.random.default_rng(1)
    _fill(contenders, rows)
    filled = {c.name: c.nbytes for c in contenders}
    _gather_warm(contenders, rows, random)
    _gather_cold(contenders, rows, random)
    _overwrite(contenders, rows.copy(), random)
    return {
        "rows": len(rows),
        "width": rows.shape[1],
        "nbytes": rows.nbytes,
        "absent": absent,
        "stores": [_figures(c, filled[c.name], len(rows)) for c in contenders],
    }


def _fill(contenders: list[Contender], rows: Array) -> None:
    for start in range(0, len(rows), FILLED):
        for contender in in_turn(contenders, start // FILLED):
            contender.time("fill", contender.store.append, rows[start : start + FILLED])
    for contender in contenders:
        _check(contender, rows)
    print("all stores have the rows", flush=True)


def _check(contender: Contender, rows: Array) -> None:
    contender.reopen()
    start = 0
    for block in contender.store.blocks():
        _compare(contender, block, rows[start : start + len(block)])
        start += len(block)
    if start != len(rows):
        raise RuntimeError(f"{contender.name} returns {start} rows of {len(rows)}")


def _compare(contender: Contender, found: Array, wanted: Array) -> None:
    if not np.array_equal(np.ascontiguousarray(found).view(np.uint32), wanted.view(np.uint32)):
        raise RuntimeError(f"{contender.name} does not return the rows as they were written")


def _gather_warm(contenders: list[Contender], rows: Array, random: Any) -> None:
    for contender in contenders:
        for start in range(0, len(rows), FILLED):
            contender.store.take(np.arange(start, min(start + FILLED, len(rows))))
    for i in range(WARM_ROUNDS):
        index = random.integers(0, len(rows), GATHERED)
        for contender in in_turn(contenders, i):
            found = contender.time("gather, warm", contender.store.take, index)
            _compare(contender, found, rows[index])
    print("rows were gathered from warm stores", flush=True)


def _gather_cold(contenders: list[Contender], rows: Array, random: Any) -> None:
    for i in range(COLD_ROUNDS):
        index = random.integers(0, len(rows), GATHERED)
        for contender in in_turn(contenders, i):
            contender.reopen(cold=True)
            found = contender.time("gather, cold", contender.store.take, index)
            _compare(contender, found, rows[index])
    print("rows were gathered from cold stores", flush=True)


def _overwrite(contenders: list[Contender], rows: Array, random: Any) -> None:
    """Each row gets the values of another, so that they stay images."""
    for i in range(TRANSACTIONS):
        index = random.choice(len(rows), OVERWRITTEN, replace=False)
        new = rows[random.integers(0, len(rows), OVERWRITTEN)]
        for contender in in_turn(contenders, i):
            contender.time("overwrite", contender.store.overwrite, index, new)
        rows[index] = new
    for contender in contenders:
        _check(contender, rows)
    print("rows were overwritten", flush=True)


def _figures(contender: Contender, filled: int, n_rows: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "store": contender.name,
        "nbytes_filled": filled,
        "nbytes": contender.nbytes,
        "fill_seconds": round(sum(wall for _, wall in contender.seconds["fill"]), 3),
    }
    kinds = ("gather, warm", "gather, cold", "overwrite")
    return figures | {what: summary(contender.seconds[what]) for what in kinds}
