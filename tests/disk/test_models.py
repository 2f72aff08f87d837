"""Modules in packed files, and tensors that share memory, compared with safetensors' own."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from disk_samples import leftovers
from safetensors import safe_open
from torch import nn

import packhorse
from packhorse.torch import load_file, load_model, save_file, save_model


def linear(rows: int = 5, columns: int = 3, **options) -> nn.Linear:
    return nn.Linear(columns, rows, **options)


def tied() -> nn.Module:
    """A language model's shape: the last layer has the weight of the first."""
    model = nn.ModuleDict({"z_embed": nn.Embedding(7, 4), "head": linear(7, 4), "norm": linear()})
    model["head"].weight = model["z_embed"].weight
    return model


def same_module_twice() -> nn.Module:
    layer = linear()
    return nn.ModuleDict({"b": layer, "a": layer, "c": linear()})


def views() -> nn.Module:
    """Views of a parameter, and two parts of another one's memory that do not overlap."""
    model = nn.Module()
    model.whole = nn.Parameter(torch.arange(12.0).reshape(3, 4))
    model.a_row = nn.Parameter(model.whole.detach()[1])
    model.flat = nn.Parameter(model.whole.detach().view(-1))
    return model


def buffers() -> nn.Module:
    model = nn.BatchNorm1d(4)
    model.register_buffer("again", model.running_mean)
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("bits", torch.tensor([True, False]))
    return model


def turned() -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(torch.arange(15.0).reshape(3, 5).T)
    return model


MODELS = [tied, same_module_twice, views, buffers, turned, linear]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "b.bias": "mine"}])
def test_modules_are_stored_as_safetensors_stores_them(tmp_path: Path, make, metadata):
    model, ours, theirs = make(), tmp_path / "a.ph.safetensors", tmp_path / "b.safetensors"
    given = copy.copy(metadata)
    save_model(model, ours, given)
    assert given == metadata  # safetensors adds to the caller's dict
    safetensors.torch.save_model(model, str(theirs), copy.copy(metadata))
    with packhorse.open_file(ours, "pt") as file, safe_open(theirs, "pt") as expected:
        assert file.keys() == expected.keys()
        assert file.metadata() == expected.metadata()
        for name in file:
            assert torch.equal(file.get_tensor(name), expected.get_tensor(name))
    for path in (ours, theirs):
        fresh = make()
        with torch.no_grad():
            for tensor in fresh.state_dict().values():
                tensor.zero_()
        assert load_model(fresh, path) == ([], [])
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())


def test_names_that_differ_are_told_as_pytorch_tells_them(tmp_path):
    path = tmp_path / "m.ph.safetensors"
    save_model(same_module_twice(), path)
    apart = nn.ModuleDict({"a": linear(), "b": linear(), "d": linear()})
    for load in (load_model, safetensors.torch.load_model):
        if load is safetensors.torch.load_model:
            packhorse.disk.unpack_file(path, path := tmp_path / "plain.safetensors")
        with pytest.raises(RuntimeError) as told:
            load(apart, path)
        assert 'Missing key(s) in state_dict: "b.bias", "b.weight", "d.bias"' in str(told.value)
        assert 'Unexpected key(s) in state_dict: "c.bias", "c.weight"' in str(told.value)
        missing, unexpected = load(apart, path, strict=False)
        assert sorted(missing) == ["b.bias", "b.weight", "d.bias", "d.weight"]
        assert sorted(unexpected) == ["c.bias", "c.weight"]
    # Two tensors for one memory: which of them the module would have is luck.
    save_model(nn.ModuleDict({name: linear() for name in "abc"}), path)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "b.bias", "b.wei'):
        load_model(same_module_twice(), path)


