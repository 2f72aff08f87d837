"""`packhorse.torch.save` and `load` instead of `torch.save` and `torch.load`, and plain PyTorch
that resumes from their files."""

import io
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from training_samples import Run, one_thread

import packhorse
from packhorse import CompatibilityError, CorruptionError
from packhorse.disk import verify_file
from packhorse.disk.state_file import STATE_KEY
from packhorse.torch import load, load_file, save, save_file


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def sample_state() -> dict[str, Any]:
    """Values of all kinds that state dicts of models, optimizers and schedulers contain."""
    tied = torch.randn(40, 30)
    return {
        "model": OrderedDict(
            [("embed.weight", tied), ("head.weight", tied), ("n", torch.tensor(3))]
        ),
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "m": torch.randn(5, 5)[:, ::2]}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "best": math.inf,
        "name": "naïve ☃",
        "rng": (3, np.arange(624, dtype=np.uint32), torch.get_rng_state()),
        "big": 1 << 70,
        "nothing": torch.zeros(0, 3, dtype=torch.float16),
        None: [True, -0.0, []],
    }


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert type(found) is dict
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert type(found) is np.ndarray
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


def through_bytes(state: Any, path: Path) -> Any:
    return load(save(state))


def through_path(state: Any, path: Path) -> Any:
    assert save(state, path) is None
    return load(path)


def through_buffer(state: Any, path: Path) -> Any:
    buffer = io.BytesIO()
    save(state, buffer)
    buffer.seek(0)
    return load(buffer)


def through_raw_file(state: Any, path: Path) -> Any:
    with open(path, "wb", buffering=0) as file:
        save(state, file)
    with open(path, "rb") as file:
        return load(file, "cpu", weights_only=False, mmap=True)


WAYS = [through_bytes, through_path, through_buffer, through_raw_file]


@pytest.mark.parametrize("way", WAYS)
def test_a_state_comes_back(way: Callable[..., Any], tmp_path: Path) -> None:
    state = sample_state()
    assert_same(way(state, tmp_path / "state.pt"), state)


def test_it_is_a_packed_file_with_each_tensor_under_its_path(tmp_path: Path) -> None:
    path = tmp_path / "state.ph.safetensors"
    save(sample_state(), path, {"run": "7"})
    assert verify_file(path) == []
    with packhorse.open_file(path, "pt") as file:
        assert "optimizer.state[0].m" in file.keys()  # noqa: SIM118 - not a dict
        assert file.metadata()["run"] == "7"
    with safetensors.safe_open(path, "np") as file:
        assert "model.embed.weight" in file.keys()  # noqa: SIM118
    assert load_file(path)["model.n"] == 3


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    model = sample_state()["model"]
    tied, apart = save({"m": model}), save({"m": {k: v.clone() for k, v in model.items()}})
    assert len(tied) < 0.6 * len(apart)
    found = load(tied)["m"]
    assert found["embed.weight"] is found["head.weight"]


def test_tied_tensors_of_a_flat_dict_stay_tied_too() -> None:
    model = sample_state()["model"]
    tensors = {k: v for k, v in model.items() if isinstance(v, torch.Tensor)}
    found = load(save(tensors))
    assert found["embed.weight"] is found["head.weight"]
    assert_same(found, tensors)


def test_names_that_mean_more_in_a_flat_dict() -> None:
    state = {"__metadata__": torch.ones(3)}
    assert_same(load(save(state)), state)
    with pytest.raises(ValueError, match=r"has the key 'packhorse.state'"):
        save({"a": torch.ones(3)}, {STATE_KEY: ""})


def test_a_base_may_be_a_nested_state() -> None:
    weight = torch.randn(300, 100)
    old, new = {"m": [weight], "step": 1}, {"m": [weight * 1.00001], "step": 2}
    data = save(new, base=old)
    assert len(data) < 0.6 * len(save(new))
    for base in (old, {"m[0]": weight}, {"m": (weight,)}):
        assert_same(load(data, base=base), new)


def test_tensors_whose_paths_are_alike_stay_apart() -> None:
    state = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1), "b'": torch.ones(2)},
        "__metadata__": torch.ones(3),
        "": [torch.ones(4)],
        "[0]": torch.ones(5),
    }
    assert_same(load(save(state)), state)


@pytest.mark.parametrize("metadata", [None, {"a": "b"}])
def test_a_flat_dict_is_what_save_file_writes(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    tensors = {"b": torch.ones(3), "a": torch.randn(70, 90).bfloat16()}
    save_file(tensors, tmp_path / "a", metadata)
    save(tensors, tmp_path / "b", metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert save(tensors, metadata) == (tmp_path / "a").read_bytes()
    assert_same(load(tmp_path / "b"), tensors)


@pytest.mark.parametrize("is_path", [True, False])
def test_map_location_is_a_device(is_path: bool, tmp_path: Path) -> None:
    save({"x": [torch.ones(2)], "y": np.ones(2)}, tmp_path / "f")
    source = tmp_path / "f" if is_path else (tmp_path / "f").read_bytes()
    for place in ("cpu", torch.device("cpu")):
        assert load(source, map_location=place)["x"][0].device.type == "cpu"
    for wrong in (lambda storage, place: storage, {"cuda:0": "cpu"}):
        with pytest.raises(TypeError, match="must be a device or the name of one"):
            load(source, map_location=wrong)
    save({"x": [torch.ones(2)]}, tmp_path / "f")
    assert load(tmp_path / "f", "meta")["x"][0].device.type == "meta"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {3: {"b": {1, 2}}}}, r"a\[3\]\.b: set cannot be stored"),
        ({"a": [Path("x")]}, r"a\[0\]: PosixPath cannot be stored"),
        ({("x",): 1}, "a key of type tuple"),
        ({"a": [torch.ones(2).to_sparse()]}, r"a\[0\]: .*dense"),
        (torch.ones(3), "a state is a dict, a list or a tuple, not Tensor"),
    ],
)
def test_what_cannot_be_kept_is_named_and_nothing_is_written(
    state: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(TypeError, match=words):
        save(state, tmp_path / "f")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"old")]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level is"):
        save({"a": 1}, tmp_path / "f", level="best")
    with pytest.raises(ValueError, match="a path of more than 32768 characters"):
        save({"a": {"b" * 33000: 1}}, tmp_path / "f")
    with pytest.raises(ValueError, match=r"has the key 'packhorse.state'"):
        save({"a": 1}, tmp_path / "f", {STATE_KEY: ""})
    save({"a": [torch.ones(1000)]}, tmp_path / "f")
    with pytest.raises(CorruptionError, match="more than max_nbytes = 9"):
        load(tmp_path / "f", max_nbytes=9)
    torch.save({"a": 1}, tmp_path / "theirs.pt")
    with pytest.raises(CorruptionError, match=r"theirs\.pt.*a checkpoint of PyTorch"):
        load(tmp_path / "theirs.pt")

    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            return 0

    with pytest.raises(OSError, match="accepts no more bytes"):
        save({"a": 1}, Full())


