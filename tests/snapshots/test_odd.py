"""Snapshots of odd states: keys that are not what they seem, tied tensors, tensors without
bytes."""

import enum
import shutil
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from snapshot_samples import assert_same

from packhorse import _core
from packhorse.disk import SnapshotStore
from packhorse.errors import CompatibilityError


class Colour(str, enum.Enum):  # noqa: UP042 - the kind whose format() is not its value
    RED = "red"


class Place(enum.IntEnum):
    FIRST = 1


class OwnText(str):
    """A string that is equal to no other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize("key", [Colour.RED, Place.FIRST, np.float64(1.5), np.str_("x"), -0.0])
def test_keys_of_subclasses_come_back_as_plain_ones(tmp_path: Path, key: Any) -> None:
    state = {"m": {key: np.arange(5.0), "other": 1}}
    SnapshotStore(tmp_path).take("a", state)
    found = SnapshotStore(tmp_path).restore("a")
    assert list(found["m"]) == [key, "other"]
    assert type(next(iter(found["m"]))) in (str, int, float)
    target = {"m": {key: np.zeros(5)}}
    SnapshotStore(tmp_path).restore("a", into=target)
    assert_same(target["m"][key], state["m"][key])
    assert SnapshotStore(tmp_path).verify() == []


def test_keys_that_become_equal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^m: two keys are equal as plain values"):
        SnapshotStore(tmp_path).take("a", {"m": {OwnText("x"): 1, OwnText("x"): 2}})


def test_a_key_too_large_to_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^m: an integer of more than 8192 bits"):
        SnapshotStore(tmp_path).take("a", {"m": {10**5000: np.arange(3)}})


@pytest.mark.parametrize("n", [8, 100_000])
def test_a_tensor_that_pytorch_does_not_have_is_named(tmp_path: Path, n: int) -> None:
    six = np.ones((n, 4), ml_dtypes.float6_e2m3fn)
    SnapshotStore(tmp_path).take("a", {"model": {"ok": np.ones(4), "six": six}})
    with pytest.raises(
        CompatibilityError, match=r"model\.six: PyTorch .* has no dtype for F6_E2M3"
    ):
        SnapshotStore(tmp_path).restore("a", framework="pt")


def test_tensors_at_one_path_are_not_mixed_up(tmp_path: Path) -> None:
    state = {"a.b": np.full(9, 1.0), "a": {"b": np.full(9, 2.0)}}
    store = SnapshotStore(tmp_path)
    store.take("x", state)
    store.take("y", state, base="x")
    assert_same(store.restore("y"), state)
    with pytest.raises(ValueError, match=r"^snapshot 'x': into: two tensors have the path 'a\.b'"):
        store.restore("x", into={"a.b": np.zeros(9), "a": {"b": np.zeros(9)}})
    with pytest.raises(ValueError, match=r"two tensors of the snapshot have the path 'a\.b'"):
        store.restore("x", into={"a": {"b": np.zeros(9)}})


def test_tied_tensors_are_written_in_place_along_a_chain(tmp_path: Path) -> None:
    """Threads must not decode a chain through memory that another thread is decoding to."""
    weights = [torch.randn(50_000) for _ in range(12)]
    store = SnapshotStore(tmp_path)
    for step in range(4):
        for weight in weights:
            weight[step * 1000 : step * 1000 + 500] += 0.01
        store.take(f"{step}", [{"a": w, "b": w.clone(), "t": w.view(2, -1).T} for w in weights])
    assert store.info("3").max_deltas == 3
    reader = SnapshotStore(tmp_path, threads=4)
    for _ in range(8):
        ties = [torch.zeros(50_000) for _ in weights]
        reader.restore("3", into=[{"a": w, "b": w, "t": w.view(2, -1).T} for w in ties])
        for tie, weight in zip(ties, weights, strict=True):
            assert_same(tie, weight)


def odd_tensors() -> dict[str, tuple[Any, str]]:
    from torch._subclasses import FakeTensorMode
    from torch.masked import masked_tensor

    with warnings.catch_warnings(), FakeTensorMode():
        fake = torch.empty(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        compressed = torch.eye(3).to_sparse_csr()
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        lazy = torch.nn.LazyLinear(3).weight
    return {
        "meta": (torch.empty(3, device="meta"), "device meta has no memory"),
        "fake": (fake, "FakeTensor on device cpu has no memory"),
        "masked": (masked, "MaskedTensor on device cpu has no memory"),
        "nested": (nested, "a dense PyTorch tensor is needed, not a nested one"),
        "lazy": (lazy, "has no shape yet; run its module once"),
        "sparse": (torch.eye(3).to_sparse(), "not one of layout torch.sparse_coo"),
        "compressed": (compressed, "not one of layout torch.sparse_csr"),
        "quantized": (quantized, "safetensors has no dtype for torch.qint8"),
        "scalar": (np.int64(3), r"int64 cannot be stored; .*; store its item\(\) instead"),
        "masked array": (np.ma.array([1, 2], mask=[0, 1]), "would lose its mask"),
    }


@pytest.mark.parametrize("kind", list(odd_tensors()))
def test_tensors_without_bytes_are_named(tmp_path: Path, kind: str) -> None:
    value, words = odd_tensors()[kind]
    store = SnapshotStore(tmp_path / "s")
    for take in (store.take, store.take_async):
        with pytest.raises(TypeError, match=rf"^m\[0\]\.w: .*{words}"):
            take("a", {"m": [{"w": value}]})
    store.close()
    assert not (tmp_path / "s").exists()


class Wrapped(torch.Tensor):
    """A subclass that only adds methods to a tensor."""


def test_a_plain_subclass_is_a_tensor(tmp_path: Path) -> None:
    value = torch.arange(5.0).as_subclass(Wrapped)
    SnapshotStore(tmp_path).take("a", {"w": value, "p": torch.nn.Buffer(value)})
    found = SnapshotStore(tmp_path).restore("a", framework="pt")
    assert type(found["w"]) is torch.Tensor
    assert_same(found, {"w": torch.arange(5.0), "p": torch.arange(5.0)})


def test_metadata_is_copied_and_not_too_deep(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"tags": ["a"]}
    with SnapshotStore(tmp_path) as store:
        store.take_async("a", {"w": np.zeros(10**6)}, metadata=metadata)
        metadata["tags"].append("b")
    assert SnapshotStore(tmp_path).info("a").metadata == {"tags": ["a"]}
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    with pytest.raises(ValueError, match="consist of JSON values: nested more than 64 deep"):
        SnapshotStore(tmp_path).take("b", {}, metadata={"deep": deep})
    SnapshotStore(tmp_path).take("b", {}, metadata={"deep": deep[0]})
    assert SnapshotStore(tmp_path).info("b").metadata == {"deep": deep[0]}


def test_a_store_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "s")
    store.take("a", {"w": np.arange(9.0)})
    shutil.rmtree(tmp_path / "s")
    assert store.names() == []
    store.take("b", {"w": np.arange(9.0)})
    assert SnapshotStore(tmp_path / "s").names() == ["b"]
    assert SnapshotStore(tmp_path / "s").verify() == []


def test_headers_of_short_tensors_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if some of the tensors are equal, and share a frame."""
    state = {f"w{i}": np.arange(i % 7, 200.0) for i in range(40)} | {"long": np.arange(1e5)}
    SnapshotStore(tmp_path).take("a", state)
    counts: list[int] = []
    real = _core.open_each

    def counted(buffers: list[Any]) -> Any:
        counts.append(len(buffers))
        return real(buffers)

    monkeypatch.setattr(_core, "open_each", counted)
    assert_same(SnapshotStore(tmp_path).restore("a"), state)
    assert counts == [7, 1]
