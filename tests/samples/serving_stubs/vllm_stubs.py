"""Stand-ins for vLLM 0.32. Layers are made, loaded, processed and multiplied in the same order as
there; attention, batches and servers are left out."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

__version__ = "0.32.0"
METHODS: dict[str, Any] = {}
CURRENT: list[Any] = []


class current_platform:
    device_name = "cpu"

    @staticmethod
    def is_cuda() -> bool:
        return False

    @staticmethod
    def is_cpu() -> bool:
        return current_platform.device_name == "cpu"


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def vllm_config(**changes: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that Packhorse reads."""
    parts: dict[str, Any] = {
        "load_format": "auto",
        "cpu_offload_gb": 0,
        "tie_word_embeddings": False,
        "sizes": [],
    }
    parts |= changes
    text = SimpleNamespace(tie_word_embeddings=parts["tie_word_embeddings"])
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text),
        load_config=SimpleNamespace(load_format=parts["load_format"]),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=parts["cpu_offload_gb"]),
            prefetch=SimpleNamespace(offload_group_size=0),
        ),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=parts["sizes"]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )


def get_current_vllm_config() -> Any:
    return CURRENT[-1]


class QuantizeMethodBase:
    requires_device_loading: bool = True
    uses_meta_device: bool = False
    supports_pre_processed_weights: bool = False

    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def embedding(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        raise NotImplementedError


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        return WeightsMapper(orig_to_new_substr={".kv_scale": ".attn.k_scale"})

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper(orig_to_new_suffix={".g_idx": None})


def register_quantization_config(quantization: str) -> Any:
    def wrapper(quant_config_cls: Any) -> Any:
        if not issubclass(quant_config_cls, QuantizationConfig):
            raise ValueError("The quantization config must be a subclass of `QuantizationConfig`.")
        METHODS[quantization] = quant_config_cls
        return quant_config_cls

    return wrapper


class LinearMethodBase(QuantizeMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = sum(output_partition_sizes), input_size_per_partition
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        weight.weight_loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter("weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = sum(output_partition_sizes), input_size_per_partition
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        weight.weight_loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter("weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        layer.weight = embed_tokens.weight
        return layer


class LinearBase(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = quant_config.get_quant_method(self, prefix)
        sizes = getattr(self, "output_sizes", [output_size])
        self.quant_method.create_weights(
            self, input_size, sizes, input_size, output_size, self.params_dtype,
            weight_loader=self.weight_loader,
        )  # fmt: skip
        self.register_parameter("bias", None)
        if bias:
            self.bias = Parameter(torch.empty(output_size, dtype=self.params_dtype), False)
            self.bias.weight_loader = self.weight_loader

    def weight_loader(
        self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: int | None = None
    ) -> None:
        if loaded_shard_id is not None:
            sizes = self.output_sizes
            start = sum(sizes[:loaded_shard_id])
            param = param.data.narrow(0, start, sizes[loaded_shard_id])
        assert param.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ReplicatedLinear(LinearBase):
    pass


class MergedColumnParallelLinear(LinearBase):
    def __init__(self, input_size: int, output_sizes: list[int], **others: Any) -> None:
        self.__dict__["output_sizes"] = output_sizes
        super().__init__(input_size, sum(output_sizes), **others)


class VocabParallelEmbedding(nn.Module):
    def __init__(
        self, num_embeddings: int, embedding_dim: int, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.num_org_embeddings_per_partition = num_embeddings
        padded = -(-num_embeddings // 64) * 64
        found = quant_config.get_quant_method(self, prefix)
        self.quant_method = found or UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self, embedding_dim, [padded], embedding_dim, padded,
            params_dtype=torch.get_default_dtype(), weight_loader=self.weight_loader,
        )  # fmt: skip

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        param[: len(loaded_weight)].data.copy_(loaded_weight)
        param[len(loaded_weight) :].data.fill_(0)

    def forward(self, rows: Tensor) -> Tensor:
        return self.quant_method.embedding(self, rows)


class ParallelLMHead(VocabParallelEmbedding):
    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> nn.Module:
        return self.quant_method.tie_weights(self, embed_tokens)


@dataclass
class LayerReloadingInfo:
    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list[Any] = field(default_factory=list)
    kernel_tensors: Any = None


_INFO: dict[nn.Module, LayerReloadingInfo] = {}


def get_layerwise_info(layer: nn.Module) -> LayerReloadingInfo:
    return _INFO.setdefault(layer, LayerReloadingInfo())


def initialize_online_processing(layer: nn.Module) -> None:
    info, original = get_layerwise_info(layer), layer.weight.weight_loader
    info.load_numel_total = layer.weight.numel()

    def online_process_loader(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        info.loaded_weights.append(bound)
        info.load_numel += bound.arguments["loaded_weight"].numel()
        if info.load_numel >= info.load_numel_total:
            process_online(layer, info, original)

    layer.weight.weight_loader = online_process_loader


def process_online(layer: nn.Module, info: Any, original: Any) -> None:
    weight = Parameter(torch.empty_like(layer.weight, device="cpu"), requires_grad=False)
    weight.weight_loader, layer.weight = original, weight
    layer.__dict__.pop("_already_called_process_weights_after_loading", None)
    for bound in info.loaded_weights:
        bound.arguments["param"] = weight
        original(*bound.args, **bound.kwargs)
    layer.quant_method.process_weights_after_loading(layer)
    if info.kernel_tensors is not None:  # new weights for a running model
        kept = info.kernel_tensors
        kept.data.copy_(layer.weight)
        layer.weight = kept
    _INFO.pop(layer)


@dataclass
class WeightsMapper:
    orig_to_new_renaming: list[Any] = field(default_factory=list)
    orig_to_new_regex: Mapping[Any, str | None] = field(default_factory=dict)
    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_stacked: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        names = self.__dataclass_fields__
        merged = {name: getattr(self, name) for name in names}
        for name in names:
            given = getattr(other, name)
            merged[name] = (
                [*merged[name], *given] if isinstance(given, list) else {**merged[name], **given}
            )
        return WeightsMapper(**merged)

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, data in weights:
            suffixes = self.orig_to_new_suffix.items()
            if any(name.endswith(suffix) and new is None for suffix, new in suffixes):
                continue
            for old, new in self.orig_to_new_substr.items():
                name = name.replace(old, new or "", 1)
            yield name, data


MODULES = {
    "vllm": ["__version__"],
    "vllm.config": ["get_current_vllm_config"],
    "vllm.logger": ["init_logger"],
    "vllm.platforms": ["current_platform"],
    "vllm.model_executor.layers.linear": [
        "LinearBase",
        "LinearMethodBase",
        "MergedColumnParallelLinear",
        "ReplicatedLinear",
        "UnquantizedLinearMethod",
    ],
    "vllm.model_executor.layers.quantization": ["register_quantization_config"],
    "vllm.model_executor.layers.quantization.base_config": [
        "QuantizationConfig",
        "QuantizeMethodBase",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding": [
        "ParallelLMHead",
        "UnquantizedEmbeddingMethod",
        "VocabParallelEmbedding",
    ],
    "vllm.model_executor.model_loader.reload.layerwise": [
        "get_layerwise_info",
        "initialize_online_processing",
    ],
    "vllm.model_executor.models.utils": ["WeightsMapper"],
}
for _path in [*MODULES]:
    while "." in _path:
        _path = _path.rpartition(".")[0]
        MODULES.setdefault(_path, [])
