"""Ranks of `benchmarks.wire` as processes that need not import PyTorch: they are forked.

What a rank runs is the same; only how it starts differs from `ranks.launch` as it is, which
`test_wire_links.py` tests."""

import gc
import os
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import fork_context

__all__ = ["fork_ranks"]


class _Rank:
    """A process with the methods of `subprocess.Popen` that a launch needs."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def fork_ranks(patch: pytest.MonkeyPatch, ranks: ModuleType) -> None:
    """Lets `launch` of a module `benchmarks.wire.ranks` fork its ranks on the loopback."""

    def start(links: Any, folder: Path, rank: int, stack: ExitStack) -> _Rank:
        assert not links.command(rank), "a forked process stays in the namespace of the tests"
        errors = folder / ranks.ERRORS.format(rank)
        errors.touch()
        process = fork_context().Process(target=_run, args=(folder, rank, errors, links.device))
        process.start()
        started = _Rank(process)
        stack.callback(ranks._end, started)
        return started

    patch.setattr(ranks, "_start", start)


def _run(folder: Path, rank: int, errors: Path, device: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = device
    with errors.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    from benchmarks.wire import one_rank

    one_rank._die_with = lambda parent: None  # the parent of a forked process is the server
    gc.freeze()  # rounds collect garbage, and need not look at all that the server has imported
    one_rank.main(folder, rank)
