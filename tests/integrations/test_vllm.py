"""The plug-in for vLLM, on stand-ins for its classes; tests/servers run the real one."""

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
from packhorse.integrations.plugins import register_vllm

FUSED = "model.layers.0.mlp.gate_up_proj"
SHARDS = {"model.layers.0.mlp.gate_proj": 0, "model.layers.0.mlp.up_proj": 1}
VOCABULARY = 500  # not a multiple of 64: vLLM pads it


@pytest.fixture
def vllm() -> Iterator[Any]:
    with installed("vllm") as stubs:
        yield stubs


class Model(nn.Module):
    """An embedding, two joined matrices, one more, and an output layer."""

    def __init__(self, vllm: Any, config: Any, *, tied: bool = False, ties: bool = True) -> None:
        super().__init__()
        config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
        self.embed_tokens = vllm.VocabParallelEmbedding(
            VOCABULARY, 256, config, "model.embed_tokens"
        )
        self.gate_up = vllm.MergedColumnParallelLinear(
            256, [320, 320], quant_config=config, prefix=FUSED
        )
        self.down = vllm.ReplicatedLinear(
            640, 256, bias=True, quant_config=config, prefix="model.layers.0.mlp.down_proj"
        )
        self.lm_head = vllm.ParallelLMHead(VOCABULARY, 256, config, "lm_head")
        if tied:
            self.lm_head = (
                self.lm_head.tie_weights(self.embed_tokens) if ties else self.embed_tokens
            )

    def forward(self, rows: Tensor) -> Tensor:
        x = self.down(self.gate_up(self.embed_tokens(rows)))
        found: Tensor = self.lm_head.quant_method.apply(self.lm_head, x)
        return found[..., :VOCABULARY]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        layers = {"model.embed_tokens": self.embed_tokens, "lm_head": self.lm_head}
        layers["model.layers.0.mlp.down_proj"] = self.down
        for name, tensor in weights:
            stem, _, last = name.rpartition(".")
            layer = layers.get(stem, self.gate_up)
            param = getattr(layer, last)
            shard = {"loaded_shard_id": SHARDS[stem]} if stem in SHARDS else {}
            param.weight_loader(param, tensor, **shard)


def checkpoint(*, tied: bool = False) -> dict[str, Tensor]:
    found = {
        "model.embed_tokens.weight": model_matrix(VOCABULARY, 256),
        "model.layers.0.mlp.gate_proj.weight": model_matrix(320, 256) * 3,
        "model.layers.0.mlp.up_proj.weight": model_matrix(320, 256),
        "model.layers.0.mlp.down_proj.weight": model_matrix(256, 640),
        "model.layers.0.mlp.down_proj.bias": inputs(256),
    }
    return found if tied else found | {"lm_head.weight": -model_matrix(VOCABULARY, 256)}


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.dim() == 2
        found |= split_weight(pack_weight(tensor), name) if is_matrix else {name: tensor}
    return found


def load(
    vllm: Any,
    tensors: dict[str, Tensor],
    options: dict[str, Any] | None = None,
    *,
    tied: bool = False,
    ties: bool = True,
    **changes: Any,
) -> tuple[Model, Any]:
    """As vLLM makes and loads a model."""
    register_vllm()
    method = vllm.METHODS["packhorse"]
    config = method() if options is None else method.from_config(options)
    vllm.CURRENT.append(vllm.vllm_config(tie_word_embeddings=tied, **changes))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Model(vllm, config, tied=tied, ties=ties)
    finally:
        torch.set_default_dtype(before)
        vllm.CURRENT.pop()
    mapper = vllm.WeightsMapper()
    mapper |= config.get_cache_scale_mapper()
    mapper |= config.get_checkpoint_weight_mapper()
    mapper |= vllm.WeightsMapper(orig_to_new_substr={"rotary_emb.inv_freq": ""})
    with torch.no_grad():
        model.load(mapper.apply(tensors.items()))
        for module in model.modules():
            if hasattr(module, "quant_method"):
                info = vllm.get_layerwise_info(module)
                if info.load_numel_total is not None:
                    vllm.process_online(module, info, module.weight_loader)
                module.quant_method.process_weights_after_loading(module)
    return model, config


