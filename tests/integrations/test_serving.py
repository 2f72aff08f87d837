"""What servers of models share: options, folders that are packed, layers, and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_samples import inputs, llama, model_matrix, same_bits
from safetensors.torch import load_file
from torch import Tensor, nn

from packhorse.device import pack_model_, pack_weight
from packhorse.device.packing import split_weight
from packhorse.disk import pack_folder
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.integrations import plugins
from packhorse.integrations.packed_folders import plain_tensors
from packhorse.integrations.serving import (
    PackingTotals,
    ServingOptions,
    embed,
    is_packed_layer,
    multiply,
    pack_layer,
    require_version,
    unpack_layer,
    warm_up,
)
from packhorse.transformers import PackhorseConfig

WIDTHS = {128, 320}


# Options.


def test_options_are_those_of_the_config_of_transformers() -> None:
    stored = PackhorseConfig("W11", ["down_proj"], lm_head=False, embeddings=True).to_dict()
    found = ServingOptions.from_config(stored)
    assert found == ServingOptions("W11", ("down_proj",), False, True, None)
    assert ServingOptions.from_config({}) == ServingOptions()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "fp8"},
            "quant_method is 'fp8', .* without --quantization packhorse",
        ),
        ({"shape": "W12"}, "has no option 'shape'; it may have format, modules_to_not_convert"),
        ({"fmt": "W10"}, "format is 'W10'; it must be auto, W12 or W11"),
        ({"lm_head": 1}, "lm_head is 1; it must be true or false"),
        ({"embeddings": "yes"}, "embeddings is 'yes'"),
        ({"for_tokens": 0}, "for_tokens is 0"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"modules_to_not_convert": [3]}, "has 3, which is not a name"),
        ({"modules_to_not_convert": 3}, "must be a list of names"),
    ],
)
def test_wrong_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingOptions.from_config(config)


def test_a_later_version_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"version 99 .* upgrade packhorse"):
        ServingOptions.from_config({"quant_method": "packhorse", "version": 99})


@pytest.mark.parametrize(
    ("pattern", "is_skipped"),
    [
        ("q_proj", True),
        ("self_attn", True),
        ("model.layers.3", True),
        ("layers.3.self_attn.v_proj", True),
        ("model.*.k_proj", True),
        ("qkv_proj", False),
        ("roj", False),
        ("o_proj", False),
        ("layers.30", False),
    ],
)
def test_names_of_parts_leave_a_joined_layer_plain(pattern: str, is_skipped: bool) -> None:
    options = ServingOptions(modules_to_not_convert=(pattern,))
    name, parts = "model.layers.3.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")
    assert options.skips(name, parts) is is_skipped
    assert ServingOptions().skips(name, parts) is False
    assert ServingOptions(modules_to_not_convert=("lm_head",)).skips("lm_head")


# Versions of servers.


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0rc1", "0.33.7"])
def test_versions_that_were_tried_are_taken(found: str) -> None:
    require_version("vLLM", found, (0, 32), (0, 33))


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "1.0", "", "dev"])
def test_other_versions_are_refused(found: str) -> None:
    with pytest.raises(
        CompatibilityError, match=r"supports vLLM 0\.32 to 0\.33, not .*plain model"
    ):
        require_version("vLLM", found, (0, 32), (0, 33))


def test_the_entry_points_name_functions_that_exist(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    for group, name in (
        ("vllm.general_plugins", "register_vllm"),
        ("sglang.srt.plugins", "register_sglang"),
    ):
        assert f'[project.entry-points."{group}"]\n' in text
        assert f'packhorse = "packhorse.integrations.plugins:{name}"' in text
        assert callable(getattr(plugins, name))


# Tensors of packed folders.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain folder, one with arrays in several files, and one of `packhorse pack`."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("plain", "arrays")}
    made["frames"] = tmp_path_factory.mktemp("frames") / "model"
    model = llama()
    model.save_pretrained(made["plain"])
    pack_folder(made["plain"], made["frames"])
    pack_model_(model)
    model.save_pretrained(made["arrays"], max_shard_size="50KB")
    return made


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


@pytest.mark.parametrize("kind", ["plain", "arrays", "frames"])
def test_every_folder_gives_the_tensors_of_the_plain_one(
    folders: dict[str, Path], kind: str
) -> None:
    wanted = dict(tensors_of(folders["plain"]))
    pairs = [*plain_tensors(tensors_of(folders[kind]), WIDTHS)]
    assert sorted(name for name, _ in pairs) == sorted(wanted)
    assert all(same_bits(tensor, wanted[name]) for name, tensor in pairs)
    if kind != "plain":
        assert any(t.dtype == torch.uint8 for _, t in tensors_of(folders[kind]))


def arrays(n_rows: int = 64, n_columns: int = 128, format: str = "W12") -> dict[str, Tensor]:
    weight = pack_weight(model_matrix(n_rows, n_columns), format)
    return split_weight(weight, "a.weight")


@pytest.mark.parametrize("n_columns", [128, 300, 333])
@pytest.mark.parametrize("format", ["W12", "W11"])
def test_padding_is_cut_off(n_columns: int, format: str) -> None:
    found = dict(plain_tensors(arrays(64, n_columns, format).items(), {n_columns, 1024}))
    assert same_bits(found["a.weight"], model_matrix(64, n_columns))


def test_arrays_of_older_files_are_read() -> None:
    held = arrays()
    held["a.weight.high_bits"] = held.pop("a.weight")[..., 0]
    found = dict(plain_tensors(held.items(), {128}))
    assert same_bits(found["a.weight"], model_matrix(64, 128))


@pytest.mark.parametrize("widths", [set(), {4096}, {290, 300}])
def test_a_width_that_is_not_clear_is_refused(widths: set[int]) -> None:
    with pytest.raises(ValueError, match=r"a\.weight: its packed rows have 320 columns"):
        dict(plain_tensors(arrays(64, 300, "W12").items(), widths))


@pytest.mark.parametrize("field", ["", ".low_bytes", ".exceptions"])
def test_a_missing_array_is_an_error(field: str) -> None:
    held = arrays()
    del held[f"a.weight{field}"]
    with pytest.raises(CorruptionError, match=rf"a\.weight: packed weight: a\.weight{field} is m"):
        dict(plain_tensors(held.items(), {128}))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_weight_that_is_packed_and_plain_is_an_error(is_first: bool) -> None:
    plain, packed = [("a.weight", model_matrix(64, 128))], [*arrays().items()]
    pairs = plain + packed if is_first else packed + plain
    with pytest.raises(CorruptionError, match=r"a\.weight: is both packed and plain"):
        dict(plain_tensors(pairs, {128}))


def test_damage_names_the_weight(folders: dict[str, Path]) -> None:
    held = arrays()
    held["a.weight.exception_starts"][-1] += 1
    with pytest.raises(CorruptionError, match=r"a\.weight"):
        dict(plain_tensors(held.items(), {128}))
    frames = [(name, tensor.clone()) for name, tensor in tensors_of(folders["frames"])]
    name, frame = max(frames, key=lambda pair: pair[1].numel())
    frame[frame.numel() // 2] ^= 1
    with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
        dict(plain_tensors(frames, WIDTHS))


# Layers.


def layer_of(plain: Tensor) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(plain, requires_grad=False)
    return layer


@pytest.mark.parametrize("format", ["auto", "W12", "W11"])
def test_a_packed_layer_multiplies_and_looks_up_as_the_plain_one(format: str) -> None:
    plain, bias, x = model_matrix(200, 500), inputs(200), inputs(5, 500)
    layer, totals = layer_of(plain.clone()), PackingTotals(n_expected=1)
    assert not totals.is_complete
    assert pack_layer(layer, ServingOptions(format=format), totals, "a")
    assert is_packed_layer(layer)
    assert totals.is_complete
    assert list(dict(layer.named_parameters())) == ["weight"]
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.nbytes == totals.packed_nbytes < totals.plain_nbytes == plain.nbytes
    assert same_bits(multiply(layer, x, bias), F.linear(x, plain, bias))
    assert same_bits(embed(layer, torch.tensor([7, 7, 0])), plain[[7, 7, 0]])
    assert same_bits(unpack_layer(layer), plain)
    assert "1 layers packed" in str(totals)
    warm_up(layer, [1, 8], set())  # nothing to do on the host


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (torch.randint(0, 1 << 16, (99, 300)).to(torch.uint16).view(torch.bfloat16), "no gain"),
        (torch.ones(200, 300), "is torch.float32"),
        (torch.ones(2, 200, 300, dtype=torch.bfloat16), "has shape"),
    ],
)
def test_a_layer_without_gain_stays_plain(plain: Tensor, reason: str) -> None:
    layer, totals = layer_of(plain), PackingTotals()
    for _ in range(2):
        assert not pack_layer(layer, ServingOptions(), totals, "a")
        assert layer.weight.data_ptr() == plain.data_ptr()
    assert not is_packed_layer(layer)
    assert reason in totals.left["a"]


def test_new_weights_fit_where_the_old_ones_were_or_are_refused() -> None:
    """Code that was compiled or captured knows the size of the buffer."""
    old, new = model_matrix(256, 300), model_matrix(256, 300) * -1.5
    layer, totals = layer_of(old), PackingTotals()
    pack_layer(layer, ServingOptions(format="W12"), totals, "a")
    size = layer.weight.shape
    layer.weight = nn.Parameter(new, requires_grad=False)
    assert pack_layer(layer, ServingOptions(format="W12"), totals, "a")
    assert layer.weight.shape == size
    assert same_bits(unpack_layer(layer), new)
    assert totals.n_packed == 1
    wild = torch.randint(0, 1 << 16, (256, 300)).to(torch.uint16).view(torch.bfloat16)
    layer.weight = nn.Parameter(wild, requires_grad=False)
    with pytest.raises(ValueError, match=r"a: the new weights do not fit .* restart the server"):
        pack_layer(layer, ServingOptions(format="W12"), totals, "a")


def test_warming_up_runs_each_size_of_each_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from packhorse.integrations import serving

    ran: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        serving, "multiply", lambda layer, x, bias=None: ran.append((len(x), bias is not None))
    )
    done: set[Any] = set()
    for has_bias in (False, False, True):
        layer = layer_of(model_matrix(200, 300))
        pack_layer(layer, ServingOptions(), PackingTotals(), "a")
        layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
        if has_bias:
            layer.bias = inputs(200)
        warm_up(layer, [1, 2, 64], done)
    assert ran[:3] == [(1, False), (2, False), (64, False)]
    assert sorted(ran[3:]) == [(n, bias) for n in (1, 2, 64) for bias in (False, True)]
