"""Compiles kernels for GPUs, which needs none.

What is compiled is kept for later runs: Triton and `Compiler.compile_once` name each kernel by a
hash of its source and of all else that the code depends on. Programs of benchmarks are kept, too.

Triton's interpreter is on in the tests' process, so that programs that compile need others. These
are forked from one that has imported Triton, PyTorch and what compiles, once for all tests.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["KEPT_KERNELS", "KEPT_PROGRAMS", "compile_offline", "run_offline"]

ROOT = Path(__file__).resolve().parents[2]
KEPT_KERNELS, KEPT_PROGRAMS = ROOT / "build" / "test-kernels", ROOT / "build" / "test-programs"


def compile_offline(program: str) -> list[dict[str, Any]]:
    """Runs a program that compiles kernels.

    Args:
        program: in Python; prints rows in JSON.

    Returns:
        The rows.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        rows: list[dict[str, Any]] = json.loads(run_offline(path))
    return rows


def run_offline(program: Path, *words: object) -> str:
    """Runs a program in a process without the interpreter.

    Args:
        program: the file.
        words: its arguments.

    Returns:
        What it printed.

    Raises:
        RuntimeError: it failed; the message is what it wrote about that.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        job = {"argv": [str(program), *map(str, words)], "folder": folder}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        if not code:
            raise RuntimeError(
                "the process that forks compilers has ended; standard error says why"
            )
        if code != "0":
            errors = Path(folder, "errors").read_text()[-2000:]
            raise RuntimeError(f"{program} ended with {code}: {errors}")
        return Path(folder, "printed").read_text()


@cache
def _server() -> "subprocess.Popen[str]":
    chosen = (os.environ.get(name) for name in ("PACKHORSE_TRITON", "PYTHONPATH"))
    path = [*filter(None, chosen), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_CACHE_DIR": str(KEPT_KERNELS),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    server.communicate()  # it ends when nobody writes to it any more


def _serve() -> None:
    """Runs each job of the standard input in a process of its own, and prints its exit code."""
    import benchmarks.gpu.compilation
    import benchmarks.gpu.machine_code  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        if (child := os.fork()) == 0:
            _run(job["argv"], Path(job["folder"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(argv: Sequence[str], folder: Path) -> None:
    code = 1
    try:
        for number, name in ((1, "printed"), (2, "errors")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
        sys.argv = [*argv]
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
