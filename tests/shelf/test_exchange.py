"""Shelves and other formats: every dtype there and back, memory, names, and output that is whole or
absent."""

import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from disk_samples import leftovers
from exchange_samples import DTYPES, bits, every_tensor, random_array, real_model, same
from safetensors.numpy import load_file, save_file

import packhorse.numpy
from packhorse.disk import Shelf, pack_file, pack_folder
from packhorse.disk.shelf.exchange_methods import ImportPlan
from packhorse.errors import BaseMismatchError, ClosedError, CorruptionError

NUMPYS = {name for name, dtype in DTYPES.items() if dtype.isbuiltin == 1}


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """An empty shelf."""
    with Shelf(tmp_path / "own.shelf") as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Shelf]:
    """Another empty shelf."""
    with Shelf(tmp_path / "other.shelf") as opened:
        yield opened


def fill(shelf: Shelf, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with shelf.transaction():
        for name, array in tensors.items():
            shelf[name] = array
    return tensors


def storable(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those that safetensors can hold: a single element of 4 or 6 bits does not end at a byte."""
    return {name: array for name, array in tensors.items() if name[:2] + name[-4:] not in
            ("F4/one", "F6/one")}  # fmt: skip


# There and back.


def test_every_dtype_and_shape_survives_zarr(shelf: Shelf, other: Shelf, tmp_path: Path) -> None:
    wanted = fill(shelf, every_tensor())
    assert shelf.export_zarr(tmp_path / "z") == tmp_path / "z"
    assert other.import_zarr(tmp_path / "z") == sorted(wanted)
    assert same(other, wanted)


def test_every_dtype_and_shape_survives_npy(shelf: Shelf, other: Shelf, tmp_path: Path) -> None:
    wanted = fill(shelf, every_tensor())
    shelf.export_npy(tmp_path / "n")
    for dtype in DTYPES:
        other.import_npy(dtype, tmp_path / "n" / dtype, dtype=DTYPES[dtype].name)
    assert same(other, wanted)


def test_every_dtype_and_shape_survives_safetensors(
    shelf: Shelf, other: Shelf, tmp_path: Path
) -> None:
    wanted = fill(shelf, storable(every_tensor()))
    shelf.export_safetensors(tmp_path / "s.safetensors", metadata={"format": "np"})
    other.import_safetensors(tmp_path / "s.safetensors")
    assert same(other, wanted)
    pack_file(tmp_path / "s.safetensors", tmp_path / "s.ph.safetensors")
    other.import_safetensors(tmp_path / "s.ph.safetensors", "packed")
    assert same({name: other[f"packed/{name}"] for name in wanted}, wanted)


def test_what_others_read_is_the_same(shelf: Shelf, tmp_path: Path) -> None:
    """zarr, NumPy and safetensors themselves read the exports."""
    wanted = fill(shelf, storable(every_tensor()))
    shelf.export_zarr(tmp_path / "z")
    shelf.export_npy(tmp_path / "n")
    shelf.export_safetensors(tmp_path / "s.safetensors")
    group = zarr.open_group(tmp_path / "z", mode="r")
    for name, array in wanted.items():
        assert bits(group[name][...]) == bits(array)
        loaded = np.load(tmp_path / "n" / f"{name}.npy")
        assert bits(loaded if name.split("/")[0] in NUMPYS else loaded.view(array.dtype)) == bits(
            array
        )
    assert same(packhorse.numpy.load_file(tmp_path / "s.safetensors"), wanted)
    plain = {name: array for name, array in wanted.items() if name.split("/")[0] in NUMPYS}
    shelf.export_safetensors(tmp_path / "np.safetensors", plain)
    assert same(load_file(tmp_path / "np.safetensors"), plain)


def test_zarr_without_packhorse_reads_an_export(shelf: Shelf, tmp_path: Path) -> None:
    fill(shelf, {"a/b": np.arange(12.0).reshape(3, 4)})
    shelf.export_zarr(tmp_path / "z")
    document = json.loads((tmp_path / "z" / "a" / "b" / "zarr.json").read_text())
    assert document["zarr_format"] == 3
    assert [codec["name"] for codec in document["codecs"]] == ["bytes", "zstd"]
    assert json.loads((tmp_path / "z" / "a" / "zarr.json").read_text())["node_type"] == "group"


def test_negative_zeros_survive_zarr(shelf: Shelf, other: Shelf, tmp_path: Path) -> None:
    """zarr leaves out chunks that are equal to zero, and -0.0 is."""
    zeros = {name: -np.zeros((9, 4), DTYPES[name]) for name in ("F16", "BF16", "F8_E5M2", "F64")}
    fill(shelf, zeros)
    shelf.export_zarr(tmp_path / "z")
    other.import_zarr(tmp_path / "z")
    assert same(other, zeros)


def test_a_torch_shelf_exports_what_torch_does_not_have(other: Shelf, tmp_path: Path) -> None:
    wanted = storable(every_tensor())
    with Shelf(tmp_path / "torch.shelf", framework="pt") as shelf:
        with shelf.transaction():
            for name, array in wanted.items():
                shelf[name] = array
        shelf.export_zarr(tmp_path / "z")
        shelf.export_safetensors(tmp_path / "s.safetensors")
    other.import_zarr(tmp_path / "z")
    assert same(other, wanted)


def test_tensors_larger_than_a_block(shelf: Shelf, other: Shelf, tmp_path: Path) -> None:
    wanted = fill(shelf, {
        "many rows": random_array(DTYPES["BF16"], (9_000, 501)),
        "wide": random_array(DTYPES["F32"], (3, 2_000_001)),
        "sixes": random_array(DTYPES["F6_E3M2"], (10, 1_200_002)),
        "fours": random_array(DTYPES["F4"], (9_000_001 * 2,)),
        "deep": random_array(DTYPES["I16"], (3, 7, 41, 11_003)),
    })  # fmt: skip
    told: list[tuple[int, int]] = []
    shelf.export_zarr(tmp_path / "z", progress=lambda *done: told.append(done))
    shelf.export_safetensors(tmp_path / "s.safetensors")
    shelf.export_npy(tmp_path / "n")
    assert told == sorted(told)
    assert (
        told[-1][0]
        == told[-1][1]
        == (tmp_path / "s.safetensors").stat().st_size
        - len(
            (tmp_path / "s.safetensors").read_bytes()[: header_nbytes(tmp_path / "s.safetensors")]
        )
    )
    other.import_zarr(tmp_path / "z", "z")
    other.import_safetensors(tmp_path / "s.safetensors", "s")
    for name, array in wanted.items():
        assert bits(other[f"z/{name}"]) == bits(array)
        assert bits(other[f"s/{name}"]) == bits(array)
        loaded = np.load(tmp_path / "n" / f"{name}.npy")
        assert loaded.tobytes() == array.tobytes()


def header_nbytes(path: Path) -> int:
    """Bytes before the data of a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_the_real_model_survives_all_formats(shelf: Shelf, other: Shelf, tmp_path: Path) -> None:
    path = real_model()
    wanted = load_file(path)
    names = shelf.import_safetensors(path, "model")
    assert same({name.removeprefix("model/"): shelf[name] for name in names}, wanted)
    shelf.export_safetensors(tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), {n: shelf[n].numpy() for n in names})
    shelf.export_zarr(tmp_path / "z")
    other.import_zarr(tmp_path / "z" / "model")
    assert same(other, wanted)


# Memory.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shelf with a tensor of 200 MB."""
    folder = tmp_path_factory.mktemp("large") / "a.shelf"
    rows = np.random.default_rng(0).standard_normal((1000, 10_000), np.float32)
    with Shelf(folder) as shelf:
        tensor = shelf.create("x", (0, 10_000), "float32")
        for _ in range(5):
            tensor.append(rows)
    return folder


@pytest.mark.parametrize("form", ["zarr", "npy", "safetensors", "packed"])
def test_memory_does_not_depend_on_the_tensor(form: str, large: Path, tmp_path: Path) -> None:
    with Shelf(large, "r", cache_nbytes=1 << 20) as shelf:
        plain, packed = tmp_path / "x.safetensors", tmp_path / "x.ph.safetensors"
        exports: dict[str, Callable[[], object]] = {
            "zarr": lambda: shelf.export_zarr(tmp_path / "z"),
            "npy": lambda: shelf.export_npy(tmp_path / "x.npy", "x"),
            "safetensors": lambda: shelf.export_safetensors(plain),
            "packed": lambda: (shelf.export_safetensors(plain), pack_file(plain, packed)),
        }
        if form == "packed":
            exports["packed"]()
        else:
            assert peak_of(exports[form]) < shelf["x"].nbytes // 3
    with Shelf(tmp_path / "b.shelf", cache_nbytes=1 << 20) as shelf:
        imports: dict[str, Callable[[], object]] = {
            "zarr": lambda: shelf.import_zarr(tmp_path / "z"),
            "npy": lambda: shelf.import_npy("x", tmp_path / "x.npy"),
            "safetensors": lambda: shelf.import_safetensors(plain),
            "packed": lambda: shelf.import_safetensors(packed),
        }
        assert peak_of(imports[form]) < shelf["x"].nbytes * 3 // 4


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call holds in memory at one time, which NumPy and Python count."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# What is chosen, and what it is called.


def test_some_tensors_of_a_tag(shelf: Shelf, tmp_path: Path) -> None:
    wanted = fill(shelf, {"a": np.arange(5), "b": np.ones(3), "c": np.zeros(2)})
    shelf.tag("then")
    shelf["a"] = np.arange(100)
    del shelf["b"]
    shelf.at("then").export_npy(tmp_path / "n", ["b", "a"])
    assert leftovers(tmp_path / "n") == {"a.npy", "b.npy"}
    assert bits(np.load(tmp_path / "n" / "a.npy")) == bits(wanted["a"])
    shelf.at("then").export_safetensors(tmp_path / "s.safetensors")
    shelf.at("then").export_zarr(tmp_path / "z")
    assert same(load_file(tmp_path / "s.safetensors"), wanted)
    with pytest.raises(KeyError, match="there is no tensor 'b'"):
        shelf.export_npy(tmp_path / "b.npy", "b")


def test_saved_states_are_left_out(shelf: Shelf, tmp_path: Path) -> None:
    shelf.save("model", {"w": np.ones((3, 3), np.float32), "step": 7})
    wanted = fill(shelf, {"x": np.arange(3)})
    shelf.export_safetensors(tmp_path / "s.safetensors")
    assert same(load_file(tmp_path / "s.safetensors"), wanted)
    with pytest.raises(TypeError, match="'model' is a nested state"):
        shelf.export_zarr(tmp_path / "z", ["model"])
    assert leftovers(tmp_path, "own.shelf", "s.safetensors") == set()


def test_imports_below_a_prefix_and_by_name(shelf: Shelf, tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "z.zarr")
    for name in ("a", "deep/er/b", "c"):
        group.create_array(name, data=np.arange(7))
    assert shelf.import_zarr(tmp_path / "z.zarr", "in/", ["c", "deep/er/b"]) == [
        "in/c",
        "in/deep/er/b",
    ]
    assert shelf.import_zarr(tmp_path / "z.zarr" / "deep" / "er" / "b") == ["b"]
    with pytest.raises(KeyError, match="has no array 'nope'"):
        shelf.import_zarr(tmp_path / "z.zarr", names="nope")
    save_file({"w": np.ones(3), "v": np.ones(2)}, tmp_path / "m.safetensors")
    assert shelf.import_safetensors(tmp_path / "m.safetensors", "m", "w") == ["m/w"]
    with pytest.raises(KeyError, match="has no tensor 'nope'"):
        shelf.import_safetensors(tmp_path / "m.safetensors", names=["nope"])


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "..", "a/./b", "__x", "a/zarr.json/b"])
def test_names_that_zarr_cannot_have(name: str, shelf: Shelf, tmp_path: Path) -> None:
    try:
        shelf[name] = np.arange(3)
    except ValueError:
        pytest.skip("a shelf refuses this name itself")
    with pytest.raises(ValueError, match="zarr cannot have this name"):
        shelf.export_zarr(tmp_path / "z")
    assert leftovers(tmp_path, "own.shelf") == set()


