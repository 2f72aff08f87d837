"""Packed weights as a quantization method of Hugging Face transformers, called "packhorse".

`from_pretrained(..., quantization_config=PackhorseConfig())` packs each weight of the checkpoint
before it reads the next. `save_pretrained` writes the arrays (docs/format.md, section 12), and a
folder with arrays is checked and loaded as it is. Importing this module registers the method; users
import it as `packhorse.transformers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import Parameter

from packhorse.device.formats import (
    StaysPlain,
    check_tokens,
    pack_if_smaller,
    require_speeds,
    resolve_format_or_auto,
)
from packhorse.device.model import (
    WeightChoice,
    check_embeddings,
    hold_packed_weights,
    host_embeddings_,
    report_model,
    unpack_model_,
)
from packhorse.device.model_config import IN_HOST, METHOD, keep_names_in_files
from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import join_arrays
from packhorse.device.report import PackReport
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.gpu.host_embeddings import embedding_host
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import WEIGHT_VERSION

# The modules of these names differ between releases, and none of them has types.
_auto: Any = import_module("transformers.quantizers.auto")
_loading: Any = import_module("transformers.core_model_loading")

if TYPE_CHECKING:
    QuantizationConfigMixin: Any = object
    HfQuantizer: Any = object
    ConversionOps: Any = object
else:
    QuantizationConfigMixin = _auto.QuantizationConfigMixin
    HfQuantizer = _auto.HfQuantizer
    ConversionOps = _loading.ConversionOps

__all__ = ["VERSION", "PackhorseConfig", "PackhorseQuantizer"]

VERSION = WEIGHT_VERSION  # of the arrays and of their description in config.json
_STORED_FORMAT = "fmt"  # the key of the format in a config.json
_OPTIONS = {"format", "modules_to_not_convert", "lm_head", "embeddings", "for_tokens"}
_OPTIONS |= {"quant_method", "version"}  # in a config.json alone
_PACKED_SHARE = 0.76  # of the bytes of a BF16 weight, at most, for models that gain
_WEIGHT = "weight$"  # a pattern for names of plain weights, and of high bits of packed ones
_SPLIT = (
    "packed weights cannot be split over processes; load the model without tp_plan and "
    "distributed_config"
)


class PackhorseConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How `from_pretrained` packs a model. The config.json of a packed model holds it.

    Attributes:
        format: "auto", "W12" or "W11", as for `pack_model_`.
        modules_to_not_convert: names of modules that stay plain, with all below them: whole names
            or their last parts; `*` and `?` stand for any characters.
        lm_head: whether to pack the output layer. An embedding that shares its weight is packed
            with it.
        embeddings: whether to pack embeddings; None for only the input embedding; "host" to put
            them into memory of the host, as for `pack_model_`, once the model is loaded. Then
            the model may have another dtype than BF16; its other weights stay plain.
        for_tokens: None, or the usual number of tokens that are multiplied at once. Then a layer is
            packed only if its GPU is as fast with the packed weight, as for `pack_model_`.
        version: of the format.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from packhorse.transformers import PackhorseConfig
        >>> config = PackhorseConfig(modules_to_not_convert=["down_proj"])
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     "llama", dtype=torch.bfloat16, quantization_config=config
        ... )
        >>> len(model.hf_quantizer.report.packed), len(model.hf_quantizer.report.left)
        (14, 2)
    """

    def __init__(
        self,
        format: str = "auto",
        modules_to_not_convert: Iterable[str] | None = None,
        lm_head: bool = True,
        embeddings: bool | str | None = None,
        for_tokens: int | None = None,
        **stored: Any,
    ) -> None:
        """Options for loading.

        Args:
            format: see above.
            modules_to_not_convert: see above.
            lm_head: see above.
            embeddings: see above.
            for_tokens: see above.
            stored: `quant_method` and `version` of a config.json.

        Raises:
            ValueError: an option is unknown, or has a wrong value.
            CompatibilityError: a later release has packed the model.
        """
        self.quant_method = stored.pop("quant_method", METHOD)
        self.version = stored.pop("version", VERSION)
        if self.version != VERSION:
            raise CompatibilityError(
                f"the model is packed in version {self.version!r} of weights in memory; this "
                f"release reads version {VERSION}: upgrade packhorse"
            )
        if stored:
            raise ValueError(f"PackhorseConfig has no option {', '.join(map(repr, stored))}")
        resolve_format_or_auto(format)
        self.format = format
        self.modules_to_not_convert = _check_names(modules_to_not_convert)
        if not isinstance(lm_head, bool):
            raise ValueError(f"lm_head is {lm_head!r}; it must be True or False")
        check_embeddings(embeddings)
        self.lm_head, self.embeddings = lm_head, embeddings
        check_tokens(for_tokens)
        self.for_tokens = for_tokens

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **others: Any
    ) -> Any:
        """A config from the dict of a config.json, in which the key of the format is `fmt`.

        Args:
            config_dict: options by name.
            return_unused_kwargs: whether to return what is not an option, too.
            others: further options, which win over the dict.

        Returns:
            The config; or the config and a dict of what is not an option.

        Raises:
            ValueError: an option has a wrong value, or the dict has an unknown one, which would not
                be returned.
            CompatibilityError: a later release has packed the model.
        """
        options = dict(config_dict)
        if "format" not in options and _STORED_FORMAT in options:
            options["format"] = options.pop(_STORED_FORMAT)
        options |= {name: others.pop(name) for name in _OPTIONS if name in others}
        if not return_unused_kwargs:
            return cls(**options)
        unknown = {name: options.pop(name) for name in [*options] if name not in _OPTIONS}
        return cls(**options), unknown | others

    def to_dict(self) -> dict[str, Any]:
        """The dict for a config.json, in which the key of the format is `fmt`."""
        return {_STORED_FORMAT if k == "format" else k: v for k, v in super().to_dict().items()}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """The pairs of `to_dict`, for `dict(config)`."""
        return iter(self.to_dict().items())