def test_a_file_with_the_other_name_is_loaded_too(tmp_path):
    model, path = tied(), tmp_path / "m.ph.safetensors"
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, path)
    fresh = tied()
    assert load_model(fresh, path, device="cpu", backend="pread", max_nbytes=1000) == ([], [])
    assert torch.equal(fresh["head"].weight, model["head"].weight)
    with pytest.raises(packhorse.CorruptionError, match="max_nbytes"):
        load_model(fresh, path, max_nbytes=10)
    with pytest.raises(ValueError, match="device 'foo'"):
        load_model(fresh, path, device="foo")


def test_what_is_not_contiguous_is_refused_on_request(tmp_path):
    with pytest.raises(ValueError, match=r"'weight' is not.*use save_model\(..., force_contig"):
        save_model(turned(), tmp_path / "m", force_contiguous=False)
    assert not leftovers(tmp_path)
    save_model(tied(), tmp_path / "m", force_contiguous=False)


def test_parts_without_a_whole_are_refused_by_name(tmp_path):
    model, memory = nn.Module(), torch.arange(12.0)
    model.low, model.high = nn.Parameter(memory[:8]), nn.Parameter(memory[4:])
    with pytest.raises(RuntimeError, match=r"none of them covers it all: \['high', 'low'\]"):
        save_model(model, tmp_path / "m")
    assert not leftovers(tmp_path)
    save_file({"low": memory[:4].clone(), "high": memory[4:8].clone()}, tmp_path / "m")
    model.low, model.high = nn.Parameter(memory[:4]), nn.Parameter(memory[4:8])
    assert load_model(model, tmp_path / "m") == ([], [])
    save_model(model, tmp_path / "m")  # they do not overlap
    assert load_file(tmp_path / "m")["high"].tolist() == [4, 5, 6, 7]


def test_a_state_that_is_not_of_tensors_is_refused_by_name(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"step": 7}

    with pytest.raises(TypeError, match=r"^tensor '_extra_state': .* not dict"):
        save_model(Extra(3, 2), tmp_path / "m")


SHARED = {
    "the same": lambda x: [x, x],
    "a view": lambda x: [x, x[:1]],
    "the end": lambda x: [x, x[2:]],
    "turned": lambda x: [x, x.T],
    "overlapping": lambda x: [x[:2], x[1:]],
    "interleaved": lambda x: [x[::2], x[1::2]],
}
APART = {
    "two ends": lambda x: [x[:2], x[2:]],
    "copies": lambda x: [x, x.clone()],
    "nothing": lambda x: [x, x[:0]],
    "a part": lambda x: [x[1:2]],
    "a column": lambda x: [x[:, 1]],
}


@pytest.mark.parametrize("kind", [*SHARED, *APART])
def test_shared_memory_is_refused_where_safetensors_refuses_it(tmp_path, kind):
    parts = {**SHARED, **APART}[kind](torch.arange(12.0).reshape(3, 4))
    tensors = {**dict(zip("ba", parts, strict=False)), "other": torch.zeros(3)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    path = tmp_path / "m.ph.safetensors"
    if kind in SHARED:
        with pytest.raises(RuntimeError, match=r"\['a', 'b'\].*save_model") as told:
            save_file(tensors, path)
        assert "other" not in str(told.value)
        assert not leftovers(tmp_path)
        with pytest.raises(RuntimeError):
            safetensors.torch.save_file(tensors, tmp_path / "theirs")
    else:
        save_file(tensors, path)
        if all(tensor.is_contiguous() for tensor in parts):
            safetensors.torch.save_file(tensors, tmp_path / "theirs")
        assert all(torch.equal(load_file(path)[name], before[name]) for name in tensors)


@pytest.mark.parametrize("n", range(3, 9))
def test_groups_are_found_in_any_order(tmp_path, n):
    """Many parts of one memory: those that reach over others join these."""
    memory = torch.arange(100.0)
    parts = {str(i): memory[10 * i : 10 * i + 10] for i in range(n)}
    save_file(parts, tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"\[\['0', '1', '2', 'long'\]\]"):
        save_file({**parts, "long": memory[5:25]}, tmp_path / "m")
