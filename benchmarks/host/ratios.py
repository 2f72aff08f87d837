"""What packing takes of each table, and what a fetch of a row touches: ours, every way that ours
thought of, and IBP by its published rules."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.host.ibp import find_best
from benchmarks.host.tables import Table
from packhorse.codecs.table_plan import GRANULES, TableWay, choose_way, list_ways
from packhorse.codecs.tables import TableArrays, TablePacker, gather_into
from packhorse.table_layout import TableMode

__all__ = ["measure", "pack"]

_EXPONENT_BITS = {"BF16": 8, "F16": 5, "F32": 8, "F8_E4M3": 4}


def measure(table: Table) -> dict[str, Any]:
    """The figures of one table. Every way that is listed was packed and gathered, bit for bit."""
    words, raw = table.words, table.words.shape[1] * table.words.itemsize
    ways = list_ways(words, table.dtype)
    chosen = {granule: choose_way(words, table.dtype, granule) for granule in GRANULES}
    coded = [way for way in ways if "exponents" in way.words]
    codes = {way.format.code_bits: way for way in coded if not way.format.has_triples}
    triples = [way for way in coded if way.format.has_triples]
    listed: dict[str, TableWay | None] = {
        "chosen for 32": chosen[32],
        "chosen for 128": chosen[128],
        "codes of 4 bits": codes.get(4),
        "three codes in 10 bits": triples[0] if triples else None,
        "codes of 3 bits": codes.get(3),
        "bitmap": _best(ways, TableMode.BITMAP),
        "list": _best(ways, TableMode.LIST),
    }
    found = {name: _figures(way, words, raw) for name, way in listed.items() if way is not None}
    return {
        "table": table.name,
        "rows": len(words),
        "row_nbytes": raw,
        "ways": found,
        "ibp": _ibp(words, raw),
        "exponent_bound": _exponent_bound(table),
    }


def _best(ways: list[TableWay], mode: TableMode) -> TableWay | None:
    found = [way for way in ways if way.format.mode is mode and way.is_allowed]
    return min(found, key=lambda way: way.pulled[32], default=None)


def pack(words: NDArray[Any], way: TableWay) -> TableArrays:
    """A table, packed."""
    rows = words.view(np.uint8).reshape(len(words), -1)
    packer = TablePacker(way.format, np.empty((len(words), way.format.stride), np.uint8))
    packer.add(rows)
    return packer.finish()


def _figures(way: TableWay, words: NDArray[Any], raw: int) -> dict[str, Any]:
    arrays = pack(words, way)
    rows = words.view(np.uint8).reshape(len(words), -1)
    ids = np.random.default_rng(0).permutation(len(words))
    out = np.empty_like(rows)
    gather_into(arrays, way.format, ids, out)
    if not np.array_equal(out, rows[ids]):
        raise AssertionError(f"{way.words}: rows differ")
    total = len(words) * raw
    return {
        "words": way.words,
        "ratio": total / (arrays.rows.nbytes + arrays.fast_nbytes),
        "pulled": {str(granule): raw / nbytes for granule, nbytes in way.pulled.items()},
        "fast_share": arrays.fast_nbytes / total,
    }


def _ibp(words: NDArray[Any], raw: int) -> dict[str, Any] | None:
    """IBP with words of 32 or 64 bits, whichever touches less. Rows are taken to begin at a
    multiple of the granule, which favours it: its rows stay where they were."""
    found = find_best(words.view(np.uint8).reshape(len(words), -1))
    if found is None:
        return None
    fit, nbytes = found
    return {
        "bits": 8 * fit.mask.itemsize,
        "ratio": raw * len(words) / int(nbytes.sum()),
        "pulled": {
            str(granule): raw / float((-(-nbytes // granule) * granule).mean())
            for granule in GRANULES
        },
    }


def _exponent_bound(table: Table) -> float | None:
    """The ratio if exponents took their entropy and all else its bits."""
    exponent_bits = _EXPONENT_BITS.get(table.dtype)
    if exponent_bits is None:
        return None
    bits = 8 * table.words.itemsize
    exponents = table.words >> table.words.dtype.type(bits - 1 - exponent_bits)
    _, counts = np.unique(
        exponents & table.words.dtype.type((1 << exponent_bits) - 1), return_counts=True
    )
    shares = counts / counts.sum()
    entropy = float(-(shares * np.log2(shares)).sum())
    return bits / (bits - exponent_bits + entropy)
