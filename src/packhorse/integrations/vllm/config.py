"""The quantization method "packhorse" of vLLM.

vLLM asks it for each layer how its weight is kept. Linear layers and the output layer are packed.
An embedding is packed if it is the output layer, too, or if the options say so. All other weights,
such as experts of a mixture, are vLLM's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from packhorse.integrations.packed_folders import plain_tensors
from packhorse.integrations.serving import (
    CommonConfig,
    PackingTotals,
    ServingOptions,
    require_platform,
)
from packhorse.integrations.vllm.methods import (
    PackedEmbeddingMethod,
    PackedLinearMethod,
    is_plain_linear,
)

_base: Any = import_module("vllm.model_executor.layers.quantization.base_config")
_config: Any = import_module("vllm.config")
_linear: Any = import_module("vllm.model_executor.layers.linear")
_models: Any = import_module("vllm.model_executor.models.utils")
_platforms: Any = import_module("vllm.platforms")
_vocab: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")

if TYPE_CHECKING:
    QuantizationConfig: Any = object
    WeightsMapper: Any = object
else:
    QuantizationConfig = _base.QuantizationConfig
    WeightsMapper = _models.WeightsMapper

__all__ = ["PackhorseVllmConfig"]


class PackhorseVllmConfig(CommonConfig, QuantizationConfig):  # type: ignore[misc]
    """What `--quantization packhorse` means for one model.

    Attributes:
        options: how layers are packed.
        totals: what was packed so far, in this process.
        warmed: sizes of products that were run already (`packhorse.integrations.serving.warm_up`).
    """

    def __init__(self, options: ServingOptions | None = None) -> None:
        """Options for a model.

        Args:
            options: None for the default ones.

        Raises:
            CompatibilityError: the platform is neither an NVIDIA GPU nor the host.
        """
        super().__init__()
        platform = _platforms.current_platform
        require_platform(platform.is_cuda() or platform.is_cpu(), platform.device_name)
        self.options = options or ServingOptions()
        self.totals = PackingTotals()
        self.warmed: set[Any] = set()
        self._widths: set[int] = set()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackhorseVllmConfig:
        """The method with the options of a `quantization_config`.

        Raises:
            ValueError, CompatibilityError: as `ServingOptions.from_config`.
        """
        return cls(ServingOptions.from_config(config))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """How the weight of a layer is kept.

        Args:
            layer: the layer, not finished yet.
            prefix: its full name.

        Returns:
            The method; None for vLLM's own.
        """
        if isinstance(layer, _vocab.VocabParallelEmbedding):
            self._widths.add(layer.embedding_dim)
            return self._method_of_embedding(layer, prefix)
        if not isinstance(layer, _linear.LinearBase):
            return None
        self._widths.add(layer.input_size)
        parts = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        stays = (
            layer.params_dtype != torch.bfloat16
            or not is_plain_linear(layer)
            or self.options.skips(prefix, parts)
        )
        return _linear.UnquantizedLinearMethod() if stays else PackedLinearMethod(self, prefix)

    def _method_of_embedding(self, layer: Any, prefix: str) -> Any:
        options = self.options
        is_head = isinstance(layer, _vocab.ParallelLMHead)
        waits = not is_head and _is_tied()
        if is_head:
            wanted = options.lm_head
        elif waits:
            wanted = options.lm_head and options.embeddings is not False
        else:
            wanted = options.embeddings is True
        if not wanted or options.skips(prefix) or torch.get_default_dtype() != torch.bfloat16:
            return None
        return PackedEmbeddingMethod(self, prefix, waits=waits)

    def get_checkpoint_weight_mapper(self) -> Any:
        """What vLLM applies to the tensors of the files; here it makes plain tensors of packed
        ones."""
        return _PackedTensors(super().get_checkpoint_weight_mapper(), self._widths)


def _is_tied() -> bool:
    """Whether the output layer of the model that is being made is its input embedding."""
    model = _config.get_current_vllm_config().model_config
    return bool(getattr(model.hf_text_config, "tie_word_embeddings", False))


class _PackedTensors(WeightsMapper):  # type: ignore[misc]
    """Renames tensors as another mapper does, after it has made plain ones of packed ones.

    vLLM joins the mappers of a model, of its method and its own with `|`, which gives a plain
    mapper; as the more special class, this one decides what the sum is.
    """

    def __init__(self, names: Any, widths: set[int]) -> None:
        super().__init__(**{field: getattr(names, field) for field in names.__dataclass_fields__})
        self._widths = widths

    def __or__(self, other: Any) -> _PackedTensors:
        return _PackedTensors(WeightsMapper.__or__(self, other), self._widths)

    def __ror__(self, other: Any) -> _PackedTensors:
        return _PackedTensors(WeightsMapper.__or__(other, self), self._widths)

    def apply(self, weights: Any) -> Any:
        return super().apply(plain_tensors(weights, self._widths))
