"""Checkpoints based on earlier ones: unchanged shards are reused, others may be deltas."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import digest, failing, files_of
from dcp_samples import MANIFEST, blank, load, load_box, pack_file, patch, save, shards_of, weights
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from packhorse.codecs.content import crc32c
from packhorse.disk import PackhorseReader, PackhorseWriter
from packhorse.disk.dcp.checkpoint_manifest import MAX_DELTAS, parse_manifest
from packhorse.disk.dcp.pack_files import split_volumes
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.frame.many import PackJob
from packhorse.storage.frames import packer

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
        assert frozen.pack == f"../0/{pack_file(tmp_path / '0').name}"
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
    assert delta.base.content == full.content
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
    """Files that the new checkpoint needs stay; after eight deltas, the old files are removed."""
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
    state = {"a": weights(60, 50), "b": weights(50, 60, seed=1).bfloat16(), "c": weights(50, 60)}
    save(state, tmp_path / "1", base=tmp_path / "0")
    assert all(frame.base is None for frame in frames_of(tmp_path / "1").values())
    assert all("/" not in frame.pack for frame in frames_of(tmp_path / "1").values())
    assert_holds(tmp_path / "1", state)


def test_only_part_of_a_delta_is_decoded(tmp_path: Path) -> None:
    """The base is decoded as a whole, because its hash must be checked."""
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
    assert "does not exist" in errors[0]


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
    """Otherwise the new checkpoint would name a base that does not exist."""
    save(step(0), tmp_path / "0")
    old, pack = frames_of(tmp_path / "0")["moving"], pack_file(tmp_path / "0")
    truth = old.content.digest
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


# Rounded copies, which build upon their masters in the same checkpoint.


def mixed(number: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A state of mixed precision in training: the model is a rounded copy, and comes first."""
    shape = shape or (300, 400)
    master = weights(*shape)
    for i in range(number):
        master = master + weights(*shape, seed=i + 1) * 1e-5
    return {"model": {"w": master.to(dtype)}, "master": {"w": master}, "number": number}


def assert_is_cast(folder: Path) -> None:
    frames = frames_of(folder)
    assert frames["model.w"].base == frames["master.w"]
    assert frames["model.w"].nbytes < frames["master.w"].nbytes / 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["path", "memory://"])
