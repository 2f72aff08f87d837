"""Measure weights in memory on the CPU: `python benchmarks/run.py weights`.

Each matrix of a data set is packed as W12 and as W11, checked, unpacked whole, and unpacked by
tiles into one small buffer, as in a linear layer. Every round trip is proved first. Then all
operations run in turn with plain copies by NumPy and PyTorch, round after round, on one core and by
its processor time. The best round counts, because only the machine makes these loops slower.

No figures are kept; those in docs/decisions.md, section 18, come from one such run.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.codecs.measure import cores, time_call
from benchmarks.common import machine
from benchmarks.common.process import code_path, restart
from benchmarks.data import sets

__all__ = ["MODE", "main"]

MODE = "weights"
DATA = ("llm_bf16", "model_bf16")
ROUNDS = 15
TILE_NBYTES = 1 << 18  # stays in L2
# GB/s of BF16 on one core, by operation.
TARGETS = {"pack": 1.0, "unpack": 5.0, "unpack by tiles": 5.0}

Matrix = NDArray[np.uint16]
Work = Callable[[Any], Any]


def main(argv: list[str]) -> int:
    """Measure and print.

    Args:
        argv: the arguments after the mode.

    Returns:
        The exit status: 1 if a target is missed.
    """
    parser = argparse.ArgumentParser(description="Measure weights in memory on the CPU.")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA, metavar="SET")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--simd", help="force a code path")
    args = parser.parse_args(argv)
    restart(recycle=True, simd=args.simd)
    print(f"{machine.describe()['cpu']}, {code_path()}, one core, best of {args.rounds} rounds")
    missed = False
    for name in args.data:
        missed |= _measure(name, args.rounds)
    return int(missed)


def _measure(name: str, rounds: int) -> bool:
    """Print the table of one data set; returns whether a target was missed."""
    matrices = [
        np.ascontiguousarray(tensor).view(np.uint16)
        for _, tensor in sets.make(name).tensors
        if tensor.ndim == 2
    ]
    nbytes = sum(matrix.nbytes for matrix in matrices)
    work, bits = _copies(matrices), {}
    for format in ("W12", "W11"):
        bits[format], more = _operations(matrices, format)
        work |= more
    best = dict.fromkeys(work, float("inf"))
    with cores(1):
        for _ in range(rounds):
            for what, call in work.items():
                best[what] = min(best[what], time_call(call, None)[1][0])
    print(f"\n{name}: {len(matrices)} matrices, {nbytes / 1e6:.0f} MB; bits a weight: {bits}\n")
    print("| operation | GB/s |\n|---|--:|")
    missed = False
    for what, seconds in best.items():
        target = TARGETS.get(what.partition(" ")[2], 0.0)
        missed |= nbytes / seconds / 1e9 < target
        verdict = f" (target {target:.0f})" if target else ""
        print(f"| {what} | {nbytes / seconds / 1e9:.2f}{verdict} |")
    return missed


def _copies(matrices: list[Matrix]) -> dict[str, Work]:
    import torch

    targets = [np.empty_like(matrix) for matrix in matrices]
    pairs = [
        (torch.from_numpy(target.view(np.int16)), torch.from_numpy(matrix.view(np.int16)))
        for target, matrix in zip(targets, matrices, strict=True)
    ]
    torch.set_num_threads(1)
    return {
        "np.copyto": lambda _: [np.copyto(t, m) for t, m in zip(targets, matrices, strict=True)],
        "Tensor.copy_": lambda _: [target.copy_(source) for target, source in pairs],
    }


def _operations(matrices: list[Matrix], name: str) -> tuple[float, dict[str, Work]]:
    """Prove the round trips; returns bits a weight, and the operations to time."""
    from packhorse.codecs import weights
    from packhorse.layout import WEIGHT_FORMATS

    format = WEIGHT_FORMATS[name]
    packed = [weights.pack(matrix, format) for matrix in matrices]
    targets = [np.empty_like(matrix) for matrix in matrices]

    def unpack(_: Any) -> None:
        for arrays, target in zip(packed, targets, strict=True):
            weights.unpack_into(arrays, format, target.shape[1], target)

    def unpack_tiles(_: Any) -> None:
        for arrays, target in zip(packed, targets, strict=True):
            n_rows, n_columns = target.shape
            step = max(1, TILE_NBYTES // (2 * n_columns))
            tile = np.empty((step, n_columns), np.uint16)
            for start in range(0, n_rows, step):
                stop = min(start + step, n_rows)
                part = tile[: stop - start]
                weights.unpack_into(arrays, format, n_columns, part, row_start=start, row_stop=stop)

    unpack(None)
    for matrix, target in zip(matrices, targets, strict=True):
        if not np.array_equal(matrix, target):
            raise RuntimeError(f"{name} does not restore a matrix bit for bit")
    nbytes = sum(arrays.nbytes for arrays in packed)
    return round(8 * nbytes / sum(matrix.size for matrix in matrices), 3), {
        f"{name} pack": lambda _: [weights.pack(matrix, format) for matrix in matrices],
        f"{name} count exceptions": lambda _: [
            weights.count_exceptions(matrix, format) for matrix in matrices
        ],
        f"{name} check": lambda _: [
            weights.check(arrays, format, matrix.shape[1])
            for arrays, matrix in zip(packed, matrices, strict=True)
        ],
        f"{name} unpack": unpack,
        f"{name} unpack by tiles": unpack_tiles,
    }
