"""Opening what is no shelf, or no shelf of this release; opening twice; using a shelf after close.
Each gives one clear error, and nothing is lost."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from shelf_records import change_record, records_of

from packhorse.codecs.content import crc32c
from packhorse.disk import Shelf
from packhorse.disk.shelf import store
from packhorse.errors import ClosedError, CompatibilityError, CorruptionError
from packhorse.storage.documents import sign


def make(folder: Path) -> None:
    with Shelf(folder) as shelf:
        shelf["x"] = np.arange(10)
        shelf["other"] = np.ones(3)
        shelf.tag("tag")
        shelf["other"] = np.zeros(3)


def test_there_is_no_shelf(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no shelf.*mode 'r\+' to make one"):
            Shelf(folder, "r")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file(tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(FileExistsError, match="is a file; a shelf is a folder"):
        Shelf(tmp_path / "file", mode)
    with pytest.raises(OSError, match="file"):
        Shelf(tmp_path / "file" / "below", mode)
    assert (tmp_path / "file").read_bytes() == b"text"


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"text")
    with pytest.raises(FileExistsError, match=r"is no shelf, and not empty \(it has 'notes.txt'\)"):
        Shelf(tmp_path)
    with pytest.raises(FileNotFoundError, match="no shelf in this folder"):
        Shelf(tmp_path, "r")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "data.shelf")
    names = ["notes.txt", "shelf-notes.txt", "shelf-1.mdb.bak", "copy.new", "shelf-new"]
    for name in names:
        (tmp_path / "data.shelf" / name).write_bytes(b"text")
    with Shelf(tmp_path / "data.shelf") as shelf:
        shelf.compact()
    assert set(names) <= set(os.listdir(tmp_path / "data.shelf"))


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("content", [b"", b"text", bytes(8192), bytes(100_000), b"\xff" * 16384])
def test_a_file_that_is_none_of_lmdb(tmp_path: Path, mode: str, content: bytes) -> None:
    (tmp_path / "shelf-1.mdb").write_bytes(content)
    with pytest.raises(CorruptionError, match=r"shelf-1\.mdb"):
        Shelf(tmp_path, mode)
    assert (tmp_path / "shelf-1.mdb").read_bytes() == content


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("names", [[], [b"other"], [b"meta", b"names"]])
def test_an_lmdb_file_that_is_no_shelf(tmp_path: Path, mode: str, names: list[bytes]) -> None:
    env = lmdb.open(str(tmp_path / "shelf-1.mdb"), subdir=False, max_dbs=9, map_size=1 << 22)
    for name in names:
        env.open_db(name)
    env.close()
    with pytest.raises(CorruptionError, match=r"shelf-1\.mdb.*not a shelf"):
        Shelf(tmp_path, mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_all_tables_but_no_head(tmp_path: Path, mode: str) -> None:
    make(tmp_path)
    change_record(tmp_path, "meta", b"head", lambda _: None)
    with pytest.raises(CorruptionError, match="is not a shelf; it has no head record"):
        Shelf(tmp_path, mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_shelf_of_a_later_version(tmp_path: Path, mode: str) -> None:
    make(tmp_path)

    def later(head: bytes) -> bytes:
        body = head[:8] + struct.pack("<H", 2) + head[10:-4]
        return body + struct.pack("<I", crc32c(body))

    change_record(tmp_path, "meta", b"head", later)
    before = records_of(tmp_path, "chunks")
    with pytest.raises(CompatibilityError, match="version 2; this release reads version 1; upg"):
        Shelf(tmp_path, mode)
    assert records_of(tmp_path, "chunks") == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "graph"}, "an entry of an unknown kind; upgrade"),
        ({"dtype": "F3_LATER"}, "F3_LAT"),
    ],
)
def test_an_entry_of_a_later_version(tmp_path: Path, change: dict[str, str], said: str) -> None:
    """The others, and earlier states, stay readable; the entry is kept by all that is written."""
    make(tmp_path)
    with Shelf(tmp_path) as shelf:
        shelf["x"] += 1
    key = max(key for key, _ in records_of(tmp_path, "names") if key.startswith(b"x"))
    change_record(tmp_path, "names", key, lambda value: later_entry(value, change))
    with Shelf(tmp_path) as shelf:
        for use in (lambda: shelf["x"], lambda: shelf["x"].append([1])):
            with pytest.raises(CompatibilityError, match=rf"'x'.*{said}"):
                use()
        assert shelf.keys() == ["other", "x"]
        assert "x" in shelf
        assert shelf["other"][...].tolist() == [0, 0, 0]
        assert shelf.at("tag")["x"][...].tolist() == list(range(10))
        assert [(p.name, p.tag) for p in shelf.verify()] == [("x", None)]
        shelf["other"] += 1
        shelf.compact()
    assert change.items() <= entry_of(dict(records_of(tmp_path, "names"))[key]).items()
    with Shelf(tmp_path) as shelf:
        shelf.rollback("tag")
        assert shelf["x"][...].tolist() == list(range(10))


def entry_of(value: bytes) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(value)
    return found


def later_entry(value: bytes, change: dict[str, str]) -> bytes:
    document = entry_of(value) | change
    del document["crc32c"]
    return sign(document)


def test_opened_twice_for_writing(tmp_path: Path) -> None:
    with Shelf(tmp_path / "data.shelf") as shelf:
        with pytest.raises(BlockingIOError, match="another Shelf of this process"):
            Shelf(tmp_path / "data.shelf")
        shelf["x"] = [1]
    with Shelf(tmp_path / "data.shelf") as shelf:
        assert shelf["x"][0] == 1


def test_another_process_writes(tmp_path: Path) -> None:
    """The message names it; when it is gone, the shelf can be opened."""
    folder = tmp_path / "data.shelf"
    text = f"""
