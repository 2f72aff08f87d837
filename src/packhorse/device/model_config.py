"""What a transformers model must know of its packed weights, so that `save_pretrained` writes a
folder that loads again.

- Its config names the method, so `from_pretrained` loads the folder as a packed model.
- For some models, files have other names than the model, or hold several weights in one tensor, and
  transformers converts back when it saves. Arrays of packed weights must not be converted so.

transformers need not be installed: a model of transformers is a module with `save_pretrained` and
with a config that has `to_dict`.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch import nn

from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import array_names
from packhorse.gpu.host_embeddings import embedding_host
from packhorse.layout import WEIGHT_VERSION

__all__ = [
    "IN_HOST",
    "METHOD",
    "forget_method",
    "is_saved_with_config",
    "keep_names_in_files",
    "name_method",
]

METHOD = "packhorse"
IN_HOST = "host"
_METHOD_KEY = "quantization_config"
_CONVERSIONS = "_weight_conversions"
_CONVERSIONS_OF_PLAIN = "_packhorse_conversions_of_plain"


def name_method(model: nn.Module, left_plain: Callable[[nn.Module], list[str]]) -> None:
    """Prepares a model that was packed, or the models in it, for `save_pretrained`: what it writes
    loads as it was packed. A config that names another method already is left as it is.

    Args:
        model: any module.
        left_plain: says which embeddings of a model are not in memory of the host, but would be
            when it is loaded and others are.
    """
    if not is_saved_with_config(model):
        for child in model.children():
            name_method(child, left_plain)
        return
    host = embedding_host()
    hosted, packed = host.hosted(model), any(_packed_names(model))
    if packed or hosted:
        config: Any = model.config
        if getattr(config, _METHOD_KEY, None) is None:
            setattr(config, _METHOD_KEY, {"quant_method": METHOD, "version": WEIGHT_VERSION})
        if hosted:
            host.save_plain_(model)
            _note_hosted(getattr(config, _METHOD_KEY), _short_names(model, left_plain(model)))
    if packed:
        keep_names_in_files(model)


def _note_hosted(method: Any, plain: list[str]) -> None:
    """Notes in a method that embeddings go to memory of the host, except for some."""
    if _name_of(method) != METHOD:
        return
    noted = method if isinstance(method, dict) else vars(method)
    noted["embeddings"] = IN_HOST
    if plain:
        before = noted.get("modules_to_not_convert") or ()
        noted["modules_to_not_convert"] = list(dict.fromkeys([*before, *plain]))


def _short_names(model: nn.Module, names: list[str]) -> list[str]:
    """Names that are right for the model without its head, too."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return [name.removeprefix(prefix) for name in names]


def _name_of(method: Any) -> Any:
    named = method.get("quant_method") if isinstance(method, dict) else method
    return getattr(named, "quant_method", named)


def forget_method(model: nn.Module) -> None:
    """Undoes `name_method` for models that have no packed weights any more.

    Args:
        model: any module.
    """
    for module in model.modules():
        if not is_saved_with_config(module) or any(_packed_names(module)):
            continue
        config: Any = module.config
        if _name_of(getattr(config, _METHOD_KEY, None)) == METHOD:
            delattr(config, _METHOD_KEY)
        if hasattr(module, _CONVERSIONS_OF_PLAIN):
            setattr(module, _CONVERSIONS, getattr(module, _CONVERSIONS_OF_PLAIN))
            delattr(module, _CONVERSIONS_OF_PLAIN)


def keep_names_in_files(model: nn.Module) -> None:
    """Makes `save_pretrained` write the arrays of packed weights under the names of the model.

    Args:
        model: a model of transformers.
    """
    conversions = getattr(model, _CONVERSIONS, None)
    if not hasattr(model, _CONVERSIONS_OF_PLAIN):
        setattr(model, _CONVERSIONS_OF_PLAIN, conversions)
    names = list(_packed_names(model))
    # If there is no list, transformers would use the one for the model's class.
    setattr(model, _CONVERSIONS, [c for c in conversions or () if not _would_convert(c, names)])


def is_saved_with_config(module: nn.Module) -> bool:
    """Whether a module is a model that `save_pretrained` writes with its config."""
    config = getattr(module, "config", None)
    return hasattr(module, "save_pretrained") and hasattr(config, "to_dict")


def _packed_names(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, PackedWeight):
            yield name


def _would_convert(conversion: Any, names: list[str]) -> bool:
    """Whether a conversion changes more than names, and applies to packed weights."""
    if not getattr(conversion, "operations", None):
        return False
    backwards = deepcopy(conversion).reverse_transform()
    stored = (key for name in names for key in array_names(name).values())
    return any(backwards.rename_source_key(key)[1] is not None for key in stored)
