"""Exports and imports that are killed: what they left is whole or absent, and can be taken up."""

from pathlib import Path

import numpy as np
import pytest
from disk_samples import leftovers
from exchange_child import exchange
from exchange_samples import same
from forked import fork_context

from packhorse.disk import Shelf
from packhorse.storage.atomic import is_temporary

FORMATS = ["zarr", "npy", "safetensors"]


def kill(shelf: Path, verb: str, path: Path, stop: int, *, resume: bool = False) -> None:
    """Run a verb in another process, and kill that when it has got through some blocks."""
    here, words = fork_context().Event(), (shelf, verb, path, stop)
    child = fork_context().Process(target=exchange, args=(*words, here), kwargs={"resume": resume})
    child.start()
    assert here.wait(60)
    child.kill()
    child.join()
    assert child.exitcode == -9


def make(path: Path) -> dict[str, np.ndarray]:
    """A shelf of tensors of several blocks, or of less than one."""
    rng = np.random.default_rng(0)
    wanted = {f"t{i}": rng.standard_normal((40 * i, 50_000)).astype(np.float32) for i in range(4)}
    with Shelf(path) as shelf, shelf.transaction():
        for name, array in wanted.items():
            shelf[name] = array
    return wanted


@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_export(format: str, tmp_path: Path) -> None:
    wanted = make(tmp_path / "a.shelf")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / f"x.{format}"
    kill(tmp_path / "a.shelf", f"export_{format}", target, 3)
    assert all(is_temporary(name) for name in leftovers(tmp_path / "out"))
    with Shelf(tmp_path / "a.shelf") as shelf, Shelf(tmp_path / "b.shelf") as other:
        getattr(shelf, f"export_{format}")(target)
        getattr(other, f"import_{format}")(*("", target) if format == "npy" else (target,))
        assert same(other, wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_import(format: str, tmp_path: Path) -> None:
    wanted = make(tmp_path / "a.shelf")
    target = tmp_path / f"x.{format}"
    places = ("in", target) if format == "npy" else (target,)
    names = {f"in/{name}" if format == "npy" else name: name for name in wanted}
    with Shelf(tmp_path / "a.shelf") as shelf:
        getattr(shelf, f"export_{format}")(target)
    kill(tmp_path / "b.shelf", f"import_{format}", target, 5)
    with Shelf(tmp_path / "b.shelf") as shelf:
        assert list(shelf) == []
        assert shelf.verify() == []
    kill(tmp_path / "b.shelf", f"import_{format}", target, 5, resume=True)
    with Shelf(tmp_path / "b.shelf") as shelf:
        there = list(shelf)
        assert 0 < len(there) < len(wanted)
        assert same(shelf, {name: wanted[names[name]] for name in there})
        n_commits = shelf.info().n_commits
        getattr(shelf, f"import_{format}")(*places, resume=True)
        assert shelf.info().n_commits == n_commits + len(wanted) - len(there)
        assert same({names[name]: shelf[name] for name in shelf}, wanted)
