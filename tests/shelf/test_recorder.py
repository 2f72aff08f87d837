"""The proof that the proof can fail: loss is found where LMDB promises none, on a disk that the
replay makes as bad as POSIX allows."""

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import lmdb
import pytest
from disk_record import Call, Disk, compile_recorder, images, read_record, recorded

N_KEYS = 6
WRITER = f"""
import json, os, sys, lmdb
from disk_record import mark
folder, n_commits, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
env = lmdb.open(folder + "/raw.mdb", subdir=False, map_size=1 << 24, **options)
descriptor = os.open(folder, os.O_RDONLY)
for n in range(n_commits):
    mark(f"next {{n}}")
    with env.begin(write=True) as txn:
        for key in range({N_KEYS}):
            txn.put(b"%d" % key, (b"%06d" % n) * (500 + 300 * key))
    if n == 0:
        os.fsync(descriptor)
    mark(f"done {{n}}")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


def record_raw(library: Path, folder: Path, n_commits: int, **options: bool) -> list[Call]:
    """The calls of LMDB when one value after another is committed."""
    watched, record = folder / "watched", folder / "record"
    watched.mkdir()
    arguments = [str(watched), str(n_commits), json.dumps(options)]
    recorded(library, watched, record, [sys.executable, "-c", WRITER, *arguments])
    return read_record(record, watched)


def read_raw(path: Path) -> str:
    """The number that all values have, or what is wrong."""
    try:
        env = lmdb.open(str(path), subdir=False, map_size=1 << 24, create=False)
    except lmdb.Error as error:
        return type(error).__name__
    try:
        with env.begin() as txn:
            values = [txn.get(b"%d" % key) for key in range(N_KEYS)]
    except lmdb.Error as error:
        return type(error).__name__
    finally:
        env.close()
    parts = {value[i : i + 6] for value in values if value for i in range(0, len(value), 6)}
    if len(parts) != 1 or None in values:
        return "a mixture"
    return str(int(parts.pop()))


def read_image(disk: Disk, folder: Path) -> str:
    """The same of an image. Zeros follow the file, as LMDB would be killed (SIGBUS) where a page
    that it needs lies behind the end."""
    disk.write_to(folder)
    if (folder / "raw.mdb").exists():
        with (folder / "raw.mdb").open("r+b") as file:
            file.truncate(1 << 20)
    number = read_raw(folder / "raw.mdb")
    shutil.rmtree(folder)
    return number


def losses(calls: list[Call], folder: Path) -> tuple[Counter[str], int]:
    """What is wrong with the images of a record, and how many images there are."""
    found, n_images = Counter[str](), 0
    for image in images(calls, n_random=3):
        said = dict(line.split() for line in image.marks)
        if "done" not in said:
            continue
        n_images += 1
        number = read_image(image.disk, folder / "image")
        if not number.isdecimal():
            found[number] += 1
        elif int(number) not in (int(said["done"]), int(said["next"])):
            found["an old state"] += 1
    return found, n_images


def test_lmdb_loses_nothing_when_it_syncs(
    library: Path, tmp_path: Path, images_folder: Path
) -> None:
    calls = record_raw(library, tmp_path, 12)
    found, n_images = losses(calls, images_folder)
    assert not found
    assert n_images > 150


@pytest.mark.parametrize(
    ("options", "finds"),
    [
        ({"metasync": False}, {"an old state"}),
        ({"sync": False}, {"an old state", "a mixture"}),
    ],
    ids=["metasync", "sync"],
)
def test_loss_is_found_without_sync(
    library: Path,
    tmp_path: Path,
    images_folder: Path,
    options: dict[str, bool],
    finds: set[str],
) -> None:
    found, _ = losses(record_raw(library, tmp_path, 12, **options), images_folder)
    assert finds <= set(found), found


@pytest.mark.parametrize("lost", ["the last sync of data", "the sync of the folder", "O_DSYNC"])
def test_one_missing_sync_is_found(
    library: Path, tmp_path: Path, images_folder: Path, lost: str
) -> None:
    calls = record_raw(library, tmp_path, 6)
    if lost == "the last sync of data":
        syncs = [i for i, call in enumerate(calls) if call.kind == "s" and not call.durable]
        del calls[syncs[-1]]
    elif lost == "the sync of the folder":
        calls = [call for call in calls if not (call.kind == "s" and call.durable)]
    else:
        calls = [
            Call(**{**vars(call), "durable": False}) if call.kind == "w" else call for call in calls
        ]
    assert losses(calls, images_folder)[0]


def test_the_record_is_whole(library: Path, tmp_path: Path) -> None:
    """All calls together give the bytes that are on the disk."""
    calls = record_raw(library, tmp_path, 5)
    *_, last = (image for image in images(calls, n_random=0) if image.what == "everything")
    assert last.disk.names.keys() == {"raw.mdb", "raw.mdb-lock"}
    inode = last.disk.names["raw.mdb"]
    assert inode
    assert last.disk.files[inode] == (tmp_path / "watched" / "raw.mdb").read_bytes()
    assert [call.name for call in calls if call.kind == "p"] == ["raw.mdb-lock"]
    assert sum(call.durable for call in calls if call.kind == "w") == 5


NAMES = """
import os, sys
os.chdir(sys.argv[1])
os.mkdir("a")
at = os.open("a", os.O_RDONLY)
one = os.open("x", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=at)
os.write(one, b"12345")
os.pwritev(one, [b"ab", b"cd"], 1)
os.ftruncate(one, 4)
os.rename("a/x", "a/y")
os.rename("a", "b")
open("b/z", "wb").write(b"0" * 5000)
open("gone", "wb").close()
os.unlink("gone")
os.rmdir("b/none") if os.path.exists("b/none") else os.mkdir("b/none")
os.rmdir("b/none")
"""


def test_all_kinds_of_calls_are_recorded(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    recorded(library, folder, tmp_path / "record", [sys.executable, "-c", NAMES, str(folder)])
    disk = Disk()
    for image in images(read_record(tmp_path / "record", folder), n_random=1):
        disk = image.disk if image.what == "everything" else disk
        image.disk.write_to(tmp_path / "image")
        shutil.rmtree(tmp_path / "image")
    disk.write_to(tmp_path / "last")
    for root, folders, files in os.walk(folder):
        twin = tmp_path / "last" / Path(root).relative_to(folder)
        assert sorted(os.listdir(twin)) == sorted(folders + files)
        for file in files:
            assert (twin / file).read_bytes() == (Path(root) / file).read_bytes()
