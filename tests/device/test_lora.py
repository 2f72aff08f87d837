"""Adapters of PEFT on packed weights: they train, merge and are removed as on plain weights, and
their own weights are plain. So are the copies of whole modules that PEFT trains."""

import copy
from pathlib import Path

import pytest
import torch
from device_samples import PROMPT, assert_same_logits, llama, reasons, same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from packhorse.device import PackedLinear, PackedWeight, pack_model_

# PEFT looks for a name of an earlier release in transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]


def with_lora(base: PreTrainedModel, **options: object) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options
    )
    return get_peft_model(base, config, autocast_adapter_dtype=False)


@pytest.fixture
def lora_pair() -> tuple[PeftModel, PeftModel]:
    """The same adapters on a plain and on a packed model."""
    plain = llama()
    packed = copy.deepcopy(plain)
    pack_model_(packed)
    return with_lora(plain), with_lora(packed)


def test_lora_trains_on_packed_weights(lora_pair: tuple[PeftModel, PeftModel]) -> None:
    plain, packed = lora_pair
    for step in range(2):
        losses = []
        for each in (plain, packed):
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1)
            each.zero_grad()
            loss = each(PROMPT, labels=PROMPT).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    trained = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in lora_pair]
    assert trained[0].keys() == trained[1].keys()
    assert all("lora" in name for name in trained[0])
    assert all(same_bits(one, trained[1][name]) for name, one in trained[0].items())


@pytest.mark.parametrize("safe", [False, True])
def test_lora_is_merged_into_packed_weights(
    safe: bool, lora_pair: tuple[PeftModel, PeftModel]
) -> None:
    plain, packed = (each.merge_and_unload(safe_merge=safe) for each in lora_pair)
    layers = [each.model.layers[0].self_attn.q_proj for each in (plain, packed)]
    assert type(layers[1]) is PackedLinear
    assert same_bits(layers[1].weight.unpack(), layers[0].weight)
    assert_same_logits(packed, plain)


def test_lora_is_merged_and_taken_out_again(lora_pair: tuple[PeftModel, PeftModel]) -> None:
    for each in lora_pair:
        each.merge_adapter()
        each.unmerge_adapter()
    assert_same_logits(*lora_pair)


def test_dora_works_on_packed_weights() -> None:
    plain = llama()
    packed = copy.deepcopy(plain)
    pack_model_(packed)
    assert_same_logits(with_lora(plain, use_dora=True), with_lora(packed, use_dora=True))


def test_packing_below_lora_leaves_the_adapters_plain() -> None:
    plain = with_lora(llama())
    packed = copy.deepcopy(plain)
    report = pack_model_(packed)
    left = {name: why for name, why in reasons(report).items() if "lora" in name}
    assert len(left) == 2 * 2 * 2
    assert set(left.values()) == {"is trained, and others are frozen"}
    assert any(weight.name.endswith("q_proj.base_layer") for weight in report.packed)
    assert_same_logits(packed, plain)


def train_step(model: PeftModel) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(PROMPT, labels=PROMPT).loss.backward()
    assert all(parameter.grad is not None for parameter in trained)
    torch.optim.SGD(trained, 0.1).step()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_whole_modules_train_as_plain_copies(saved: str, tied: bool, tmp_path: Path) -> None:
    plain = llama(tied=tied)
    bases = [plain, copy.deepcopy(plain)]
    pack_model_(bases[1])
    untouched = [copy.deepcopy(base) for base in bases]
    models = [with_lora(base, modules_to_save=[saved]) for base in bases]
    for model in models:
        train_step(model)
    trained = [dict(model.named_parameters()) for model in models]
    (name,) = (name for name in trained[0] if f"{saved}.modules_to_save" in name)
    original = trained[1].get(name.replace("modules_to_save.default", "original_module"))
    assert type(trained[1][name]) is torch.nn.Parameter
    assert same_bits(trained[0][name], trained[1][name])
    if original is not None:  # PEFT gives a tied module under one of its names
        assert isinstance(original, PackedWeight)
        assert not same_bits(original.unpack(), trained[1][name])

    loaded = []
    for model, base, folder in zip(models, untouched, ("plain", "packed"), strict=True):
        model.save_pretrained(tmp_path / folder)
        again = PeftModel.from_pretrained(base, tmp_path / folder, autocast_adapter_dtype=False)
        loaded.append(again)
        assert_same_logits(loaded[-1], model)
    files = [
        (tmp_path / f"{n}/adapter_model.safetensors").read_bytes() for n in ("plain", "packed")
    ]
    assert files[0] == files[1]
    assert_same_logits(*loaded)
    merged = [model.merge_and_unload() for model in models]
    assert_same_logits(*merged)
