"""Measure the cost of files with very many tiny tensors: `python benchmarks/tiny_tensors.py`.

A file of 100,000 tensors of 256 bytes is packed, verified, unpacked, loaded and taken as a
snapshot, each in fresh processes in turn, which may open `LIMIT_FILES` files. The command prints
the medians of wall and processor time, imports not counted, the peak of memory above that of
a process that only imports the package, and the most files that were open, by samples. It exits 1
if a verb fails, or if the file is not restored byte for byte.

`--python` measures another installation on the same files.
"""

import argparse
import filecmp
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

LIMIT_FILES = 64
SEED = 20240607

# VmHWM belongs to the program that runs now; ru_maxrss would carry over the peak of the process
# that forked it.
CHILD = """
import os, resource, sys, time
from packhorse.disk import SnapshotStore, pack_file, unpack_file, verify_file
from packhorse.numpy import load_file
verb, limit, source, packed, back, store = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
n_calls, n_open = 0, [0]

def look(nbytes=0):
    global n_calls
    n_calls += 1
    if n_calls % 1000 == 1:
        n_open.append(len(os.listdir("/proc/self/fd")) - 1)

def take():
    with SnapshotStore(f"{store}-{time.time_ns()}", threads=1) as opened:
        opened.take_files("tiny", [source], progress=look)

how = {"threads": 1}
work = {
    "idle": lambda: None,
    "pack": lambda: pack_file(source, packed, force=True, progress=look, **how),
    "verify": lambda: verify_file(packed, progress=look, **how),
    "unpack": lambda: unpack_file(packed, back, force=True, progress=look, **how),
    "load": lambda: load_file(packed, **how),
    "take": take,
}[verb]
wall, own = time.perf_counter(), time.process_time()
problems = work()
wall, own = time.perf_counter() - wall, time.process_time() - own
if verb == "verify" and problems:
    sys.exit(str(problems[0]))
status = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
print(wall, own, peak, max(n_open))
"""
VERBS = ("pack", "verify", "unpack", "load", "take")


class Figure(NamedTuple):
    """The time and memory that a verb took.

    Attributes:
        wall_s: seconds by the wall clock.
        own_s: seconds of the processor.
        peak_nbytes: the largest resident memory of the process.
        n_open: the most files that were open, including the three standard streams.
    """

    wall_s: float
    own_s: float
    peak_nbytes: float
    n_open: float


def main(argv: list[str]) -> int:
    """Make the file, measure, print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if the file is not restored.
    """
    args = _parse(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        paths = [f"{folder}/{name}" for name in ("a.safetensors", "b", "c", "store")]
        _write(paths[0], args.tensors, args.nbytes)
        found: dict[str, list[Figure]] = {verb: [] for verb in ("idle", *VERBS)}
        for _ in range(args.rounds):
            for verb, figures in found.items():
                figures.append(_run(args.python, verb, paths))
        is_exact = filecmp.cmp(paths[0], paths[2], shallow=False)
        sizes = [Path(path).stat().st_size for path in paths[:2]]
    print(f"{args.tensors:,} tensors of {args.nbytes} bytes: {sizes[0]:,} to {sizes[1]:,} bytes")
    idle = _median(found.pop("idle"))
    for verb, figures in found.items():
        _print(verb, _median(figures), idle, args.tensors)
    if not is_exact:
        print("the file is not restored byte for byte")
    return int(not is_exact)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of very many tiny tensors.")
    parser.add_argument("--tensors", type=int, default=100_000, metavar="N")
    parser.add_argument("--nbytes", type=int, default=256, metavar="N", help="of each, of float32")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the files are made")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="that has packhorse"
    )
    return parser.parse_args(argv)


def _write(path: str, n_tensors: int, nbytes: int) -> None:
    values = np.random.default_rng(SEED).standard_normal((n_tensors, nbytes // 4), np.float32)
    save_file({f"layers.{i}.scale": row for i, row in enumerate(values)}, path)


def _run(python: str, verb: str, paths: list[str]) -> Figure:
    command = [python, "-c", CHILD, verb, str(LIMIT_FILES), *paths]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figure(*map(float, done.stdout.split()))


def _median(figures: list[Figure]) -> Figure:
    return Figure(*map(statistics.median, zip(*figures, strict=True)))


def _print(verb: str, figure: Figure, idle: Figure, n_tensors: int) -> None:
    n_open = f", {figure.n_open:.0f} files open" if figure.n_open else ""
    print(
        f"{verb}: {figure.wall_s:.1f} s, {figure.own_s:.1f} s of the processor, "
        f"{figure.own_s / n_tensors * 1e6:.0f} microseconds a tensor, "
        f"{(figure.peak_nbytes - idle.peak_nbytes) / 1e6:.0f} MB{n_open}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
