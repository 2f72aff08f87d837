"""`save` and `load`: nested states come back as they were, with tensors of either framework."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from packhorse.disk import Shelf
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.numpy import compress


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        yield opened
        assert opened.verify() == []


def same(found: Any, expected: Any) -> None:
    """Equal, also in types, with NaN equal to NaN."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
        assert found.flags.writeable
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for item, value in zip(found, expected, strict=True):
            same(item, value)
    elif isinstance(expected, float):
        assert math.copysign(1, found) == math.copysign(1, expected)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    else:
        assert found == expected


STATES: dict[str, Any] = {
    "nothing": {},
    "an empty list": [],
    "numbers": [0, -1, 1 << 80, 0.1, -0.0, math.inf, -math.inf, math.nan, True, False, None],
    "texts": ["", "tëxt", "\0 \u2028", "a" * 100_000],
    "keys": {"": 1, "a.b/c": {"d": []}, 0: "zero", -5: ("t", ()), "0": 2},
    "many": [{"i": i, "w": np.full(3, i)} for i in range(50)],
    "tensors": {
        "scalar": np.array(2.5),
        "F4": np.ones((3, 4), ml_dtypes.float4_e2m1fn),
        "bf16": np.ones((3, 5), ml_dtypes.bfloat16),
        "big-endian": np.arange(3, dtype=">i4").astype("<i4"),
        "empty": np.zeros((0, 3), np.uint8),
        "bool": np.array([True, False]),
        "strided": np.arange(20)[::-2],
        "long": np.zeros((3, 200_000), np.float32),
    },
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back(shelf: Shelf, name: str) -> None:
    shelf.save(name, STATES[name])
    same(shelf.load(name), STATES[name])
    assert shelf.keys() == [name]
    with shelf.transaction():
        shelf.save("again", STATES[name])
        same(shelf.load("again"), STATES[name])
    with Shelf(shelf.path, "r") as other:
        same(other.load("again"), STATES[name])


def mixed(n: int) -> dict[str, Any]:
    """Tensors of one chunk and of several, with and without bases, and some that need Zstandard."""
    rng = np.random.default_rng(1)
    return {
        f"{kind}{i}": value
        for i in range(n)
        for kind, value in {
            "norm": rng.normal(1, 0.1, 384).astype(ml_dtypes.bfloat16),
            "matrix": rng.normal(0, 0.02, (300, 600)).astype(np.float32),
            "text": np.frombuffer(f"line {i} of a text. ".encode() * 4000, np.uint8),
            "F6": rng.normal(0, 1, (4, 8)).astype(ml_dtypes.float6_e3m2fn),
            "zeros": np.zeros(1000),
        }.items()
    }


@pytest.mark.parametrize("cache_nbytes", [0, 1 << 28])
@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_of_a_state_are_decoded_together(
    tmp_path: Path, decoded_together: list[int], threads: int, cache_nbytes: int
) -> None:
    state = mixed(5)
    with Shelf(tmp_path / "s.shelf", threads=threads, cache_nbytes=cache_nbytes) as shelf:
        shelf.save("s", state)
        same(shelf.load("s"), state)
        with shelf.transaction():
            shelf["s2"] = state["matrix0"]
            same(shelf.load("s"), state)
    # A matrix has six chunks. Texts need Zstandard, and F6 has other elements in memory.
    assert decoded_together == [5 * 8] * 2


def test_tensors_of_pytorch_are_decoded_together(shelf: Shelf, decoded_together: list[int]) -> None:
    torch = pytest.importorskip("torch")
    state = mixed(3) | {"F4": np.ones((3, 4), ml_dtypes.float4_e2m1fn)}
    shelf.save("s", state)
    with pytest.raises(CompatibilityError, match=r"^F60: "):
        shelf.load("s", framework="pt")
    state = {name: value for name, value in state.items() if not name.startswith("F6")}
    shelf.save("s", state)
    found = shelf.load("s", framework="pt")
    assert decoded_together == [3 * 8]
    assert list(found) == list(state)
    assert found["F4"].view(torch.uint8).tolist() == [[0x22, 0x22]] * 3
    for name in state.keys() - {"F4"}:
        assert found[name].shape == state[name].shape
        assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == state[name].tobytes()


@pytest.mark.parametrize("victim", ["norm3", "matrix2"])
def test_the_chunk_that_is_damaged_is_named(tmp_path: Path, victim: str) -> None:
    state = {name: value for name, value in mixed(5).items() if name[:4] in ("norm", "matr")}
    with Shelf(tmp_path / "s.shelf") as shelf:
        shelf.save("s", state)
    n_rows = (1 << 17) // state[victim][0].nbytes  # of a chunk
    frame = compress(state[victim][:n_rows]).to_bytes()
    part = frame[len(frame) // 2 :][:64]
    for path in (tmp_path / "s.shelf").rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = data.find(part)
        if at >= 0:
            data[at] ^= 1
            path.write_bytes(data)
    named = r"'s': chunk 0 \(rows 0 to \d+\), stored as \d+: "
    with Shelf(tmp_path / "s.shelf", "r") as shelf, pytest.raises(CorruptionError, match=named):
        shelf.load("s")


def test_states_and_tensors_take_each_others_names(shelf: Shelf) -> None:
    shelf["x"] = np.arange(3)
    shelf.save("x", {"w": np.ones(2)})
    with pytest.raises(TypeError, match="'x' is a nested state"):
        shelf["x"]
    assert shelf.load("x")["w"].tolist() == [1, 1]
    assert (shelf.info().states, shelf.info().n_tensors) == (["x"], 0)
    shelf["x"] = np.arange(4)
    assert shelf["x"].numpy().tolist() == [0, 1, 2, 3]
    shelf.save("x", {})
    shelf.create("x", 3, "u1", replace=True)
    assert not shelf["x"][...].any()


def test_a_state_is_replaced_renamed_and_removed(shelf: Shelf) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint8)
    shelf.save("s", {"w": noise})
    info = shelf.info()
    assert info.nbytes == noise.nbytes
    assert noise.nbytes <= info.packed_nbytes < noise.nbytes * 1.01
    for i in range(5):
        shelf.save("s", {"w": noise, "i": i})
    assert shelf.info().packed_nbytes == info.packed_nbytes
    assert shelf.info().file_nbytes < 4 * noise.nbytes
    shelf.rename("s", "t")
    with pytest.raises(KeyError, match="no state 's'"):
        shelf.load("s")
    assert np.array_equal(shelf.load("t")["w"], noise)
    shelf.tag("then")
    del shelf["t"]
    assert "t" not in shelf
    assert shelf.info().packed_nbytes == 0
    assert np.array_equal(shelf.at("then").load("t")["w"], noise)
    shelf.rollback("then")
    assert np.array_equal(shelf.load("t")["w"], noise)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (
        {"a": [1, {2}]},
        TypeError,
        r"a\[1\]: set cannot be stored; a state consists of tensors, dict",
    ),
    ({"a": np.float32(1)}, TypeError, "a: float32 cannot be stored.*store its item"),
    ({"a": np.zeros(2, complex)}, TypeError, "no dtype for complex128"),
    ({"a": {(1, 2): 3}}, TypeError, "tuple"),
    ({"a": "\ud800"}, ValueError, "not Unicode text"),
    ({"a": object()}, TypeError, "a: object cannot be stored"),
    (np.ones(3), TypeError, "a state is a dict, a list or a tuple, not ndarray"),
    (None, TypeError, "a state is a dict, a list or a tuple, not NoneType"),
    (
        {"a": np.ones((3, 5), ml_dtypes.float4_e2m1fn)}, ValueError,
        "a: 15 elements of 4 bits do not end at a byte",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("state", "kind", "message"), WRONG, ids=lambda value: repr(value)[:20])
def test_what_cannot_be_stored_changes_nothing(
    shelf: Shelf, state: Any, kind: type[Exception], message: str
) -> None:
    shelf.save("s", {"w": np.ones(3)})
    n_commits = shelf.info().n_commits
    with pytest.raises(kind, match=message):
        shelf.save("s", state)
    with shelf.transaction(), pytest.raises(kind, match=message):
        shelf.save("s", state)
    assert shelf.info().n_commits == n_commits
    assert shelf.load("s")["w"].tolist() == [1, 1, 1]


def test_a_state_that_is_nested_too_deeply(shelf: Shelf) -> None:
    state: Any = 1
    for _ in range(5000):
        state = [state]
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        shelf.save("s", state)


def test_states_of_pytorch(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(30, 20).to(torch.bfloat16)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "foreach": None, "params": [0, 1]}
    optimizer = {"state": {0: moments, 1: {}}, "param_groups": [group]}
    shelf.save("run", {"model": model.state_dict(), "optimizer": optimizer, "epoch": 3})
    found = shelf.load("run", framework="pt")
    assert list(found["model"]) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor)
        assert found["model"][name].dtype == tensor.dtype
    again = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    again.load_state_dict(OrderedDict(found["model"]))
    assert torch.equal(again[0].weight, model[0].weight)
    kept = found["optimizer"]
    assert kept["param_groups"] == [group]
    assert kept["state"][1] == {}
    for name, tensor in moments.items():
        assert torch.equal(kept["state"][0][name], tensor)
        assert kept["state"][0][name].dtype == tensor.dtype
    assert isinstance(shelf.load("run")["model"]["0.weight"], np.ndarray)
    with Shelf(shelf.path, "r", framework="pt") as reader:
        assert torch.equal(reader.load("run")["model"]["0.weight"], model[0].weight)


def test_a_tensor_that_is_shared_in_a_state(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(300, 300)
    shelf.save("tied", {"embed": weight, "head": weight, "view": weight[10:20].T})
    found = shelf.load("tied", framework="pt")
    assert torch.equal(found["embed"], weight)
    assert torch.equal(found["head"], weight)
    assert torch.equal(found["view"], weight[10:20].T)
    found["embed"][0] = 0
    assert torch.equal(shelf.load("tied", framework="pt")["embed"], weight)
