"""Start one process for each rank on its end of the links, and collect what they find.

A process runs one function, named "module:function", as `function(rank, world, group, options)`,
which returns a dict for JSON; `options["device"]` is the interface that connects the ranks. If a
rank fails or does not end in time, all are ended, and the error shows what the culprit wrote.
Processes also die with the one that started them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.wire.links import Links

__all__ = ["RankError", "launch"]

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.02
TAIL = 4000
JOB, RESULT, ERRORS = "job.json", "result-{}.json", "errors-{}.txt"


class RankError(RuntimeError):
    """A rank failed or did not end in time; the message names it and shows what it wrote."""


def launch(
    links: Links, function: str, options: Mapping[str, Any], *, world: int, timeout: float
) -> list[dict[str, Any]]:
    """Run a function on all ranks.

    Args:
        links: where the ranks are.
        function: "module:function".
        options: for the function; must be JSON.
        world: the number of ranks.
        timeout: seconds after which all ranks are ended.

    Returns:
        What the function returned on each rank.

    Raises:
        RankError: a rank failed, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="packhorse-wire-") as name, ExitStack() as stack:
        folder = Path(name)
        job = {"function": function, "options": dict(options), "world": world}
        job |= {"device": links.device, "timeout": timeout, "parent": os.getpid()}
        (folder / JOB).write_text(json.dumps(job))
        processes = [_start(links, folder, rank, stack) for rank in range(world)]
        _wait(processes, folder, timeout)
        return [json.loads((folder / RESULT.format(rank)).read_text()) for rank in range(world)]


def _start(links: Links, folder: Path, rank: int, stack: ExitStack) -> subprocess.Popen[bytes]:
    errors = stack.enter_context((folder / ERRORS.format(rank)).open("wb"))
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "GLOO_SOCKET_IFNAME": links.device,
        # Threads of PyTorch that wait spin, unless they are told not to; ranks share the cores.
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-m", "benchmarks.wire.one_rank", str(folder), str(rank)]
    process = subprocess.Popen(
        [*links.command(rank), *command], stdout=errors, stderr=errors, env=environment
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        failed = [rank for rank, state in enumerate(states) if state]
        if failed:
            culprit = _first(failed, folder)
            raise RankError(
                f"rank {culprit} ended with status {states[culprit]}:\n{_tail(folder, culprit)}"
            )
        running = [rank for rank, state in enumerate(states) if state is None]
        if not running:
            return
        if time.monotonic() > end:
            shown = _tail(folder, running[0])
            raise RankError(f"ranks {running} did not end in {timeout:.0f} s:\n{shown}")
        time.sleep(POLL_SECONDS)


def _first(failed: Sequence[int], folder: Path) -> int:
    """The rank that wrote its error first: others fail because it has gone."""
    return min(failed, key=lambda rank: (folder / ERRORS.format(rank)).stat().st_mtime)


def _tail(folder: Path, rank: int) -> str:
    return (folder / ERRORS.format(rank)).read_text(errors="replace")[-TAIL:]
