"""Checkpoints of torch.distributed.checkpoint: real saves and loads, in one process and several."""

import itertools
import json
import math
import multiprocessing as mp
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import (
    Ranks,
    digest,
    failing,
    files_of,
    load_and_save,
    load_damaged,
    load_tensor,
    numbered_state,
    save_and_load_alone,
    save_async,
    save_badly,
    save_tensor,
    save_tensor_again,
    save_until_killed,
    train_and_save,
)
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from packhorse.disk import PackhorseReader, PackhorseWriter
from packhorse.disk.dcp.manifest import parse_manifest
from packhorse.disk.dcp.regions import cut_box, strides_of
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.frame import Frame

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

MANIFEST = "packhorse.json"


def save(state: dict[str, Any], url: object, **options: Any) -> None:
    dcp.save(state, storage_writer=PackhorseWriter(str(url), **options))


def load(state: dict[str, Any], url: object, **options: Any) -> PackhorseReader:
    reader = PackhorseReader(str(url), **options)
    dcp.load(state, storage_reader=reader)
    return reader


def blank(value: Any) -> Any:
    """A state of the same form with nothing in it."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def shards_of(folder: Path) -> dict[Any, Any]:
    return parse_manifest((folder / MANIFEST).read_bytes(), "test").storage_data


def pack_file(folder: Path) -> Path:
    (path,) = folder.glob("shards-*")
    return path


# One process.

ODD_STATE = {
    "model": {
        "float": weights(300, 70),
        "bf16": weights(64, 128).bfloat16(),
        "half": weights(40, 3).half(),
        "double": weights(11).double(),
        "fp8": weights(16, 16).to(torch.float8_e4m3fn),
        "complex": torch.complex(weights(5, 5), weights(5, 5, seed=1)),
        "complex128": torch.complex(weights(5, 5), weights(5, 5, seed=1)).to(torch.complex128),
        "conj": torch.complex(weights(5, 5), weights(5, 5, seed=1)).conj(),
        "bool": weights(77) > 0,
        "int": torch.arange(-50, 50),
        "u16": torch.arange(9).to(torch.uint16),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "transposed": weights(30, 20).T,
        "strided": weights(30, 20)[::2, 1::3],
        "expanded": weights(1, 7).expand(5, 7),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "slash/and.dot é": weights(3),
        "channels_last": weights(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(weights(4)),
    },
    "list": [weights(3), {"deep": weights(2)}, [weights(1)]],
    "step": 17,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "none": None,
    "text": "αβγ",
}


@pytest.mark.parametrize("where", ["path", "file://", "memory://"])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, where: str) -> None:
    url = {"path": str(tmp_path / "a"), "file://": f"file://{tmp_path}/a"}.get(
        where, f"memory://{tmp_path.name}/a"
    )
    save(ODD_STATE, url)
    found = blank(ODD_STATE)
    load(found, url)
    assert digest(found) == digest(ODD_STATE)


def test_without_flattening_too(tmp_path: Path) -> None:
    state = {"a": weights(5), "b": {"c": 3}}
    writer = PackhorseWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    found = {"a": torch.zeros(5), "b": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=PackhorseReader(tmp_path), planner=planner)
    assert digest(found) == digest(state)


def test_checkpoint_id_names_the_folder(tmp_path: Path) -> None:
    writer, reader = PackhorseWriter(tmp_path / "a"), PackhorseReader(tmp_path / "a")
    for name in ("b", "c"):
        state = {"w": weights(9, seed=ord(name))}
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer)
        found = {"w": torch.zeros(9)}
        dcp.load(found, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert torch.equal(found["w"], state["w"])
    assert not (tmp_path / "a").exists()


def test_pytorchs_own_tools_can_read_it(tmp_path: Path) -> None:
    """What needs no state dict: the converter's planner makes one of the manifest."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    save({"m": {"w": weights(9), "l": [weights(2), weights(3)]}, "n": 4}, tmp_path)
    found = _load_state_dict_from_keys(storage_reader=PackhorseReader(tmp_path))
    assert torch.equal(found["m"]["l"][1], weights(3))
    part = _load_state_dict_from_keys({"m.w"}, storage_reader=PackhorseReader(tmp_path))
    assert list(part) == ["m"]
    assert list(part["m"]) == ["w"]


