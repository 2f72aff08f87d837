"""Registers the quantization method "packhorse" with SGLang, or one that refuses.

SGLang's plug-ins add to its tables, and hook functions that it names: this one reads tensors of
packed folders where SGLang loads a model. Registering twice does nothing new.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from packhorse.device.model_config import METHOD
from packhorse.errors import CompatibilityError
from packhorse.integrations.serving import lacks, refusing_config, require_version

__all__ = ["NEWEST", "OLDEST", "register"]

OLDEST, NEWEST = (0, 5, 23), (0, 5, 23)  # whose interfaces were read
_LOADING = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"


def register() -> None:
    """Adds the method to SGLang's tables, and the hook to its loader."""
    choices: Any = import_module("sglang.srt.arg_groups.choices")
    quantization: Any = import_module("sglang.srt.layers.quantization")
    base: Any = import_module("sglang.srt.layers.quantization.base_config").QuantizationConfig
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    version = str(import_module("sglang.version").__version__)
    try:
        require_version("SGLang", version, OLDEST, NEWEST)
        config = import_module("packhorse.integrations.sglang.config")
        method, hook = config.PackhorseSglangConfig, config.read_packed
    except CompatibilityError as error:
        method, hook = refusing_config(base, str(error)), None
    except (ImportError, AttributeError) as error:
        method, hook = refusing_config(base, lacks("SGLang", version, error)), None
    is_new = METHOD not in quantization.QUANTIZATION_METHODS
    for table in (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS):
        table[METHOD] = method
    if not is_new:
        return
    choices.add_quantization_method_choices([METHOD])
    if hook is not None:
        hooks.HookRegistry.register(_LOADING, hook, hooks.HookType.BEFORE)