def test_a_tensor_cannot_be_a_group(shelf: Shelf, tmp_path: Path) -> None:
    fill(shelf, {"a": np.ones(1), "a/b": np.ones(2)})
    with pytest.raises(ValueError, match="'a/b' would be inside tensor 'a', which zarr"):
        shelf.export_zarr(tmp_path / "z")
    shelf.export_zarr(tmp_path / "z", ["a/b"])
    with pytest.raises(ValueError, match="is named twice"):
        shelf.export_npy(tmp_path / "n", ["a", "a"])


def test_a_plan_says_what_an_import_would_do(tmp_path: Path) -> None:
    wanted = {"a": random_array(DTYPES["BF16"], (5, 3)), "b": np.arange(4), "c": np.ones(())}
    with Shelf(tmp_path / "own.shelf") as shelf:
        fill(shelf, wanted)
        shelf.export_zarr(tmp_path / "z")
        shelf.export_npy(tmp_path / "n")
        shelf.export_safetensors(tmp_path / "s.safetensors")
    plans = [ImportPlan() for _ in range(3)]
    plans[0].import_zarr(tmp_path / "z", "in")
    plans[1].import_npy("in", tmp_path / "n", dtype="bfloat16")
    plans[2].import_safetensors(tmp_path / "s.safetensors", "in")
    for plan in plans:
        found = {
            tensor.name: (tensor.dtype, tensor.shape, tensor.nbytes) for tensor in plan.tensors
        }
        assert found == {
            "in/a": ("BF16", (5, 3), 30), "in/b": ("I64", (4,), 32), "in/c": ("F64", (), 8)
        }  # fmt: skip


