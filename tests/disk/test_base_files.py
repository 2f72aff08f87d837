"""Whole files and folders with a base: real models a few training steps apart, bases in any kind of
file, and lazy reading. Tests with wrong bases are in `disk/test_base_hostile.py`."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import frame_builder as fb
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from base_samples import N_BASED, checkpoints, write_checkpoints, write_folder
from disk_samples import leftovers

import packhorse
import packhorse.numpy
import packhorse.torch
from packhorse.codecs.content import content_hash
from packhorse.disk import (
    PackedFile,
    logical_nbytes,
    pack_file,
    pack_folder,
    plan_file,
    plan_folder,
    unpack_file,
    unpack_folder,
    verify_file,
    verify_folder,
)
from packhorse.disk.model_file import ModelFile
from packhorse.errors import BaseMismatchError
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.reference import decode_file

Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_checkpoints(tmp_path)


@pytest.fixture
def packed(pair: Pair) -> Path:
    """The newer file, packed against the older."""
    old, new = pair
    pack_file(new, new.with_name("new.ph.safetensors"), base=old)
    return new.with_name("new.ph.safetensors")


@pytest.fixture(autouse=True)
def no_file_stays_open(tmp_path: Path) -> Iterator[None]:
    yield
    gc.collect()  # an error that was caught keeps references to the file
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            assert not descriptor.readlink().is_relative_to(tmp_path)


def in_shards(old: Path) -> Path:
    folder = old.with_name("base")
    return folder if folder.exists() else write_folder(folder, checkpoints()[0], 3)


def in_packed_shards(old: Path) -> Path:
    pack_folder(in_shards(old), old.with_name("base.ph"))
    return old.with_name("base.ph")


def as_packed_file(old: Path) -> Path:
    pack_file(old, old.with_name("old.ph.safetensors"), level="fast")
    return old.with_name("old.ph.safetensors")


BASES: dict[str, Callable[[Path], object]] = {
    "a file": lambda old: old,
    "its name": str,
    "a packed file": as_packed_file,
    "a folder of shards": in_shards,
    "a folder of packed shards": in_packed_shards,
    "tensors of PyTorch": lambda old: checkpoints()[0],
    "arrays": lambda old: {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in checkpoints()[0].items()
    },
}


@pytest.mark.parametrize("kind", BASES)
def test_a_file_comes_back_byte_for_byte_whatever_holds_the_base(tmp_path, pair, kind):
    old, new = pair
    base = BASES[kind](old)
    target, back = tmp_path / "packed", tmp_path / "back"
    result = pack_file(new, target, base=base, threads=2)
    assert sum(tensor.base_hash is not None for tensor in result.tensors) == N_BASED
    unpacked = unpack_file(target, back, base=base)
    assert back.read_bytes() == new.read_bytes()
    assert unpacked.tensors == result.tensors
    assert verify_file(target, base=base) == []
    assert decode_file(target.read_bytes(), base=old.read_bytes()) == new.read_bytes()


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_levels_and_numbers_of_threads_give_files_that_unpack_alike(tmp_path, pair, level):
    old, new = pair
    found = set()
    for threads in (1, 3):
        pack_file(new, tmp_path / "packed", base=old, level=level, threads=threads, force=True)
        found.add((tmp_path / "packed").read_bytes())
        unpack_file(tmp_path / "packed", tmp_path / "back", base=old, threads=threads, force=True)
        assert (tmp_path / "back").read_bytes() == new.read_bytes()
    assert len(found) == 1


def test_what_was_packed_against_one_kind_of_base_unpacks_with_every_other(tmp_path, pair, packed):
    old, new = pair
    for i, kind in enumerate(BASES.values()):
        unpack_file(packed, tmp_path / f"back {i}", base=kind(old))
        assert (tmp_path / f"back {i}").read_bytes() == new.read_bytes()


def test_differences_are_shorter_and_what_does_not_gain_is_packed_in_full(tmp_path, pair, packed):
    alone = {t.name: t.packed_nbytes for t in pack_file(pair[1], tmp_path / "alone").tensors}
    with PackedFile(packed, NUMPY) as file:
        frames = {name: file.frame(name) for name in file.keys()}  # noqa: SIM118
        assert file.base_name == "old.safetensors"
    for name, frame in frames.items():
        if frame.base_hash is not None:
            assert frame.nbytes < alone[name]
        else:
            assert frame.nbytes == alone[name]
    based = {name for name, frame in frames.items() if frame.base_hash is not None}
    assert {"model.0.weight", "ids", "cast.weight", "optimizer.0.exp_avg_sq"} <= based
    assert not {"resized", "retyped", "added", "noise", "empty", "tied.1"} & based
    assert frames["cast.weight"].base_dtype == "F32"
    assert frames["tied.0"].base_hash == frames["model.0.weight"].base_hash
    assert sum(frame.nbytes for frame in frames.values()) < sum(alone.values()) / 1.7


def test_a_base_that_gains_nothing_is_not_needed(tmp_path, pair):
    _, new = pair
    noise = {
        name: np.frombuffer(np.random.default_rng(1).bytes(tensor.nbytes), np.uint8)
        for name, tensor in checkpoints()[1].items()
        if tensor.dtype == torch.uint8
    }
    result = pack_file(new, tmp_path / "packed", base=noise)
    assert not any(tensor.base_hash for tensor in result.tensors)
    safetensors.numpy.save_file(noise, tmp_path / "noise.safetensors")
    pack_file(new, tmp_path / "again", base=tmp_path / "noise.safetensors")
    for path in (tmp_path / "packed", tmp_path / "again"):
        unpack_file(path, tmp_path / "back", force=True)
        assert (tmp_path / "back").read_bytes() == new.read_bytes()
        assert b"noise.safetensors" not in path.read_bytes()
        with PackedFile(path, NUMPY) as file:
            assert file.base_name is None


def test_only_the_name_of_the_base_is_recorded_not_its_place(pair, packed):
    old, new = pair
    assert b"old.safetensors" in packed.read_bytes()
    assert os.fsencode(old.parent) not in packed.read_bytes()
    folder = in_shards(old)
    pack_file(new, packed, base=folder / "vae" / "..", force=True)
    with PackedFile(packed, NUMPY) as file:
        assert file.base_name == folder.name


def test_a_base_that_is_not_needed_does_no_harm(tmp_path, pair):
    old, new = pair
    pack_file(new, tmp_path / "packed")
    unpack_file(tmp_path / "packed", tmp_path / "back", base=old)
    assert verify_file(tmp_path / "packed", base=old) == []
    assert (tmp_path / "back").read_bytes() == new.read_bytes()
    assert len(packhorse.torch.load_file(tmp_path / "packed", base=old)) == len(checkpoints()[1])


def test_results_and_progress_count_bytes(tmp_path, pair):
    old, new = pair
    total = logical_nbytes(new)
    done: list[int] = []
    pack_file(new, tmp_path / "a", base=old, progress=done.append)
    assert sum(done) == total
    done.clear()
    unpack_file(tmp_path / "a", tmp_path / "b", base=old, progress=done.append)
    assert sum(done) == total
    done.clear()
    verify_file(tmp_path / "a", base=old, progress=done.append)
    assert sum(done) == total


def test_a_plan_says_what_packing_will_do(pair, packed):
    old, new = pair
    plans = {plan.name: plan.plan for plan in plan_file(new, base=old)}
    with PackedFile(packed, NUMPY) as file:
        for name, plan in plans.items():
            is_based = file.frame(name).base_hash is not None
            assert ("differences from the base" in plan.reason) == is_based
            assert bool(plan.plain_nbytes) == is_based


def test_a_tensor_of_many_windows(tmp_path):
    n = (1 << 24) + 12345  # of two bytes: unpacking decodes 32 MiB at once
    old = np.arange(n, dtype=np.int16)
    new = old.copy()
    new[::1000] += 3
    safetensors.numpy.save_file({"t": old}, tmp_path / "old")
    safetensors.numpy.save_file({"t": new}, tmp_path / "new")
    for base in (tmp_path / "old", tmp_path / "old packed"):
        result = pack_file(tmp_path / "new", tmp_path / "packed", base=base, force=True)
        assert result.ratio > 50
        unpack_file(tmp_path / "packed", tmp_path / "back", base=base, force=True)
        assert (tmp_path / "back").read_bytes() == (tmp_path / "new").read_bytes()
        pack_file(tmp_path / "old", tmp_path / "old packed", force=True)


@pytest.mark.parametrize("padding", [1, 3, 7])
def test_a_base_at_odd_addresses(tmp_path, padding):
    rng = np.random.default_rng(8)
    for dtype, width in (("BF16", 2), ("F32", 4), ("I64", 8)):
        units = rng.integers(0, 1 << 14, 70_000).astype(f"<u{width}")
        for name, data in (("old", units), ("new", units + (units % 3).astype(units.dtype))):
            content = fb.original_file({"t": (dtype, (70_000,), data.tobytes())}, padding=padding)
            (tmp_path / name).write_bytes(content)
        result = pack_file(tmp_path / "new", tmp_path / "x", base=tmp_path / "old", force=True)
        assert result.tensors[0].base_hash is not None
        unpack_file(tmp_path / "x", tmp_path / "back", base=tmp_path / "old", force=True)
        assert (tmp_path / "back").read_bytes() == (tmp_path / "new").read_bytes()


# In Python


@pytest.mark.parametrize("base_is", ["a path", "tensors"])
def test_torch_saves_and_loads_with_a_base(tmp_path, pair, base_is):
    tensors = checkpoints()[1]
    base = pair[0] if base_is == "a path" else checkpoints()[0]
    packhorse.torch.save_file(tensors, tmp_path / "m", {"k": "v"}, base=base)
    data = packhorse.torch.save(tensors, {"k": "v"}, base=base)
    if base_is == "tensors":
        assert data == (tmp_path / "m").read_bytes()
    for loaded in (
        packhorse.torch.load_file(tmp_path / "m", base=base),
        packhorse.torch.load(data, base=base),
    ):
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    for refused in (
        lambda: packhorse.torch.load_file(tmp_path / "m"),
        lambda: packhorse.torch.load(data),
    ):
        with pytest.raises(BaseMismatchError, match=r"'\S+': a base of \w+ with content hash"):
            refused()


def test_numpy_saves_and_loads_with_a_base(tmp_path):
    rng = np.random.default_rng(2)
    old = {"w": rng.standard_normal(5000).astype(np.float32), "n": np.arange(5000)}
    new = {"w": np.nextafter(old["w"], np.float32(9)), "n": old["n"] + 1}
    packhorse.numpy.save_file(old, tmp_path / "old.ph.safetensors")
    for base in (old, tmp_path / "old.ph.safetensors"):
        packhorse.numpy.save_file(new, tmp_path / "new", base=base)
        data = packhorse.numpy.save(new, base=base)
        assert len(data) < 10_000
        for loaded in (
            packhorse.numpy.load_file(tmp_path / "new", base=base),
            packhorse.numpy.load(data, base=base),
        ):
            assert {name: array.tolist() for name, array in loaded.items()} == {
                name: array.tolist() for name, array in new.items()
            }


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_lazy_reading_gives_tensors_and_slices(pair, packed, kind, framework):
    base = BASES[kind](pair[0])
    with (
        packhorse.open_file(packed, framework, base=base, threads=1) as file,
        safetensors.safe_open(pair[1], framework) as expected,
    ):
        for name in file:
            whole, theirs = file.get_tensor(name), expected.get_tensor(name)
            assert np.array_equal(bits(whole), bits(theirs))
            assert file.get_slice(name).get_shape() == list(theirs.shape)
        rows = file.get_slice("model.0.weight")[3:9]
        assert np.array_equal(bits(rows), bits(expected.get_slice("model.0.weight")[3:9]))
        assert file.get_tensors().keys() == expected.get_tensors().keys()


def bits(tensor: object) -> np.ndarray:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(np.ascontiguousarray(tensor).tobytes(), np.uint8)


def test_lazy_reading_looks_at_no_other_tensor_of_the_base(tmp_path, pair, packed):
    wanted = checkpoints()[1]["model.0.weight"]
    for path in (pair[0], as_packed_file(pair[0])):
        data = bytearray(path.read_bytes())
        with safetensors.safe_open(path, "np") as file:
            names = file.offset_keys()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, (first, last) in offsets_of(path).items():
            if name != "model.0.weight":
                data[start + first : start + last] = bytes(last - first)
        assert len(names) > 20
        (tmp_path / "damaged").write_bytes(data)
        with packhorse.open_file(packed, "pt", base=tmp_path / "damaged") as file:
            assert torch.equal(file.get_tensor("model.0.weight"), wanted)
            assert torch.equal(file.get_slice("model.0.weight")[5:6], wanted[5:6])


@pytest.mark.parametrize("kind", ["a file", "a packed file", "a folder of packed shards"])
def test_slices_of_a_tensor_prove_its_base_once(pair, packed, kind, monkeypatch):
    n_hashed = []  # bytes of bases: hashed as they are, or decoded and then compared

    def count(data, **options):
        n_hashed.append(len(data))
        return content_hash(data, **options)

    read = ModelFile.read

    def count_read(self, entry, threads):
        n_hashed.append(entry.nbytes)
        return read(self, entry, threads)

    wanted = checkpoints()[1]
    with packhorse.open_file(packed, "pt", base=BASES[kind](pair[0]), threads=1) as file:
        monkeypatch.setattr(packhorse.frame.base, "content_hash", count)
        monkeypatch.setattr(ModelFile, "read", count_read)
        part = file.get_slice("model.0.weight")
        assert torch.equal(part[:1], wanted["model.0.weight"][:1])
        first = len(n_hashed)
        assert first > 0
        for row in range(2, 20):
            assert torch.equal(part[row], wanted["model.0.weight"][row])
        assert torch.equal(file.get_tensor("model.0.weight"), wanted["model.0.weight"])
        assert len(n_hashed) == first
        based = [name for name in file if file.frame(name).base_hash]
        other = next(name for name in based if name != "model.0.weight")
        assert torch.equal(file.get_slice(other)[3], wanted[other][3])
        assert len(n_hashed) > first
        assert torch.equal(part[3:], wanted["model.0.weight"][3:])


def test_a_base_that_changes_between_slices_is_refused(tmp_path, pair, packed):
    name = "model.0.weight"
    in_memory = {name: checkpoints()[0][name].clone()}
    with packhorse.open_file(packed, "pt", base=in_memory) as file:
        part = file.get_slice(name)
        assert torch.equal(part[:2], checkpoints()[1][name][:2])
        in_memory[name][-1, -1] += 1
        with pytest.raises(BaseMismatchError, match=name):
            part[:2]
    with packhorse.open_file(packed, "pt", base=pair[0]) as file:
        part = file.get_slice(name)
        assert torch.equal(part[:2], checkpoints()[1][name][:2])
        data = bytearray(pair[0].read_bytes())
        first, last = offsets_of(pair[0])[name]
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + first : start + last] = bytes(last - first)
        with pair[0].open("r+b") as base:
            base.write(data)
        with pytest.raises(BaseMismatchError, match=name):
            part[:2]


def offsets_of(path: Path) -> dict[str, tuple[int, int]]:
    from packhorse.storage.safetensors_header import read_header

    return {entry.name: (entry.start, entry.stop) for entry in read_header(path).entries}


def test_threads_read_one_open_file_at_once(pair, packed):
    with (
        packhorse.open_file(packed, "pt", base=pair[0]) as file,
        ThreadPoolExecutor(4) as pool,
    ):
        names = file.keys() * 4
        for name, tensor in zip(names, pool.map(file.get_tensor, names), strict=True):
            assert torch.equal(tensor, checkpoints()[1][name])


def test_what_was_handed_out_outlives_the_file(pair, packed):
    file = packhorse.open_file(packed, base=pair[0])
    ids, frame = file.get_tensor("ids"), file.frame("ids")
    file.close()
    file.close()
    assert np.array_equal(ids, checkpoints()[1]["ids"].numpy())
    again = packhorse.numpy.decompress(frame, base=checkpoints()[0]["ids"].numpy())
    assert np.array_equal(again, ids)
    with pytest.raises(ValueError, match="closed"):
        file.base_name  # noqa: B018


# Folders


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", checkpoints()[1], 2)


@pytest.mark.parametrize("kind", ["a file", "a packed file", "tensors of PyTorch"])
def test_a_folder_comes_back_with_one_file_as_its_base(tmp_path, pair, model, kind):
    base = BASES[kind](pair[0])
    result = pack_folder(model, tmp_path / "packed", base=base)
    based = [t for file in result.files for t in file.tensors if t.base_hash is not None]
    assert len(based) >= N_BASED
    assert verify_folder(tmp_path / "packed", base=base) == []
    unpack_folder(tmp_path / "packed", tmp_path / "back", base=base)
    assert contents(tmp_path / "back") == contents(model)


@pytest.mark.parametrize("kind", ["a folder of shards", "a folder of packed shards"])
def test_folders_need_not_be_cut_alike(tmp_path, pair, model, kind):
    base = BASES[kind](pair[0])
    result = pack_folder(model, tmp_path / "packed", base=base)
    alone = pack_folder(model, tmp_path / "alone")
    based = [t for file in result.files for t in file.tensors if t.base_hash is not None]
    # The base has a tensor of this name in the subfolder too, which differs from the one above.
    assert len(based) == N_BASED + 1
    assert result.packed_nbytes < alone.packed_nbytes / 1.5
    assert verify_folder(tmp_path / "packed", base=base) == []
    unpacked = unpack_folder(tmp_path / "packed", tmp_path / "back", base=base)
    assert contents(tmp_path / "back") == contents(model)
    assert [file.tensors for file in unpacked.files] == [file.tensors for file in result.files]
    assert not leftovers(tmp_path, *(path.name for path in tmp_path.iterdir()))
    plans = dict(plan_folder(model, base=base))
    assert sum(bool(p.plan.plain_nbytes) for plan in plans.values() for p in plan) == len(based)


def test_a_file_of_a_name_is_packed_against_the_one_of_that_name(tmp_path, pair):
    """One folder has weights in two precisions, under the same names."""
    old, new = checkpoints()
    for suffix, scale in (("", 1), (".ema", 3)):
        folder = tmp_path / "base"
        folder.mkdir(exist_ok=True)
        for path, tensors in ((folder, old), (tmp_path, new)):
            moved = {"w": tensors["model.0.weight"] * scale}
            safetensors.torch.save_file(moved, path / f"model{suffix}.safetensors")
    for suffix in ("", ".ema"):
        source = tmp_path / f"model{suffix}.safetensors"
        result = pack_file(source, tmp_path / f"any name{suffix}", base=tmp_path / "base")
        assert result.ratio > 4
        # Unpacking finds the base by its content, even if the packed file was renamed.
        unpack_file(tmp_path / f"any name{suffix}", tmp_path / "back", base=tmp_path / "base",
                    force=True)  # fmt: skip
        assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_base_folder_may_lack_what_the_model_has(tmp_path, model):
    base = tmp_path / "base"
    base.mkdir()
    some = {"model.0.weight": checkpoints()[0]["model.0.weight"]}
    safetensors.torch.save_file(some, base / "x.safetensors")
    result = pack_folder(model, tmp_path / "packed", base=base)
    assert sum(t.base_hash is not None for file in result.files for t in file.tensors) == 1
    unpack_folder(tmp_path / "packed", tmp_path / "back", base=base)
    assert contents(tmp_path / "back") == contents(model)
