"""Packed weights under the hooks of the real accelerate: kept in host memory, brought for a
product, saved, unpacked. The host stands in for the GPU: hooks do the same for any device."""

import copy
import gc
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module
from accelerate.utils.offload import OffloadedWeightsLoader
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import packhorse.transformers  # noqa: F401  (registers the method)
from packhorse.device import (
    PackedLinear,
    PackedWeight,
    offload_model_,
    pack_model_,
    pack_weight,
    unpack_model_,
)
from packhorse.device.model import hold_packed_weights
from packhorse.errors import CorruptionError
from packhorse.transformers import PackhorseConfig

PROMPT = torch.arange(12)[None]
TIES = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def packed(tied: bool = False) -> LlamaForCausalLM:
    model = llama(tied)
    pack_model_(model)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT).logits
    return found


def devices(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


@TIES
def test_cpu_offload_gives_the_same_and_lets_go(tied: bool) -> None:
    model, expected = packed(tied), logits(llama(tied))
    accelerate.cpu_offload(model, "cpu")
    assert devices(model) == {"meta"}
    for _ in range(2):
        assert torch.equal(logits(model), expected)
        assert devices(model) == {"meta"}
    assert torch.equal(logits(copy.deepcopy(model)), expected)

    with pytest.raises(ValueError, match="is offloaded by accelerate; call"):
        unpack_model_(model)
    remove_hook_from_module(model, recurse=True)
    assert devices(model) == {"cpu"}
    assert torch.equal(logits(model), expected)
    unpack_model_(model)
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(logits(model), expected)
    pack_model_(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(logits(model), expected)


@TIES
def test_weights_may_be_given_whole(tied: bool) -> None:
    model = packed(tied)
    whole = dict(model.named_parameters(remove_duplicate=False))
    accelerate.cpu_offload(model, "cpu", state_dict=whole)
    assert torch.equal(logits(model), logits(llama(tied)))


def test_weights_are_found_before_the_model_has_run() -> None:
    model = llama(False)
    pack_model_(model, skip=["lm_head", "model.layers"])
    expected = model.state_dict()
    accelerate.cpu_offload(model)
    state = model.state_dict()
    assert all(
        torch.equal(state[name], array) for name, array in expected.items() if "embed" in name
    )
    for change in (unpack_model_, lambda model: offload_model_(model, "cpu")):
        with pytest.raises(ValueError, match=r"of model\.embed_tokens is offloaded by accelerate"):
            change(model)
    assert torch.equal(logits(model), logits(llama(False)))


def test_a_device_map_with_host_and_disk(tmp_path: Path) -> None:
    model, expected = packed(), logits(packed())
    on_host = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    homes = dict.fromkeys(on_host, "cpu") | {"model.layers.1": "disk", "lm_head": "disk"}
    accelerate.dispatch_model(
        model, homes, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert model.lm_head.weight.is_meta
    for _ in range(2):
        assert torch.equal(logits(model), expected)


def test_hooks_take_weights_that_were_moved_to_host_memory() -> None:
    model = packed()
    offload_model_(model, "cpu")
    accelerate.cpu_offload(model, "cpu")
    assert devices(model) == {"meta"}
    assert torch.equal(logits(model), logits(llama(False)))


def test_weights_on_the_disk_are_in_memory_while_their_module_runs(tmp_path: Path) -> None:
    model, expected = packed(), logits(llama(False))
    accelerate.disk_offload(model, tmp_path, "cpu")
    assert devices(model) == {"meta"}
    gc.collect()
    before = set(map(id, gc.get_objects()))
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    new = [each for each in gc.get_objects() if id(each) not in before]
    assert all(each.is_meta for each in new if type(each) is PackedWeight)
    with pytest.raises(ValueError, match=r"of model\.embed_tokens is offloaded by accelerate"):
        unpack_model_(model)
    (tmp_path / "lm_head.weight.first_exponents.dat").write_bytes(b"\xff" * 500)
    with pytest.raises(CorruptionError, match="row 0 has first exponent 255"):
        logits(model)


def test_shared_weights_are_told_from_others() -> None:
    """`dispatch_model` recognises shared weights by their addresses."""
    model = packed(tied=True)
    whole = dict(model.named_parameters(remove_duplicate=False))
    shared: dict[int, dict[object, Tensor]] = {model.lm_head.weight.data_ptr(): {}}
    attach_align_device_hook(
        model, "cpu", offload=True, weights_map=OffloadedWeightsLoader(whole),
        tied_params_map=shared,
    )  # fmt: skip
    assert torch.equal(logits(model), logits(llama(True)))


def test_addresses_name_what_is_shared() -> None:
    weights = [Parameter(pack_weight(torch.randn(4, 96).bfloat16()), False) for _ in range(2)]
    assert weights[0].data_ptr() != weights[1].data_ptr()
    assert weights[0].data_ptr() == weights[0].detach().data_ptr() == weights[0].data.data_ptr()
    assert weights[0].data_ptr() != weights[0].clone().data_ptr()
    assert weights[0].data_ptr() >> 48, "no memory may be there"
    assert weights[0].to("meta").data_ptr() == 0


def test_a_parameter_of_the_same_class() -> None:
    weight = pack_weight(torch.randn(4, 96).bfloat16())
    parameter = PackedWeight(weight, requires_grad=False)
    assert isinstance(parameter, Parameter)
    assert isinstance(parameter, PackedWeight)
    assert parameter.arrays is weight.arrays
    for wrong in (torch.randn(4, 96), weight.arrays):
        with pytest.raises(TypeError, match="PackedWeight takes arrays, their format"):
            PackedWeight(wrong)  # type: ignore[arg-type]


def offloaded_as_by_transformers(tied: bool) -> LlamaForCausalLM:
    """`from_pretrained` with a device map puts packed weights in place, then hooks."""
    model = llama(tied)
    for module in model.modules():
        if isinstance(module, nn.Linear) or (tied and isinstance(module, nn.Embedding)):
            module.weight = Parameter(pack_weight(module.weight), requires_grad=False)
    model.tie_weights()
    accelerate.cpu_offload(model, "cpu")
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    hold_packed_weights(model)
    return model


@TIES
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded:UserWarning")
def test_offloaded_models_of_transformers_run_and_are_saved(tied: bool, tmp_path: Path) -> None:
    model = offloaded_as_by_transformers(tied)
    assert devices(model) == {"meta"}
    assert torch.equal(logits(model), logits(llama(tied)))
    state = model.state_dict()
    assert not state["model.layers.0.mlp.up_proj.weight.low_bytes"].is_meta

    model.config.quantization_config = PackhorseConfig()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.lm_head, PackedLinear)
    expected = llama(tied).state_dict()
    again = again.dequantize().state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_damaged_arrays_are_found_when_hooks_come() -> None:
    model = packed()
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight.first_exponents"
    state[name] = torch.full_like(state[name], 255)
    with pytest.raises(CorruptionError, match="first exponent"):
        accelerate.cpu_offload(model, "cpu", state_dict=state)