def _check_names(names: Iterable[str] | None) -> list[str]:
    if isinstance(names, str):
        raise ValueError(f"modules_to_not_convert is {names!r}; it must be a list of names")
    listed = list(names or ())
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"modules_to_not_convert has {name!r}, which is not a name")
    return listed


class PackhorseQuantizer(HfQuantizer):  # type: ignore[misc]
    """Does the packing when transformers loads, saves and unpacks a model; `model.hf_quantizer`.

    Attributes:
        report: the packed and the plain weights, with reasons; None before the model is loaded.
    """

    requires_calibration = False

    def __init__(self, quantization_config: PackhorseConfig, **options: Any) -> None:
        """transformers makes it."""
        super().__init__(quantization_config, **options)
        self.report: PackReport | None = None
        self._wanted: dict[str, bool] = {}  # by parameter name: whether a layer multiplies
        self._shapes: dict[str, torch.Size] = {}
        self._reasons: dict[str, str] = {}
        self._failure: Exception | None = None

    # Before loading.

    def validate_environment(self, *args: Any, device_map: Any = None, **others: Any) -> None:
        """Raises early the errors that would otherwise occur only after all weights are read.

        Raises:
            MissingBackendError: `for_tokens` is given, but Triton is not installed.
            ValueError: the device map leaves weights on the disk; or, with `for_tokens`, on the
                host, where the speed of packed weights is unknown.
        """
        if isinstance(device_map, dict):
            _refuse_disk(device_map)
        if self.quantization_config.for_tokens is None or self.pre_quantized:
            return
        homes = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(home is None or str(home) == "cpu" for home in homes):
            _require_gpu()

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself.

        Raises:
            ValueError: it is not BF16, and no rows of another dtype go to memory of the host.
        """
        if self.quantization_config.embeddings != IN_HOST:
            _require_bfloat16(dtype)
        return dtype

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes that an element will take."""
        share = _PACKED_SHARE if param_name in self._wanted else 1.0
        return share * param.element_size()

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        """Whether a plain parameter will be packed. For all others, transformers compares the
        shapes of the checkpoint and of the model."""
        return not self.pre_quantized and param_name in self._wanted

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The dtype to which transformers converts a tensor of a packed checkpoint: `dtype` if it
        has floats, and None, which means no conversion, for arrays of packed weights."""
        if hasattr(param, "get_dtype"):  # a slice of a file
            return dtype if param.get_dtype().startswith(("F", "BF")) else None
        return dtype if param.is_floating_point() else None

    def _process_model_before_weight_loading(
        self, model: Any, *, checkpoint_files: Iterable[str] | None = None, **others: Any
    ) -> Any:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(_SPLIT)
        _refuse_doubles(checkpoint_files or ())
        if model.dtype == torch.bfloat16:
            self._wanted = self._choose(model).wanted_names(model.all_tied_weights_keys)
        self._shapes = {name: each.shape for name, each in model.named_parameters()}
        return model

    def _choose(self, model: nn.Module) -> WeightChoice:
        config = self.quantization_config
        return WeightChoice(
            model,
            skip=_matching(model, config.modules_to_not_convert),
            embeddings=config.embeddings,
            lm_head=config.lm_head,
        )

    # While loading.

    def get_quantize_ops(self) -> _Pack:
        """Packs a parameter."""
        return _Pack(self)

    def get_weight_conversions(self) -> list[Any]:
        """Joins the arrays of packed weights. This also applies to checkpoints whose config.json
        does not mention them: transformers would otherwise fill these layers with random
        numbers."""
        fields = [f"weight.{field}" for field in WeightTensors._fields]
        return [_loading.WeightConverter([*fields, _WEIGHT], "weight", operations=[_Join(self)])]

    def pack(self, model: nn.Module, name: str, plain: Tensor) -> Tensor:
        """A weight of a checkpoint, packed if the config wants that and it saves memory."""
        if name not in self._wanted or plain.dtype != torch.bfloat16 or self._failure:
            return plain
        try:
            expected = model.get_parameter(name)
            _refuse_split(expected, self._shapes, name)
            if plain.shape != expected.shape:
                return self._mismatched(name, plain)
            config = self.quantization_config
            for_tokens = config.for_tokens if self._wanted[name] else None
            packed = pack_if_smaller(plain, resolve_format_or_auto(config.format), for_tokens)
        except Exception as error:
            self.note_failure(error)
            return plain
        if isinstance(packed, StaysPlain):
            self._reasons[name] = packed.reason
            return plain
        return Parameter(packed, requires_grad=False)

    def join(self, model: nn.Module, name: str, arrays: Mapping[str, list[Tensor]]) -> Tensor:
        """A packed weight from the arrays of a checkpoint, which are checked."""
        expected = model.get_parameter(name)
        try:
            if not self.pre_quantized:  # transformers treats the arrays as plain numbers
                raise CompatibilityError(
                    f"{name}: is packed in this folder, but its config.json does not say so: add "
                    f'"quantization_config": {{"quant_method": "{METHOD}"}} there'
                )
            _require_bfloat16(expected.dtype)
            _refuse_split(expected, self._shapes, name)
            joined = _join(name, arrays, expected.shape)
            if joined.shape != expected.shape:
                return self._mismatched(name, torch.empty(joined.shape, dtype=joined.dtype))
            return Parameter(joined, requires_grad=False)
        except Exception as error:
            self.note_failure(error)
            return torch.empty_like(expected, device="cpu", requires_grad=False)

    def _mismatched(self, name: str, found: Tensor) -> Tensor:
        """Leaves a tensor of another shape than in the model to transformers, which raises an
        error, or starts the weight anew if `ignore_mismatched_sizes` is given."""
        self._wanted.pop(name, None)
        self._reasons[name] = "has another shape in the checkpoint"
        return found

    def note_failure(self, error: Exception) -> None:
        """Keep the first error until the model is loaded. If it were raised earlier, transformers
        would log it and continue with random numbers."""
        self._failure = self._failure or error

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        _require_shapes(model, self._shapes)
        _refuse_disk(getattr(model, "hf_device_map", {}))
        hold_packed_weights(model)
        # New layers, such as the head of a classifier, are for training.
        otherwise = "plain in the checkpoint" if self.pre_quantized else "not in the checkpoint"
        choice = self._choose(model)
        host_embeddings_(model, choice)
        self.report = report_model(model, choice, self._reasons, otherwise)
        _forget_own_conversions(model)
        keep_names_in_files(model)
        return model

    # Afterwards.

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        plain = [each for each in model.parameters() if not isinstance(each, PackedWeight)]
        names = [n for n, each in model.named_parameters() if isinstance(each, PackedWeight)]
        hosted = embedding_host().hosted(model)
        names += [f"{name}.weight" for shared in hosted for name in shared.split(" = ")]
        unpack_model_(model)
        # `from_pretrained` leaves weights trainable, but a partly frozen model stays partly frozen.
        if all(parameter.requires_grad for parameter in plain):
            for name in names:
                model.get_parameter(name).requires_grad_(True)
        # transformers passes the dtype of the config, which is a name if the model was saved.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if dtype in (None, torch.bfloat16) else nn.Module.to(model, dtype)

    def is_serializable(self, *args: Any, **others: Any) -> bool:
        """State dicts hold the arrays as plain tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients reach inputs and biases, so that adapters can train."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The operators have fake implementations."""
        return True


