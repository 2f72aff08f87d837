"""Damaged and hostile checkpoints are detected before a tensor is touched, and the error names
them."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_ranks import (
    failing,
)
from dcp_samples import MANIFEST, load, pack_file, patch, save, shards_of, weights

from packhorse.disk.dcp.checkpoint_manifest import parse_manifest
from packhorse.errors import CompatibilityError, CorruptionError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    save({"a": weights(200, 300), "b": weights(50), "n": 4}, tmp_path)
    return tmp_path


def load_fails(folder: Path, *words: str, touches: bool = False) -> str:
    found = {"a": torch.full((200, 300), 7.0), "b": torch.full((50,), 7.0), "n": 0}
    with failing() as errors:
        load(found, folder)
    for word in words:
        assert word in errors[0]
    if not touches:
        assert bool((found["a"] == 7).all() and (found["b"] == 7).all())
    return errors[0]


def test_any_flipped_bit_of_the_manifest_is_found(damaged: Path) -> None:
    data = (damaged / MANIFEST).read_bytes()
    for place in random.Random(0).sample(range(len(data) * 8), 300):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(CorruptionError, match="checksum does not match"):
            parse_manifest(bytes(flipped), "m")
    for length in (0, 1, 20, len(data) - 1):
        with pytest.raises(CorruptionError):
            parse_manifest(data[:length], "m")
    (damaged / MANIFEST).write_bytes(flipped)
    load_fails(damaged, MANIFEST, "checksum")


def test_no_checkpoint(tmp_path: Path) -> None:
    load_fails(tmp_path, "No such file")


@pytest.mark.parametrize("fqn", ["a", "b"])
def test_a_damaged_frame_header_is_found_before_any_tensor_is_touched(
    damaged: Path, fqn: str
) -> None:
    frames = {index.fqn: shard.frame for index, shard in shards_of(damaged).items()}
    at = frames[fqn].offset
    for place in (0, 5, 30, 70):
        path = pack_file(damaged)
        byte = path.read_bytes()[at + place]
        patch(path, at + place, bytes([byte ^ 4]))
        load_fails(damaged, "CorruptionError", path.name, repr(fqn), "byte")
        patch(path, at + place, bytes([byte]))


def test_a_damaged_chunk_is_found(damaged: Path) -> None:
    frames = {index.fqn: shard.frame for index, shard in shards_of(damaged).items()}
    at = frames["a"].offset + frames["a"].nbytes - 500
    patch(pack_file(damaged), at, b"\xff" * 20)
    text = load_fails(damaged, "CorruptionError", str(pack_file(damaged)), "'a'", touches=True)
    assert re.search(r"byte \d+: chunk 0 of 1", text)


def test_a_frame_of_another_tensor_is_found(tmp_path: Path) -> None:
    """A good frame of the right shape in the wrong place."""
    save({"a": weights(50), "b": weights(50, seed=1), "n": 4}, tmp_path)
    frames = {index.fqn: shard.frame for index, shard in shards_of(tmp_path).items()}
    assert frames["a"].nbytes == frames["b"].nbytes
    path = pack_file(tmp_path)
    other = path.read_bytes()[frames["b"].offset :][: frames["b"].nbytes]
    patch(path, frames["a"].offset, other)
    found = {"a": torch.zeros(50), "b": torch.zeros(50)}
    with failing() as errors:
        load(found, tmp_path)
    assert "content hash" in errors[0]
    assert "'a'" in errors[0]
    assert not found["b"].any()


def test_a_short_and_a_missing_file_are_found(damaged: Path) -> None:
    path = pack_file(damaged)
    os.truncate(path, path.stat().st_size - 1)
    load_fails(damaged, "TruncationError", path.name)
    path.unlink()
    load_fails(damaged, "CorruptionError", path.name, "does not exist")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The manifest with a change and a correct checksum, as an attacker would write it."""
    from packhorse.codecs.content import crc32c

    document = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()
    return b'{"crc32c":"%08x","manifest":' % crc32c(body) + body + b"}\n"


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda m: m.pop("files"),
    "files is a number": lambda m: m.update(files=3),
    "absolute path": lambda m: m["files"][0].update(path="/etc/passwd"),
    "other file": lambda m: m["files"][0].update(path="../secret"),
    "url": lambda m: m["files"][0].update(path="http://example.org/x"),
    "negative offset": lambda m: m["frames"][0].update(offset=-64),
    "beyond the file": lambda m: m["frames"][0].update(offset=1 << 40),
    "float": lambda m: m["frames"][0].update(nbytes=64.0),
    "true": lambda m: m["frames"][0].update(nbytes=True),
    "unknown file": lambda m: m["frames"][0].update(file=1),
    "base is itself": lambda m: m["frames"][0].update(base=0),
    "base comes later": lambda m: m["frames"][0].update(base=1),
    "hash": lambda m: m["frames"][0].update(content_hash="00"),
    "frame dtype": lambda m: m["frames"][0].update(dtype="F64"),
    "unhashable dtype": lambda m: m["frames"][0].update(dtype=[]),
    "shard of another shape": lambda m: m["shards"][0].update(shape=[300, 200]),
    "shard missing": lambda m: m["shards"].pop(),
    "shard is bytes": lambda m: m["shards"][0].update(dtype=None),
    "chunk outside": lambda m: m["state_dict"]["a"]["chunks"][0][0].__setitem__(0, 1),
    "chunk of other rank": lambda m: m["state_dict"]["a"]["chunks"][0].__setitem__(0, [0]),
    "size overflows": lambda m: m["state_dict"]["a"].update(size=[1 << 62, 1 << 62]),
    "kind": lambda m: m["state_dict"]["a"].update(kind="pickle"),
    "dtype is a function": lambda m: m["state_dict"]["a"].update(dtype="load"),
    "layout": lambda m: m["state_dict"]["a"].update(layout="sparse_coo"),
    "huge list": lambda m: m["planner_data"].update(a=["a", 1 << 40]),
    "path of null": lambda m: m["planner_data"].update(a=[None]),
    "path is empty": lambda m: m["planner_data"].update(a=[]),
    "version": lambda m: m.update(version="1"),
    "other format": lambda m: m.update(format="x"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(damaged: Path, lie: str) -> None:
    data = rewritten(damaged, LIES[lie])
    with pytest.raises((CorruptionError, CompatibilityError)):
        parse_manifest(data, "m")


JUNK: list[Any] = [None, True, -1, 0, 7, 1 << 62, 1 << 63, 1 << 70, 1.5, "", "x", "a", "é\0"]
JUNK += [[], [0], [[0]], [None], ["a"], [1 << 62] * 3, [1] * 70, {}, {"a": 0}, {"kind": "bytes"}]


def places_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(node, dict | list):
        return
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        yield from places_in(child, (*path, key))


def test_a_manifest_with_junk_anywhere_is_refused_or_still_whole(damaged: Path) -> None:
    """Replaces each member, at any depth, by each kind of junk."""
    document = json.loads((damaged / MANIFEST).read_bytes())["manifest"]
    refused, n_whole = [], 0
    for *path, last in list(places_in(document)):
        for junk in [*JUNK, "removed"]:

            def change(copy: Any, path: Any = path, last: Any = last, junk: Any = junk) -> None:
                for key in path:
                    copy = copy[key]
                if junk == "removed":
                    del copy[last]
                else:
                    copy[last] = junk

            try:
                parse_manifest(rewritten(damaged, change), "m")
                n_whole += 1
            except (CorruptionError, CompatibilityError) as error:
                refused.append(str(error))
    assert len(refused) > 4 * n_whole
    assert all(text.startswith("m: ") and len(text) < 600 for text in refused)


def test_a_pipe_is_no_file(damaged: Path) -> None:
    path = pack_file(damaged)
    path.unlink()
    os.mkfifo(path)
    load_fails(damaged, "CorruptionError", path.name, "not a regular file")
    (damaged / MANIFEST).unlink()
    os.mkfifo(damaged / MANIFEST)
    load_fails(damaged, MANIFEST, "not a regular file")


def test_a_newer_manifest_is_refused(damaged: Path) -> None:
    data = rewritten(damaged, lambda m: m.update(version=2))
    with pytest.raises(CompatibilityError, match="version 2; this release reads versions up to 1"):
        parse_manifest(data, "m")


class Hostile:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PACKHORSE_TEST_MARK"],)


def test_pickles_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "it ran"
    monkeypatch.setenv("PACKHORSE_TEST_MARK", str(mark))
    save({"w": weights(5), "bad": Hostile()}, tmp_path / "a", trusted=True)
    found = {"w": torch.zeros(5), "bad": 0}
    with failing() as errors:
        load(found, tmp_path / "a")
    assert "'bad'" in errors[0]
    assert "trusted=True" in errors[0]
    assert "posix.mkdir" in errors[0]
    assert not mark.exists()
    assert not found["w"].any()
    load(found, tmp_path / "a", trusted=True)
    assert mark.exists()


def test_a_limit_holds_before_anything_is_decoded(tmp_path: Path) -> None:
    save({"zeros": torch.zeros(1 << 22), "w": weights(5)}, tmp_path)
    assert pack_file(tmp_path).stat().st_size < 1 << 15
    found = {"zeros": torch.ones(1 << 22), "w": torch.zeros(5)}
    with failing() as errors:
        load(found, tmp_path, max_nbytes=(1 << 24) + 19)
    assert "more than max_nbytes" in errors[0]
    assert found["zeros"].all()
    load(found, tmp_path, max_nbytes=(1 << 24) + 20)
    assert not found["zeros"].any()
