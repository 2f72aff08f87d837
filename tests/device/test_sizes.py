"""Sizes that change: `resize_token_embeddings`, and checkpoints with weights of another shape."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from device_samples import PROMPT, llama, reasons, same_bits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from packhorse.device import PackedWeight, pack_weight
from packhorse.transformers import PackhorseConfig

PACKED = {"dtype": torch.bfloat16, "quantization_config": PackhorseConfig()}
PLAIN = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Plain models, by whether the output layer shares the weight of the embedding."""
    transformers.logging.disable_progress_bar()
    made = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (False, True)}
    for tied, folder in made.items():
        llama(tied=tied).save_pretrained(folder)
    return made


def plain_bits(weight: Tensor) -> Tensor:
    return weight.unpack() if isinstance(weight, PackedWeight) else weight.detach()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("size", "options"), [(520, {}), (520, {"mean_resizing": False}), (300, {}), (500, {})]
)
def test_embeddings_are_resized_as_plain_ones(
    folders: dict[bool, Path], tied: bool, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folders[tied], **o) for o in (PLAIN, PACKED)]
    for model in models:
        torch.manual_seed(0)
        model.resize_token_embeddings(size, **options)
        assert model.config.vocab_size == model.model.embed_tokens.num_embeddings == size
        assert model.lm_head.out_features == size
    plain, packed = models
    assert isinstance(packed.model.embed_tokens.weight, PackedWeight)
    assert (packed.lm_head.weight is packed.model.embed_tokens.weight) == tied
    packed.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (packed, again):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(plain_bits(one), other)
        assert torch.equal(model(PROMPT % size).logits, plain(PROMPT % size).logits)


def test_data_of_another_shape_replaces_the_weight() -> None:
    embedding = nn.Embedding(50, 96, dtype=torch.bfloat16)
    weight = Parameter(pack_weight(embedding.weight, "W11"), requires_grad=False)
    weight.prepare_gather()
    larger = torch.randn(70, 128, dtype=torch.bfloat16)
    weight.data = larger
    assert isinstance(weight, PackedWeight)
    assert isinstance(weight, Parameter)
    assert weight.format.name == "W11"
    assert same_bits(weight.unpack(), larger)
    assert same_bits(weight.gather_rows(torch.tensor([69])), larger[69:])
    weight.data = pack_weight(larger[:3])
    assert same_bits(weight.unpack(), larger[:3])
    with pytest.raises(ValueError, match="cannot become"):
        weight.data = larger[0]


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    config = llama().config
    config.num_labels = 2
    model = transformers.LlamaForSequenceClassification(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_another_number_of_labels(classifier: Path, is_packed: bool) -> None:
    folder, options = classifier, PACKED
    load = AutoModelForSequenceClassification.from_pretrained
    if is_packed:
        folder, options = classifier.with_name("packed"), {}
        load(classifier, **PACKED).save_pretrained(folder)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder, num_labels=5, **options)
    model = load(folder, num_labels=5, ignore_mismatched_sizes=True, **options)
    assert type(model.score.weight) is Parameter
    assert model.score.weight.shape == (5, 128)
    assert model.score.weight.requires_grad
    assert 0.01 < model.score.weight.std().item() < 0.03, "as new weights are"
    assert reasons(model.hf_quantizer.report) == {"score": "has another shape in the checkpoint"}
    assert_same_but(model, load(classifier, **PLAIN), "score.weight")


def assert_same_but(model: PreTrainedModel, plain: PreTrainedModel, changed: str) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert name == changed or same_bits(plain_bits(one), other), name


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_plain_weights_of_another_shape_in_a_packed_folder(
    folders: dict[bool, Path], tmp_path: Path, is_packed: bool
) -> None:
    load = AutoModelForCausalLM.from_pretrained
    name = "model.layers.1.mlp.up_proj.weight"
    load(folders[False], **PACKED).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for key in [key for key in state if key.startswith(name)]:
        del state[key]
    fewer = torch.randn(319, 128, dtype=torch.bfloat16)
    if is_packed:
        layer = nn.Linear(128, 319, bias=False, dtype=torch.bfloat16)
        layer.weight = Parameter(fewer, requires_grad=False)
        from packhorse.device import PackedLinear

        packed = PackedLinear.from_linear(layer).state_dict()
        state |= {f"{name.removesuffix('weight')}{key}": value for key, value in packed.items()}
    else:
        state[name] = fewer
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path)
    model = load(tmp_path, ignore_mismatched_sizes=True)
    assert type(model.get_parameter(name)) is Parameter
    assert_same_but(model, load(folders[False], **PLAIN), name)
