"""Snapshots on a file system of fsspec: the lease of the single writer, and reading in ranges."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots import lock
from packhorse.errors import CorruptionError, TruncationError

fsspec = pytest.importorskip("fsspec")
STATE = {"w": np.random.default_rng(0).standard_normal(5000), "n": 1}


@pytest.fixture(autouse=True)
def settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "settle_s", 0.0)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder in memory."""
    fs = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    fs.rm(f"/{tmp_path.name}", recursive=True)


def lease_path(url: str) -> str:
    return url.removeprefix("memory:/") + "/writer.lock"


def put_lease(url: str, age_s: float) -> None:
    held = {
        "pid": 1234,
        "host": "elsewhere",
        "time": "2026-11-21T16:00:00Z",
        "timestamp": datetime.now(UTC).timestamp() - age_s,
        "owner": "0" * 32,
    }
    fsspec.filesystem("memory").pipe_file(lease_path(url), json.dumps(held).encode())


def test_a_writer_that_renews_its_lease_is_respected(url: str) -> None:
    store = SnapshotStore(url)
    store.take("a", STATE)
    put_lease(url, age_s=30)
    words = r"written by process 1234 on 'elsewhere' .* its lease ends in 5[67]\d s"
    for write in (
        lambda: store.take("b", {}),
        lambda: store.delete("a"),
        lambda: store.prune(keep=1),
    ):
        with pytest.raises(BlockingIOError, match=words):
            write()
    assert_same(store.restore("a"), STATE)


@pytest.mark.parametrize("text", [None, b"", b"{", b'{"pid": 1}'])
def test_a_lease_of_a_dead_writer_is_void(url: str, text: bytes | None) -> None:
    store = SnapshotStore(url)
    store.take("a", STATE)
    put_lease(url, age_s=601)
    if text is not None:
        fsspec.filesystem("memory").pipe_file(lease_path(url), text)
    store.take("b", STATE)
    assert store.names() == ["a", "b"]
    assert not fsspec.filesystem("memory").exists(lease_path(url))


def test_a_writer_that_lost_its_lease_commits_nothing(url: str) -> None:
    store = SnapshotStore(url)
    store.take("a", {})
    with pytest.raises(BlockingIOError, match=r"process 1234 .* holds it now"):
        store.take("b", STATE, progress=lambda nbytes: put_lease(url, age_s=0))
    assert store.names() == ["a"]
    put_lease(url, age_s=1000)
    other = SnapshotStore(url)
    other.take("c", {})  # which removes the pack that was left
    assert not other._storage.names("packs")


def test_a_lease_is_renewed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_RENEW_S", 0.01)
    held, n_threads = [], threading.active_count()

    def wait(nbytes: int) -> None:
        for _ in range(3):
            held.append(json.loads(fsspec.filesystem("memory").cat_file(lease_path(url))))
            time.sleep(0.1)

    SnapshotStore(url).take("a", STATE, progress=wait)
    assert held[0]["owner"] == held[-1]["owner"]
    assert held[0]["timestamp"] < held[-1]["timestamp"]
    assert threading.active_count() <= n_threads + 1  # that of fsspec


def test_ranges_are_read_and_not_packs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from packhorse.storage import remote_object

    monkeypatch.setattr(remote_object, "_READ_NBYTES", 1 << 12)
    arrays = {
        str(i): np.random.default_rng(i).integers(0, 256, 10_000, np.uint8) for i in range(30)
    }
    SnapshotStore(url).take("a", arrays)
    fs = fsspec.filesystem("memory")
    read = 0
    real = type(fs).cat_file

    def count(self: Any, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        nonlocal read
        data: bytes = real(self, path, start=start, end=end, **kwargs)
        read += len(data) if "/packs/" in path else 0
        return data

    monkeypatch.setattr(type(fs), "cat_file", count)
    assert_same(SnapshotStore(url, threads=1).restore("a", keys="7"), {"7": arrays["7"]})
    assert 10_000 < read < 20_000


def test_damage_is_told(url: str) -> None:
    store = SnapshotStore(url)
    store.take("a", STATE)
    fs = fsspec.filesystem("memory")
    (pack,) = fs.find(url.removeprefix("memory:/") + "/packs")
    good = fs.cat_file(pack)
    fs.pipe_file(pack, good[:-64])
    with pytest.raises(
        TruncationError, match=rf"snapshot 'a': tensor 'w': {url}/packs/.*cut short"
    ):
        store.restore("a")
    fs.pipe_file(pack, good[:-70] + b"x" * 70)
    with pytest.raises(CorruptionError, match=rf"snapshot 'a': {url}/packs/.*'w'"):
        store.restore("a")
    fs.rm(pack)
    with pytest.raises(
        CorruptionError, match=r"snapshot 'a': tensor 'w': .*the pack does not exist"
    ):
        store.restore("a")
    assert len(store.verify()) == 1
