"""Checkpoints that build upon earlier ones: unchanged shards stay, others may be deltas."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import digest, failing, files_of
from dcp_samples import MANIFEST, blank, load, load_box, pack_file, patch, save, shards_of, weights

from packhorse.codecs.content import crc32c
from packhorse.disk import PackhorseReader, PackhorseWriter
from packhorse.disk.dcp.manifest import MAX_DELTAS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")


def step(number: int) -> dict[str, Any]:
    """A state in training: one tensor that stays, one that moves a little at each step."""
    moving = weights(300, 400)
    for i in range(number):
        moving = moving + weights(300, 400, seed=i + 1) * 1e-3
    return {"frozen": weights(200, 300, seed=99), "moving": moving.bfloat16(), "number": number}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("shards-*"))


def frames_of(folder: Path) -> dict[str, Any]:
    return {index.fqn: shard.frame for index, shard in shards_of(folder).items()}


def assert_holds(folder: object, state: dict[str, Any]) -> PackhorseReader:
    found = blank(state)
    reader = load(found, folder)
    assert digest(found) == digest(state)
    return reader


@pytest.mark.parametrize("where", ["path", "memory://"])
def test_unchanged_shards_stay_where_they_are(tmp_path: Path, where: str) -> None:
    root = str(tmp_path) if where == "path" else f"memory://{tmp_path.name}"
    save(step(0), f"{root}/0")
    save(step(1), f"{root}/1", base=f"{root}/0")
    assert_holds(f"{root}/1", step(1))
    assert_holds(f"{root}/0", step(0))
    if where == "path":
        frozen = frames_of(tmp_path / "1")["frozen"]
        assert frozen.file == f"../0/{pack_file(tmp_path / '0').name}"
        assert size_of(tmp_path / "1") < size_of(tmp_path / "0") / 2


def test_nothing_new_makes_no_file(tmp_path: Path) -> None:
    save(step(3), tmp_path / "0")
    save(step(3), tmp_path / "1", base=tmp_path / "0")
    assert files_of(tmp_path / "1") == {MANIFEST}
    assert_holds(tmp_path / "1", step(3))


def test_shards_that_moved_a_little_are_deltas(tmp_path: Path) -> None:
    save(step(0), tmp_path / "0")
    save(step(1), tmp_path / "1", base=tmp_path / "0")
    full, delta = frames_of(tmp_path / "0")["moving"], frames_of(tmp_path / "1")["moving"]
    assert delta.base is not None
    assert delta.base.content_hash == full.content_hash
    assert delta.nbytes < full.nbytes * 0.8
    reader = assert_holds(tmp_path / "1", step(1))
    assert reader.stats.n_frames == 4


def test_chains_end_after_eight_deltas(tmp_path: Path) -> None:
    n_deltas = []
    for number in range(MAX_DELTAS + 3):
        base = tmp_path / str(number - 1) if number else None
        save(step(number), tmp_path / str(number), base=base)
        n_deltas.append(frames_of(tmp_path / str(number))["moving"].n_deltas)
    assert n_deltas == [*range(MAX_DELTAS + 1), 0, 1]
    for number in range(MAX_DELTAS + 3):
        assert_holds(tmp_path / str(number), step(number))


def test_a_folder_of_checkpoints_may_be_moved(tmp_path: Path) -> None:
    for number in range(3):
        base = tmp_path / "run" / str(number - 1) if number else None
        save(step(number), tmp_path / "run" / str(number), base=base)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert_holds(tmp_path / "moved" / "2", step(2))


def test_paths_through_links_lead_to_the_base(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")
    save(step(0), tmp_path / "run" / "0")
    save(step(1), tmp_path / "run" / "1", base=tmp_path / "run" / "0")
    assert_holds(tmp_path / "run" / "1", step(1))
    assert_holds(tmp_path / "elsewhere", step(1))


def test_a_checkpoint_may_build_upon_the_one_that_it_replaces(tmp_path: Path) -> None:
    """What the new one needs stays; after eight deltas the old files go."""
    n_files = []
    for number in range(MAX_DELTAS + 2):
        base = tmp_path if number else None
        state = step(number)
        del state["frozen"]
        save(state, tmp_path, base=base, overwrite=True)
        assert_holds(tmp_path, state)
        n_files.append(len(list(tmp_path.glob("shards-*"))))
    assert n_files == [*range(1, MAX_DELTAS + 2), 1]


def test_other_dtypes_shapes_and_names_are_stored_in_full(tmp_path: Path) -> None:
    save({"a": weights(50, 60), "b": weights(50, 60)}, tmp_path / "0")
    state = {"a": weights(60, 50), "b": weights(50, 60).bfloat16(), "c": weights(50, 60)}
    save(state, tmp_path / "1", base=tmp_path / "0")
    assert all(frame.base is None for frame in frames_of(tmp_path / "1").values())
    assert all("/" not in frame.file for frame in frames_of(tmp_path / "1").values())
    assert_holds(tmp_path / "1", state)


def test_only_part_of_a_delta_is_decoded(tmp_path: Path) -> None:
    """Of the base all is, because its hash must be right."""
    old = weights(1024, 1024)
    new = old + weights(1024, 1024, seed=1) * 1e-6
    save({"w": old}, tmp_path / "0", level="fast")
    save({"w": new}, tmp_path / "1", base=tmp_path / "0")
    frame = frames_of(tmp_path / "1")["w"]
    assert frame.base is not None
    found, reader = load_box(tmp_path / "1", (100, 3), (5, 1000))
    assert torch.equal(found, new[100:105, 3:1003])
    assert reader.stats.n_frames == 2
    assert reader.stats.decoded_nbytes < old.nbytes * 1.1


def test_a_base_is_decoded_once_for_all_parts(tmp_path: Path) -> None:
    """Columns of a large tensor are decoded in runs of bounded memory, all against one base."""
    old = weights(2500, 6000)
    save({"w": old}, tmp_path / "0", level="fast")
    new = old.clone()
    new[::7] += 1e-6
    save({"w": new}, tmp_path / "1", base=tmp_path / "0", level="fast")
    assert frames_of(tmp_path / "1")["w"].base is not None
    found, reader = load_box(tmp_path / "1", (0, 10), (2500, 3000))
    assert torch.equal(found, new[:, 10:3010])
    assert reader.stats.decoded_nbytes < 2.1 * old.nbytes


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    with failing() as errors:
        save(step(0), tmp_path / "1", base=tmp_path / "0")
    assert "FileNotFoundError" in errors[0]
    with failing() as errors:
        save(step(0), f"memory://{tmp_path.name}/1", base=tmp_path)
    assert "FileNotFoundError" in errors[0]
    save(step(0), tmp_path / "0")
    with failing() as errors:
        save(step(0), f"memory://{tmp_path.name}/1", base=tmp_path / "0")
    assert "file system" in errors[0]


def test_a_base_that_was_lost_or_damaged_is_named(tmp_path: Path) -> None:
    save(step(0), tmp_path / "0")
    save(step(1), tmp_path / "1", base=tmp_path / "0")
    path = pack_file(tmp_path / "0")
    at = frames_of(tmp_path / "0")["moving"].offset
    for place in (20, frames_of(tmp_path / "0")["moving"].nbytes - 100):
        byte = path.read_bytes()[at + place]
        patch(path, at + place, bytes([byte ^ 1]))
        with failing() as errors:
            load(blank(step(1)), tmp_path / "1")
        assert "CorruptionError" in errors[0]
        assert str(path) in errors[0]
        assert "'moving'" in errors[0]
        patch(path, at + place, bytes([byte]))
    shutil.rmtree(tmp_path / "0")
    with failing() as errors:
        load(blank(step(1)), tmp_path / "1")
    assert str(path) in errors[0]
    assert "is not there" in errors[0]


def test_a_damaged_base_spoils_no_save(tmp_path: Path) -> None:
    save(step(0), tmp_path / "0")
    frame = frames_of(tmp_path / "0")["moving"]
    patch(pack_file(tmp_path / "0"), frame.offset + frame.nbytes - 100, b"\xff" * 9)
    with failing() as errors:
        save(step(1), tmp_path / "1", base=tmp_path / "0")
    assert "CorruptionError" in errors[0]
    assert not files_of(tmp_path / "1")


def test_async_saves_build_upon_each_other(tmp_path: Path) -> None:
    for number in range(3):
        base = tmp_path / str(number - 1) if number else None
        writer = PackhorseWriter(tmp_path / str(number), base=base)
        dcp.async_save(step(number), storage_writer=writer).result()
    assert_holds(tmp_path / "2", step(2))
    assert frames_of(tmp_path / "2")["moving"].n_deltas == 2


def test_a_base_that_lies_about_its_content_is_not_built_upon(tmp_path: Path) -> None:
    """Else the new checkpoint would name a base that nobody finds."""
    save(step(0), tmp_path / "0")
    old, pack = frames_of(tmp_path / "0")["moving"], pack_file(tmp_path / "0")
    truth = bytes.fromhex(old.content_hash)
    lie = bytes(byte ^ 1 for byte in truth)
    header = bytearray(pack.read_bytes()[old.offset : old.offset + old.nbytes])
    del header[int.from_bytes(header[12:16], "little") :]
    header[:] = header.replace(truth, lie)
    header[44:48] = bytes(4)
    header[44:48] = crc32c(bytes(header)).to_bytes(4, "little")
    patch(pack, old.offset, bytes(header))
    path = tmp_path / "0" / MANIFEST
    body = path.read_bytes()[len(b'{"crc32c":"00000000","manifest":') : -2].replace(
        truth.hex().encode(), lie.hex().encode()
    )
    path.write_bytes(b'{"crc32c":"%08x","manifest":' % crc32c(body) + body + b"}\n")
    with failing() as errors:
        save(step(1), tmp_path / "1", base=tmp_path / "0")
    assert "the content hash of the decoded bytes is" in errors[0]
    assert not files_of(tmp_path / "1")