def expected(tensors: dict[str, Tensor], rows: Tensor) -> Tensor:
    t, stem = tensors, "model.layers.0.mlp."
    x = t["model.embed_tokens.weight"][rows]
    both = torch.cat([t[f"{stem}gate_proj.weight"], t[f"{stem}up_proj.weight"]])
    x = nn.functional.linear(x, both)
    x = nn.functional.linear(x, t[f"{stem}down_proj.weight"], t[f"{stem}down_proj.bias"])
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return nn.functional.linear(x, head)


ROWS = torch.tensor([0, 3, VOCABULARY - 1, 77])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("options", [None, {"fmt": "W11"}, {"embeddings": True}])
def test_models_give_the_same_numbers(vllm: Any, options: Any, is_packed: bool, tied: bool) -> None:
    tensors = checkpoint(tied=tied)
    model, config = load(vllm, packed(tensors) if is_packed else tensors, options, tied=tied)
    assert same_bits(model(ROWS), expected(tensors, ROWS))
    has_embedding = tied or options == {"embeddings": True}
    n_packed = 2 + (not tied) + has_embedding
    assert (config.totals.n_packed, config.totals.left) == (n_packed, {})
    assert config.totals.is_complete
    assert (model.embed_tokens.weight.dtype == torch.uint8) is has_embedding
    assert model.lm_head is (model.embed_tokens if tied else model.lm_head)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("options", [{"lm_head": False}, {"embeddings": False}])
def test_a_tied_weight_stays_plain_if_half_of_it_is_to(
    vllm: Any, options: Any, is_packed: bool
) -> None:
    tensors = checkpoint(tied=True)
    model, config = load(vllm, packed(tensors) if is_packed else tensors, options, tied=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert same_bits(model(ROWS), expected(tensors, ROWS))
    assert config.totals.n_packed == 2


def test_a_tied_weight_stays_plain_in_models_that_tie_it_in_their_own_way(vllm: Any) -> None:
    """Their output layer might read the weight as a plain matrix."""
    tensors = checkpoint(tied=True)
    model, config = load(vllm, tensors, tied=True, ties=False)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert same_bits(model(ROWS), expected(tensors, ROWS))
    assert config.totals.left["model.embed_tokens"]


def test_one_matrix_is_plain_at_a_time(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of linear layers are made on the meta device, and are packed as soon as they are
    there."""
    plain: list[int] = []
    tensors = checkpoint()
    seen: list[Model] = []
    make = Model.load

    def watched(self: Model, weights: Any) -> None:
        seen.append(self)
        assert self.gate_up.weight.is_meta
        assert self.down.weight.is_meta

        def each() -> Iterator[tuple[str, Tensor]]:
            for pair in weights:
                layers = (self.gate_up, self.down)
                plain.append(sum(layer.weight.dtype == torch.bfloat16
                                 and not layer.weight.is_meta for layer in layers))  # fmt: skip
                yield pair

        make(self, each())

    monkeypatch.setattr(Model, "load", watched)
    load(vllm, tensors)
    assert len(plain) == len(tensors)
    assert not any(plain)


def test_an_offloader_finds_weights_where_they_will_be(vllm: Any) -> None:
    """vLLM's offloaders move weights when they are made, and record them by name."""
    tensors = checkpoint()
    model, _ = load(vllm, tensors, cpu_offload_gb=1)
    assert not model.down.quant_method.uses_meta_device
    assert same_bits(model(ROWS), expected(tensors, ROWS))
    assert {name for name, _ in model.named_parameters()} == {
        "embed_tokens.weight", "gate_up.weight", "down.weight", "down.bias", "lm_head.weight",
    }  # fmt: skip


@pytest.mark.parametrize("offload_gb", [0, 1])
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight",
             "lm_head.weight"],
)  # fmt: skip
def test_a_missing_weight_is_an_error(vllm: Any, name: str, offload_gb: int) -> None:
    """vLLM would take the numbers that happen to be in memory."""
    tensors = checkpoint()
    del tensors[name]
    message = "gate_up_proj" if "up_proj" in name else name.removesuffix(".weight")
    with pytest.raises(CorruptionError, match=f"{message}.weight: the checkpoint does not have"):
        load(vllm, tensors, cpu_offload_gb=offload_gb)


