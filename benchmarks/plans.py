"""Measure the host's work before kernels decode frames: `python benchmarks/plans.py`.

Weights of BF16 and FP32 are planned in windows of 64 chunks, as they are uploaded. Speeds are GB/s
of decoded elements. Each thread plans windows of its own, so a planner that holds Python's lock
is no faster with two threads than with one.

    python benchmarks/plans.py --python OLD/bin/python NEW/bin/python

compares builds: each runs in a separate process, in turn, and its best round counts. Older builds
planned in NumPy, and are measured with their module for that.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

__all__ = ["main", "measure"]

WINDOW_NBYTES = 1 << 24  # as packhorse.gpu.uploads has it
N_WINDOWS = 8
SECONDS = 1.0  # the time of a measurement
KINDS = ("BF16", "F32")
Plan = Callable[[int], object]


def main(argv: list[str]) -> int:
    """Runs what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(description="Measure plans of frames for GPUs.")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--once", action="store_true", help="in this process; prints JSON")
    args = parser.parse_args(argv)
    if args.once:
        print(json.dumps(measure(args.threads)))
        return 0
    best: dict[str, dict[str, float]] = {python: {} for python in args.python}
    for _ in range(args.rounds):
        for python, found in best.items():
            for name, speed in _run(python, args.threads).items():
                found[name] = max(found.get(name, 0.0), speed)
    for python, found in best.items():
        figures = "; ".join(f"{name} {speed:.1f} GB/s" for name, speed in found.items())
        print(f"{python}: {figures}")
    return 0


def _run(python: str, threads: list[int]) -> dict[str, float]:
    command = [python, __file__, "--once", "--threads", *map(str, threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(
    threads: list[int], seconds: float = SECONDS, n_windows: int = N_WINDOWS
) -> dict[str, float]:
    """GB/s of elements planned, by dtype and number of threads.

    Args:
        threads: numbers of them.
        seconds: the least time of each measurement.
        n_windows: different ones.
    """
    found = {}
    for kind in KINDS:
        plan = _planner_of(kind, n_windows)
        plan(0)
        for n in threads:
            found[f"{kind} with {n} threads"] = _speed(plan, n, seconds)
    return found


def _planner_of(kind: str, n_windows: int) -> Plan:
    """Returns a function that plans the window with a given number."""
    from packhorse.frame import compress_buffer

    n_units = n_windows * WINDOW_NBYTES // (2 if kind == "BF16" else 4)
    frame = compress_buffer(_weights(kind, n_units), kind, (n_units,))
    buffer = np.frombuffer(frame.to_bytes(), np.uint8)
    header = frame.header
    unit = header.dtype.unit_nbytes
    step = WINDOW_NBYTES // (unit << header.chunk_log)
    offsets = header.chunk_offsets()
    plans = _import_first("packhorse.gpu.plans", "packhorse.kernels.streams")
    geometry = _geometry(plans, unit, header)

    def plan(number: int) -> object:
        first = number % n_windows * step
        payload = buffer[offsets[first] : offsets[first + step]]
        return plans.plan_chunks(payload, header.table[first : first + step], geometry)

    return plan


def _geometry(plans: Any, unit_nbytes: int, header: Any) -> Any:
    """How a window is cut, as the planner of this installation wants it."""
    from packhorse import _core

    if hasattr(_core, "Geometry"):
        return _core.Geometry(unit_nbytes, int(header.split), header.chunk_log, WINDOW_NBYTES)
    n_units = WINDOW_NBYTES // unit_nbytes
    return plans.Geometry(n_units, unit_nbytes, header.split, header.chunk_log)


def _import_first(now: str, before: str) -> Any:
    """Import a module by its present name, or by the one that it had in older installations."""
    try:
        return import_module(now)
    except ModuleNotFoundError:
        return import_module(before)


def _weights(kind: str, n: int) -> Any:
    values = 0.02 * np.random.default_rng(20240607).standard_normal(n, np.float32)
    if kind == "F32":
        return values.view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _speed(plan: Plan, threads: int, seconds: float) -> float:
    def work(_: int) -> int:
        ends, n = time.perf_counter() + seconds, 0
        while time.perf_counter() < ends:
            plan(n)
            n += 1
        return n

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        n = sum(pool.map(work, range(threads)))
        return n * WINDOW_NBYTES / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
