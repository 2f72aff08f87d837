"""`pack_model_(embeddings="host")`: embeddings of real models of transformers in memory of the
host; tokens, saved folders and unpacked models are those of the plain model."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from packhorse.device import PackedWeight, pack_model_, unpack_model_
from packhorse.host import PackedEmbedding, pack_embedding_
from packhorse.transformers import PackhorseConfig

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# With the embeddings that move. Gemma scales what it looks up; Gemma 3n has an embedding per layer.
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Llama": ({}, ["model.embed_tokens"]),
    "Gemma3": ({"tie_word_embeddings": False}, ["model.embed_tokens"]),
    "Gemma3n": (
        {
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 400,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        ["model.embed_tokens", "model.embed_tokens_per_layer"],
    ),
}
PROMPT = torch.tensor([[1, 5, 9, 2, 77, 30], [4, 4, 8, 16, 32, 64]])


def make_model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}TextConfig", None) or transformers.LlamaConfig
    config = kind(**(SIZES | MODELS[name][0] | options))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():  # rows of few values would be packed in other ways
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.05)
    return model


def generate(model: Any) -> Tensor:
    mask = torch.ones_like(PROMPT)
    tokens: Tensor = model.generate(
        input_ids=PROMPT, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    return tokens


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT).logits
    return found


def looked_up(model: Any) -> Tensor:
    found: Tensor = model.get_input_embeddings()(PROMPT)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_saved_folders_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    made = make_model(name)
    made.save_pretrained(tmp_path / "plain")  # a model that was cast has other constants
    plain = type(made).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    model = copy.deepcopy(plain)
    planned = pack_model_(model, embeddings="host", dry_run=True)
    report = pack_model_(model, embeddings="host")
    assert [each.name for each in planned.packed] == [each.name for each in report.packed]
    assert planned.host_nbytes == pytest.approx(report.host_nbytes, rel=0.01)
    hosted = {each.name: each for each in report.packed if each.is_in_host}
    assert list(hosted) == MODELS[name][1]
    assert report.host_nbytes == sum(each.nbytes for each in hosted.values())
    assert 0 < report.host_nbytes < 0.77 * sum(each.plain_nbytes for each in hosted.values())
    assert "MiB in memory of the host" in str(report)
    for each in hosted:
        module = model.get_submodule(each)
        assert isinstance(module, (PackedEmbedding, type(plain.get_submodule(each))))
    assert torch.equal(generate(model), generate(plain))
    # Products with packed weights round in another way, so whole logits are compared alone.
    only = copy.deepcopy(plain)
    pack_model_(only, embeddings="host", skip=only_host)
    assert torch.equal(logits(only), logits(plain))

    model.save_pretrained(tmp_path / "packed")
    again = type(model).from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    assert [each.name for each in again.hf_quantizer.report.packed if each.is_in_host] == [*hosted]
    assert torch.equal(generate(again), generate(plain))

    unpack_model_(model)
    state = plain.state_dict()
    assert {name: type(each) for name, each in model.named_modules()} == {
        name: type(each) for name, each in plain.named_modules()
    }
    assert all(torch.equal(each, state[key]) for key, each in model.state_dict().items())


def test_a_config_loads_embeddings_into_the_host(tmp_path: Path) -> None:
    plain = make_model("Llama")
    plain.save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=PackhorseConfig(embeddings="host")
    )
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert model.hf_quantizer.report.host_nbytes > 0
    assert torch.equal(generate(model), generate(plain))
    assert not looked_up(model).requires_grad
    model.dequantize()
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert all(each.requires_grad for each in model.parameters())
    with pytest.raises(ValueError, match='must be True, False, None or "host"'):
        PackhorseConfig(embeddings="disk")


def test_an_embedding_that_is_the_output_layer_stays_with_it() -> None:
    plain = make_model("Llama", tie_word_embeddings=True)
    model = copy.deepcopy(plain)
    report = pack_model_(model, embeddings="host")
    assert report.host_nbytes == 0
    assert isinstance(model.get_input_embeddings().weight, PackedWeight)
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert torch.equal(generate(model), generate(plain))
    (left,) = pack_model_(copy.deepcopy(plain), embeddings="host", lm_head=False).left
    assert left.reason == "lm_head=False; the embedding shares its weight"


def test_embeddings_of_any_dtype_that_share_rows_share_a_table() -> None:
    first, second = nn.Embedding(600, 64), nn.Embedding(600, 64)
    second.weight = first.weight
    bag = nn.EmbeddingBag(600, 64, dtype=torch.float16)
    others = {"small": nn.Embedding(10, 64), "odd": nn.Embedding(600, 64, scale_grad_by_freq=True)}
    model = nn.ModuleDict({"a": first, "b": second, "bag": bag, **others})
    plain = copy.deepcopy(model)
    report = pack_model_(model, embeddings="host")
    found = [(each.name, each.element_nbytes) for each in report.packed]
    assert found == [("a = b", 4), ("bag", 2)]
    assert [each.reason for each in report.left] == [
        "takes 2560 bytes; less than 64 KiB stays where it is",
        "scale_grad_by_freq is not for rows in memory of the host",
    ]
    assert torch.equal(model["bag"](PROMPT), plain["bag"](PROMPT))
    assert model["a"].table is model["b"].table
    assert torch.equal(model["b"](PROMPT), plain["b"](PROMPT))
    unpack_model_(model)
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["a"].weight, plain["a"].weight)


def test_a_bag_that_shares_a_linear_layer_stays_plain() -> None:
    bag = nn.EmbeddingBag(600, 64, dtype=torch.bfloat16)
    model = nn.ModuleDict({"bag": bag, "top": nn.Linear(64, 600, dtype=torch.bfloat16)})
    model["top"].weight = bag.weight
    (left,) = pack_model_(model, embeddings="host").left
    assert (left.name, left.reason) == (
        "bag = top",
        "an EmbeddingBag would decode all of it at each call",
    )


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def hosted_in(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, PackedEmbedding)]


def only_host(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_a_model_inside_another_module_is_saved_as_one_alone(tmp_path: Path) -> None:
    plain = make_model("Llama")
    model = nn.ModuleDict({"text": copy.deepcopy(plain), "own": nn.Embedding(600, 64)})
    pack_model_(model, embeddings="host")
    assert any(key.startswith("own.weight.") for key in model.state_dict())
    model["text"].save_pretrained(tmp_path)  # type: ignore[operator]
    again = load(tmp_path)
    assert hosted_in(again) == ["model.embed_tokens"]
    assert torch.equal(generate(again), generate(plain))


def test_embeddings_that_were_skipped_are_plain_when_loaded(tmp_path: Path) -> None:
    model = make_model("Gemma3n")
    pack_model_(model, embeddings="host", skip="model.embed_tokens")
    expected = hosted_in(model)
    assert expected == ["model.embed_tokens_per_layer"]
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert hosted_in(again) == expected
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert hosted_in(base) == ["embed_tokens_per_layer"]
    # Now a config names a method already.
    again.hf_quantizer = None
    report = pack_model_(again, embeddings="host")
    assert hosted_in(again) == ["model.embed_tokens", *expected]
    assert "is packed already, in memory of the host" in {each.reason for each in report.left}
    assert report.nbytes == report.plain_nbytes - sum(
        each.plain_nbytes - each.nbytes for each in report.packed
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models_of_other_dtypes_load_as_they_were_packed(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    make_model("Llama").to(dtype).save_pretrained(tmp_path)
    model = load(tmp_path)
    expected = logits(model)
    pack_model_(model, embeddings="host")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.dtype == dtype
    assert hosted_in(again) == ["model.embed_tokens"]
    assert torch.equal(logits(again), expected)
    unpack_model_(again)
    assert getattr(again.config, "quantization_config", None) is None


def test_packed_weights_are_not_loaded_as_another_dtype(tmp_path: Path) -> None:
    model = make_model("Llama")
    pack_model_(model, embeddings="host")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"packed weights are BF16.*float32"):
        load(tmp_path, dtype=torch.float32)


def test_a_method_that_a_config_names_is_kept_up_to_date(tmp_path: Path) -> None:
    plain = make_model("Llama")
    plain.save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=PackhorseConfig(embeddings=False))
    assert not hosted_in(model)
    pack_model_(model, embeddings="host")
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert hosted_in(again) == ["model.embed_tokens"]
    assert torch.equal(generate(again), generate(plain))


def test_arrays_are_not_saved_where_they_would_not_load(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path)
    model = load(tmp_path)
    expected = logits(model)
    pack_embedding_(model.get_input_embeddings())
    with pytest.raises(RuntimeError, match=r"set plain_state = True"):
        model.save_pretrained(tmp_path)
    model.get_input_embeddings().plain_state = True
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), expected)
    # The report of a later `pack_model_`, and its folder, have these rows, too.
    report = pack_model_(model, skip=only_host)
    assert [each.reason for each in report.left if each.name == "model.embed_tokens"] == [
        "is packed already, in memory of the host"
    ]
    model.save_pretrained(tmp_path)
    assert hosted_in(load(tmp_path)) == ["model.embed_tokens"]


SMALL: dict[str, Any] = {"d_model": 64, "vocab_size": 600}
for side in ("encoder", "decoder"):
    SMALL |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
BERT: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 300,
}
T5: dict[str, Any] = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 300}
TOKENS = {"input_ids": PROMPT, "decoder_input_ids": PROMPT}
# Models that look rows up in other ways than by a call, what they read, and what goes to the host.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "WhisperForConditionalGeneration": (
        SMALL | {"max_source_positions": 300, "max_target_positions": 300, "num_mel_bins": 8},
        {"input_features": torch.ones(2, 8, 600), "decoder_input_ids": PROMPT},
        2,
    ),
    "MarianMTModel": (SMALL | {"max_position_embeddings": 300}, TOKENS, 2),
    "T5ForConditionalGeneration": (
        T5 | {"vocab_size": 600, "relative_attention_num_buckets": 9000},
        TOKENS,
        2,
    ),
    "BertForMaskedLM": (BERT, {"input_ids": PROMPT}, 1),
    "OPTForCausalLM": (BERT | {"ffn_dim": 64, "word_embed_proj_dim": 64}, TOKENS, 1),
    "GPT2LMHeadModel": (GPT2 | {"vocab_size": 600}, TOKENS, 1),
}


def make_other(name: str, **options: Any) -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(**(special | {"decoder_start_token_id": 1} | options))
    return kind(config).eval().requires_grad_(False)


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_kinds_compute_what_they_did(name: str) -> None:
    options, inputs, n_hosted = OTHERS[name]
    plain = make_other(name, **options)
    given = {key: each for key, each in inputs.items() if key in forward_names(plain)}
    model = copy.deepcopy(plain)
    report = pack_model_(model, embeddings="host")
    assert sum(each.is_in_host for each in report.packed) == n_hosted
    assert torch.equal(model(**given).logits, plain(**given).logits)


def forward_names(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def test_a_model_that_needs_a_whole_matrix_says_which() -> None:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"]
    )
    options = SMALL | {"backbone_config": backbone, "num_queries": 300}
    name, picture = "model.query_position_embeddings", torch.ones(1, 3, 64, 64)
    plain = make_other("DetrForObjectDetection", use_timm_backbone=False, **options)
    model = copy.deepcopy(plain)
    assert [each.name for each in pack_model_(model, embeddings="host").packed] == [name]
    with pytest.raises(TypeError, match=f"whole matrix of {name}.*skip='{name}'"):
        model(picture)
    model = copy.deepcopy(plain)
    assert not pack_model_(model, embeddings="host", skip=name).packed
    assert torch.equal(model(picture).logits, plain(picture).logits)
