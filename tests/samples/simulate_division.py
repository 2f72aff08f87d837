"""Compiles one division of a product for Hopper and simulates it; prints what was found as JSON.
Run in a process of its own, where Triton's interpreter is off."""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import issue
from benchmarks.gpu.simulations import compile_division, simulate
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import W12

CONFIG = MatmulConfig(32, 8, 64, 4, 1, 4, 1)


def main() -> None:
    """Prints the operations of the kernel, its loops, and simulated seconds of 4096 x 4096."""
    compiled = compile_division(W12, CONFIG)
    start, end = issue.main_loop(compiled.code)
    found = {
        "operations": [x.operation for x in compiled.code.instructions],
        "loop": [start, end],
        "registers": compiled.registers,
        "seconds": simulate(4096, 4096, 8, W12, CONFIG).seconds,
        "early": simulate(4096, 4096, 8, W12, CONFIG, early=True).seconds,
        "fewer_tokens": simulate(4096, 4096, 1, W12, CONFIG).seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