# Other layouts than ours.


@pytest.mark.parametrize("dtype", [">f4", ">c8", "<i2", ">u8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_of_any_byte_order_and_layout(
    dtype: str, order: Any, shelf: Shelf, tmp_path: Path
) -> None:
    data = np.asarray(np.random.default_rng(0).integers(0, 2, (300, 7, 5)), dtype, order=order)
    np.save(tmp_path / "x.npy", data)
    shelf.import_npy({"x": tmp_path / "x.npy"})
    assert bits(shelf["x"]) == bits(data.astype(data.dtype.newbyteorder("=")))


def test_zarr_arrays_of_any_layout(shelf: Shelf, tmp_path: Path) -> None:
    data = np.random.default_rng(0).standard_normal((70, 90, 11))
    group = zarr.create_group(tmp_path / "z")
    forms: dict[str, dict[str, Any]] = {
        "narrow": {"chunks": (70, 3, 2)},
        "sharded": {"chunks": (10, 10, 11), "shards": (20, 90, 11)},
        "filled": {"chunks": (1, 90, 11), "fill_value": 7.5},
        "big-endian": {"chunks": (33, 90, 11), "dtype": ">f8"},
    }
    for name, options in forms.items():
        array = group.create_array(name, **{"shape": data.shape, "dtype": "f8", **options})
        if name != "filled":
            array[...] = data
        else:
            array[5:9] = data[5:9]
    zarr.create_array(tmp_path / "z2", name="old", data=data, zarr_format=2)
    shelf.import_zarr(tmp_path / "z")
    shelf.import_zarr(tmp_path / "z2")
    for name in ("narrow", "sharded", "big-endian", "old"):
        assert bits(shelf[name]) == bits(data)
    wanted = np.full(data.shape, 7.5)
    wanted[5:9] = data[5:9]
    assert bits(shelf["filled"]) == bits(wanted)


def test_blocks_that_cut_rows_of_a_large_zarr_array(shelf: Shelf, tmp_path: Path) -> None:
    """A row of chunks is more than a block, so the array is read in blocks of parts of rows."""
    data = random_array(DTYPES["U16"], (300, 100_000))
    zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(300, 5_000))
    assert shelf.import_zarr(tmp_path / "a.zarr") == ["a"]
    assert bits(shelf["a"]) == bits(data)


