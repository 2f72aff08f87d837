"""Packed weights under the hooks of Hugging Face accelerate, which keep weights in host memory or
on the disk, and bring each to its device while its module runs.

A hook finds weights by their names in a state dict, where a packed weight is five arrays. So this
module gives the hook a mapping that has the packed weight beside its arrays. Arrays in memory are
joined once. Arrays on the disk are read and joined each time, so that they take memory only while
their module runs. Accelerate need not be installed: the hook is `module._hf_hook`, and has a
mapping `weights_map`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import array_names, join_arrays

__all__ = ["HOOK", "join_offloaded", "offloaded_weight", "require_weights"]

HOOK = "_hf_hook"
_ARRAYS = array_names("weight")
_SMALL = _ARRAYS["first_exponents"]  # reading it from the disk is cheap


class _JoinedWeights(Mapping[str, Any]):
    """What a hook brings, with the packed weight as a whole under the name `weight`.

    Args:
        stored: has its arrays, in memory or on the disk.
        n_columns: columns of the weight.
        gathers: whether rows of it are looked up.
    """

    def __init__(self, stored: Mapping[str, Any], n_columns: int, gathers: bool) -> None:
        self._stored, self._n_columns, self._gathers = stored, n_columns, gathers
        # What is read from a file is another tensor each time.
        self._kept = self._join() if stored[_SMALL] is stored[_SMALL] else None

    def __getitem__(self, name: str) -> Any:
        if name != "weight":
            return self._stored[name]
        return self._join() if self._kept is None else self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _join(self) -> PackedWeight:
        found = {name: self._stored.get(name) for name in _ARRAYS.values()}
        arrays = {name: array for name, array in found.items() if array is not None}
        weight = join_arrays(arrays, "weight", self._n_columns)
        assert weight is not None  # one array is there
        if self._gathers:
            weight.prepare_gather()
        return weight


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that bring weights."""
    hook = getattr(module, HOOK, None)
    for each in getattr(hook, "hooks", [hook]):
        if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
            yield each


def join_offloaded(module: nn.Module) -> None:
    """Gives hooks the packed weight beside its arrays. These are checked: those in memory now, and
    those on the disk whenever they are read.

    Args:
        module: a module with a packed weight, with hooks or without.

    Raises:
        CorruptionError: the arrays that a hook has in memory break the format.
    """
    for hook in _hooks(module):
        stored = hook.weights_map
        if not isinstance(stored, _JoinedWeights) and _SMALL in stored:
            shape, gathers = module.weight.shape, isinstance(module, nn.Embedding)
            assert isinstance(shape, torch.Size)
            hook.weights_map = _JoinedWeights(stored, shape[1], gathers)


def offloaded_weight(module: nn.Module) -> PackedWeight | None:
    """The packed weight that hooks keep in host memory or on the disk; None if they keep none.

    Raises:
        CorruptionError: its arrays break the format.
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
        maps = [hook.weights_map for hook in _hooks(module)]
        if any(_SMALL in found or "weight" in found for found in maps):
            raise ValueError(
                f"the weight of {name} is offloaded by accelerate; call "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
            )
