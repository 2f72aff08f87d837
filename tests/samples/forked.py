"""Processes that are forked from a server which has imported what this process has.

Each test process starts one such server, when a test first asks for it, and all tests share it. A
list of modules for each test would not do: the first one starts the server, with its list alone.
The server imports what tests need that is slow to import, as far as this process has imported it,
so that the tests of one file wait only for what that file needs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

__all__ = ["fork_context", "run_forked", "run_many_forked", "run_program"]

# Only NumPy starts threads when it is imported: those of its algebra, which are made for forks.
_PRELOADED = (
    "numpy", "packhorse.disk", "torch", "torch.distributed.fsdp", "packhorse.disk.dcp",
    "packhorse.wire.exchange", "packhorse.wire.embeddings", "torchrec", "packhorse.torchrec",
    "killed_writer", "shelf_workload", "snapshot_child", "dcp_ranks", "wire_ranks",
    "wire_jobs", "wire_device_jobs", "wire_exchange_jobs", "wire_fault_jobs", "wire_training",
    "embedding_jobs", "torchrec_jobs", "update_ranks",
)  # fmt: skip


def fork_context() -> ForkServerContext:
    """The context of such processes. Its server runs when this function returns."""
    context = multiprocessing.get_context("forkserver")
    names = [name for name in _PRELOADED if name in sys.modules]
    if "torch" in names:
        names.append("torch._dynamo")  # the first optimizer of a process imports it
    context.set_forkserver_preload(names)
    # Up to Python 3.13 at least, a server does not get `sys.path`: it would not find the samples.
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = here if before is None else os.pathsep.join((here, before))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def run_forked(program: Path, output: Path, *words: object) -> int:
    """Runs a program of one thread without the time that its imports take.

    The processes that it starts by `torch.multiprocessing.spawn` are forked too.

    Args:
        program: the file.
        output: gets what the program prints.
        words: its arguments.

    Returns:
        The exit code.
    """
    (code,) = run_many_forked(program, [output], [words])
    return code


def run_many_forked(
    program: Path, outputs: Sequence[Path], words: Sequence[Sequence[object]]
) -> list[int]:
    """The same for several processes at once, which may wait for each other.

    Args:
        program: the file.
        outputs: gets what each process prints.
        words: the arguments of each.

    Returns:
        The exit codes.
    """
    context, deadline = fork_context(), time.monotonic() + 120
    processes = [
        context.Process(target=run_program, args=(program, output, [*map(str, some)]))
        for output, some in zip(outputs, words, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = []
    for process in processes:
        process.kill()  # if it still runs
        process.join()
        assert process.exitcode is not None
        codes.append(process.exitcode)
    return codes


def run_program(program: Path, output: Path, words: list[str]) -> None:
    """Runs a program in this process, which is one of `fork_context`.

    Args:
        program: the file.
        output: gets what the program prints.
        words: its arguments.
    """
    import torch.multiprocessing

    gc.freeze()  # the garbage collector need not look at what the server has imported
    torch.set_num_threads(1)
    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    sys.argv = [str(program), *words]
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
    with open(1, "w", closefd=False) as sys.stdout:
        runpy.run_path(str(program), run_name="__main__")
