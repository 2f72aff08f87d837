"""Model folders at URLs: marked until they are complete, and continued after an interruption."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_samples import contents, write_folder
from s3_server import Server
from safetensors.numpy import load_file, save_file

from packhorse.disk import (
    folder_logical_nbytes,
    pack_folder,
    packed_files,
    plan_folder,
    unpack_folder,
    verify_folder,
)
from packhorse.errors import CorruptionError

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of

OUT = "s3://bucket/out.ph"
RECORD = ".packhorse-unfinished.json"
SHARDS = [f"model-0000{i}-of-00002.ph.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"
NAMES = sorted(["config.json", *SHARDS, INDEX, "tokenizer/vocab.txt"])


def refusing(pattern: str) -> Callable[[str, str, str], None]:
    """Makes the server refuse to store objects whose name has a pattern."""

    def before(method: str, path: str, query: str) -> None:
        if method in ("PUT", "POST") and re.search(pattern, path):
            raise RuntimeError("the server breaks")

    return before


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not repeated."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


def stored(s3: Server) -> list[str]:
    """The names of the objects that were stored, in order, without the record."""
    names = [request.path.rpartition("/out.ph/")[2] for request in s3.of("PUT")]
    return [name for name in names if name != RECORD]


def test_round_trips(s3: Server, folder: Path, tmp_path: Path):
    done: list[int] = []
    result = pack_folder(folder, OUT, progress=done.append)
    assert s3.names("bucket/out.ph") == NAMES
    assert stored(s3)[-1] == INDEX
    assert (len(result.files), result.n_copied) == (2, 2)
    assert sum(done) == folder_logical_nbytes(folder)
    assert folder_logical_nbytes(OUT) == folder_logical_nbytes(folder) + 309  # a longer index
    assert result.packed_nbytes == sum(s3.fs.du("bucket/out.ph", total=False).values())
    assert verify_folder(OUT) == []
    assert [str(path) for path in packed_files(OUT)] == [f"{OUT}/{name}" for name in SHARDS]
    unpack_folder(OUT, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    unpack_folder(OUT, "s3://bucket/plain")
    assert [str(path) for path, _ in plan_folder("s3://bucket/plain")] == [
        name.replace(".ph", "") for name in SHARDS
    ]
    pack_folder("s3://bucket/plain", "s3://bucket/again")
    pack_folder("s3://bucket/plain", tmp_path / "again")
    for name in NAMES:
        data = s3.fs.cat_file(f"bucket/out.ph/{name}")
        assert s3.fs.cat_file(f"bucket/again/{name}") == data
        assert (tmp_path / "again" / name).read_bytes() == data


@pytest.mark.parametrize("broken", [SHARDS[0], SHARDS[1], "vocab", INDEX])
def test_an_interrupted_run_is_continued(
    s3: Server, folder: Path, tmp_path: Path, once: None, broken: str
):
    s3.before = refusing(broken)
    with pytest.raises(OSError, match=f"{OUT}/.*{broken}"):
        pack_folder(folder, OUT)
    s3.before = None
    first = set(s3.names("bucket/out.ph"))
    assert RECORD in first
    assert INDEX not in first
    for use in (
        lambda: unpack_folder(OUT, tmp_path / "no"),
        lambda: packed_files(OUT),
        lambda: pack_folder(OUT, tmp_path / "no"),
        lambda: verify_folder(OUT),
    ):
        with pytest.raises(CorruptionError, match=r"out\.ph: this folder is not complete: .* run"):
            use()
    assert not (tmp_path / "no").exists()
    s3.forget()
    done: list[int] = []
    result = pack_folder(folder, OUT, progress=done.append)
    assert set(stored(s3)) == set(NAMES) - first
    assert sum(done) == folder_logical_nbytes(folder)
    assert (len(result.files), result.n_copied) == (2, 2)
    assert s3.names("bucket/out.ph") == NAMES
    fresh = pack_folder(folder, tmp_path / "fresh")
    assert [file.tensors for file in result.files] == [file.tensors for file in fresh.files]
    assert (result.original_nbytes, result.packed_nbytes) == (
        fresh.original_nbytes, fresh.packed_nbytes,
    )  # fmt: skip
    for name in NAMES:
        assert s3.fs.cat_file(f"bucket/out.ph/{name}") == (tmp_path / "fresh" / name).read_bytes()


def test_unpacking_is_continued_too(s3: Server, folder: Path, tmp_path: Path, once: None):
    pack_folder(folder, "s3://bucket/packed")
    s3.before = refusing("model-00002")
    with pytest.raises(OSError, match="model-00002"):
        unpack_folder("s3://bucket/packed", OUT)
    s3.before = None
    s3.forget()
    result = unpack_folder("s3://bucket/packed", OUT)
    assert len(result.files) == 2
    assert stored(s3) == ["model-00002-of-00002.safetensors", "tokenizer/vocab.txt", INDEX]
    for name, data in contents(folder).items():
        if data is not None:
            assert s3.fs.cat_file(f"bucket/out.ph/{name}") == data


def interrupted(s3: Server, folder: Path, **options: Any) -> None:
    s3.before = refusing("vocab")
    with pytest.raises(OSError, match="vocab"):
        pack_folder(folder, OUT, **options)
    s3.before = None
    s3.forget()


def test_what_changed_is_done_again(s3: Server, folder: Path, once: None):
    """A shard of the source, and a file of the output."""
    interrupted(s3, folder)
    shard = folder / "model-00001-of-00002.safetensors"
    found = {name: array for name, array in load_file(shard).items() if array.ndim}
    save_file({name: array[::-1].copy() for name, array in found.items()}, shard)
    s3.fs.pipe_file(f"bucket/out.ph/{SHARDS[1]}", b"other")
    pack_folder(folder, OUT)
    assert set(SHARDS) <= set(stored(s3))
    assert "config.json" not in stored(s3)
    assert verify_folder(OUT) == []


def test_another_task_does_not_continue(s3: Server, folder: Path, tmp_path: Path, once: None):
    base = write_folder(tmp_path / "base")
    interrupted(s3, folder, base=base)
    for options in ({}, {"base": base, "level": "fast"}, {"base": f"{base}/"[:-1] + "/."}):
        if options.get("base") is not None and "level" not in options:
            save_file({"new": np.ones(3)}, base / "new.safetensors")  # another version of it
            options = {"base": base}
        with pytest.raises(FileExistsError, match="an interrupted command with other arguments"):
            pack_folder(folder, OUT, **options)
    pack_folder(folder, OUT, force=True)
    assert s3.names("bucket/out.ph") == NAMES
    assert verify_folder(OUT) == []


def test_a_damaged_record_is_not_believed(s3: Server, folder: Path, once: None):
    interrupted(s3, folder)
    record = json.loads(s3.fs.cat_file(f"bucket/out.ph/{RECORD}"))
    assert sorted(record["done"]) == ["config.json", *SHARDS]
    for text in (b"", b"[]", b"{", json.dumps({**record, "done": []}).encode()):
        s3.fs.pipe_file(f"bucket/out.ph/{RECORD}", text)
        with pytest.raises(FileExistsError, match="with other arguments"):
            pack_folder(folder, OUT)
    for done in ({"config.json": 3}, {"config.json": [[1, 2], None]}, {"../x": [[1, 2], [3, 4]]}):
        text = json.dumps({**record, "done": done}).encode()
        s3.fs.pipe_file(f"bucket/out.ph/{RECORD}", text)
        s3.forget()
        pack_folder(folder, OUT)
        assert sorted(stored(s3)) == NAMES
        s3.fs.pipe_file(f"bucket/out.ph/{RECORD}", text)
    s3.fs.rm_file(f"bucket/out.ph/{RECORD}")


def test_existing_folders_are_kept(s3: Server, folder: Path):
    s3.fs.pipe_file("bucket/out.ph/mine.txt", b"mine")
    with pytest.raises(FileExistsError, match="already exists and is not empty"):
        pack_folder(folder, OUT)
    with pytest.raises(
        FileExistsError, match=r"contains mine\.txt, which the new folder would not"
    ):
        pack_folder(folder, OUT, force=True)
    assert s3.names("bucket/out.ph") == ["mine.txt"]
    s3.fs.rm_file("bucket/out.ph/mine.txt")
    pack_folder(folder, OUT)
    with pytest.raises(FileExistsError):
        pack_folder(folder, OUT)
    pack_folder(folder, OUT, force=True, level="fast")
    assert verify_folder(OUT) == []
    for bad in (OUT, f"{OUT}/below", "s3://bucket"):
        with pytest.raises(ValueError, match="must not contain each other"):
            unpack_folder(OUT, bad)


def test_a_base_folder_at_a_url(s3: Server, folder: Path, tmp_path: Path):
    s3.fs.put(f"{folder}/", "bucket/base/", recursive=True)
    result = pack_folder(folder, OUT, base="s3://bucket/base")
    assert sum(tensor.base_hash is not None for file in result.files for tensor in file.tensors)
    assert verify_folder(OUT, base="s3://bucket/base") == []
    unpack_folder(OUT, tmp_path / "back", base="s3://bucket/base")
    assert contents(tmp_path / "back") == contents(folder)
    for wrong in (OUT, f"{OUT}/below"):
        with pytest.raises(ValueError, match="the base is inside this output"):
            pack_folder(folder, OUT, base=wrong, force=True)


def test_a_source_that_changes_leaves_the_mark(s3: Server, folder: Path):
    s3.fs.put(f"{folder}/", "bucket/llama/", recursive=True)

    def add(nbytes: int) -> None:
        s3.fs.pipe_file("bucket/llama/new.txt", b"new")

    with pytest.raises(OSError, match=r"new.txt: added or removed .* output is not complete"):
        pack_folder("s3://bucket/llama", OUT, progress=add)
    assert RECORD in s3.names("bucket/out.ph")
    pack_folder("s3://bucket/llama", OUT)
    assert s3.names("bucket/out.ph") == sorted([*NAMES, "new.txt"])


def test_damage_in_a_folder_is_told(s3: Server, folder: Path):
    pack_folder(folder, OUT)
    data = s3.fs.cat_file(f"bucket/out.ph/{SHARDS[0]}")
    s3.fs.pipe_file(f"bucket/out.ph/{SHARDS[0]}", data[:-200] + bytes(100) + data[-100:])
    s3.fs.rm_file(f"bucket/out.ph/{SHARDS[1]}")
    problems = verify_folder(OUT)
    assert {str(problem.path) for problem in problems} == {f"{OUT}/{SHARDS[0]}", f"{OUT}/{INDEX}"}
    assert any(re.search("model-00002.*which is not in the folder", p.message) for p in problems)


def test_what_a_url_cannot_hold(s3: Server, folder: Path, tmp_path: Path):
    (folder / "again").symlink_to("tokenizer")
    with pytest.raises(ValueError, match=r"again: a link to a folder .* cannot be stored at a URL"):
        pack_folder(folder, OUT)
    assert s3.names() == []
    s3.fs.pipe_file("bucket/bad/model.ph.safetensors", b"x")
    s3.fs.call_s3("put_object", Bucket="bucket", Key="bad/../../../tmp/evil", Body=b"x")
    with pytest.raises(ValueError, match=r"bad/\.\./\.\./\.\./tmp/evil: this name has a part"):
        unpack_folder("s3://bucket/bad", tmp_path / "out")
