"""Real process groups for the tests of the wire: each job gets new processes over gloo.

The processes are forked from a server that has imported PyTorch already, so a job starts in a tenth
of a second, and may kill its own process. A job is the full name of a function, `module:function`,
which gets the arguments of the test; the process group is set up when it runs.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from forked import fork_context


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        value: what its job returned; None if it failed.
        error: type and message of its error, such as `PeerError: rank 1 ...`; empty if there was
            none.
        exit_code: of the process; -9 if it was killed, None if it had to be killed by the test.
        seconds: how long the job took.
    """

    value: Any
    error: str
    exit_code: int | None
    seconds: float


def run_ranks(
    size: int,
    job: Callable[..., Any],
    *args: Any,
    store: Path,
    group_timeout: float = 60,
    limit: float = 60,
) -> list[Outcome]:
    """Runs a job on some ranks.

    Args:
        size: how many.
        job: a function of an importable module.
        args: its arguments.
        store: a path of a file that does not exist, through which the ranks find each other. If it
            ends in ".tcp", the file only holds the port of a TCP store, which rank 0 serves.
        group_timeout: of the process group, in seconds.
        limit: after so many seconds all ranks are killed.
    """
    context = fork_context()
    pipes, processes = [], []
    name = f"{job.__module__}:{job.__qualname__}"
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(theirs, rank, size, str(store), group_timeout, name, args)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = _collect(pipes, limit)
    for process in processes:
        process.join(5)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [Outcome(*found[rank][:2], codes[rank], found[rank][2]) for rank in range(size)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; an error of any is an `AssertionError`."""
    failed = [f"rank {i}: {one.error}" for i, one in enumerate(outcomes) if one.exit_code != 0]
    failed += [f"rank {i}: {one.error}" for i, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    return [one.value for one in outcomes]


def _collect(pipes: list[Connection], limit: float) -> dict[int, tuple[Any, str, float]]:
    found = {rank: (None, "", 0.0) for rank in range(len(pipes))}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + limit
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), timeout=1):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:  # the process was killed
                continue
    return found


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    group_timeout: float,
    name: str,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group(
        "gloo",
        store=_tcp_store(Path(store), rank)
        if store.endswith(".tcp")
        else dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=group_timeout),
    )
    module, _, function = name.partition(":")
    start = time.monotonic()
    try:
        value, error = getattr(import_module(module), function)(*args), ""
    except Exception as caught:
        value, error = None, f"{type(caught).__name__}: {caught}"
    pipe.send((value, error, time.monotonic() - start))
    pipe.close()
    if error:  # a group with a failed transfer cannot always be destroyed
        os._exit(0)
    dist.destroy_process_group()


def _tcp_store(path: Path, rank: int) -> Any:
    """A TCP store that rank 0 serves on a free port."""
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()))
