"""Registers the quantization method "packhorse" with vLLM, or one that refuses.

This runs in every process of every server on the machine, and vLLM does not catch errors of it. So
whatever is missing becomes a refusal, which only models that ask for the method see. Registering
twice does nothing new.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from packhorse.device.model_config import METHOD
from packhorse.errors import CompatibilityError
from packhorse.integrations.serving import lacks, refusing_config, require_version

__all__ = ["NEWEST", "OLDEST", "register"]

# 0.32 was run; all that is used here has the same signatures in 0.33, which needs a GPU.
OLDEST, NEWEST = (0, 32), (0, 33)


def register() -> None:
    """Adds the method to vLLM's table."""
    quantization: Any = import_module("vllm.model_executor.layers.quantization")
    base: Any = import_module(
        "vllm.model_executor.layers.quantization.base_config"
    ).QuantizationConfig
    vllm: Any = import_module("vllm")
    try:
        require_version("vLLM", str(vllm.__version__), OLDEST, NEWEST)
        config = import_module("packhorse.integrations.vllm.config").PackhorseVllmConfig
    except CompatibilityError as error:
        config = refusing_config(base, str(error))
    except (ImportError, AttributeError) as error:
        config = refusing_config(base, lacks("vLLM", str(vllm.__version__), error))
    quantization.register_quantization_config(METHOD)(config)
