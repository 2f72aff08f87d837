"""How fast tables are packed, by one core."""

import time
from typing import Any

import numpy as np

from benchmarks.host.tables import Table
from packhorse.codecs.table_plan import choose_way
from packhorse.codecs.tables import TablePacker

__all__ = ["measure"]

ROUNDS = 7
MIN_NBYTES = 32 << 20  # of plain rows, packed again and again to the same memory


def measure(table: Table) -> dict[str, Any]:
    """The speed of packing a table in the way that is chosen, and of the choice."""
    raw = table.words.shape[1] * table.words.itemsize
    words = np.tile(table.words, (max(1, MIN_NBYTES // (len(table.words) * raw)), 1))
    start = time.perf_counter()
    way = choose_way(table.words, table.dtype)
    planned = time.perf_counter() - start
    rows = words.view(np.uint8).reshape(len(words), -1)
    packed = np.zeros((len(words), way.format.stride), np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        packer = TablePacker(way.format, packed)
        start = time.perf_counter()
        packer.add(rows)
        packer.finish()
        seconds.append(time.perf_counter() - start)
    return {
        "table": table.name,
        "way": way.words,
        "gbps": words.nbytes / float(np.median(seconds)) / 1e9,
        "plan_ms": 1e3 * planned,
    }