GOOD = {"version": 1, "state": {"dict": [["a", {"tensor": 0}]]}, "tensors": ["a"]}
LIES = [
    ({"version": 2}, CompatibilityError, "version 2, but this release reads up to 1"),
    ({"version": 0}, CorruptionError, "version must be an integer"),
    ({"version": True}, CorruptionError, "version must be an integer"),
    ({"tensors": ["b"]}, CorruptionError, "tensor '[ab]' is not in the (state|file)"),
    ({"tensors": []}, CorruptionError, "tensor 'a' is not in the state"),
    ({"tensors": "a"}, CorruptionError, "must be a list of names"),
    ({"tensors": ["a", "a"]}, CorruptionError, "2 tensors have names, but 1 are"),
    ({"tensors": [1]}, CorruptionError, "must be a list of names"),
    ({"numpy": [1]}, CorruptionError, "'numpy' must be a list of tensors' numbers"),
    ({"numpy": 0}, CorruptionError, "'numpy' must be a list of tensors' numbers"),
    ({"state": {"dict": [["a", {"tensor": 1}]]}}, CorruptionError, "must come next"),
    (
        {"state": {"dict": [["a", {"tensor": 0}], ["b", {"tensor": 1}]]}},
        CorruptionError,
        "tensor 1 has no name",
    ),
    ({"state": {"tensor": 0}}, CorruptionError, "not a container"),
    ({"state": {"dict": [["a", {"code": "x"}]]}}, CorruptionError, "unknown object"),
    ({"state": None}, CorruptionError, "not a container"),
    (
        {"state": {"dict": [["a" * 40000, {"tensor": 0}]]}},
        CorruptionError,
        "a path of more than 32768 characters",
    ),
]


@pytest.mark.parametrize(("lie", "error", "words"), LIES)
def test_a_lying_record_is_refused(
    lie: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    tensors = {"a": torch.ones(3)}
    path = tmp_path / "f"
    save_file(tensors, path, {STATE_KEY: json.dumps(GOOD)})
    assert_same(load(path), tensors)
    save_file(tensors, path, {STATE_KEY: json.dumps(GOOD | lie)})
    with pytest.raises(error, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert STATE_KEY in str(caught.value)
    assert torch.equal(load_file(path)["a"], tensors["a"])


@pytest.mark.parametrize("text", ["", "[]", '{"version": NaN}', '{"a": 1, "a": 2}', "{" * 9])
def test_a_record_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "f", {STATE_KEY: text})
    with pytest.raises(CorruptionError, match=STATE_KEY):
        load(tmp_path / "f")


def test_no_flipped_bit_changes_a_state() -> None:
    state = {"a": [torch.arange(9.0), 1.5, "text"], "b": {0: None}}
    data = bytearray(save(state))
    harmless = 0
    for i in random.Random(0).sample(range(len(data) * 8), 400):
        data[i // 8] ^= 1 << i % 8
        try:
            assert_same(load(bytes(data)), state)
            harmless += 1  # for example a space between the header and the data
        except (packhorse.PackhorseError, ValueError):
            pass
        data[i // 8] ^= 1 << i % 8
    assert harmless < 100


# Plain PyTorch.


def test_a_state_may_be_stored_as_differences_from_an_older_one(tmp_path: Path) -> None:
    run = Run(seed=1)
    sizes = []
    for i in range(2):
        run.train(300 + i)
        save(run.state_dict(), tmp_path / f"{i}", base=tmp_path / "0" if i else None)
        sizes.append((tmp_path / f"{i}").stat().st_size)
    assert sizes[1] < sizes[0]
    assert_same(load(tmp_path / "1", base=tmp_path / "0"), run.state_dict())
    with open(tmp_path / "1", "rb") as file:
        assert_same(load(file, base=tmp_path / "0"), run.state_dict())
    with pytest.raises(packhorse.BaseMismatchError):
        load(tmp_path / "1")


def test_plain_pytorch_resumes_to_the_identical_losses(tmp_path: Path) -> None:
    whole = Run(seed=1)
    whole.train(30)
    first = Run(seed=1)
    first.train(13)
    save(first.state_dict(), tmp_path / "state.pt")
    torch.rand(100)  # the process does other work too
    second = Run(seed=2)
    second.load_state_dict(load(tmp_path / "state.pt"))
    second.train(30)
    assert first.losses + second.losses == whole.losses
