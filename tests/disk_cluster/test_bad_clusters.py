"""Clusters that cannot do the work: each is one error that names the culprit, before any work."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_samples import Ended
from dask_samples import other_site, started, with_worker

from packhorse.errors import MissingBackendError
from packhorse.storage import cluster as clusters
from packhorse.storage.cluster import check_cluster, connected

# A client of Dask warns of other versions.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatched versions found")

Run = Callable[..., Ended]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(clusters, "_PATIENCE_S", 1)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler, started from the command line."""
    pytest.importorskip("distributed")
    with started(tmp_path_factory.mktemp("dask")) as found:
        yield found


def refused(run: Run, model: Path, scheduler: str) -> Ended:
    """The end of a run that must leave nothing."""
    before = sorted(os.listdir(model.parent))
    done = run("pack", model, "--scheduler", scheduler)
    assert sorted(os.listdir(model.parent)) == before
    return done


def test_no_scheduler(quick: None, model: Path, run: Run):
    done = refused(run, model, "tcp://127.0.0.1:1")
    assert (done.code, done.error) == (
        3,
        "tcp://127.0.0.1:1: no scheduler of Dask answers within 1 seconds; check the address, and "
        "that `dask scheduler` runs there",
    )
    done = refused(run, model, "nonsense")
    assert (done.code, done.error.startswith("nonsense: not the address of a sched")) == (2, True)


def test_no_workers(quick: None, address: str, model: Path, run: Run):
    done = refused(run, model, address)
    assert done.code == 3
    assert done.error == f"{address}: it has no workers; start some with: dask worker {address}"


@pytest.mark.parametrize("version", [None, "9.9.9"])
def test_workers_with_another_packhorse(
    address: str, model: Path, tmp_path: Path, run: Run, version: str | None
):
    packages = other_site(tmp_path / "site", "packhorse", version)
    with with_worker(address, packages):
        done = refused(run, model, address)
    has = "do not have Packhorse" if version is None else "have Packhorse 9.9.9"
    assert done.code == 4, done.err
    assert done.error.startswith("workers tcp://")
    assert f" {has}, but this machine has 0." in done.error


def test_a_worker_that_does_not_see_a_path(address: str, model: Path, tmp_path: Path, run: Run):
    folder = os.open(tmp_path, os.O_RDONLY)
    with ExitStack() as stack:
        stack.callback(os.close, folder)
        stack.enter_context(with_worker(address))
        with connected(address) as client:
            check_cluster(client, [model])
        own = Path(f"/proc/self/fd/{folder}") / model.name  # means something here alone
        done = run("pack", own, "--scheduler", address)
        assert done.code == 3
        assert done.error.startswith(f"paths {own}")
        assert "exists here, but not for the workers tcp://" in done.error
        assert not (tmp_path / "model.ph.safetensors").exists()


def test_a_scheduler_of_another_version(model: Path, tmp_path: Path, run: Run):
    packages = other_site(tmp_path / "site", "distributed", "2020.1.0")
    with started(tmp_path, packages) as address, with_worker(address):
        done = refused(run, model, address)
    assert done.code == 4, done.err
    assert done.error.startswith(
        f"{address}: the scheduler runs dask.distributed 2020.1.0, but this machine has "
    )


def test_dask_is_not_installed(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = refused(run, model, "local")
    assert done.code == 4, done.err
    assert done.error.endswith("install it with: pip install 'packhorse[dask]'")
    with pytest.raises(MissingBackendError), connected("tcp://127.0.0.1:1"):
        pass
