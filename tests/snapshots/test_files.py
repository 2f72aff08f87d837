"""Snapshots of files and files of snapshots, and what changed between two, tensor by tensor."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cli_samples import contents, flip_bytes, frame_offsets, write_header, write_model
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from snapshot_samples import Run, bits, odd_state

from packhorse import CorruptionError
from packhorse.disk import Change, SnapshotStore, pack_file, unpack_file


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    from packhorse.disk.state import find_tensors

    return {path: leaf.tensor for path, leaf in find_tensors(state).items()}


# Files to snapshots.


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_a_file_comes_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model.safetensors"
    save_file(load_file(write_model(model)), model, {"format": "pt"})
    source = model
    if kind == "packed":
        source = tmp_path / "model.ph.safetensors"
        pack_file(model, source)
    store = SnapshotStore(tmp_path / "store")
    info = store.take_files("a", [source], metadata={"loss": 1.5})
    assert info.metadata == {"format": "pt", "loss": 1.5}
    assert store.verify() == []
    for output in ("back.safetensors", "back.ph.safetensors"):
        done = store.restore_file("a", tmp_path / output)
        assert done.file_nbytes == (tmp_path / output).stat().st_size
        assert done.nbytes == info.nbytes
    unpack_file(tmp_path / "back.ph.safetensors", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "back.safetensors"
    ).read_bytes()
    store.take_files("b", [source], replace=True)
    store.restore_file("b", tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == model.read_bytes()
    assert store.info("b").stored_nbytes == 0


def test_a_folder_of_shards_is_one_state(tmp_path: Path, folder: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    store.take_files("shards", [folder])
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    wanted = {name: array for shard in shards for name, array in shard.items()}
    found = store.restore("shards")
    assert found.keys() == wanted.keys()
    assert all(bits(found[name]) == bits(array) for name, array in wanted.items())


def test_floats_below_a_byte_are_kept_and_compared(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 24, np.uint8).tobytes()
    header = {
        "six": {"dtype": "F6_E2M3", "shape": [16], "data_offsets": [0, 12]},
        "four": {"dtype": "F4", "shape": [4, 6], "data_offsets": [12, 24]},
    }
    model = write_header(tmp_path / "small.safetensors", json.dumps(header), data)
    changed = write_header(
        tmp_path / "changed.safetensors", json.dumps(header), b"\xff" + data[1:-1] + b"\x00"
    )
    store = SnapshotStore(tmp_path / "store")
    store.take_files("a", [model])
    store.take_files("b", [changed])
    store.restore_file("a", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes()[-24:] == data
    six, four = store.diff("a", "b")
    assert six.n_changed == (data[0] & 63 != 63) + (data[0] >> 6 != 3)
    assert four.n_changed == (data[-1] & 15 != 0) + (data[-1] >> 4 != 0)
    assert (six.max_change, six.mean_change, four.max_change) == (15, 7.625, 1)


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounded_copies_are_found_in_other_files(tmp_path: Path, kind: str, dtype: Any) -> None:
    store = SnapshotStore(tmp_path / "store")
    rng = np.random.default_rng(0)
    shapes = {"a": (60, 50), "b": (3000,), "c": (60, 50), "tiny": (5,), "none": (0, 7)}
    masters = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    for step in ("1", "2"):
        masters = {name: array * np.float32(1.001) for name, array in masters.items()}
        copies = {f"model.{name}": array.astype(dtype) for name, array in masters.items()}
        copies["other"] = copies["model.a"] + dtype(1)
        files = {"copies": copies, "masters": masters}  # copies come first
        paths = []
        for name, tensors in files.items():
            paths.append(tmp_path / f"{name}.safetensors")
            save_file(tensors, paths[-1])
            if kind == "packed":
                plain, paths[-1] = paths[-1], tmp_path / f"{name}.ph.safetensors"
                pack_file(plain, paths[-1], force=True)
        info = store.take_files(step, paths)
        costs = {tensor.path: tensor.packed_nbytes for tensor in info.tensors}
        assert max(costs[f"model.{name}"] for name in "abc") < 300 < costs["other"]
        found = store.restore(step)
        assert found.keys() == {**copies, **masters}.keys()
        assert all(bits(found[n]) == bits(a) for n, a in {**copies, **masters}.items())
    assert store.verify() == []


def test_of_a_packed_file_only_beginnings_are_looked_at(tmp_path: Path) -> None:
    """A guess decodes one chunk, and only if there are two tensors of the same shape to compare."""
    from packhorse.disk.snapshots.sources import open_sources

    array = np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)
    tensors = {"w": array, "copy": array.astype(ml_dtypes.bfloat16), "other": array[:5000]}
    packed = tmp_path / "model.ph.safetensors"
    save_file(tensors, tmp_path / "model.safetensors")
    pack_file(tmp_path / "model.safetensors", packed)
    for name, (start, stop) in frame_offsets(packed).items():
        flip_bytes(packed, (start + stop) // 2 if name == "other" else stop - 64)
    with open_sources([packed], threads=1) as opened:
        specs = opened.state.specs
        names = {specs[i].name: specs[j].name for i, j in opened.state.casts.items()}
        assert names == {"copy": "w"}
        for i in range(3):
            with pytest.raises(CorruptionError, match=r"model\.ph\.safetensors"):
                opened.state.fetch(i)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    files = [write_model(tmp_path / f"{name}.safetensors") for name in "ab"]
    store = SnapshotStore(tmp_path / "store")
    with pytest.raises(ValueError, match=r"b\.safetensors: .* is also in .*a\.safetensors"):
        store.take_files("x", files)
    assert not (tmp_path / "store").exists()


def test_pickles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        store.take_files("x", [tmp_path / "old"])
    (tmp_path / "old" / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    for source in (tmp_path / "old", tmp_path / "old" / "model.bin"):
        with pytest.raises(ValueError, match="weights_only=True"):
            store.take_files("x", [source])


def test_a_damaged_packed_file_is_not_taken(tmp_path: Path) -> None:
    packed = tmp_path / "model.ph.safetensors"
    pack_file(write_model(tmp_path / "model.safetensors"), packed)
    start, stop = frame_offsets(packed)["layers.1.weight"]
    flip_bytes(packed, (start + stop) // 2)
    store = SnapshotStore(tmp_path / "store")
    with pytest.raises(CorruptionError, match=r"model\.ph\.safetensors.*'layers\.1\.weight'"):
        store.take_files("x", [packed])
    assert store.names() == []
    assert list((tmp_path / "store" / "packs").glob("*")) == []


# Snapshots to files.


@pytest.mark.parametrize("output", ["odd.safetensors", "odd.ph.safetensors"])
def test_any_state_becomes_a_file(tmp_path: Path, output: str) -> None:
    state = odd_state()
    store = SnapshotStore(tmp_path / "store")
    store.take("odd", state, metadata={"loss": 1.5, "tag": "x"})
    store.restore_file("odd", tmp_path / output)
    if output.endswith(".ph.safetensors"):
        unpack_file(tmp_path / output, tmp_path / "odd.safetensors")
    with safe_open(tmp_path / "odd.safetensors", "pt") as file:
        metadata = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = tensors_of(state)
    assert found.keys() == wanted.keys()
    assert all(bits(found[path]) == bits(tensor) for path, tensor in wanted.items())
    assert (metadata["loss"], metadata["tag"]) == ("1.5", "x")
    values = json.loads(metadata["packhorse.values"])
    assert values["a.b[3]"] == 10**40
    assert values["nested[0][None]"] == []
    assert values["empty"] == {}
    assert values["specials[0]"] == {"float": "7ff0000000000000"}
    assert values["specials[3]"] == 5e-324


def test_parts_of_a_snapshot(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    run = Run().step()
    store.take("a", run.state())
    store.restore_file("a", tmp_path / "model.safetensors", keys=["model", "step"])
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == {f"model.{name}" for name in run.state()["model"]}
        assert json.loads(file.metadata()["packhorse.values"]) == {"step": 1}
    with pytest.raises(ValueError, match="nothing at 'elsewhere'"):
        store.restore_file("a", tmp_path / "x.safetensors", keys="elsewhere")
    with pytest.raises(CorruptionError, match="max_nbytes"):
        store.restore_file("a", tmp_path / "x.safetensors", max_nbytes=100)
    assert not (tmp_path / "x.safetensors").exists()


def test_an_output_is_whole_or_not_there(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    store.take("a", Run().step().state())
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="already exists"):
        store.restore_file("a", output)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        store.restore_file("a", tmp_path / "nowhere" / "out.safetensors")
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    flip_bytes(pack, pack.stat().st_size - 200)
    before = contents(tmp_path)
    for name in ("out.safetensors", "out.ph.safetensors"):
        with pytest.raises(CorruptionError, match="snapshot 'a'"):
            store.restore_file("a", tmp_path / name, force=True)
    assert contents(tmp_path) == before


def test_two_tensors_at_one_path_make_no_file(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    store.take("a", {"x": {"y": np.zeros(3)}, "x.y": np.ones(3)})
    with pytest.raises(ValueError, match=r"two tensors have the path 'x\.y'"):
        store.restore_file("a", tmp_path / "out.safetensors")


# Differences.


@pytest.mark.parametrize(
    "dtype",
    ["<f4", "<f2", "<f8", "<i8", "<u1", "bool", "<c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn],
    ids=str,
)
def test_changes_are_counted_and_measured(tmp_path: Path, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    old = (rng.standard_normal((1000, 1001)) * 40 + 60).clip(0, 200).astype(dtype)
    new = old.copy()
    new[::7] = (rng.standard_normal(new[::7].shape) * 40 + 60).clip(0, 200).astype(dtype)
    store = SnapshotStore(tmp_path / "store")
    store.take("a", {"x": old})
    store.take("b", {"x": new})
    (found,) = store.diff("a", "b")
    wide = np.complex128 if dtype == "<c8" else np.float64
    changed = np.frombuffer(old.tobytes(), f"u{old.itemsize}") != np.frombuffer(
        new.tobytes(), f"u{old.itemsize}"
    )
    change = np.abs(new.astype(wide) - old.astype(wide)).reshape(-1)[changed]
    assert (found.change, found.n_values) == (Change.CHANGED, old.size)
    assert found.n_changed == changed.sum()
    assert found.max_change == change.max()
    assert found.mean_change == pytest.approx(change.mean())


def test_changes_that_are_not_finite_are_counted_only(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    store.take("a", {"x": np.float32([0.0, 1, math.inf, math.nan, 5])})
    store.take("b", {"x": np.float32([-0.0, 3, 1, 2, 5])})
    (found,) = store.diff("a", "b")
    assert (found.n_changed, found.max_change, found.mean_change) == (4, 2.0, 1.0)


def test_every_kind_of_change_is_told(tmp_path: Path) -> None:
    x = np.arange(6.0)
    store = SnapshotStore(tmp_path / "store")
    store.take("a", {"same": x, "gone": x, "shape": x, "dtype": x, "values": x})
    store.take(
        "b",
        {"new": x, "same": x, "shape": x.reshape(2, 3), "dtype": x.astype("f4"), "values": x + 1},
    )
    found = {item.path: item for item in store.diff("a", "b")}
    assert {path: str(item.change) for path, item in found.items()} == {
        "new": "added",
        "same": "equal",
        "shape": "replaced",
        "dtype": "replaced",
        "values": "changed",
        "gone": "removed",
    }
    assert found["same"].n_changed == 0
    assert found["shape"].n_changed is None
    assert (found["values"].n_changed, found["values"].max_change) == (6, 1.0)
    assert all(item.change is Change.EQUAL for item in store.diff("a", "a"))
    with pytest.raises(ValueError, match="'c'"):
        store.diff("a", "c")


# Files that a store accepts.


def test_stored_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    assert store.stored_nbytes() == 0
    run = Run()
    for i in range(3):
        store.take(str(i), run.step().state())
    files = [path for path in (tmp_path / "store").rglob("*") if path.parent != tmp_path / "store"]
    assert store.stored_nbytes() == sum(path.stat().st_size for path in files if path.is_file())
    store.delete("2")
    assert store.stored_nbytes() < sum(store.info(name).nbytes for name in "01")