def _refuse_doubles(files: Iterable[str]) -> None:
    """Refuses files with two forms of a weight, because transformers would silently use the last
    one.

    Raises:
        CorruptionError: a weight is both packed and plain.
    """
    counts: Counter[str] = Counter()
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                counts.update(opened.keys())
    suffix = f".{WeightTensors._fields[0]}"
    for name in sorted(each.removesuffix(suffix) for each in counts if each.endswith(suffix)):
        if counts[name] + counts[f"{name}.high_bits"] > 1:
            raise CorruptionError(f"{name}: is both packed and plain here; remove one of the two")


def _require_bfloat16(dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise ValueError(
            f"packed weights are BF16, but the model would be {dtype}; pass "
            "dtype=torch.bfloat16 to from_pretrained"
        )


def _require_gpu() -> None:
    try:
        require_speeds(torch.device("cpu"))
    except ValueError as error:
        raise ValueError(
            'for_tokens needs the model on a GPU: pass device_map="cuda" to from_pretrained, or '
            "leave out for_tokens"
        ) from error


def _refuse_disk(device_map: Mapping[str, Any]) -> None:
    if "disk" in map(str, device_map.values()):
        raise ValueError(
            "the device map puts modules on the disk, where packed weights cannot be offloaded: "
            "put them on GPUs or the host, with more max_memory for 'cpu' if device_map is 'auto'; "
            "or load the whole model to the host, then call accelerate.disk_offload(model, folder)"
        )


def _matching(model: nn.Module, names: list[str]) -> list[str]:
    """Patterns for the whole names of modules.

    Raises:
        ValueError: no module has one of the names.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found = []
    for name in names:
        patterns = [
            pattern
            for pattern in (name, f"*.{name}")
            if any(fnmatchcase(module, pattern) for module in modules)
        ]
        if not patterns:
            raise ValueError(
                f"modules_to_not_convert names {name!r}, but the model has no such module"
            )
        found += patterns
    return found


def _refuse_split(parameter: Tensor, shapes: Mapping[str, torch.Size], name: str) -> None:
    if hasattr(parameter, "_local_tensor") or parameter.shape != shapes.get(name, parameter.shape):
        raise ValueError(f"{name}: {_SPLIT}")


def _require_shapes(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """transformers 5.0 does not compare shapes if there is a quantizer."""
    for name, parameter in model.named_parameters():
        expected = shapes.get(name, parameter.shape)
        if parameter.shape != expected:
            raise ValueError(
                f"{name}: has shape {list(parameter.shape)} in the checkpoint, but "
                f"{list(expected)} in the model: the config belongs to another model, or "
                "ignore_mismatched_sizes needs a later release of transformers"
            )


def _join(name: str, arrays: Mapping[str, list[Tensor]], shape: torch.Size) -> PackedWeight:
    if len(shape) != 2:
        raise CorruptionError(f"{name}: packed weight: its shape in the model is {list(shape)}")
    state = {}
    for key, tensors in arrays.items():
        if len(tensors) != 1:
            raise CorruptionError(f"{name}: packed weight: there are {len(tensors)} of {key}")
        (array,) = tensors
        if key != _WEIGHT:
            state[f"{name}.{key.rpartition('.')[2]}"] = array
        elif array.dim() == 3 and array.is_floating_point():
            state[name] = array.to(torch.uint8)  # transformers 5.0 has made BF16 of these bytes
        else:
            state[name] = array
    joined = join_arrays(state, name, shape[1])
    assert joined is not None, "transformers has found some of the arrays"
    return joined


def _forget_own_conversions(model: Any) -> None:
    """Saving must not undo what `_Join` has done: state dicts have arrays already."""
    model._weight_conversions = [
        conversion
        for conversion in getattr(model, "_weight_conversions", None) or []
        if not any(isinstance(each, _Join) for each in getattr(conversion, "operations", []))
    ]


class _Operation(ConversionOps):  # type: ignore[misc]
    """A conversion of the quantizer. Copying it returns the same object, so that it keeps the
    quantizer."""

    def __init__(self, quantizer: PackhorseQuantizer) -> None:
        self.hf_quantizer = quantizer  # because of this name, transformers leaves dtypes alone

    def __deepcopy__(self, memo: dict[int, Any]) -> _Operation:
        return self


class _Pack(_Operation):
    """Packs weights as they are read."""

    def convert(self, input_dict: dict[str, Any], *, model: Any, **others: Any) -> dict[str, Any]:
        """The names and tensors for the model."""
        packed = {}
        for name, value in input_dict.items():
            plain = value[0] if isinstance(value, list) else value
            packed[name] = self.hf_quantizer.pack(model, name, plain)
        return packed


class _Join(_Operation):
    """Makes packed weights from their arrays, and passes plain weights on."""

    def convert(
        self, input_dict: dict[str, Any], *, model: Any, full_layer_name: str, **others: Any
    ) -> dict[str, Any]:
        """The name of the weight, and the weight."""
        if list(input_dict) == [_WEIGHT] and input_dict[_WEIGHT][0].dtype != torch.uint8:
            return {full_layer_name: input_dict[_WEIGHT]}
        return {full_layer_name: self.hf_quantizer.join(model, full_layer_name, input_dict)}


_auto.register_quantization_config(METHOD)(PackhorseConfig)
_auto.register_quantizer(METHOD)(PackhorseQuantizer)
