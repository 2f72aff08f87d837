"""Compare whole calls of two installations: `python benchmarks/calls.py BEFORE AFTER`.

BEFORE and AFTER are interpreters that have Packhorse, such as `.venv/bin/python` of two checkouts.
In each round, each of them runs `compress_buffer` and `decompress_into` on the same synthetic
tensors in a new process, because the differences between processes are larger than the effects of
most changes. The command prints medians of processor time in GB/s, and the median over the rounds
of AFTER's speed over BEFORE's. It exits 1 if the two do not decode to the same bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys

ROUNDS = 8

CHILD = """
import json, sys, time
import ml_dtypes
import numpy as np
from packhorse.codecs.content import content_hash
from packhorse.frame import compress_buffer

n = int(sys.argv[1])
rng = np.random.default_rng(7)
f32 = (rng.standard_normal(n) * 0.02).astype(np.float32)
near = f32 + (rng.standard_normal(n) * 1e-5).astype(np.float32)
bf16 = f32.astype(ml_dtypes.bfloat16)
cases = {
    "bf16 default": (bf16, "BF16", {}),
    "bf16 fast": (bf16, "BF16", {"level": "fast"}),
    "fp32 default": (f32, "F32", {}),
    "fp32 fast": (f32, "F32", {"level": "fast"}),
    "bf16 of bf16": (near.astype(ml_dtypes.bfloat16), "BF16", {"base": bf16}),
    "bf16 of fp32": (bf16, "BF16", {"base": near, "base_dtype": "F32"}),
    "ids": (np.sort(rng.integers(0, 1 << 20, n)), "I64", {}),
    "noise": (rng.integers(0, 256, 4 * n, np.uint8), "U8", {}),
}
view = lambda data: data.view(np.uint8)
found = {}
for name, (data, dtype, options) in cases.items():
    options = {k: view(v) if k == "base" else v for k, v in options.items()}
    source, back = view(data), np.zeros(data.nbytes, np.uint8)
    times = []
    for _ in range(3):
        begun = time.process_time()
        frame = compress_buffer(source, dtype, data.shape, threads=1, **options)
        packed = time.process_time()
        base = options.get("base") if frame.base_hash else None
        frame.decompress_into(back, threads=1, base=base)
        times.append((packed - begun, time.process_time() - packed))
    encode, decode = map(min, zip(*times))
    found[name] = [source.nbytes / encode / 1e9, source.nbytes / decode / 1e9,
                   content_hash(back).hex()]
print(json.dumps(found))
"""


def main(argv: list[str]) -> int:
    """Measure and print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if the decoded bytes differ.
    """
    parser = argparse.ArgumentParser(description="Whole calls of two installations, in turn.")
    parser.add_argument("before", help="a Python that has packhorse")
    parser.add_argument("after", help="another one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--elements", type=int, default=1 << 22, metavar="N", help="of each tensor")
    args = parser.parse_args(argv)
    pythons = [args.before, args.after]
    rounds = [[_run(python, args.elements) for python in pythons] for _ in range(args.rounds)]
    for name in rounds[0][0]:
        for i, what in enumerate(("encode", "decode")):
            print(
                f"{name}, {what}: {_compare([[run[name][i] for run in pair] for pair in rounds])}"
            )
    hashes = [{name: run[name][2] for name in run} for pair in rounds for run in pair]
    return int(any(found != hashes[0] for found in hashes))


def _run(python: str, n_elements: int) -> dict[str, list]:
    command = [python, "-c", CHILD, str(n_elements)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list] = json.loads(done.stdout)
    return found


def _compare(pairs: list[list[float]]) -> str:
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    change = statistics.median(pair[1] / pair[0] for pair in pairs) - 1
    return f"{before:.2f} and {after:.2f} GB/s, {change:+.1%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
