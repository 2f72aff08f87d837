"""`PackhorseConfig` in the real transformers: models are packed while they load, saved, loaded
again, damaged, unpacked and trained with adapters; their tokens are those of the plain model."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import packhorse.torch
from packhorse.device import PackedLinear, PackedWeight, offload_model_
from packhorse.disk import pack_folder
from packhorse.disk.folder_index import pack_index, unpack_index
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.torch import TorchFramework
from packhorse.transformers import PackhorseConfig, load_packed_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*already has a .quantization_config.:UserWarning"),
]

PROMPT = torch.tensor([[1, 5, 9, 2, 77, 30], [4, 4, 8, 16, 32, 64]])
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "vocab_size": 3000},  # its large embedding is the output layer
    "GPT2": {"n_embd": 128, "n_layer": 2, "n_head": 4},
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of plain BF16 models with several shards, made at first use."""
    transformers.logging.disable_progress_bar()
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model = make_model(name, **MODELS[name])
            model.save_pretrained(made[name], max_shard_size="200KB")
        return made[name]

    return folder


def make_model(name: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    ending = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config", None) or getattr(
        transformers, f"{name}TextConfig"
    )
    return getattr(transformers, name + ending)(config(**(SIZES | options))).to(torch.bfloat16)


def load(folder: Path, config: PackhorseConfig | None = None, **options: Any) -> PreTrainedModel:
    options = {"dtype": torch.bfloat16} | options
    if config is not None:
        options["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def packed(folder: Path, **options: Any) -> PreTrainedModel:
    return load(folder, PackhorseConfig(), **options)


def generate(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    mask = torch.ones_like(PROMPT)
    tokens: Tensor = model.generate(
        input_ids=PROMPT, attention_mask=mask, max_new_tokens=6, eos_token_id=None, **options
    )
    return tokens


def same_tokens(model: Any, other: Any) -> bool:
    greedy = [generate(each, do_sample=False) for each in (model, other)]
    sampled = [generate(each, do_sample=True, top_k=0) for each in (model, other)]
    return torch.equal(*greedy) and torch.equal(*sampled)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Loading, saving, loading again.


@pytest.mark.parametrize("name", MODELS)
def test_a_model_packs_as_it_loads_and_tokens_stay(
    folders: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    plain, model = load(folders(name)), packed(folders(name))
    report = model.hf_quantizer.report
    assert len(report.packed) == ({"GPT2": 1, "Gemma2": 15}.get(name, 16))
    assert type(model.get_output_embeddings()) is PackedLinear
    assert same_tokens(model, plain)

    model.save_pretrained(tmp_path / "a", max_shard_size="200KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    again = load(tmp_path / "a")
    assert again.hf_quantizer.report.nbytes == report.nbytes
    assert same_tokens(again, plain)
    again.save_pretrained(tmp_path / "b", max_shard_size="200KB")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_the_config_is_kept_with_a_version(folders: Callable[[str], Path], tmp_path: Path) -> None:
    config = PackhorseConfig("W11", ["q_proj", "model.layers.1.mlp"], lm_head=False)
    load(folders("Llama"), config).save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert kept == {
        "quant_method": "packhorse",
        "version": 1,
        "fmt": "W11",
        "modules_to_not_convert": ["q_proj", "model.layers.1.mlp"],
        "lm_head": False,
        "embeddings": None,
        "for_tokens": None,
    }
    model = load(tmp_path)
    assert model.config.quantization_config.to_dict() == kept
    assert dict(model.config.quantization_config) == kept
    assert PackhorseConfig.from_dict(kept).format == "W11"
    report = model.hf_quantizer.report
    assert {weight.format for weight in report.packed} == {"W11"}
    assert [left.name for left in report.left if "embed" not in left.name] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]


def test_a_tied_embedding_is_packed_once(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = packed(folders("Gemma2"))
    model.save_pretrained(tmp_path)
    for each in (model, load(tmp_path)):
        assert isinstance(each.lm_head.weight, PackedWeight)
        assert each.model.embed_tokens.weight is each.lm_head.weight
        names = [weight.name for weight in each.hf_quantizer.report.packed]
        assert "model.embed_tokens = lm_head" in names
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lm_head" in name]
    unpacked = load(folders("Gemma2"), PackhorseConfig(lm_head=False))
    assert unpacked.lm_head.weight is unpacked.model.embed_tokens.weight
    assert not isinstance(unpacked.lm_head.weight, PackedWeight)
    embedded = load(folders("Llama"), PackhorseConfig(embeddings=True))
    assert isinstance(embedded.model.embed_tokens.weight, PackedWeight)
    assert same_tokens(embedded, load(folders("Llama")))


def test_experts_stay_plain_and_are_reported(tmp_path: Path) -> None:
    make_model("Mixtral", num_local_experts=4).save_pretrained(tmp_path / "plain")
    model = packed(tmp_path / "plain")
    reasons = {left.name: left.reason for left in model.hf_quantizer.report.left}
    assert reasons["model.layers.0.mlp.experts.down_proj"].startswith("3 dimensions")
    assert "4 x 128 x 256" in str(model.hf_quantizer.report)
    model.save_pretrained(tmp_path / "packed")
    assert same_tokens(load(tmp_path / "packed"), load(tmp_path / "plain"))


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="no such model here")
def test_weights_that_a_checkpoint_has_in_one_piece(tmp_path: Path) -> None:
    """transformers splits such weights while it loads, and joins them when it saves plain ones."""
    make_model("HrmText").save_pretrained(tmp_path / "plain")
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "plain/model.safetensors"))
    model = packed(tmp_path / "plain")
    names = [weight.name for weight in model.hf_quantizer.report.packed]
    assert any("up_proj" in name for name in names)
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert [weight.name for weight in again.hf_quantizer.report.packed] == names
    token = {"input_ids": PROMPT}
    outputs = [each(**token).logits for each in (load(tmp_path / "plain"), model, again)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_weights_without_exceptions_and_without_gain(tmp_path: Path) -> None:
    plain = make_model("Llama")
    for parameter in plain.parameters():
        parameter.data.fill_(1.0)
    rows = torch.randint(-(1 << 15), 1 << 15, (256, 128), dtype=torch.int16)
    plain.model.layers[0].mlp.up_proj.weight.data = rows.view(torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    model = packed(tmp_path / "plain")
    assert model.lm_head.weight.exceptions.numel() == 0
    reasons = {left.name: left.reason for left in model.hf_quantizer.report.left}
    assert reasons["model.layers.0.mlp.up_proj"].startswith("no gain")
    model.save_pretrained(tmp_path / "packed")
    for each, other in zip(load(tmp_path / "packed").parameters(), plain.parameters(), strict=True):
        bits = each.unpack() if isinstance(each, PackedWeight) else each
        assert torch.equal(bits.view(torch.int16), other.view(torch.int16))


def test_the_plain_model_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads FP32 files, which are converted. BF16 files are mapped, so their pages would count,
    too."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads read ahead at random times
    options = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    plain = make_model("Llama", **options)
    nbytes = sum(2 * parameter.numel() for parameter in plain.parameters())
    plain.to(torch.float32).save_pretrained(tmp_path, max_shard_size="20MB")
    del plain
    models: list[Any] = []
    growth = anonymous_growth(lambda: models.append(packed(tmp_path)))
    report = models[0].hf_quantizer.report
    assert report.nbytes < 0.76 * nbytes
    assert growth < nbytes  # and not 1.76 times that; some MB of it are the process's own


def anonymous_growth(call: Callable[[], object]) -> int:
    """The growth of memory without files at its peak during a call, sampled each millisecond."""

    def read() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) << 10

    before, peak, done = read(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(peak, read()) - before


def test_new_heads_stay_plain_and_train(folders: Callable[[str], Path]) -> None:
    kind = transformers.AutoModelForSequenceClassification
    options = {"dtype": torch.bfloat16, "num_labels": 3}
    model = kind.from_pretrained(folders("Llama"), quantization_config=PackhorseConfig(), **options)
    assert type(model.score.weight) is torch.nn.Parameter
    assert model.score.weight.requires_grad
    reasons = {left.name: left.reason for left in model.hf_quantizer.report.left}
    assert reasons["score"] == "not in the checkpoint"
    base = transformers.AutoModel.from_pretrained(folders("Llama"), dtype=torch.bfloat16)
    hidden = model.model(PROMPT).last_hidden_state
    assert torch.equal(hidden, base(PROMPT).last_hidden_state)


# Folders of `packhorse pack`.


def test_folders_of_packed_files(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders("Llama")
    pack_folder(source, tmp_path / "files")
    plain = load(source)
    assert same_tokens(load_packed_model(tmp_path / "files"), plain)
    model = load_packed_model(tmp_path / "files", quantization_config=PackhorseConfig())
    assert len(model.hf_quantizer.report.packed) == 16
    assert model.name_or_path == str(tmp_path / "files")
    assert same_tokens(model, plain)
    model.save_pretrained(tmp_path / "arrays")
    pack_folder(tmp_path / "arrays", tmp_path / "both")
    assert same_tokens(load_packed_model(tmp_path / "both"), plain)
    with pytest.raises(FileNotFoundError, match=r"00001.*\.safetensors is not a packed file"):
        load_packed_model(source)


def test_packed_tensors_go_to_the_one_gpu_of_a_plain_model(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stands in for the GPU; these tensors are too small for its kernels."""
    pack_folder(folders("Llama"), tmp_path / "files")
    plain, decode_on, asked = load(folders("Llama")), TorchFramework.decode_on, []

    def watch(self: TorchFramework, frames: Any, device: Any, threads: int) -> Any:
        asked.append(device)
        return decode_on(self, frames, device, threads)

    monkeypatch.setattr(TorchFramework, "kernel_devices", ("cpu",))
    monkeypatch.setattr(TorchFramework, "decode_on", watch)
    for place, goes_there in (("cpu", True), ({"": torch.device("cpu")}, True), ("auto", False)):
        asked.clear()
        assert same_tokens(load_packed_model(tmp_path / "files", device_map=place), plain)
        assert bool(asked) == goes_there
    asked.clear()
    how = {"device_map": "cpu", "quantization_config": PackhorseConfig()}
    assert same_tokens(load_packed_model(tmp_path / "files", **how), plain)
    assert not asked


def test_an_index_that_is_not_kept_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would fill missing tensors with random numbers."""
    pack_folder(folders("Llama"), tmp_path / "files")
    (index,) = (tmp_path / "files").glob("*.index.json")
    packed, original = (
        json.loads(text)
        for text in (index.read_bytes(), unpack_index(index.read_bytes(), label="index"))
    )
    for document in (packed, original):
        document["weight_map"]["more"] = next(iter(document["weight_map"].values()))
    for text, message in (
        (json.dumps(packed).encode(), "disagree"),
        (pack_index(json.dumps(original).encode(), label="index"), "no file has 'more'"),
        (json.dumps(packed | {"weight_map": {}}).encode(), "no tensors"),
    ):
        index.write_bytes(text)
        with pytest.raises(CorruptionError, match=message):
            load_packed_model(tmp_path / "files")


def test_a_shard_in_the_place_of_another_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    pack_folder(folders("Llama"), tmp_path / "files")
    one, two, *_ = sorted((tmp_path / "files").glob("*.ph.safetensors"))
    # All names are there, but one tensor has its value from another state of the model.
    tensors = {**packhorse.torch.load_file(one), **packhorse.torch.load_file(two)}
    packhorse.torch.save_file(tensors, two)
    with pytest.raises(CorruptionError, match=f"'{two.name}' holds other tensors than this index"):
        load_packed_model(tmp_path / "files")


# Wrong input.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_refused(folders: Callable[[str], Path], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"BF16.*dtype=torch.bfloat16"):
        packed(folders("Llama"), dtype=dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "W13"}, "format is 'W13'"),
        ({"format": ["W12"]}, "format is"),
        ({"modules_to_not_convert": "lm_head"}, "a list of names"),
        ({"modules_to_not_convert": [3]}, "has 3, which is not a name"),
        ({"lm_head": "yes"}, "lm_head is 'yes'"),
        ({"bits": 4}, "no option 'bits'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackhorseConfig(**options)


def test_configs_from_dicts() -> None:
    """As in the base class of transformers; but a wrong value is an error here as well."""
    stored = PackhorseConfig("W11").to_dict() | {"from_the_dict": 1}
    config, unused = PackhorseConfig.from_dict(
        stored, return_unused_kwargs=True, lm_head=False, more=2
    )
    assert (config.format, config.lm_head) == ("W11", False)
    assert unused == {"from_the_dict": 1, "more": 2}
    assert stored["from_the_dict"] == 1, "the caller's dict is left alone"
    assert PackhorseConfig.from_dict({"format": "W12"}, more=2).to_dict()["fmt"] == "W12"
    own = PackhorseConfig()
    assert PackhorseConfig.from_dict(own.to_dict(), True)[1] == {}
    with pytest.raises(ValueError, match="no option 'from_the_dict'"):
        PackhorseConfig.from_dict(stored)
    with pytest.raises(ValueError, match="lm_head is 'yes'"):
        PackhorseConfig.from_dict({}, lm_head="yes")


def test_modules_that_are_not_there(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="'query', but the model has no such"):
        load(folders("Llama"), PackhorseConfig(modules_to_not_convert=["query"]))


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_offloading_to_the_disk_is_refused(
    folders: Callable[[str], Path], device_map: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="packed weights cannot be offloaded"):
        packed(folders("Llama"), device_map=device_map)


def test_a_checkpoint_of_another_shape(folders: Callable[[str], Path]) -> None:
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        packed(folders("Llama"), vocab_size=600)


@pytest.fixture
def saved(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    packed(folders("Llama")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_splitting_over_processes_is_refused(saved: Path, folders: Callable[[str], Path]) -> None:
    """transformers notes in the config what `tp_plan` and `distributed_config` ask for."""
    plain = {"quantization_config": PackhorseConfig()}
    for folder, options in ((folders("Llama"), plain), (saved, {})):
        config = AutoConfig.from_pretrained(folder)
        config.distributed_config = {"tp_size": 2}
        with pytest.raises(ValueError, match="cannot be split over processes"):
            AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.bfloat16, **options
            )


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("version", "1"), ("version", None)])
def test_unknown_versions_are_refused(saved: Path, key: str, value: object) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match=r"version .*reads version 1"):
        load(saved)


def test_arrays_that_the_config_does_not_name(saved: Path) -> None:
    """Such folders were written for models that `pack_model_` had packed."""
    plain = load(saved)
    path = saved / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match=r'add "quantization_config".*"packhorse"'):
        packed(saved)
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "packhorse"}}))
    assert same_tokens(load(saved), plain)


