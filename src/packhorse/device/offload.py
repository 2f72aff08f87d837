"""Packed weights under the hooks of Hugging Face accelerate, which keep weights in host memory and
bring each to its device while its module runs.

A hook finds weights by their names in a state dict, where a packed weight is five arrays. So this
module gives the hook the packed weight as a whole beside its arrays. Nothing is copied, and
accelerate need not be installed: the hook is `module._hf_hook`, and has a mapping `weights_map`.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import array_names, join_arrays

__all__ = ["HOOK", "join_offloaded", "offloaded_weight", "require_weights"]

HOOK = "_hf_hook"
_ARRAYS = array_names("weight").values()


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that bring weights."""
    hook = getattr(module, HOOK, None)
    for each in getattr(hook, "hooks", [hook]):
        if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
            yield each


def join_offloaded(module: nn.Module) -> None:
    """Gives hooks the packed weight instead of its arrays, which are checked.

    Args:
        module: a module with a packed weight, with hooks or without.

    Raises:
        CorruptionError: the arrays that a hook has break the format.
    """
    for hook in _hooks(module):
        stored = hook.weights_map
        if isinstance(stored.get("weight"), PackedWeight):
            continue
        if not all(name in stored for name in _ARRAYS):
            continue
        arrays = {name: stored[name] for name in _ARRAYS}
        shape = module.weight.shape
        assert isinstance(shape, torch.Size)
        weight = join_arrays(arrays, "weight", shape[1])
        if isinstance(module, nn.Embedding) and weight is not None:
            weight.prepare_gather()
        hook.weights_map = ChainMap({"weight": weight}, stored)


def offloaded_weight(module: nn.Module) -> PackedWeight | None:
    """The packed weight that hooks keep in host memory; None if they keep none.

    Raises:
        CorruptionError: as `join_offloaded`.
    """
    join_offloaded(module)  # hooks may have come since, and the module did not run yet
    for hook in _hooks(module):
        weight = hook.weights_map.get("weight")
        if isinstance(weight, PackedWeight):
            return weight
    return None


def require_weights(modules: Mapping[str, nn.Module]) -> None:
    """Checks that modules hold their weights themselves.

    Args:
        modules: modules with packed weights, by their names in the model.

    Raises:
        ValueError: hooks keep the weight of one.
    """
    for name, module in modules.items():
        if offloaded_weight(module) is not None:
            raise ValueError(
                f"the weight of {name} is offloaded by accelerate; call "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
            )