def test_dummy_weights_need_no_checkpoint(vllm: Any) -> None:
    _, config = load(vllm, {}, load_format="dummy")
    assert config.totals.is_complete


def test_what_stays_plain(vllm: Any) -> None:
    options = {"modules_to_not_convert": ["up_proj", "lm_head"]}
    tensors = checkpoint()
    model, config = load(vllm, tensors, options)
    assert config.totals.n_packed == 1
    assert model.gate_up.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert same_bits(model(ROWS), expected(tensors, ROWS))

    class Router(vllm.ReplicatedLinear):
        """A subclass of the model's own, which may use the weight in any way."""

    vllm.CURRENT.append(vllm.vllm_config())
    for layer in (
        Router(256, 256, params_dtype=torch.bfloat16, quant_config=config, prefix="gate"),
        vllm.ReplicatedLinear(256, 256, params_dtype=torch.float32, quant_config=config),
    ):
        assert type(layer.quant_method) is vllm.UnquantizedLinearMethod
    assert config.get_quant_method(nn.Module(), "experts") is None


def test_new_weights_replace_those_of_a_running_model(vllm: Any) -> None:
    """The buffer that compiled code and CUDA graphs know is written, not replaced."""
    tensors = checkpoint()
    model, _ = load(vllm, tensors)
    layer, name = model.down, "model.layers.0.mlp.down_proj.weight"
    kept = layer.weight
    place, info = kept.data_ptr(), vllm.get_layerwise_info(layer)
    info.kernel_tensors = kept
    layer.weight = nn.Parameter(torch.empty(256, 640, dtype=torch.bfloat16, device="meta"), False)
    layer.weight.weight_loader = layer.weight_loader
    vllm.initialize_online_processing(layer)
    tensors[name] = tensors[name] * -0.75
    with torch.no_grad():
        layer.weight.weight_loader(layer.weight, tensors[name])
    assert layer.weight is kept
    assert layer.weight.data_ptr() == place
    assert same_bits(model(ROWS), expected(tensors, ROWS))
    assert same_bits(layer.quant_method.dequantize_weight(layer), tensors[name])


# Refusals.


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0"])
def test_another_version_of_vllm_refuses_and_nothing_else_fails(
    vllm: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    register_vllm()
    method = vllm.METHODS["packhorse"]
    for make in (method, lambda: method.from_config({})):
        with pytest.raises(
            CompatibilityError, match=f"supports vLLM 0.32 to 0.33, not {version}: .*plain"
        ):
            make()
    assert method.get_config_filenames() == []


def test_a_vllm_without_what_is_needed_refuses_and_nothing_else_fails(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not catch errors of plug-ins: one would stop servers of any model."""
    import sys

    monkeypatch.delattr(sys.modules["vllm.model_executor.layers.linear"], "LinearMethodBase")
    register_vllm()
    with pytest.raises(CompatibilityError, match=r"0\.32\.0 does .*LinearMethodBase.*plain model"):
        vllm.METHODS["packhorse"]()


def test_another_platform_is_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register_vllm()
    monkeypatch.setattr(vllm.current_platform, "device_name", "rocm")
    with pytest.raises(CompatibilityError, match="NVIDIA GPUs and on CPUs, not on rocm"):
        vllm.METHODS["packhorse"]()


def test_a_config_of_another_method_or_a_later_version_is_refused(vllm: Any) -> None:
    register_vllm()
    method = vllm.METHODS["packhorse"]
    with pytest.raises(ValueError, match="quant_method is 'gptq'"):
        method.from_config({"quant_method": "gptq"})
    with pytest.raises(CompatibilityError, match="upgrade packhorse"):
        method.from_config({"version": 2 + 97})
    config = method()
    assert config.get_supported_act_dtypes() == [torch.bfloat16]  # vLLM refuses others
    assert (config.get_name(), method.get_min_capability()) == ("packhorse", 80)


def test_registering_twice_changes_nothing(vllm: Any) -> None:
    register_vllm()
    first = vllm.METHODS["packhorse"]
    register_vllm()
    assert {"packhorse": first} == vllm.METHODS