def test_rounded_copies_build_upon_their_masters(
    tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    root = str(tmp_path) if where == "path" else f"memory://{tmp_path.name}"
    state = mixed(1, dtype=dtype)
    save(state, f"{root}/0")
    if where == "path":
        assert_is_cast(tmp_path / "0")
    reader = assert_holds(f"{root}/0", state)
    values = sum(group["w"].nbytes for group in (state["model"], state["master"]))
    assert values < reader.stats.decoded_nbytes < values + 5000  # the master is decoded once
    assert_holds(f"{root}/0", {"model": state["model"]})
    assert_holds(f"{root}/0", {"master": state["master"]})


def test_copies_and_masters_in_batches_of_their_own(tmp_path: Path) -> None:
    """Even if tensors are larger than a batch, the master is decoded only once."""
    state = mixed(0, 3000, 3000)
    save(state, tmp_path, level="fast")
    assert_is_cast(tmp_path)
    reader = assert_holds(tmp_path, state)
    values = sum(group["w"].nbytes for group in (state["model"], state["master"]))
    assert values < reader.stats.decoded_nbytes < values + 5000


def test_only_part_of_a_copy_is_decoded(tmp_path: Path) -> None:
    master = weights(1024, 1024)
    save({"w": master.bfloat16(), "master": master}, tmp_path)
    assert frames_of(tmp_path)["w"].base == frames_of(tmp_path)["master"]
    found, reader = load_box(tmp_path, (100, 3), (5, 1000))
    assert torch.equal(found, master.bfloat16()[100:105, 3:1003].float())
    assert reader.stats.n_frames == 2
    assert master.nbytes < reader.stats.decoded_nbytes < master.nbytes + 11_000


def test_copies_follow_their_masters_along_a_chain(tmp_path: Path) -> None:
    """The master's chain is shorter by one, so that the copy's chain keeps to the limit."""
    n_deltas = []
    for number in range(MAX_DELTAS + 2):
        base = tmp_path / str(number - 1) if number else None
        save(mixed(number), tmp_path / str(number), base=base)
        assert_is_cast(tmp_path / str(number))
        n_deltas.append(frames_of(tmp_path / str(number))["model.w"].n_deltas)
    assert n_deltas == [*range(1, MAX_DELTAS + 1), 1, 2]
    for number in range(MAX_DELTAS + 2):
        assert_holds(tmp_path / str(number), mixed(number))


def test_a_master_whose_chain_is_full_has_no_copies(tmp_path: Path) -> None:
    for number in range(MAX_DELTAS + 1):
        base = tmp_path / str(number - 1) if number else None
        save({"master": mixed(number)["master"]}, tmp_path / str(number), base=base)
    last = tmp_path / str(MAX_DELTAS)
    assert frames_of(last)["master.w"].n_deltas == MAX_DELTAS
    state = mixed(MAX_DELTAS)
    save(state, tmp_path / "new", base=last)
    assert frames_of(tmp_path / "new")["master.w"].n_deltas == MAX_DELTAS  # it has not changed
    assert frames_of(tmp_path / "new")["model.w"].base is None
    assert_holds(tmp_path / "new", state)


def test_copies_and_masters_may_stay_come_and_go(tmp_path: Path) -> None:
    save(mixed(0), tmp_path / "0")
    save(mixed(0), tmp_path / "1", base=tmp_path / "0")
    assert files_of(tmp_path / "1") == {MANIFEST}
    model = {"model": mixed(1)["model"]}
    save(model, tmp_path / "2", base=tmp_path / "1")  # a delta to the old copy
    assert frames_of(tmp_path / "2")["model.w"].n_deltas == 2
    save(mixed(1), tmp_path / "3", base=tmp_path / "2")  # the copy has not changed
    assert frames_of(tmp_path / "3")["model.w"].n_deltas == 2
    frozen = {"model": {"w": mixed(1)["model"]["w"] + 1}, "master": mixed(1)["master"]}
    save(frozen, tmp_path / "4", base=tmp_path / "3")
    for i, state in enumerate((mixed(0), mixed(0), model, mixed(1), frozen)):
        assert_holds(tmp_path / str(i), state)


def test_equal_copies_are_stored_once(tmp_path: Path) -> None:
    master = weights(100, 100)
    state = {"a": master.bfloat16(), "b": master, "c": master.bfloat16(), "d": master.clone()}
    save({**state, "half": master.half()}, tmp_path)
    frames = frames_of(tmp_path)
    assert frames["a"] == frames["c"]
    assert frames["b"] == frames["d"] == frames["a"].base == frames["half"].base
    assert_holds(tmp_path, {**state, "half": master.half()})


def test_what_is_no_copy_is_not_taken_for_one(tmp_path: Path) -> None:
    """Tensors that only begin like a copy, have another shape, are small, or are constant."""
    master, other = weights(100, 100), weights(100, 100)
    other[10:] = weights(90, 100, seed=1)
    small = weights(20)
    state = {
        "master": master,
        "other": other.bfloat16(),
        "turned": master.reshape(50, 200).bfloat16(),
        "small": small,
        "copy": small.bfloat16(),
        "zeros": torch.zeros(100, 100),
        "ones": torch.ones(100, 100),
        "like": torch.zeros(100, 100).bfloat16(),
    }
    save(state, tmp_path)
    assert all(frame.base is None for frame in frames_of(tmp_path).values())
    assert_holds(tmp_path, state)


def test_no_volume_parts_a_copy_from_its_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.disk.dcp.pack_files._MAX_LOCAL_NBYTES", 50_000)
    masters = {str(i): weights(100, 100, seed=i) for i in range(4)}
    state = {"model": {i: master.bfloat16() for i, master in masters.items()}, "master": masters}
    save(state, tmp_path)
    frames = frames_of(tmp_path)
    assert all(frames[f"model.{i}"].base == frames[f"master.{i}"] for i in masters)
    assert len(list(tmp_path.glob("shards-*"))) == 4
    assert_holds(tmp_path, state)


def test_volumes_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(split_volumes([[4, 2], [1], [3], [9, 9], [1]], 7)) == [
        range(2), range(2, 3), range(3, 4), range(4, 5)
    ]  # fmt: skip
    monkeypatch.setattr("packhorse.disk.dcp.pack_files._MAX_ENTRIES", 3)
    assert list(split_volumes([[1, 1], [1], [1, 1], [1, 1]], 99)) == [
        range(2), range(2, 3), range(3, 4)
    ]  # fmt: skip
    assert list(split_volumes([], 7)) == []


class WideningPlanner(DefaultSavePlanner):
    """Gives tensors of another dtype than it has announced."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value.double() if write_item.index.fqn == "master.w" else value


def test_a_planner_that_gives_something_else_than_it_announced(tmp_path: Path) -> None:
    writer = PackhorseWriter(tmp_path)
    dcp.save(mixed(0), storage_writer=writer, planner=WideningPlanner())
    assert frames_of(tmp_path)["model.w"].base is None
    assert_holds(tmp_path, mixed(0))


def test_a_damaged_master_is_named(tmp_path: Path) -> None:
    save(mixed(0), tmp_path)
    frame = frames_of(tmp_path)["master.w"]
    patch(pack_file(tmp_path), frame.offset + frame.nbytes - 100, b"\xff" * 9)
    with failing() as errors:
        load(blank({"model": mixed(0)["model"]}), tmp_path)
    assert "CorruptionError" in errors[0]
    with failing() as errors:
        load(blank(mixed(0)), tmp_path)
    assert "CorruptionError" in errors[0]
    assert "'master.w'" in errors[0]


def test_a_master_that_changes_meanwhile_spoils_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would name a base that does not exist."""
    state = mixed(0)
    compress = packer.compress_many

    def disturbed(jobs: Sequence[PackJob], **kwargs: Any) -> list[Frame]:
        frames = compress(jobs, **kwargs)
        if any(job.name is not None and job.name.startswith("master") for job in jobs):
            state["master"]["w"].add_(1)
        return frames

    monkeypatch.setattr(packer, "compress_many", disturbed)
    state["model"]["w"] = (state["master"]["w"] + 1).bfloat16()
    state["model"]["w"].view(-1)[:64] = state["master"]["w"].view(-1)[:64].bfloat16()
    with failing() as errors:
        save(state, tmp_path)
    assert "ChangedError" in errors[0]
    assert "changed" in errors[0]
    assert not files_of(tmp_path)


def test_a_manifest_that_lies_about_a_master_is_refused(tmp_path: Path) -> None:
    save({**mixed(0), "other": weights(7, 9)}, tmp_path)
    text = (tmp_path / MANIFEST).read_bytes()[len(b'{"crc32c":"00000000","manifest":') : -2]
    frames = json.loads(text)["frames"]
    (copy,) = (i for i, frame in enumerate(frames) if frame["base"] is not None)
    master = frames[copy]["base"]
    places = [i for i in range(len(frames)) if i not in (copy, master)]
    for place, base in [(copy, i) for i in (copy, *places)] + [(master, copy)]:
        document = json.loads(text)
        document["frames"][place]["base"] = base
        body = json.dumps(document).encode()
        with pytest.raises(CorruptionError):
            parse_manifest(b'{"crc32c":"%08x","manifest":' % crc32c(body) + body + b"}\n", "m")
