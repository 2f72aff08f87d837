"""Clients of safetensors that read packed files once their `safe_open` and `load_file` are ours."""

from pathlib import Path

import accelerate
import accelerate.utils.modeling
import accelerate.utils.other
import pytest
import safetensors.torch
import torch
from torch import nn

import packhorse
import packhorse.torch


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


@pytest.fixture(params=["plain", "packed"])
def checkpoint(request, tmp_path: Path) -> tuple[nn.Module, Path]:
    model, path = make_model(), tmp_path / "model.safetensors"
    library = safetensors.torch if request.param == "plain" else packhorse.torch
    library.save_file(model.state_dict(), path, metadata={"format": "pt"})
    return model, path


def test_a_loop_over_keys_reads_tensors_and_slices(checkpoint):
    model, path = checkpoint
    state = model.state_dict()
    with packhorse.open_file(path, framework="pt", device="cpu") as file:
        assert file.metadata().get("format") == "pt"
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        part = file.get_slice("0.weight")
        rows, columns = part.get_shape()
        assert part.get_dtype() == "F32"
        assert torch.equal(part[rows // 2 :], state["0.weight"][rows // 2 :])
        assert torch.equal(part[:, : columns // 2], state["0.weight"][:, : columns // 2])
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("second", ["cpu", "disk"])
def test_accelerate_loads_and_offloads(checkpoint, tmp_path, monkeypatch, second):
    model, path = checkpoint
    client = accelerate.utils.modeling
    monkeypatch.setattr(client, "safe_open", packhorse.open_file)
    monkeypatch.setattr(client, "safe_load_file", packhorse.torch.load_file)
    with accelerate.init_empty_weights():
        empty = make_model()
    places = {"0": "cpu", "1": second}
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, str(path), device_map=places, offload_folder=tmp_path / "offload"
    )
    data = torch.randn(3, 8)
    assert torch.equal(loaded(data), model(data))


def test_accelerate_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate.utils.other, "safe_save_file", packhorse.torch.save_file)
    model = make_model()
    model.again = model[1]  # accelerate drops one of two names for a tensor
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    with packhorse.open_file(tmp_path / "model.safetensors", "pt") as file:
        assert file.is_packed
        assert file.metadata() == {"format": "pt"}
    fresh = make_model()
    fresh.again = fresh[1]
    assert packhorse.torch.load_model(fresh, tmp_path / "model.safetensors") == ([], [])
    assert torch.equal(fresh.again.weight, model[1].weight)
