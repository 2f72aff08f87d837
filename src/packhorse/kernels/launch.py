"""Functions that all launchers share: they find how kernels run on a device, and check arguments.

Triton's interpreter has no inline assembly, and its products of BF16 are wrong, because it
multiplies the bit patterns as integers. Kernels take two constants, `ASSEMBLY` and `UPCAST`, that
say whether this applies.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from triton import knobs

from packhorse.kernels.early_launch import is_offered
from packhorse.kernels.vendor import has_waiting_products, is_nvidia

__all__ = [
    "MIN_SHARED_NBYTES",
    "Dialect",
    "Limits",
    "ceil_div",
    "choose_dialect",
    "device_of",
    "limits_of",
    "require_tensor",
    "runs_on",
]

# Shared memory that a program may have on any GPU whose tensor cores take BF16: the smallest value
# in NVIDIA's tables.
MIN_SHARED_NBYTES = 99 << 10
_NOWHERE = nullcontext()


class Dialect(NamedTuple):
    """What the compiler of kernels can do.

    Attributes:
        assembly: inline PTX may be used.
        upcast: BF16 must become FP32 before it is multiplied.
        early: kernels may start while the kernel before them still runs.
        shares: all warps of a program may share the columns of a product.
    """

    assembly: bool
    upcast: bool
    early: bool = False
    shares: bool = False


class Limits(NamedTuple):
    """The size of a GPU.

    Attributes:
        n_processors: multiprocessors.
        shared_nbytes: shared memory that a program may have.
    """

    n_processors: int
    shared_nbytes: int


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up. Triton's own function would cost every launch microseconds."""
    return -(-a // b)


def choose_dialect(device: torch.device) -> Dialect:
    """The dialect for kernels that are launched on a device."""
    if knobs.runtime.interpret:
        return Dialect(assembly=False, upcast=True, shares=True)
    return _dialect_of(device)


@cache  # asking the driver takes as long as a launch
def _dialect_of(device: torch.device) -> Dialect:
    capability = torch.cuda.get_device_capability(device) if is_nvidia() else (0, 0)
    early = is_offered(capability)
    shares = has_waiting_products(10 * capability[0] + capability[1])
    return Dialect(assembly=is_nvidia(), upcast=False, early=early, shares=shares)


@cache
def limits_of(device: torch.device) -> Limits:
    """The size of a GPU. For the host, and for a size that PyTorch does not report, the values are
    safe ones."""
    if device.type != "cuda":
        return Limits(132, MIN_SHARED_NBYTES)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", MIN_SHARED_NBYTES)
    return Limits(found.multi_processor_count, max(shared, MIN_SHARED_NBYTES))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, on which kernels are launched."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(tensor.device)


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run on a device: it must be an NVIDIA GPU, unless Triton's interpreter is
    used."""
    return (device.type == "cuda" and is_nvidia()) or bool(knobs.runtime.interpret)


def require_tensor(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Checks an argument of a launcher.

    Raises:
        TypeError: the tensor has another dtype.
        ValueError: it has another shape, is on another device, or is not contiguous.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must have {dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; copy it first")
