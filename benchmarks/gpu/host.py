"""Measure gathers of packed tables on the GPU of this machine: `python benchmarks/gpu.py host`.

The command needs a machine with a GPU, PyTorch and Triton, but no network. It proves rows right
before it times anything, and stops at the first wrong one. Its parts, in their order:

- views: whether the GPU reads registered, pinned and shared memory of the host at its address, and
  sees what the host writes to it later;
- check: every way to pack, bit for bit, with changed rows, and in a CUDA graph;
- link: copies by their size, and plain rows read in place, by multiprocessors and pages;
- decode: packed rows that lie in device memory, so that no link is the limit;
- big: a whole table, plain and packed, copied and read in place;
- rows: random rows, uniform and by Zipf's law, against plain rows that are read in place by as many
  multiprocessors, PyTorch's index_select on such memory, gathers on the CPU with a copy, and copies
  of single rows;
- interference: a large product that runs beside gathers.

The targets are printed at the end of `rows`: BF16 rows at 1.38 times the speed of plain rows that
are read in place, with 32 multiprocessors at most; sparse rows at the speed at which device memory
is written. The kernels of Invariant Bit Packing are not part of this project; a plain read of as
many bytes as it would read, by its published rules, is a bound that it cannot pass.

Rows are synthetic: normal values as embeddings have them, pixels, and bags of words. A table is
made of copies of some rows at many addresses. Arms run in turns; times are medians by the host's
clock, from the launch to the end on the GPU. Figures go to `benchmarks/results/gpu/`, or to --out,
with date, card, command, and the predictions of `packhorse.host.device_cost`. `--smoke` runs
everything on a tiny scale in Triton's interpreter, without a GPU; its times mean nothing.
"""

import argparse
import time
from pathlib import Path

from benchmarks.gpu import command
from benchmarks.gpu.device import run_parts

SHARES = {
    "views": 0.02,
    "check": 0.15,
    "link": 0.3,
    "decode": 0.4,
    "big": 0.55,
    "rows": 0.9,
    "interference": 1.0,
}
PARTS = tuple(SHARES)
BUDGET = 480.0  # seconds of a call


def main(argv: list[str]) -> int:
    """Run the parts that the command line asks for.

    Args:
        argv: the arguments after `host`.

    Returns:
        The exit status: 1 if a part failed or found wrong results, 3 without a GPU.
    """
    args = _parse(argv)
    if command.lacks_gpu(smoke=args.smoke):
        return 3
    from benchmarks.gpu import host_tables

    host_tables.GIB = args.gib
    args.prefix = "host-"
    args.facts = {"kind": "gpu host", "weights": f"synthetic tables of {args.gib} GiB"}
    parts = run_parts(args, time.monotonic(), "benchmarks.gpu.host_parts", SHARES)
    return 1 if any(isinstance(part, dict) for part in parts.values()) else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.py host", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--gib", type=float, default=4.0, help="of a plain table")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds that a call may take")
    parser.add_argument("--out", type=Path, help="folder of the figures, instead of the usual one")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; times mean nothing")
    args = parser.parse_args(argv)
    args.cache, args.again = None, False
    return args