# Models in folders.


def write_shards(folder: Path, wanted: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    parts = {
        "model-1-of-2.safetensors": list(wanted)[::2],
        "model-2-of-2.safetensors": list(wanted)[1::2],
    }
    for file, names in parts.items():
        save_file({name: wanted[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_sharded_models(shelf: Shelf, tmp_path: Path) -> None:
    wanted = {f"layer.{i}": random_array(DTYPES["F32"], (40, i + 1), i) for i in range(9)}
    index = write_shards(tmp_path / "m", wanted)
    pack_folder(tmp_path / "m", tmp_path / "packed")
    places = {"m": tmp_path / "m", "i": index, "p": tmp_path / "packed"}
    for prefix, place in places.items():
        shelf.import_safetensors(place, prefix)
        assert same({name: shelf[f"{prefix}/{name}"] for name in wanted}, wanted)
    for file in (tmp_path / "m").glob("*.safetensors"):  # packed one by one, with the plain index
        pack_file(file, file.with_suffix("").with_suffix(".ph.safetensors"))
        file.unlink()
    shelf.import_safetensors(index, "one by one")
    assert same({name: shelf[f"one by one/{name}"] for name in wanted}, wanted)
    index.unlink()
    shelf.import_safetensors(tmp_path / "m", "no index")
    assert same({name: shelf[f"no index/{name}"] for name in wanted}, wanted)


def test_a_model_against_a_base(shelf: Shelf, tmp_path: Path) -> None:
    base = {"w": np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)}
    tuned = {"w": base["w"] + np.float32(1e-6)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    pack_file(
        tmp_path / "tuned.safetensors", tmp_path / "t.ph.safetensors",
        base=tmp_path / "base.safetensors",
    )  # fmt: skip
    with pytest.raises(BaseMismatchError, match="tensor 'w': a base of F32"):
        shelf.import_safetensors(tmp_path / "t.ph.safetensors")
    assert list(shelf) == []
    shelf.import_safetensors(tmp_path / "t.ph.safetensors", base=tmp_path / "base.safetensors")
    assert same(shelf, tuned)


def test_an_index_that_does_not_fit(shelf: Shelf, tmp_path: Path) -> None:
    index = write_shards(tmp_path / "m", {f"t{i}": np.ones(4) for i in range(4)})
    good = json.loads(index.read_text())
    for change, words in (
        ({"gone": "model-1-of-2.safetensors"}, "puts tensor 'gone' in 'model-1-of-2.safetensors'"),
        ({"gone": "nope.safetensors"}, "names 'nope.safetensors', which is not in the folder"),
        ({"gone": "../own.shelf"}, "names '../own.shelf', which is outside its folder"),
    ):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | change}))
        with pytest.raises(CorruptionError, match=words):
            shelf.import_safetensors(tmp_path / "m")
    index.unlink()
    save_file({"t0": np.ones(4)}, tmp_path / "m" / "more.safetensors")
    with pytest.raises(ValueError, match="tensor 't0' is also in model-1-of-2"):
        shelf.import_safetensors(tmp_path / "m")
    for name in ("a", "b"):
        (tmp_path / "m" / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has several models: a.safetensors.index.json, b"):
        shelf.import_safetensors(tmp_path / "m")
    assert list(shelf) == []


# Whole or absent.


class Stop(Exception):
    pass


def stop_at(n: int) -> Callable[[int, int], None]:
    """A progress function that fails at its n-th call."""
    calls = iter(range(n))

    def progress(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise Stop

    return progress


def test_a_failed_export_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    fill(shelf, {f"t{i}": np.arange(50) for i in range(5)})
    (tmp_path / "out").mkdir()
    exports: list[Callable[..., object]] = [
        Shelf.export_zarr,
        Shelf.export_npy,
        Shelf.export_safetensors,
    ]
    for export in exports:
        target = tmp_path / "out" / "x"
        with pytest.raises(Stop):
            export(shelf, target, progress=stop_at(3))
        assert leftovers(tmp_path / "out") == set()
        export(shelf, target)
        before = sorted(tmp_path.joinpath("out").rglob("*"))
        with pytest.raises(FileExistsError):
            export(shelf, target)
        with pytest.raises(Stop):
            export(shelf, target, progress=stop_at(3), force=True)
        assert sorted(tmp_path.joinpath("out").rglob("*")) == before
        export(shelf, target, force=True)
        remove(target)


def remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    else:
        path.unlink()


def test_a_folder_of_others_is_never_replaced(shelf: Shelf, tmp_path: Path) -> None:
    fill(shelf, {"x": np.ones(3)})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    for export in (Shelf.export_zarr, Shelf.export_npy):
        with pytest.raises(FileExistsError):
            export(shelf, tmp_path / "work", force=True)
    with pytest.raises(FileExistsError):
        shelf.export_zarr(shelf.path, force=True)
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


def test_a_failed_import_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    wanted = fill(shelf, {f"t{i}": np.arange(50 + i) for i in range(5)})
    shelf.export_zarr(tmp_path / "z")
    shelf.export_npy(tmp_path / "n")
    shelf.export_safetensors(tmp_path / "s.safetensors")
    imports: list[Callable[..., object]] = [
        lambda **options: shelf.import_zarr(tmp_path / "z", "in", **options),
        lambda **options: shelf.import_npy("in", tmp_path / "n", **options),
        lambda **options: shelf.import_safetensors(tmp_path / "s.safetensors", "in", **options),
    ]
    for load in imports:
        with pytest.raises(Stop):
            load(progress=stop_at(3))
        assert same(shelf, wanted)
        with pytest.raises(Stop):
            load(progress=stop_at(3), resume=True)
        assert len(list(shelf)) == len(wanted) + 3
        load(resume=True)
        assert same({name: shelf[f"in/{name}"] for name in wanted}, wanted)
        for name in wanted:
            del shelf[f"in/{name}"]


def test_tensors_are_replaced_only_if_that_is_allowed(shelf: Shelf, tmp_path: Path) -> None:
    save_file({"a": np.arange(5), "b": np.ones(3)}, tmp_path / "m.safetensors")
    before = fill(shelf, {"b": np.zeros(9)})
    for options in ({}, {"resume": True, "names": "b"}):
        with pytest.raises(ValueError, match=r"tensor 'b': the shelf has .*replace=True"):
            shelf.import_safetensors(tmp_path / "m.safetensors", **options)
        assert same(shelf, before)
    shelf.import_safetensors(tmp_path / "m.safetensors", replace=True)
    assert same(shelf, load_file(tmp_path / "m.safetensors"))
    shelf.import_safetensors(tmp_path / "m.safetensors", resume=True)
    shelf["a"] = np.ones(5)
    shelf.import_safetensors(tmp_path / "m.safetensors", resume=True, replace=True)
    assert same(shelf, load_file(tmp_path / "m.safetensors"))


def test_an_import_is_part_of_the_transaction_around_it(shelf: Shelf, tmp_path: Path) -> None:
    save_file({"a": np.arange(5), "b": np.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(Stop):
        import_and_stop(shelf, tmp_path / "m.safetensors")
    assert list(shelf) == []
    with shelf.transaction():
        shelf["c"] = np.arange(7)
        shelf.import_safetensors(tmp_path / "m.safetensors")
        shelf.export_safetensors(tmp_path / "seen.safetensors")
    assert same(load_file(tmp_path / "seen.safetensors"), shelf)


def import_and_stop(shelf: Shelf, path: Path) -> None:
    with shelf.transaction():
        shelf.import_safetensors(path)
        assert list(shelf) == ["a", "b"]
        raise Stop


def test_an_export_is_of_one_state(shelf: Shelf, tmp_path: Path) -> None:
    """A writer changes two tensors in one transaction, again and again."""
    fill(shelf, {name: np.zeros(5000) for name in ("first", "second")})
    stop = threading.Event()

    def write() -> None:
        for n in count(1):
            if stop.is_set():
                return
            with shelf.transaction():
                shelf["first"][...] = n
                shelf["second"][...] = n

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(30):
            found = load_file(shelf.export_safetensors(tmp_path / "s.safetensors", force=True))
            assert len({*found["first"], *found["second"]}) == 1
            seen.add(found["first"][0])
        assert len(seen) > 1
    finally:
        stop.set()
        writer.join()


def test_shelves_that_cannot_be_written_or_read(shelf: Shelf, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with Shelf(shelf.path, "r") as reader:
        with pytest.raises(PermissionError, match="open for reading only"):
            reader.import_npy("x", tmp_path / "x.npy")
        assert reader.export_zarr(tmp_path / "empty.zarr").is_dir()
    with pytest.raises(ClosedError):
        reader.export_npy(tmp_path / "n")
    with pytest.raises(ClosedError):
        reader.import_npy("x", tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        shelf.export_zarr(tmp_path / "none" / "z")
    assert leftovers(tmp_path, "own.shelf", "x.npy", "empty.zarr") == set()