def _float(state: dict[str, Tensor]) -> None:
    state[f"{UP}.first_exponents"] = state[f"{UP}.first_exponents"].float()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state[f"{UP}.first_exponents"].fill_(255),
        lambda state: state[f"{UP}.exception_starts"].fill_(7),
        lambda state: state.pop(UP),
        lambda state: state.update({f"{UP}.high_bits": state[UP][..., 0].clone()}),
        lambda state: [state.pop(key) for key in list(state) if key.startswith(f"{UP}.")],
        lambda state: state.update({f"{UP}.low_bytes": torch.zeros(3)}),
        lambda state: state.update({UP: torch.zeros(3, 4, dtype=torch.bfloat16)}),
        _float,
    ],
)
def test_damage_is_an_error_that_names_the_layer(
    saved: Path, damage: Callable[[dict[str, Tensor]], object]
) -> None:
    state = load_file(saved / "model.safetensors")
    damage(state)
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptionError, match=UP):
        load(saved)


def test_plain_weights_of_a_packed_folder_get_the_dtype(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].float()
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    assert load(saved).model.norm.weight.dtype == torch.bfloat16


def test_arrays_in_place_of_what_is_no_matrix(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    norm = "model.norm.weight"
    del state[norm]
    for key in [key for key in state if key.startswith(UP)]:
        state[key.replace(UP, norm)] = state[key].clone()
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptionError, match=norm):
        load(saved)


