"""A Dask cluster: connecting to it, and refusing one that could not do the work.

`dask.distributed` is imported at first use. Everything that can be wrong with a cluster is found
before any task is sent: a scheduler that does not answer or has another version of Dask, no
workers, workers without Packhorse or with another version of it, and workers that do not see a path
of this machine. Each is one error that names the workers.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packhorse._version import __version__
from packhorse.arguments import n_cores
from packhorse.errors import MissingBackendError
from packhorse.late_import import import_late

__all__ = [
    "LOCAL",
    "check_cluster",
    "connected",
    "dask",
    "gone",
    "names_of",
    "quieten",
    "reaching_scheduler",
]

LOCAL = "local"  # in the place of an address: a cluster of processes of this machine
_PATIENCE_S = 10  # for a scheduler to answer, and for a first worker
_LOGGERS = "distributed"
_CRITICAL = 50  # a level of logging
_N_NAMED = 3  # workers or paths in a message


def dask() -> Any:
    """The package `distributed`.

    Raises:
        MissingBackendError: it is not installed.
    """
    try:
        return import_late("distributed")
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            "a cluster needs dask.distributed; install it with: pip install 'packhorse[dask]'"
        ) from error


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of a cluster, for the time of the block.

    Args:
        address: the address of a scheduler, such as `tcp://10.0.0.1:8786`; or `local`, for a new
            cluster of this machine, with a process for each core, which ends with the block.

    Yields:
        A `distributed.Client`.

    Raises:
        MissingBackendError: dask.distributed is not installed, or the scheduler has another
            version of it.
        TimeoutError: no scheduler answers within ten seconds.
        ValueError: it is not an address.
    """
    library = dask()
    if address == LOCAL:
        with _local_cluster(library) as cluster, _client(library, cluster) as client:
            client.run(_ignore_interrupts)
            yield client
    else:
        _ask_scheduler(library, address)
        with _client(library, address) as client:
            yield client


def quieten() -> None:
    """Keep what Dask logs off standard error from now on, for programs whose every line is their
    own: what matters is raised. A client can log even after it was closed."""
    dask()
    logging: Any = import_late("logging")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
        logging.getLogger(name).setLevel(_CRITICAL + 1)  # each has a handler of its own


class _Gone(OSError):
    """A part of the cluster is gone."""


def gone(what: str) -> OSError:
    """The error for a part of the cluster that is gone.

    Args:
        what: the part, in words.
    """
    return _Gone(
        f"{what} of the cluster is gone; finished output was kept: start it again, and repeat the "
        "command, which goes on with what is missing"
    )


@contextmanager
def reaching_scheduler() -> Iterator[None]:
    """Word the error of a connection to the scheduler that breaks.

    Raises:
        OSError: it broke. A time-out of another kind passes.
    """
    try:
        yield
    except (_Gone, TimeoutError):
        raise
    except OSError as error:
        raise gone("the scheduler") from error


def _local_cluster(library: Any) -> Any:
    return library.LocalCluster(
        n_workers=n_cores(),
        threads_per_worker=1,
        processes=True,
        dashboard_address="127.0.0.1:0",
        silence_logs=_CRITICAL,
    )