def test_files_are_what_the_page_says(tmp_path: Path) -> None:
    state = {"a": weights(300, 40), "b": weights(7).bfloat16(), "c": 5}
    save(state, tmp_path)
    path = pack_file(tmp_path)
    assert files_of(tmp_path) == {MANIFEST, path.name}
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"a@0,0", "b@0", "c@"}
        frame = Frame.from_buffer(file.get_tensor("b@0"))
        assert (frame.dtype, frame.shape) == ("BF16", (7,))
        assert file.get_tensor("a@0,0").dtype == np.uint8
    for shard in shards_of(tmp_path).values():
        assert shard.frame.offset % 64 == 0
        assert shard.frame.file_nbytes == path.stat().st_size
        data = path.read_bytes()[shard.frame.offset :][: shard.frame.nbytes]
        assert Frame.from_buffer(data).content_hash.hex() == shard.frame.content_hash
    document = json.loads((tmp_path / MANIFEST).read_text())
    assert document["manifest"]["planner_data"] == {"a": ["a"], "b": ["b"], "c": ["c"]}


def test_equal_shards_are_stored_once(tmp_path: Path) -> None:
    same = weights(500, 100)
    save({"a": same, "b": same.clone(), "c": same.view(100, 500)}, tmp_path)
    frames = {index.fqn: shard.frame for index, shard in shards_of(tmp_path).items()}
    assert frames["a"] == frames["b"] != frames["c"]
    with safe_open(pack_file(tmp_path), "np") as file:
        assert len(list(file.keys())) == 2
    found = blank({"a": same, "b": same, "c": same.view(100, 500)})
    assert load(found, tmp_path).stats.n_frames == 2
    assert all(torch.equal(value.flatten(), same.flatten()) for value in found.values())


def test_large_checkpoints_go_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.disk.dcp.storage.LocalStorage.max_file_nbytes", 1 << 16)
    state = {f"w{i}": weights(50, 100, seed=i) for i in range(9)} | {"again": weights(50, 100)}
    save(state, tmp_path)
    assert len(list(tmp_path.glob("shards-*"))) == 3
    found = blank(state)
    load(found, tmp_path)
    assert digest(found) == digest(state)


def test_some_keys_are_loaded_alone(tmp_path: Path) -> None:
    save({"a": weights(300, 300), "b": weights(10), "c": 3}, tmp_path)
    found = {"b": torch.zeros(10)}
    reader = load(found, tmp_path)
    assert (reader.stats.n_frames, reader.stats.decoded_nbytes) == (1, 40)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    save({"a": weights(30, 30)}, tmp_path)
    found = {"a": torch.zeros(30, 30, dtype=torch.bfloat16)}
    load(found, tmp_path)
    assert torch.equal(found["a"], weights(30, 30).bfloat16())


@pytest.mark.parametrize("level", ["fast", "default", "max"])
@pytest.mark.parametrize("threads", [1, 3])
def test_levels_and_threads(tmp_path: Path, level: str, threads: int) -> None:
    state = {f"w{i}": weights(200, 90, seed=i) for i in range(4)}
    save(state, tmp_path, level=level, threads=threads)
    found = blank(state)
    load(found, tmp_path, threads=threads)
    assert digest(found) == digest(state)


def test_bad_arguments() -> None:
    for options in ({"level": "best"}, {"threads": 0}):
        with pytest.raises(ValueError, match="it must be"):
            PackhorseWriter("x", **options)
    with pytest.raises(ValueError, match="threads is 0"):
        PackhorseReader("x", threads=0)
    assert PackhorseWriter.validate_checkpoint_id("some/folder")
    assert PackhorseReader.validate_checkpoint_id("memory://x")
    assert not PackhorseWriter.validate_checkpoint_id("nonsense://x")