# Use of a packed model.


def test_dequantize_gives_the_plain_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    plain, model = load(folders("Gemma2")), packed(folders("Gemma2"))
    model.save_pretrained(tmp_path / "packed")
    for each in (model, load(tmp_path / "packed")):
        unpacked = each.dequantize()
        assert unpacked.lm_head.weight is unpacked.model.embed_tokens.weight
        assert str(unpacked) == str(plain)
        assert not hasattr(unpacked.config, "quantization_config")
        for one, other in zip(unpacked.parameters(), plain.parameters(), strict=True):
            assert one.requires_grad
            assert torch.equal(one, other)
        unpacked.save_pretrained(tmp_path / "plain")
        assert same_tokens(load(tmp_path / "plain"), plain)
    floats = packed(folders("Llama")).dequantize(dtype=torch.float32)
    assert {parameter.dtype for parameter in floats.parameters()} == {torch.float32}


def test_devices_and_hooks(folders: Callable[[str], Path]) -> None:
    plain = load(folders("Llama"))
    assert same_tokens(packed(folders("Llama"), device_map="cpu"), plain)
    assert same_tokens(packed(folders("Llama"), device_map="auto"), plain)
    model = packed(folders("Llama"))
    assert same_tokens(model.to("cpu").to(torch.bfloat16), plain)
    assert model.to("meta").lm_head.weight.is_meta
    with pytest.raises(ValueError, match="half"):
        model.half()
    hooked = packed(folders("Llama"))
    accelerate.dispatch_model(hooked, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    assert same_tokens(hooked, plain)


def test_a_device_map_with_the_host(folders: Callable[[str], Path], tmp_path: Path) -> None:
    plain, homes = load(folders("Llama")), {"model": "cpu", "lm_head": "cpu"}
    pack_folder(folders("Llama"), tmp_path / "files")
    loaded = [
        packed(folders("Llama"), device_map=homes),
        load_packed_model(
            tmp_path / "files", device_map=homes, quantization_config=PackhorseConfig()
        ),
    ]
    loaded[0].save_pretrained(tmp_path / "saved")
    loaded.append(load(tmp_path / "saved", device_map=homes))
    for model in loaded:
        assert isinstance(model.lm_head, PackedLinear)
        assert same_tokens(model, plain)
    offload_model_(loaded[0], "cpu")
    assert same_tokens(loaded[0], plain)


def test_lora_trains_on_top(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses and gradients equal those of LoRA on the frozen plain model."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=4)

    def adapted(base: PreTrainedModel) -> PeftModel:
        torch.manual_seed(1)
        return get_peft_model(base, config)

    models = [adapted(load(folders("Llama"))), adapted(packed(folders("Llama")))]
    losses = [train(model) for model in models]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    models[1].save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(packed(folders("Llama")), tmp_path / "adapter")
    assert same_tokens(again, models[0].eval())


def train(model: PeftModel) -> list[float]:
    model.eval()  # without dropout
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=PROMPT, labels=PROMPT).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in adapters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_of_transformers_itself(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = packed(folders("Llama"))
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    other = packed(folders("Llama"))
    other.load_adapter(tmp_path)
    assert same_tokens(model, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model, host = packed(folders("Llama"), device_map="cuda"), packed(folders("Llama"))
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", device_map="cuda")
    for each in (model, again):
        for one, other in zip(each.parameters(), host.parameters(), strict=True):
            assert one.is_cuda
            assert torch.equal(one.detach().cpu(), other.detach())
    logits = [each(input_ids=PROMPT.cuda()).logits.float() for each in (model, again)]
    plain = model.dequantize()(input_ids=PROMPT.cuda()).logits.float()
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], plain, rtol=0.02, atol=0.02)
