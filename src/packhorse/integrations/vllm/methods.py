"""How vLLM makes, loads and multiplies layers whose weights are packed.

A weight is made on the meta device. vLLM keeps the tensors of a layer as they come from the files,
until all are there. Then it makes the weight, fills it, and processes it: the weight is packed
before the next layer is filled. vLLM's offloaders move weights when they are made, so with an
offloader weights are made where they will be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from packhorse.integrations.serving import (
    embed,
    incomplete_weight,
    is_packed_layer,
    multiply,
    pack_layer,
    unpack_layer,
    warm_up,
)

_base: Any = import_module("vllm.model_executor.layers.quantization.base_config")
_config: Any = import_module("vllm.config")
_linear: Any = import_module("vllm.model_executor.layers.linear")
_logger: Any = import_module("vllm.logger")
_reload: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
_vocab: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")

if TYPE_CHECKING:
    LinearMethodBase: Any = object
    QuantizeMethodBase: Any = object
else:
    LinearMethodBase = _linear.LinearMethodBase
    QuantizeMethodBase = _base.QuantizeMethodBase

__all__ = ["PackedEmbeddingMethod", "PackedLinearMethod", "is_plain_linear"]

_LOGGER: Any = _logger.init_logger("vllm.packhorse")
_DONE = "_already_called_process_weights_after_loading"  # vLLM's own name


def is_plain_linear(layer: Any) -> bool:
    """Whether a layer only multiplies. Subclasses elsewhere, such as routers of experts, may use
    the weight in any way."""
    return bool(type(layer).__module__ == _linear.LinearBase.__module__)


class _Packing:
    """What both methods share. `plain` is vLLM's own method, for layers that do not gain."""

    plain: Any
    packs = True

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        vllm_config = _config.get_current_vllm_config()
        self._config, self._prefix = config, prefix
        config.totals.n_expected += 1
        self._is_dummy = vllm_config.load_config.load_format == "dummy"
        self._sizes = _warmed_sizes(vllm_config)

    def create_weights(self, layer: Any, *args: Any, **others: Any) -> None:
        """Makes the plain weight; arguments are those of vLLM's own method."""
        self.plain.create_weights(layer, *args, **others)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weight of a layer that is loaded.

        Raises:
            CorruptionError: the checkpoint does not have the whole weight.
            MissingBackendError, ValueError: as `pack_layer`.
        """
        if getattr(layer, _DONE, False):
            return
        if not self._is_dummy:
            self._require_all(layer)
        totals = self._config.totals
        was_complete = totals.is_complete
        if self.packs and pack_layer(layer, self._config.options, totals, self._prefix):
            warm_up(layer, self._sizes, self._config.warmed)
        else:
            totals.left.setdefault(self._prefix, "is no output layer")
            self.plain.process_weights_after_loading(layer)
        setattr(layer, _DONE, True)
        if totals.is_complete and not was_complete:
            _LOGGER.info("%s", totals)

    def _require_all(self, layer: Any) -> None:
        """vLLM itself does not miss weights of a quantized model, and would take any numbers."""
        if self._n_missing(layer):
            raise incomplete_weight(self._prefix)

    def _n_missing(self, layer: Any) -> int:
        n_rows = getattr(layer, "num_org_embeddings_per_partition", layer.weight.shape[0])
        return int(layer.weight[:n_rows].isnan().any())

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        """The product, as `torch.nn.functional.linear`."""
        if is_packed_layer(layer):
            return multiply(layer, x, bias)
        return self.plain.apply(layer, x, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        """The plain weight: BF16, n_rows x n_columns."""
        return unpack_layer(layer) if is_packed_layer(layer) else layer.weight


class PackedLinearMethod(_Packing, LinearMethodBase):  # type: ignore[misc]
    """Packs the weights of linear layers."""

    def __init__(self, config: Any, prefix: str) -> None:
        """A method for one layer.

        Args:
            config: the model's `PackhorseVllmConfig`.
            prefix: the layer's full name.
        """
        super().__init__(config, prefix)
        self.plain = _linear.UnquantizedLinearMethod()
        self.uses_meta_device = not _offloads(_config.get_current_vllm_config())

    def create_weights(self, layer: Any, *args: Any, **others: Any) -> None:
        """Makes the plain weight, on the meta device if nothing offloads it."""
        if not self.uses_meta_device:
            super().create_weights(layer, *args, **others)
            return
        with torch.device("meta"):
            self.plain.create_weights(layer, *args, **others)
        _reload.initialize_online_processing(layer)

    def _n_missing(self, layer: Any) -> int:
        if not self.uses_meta_device:
            return super()._n_missing(layer)
        found: int = _reload.get_layerwise_info(layer).load_numel
        numel: int = layer.weight.numel()
        return max(numel - found, 0)


class PackedEmbeddingMethod(_Packing, QuantizeMethodBase):  # type: ignore[misc]
    """Packs the weights of embeddings and of output layers.

    Attributes:
        packs: whether the weight is packed. That of an embedding which is the output layer, too,
            is packed only if the output layer says so.
    """

    def __init__(self, config: Any, prefix: str, *, waits: bool = False) -> None:
        """A method for one layer.

        Args:
            config: the model's `PackhorseVllmConfig`.
            prefix: the layer's full name.
            waits: whether the weight stays plain unless `tie_weights` is called with it.
        """
        super().__init__(config, prefix)
        self.plain = _vocab.UnquantizedEmbeddingMethod()
        self.packs = not waits

    def embedding(self, layer: Any, input_: Tensor) -> Any:
        """Rows of the weight, as `torch.nn.functional.embedding`."""
        return (
            embed(layer, input_) if is_packed_layer(layer) else self.plain.embedding(layer, input_)
        )

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """What multiplies in place of an output layer that shares the weight of an embedding: the
        embedding itself if it is packed, or a plain output layer."""
        self._config.totals.n_expected -= 1
        method = embed_tokens.quant_method
        if isinstance(method, PackedEmbeddingMethod):
            method.packs = True
            return embed_tokens
        layer.quant_method = self.plain
        return self.plain.tie_weights(layer, embed_tokens)


def _offloads(vllm_config: Any) -> bool:
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0)


def _warmed_sizes(vllm_config: Any) -> list[int]:
    """Numbers of tokens whose products are run before anything is captured."""
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return sorted({*captured, vllm_config.scheduler_config.max_num_batched_tokens})