def _ignore_interrupts() -> None:
    """Ctrl-C in a terminal reaches all processes, but the command tells workers what to do then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _client(library: Any, address: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check_cluster` words what matters
        return library.Client(address, timeout=_PATIENCE_S, set_as_default=False)


def _ask_scheduler(library: Any, address: str) -> None:
    """Ask a scheduler for its version, before a client is made, which would fail in many ways.

    Raises:
        TimeoutError: it does not answer.
        ValueError: it is not an address.
        MissingBackendError: its version is another one.
    """
    try:
        # In a thread, because this one may have a loop that runs, as in a notebook.
        with ThreadPoolExecutor(1) as pool:
            about = pool.submit(import_late("asyncio").run, _versions_at(library, address)).result()
    except ValueError as error:
        raise ValueError(
            f"{address}: not the address of a scheduler ({error}); name it as in "
            "tcp://10.0.0.1:8786"
        ) from error
    except Exception as error:  # a time-out, or whatever another server's answer leads to
        raise TimeoutError(
            f"{address}: no scheduler of Dask answers within {_PATIENCE_S} seconds; check the "
            "address, and that `dask scheduler` runs there"
        ) from error
    _check_dask(f"{address}: the scheduler", about, library.__version__)


async def _versions_at(library: Any, address: str) -> Any:
    arguments = library.Security().get_connection_args("client")
    timeout = import_late("asyncio").timeout(_PATIENCE_S)
    async with timeout, library.rpc(address, connection_args=arguments) as scheduler:
        return await scheduler.versions(packages=[])


def check_cluster(client: Any, paths: Sequence[Path] = ()) -> None:
    """Refuse a cluster that could not do the work.

    Args:
        client: a `distributed.Client`.
        paths: paths of this machine that every worker must see.

    Raises:
        MissingBackendError: a worker has another version of Dask, or no Packhorse or another
            version of it.
        FileNotFoundError: a worker does not see one of the paths.
        OSError: there are no workers.
        TypeError: the client is asynchronous.
    """
    if client.asynchronous:
        raise TypeError(
            "the client is asynchronous, but this call waits; make a client without asynchronous="
        )
    address = client.scheduler.address if client.scheduler else "the scheduler"
    try:
        with reaching_scheduler():
            client.wait_for_workers(1, timeout=_PATIENCE_S)
    except TimeoutError as error:
        raise OSError(
            f"{address}: it has no workers; start some with: dask worker {address}"
        ) from error
    with reaching_scheduler():
        found = _versions(client)
    for name, about in found["workers"].items():
        _check_dask(f"the worker {name}", about, dask().__version__)
    _check_packhorse(found["workers"])
    if paths:
        _check_paths(client, [str(path) for path in paths])


def _versions(client: Any) -> Any:
    """What the scheduler and all workers have; a worker that has just come may not answer yet."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        found = client.get_versions(packages=["packhorse"])
        silent = client.nthreads().keys() - found["workers"].keys()
        if not silent:
            return found
        if time.monotonic() > end:
            raise gone(names_of(sorted(silent), "workers"))


def _check_dask(name: str, about: Mapping[str, Any], ours: str) -> None:
    version = about["packages"]["distributed"]
    if version != ours:
        raise MissingBackendError(
            f"{name} runs dask.distributed {version}, but this machine has {ours}; install the "
            "same version everywhere"
        )


def _check_packhorse(workers: Mapping[str, Any]) -> None:
    versions = {name: about["packages"].get("packhorse") for name, about in workers.items()}
    for version in sorted({v for v in versions.values() if v != __version__}, key=str):
        names = [name for name, found in versions.items() if found == version]
        has = "do not have Packhorse" if version is None else f"have Packhorse {version}"
        raise MissingBackendError(
            f"{names_of(names, 'workers')} {has}, but this machine has {__version__}; install the "
            "same version on all of them"
        )


def _check_paths(client: Any, paths: list[str]) -> None:
    with reaching_scheduler():
        unseen = client.run(_unseen, paths)
    blind = {name: missing for name, missing in unseen.items() if missing}
    if blind:
        missing = next(iter(blind.values()))
        raise FileNotFoundError(
            f"{names_of(missing, 'paths')}: exists here, but not for the "
            f"{names_of(list(blind), 'workers')}; use a file system that all machines share, or "
            "URLs"
        )


def _unseen(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


def names_of(names: Sequence[str], what: str) -> str:
    """Some names in words: `workers a, b and 7 more`; a single one alone."""
    shown = ", ".join(names[:_N_NAMED])
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return f"{what} {shown}{more}"
