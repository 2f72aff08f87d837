"""Compiles kernels for GPUs, which needs none.

What is compiled is kept for later runs: Triton and `Compiler.compile_once` name each kernel by a
hash of its source and of all else that the code depends on. Programs of benchmarks are kept, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_BUILD = Path(__file__).resolve().parents[2] / "build"
KEPT_KERNELS, KEPT_PROGRAMS = _BUILD / "test-kernels", _BUILD / "test-programs"


def compile_offline(program: str) -> list[dict[str, Any]]:
    """Runs a program that compiles kernels in another process, because Triton's interpreter is on
    in this one.

    Args:
        program: in Python; prints rows in JSON.

    Returns:
        The rows.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(KEPT_KERNELS), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows
