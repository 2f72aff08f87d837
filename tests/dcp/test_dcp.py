"""Checkpoints of torch.distributed.checkpoint: real saves and loads in one process."""

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import (
    digest,
    failing,
    files_of,
)
from dcp_samples import MANIFEST, blank, load, pack_file, save, shards_of, weights
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from packhorse.disk import PackhorseReader, PackhorseWriter
from packhorse.frame import Frame

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

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


def test_an_empty_state(tmp_path: Path) -> None:
    save({}, tmp_path)
    assert files_of(tmp_path) == {MANIFEST}
    load({}, tmp_path)


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
    """Tools that need no state dict: the converter's planner makes a state dict from the
    manifest."""
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
        assert shard.frame.pack_nbytes == path.stat().st_size
        data = path.read_bytes()[shard.frame.offset :][: shard.frame.nbytes]
        assert Frame.from_buffer(data).content_hash == shard.frame.content.digest
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


def test_tensors_of_other_dtypes_may_share_a_frame(tmp_path: Path) -> None:
    """A dtype that safetensors lacks is stored as bytes, and may share a frame with equal bytes."""
    wide = torch.complex(weights(3, 50), weights(3, 50, seed=1)).to(torch.complex128)
    state = {"wide": wide, "bytes": wide.view(torch.uint8).flatten()}
    save(state, tmp_path)
    assert len({shard.frame for shard in shards_of(tmp_path).values()}) == 1
    found = blank(state)
    load(found, tmp_path)
    assert digest(found) == digest(state)


def test_large_checkpoints_go_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.disk.dcp.pack_files._MAX_LOCAL_NBYTES", 1 << 16)
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


# Files that exist already.


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
    """Fails at one tensor, or adds a value that a manifest cannot hold."""

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
    monkeypatch.setattr("packhorse.disk.dcp.pack_files._MAX_LOCAL_NBYTES", 1 << 12)
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


@pytest.mark.filterwarnings("ignore")  # of what is deprecated or a prototype
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta"])
def test_tensors_without_bytes_of_their_own_are_refused(tmp_path: Path, kind: str) -> None:
    if kind == "meta":
        value, words = torch.empty(3, device="meta"), "Tensor on device meta has no memory"
    elif kind == "sparse":
        value, words = torch.eye(3).to_sparse(), "a dense PyTorch tensor is needed, not one of"
    else:
        value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        words = "a dense tensor is needed, not a quantized one"
    with failing() as errors:
        save({"m": {"w": value}}, tmp_path)
    assert f"'m.w': {words}" in errors[0]
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


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "dcp.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "dcp.md", "exec"), {"state": {"w": weights(50, 50), "step": 1}})
    assert (tmp_path / "run" / "step-200" / MANIFEST).exists()
