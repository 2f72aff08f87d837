"""Storage of stores and checkpoints: URLs and paths, hostile files, requests to fsspec."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_samples import assert_same

from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore
from packhorse.errors import CorruptionError
from packhorse.storage import remote_object
from packhorse.storage.local import LocalStorage
from packhorse.storage.locations import is_location, open_storage
from packhorse.storage.remote import RemoteStorage


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a//b/", "/a/b"),
        ("file:///a/b/", "/a/b"),
        ("file://localhost/a", "/a"),
        ("file:///a%20b", "/a b"),
        ("file:///a#b?c", "/a#b?c"),
        ("a::b", os.path.realpath("a::b")),
    ],
)
def test_paths_and_file_urls_need_no_fsspec(
    url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    storage = open_storage(url)
    assert isinstance(storage, LocalStorage)
    assert storage.label() == path


def test_a_file_url_of_a_relative_path_is_refused() -> None:
    """Otherwise `file://runs/7` would be a store at /7, on the host `runs`."""
    with pytest.raises(ValueError, match=r"file://runs/7: the path must be absolute: file:///runs"):
        open_storage("file://runs/7")
    assert not is_location("file://runs/7")


@pytest.mark.parametrize("protocol", ["local", "file"])
def test_a_local_folder_is_never_left_to_fsspec(tmp_path: Path, protocol: str) -> None:
    """fsspec's own file system would neither flush nor rename what it writes."""
    pytest.importorskip("fsspec")
    storage = open_storage(f"{protocol}://{tmp_path}/x")
    assert isinstance(storage, LocalStorage)
    assert storage.label("y") == f"{tmp_path}/x/y"


def test_without_fsspec_the_extra_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    url = "s3://bucket/x"
    words = f"^{url}: needs fsspec; install it with: pip install 'packhorse\\[remote\\]'$"
    for use in (
        lambda: SnapshotStore(url),
        lambda: PackhorseReader(url).read_metadata(),
        lambda: PackhorseWriter(url).prepare_local_plan(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ImportError, match=words):
            use()


@pytest.mark.parametrize("url", ["{}/runs/2", "memory://{}/runs/2"])
def test_paths_may_lead_to_the_folder_beside(tmp_path: Path, url: str) -> None:
    pytest.importorskip("fsspec")
    here = open_storage(url.format(tmp_path))
    there = open_storage(url.format(tmp_path).replace("/2", "/1/"))
    there.put("x", b"beside")
    path = here.relative(there, "x")
    assert path == "../1/x"
    assert here.read(path, 100) == b"beside"
    assert here.label(path) == there.label("x")
    assert here.exists(path)
    assert not here.exists("x")
    here.remove(path)
    here.remove(path)
    assert there.names() == []


def test_links_are_resolved_before_paths_are(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "2").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "elsewhere" / "2")
    here, there = open_storage(tmp_path / "runs" / "latest"), open_storage(tmp_path / "runs" / "1")
    there.put("x", b"1")
    assert here.read(here.relative(there, "x"), 10) == b"1"


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer."""
    storage = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(CorruptionError, match=f"/{name}: not a regular file"):
            storage.read(name, 10)
        with pytest.raises(CorruptionError, match=f"/{name}: not a regular file"):
            storage.open(name)
    store = SnapshotStore(tmp_path / "s")
    store.take("a", {"w": np.arange(999.0)})
    (pack,) = (tmp_path / "s" / "packs").iterdir()
    pack.unlink()
    os.mkfifo(pack)
    with pytest.raises(CorruptionError, match=r"snapshot 'a': .*not a regular file"):
        store.restore("a")
    store.take("b", {"w": np.arange(999.0)})  # a listing from a cache would not have it
    assert_same(store.restore("b"), {"w": np.arange(999.0)})


@pytest.mark.parametrize("url", ["{}", "memory://{}"])
def test_small_files_have_a_limit(tmp_path: Path, url: str) -> None:
    pytest.importorskip("fsspec")
    storage = open_storage(url.format(tmp_path))
    storage.put("x", b"1234")
    storage.put("y", b"")
    assert storage.read("x", 4) == b"1234"
    assert storage.read("y", 4) == b""
    with pytest.raises(CorruptionError, match=r"x: longer than 3 bytes"):
        storage.read("x", 3)


def test_a_store_in_a_folder_of_another_is_left_alone(tmp_path: Path) -> None:
    inner = SnapshotStore(tmp_path / "inner")

    def write_outside(nbytes: int) -> None:
        SnapshotStore(tmp_path).take("a", {})

    SnapshotStore(tmp_path).take("first", {})
    inner.take("b", {"w": np.arange(5000.0)}, progress=write_outside)
    assert inner.verify() == []


def test_long_ranges_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise a chain of deltas would keep a frame for each of its packs in memory."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(remote_object, "_READ_NBYTES", 100)
    storage: Any = open_storage(f"memory://{tmp_path}")
    assert isinstance(storage, RemoteStorage)
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
    storage.put("x", data)
    opened: Any = storage.open("x")
    assert bytes(opened.region(100, 500)) == data[100:600]
    assert opened._kept[1] == b""
    assert bytes(opened.region(600, 10)) == data[600:610]
    assert opened._kept[1] == data[600:700]
    assert bytes(opened.region(650, 50)) == data[650:700]
    memory = opened.sketch(0, 1000)
    assert not memory.any()
    opened.fill([(memory[900:], 900), (memory[:5], 0), (memory[300:300], 300)])
    assert memory[:5].tobytes() + memory[900:].tobytes() == data[:5] + data[900:]
