"""Floats of 4 and 6 bits: as NumPy holds them, as PyTorch holds pairs of them, and as safetensors
stores them."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import packhorse
from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.bits import pack_bits, unpack_bits_into
from packhorse.disk import SnapshotStore, pack_file
from packhorse.errors import CompatibilityError

KINDS = {
    "F4": ml_dtypes.float4_e2m1fn,
    "F6_E2M3": ml_dtypes.float6_e2m3fn,
    "F6_E3M2": ml_dtypes.float6_e3m2fn,
}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
PAIR = torch.float4_e2m1fn_x2


def array_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << BITS[dtype], shape).astype(np.uint8).view(KINDS[dtype])


def pairs(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(PAIR)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    kinds = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return kinds and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("bits", [4, 6])
def test_bits_follow_each_other_from_low_to_high(bits):
    elements = np.random.default_rng(1).integers(0, 1 << bits, 240).astype(np.uint8)
    stream = sum(int(element) << bits * i for i, element in enumerate(elements))
    packed = pack_bits(elements | np.uint8(0xFF << bits & 0xFF), bits)
    assert int.from_bytes(packed.tobytes(), "little") == stream
    again = np.full(240, 0xFF, np.uint8)
    unpack_bits_into(packed, bits, again)
    assert np.array_equal(again, elements)


@pytest.mark.parametrize("shape", [(0,), (8,), (3, 0, 4), (6, 20), (5, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", KINDS)
def test_arrays_come_back(tmp_path, dtype, shape):
    array = array_of(dtype, shape)
    frame = ph_numpy.compress(array)
    assert (frame.dtype, frame.shape, frame.logical_nbytes) == (
        dtype, shape, array.size * BITS[dtype] // 8
    )  # fmt: skip
    out = np.zeros(shape, KINDS[dtype])
    assert ph_numpy.decompress(frame, out=out) is out
    path = tmp_path / "a.ph.safetensors"
    ph_numpy.save_file({"a": array, "b": np.zeros(3)}, path)
    found = [out, ph_numpy.decompress(frame), ph_numpy.load_file(path)["a"]]
    found += [ph_numpy.load(path.read_bytes())["a"]]
    with packhorse.open_file(path) as file:
        found += [file.get_tensor("a"), file.get_slice("a")[...]]
        assert file.get_slice("a").get_shape() == list(shape)
        part, expected = file.get_slice("a")[1:, ...], array[1:, ...]
        assert (part.shape, part.tobytes()) == (expected.shape, expected.tobytes())
    for got in found:
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, shape, array.tobytes())


def test_any_memory_order_and_any_high_bits_are_taken():
    raw = np.arange(96, dtype=np.uint8).reshape(6, 16)
    array = raw.view(KINDS["F6_E2M3"])
    frame = ph_numpy.compress(array.T[::2])
    expected = (raw.T[::2] & 63).view(array.dtype)
    assert ph_numpy.decompress(frame).tobytes() == expected.tobytes()
    assert np.array_equal(raw, np.arange(96).reshape(6, 16))


@pytest.mark.parametrize("shape", [(0,), (4,), (3, 0), (6, 10), (2, 3, 4)], ids=str)
def test_pairs_come_back_as_safetensors_stores_them(tmp_path, shape):
    tensor, plain, packed = pairs(shape), tmp_path / "a.safetensors", tmp_path / "b.ph.safetensors"
    safetensors.torch.save_file({"a": tensor}, plain)
    ph_torch.save_file({"a": tensor}, packed)
    packhorse.disk.unpack_file(packed, tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == plain.read_bytes()
    frame = ph_torch.compress(tensor)
    found = [ph_torch.decompress(frame), ph_torch.decompress(frame, out=torch.empty_like(tensor))]
    logical = (*shape[:-1], 2 * shape[-1])
    assert (frame.dtype, frame.shape) == ("F4", logical)
    for path in (plain, packed):
        found += [ph_torch.load_file(path)["a"], ph_torch.load(path.read_bytes())["a"]]
        with packhorse.open_file(path, "pt") as file, safe_open(plain, "pt") as theirs:
            assert file.get_slice("a").get_shape() == theirs.get_slice("a").get_shape()
            found += [file.get_tensor("a"), file.get_slice("a")[:]]
            assert same(file.get_slice("a")[:1], tensor[:1])
        array = ph_numpy.load_file(path)["a"]  # the low half of a byte is the first element
        assert (array.dtype, array.shape) == (KINDS["F4"], logical)
        assert pack_bits(array.reshape(-1).view(np.uint8), 4).tobytes() == (
            tensor.view(torch.uint8).numpy().tobytes()
        )
    assert all(same(got, tensor) for got in found)
    assert ph_torch.load_file(packed, "meta")["a"].shape == torch.Size(shape)


def test_pairs_in_any_memory_order_are_taken(tmp_path):
    tensor = pairs((6, 10))
    ph_torch.save_file({"a": tensor.T}, tmp_path / "a")
    assert same(ph_torch.load_file(tmp_path / "a")["a"], tensor.T.contiguous())


def test_what_pytorch_cannot_hold_is_told(tmp_path):
    path = tmp_path / "a.ph.safetensors"
    for array, words in (
        (
            array_of("F4", (4, 3)),
            r".* holds pairs .* \[4, 3\] must be even; read the tensor with NumPy",
        ),
        (
            array_of("F6_E3M2", (8,)),
            r"PyTorch .* has no dtype for F6_E3M2; read the tensor with Nu",
        ),
    ):
        ph_numpy.save_file({"a": array}, path)
        packhorse.disk.unpack_file(path, tmp_path / "plain.safetensors", force=True)
        for file in (path, tmp_path / "plain.safetensors"):
            with pytest.raises(CompatibilityError, match=f"{file.name}: tensor 'a': {words}"):
                ph_torch.load_file(file)
            assert ph_numpy.load_file(file)["a"].tobytes() == array.tobytes()
    with pytest.raises(ValueError, match=r"^tensor 'a': .* needs a dimension; use unsqueeze"):
        ph_torch.save_file({"a": pairs((1,))[0]}, path)
    with pytest.raises(ValueError, match=r"must be torch\.float4_e2m1fn_x2 \(2, 3\)"):
        ph_torch.decompress(ph_torch.compress(pairs((2, 3))), out=pairs((2, 6)))


def test_what_safetensors_cannot_store_is_refused_by_name(tmp_path):
    path = tmp_path / "a"
    for name, advice in (
        ("int4", "int8"), ("int2", "int8"), ("uint4", "uint8"), ("uint2", "uint8"),
        ("float8_e3m4", r"view\('uint8'\)"),
    ):  # fmt: skip
        array = np.zeros(4, getattr(ml_dtypes, name))
        with pytest.raises(TypeError, match=f"^tensor 'a': .* no dtype for {name}; .*{advice}"):
            ph_numpy.save_file({"a": array}, path)
    for array in (array_of("F4", (3,)), array_of("F6_E2M3", (6,)), array_of("F4", ())):
        with pytest.raises(ValueError, match=r"^tensor 'a': \d elements of . bits do not end"):
            ph_numpy.save_file({"a": array}, path)
    with pytest.raises(TypeError, match=r"^tensor 'a': safetensors has no dtype for torch\.uint4"):
        ph_torch.save_file({"a": torch.empty(4, dtype=torch.uint4)}, path)
    assert not path.exists()


def test_snapshots_and_states_hold_them(tmp_path: Path):
    state = {
        "four": array_of("F4", (6, 20)),
        "six": array_of("F6_E2M3", (8,)),
        "pairs": pairs((3, 4)),
    }
    with pytest.raises(
        TypeError, match=r"^nested\.six: cannot be stored in a state: PyTorch .* no"
    ):
        ph_torch.save({"nested": state})
    data = ph_torch.save({"nested": {**state, "six": np.zeros(3)}})
    loaded = {**ph_torch.load(data)["nested"], "six": state["six"]}
    store = SnapshotStore(tmp_path / "store")
    store.take("a", state)
    later = {**state, "four": array_of("F4", (6, 20), seed=1)}
    store.take("b", later)
    into = {**state, "four": np.zeros_like(state["four"]), "pairs": torch.zeros_like(pairs((3, 4)))}
    store.restore("b", into=into)
    for got, expected in ((loaded, state), (into, later)):
        assert same(got["pairs"], expected["pairs"])
        for name in ("four", "six"):
            assert got[name].dtype == expected[name].dtype
            assert got[name].tobytes() == expected[name].tobytes()


def test_differences_from_a_base(tmp_path):
    old, new = array_of("F4", (64, 64)), array_of("F4", (64, 64))
    new[3, 5] = 1
    ph_numpy.save_file({"a": old}, tmp_path / "old")
    ph_numpy.save_file({"a": new}, tmp_path / "new", base=tmp_path / "old")
    found = ph_numpy.load_file(tmp_path / "new", base=tmp_path / "old")["a"]
    assert found.tobytes() == new.tobytes()


def test_a_plain_file_of_pairs_is_packed(tmp_path):
    safetensors.torch.save_file({"a": pairs((5, 6))}, tmp_path / "a.safetensors")
    pack_file(tmp_path / "a.safetensors", tmp_path / "b")
    assert same(ph_torch.load_file(tmp_path / "b")["a"], pairs((5, 6)))
    assert "packhorse" in sys.modules
