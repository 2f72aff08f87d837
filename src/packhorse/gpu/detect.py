"""What PyTorch reports about a GPU of this machine: its model, and the identity under which its
figures are kept."""

from dataclasses import replace
from typing import Any

import torch
import triton

from packhorse._version import __version__
from packhorse.gpu.figure_cache import Identity
from packhorse.gpu.models import GENERIC, MEMORY_SHARE, DeviceModel, model_of, scale_model

__all__ = ["describe_device", "identify"]


def identify(device: torch.device) -> Identity:
    """The GPU's identity and the versions for which figures measured on it are valid."""
    found = torch.cuda.get_device_properties(device)
    return Identity(found.name, found.multi_processor_count, triton.__version__, __version__)


def describe_device(device: torch.device) -> DeviceModel:
    """The model of a GPU, from the presets, or else from what its driver reports."""
    if device.type != "cuda":
        return GENERIC
    found = torch.cuda.get_device_properties(device)
    model = replace(model_of(found.name), capability=found.major * 10 + found.minor)
    if model.name == GENERIC.name:
        shared = getattr(found, "shared_memory_per_multiprocessor", GENERIC.shared_nbytes)
        model = replace(
            model, shared_nbytes=shared, l2_nbytes=getattr(found, "L2_cache_size", model.l2_nbytes)
        )
    return scale_model(model, found.multi_processor_count, _reported_bandwidth(found))


def _reported_bandwidth(found: Any) -> float | None:
    """Bytes a second, computed from the clock and width of the memory; None if PyTorch does not
    report them."""
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 * MEMORY_SHARE or None
