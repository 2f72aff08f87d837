"""The quantization method "packhorse" of SGLang.

SGLang makes all layers plain, fills them, and then lets the method process one after the other. So
the whole plain model is in memory while it loads, and three quarters of it afterwards. Linear
layers and an output layer of its own are packed; embeddings, also those that are the output layer,
and experts of a mixture stay plain.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from packhorse.integrations.packed_folders import plain_tensors
from packhorse.integrations.serving import (
    CommonConfig,
    PackingTotals,
    ServingOptions,
    incomplete_weight,
    is_packed_layer,
    multiply,
    pack_layer,
    require_platform,
)

_base: Any = import_module("sglang.srt.layers.quantization.base_config")
_linear: Any = import_module("sglang.srt.layers.linear")
_plain: Any = import_module("sglang.srt.layers.quantization.unquant")
_utils: Any = import_module("sglang.srt.utils")
_vocab: Any = import_module("sglang.srt.layers.vocab_parallel_embedding")

if TYPE_CHECKING:
    LinearMethodBase: Any = object
    QuantizationConfig: Any = object
else:
    LinearMethodBase = _base.LinearMethodBase
    QuantizationConfig = _base.QuantizationConfig

__all__ = ["PackedMethod", "PackhorseSglangConfig", "read_packed"]

_OF_SGLANG = ("packed_modules_mapping", "hf_config")  # what SGLang adds to a config


class PackhorseSglangConfig(CommonConfig, QuantizationConfig):  # type: ignore[misc]
    """What `--quantization packhorse` means for one model.

    Attributes:
        options: how layers are packed.
        totals: what was packed so far, in this process.
        widths: columns of the layers of the model.
    """

    def __init__(self, options: ServingOptions | None = None) -> None:
        """Options for a model.

        Args:
            options: None for the default ones.

        Raises:
            CompatibilityError: the platform is neither an NVIDIA GPU nor the host.
        """
        super().__init__()
        require_platform(_utils.is_cuda() or _utils.is_cpu(), "this platform")
        self.options = options or ServingOptions()
        self.totals = PackingTotals()
        self.widths: set[int] = set()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackhorseSglangConfig:
        """The method with the options of a `quantization_config`.

        Raises:
            ValueError, CompatibilityError: as `ServingOptions.from_config`.
        """
        given = {name: value for name, value in config.items() if name not in _OF_SGLANG}
        found = cls(ServingOptions.from_config(given))
        found.packed_modules_mapping = config.get("packed_modules_mapping") or {}
        return found

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """How the weight of a layer is kept.

        Args:
            layer: the layer, not finished yet.
            prefix: its full name.

        Returns:
            The method; None for SGLang's own.
        """
        if isinstance(layer, _vocab.VocabParallelEmbedding):
            self.widths.add(layer.embedding_dim)
            is_head = isinstance(layer, _vocab.ParallelLMHead)
            if not is_head or not self.options.lm_head or self.options.skips(prefix):
                return None
            return PackedMethod(self, prefix, _plain.UnquantizedEmbeddingMethod())
        if not isinstance(layer, _linear.LinearBase):
            return None
        self.widths.add(layer.input_size)
        plain = _plain.UnquantizedLinearMethod()
        parts = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        stays = (
            layer.params_dtype != torch.bfloat16
            or type(layer).__module__ != _linear.LinearBase.__module__
            or self.options.skips(prefix, parts)
        )
        return plain if stays else PackedMethod(self, prefix, plain)


class PackedMethod(LinearMethodBase):  # type: ignore[misc]
    """Packs the weight of one layer.

    Attributes:
        config: the model's `PackhorseSglangConfig`.
        packs: whether the weight is packed; not if another layer shares it.
    """

    def __init__(self, config: Any, prefix: str, plain: Any) -> None:
        """A method for one layer.

        Args:
            config: the model's `PackhorseSglangConfig`.
            prefix: the layer's full name.
            plain: SGLang's own method for it.
        """
        super().__init__()
        self.config, self.packs = config, True
        self._prefix, self._plain = prefix, plain

    def create_weights(self, layer: Any, *args: Any, **others: Any) -> None:
        """Makes the plain weight; arguments are those of SGLang's own method."""
        self._plain.create_weights(layer, *args, **others)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weight of a layer that is loaded.

        Raises:
            CorruptionError: the checkpoint does not have the whole weight.
            MissingBackendError, ValueError: as `pack_layer`.
        """
        if is_packed_layer(layer) and layer.weight.dtype == torch.uint8:
            return
        n_rows = getattr(layer, "num_org_embeddings_per_partition", layer.weight.shape[0])
        if bool(layer.weight[:n_rows].isnan().any()):
            raise incomplete_weight(self._prefix)
        if self.packs and pack_layer(layer, self.config.options, self.config.totals, self._prefix):
            return
        if hasattr(self._plain, "process_weights_after_loading"):
            self._plain.process_weights_after_loading(layer)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Refuses new weights for a model that is running.

        Raises:
            NotImplementedError: always, for a packed layer.
        """
        if is_packed_layer(layer):
            raise NotImplementedError(
                f"{self._prefix}: is packed, and cannot get new weights while the server runs: "
                "restart the server with them"
            )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        """The product, as `torch.nn.functional.linear`."""
        if is_packed_layer(layer):
            return multiply(layer, x, bias)
        return self._plain.apply(layer, x, bias)


def read_packed(model: Any, weights: Any, target_device: Any) -> Any:
    """A hook before SGLang fills a model: tensors of packed folders become plain ones.

    Args:
        model: the model.
        weights: names and tensors.
        target_device: where the model will be.

    Returns:
        The arguments for SGLang's function; None to leave them as they are.
    """
    layers = [(each, getattr(each, "quant_method", None)) for each in model.modules()]
    packed = [(each, method) for each, method in layers if isinstance(method, PackedMethod)]
    if not packed:
        return None
    owners: dict[int, int] = {}
    for each, _ in layers:
        weight = each._parameters.get("weight")
        if weight is not None:
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for each, method in packed:
        method.packs = owners[id(each._parameters["weight"])] == 1
    widths = packed[0][1].config.widths
    return (model, plain_tensors(weights, widths), target_device), {}
