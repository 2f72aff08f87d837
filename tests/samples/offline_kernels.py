"""Compiles kernels for GPUs, which needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compile_offline(program: str, cache: Path) -> list[dict[str, Any]]:
    """Runs a program that compiles kernels in another process, because Triton's interpreter is on
    in this one.

    Args:
        program: in Python; prints rows in JSON.
        cache: an empty folder for what is compiled.

    Returns:
        The rows.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
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
