"""The plug-in for SGLang, on stand-ins for its tables, hooks and layers."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from device_samples import inputs, model_matrix, same_bits
from serving_stubs import installed
from torch import Tensor, nn

from packhorse.device import pack_weight
from packhorse.device.packing import split_weight
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.integrations.plugins import register_sglang


@pytest.fixture
def sglang() -> Iterator[Any]:
    with installed("sglang") as stubs:
        yield stubs


class Model(nn.Module):
    def __init__(self, sglang: Any, config: Any, *, tied: bool = False) -> None:
        super().__init__()
        self.up_proj = sglang.LinearBase(256, 512, quant_config=config, prefix="model.up_proj")
        self.embed_tokens = sglang.VocabParallelEmbedding(500, 512, config, "model.embed_tokens")
        self.lm_head = sglang.ParallelLMHead(500, 512, config, "lm_head")
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lm_head.quant_method.apply(self.lm_head, self.up_proj(x))
        return found


def checkpoint() -> dict[str, Tensor]:
    return {
        "up_proj.weight": model_matrix(512, 256),
        "embed_tokens.weight": model_matrix(500, 512),
        "lm_head.weight": -model_matrix(500, 512),
    }


def load(sglang: Any, tensors: dict[str, Tensor], config: Any, *, tied: bool = False) -> Model:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Model(sglang, config, tied=tied)
    finally:
        torch.set_default_dtype(before)
    sglang.DefaultModelLoader.load_weights_only(model, tensors.items(), "cpu")
    sglang.DefaultModelLoader.postprocess_weights(model, "cpu")
    return model


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_model_gives_the_same_numbers(sglang: Any, is_packed: bool) -> None:
    register_sglang()
    config = sglang.QUANTIZATION_METHODS["packhorse"].from_config(
        {"quant_method": "packhorse", "packed_modules_mapping": {}, "hf_config": object()}
    )
    plain = checkpoint()
    arrays = [split_weight(pack_weight(each), name) for name, each in plain.items()]
    stored = {k: v for each in arrays for k, v in each.items()} if is_packed else plain
    model, x = load(sglang, stored, config), inputs(5, 256)
    assert config.totals.n_packed == 2
    assert same_bits(
        model(x),
        nn.functional.linear(
            nn.functional.linear(x, plain["up_proj.weight"]), plain["lm_head.weight"]
        ),
    )
    with pytest.raises(NotImplementedError, match=r"model\.up_proj: is packed"):
        model.up_proj.quant_method.restore_weights_before_loading(model.up_proj)


def test_a_tied_output_layer_stays_plain(sglang: Any) -> None:
    register_sglang()
    config = sglang.QUANTIZATION_METHODS["packhorse"]()
    plain = {k: v for k, v in checkpoint().items() if k != "lm_head.weight"}
    model = load(sglang, plain, config, tied=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert config.totals.n_packed == 1
    hidden = inputs(5, 512)
    found = model.lm_head.quant_method.apply(model.lm_head, hidden)
    assert same_bits(found, nn.functional.linear(hidden, plain["embed_tokens.weight"]))


def test_a_missing_weight_is_an_error(sglang: Any) -> None:
    register_sglang()
    config = sglang.QUANTIZATION_METHODS["packhorse"]()
    tensors = checkpoint()
    del tensors["up_proj.weight"]
    with pytest.raises(CorruptionError, match=r"model\.up_proj\.weight: the checkpoint does not"):
        load(sglang, tensors, config)


def test_a_model_of_another_method_is_left_alone(sglang: Any) -> None:
    register_sglang()
    ((_, hook),) = next(iter(sglang.HookRegistry.hooks.values()))
    assert hook(nn.Linear(3, 4), [], "cpu") is None


def test_the_choice_of_the_command_line_is_added_once(sglang: Any) -> None:
    register_sglang()
    register_sglang()
    assert sglang.QUANTIZATION_CHOICES == ["fp8", "packhorse"]
    assert [len(hooks) for hooks in sglang.HookRegistry.hooks.values()] == [1]
    config = sglang.QUANTIZATION_METHODS["packhorse"]()
    assert config is not None
    assert config.get_supported_act_dtypes() == [torch.bfloat16]
    assert (config.get_name(), config.get_min_capability()) == ("packhorse", 80)
    assert config.get_config_filenames() == config.get_scaled_act_names() == []


def test_another_version_or_platform_is_refused(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    register_sglang()
    monkeypatch.setattr(sglang, "PLATFORM", ["hip"])
    with pytest.raises(CompatibilityError, match="not on this platform"):
        sglang.QUANTIZATION_METHODS["packhorse"]()
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.5.20")
    register_sglang()
    with pytest.raises(CompatibilityError, match=r"supports SGLang 0\.5\.23, not 0\.5\.20"):
        sglang.QUANTIZATION_METHODS["packhorse"]()
