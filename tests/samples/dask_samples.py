"""Real Dask clusters for tests: of processes of this machine, some of which lack a package."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packhorse.storage.tasks import holding

__all__ = [
    "held", "kill", "killing_the_writer", "local_client", "other_site", "program", "started",
    "suicide", "wait_for", "with_worker",
]  # fmt: skip

MEMORY = 1 << 30  # the limit of a worker


@contextmanager
def local_client(folder: Path) -> Iterator[Any]:
    """A client of a cluster of two processes with two threads each."""
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, processes=True, dashboard_address="127.0.0.1:0",
            memory_limit=MEMORY, local_directory=str(folder), silence_logs=100,
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


# Processes that are started from the command line.


def other_site(folder: Path, without: str, version: str | None = None) -> Path:
    """A folder of packages: all that are installed here, but one of them missing, or with another
    version as far as its metadata say."""
    folder.mkdir()
    (installed,) = site.getsitepackages()
    for path in Path(installed).iterdir():
        if not path.name.startswith((f"{without}-", without if version is None else "\0")):
            (folder / path.name).symlink_to(path)
    if version is not None:
        about = folder / f"{without}-{version}.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(f"Name: {without}\nVersion: {version}\n")
    return folder


@contextmanager
def program(name: str, *args: object, packages: Path | None = None) -> Iterator[None]:
    """Run `dask scheduler` or `dask worker` for the time of the block."""
    path = [] if packages is None else [f"sys.path.insert(0, {str(packages)!r})"]
    text = "; ".join(
        ["import sys", *path, f"from distributed.cli.dask_{name} import main", "sys.exit(main())"]
    )
    words = [sys.executable, *(["-S"] if path else []), "-c", text, *map(str, args)]
    with subprocess.Popen(
        [*words, "--no-dashboard"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def started(folder: Path, packages: Path | None = None) -> Iterator[str]:
    """The address of a scheduler without workers, once it answers."""
    told = folder / "scheduler.json"
    args = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", told)
    with program("scheduler", *args, packages=packages):
        wait_for(lambda: told.exists() and told.read_text().rstrip().endswith("}"))
        yield json.loads(told.read_text())["address"]


@contextmanager
def with_worker(address: str, packages: Path | None = None) -> Iterator[None]:
    """Run a worker of a scheduler for the time of the block, once it has come."""
    import distributed

    with (
        program("worker", address, "--nthreads", 1, packages=packages),
        distributed.Client(address, set_as_default=False, timeout=60) as client,
    ):
        wait_for(client.nthreads)
        yield


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> Any:
    """Wait until a condition holds, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return value


# What happens to workers.


def kill(pid: int) -> None:
    """End a process at once."""
    os.kill(pid, signal.SIGKILL)


@contextmanager
def killing_the_writer(
    client: Any, folder: Path, killed: list[int] | None = None
) -> Iterator[list[int]]:
    """Kill the first worker that has a temporary file in a folder open, while the block runs.
    Yields a list that then has the number of its process."""
    wait_for(lambda: len(client.nthreads()) == 2)
    pids = list(client.run(os.getpid).values())
    killed = [] if killed is None else killed

    def writer() -> int:
        for pid in pids:
            for name in os.listdir(f"/proc/{pid}/fd"):
                target = ""
                with suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                is_temporary = ".packhorse-" in target or target.endswith("(deleted)")
                if target.startswith(f"{folder}/") and is_temporary:
                    return pid
        return 0

    def watch() -> None:
        pid = wait_for(writer)
        kill(pid)
        killed.append(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        thread.join()


# Work for tasks.


def suicide(task: str) -> str:
    """Kills its worker, if the task says so."""
    if task == "kill":
        kill(os.getpid())
    return task


def held(nbytes: int) -> tuple[int, float, float, int]:
    """Holds memory for a moment: the process, when it began and ended, and the threads it got."""
    with holding(nbytes) as threads:
        start = time.monotonic()
        time.sleep(0.2)
        return os.getpid(), start, time.monotonic(), threads