# Boxes of shards.


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box of each tensor."""

    def __init__(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def create_local_plan(self) -> LoadPlan:
        items = [
            item
            for fqn in self.state_dict
            for item in create_read_items_for_chunk_list(
                fqn, self.metadata.state_dict_metadata[fqn], [self.box]
            )
        ]
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.state_dict[index.fqn]


def load_box(
    folder: object, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[torch.Tensor, PackhorseReader]:
    found = {"w": torch.full(lengths, math.nan)}
    reader = PackhorseReader(str(folder))
    dcp.load(found, storage_reader=reader, planner=BoxPlanner(offsets, lengths))
    return found["w"], reader


@pytest.mark.parametrize("seed", range(60))
def test_runs_cover_a_box_and_meet_no_chunk_in_vain(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 7) for _ in range(rng.randint(0, 4))]
    lengths = [rng.randint(0 if seed % 5 == 0 else 1, size) for size in shape]
    offsets = [rng.randint(0, size - n) for size, n in zip(shape, lengths, strict=True)]
    chunk = rng.randint(1, 12)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    found = np.full(lengths, -1)
    met = set()
    for piece in cut_box(shape, offsets, lengths, chunk):
        run = numbers.reshape(-1)[piece.start : piece.stop]
        strides = [run.itemsize * stride for stride in strides_of(shape)]
        part = np.lib.stride_tricks.as_strided(run, piece.lengths, strides)
        ends = [o + n for o, n in zip(piece.offsets, piece.lengths, strict=True)]
        found[tuple(itertools.starmap(slice, zip(piece.offsets, ends, strict=True)))] = part
        met |= set((run // chunk).tolist())
        assert piece.is_run == (run.size == part.size)
    assert np.array_equal(found, box)
    needed = set((box // chunk).flatten().tolist())
    # A gap of a chunk's length may begin inside one, and then hold none that is whole.
    assert needed <= met
    assert len(met) <= 2 * len(needed)


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths", "n_chunks"),
    [
        ((1024, 1024), (0, 0), (1024, 1024), 16),
        ((1024, 1024), (66, 0), (10, 1024), 1),
        ((1024, 1024), (120, 0), (10, 1024), 2),
        ((1024, 1024), (0, 5), (1024, 9), 16),  # every chunk has some of each column
        ((1024, 1024), (512, 5), (64, 9), 1),
        ((4, 1024, 256), (0, 0, 0), (4, 10, 256), 4),  # a run for each of the four
        ((4, 1024, 256), (1, 500, 3), (2, 30, 7), 4),
        ((2, 524288), (0, 131072), (2, 100), 2),
        ((1048576,), (131071,), (2,), 2),
    ],
)
def test_only_chunks_that_a_box_meets_are_decoded(
    tmp_path: Path,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    n_chunks: int,
) -> None:
    """Counted, and shown: all other chunks are damaged, and nobody notices."""
    whole = weights(*shape)
    save({"w": whole}, tmp_path, level="fast")
    (shard,) = shards_of(tmp_path).values()
    path = pack_file(tmp_path)
    data = bytearray(path.read_bytes())
    at = shard.frame.offset
    frame = Frame.from_buffer(bytes(data[at : at + shard.frame.nbytes]))
    assert frame.chunk_nbytes == 1 << 18
    ends = [o + n for o, n in zip(offsets, lengths, strict=True)]
    cut = tuple(itertools.starmap(slice, zip(offsets, ends, strict=True)))
    numbers = np.arange(whole.numel()).reshape(shape)[cut]
    needed = set((numbers * 4 // frame.chunk_nbytes).flatten().tolist())
    for chunk in set(range(frame.n_chunks)) - needed:
        start, stop = frame.payload_range(chunk << 18, (chunk + 1) << 18)
        data[at + start : at + stop] = bytes(stop - start)
    path.write_bytes(data)
    found, reader = load_box(tmp_path, offsets, lengths)
    assert torch.equal(found, whole[cut])
    assert reader.stats.n_chunks == len(needed) == n_chunks


def test_reads_of_the_same_chunk_decode_it_once(tmp_path: Path) -> None:
    same = weights(100, 100)
    save({"a": same, "b": same}, tmp_path)
    found = blank({"a": same, "b": same})
    reader = load(found, tmp_path)
    assert torch.equal(found["b"], same)
    assert (reader.stats.n_chunks, reader.stats.decoded_nbytes) == (1, same.nbytes)


def test_a_remote_file_is_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"memory://{tmp_path.name}"
    whole = weights(2048, 1024)
    save({"w": whole, "v": weights(9)}, url)
    fetched = []
    real = MemoryFileSystem.cat_file

    def spy(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        data = real(self, path, start=start, end=end, **more)
        fetched.append((path, len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", spy)
    found, reader = load_box(url, (1000, 0), (20, 1024))
    assert torch.equal(found, whole[1000:1020])
    assert reader.stats.n_chunks == 1
    nbytes = sum(n for path, n in fetched if "shards-" in path)
    assert nbytes < whole.nbytes / 8


# What is there already.


def test_an_older_checkpoint_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    save({"w": weights(9)}, tmp_path)
    before = files_of(tmp_path)
    with failing() as errors:
        save({"w": weights(9, seed=1)}, tmp_path)
    assert "FileExistsError" in errors[0]
    assert "overwrite=True" in errors[0]
    assert files_of(tmp_path) == before
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".packhorse-0123.tmp").write_text("of a save that was killed")
    save({"w": weights(9, seed=1)}, tmp_path, overwrite=True)
    after = files_of(tmp_path)
    assert len(after) == 3
    assert after & before == {MANIFEST}
    assert "notes.txt" in after
    found = {"w": torch.zeros(9)}
    load(found, tmp_path)
    assert torch.equal(found["w"], weights(9, seed=1))


class BrokenPlanner(DefaultSavePlanner):
    """Fails at one tensor, or adds what a manifest cannot hold."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def resolve_data(self, write_item: Any) -> Any:
        if self.what == "resolve" and write_item.index.fqn == "w5":
            raise RuntimeError("the device is gone")
        if self.what == "shape" and write_item.index.fqn == "w5":
            return torch.zeros(3)
        return super().resolve_data(write_item)

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        if self.what == "planner_data":
            metadata.planner_data["w5"] = ("w5", 1.5)
        return plans, metadata


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("resolve", "the device is gone"),
        ("shape", "the planner gave shape [3]"),
        ("planner_data", "planner_data['w5'] is ('w5', 1.5)"),
    ],
)
def test_a_save_that_fails_leaves_all_as_it_was(
    tmp_path: Path, what: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.disk.dcp.storage.LocalStorage.max_file_nbytes", 1 << 12)
    state = {f"w{i}": weights(30, 30, seed=i) for i in range(9)}
    save(state, tmp_path)
    before = files_of(tmp_path)
    other = {name: tensor + 1 for name, tensor in state.items()}
    with failing() as errors:
        writer = PackhorseWriter(tmp_path, overwrite=True)
        dcp.save(other, storage_writer=writer, planner=BrokenPlanner(what))
    assert words in errors[0]
    assert files_of(tmp_path) == before
    found = blank(state)
    load(found, tmp_path)
    assert digest(found) == digest(state)


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    with failing() as errors:
        save({"w": torch.eye(3).to_sparse()}, tmp_path)
    assert "dense" in errors[0]
    assert not files_of(tmp_path)


def test_plans_of_an_earlier_save_do_no_harm(tmp_path: Path) -> None:
    """PyTorch hands `write_data` the plan of the save before, if nothing has changed."""
    for number in range(3):
        state = {"w": weights(20, 20, seed=number)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = PackhorseWriter(tmp_path / str(number))
        dcp.save(state, storage_writer=writer, planner=planner)
    names = set()
    for number in range(3):
        found = {"w": torch.zeros(20, 20)}
        load(found, tmp_path / str(number))
        assert torch.equal(found["w"], weights(20, 20, seed=number))
        names.add(pack_file(tmp_path / str(number)).name)
    assert len(names) == 3


def test_async_save_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    state = {"w": weights(400, 400), "n": 1}
    before = digest(state)
    future = dcp.async_save(state, storage_writer=PackhorseWriter(tmp_path))
    state["w"].zero_()
    future.result()
    found = blank(state)
    load(found, tmp_path)
    assert digest(found) == before


def test_writer_and_reader_travel_between_processes() -> None:
    for thing in (PackhorseWriter("x", level="max", threads=2), PackhorseReader("x")):
        assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


# Damage.


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


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


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
    load_fails(damaged, "CorruptionError", path.name, "is not there")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The manifest with a change and a good checksum, as somebody hostile would write it."""
    from packhorse.codecs.content import crc32c

    document = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()
    return b'{"crc32c":"%08x","manifest":' % crc32c(body) + body + b"}\n"


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda m: m.pop("files"),
    "files is a number": lambda m: m.update(files=3),
    "absolute path": lambda m: m["files"][0].update(path="/etc/passwd"),
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


def test_a_newer_manifest_is_refused(damaged: Path) -> None:
    data = rewritten(damaged, lambda m: m.update(version=2))
    with pytest.raises(CompatibilityError, match="version 2 of the manifest"):
        parse_manifest(data, "m")


class Hostile:
    """Runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PACKHORSE_TEST_MARK"],)


def test_pickles_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "it ran"
    monkeypatch.setenv("PACKHORSE_TEST_MARK", str(mark))
    save({"w": weights(5), "bad": Hostile()}, tmp_path / "a")
    found = {"w": torch.zeros(5), "bad": 0}
    with failing() as errors:
        load(found, tmp_path / "a")
    assert "'bad'" in errors[0]
    assert "trusted=True" in errors[0]
    assert not mark.exists()
    assert not found["w"].any()
    load(found, tmp_path / "a", trusted=True)
    assert mark.exists()


# Killed in the middle.


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Saves follow each other in a process that is killed at a random moment; what it had reported
    last, or the one after it, is there."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["packhorse.disk.dcp", "torch.distributed.fsdp"])
    save(numbered_state(0), tmp_path)
    rng = random.Random(1)
    last = 0
    for _ in range(25):
        reports, theirs = context.Pipe(duplex=False)
        args = (str(tmp_path), theirs, last + 1)
        process = context.Process(target=save_until_killed, args=args)
        process.start()
        theirs.close()
        assert reports.poll(60)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        while reports.poll():
            try:
                last = reports.recv()
            except EOFError:
                break
        found = blank(numbered_state(0))
        load(found, tmp_path)
        assert found["number"] in (last, last + 1)
        assert digest(found) == digest(numbered_state(found["number"]))
        last = found["number"]
    save(numbered_state(0), tmp_path, overwrite=True)
    assert len(files_of(tmp_path)) == 2


# Several processes.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.close()


def test_fsdp2_with_adamw_goes_from_4_ranks_to_2_to_1_and_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Every load gives the same bits, and training goes on with the same losses."""
    before, losses = ranks.run(4, train_and_save, str(tmp_path / "4"))[0]
    steps = [(2, "4", "2"), (1, "2", "1"), (2, "1", "2b"), (4, "2b", "4b"), (4, "1", None)]
    for world, source, target in steps:
        there = None if target is None else str(tmp_path / target)
        for found, later in ranks.run(world, load_and_save, str(tmp_path / source), there):
            assert found == before
            assert later == pytest.approx(losses, rel=1e-4)
    assert len(list((tmp_path / "4").glob("shards-*"))) == 4
    # Plain values, which all ranks have, are stored by one of them.
    assert sum(index.fqn == "epoch" for index in shards_of(tmp_path / "4")) == 1


@pytest.mark.parametrize(
    ("shape", "saved", "loaded"),
    [
        ((5, 7), (4, (4,), "0"), (2, (2,), "1")),  # a rank with nothing
        ((64, 48), (4, (2, 2), "01"), (2, (2,), "0")),
        ((64, 48), (2, (2,), "1"), (4, (2, 2), "R1")),
        ((33, 9, 4), (1, (1,), "R"), (4, (2, 2), "10")),
    ],
    ids=str,
)
def test_dtensors_are_resharded(
    ranks: Ranks, tmp_path: Path, shape: Any, saved: Any, loaded: Any
) -> None:
    ranks.run(saved[0], save_tensor, str(tmp_path), shape, *saved[1:])
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for found, _ in ranks.run(loaded[0], load_tensor, str(tmp_path), shape, *loaded[1:]):
        assert found == digest(whole)


def test_each_rank_decodes_its_part_only(ranks: Ranks, tmp_path: Path) -> None:
    shape = (1024, 512)  # eight chunks
    ranks.run(1, save_tensor, str(tmp_path), shape, (1,), "R")
    for _, stats in ranks.run(4, load_tensor, str(tmp_path), shape, (4,), "0"):
        assert stats["n_chunks"] == 2 + 2  # and the two small values


def test_replicated_tensors_are_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (100, 100), (2,), "R")
    assert sorted(index.fqn for index in shards_of(tmp_path)) == ["n", "plain", "x"]


def test_async_save_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_async, str(tmp_path))
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(7))
    for found, _ in ranks.run(2, load_tensor, str(tmp_path), (64, 32), (2,), "0"):
        assert found == digest(whole)


def test_a_rank_that_fails_fails_all_and_the_older_checkpoint_stays(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (64, 32), (2,), "0")
    for errors in ranks.run(2, save_badly, str(tmp_path)):
        assert errors == {1: "RuntimeError: the device is gone"}
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for found, _ in ranks.run(2, load_tensor, str(tmp_path), (64, 32), (2,), "0"):
        assert found == digest(whole)
    # What the other rank had written is removed by the next save.
    assert len(files_of(tmp_path)) == 4
    ranks.run(2, save_tensor_again, str(tmp_path))
    assert len(files_of(tmp_path)) == 3


def test_damage_that_one_rank_sees_keeps_all_from_reading(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (64, 32), (2,), "0")
    frames = {
        index.offset: shard.frame
        for index, shard in shards_of(tmp_path).items()
        if index.fqn == "x"
    }
    second = frames[torch.Size([32, 0])]
    patch(tmp_path / second.file, second.offset + 20, b"\xff")
    for errors, untouched in ranks.run(2, load_damaged, str(tmp_path)):
        assert list(errors) == [1]
        assert "CorruptionError" in errors[1]
        assert second.file in errors[1]
        assert untouched


def test_ranks_may_save_without_talking_to_each_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_alone, str(tmp_path)) == [(0, [0.0]), (1, [1.0])]
    assert len(files_of(tmp_path)) == 4
