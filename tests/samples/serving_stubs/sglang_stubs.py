"""Stand-ins for SGLang 0.5.23: tables, hooks, layers and the order in which its loader works."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

__version__ = "0.5.23"
QUANTIZATION_METHODS: dict[str, Any] = {}
CPU_QUANTIZATION_METHODS: dict[str, Any] = {}
QUANTIZATION_CHOICES: list[str] = ["fp8"]
add_quantization_method_choices = QUANTIZATION_CHOICES.extend
PLATFORM = ["cpu"]


def is_cuda() -> bool:
    return False


def is_cpu() -> bool:
    return PLATFORM[0] == "cpu"


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: ClassVar[dict[str, list[Any]]] = {}

    @classmethod
    def register(
        cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None
    ) -> None:
        cls.hooks.setdefault(target, []).append((hook_type, hook))


class QuantizeMethodBase:
    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        return


class LinearMethodBase(QuantizeMethodBase):
    pass


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


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
        layer.register_parameter("weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    pass


class LinearBase(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        self.quant_method.create_weights(
            self, input_size, [output_size], input_size, output_size, self.params_dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


class VocabParallelEmbedding(nn.Module):
    def __init__(
        self, num_embeddings: int, embedding_dim: int, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.embedding_dim, self.num_org_embeddings_per_partition = embedding_dim, num_embeddings
        found = quant_config.get_quant_method(self, prefix=prefix)
        self.quant_method = found or UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self, embedding_dim, [num_embeddings], embedding_dim, num_embeddings,
            params_dtype=torch.get_default_dtype(),
        )  # fmt: skip


class ParallelLMHead(VocabParallelEmbedding):
    pass


class DefaultModelLoader:
    """As SGLang's, with the hooks that it would have applied."""

    @staticmethod
    def load_weights_only(model: nn.Module, weights: Any, target_device: Any) -> None:
        for _, hook in HookRegistry.hooks.get(
            "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only", []
        ):
            changed = hook(model, weights, target_device)
            if changed is not None:
                (model, weights, target_device), _ = changed
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model: nn.Module, target_device: Any) -> None:
        for module in model.modules():
            if getattr(module, "quant_method", None) is not None:
                module.quant_method.process_weights_after_loading(module)


MODULES = {
    "sglang.version": ["__version__"],
    "sglang.srt.arg_groups.choices": ["add_quantization_method_choices"],
    "sglang.srt.layers.linear": ["LinearBase"],
    "sglang.srt.layers.quantization": ["CPU_QUANTIZATION_METHODS", "QUANTIZATION_METHODS"],
    "sglang.srt.layers.quantization.base_config": ["LinearMethodBase", "QuantizationConfig"],
    "sglang.srt.layers.quantization.unquant": [
        "UnquantizedEmbeddingMethod",
        "UnquantizedLinearMethod",
    ],
    "sglang.srt.layers.vocab_parallel_embedding": ["ParallelLMHead", "VocabParallelEmbedding"],
    "sglang.srt.plugins.hook_registry": ["HookRegistry", "HookType"],
    "sglang.srt.utils": ["is_cpu", "is_cuda"],
}
for _path in [*MODULES]:
    while "." in _path:
        _path = _path.rpartition(".")[0]
        MODULES.setdefault(_path, [])
