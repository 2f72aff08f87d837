"""Snapshots in S3, over HTTP, from several processes. Needs moto's server and s3fs."""

import threading
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import pytest
from forked import fork_context
from snapshot_child import make_state
from snapshot_samples import Run, assert_same

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots import lock
from packhorse.errors import CorruptionError

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of


def take_until_killed(options: dict[str, Any], taken: Synchronized) -> None:
    """Take one snapshot after the other. Counts those that are reported."""
    store = SnapshotStore("s3://snapshots/killed", storage_options=options)
    for seed in range(10**6):
        store.take(f"s{seed}", make_state(seed))
        taken.value = seed + 1


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """A server with an empty bucket of its own: servers of moto in one process share buckets."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/snapshots", method="PUT"))
    yield {"key": "x", "secret": "y", "endpoint_url": url}
    server.stop()


def test_a_run_in_s3(options: dict[str, Any]) -> None:
    run, taken = Run(), {}
    store = SnapshotStore("s3://snapshots/run/1", storage_options=options)
    reader = SnapshotStore("s3://snapshots/run/1", storage_options=options)
    assert store.names() == []
    for i in range(4):
        store.take(f"a/{i}", run.step().state())
        taken[f"a/{i}"] = run.copy()
        assert reader.names() == list(taken)
    assert reader.verify() == []
    store.prune(keep=2)
    for name in ("a/2", "a/3"):
        assert_same(reader.restore(name, framework="pt"), taken[name])
    store.delete("a/3")
    assert reader.names() == ["a/2"]


def test_two_writers_never_both_begin(options: dict[str, Any]) -> None:
    stores = [SnapshotStore("s3://snapshots/two", storage_options=options) for _ in range(2)]
    stores[0].take("first", {})
    refused = []

    def write(store: SnapshotStore, k: int) -> None:
        for i in range(3):
            try:
                store.take(f"{k}-{i}", make_state(i))
            except BlockingIOError:
                refused.append(f"{k}-{i}")

    threads = [threading.Thread(target=write, args=(store, k)) for k, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {"first"} | {f"{k}-{i}" for k in range(2) for i in range(3)} - set(refused)
    assert set(stores[0].names()) == names
    assert stores[0].verify() == []


def test_a_killed_writer_and_a_reader_at_work(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SnapshotStore("s3://snapshots/killed", storage_options=options)
    taken = fork_context().Value("q", 0)
    child = fork_context().Process(target=take_until_killed, args=(options, taken))
    child.start()
    end = time.monotonic() + 60
    while not taken.value:
        assert child.is_alive()
        assert time.monotonic() < end
        time.sleep(0.001)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for name in reader.names():
            assert_same(reader.restore(name), make_state(int(name[1:])))
    child.kill()
    child.join()
    monkeypatch.setattr(lock, "void_after_s", 0.0)  # as if the lease had ended
    monkeypatch.setattr(lock, "settle_s", 0.0)  # nobody else takes it over
    writer = SnapshotStore("s3://snapshots/killed", storage_options=options)
    writer.take("next", make_state(7))
    names = writer.names()
    assert {f"s{seed}" for seed in range(taken.value)} <= set(names)
    for name in names[:-1]:
        assert_same(writer.restore(name), make_state(int(name[1:])))
    assert writer.verify() == []


def test_objects_that_stand_for_folders_and_empty_ones(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The S3 console makes an empty object for each folder."""
    import s3fs

    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    fs.call_s3("put_object", Bucket="snapshots", Key="marked/", Body=b"")
    store = SnapshotStore("s3://snapshots/marked/", storage_options=options)
    assert store.names() == []
    store.take("a", make_state(1))
    store.take("b", make_state(2))
    for folder in ("packs/", "snapshots/", "snapshots/a/"):
        fs.call_s3("put_object", Bucket="snapshots", Key=f"marked/{folder}", Body=b"")
    (manifest,) = (
        path for path in fs.find("snapshots/marked/snapshots/a") if path.endswith(".json")
    )
    fs.pipe_file(manifest, b"")
    again = SnapshotStore("s3://snapshots/marked", storage_options=options)
    assert again.names() == ["a", "b"]
    assert_same(again.restore("b"), make_state(2))
    with pytest.raises(
        CorruptionError, match=r"^snapshot 'a': s3://snapshots/marked/snapshots/a/.*"
    ):
        again.restore("a")
    again.take("c", make_state(3))
    assert [problem.snapshot for problem in again.verify()] == ["a"]
    monkeypatch.setattr(lock, "settle_s", 0.0)
    fs.pipe_file("snapshots/marked/writer.lock", b"")  # nobody's
    SnapshotStore("s3://snapshots/marked", storage_options=options).take("d", {})
