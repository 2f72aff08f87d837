"""The single writer: its lock or lease is taken away at the worst moments."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots import lock

fsspec = pytest.importorskip("fsspec")
STATE = {"w": np.random.default_rng(0).standard_normal(5000)}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder in memory."""
    fs = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    fs.rm(f"/{tmp_path.name}", recursive=True)


def before(target: Any, name: str, action: Callable[[], None], *, match: str = "") -> None:
    """Do something once, before the first call of a method with an argument that contains a
    word."""
    real = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if match in str(args):
            setattr(target, name, real)
            action()
        return real(*args, **kwargs)

    setattr(target, name, call)


def take_over(url: str, monkeypatch: pytest.MonkeyPatch, name: str, state: Any) -> None:
    """Another writer that finds the lease expired, as if this writer had not run for minutes."""
    monkeypatch.setattr(lock, "void_after_s", 0.0)
    monkeypatch.setattr(lock, "settle_s", 0.0)
    SnapshotStore(url).take(name, state)
    monkeypatch.setattr(lock, "void_after_s", 600.0)


def test_a_pack_that_another_writer_removed_is_not_committed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(url)
    store.take("a", {})
    before(
        store._storage, "put", lambda: take_over(url, monkeypatch, "other", {}), match="snapshots/b"
    )
    with pytest.raises(BlockingIOError, match="nothing was committed"):
        store.take("b", STATE)
    reader = SnapshotStore(url)
    assert reader.names() == ["a", "other"]
    assert reader.verify() == []


def test_packs_of_another_writer_are_not_leftovers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(url)
    store.take("a", {"v": np.arange(2000.0)})
    store.take("b", {})
    before(
        store._storage, "sizes", lambda: take_over(url, monkeypatch, "other", STATE), match="packs"
    )
    with pytest.raises(BlockingIOError):
        store.delete("a")
    reader = SnapshotStore(url)
    assert reader.names() == ["b", "other"]
    assert reader.verify() == []


def test_two_who_find_a_void_lease_do_not_both_write(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SnapshotStore(url).take("a", {})
    fs, path = fsspec.filesystem("memory"), url.removeprefix("memory:/") + "/writer.lock"
    held = {"pid": 1, "host": "elsewhere", "timestamp": 0, "owner": "0" * 32}
    fs.pipe_file(path, json.dumps(held).encode())
    mine = {"pid": 2, "host": "third", "owner": "1" * 32}

    def sleep(seconds: float) -> None:
        assert seconds >= 1
        mine["timestamp"] = datetime.now(UTC).timestamp()
        fs.pipe_file(path, json.dumps(mine).encode())

    monkeypatch.setattr(lock.time, "sleep", sleep)
    with pytest.raises(BlockingIOError, match=r"process 2 on 'third' .* holds it now"):
        SnapshotStore(url).take("b", STATE)
    assert json.loads(fs.cat_file(path)) == mine
    assert SnapshotStore(url).names() == ["a"]


def test_a_store_that_cannot_create_is_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("memory")
    waited: list[float] = []
    real = type(fs).pipe_file

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        real(self, path, value)

    monkeypatch.setattr(type(fs), "pipe_file", pipe_file)
    monkeypatch.setattr(lock.time, "sleep", waited.append)
    SnapshotStore(url).take("a", STATE)
    assert waited == [lock.settle_s]
    assert SnapshotStore(url).verify() == []


def test_a_store_that_does_not_answer_at_the_end_has_the_snapshot(url: str) -> None:
    store = SnapshotStore(url)
    real = store._storage.remove

    def remove(path: str) -> None:
        real(path)
        raise TimeoutError("no answer")

    store._storage.remove = remove  # type: ignore[method-assign]
    assert store.take("a", STATE).name == "a"
    assert SnapshotStore(url).names() == ["a"]


def test_a_lock_file_that_somebody_removed_locks_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {})

    def remove(nbytes: int) -> None:
        os.unlink(tmp_path / "writer.lock")
        SnapshotStore(tmp_path).take("other", {})

    with pytest.raises(BlockingIOError, match=r"writer\.lock was removed while this process"):
        store.take("b", STATE, progress=remove)
    assert store.names() == ["a", "other"]
    store.take("b", STATE)
    assert SnapshotStore(tmp_path).verify() == []


def test_a_writer_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    def second(nbytes: int) -> None:
        (tmp_path / "writer.lock").write_bytes(b"")
        with pytest.raises(BlockingIOError, match="is being written by another process;"):
            SnapshotStore(tmp_path).take("b", {})

    store.take("a", STATE, progress=second)


CHILD = """
import os, signal, sys, numpy as np
from packhorse.disk import SnapshotStore
kill = lambda nbytes: os.kill(os.getpid(), signal.SIGKILL)
SnapshotStore(sys.argv[1]).take("b", {"w": np.arange(5000.0)}, progress=kill)
"""


def test_leftovers_of_others_are_removed_by_a_writer_that_goes_on(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {})
    path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:0] = {path!r}\n{CHILD}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path / "packs")) == 1
    store.take("c", {})
    assert os.listdir(tmp_path / "packs") == []
