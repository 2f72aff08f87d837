"""Moves the planes of a model's packed weights to host memory, for models that are larger than the
memory of a GPU.

Weights are moved one after the other, and each leaves its former place before the next one is
moved. All else that the model has, such as norms, biases and the small arrays of packed weights,
goes to the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from packhorse.device.crossover import kept_crossover
from packhorse.device.host_planes import HostPlanes, planes_nbytes
from packhorse.device.linear import hold_packed
from packhorse.device.offload import require_weights
from packhorse.device.packed_weight import PackedWeight
from packhorse.device.report import PlacedWeight, PlacementReport
from packhorse.device.weight_groups import WeightGroup, weight_groups
from packhorse.gpu.copy_ring import CopyRing
from packhorse.gpu.cuda_runtime import runtime_of

__all__ = ["offload_model_"]


def offload_model_(
    model: nn.Module,
    device: torch.device | str = "cuda",
    *,
    keep_nbytes: int = 0,
    view_tokens: int | None = None,
) -> PlacementReport:
    """Runs a packed model on a GPU while most of its weights lie in host memory, packed.

    Products with few tokens read weights where they are. For products with more tokens, weights are
    copied to a ring of two buffers in device memory, each while the layer before it runs. Of
    embeddings, only the rows that are looked up are read. Results are those of the same model in
    device memory, bit for bit.

    The model is changed in place, and its weights have the device's name: `model.to` leaves them
    where they are, unless it is given another device. Call it again to move weights in either
    direction.

    Args:
        model: with packed weights, on any device.
        device: the CUDA device to run it on. With "cpu", weights move to memory of the same kind,
            and everything is computed on the host; for tests.
        keep_nbytes: bytes of packed weights that stay in device memory: the first linear layers
            of the model for which they suffice, then embeddings.
        view_tokens: products with at most so many tokens read weights where they are; None for
            what `calibrate_offload` has measured on this GPU, or else 16, which is an estimate.

    Returns:
        Where the packed weights are now; `print` shows a table.

    Raises:
        TypeError: the model is not a module.
        ValueError: it has no packed weights, accelerate holds some of them, or an argument is
            negative; or CUDA refuses to let the GPU read host memory.
        MissingBackendError: PyTorch finds no such GPU.
        MemoryError: the host has no memory left for a weight. Weights before it have been moved.
        RuntimeError: the device has no memory for the ring, or for what goes there.

    Example:
        >>> import torch
        >>> from packhorse.device import offload_model_, pack_model_
        >>> layers = [torch.nn.Linear(512, 256), torch.nn.Linear(256, 512)]
        >>> model = torch.nn.Sequential(*layers).to(torch.bfloat16).eval()
        >>> report = pack_model_(model)
        >>> placed = offload_model_(model, "cpu", keep_nbytes=200_000)
        >>> [weight.is_on_host for weight in placed.weights]
        [False, True]
    """
    target = torch.device(device)
    runtime_of(target)  # refuses devices that cannot be used
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    tokens = kept_crossover(target) if view_tokens is None else view_tokens
    if keep_nbytes < 0 or tokens < 0:
        raise ValueError(
            f"keep_nbytes is {keep_nbytes} and view_tokens is {tokens}; neither may be negative"
        )
    groups = _packed_groups(model)
    moved = _choose(groups, keep_nbytes)
    multiplied = [group for group in moved if group.is_multiplied]
    sizes = [planes_nbytes(_weight(group).stored_arrays) for group in multiplied]
    for planes in (_weight(group).host_planes for group in groups):
        if planes is not None:
            planes.use_ring(None, 0)  # the former ring leaves the device before the new one comes
    ring = CopyRing(max(sizes), target) if sizes else None
    order = []
    for group in groups:
        if group not in moved:
            _bring_back(group)
        elif group not in multiplied:
            _move(group, target, None, tokens)
        else:
            order.append(_move(group, target, ring, tokens))
    if ring is not None:
        ring.expect(order)
    if any(tensor.device != target for tensor in (*model.parameters(), *model.buffers())):
        model.to(target)
    nbytes = 0 if ring is None else ring.nbytes
    return PlacementReport(tuple(map(_placed, groups)), str(target), nbytes, tokens)


def _packed_groups(model: nn.Module) -> list[WeightGroup]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {type(model).__name__}; it must be a torch.nn.Module")
    groups = [each for each in weight_groups(model) if isinstance(each.weight, PackedWeight)]
    if not groups:
        raise ValueError("the model has no packed weights: call pack_model_ first")
    for group in groups:
        require_weights(group.modules)
        if group.weight.is_meta:
            raise ValueError(f"the weight of {group.name} has no data: it is on the meta device")
    return groups


def _weight(group: WeightGroup) -> PackedWeight:
    weight: Any = group.weight
    return weight  # type: ignore[no-any-return]


def _choose(groups: Sequence[WeightGroup], keep_nbytes: int) -> list[WeightGroup]:
    """The weights that go to host memory, in the order of the modules."""
    left, kept = keep_nbytes, set()
    # A look-up takes a few rows of an embedding, so that gains the least from device memory.
    for group in sorted(groups, key=lambda group: not group.is_multiplied):
        nbytes = _weight(group).packed_nbytes
        if nbytes > left:
            break
        left -= nbytes
        kept.add(group)
    return [group for group in groups if group not in kept and group.weight.numel()]


def _move(
    group: WeightGroup, device: torch.device, ring: CopyRing | None, view_tokens: int
) -> HostPlanes:
    weight = _weight(group)
    held = weight.host_planes
    if held is not None and held.device == device:
        held.use_ring(ring, view_tokens)
        return held
    name = f"the weight of {group.name}"
    try:
        planes = HostPlanes(weight.stored_arrays, device, ring, view_tokens, name=name)
    except Exception as error:
        error.add_note(f"{name} was being moved to host memory; those before it have been moved")
        raise
    _hold(group, weight.in_host_memory(planes))
    return planes


def _bring_back(group: WeightGroup) -> None:
    if _weight(group).host_nbytes:
        _hold(group, _weight(group).clone())


def _hold(group: WeightGroup, weight: Any) -> None:
    parameter = Parameter(weight, requires_grad=False)
    for module in group.modules.values():
        hold_packed(module, parameter)


def _placed(group: WeightGroup) -> PlacedWeight:
    weight = _weight(group)
    on_device = weight.arrays[2:] if weight.host_nbytes else weight.arrays
    nbytes = sum(array.nbytes for array in on_device)
    return PlacedWeight(group.name, weight.format.name, weight.host_nbytes, nbytes)