from packhorse.disk import Shelf
shelf = Shelf({str(folder)!r})
shelf["x"] = [1]
print(flush=True)
input()
"""
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        with pytest.raises(BlockingIOError, match=rf"being written by process {writer.pid} on"):
            Shelf(folder)
        with Shelf(folder, "r") as shelf:
            assert shelf["x"][0] == 1
        writer.kill()
    with Shelf(folder) as shelf:
        shelf["x"] = [2]


def test_the_lock_is_removed(tmp_path: Path) -> None:
    """Somebody removes the lock, and another writer begins: the first one is stopped."""
    with Shelf(tmp_path) as first:
        first["x"] = [1]
        (tmp_path / "writer.lock").unlink()
        with Shelf(tmp_path) as second:
            second["x"] = [2]
            with pytest.raises(BlockingIOError, match=r"writer\.lock was removed"):
                first["x"] = [3]
            assert first["x"][0] == 2


USES: list[Callable[[Shelf, Any], object]] = [
    lambda shelf, x: shelf["x"],
    lambda shelf, x: shelf.keys(),
    lambda shelf, x: len(shelf),
    lambda shelf, x: "x" in shelf,
    lambda shelf, x: list(shelf),
    lambda shelf, x: shelf.__setitem__("x", [1]),
    lambda shelf, x: shelf.__delitem__("x"),
    lambda shelf, x: shelf.create("y", (1,), "uint8"),
    lambda shelf, x: shelf.rename("x", "y"),
    lambda shelf, x: shelf.save("s", {}),
    lambda shelf, x: shelf.load("s"),
    lambda shelf, x: shelf.transaction().__enter__(),
    lambda shelf, x: shelf.reading().__enter__(),
    lambda shelf, x: shelf.tag("t"),
    lambda shelf, x: shelf.untag("tag"),
    lambda shelf, x: shelf.tags(),
    lambda shelf, x: shelf.at("tag"),
    lambda shelf, x: shelf.rollback("tag"),
    lambda shelf, x: shelf.info(),
    lambda shelf, x: shelf.verify(),
    lambda shelf, x: shelf.compact(),
    lambda shelf, x: x[0],
    lambda shelf, x: x.shape,
    lambda shelf, x: x.__setitem__(0, 1),
    lambda shelf, x: x.append([1]),
    lambda shelf, x: x.__iadd__(1),
    lambda shelf, x: np.asarray(x),
    lambda shelf, x: next(x.iter_chunks()),
]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_used_after_close(tmp_path: Path, mode: str) -> None:
    make(tmp_path)
    shelf = Shelf(tmp_path, mode)
    x, old, blocks = shelf["x"], shelf.at("tag")["x"], shelf["x"].iter_chunks(8)
    next(blocks)
    shelf.close()
    shelf.close()
    assert shelf.is_closed
    for use in [*USES, lambda shelf, x: old[0], lambda shelf, x: next(blocks)]:
        with pytest.raises(ClosedError, match="the shelf is closed; open it again"):
            use(shelf, x)
    assert "ShelfTensor('x'" in repr(x)
    with Shelf(tmp_path) as shelf:
        assert shelf["x"][...].tolist() == list(range(10))


def test_closed_inside_reading(tmp_path: Path) -> None:
    make(tmp_path)
    shelf = Shelf(tmp_path)
    with shelf.reading():
        shelf.close()
        with pytest.raises(ClosedError):
            shelf["x"][0]
        with Shelf(tmp_path) as second:
            second["x"] = [1]
    with Shelf(tmp_path, "r") as shelf:
        assert shelf["x"][0] == 1


def test_closed_inside_a_transaction(tmp_path: Path) -> None:
    make(tmp_path)
    with Shelf(tmp_path) as shelf, shelf.transaction():
        shelf["x"] = [1]
        with pytest.raises(RuntimeError, match="closed inside a transaction; leave it first"):
            shelf.close()
    with Shelf(tmp_path, "r") as shelf:
        assert shelf["x"][0] == 1


def test_the_process_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    with Shelf("data.shelf") as shelf:
        shelf["x"] = [1]
        monkeypatch.chdir(tmp_path / "below")
        shelf["x"] = [2]
        shelf.compact()
        assert shelf["x"][0] == 2
    assert os.listdir() == []
    with Shelf(tmp_path / "data.shelf", "r") as shelf:
        assert shelf["x"][0] == 2


MOUNTS = """\
22 27 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
27 0 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
61 27 0:{minor} / /home/a\\040b rw,relatime shared:33 master:2 - {kind} server:/home rw,vers=4.2
62 27 0:9 / /odd rw
"""


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "lustre"])
def test_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = os.makedev(0, 44)
    mounts = MOUNTS.format(minor=44, kind=kind)
    assert store._type_of_device(device, mounts) == kind
    assert store._type_of_device(os.makedev(254, 1), mounts) == "ext4"
    assert store._type_of_device(os.makedev(0, 45), mounts) == ""
    assert store._type_of_device(os.makedev(0, 9), mounts) == ""
    here = os.stat(tmp_path).st_dev
    (tmp_path / "mounts").write_text(
        f"1 0 {os.major(here)}:{os.minor(here)} / / rw - {kind} server:/ rw\n"
    )
    monkeypatch.setattr(store, "_MOUNTS", tmp_path / "mounts")
    for mode in ("r", "r+"):
        with pytest.raises(OSError, match=rf"network file system \({kind}\).*local disk"):
            Shelf(tmp_path / "a" / "data.shelf", mode)
    assert os.listdir(tmp_path) == ["mounts"]
    monkeypatch.setattr(store, "_MOUNTS", tmp_path / "none")
    Shelf(tmp_path / "a" / "data.shelf").close()
