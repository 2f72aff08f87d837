"""What all launchers share: how kernels are run, and checks of what they are given.

Triton's interpreter has no inline assembly, and its products of BF16 are wrong, for it multiplies
the bits: kernels take both facts as constants (`ASSEMBLY`, `UPCAST`).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from triton import knobs

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

# Shared memory that a program may have, on each GPU whose tensor cores take BF16: the least of
# NVIDIA's tables.
MIN_SHARED_NBYTES = 99 << 10
_NOWHERE = nullcontext()


class Dialect(NamedTuple):
    """What the compiler of kernels can do.

    Attributes:
        assembly: inline PTX may be used.
        upcast: BF16 must become FP32 before it is multiplied.
        hopper: products of four warps and more use the tensor cores as only Hopper has them.
    """

    assembly: bool
    upcast: bool
    hopper: bool


class Limits(NamedTuple):
    """How large a GPU is.

    Attributes:
        n_processors: multiprocessors.
        shared_nbytes: shared memory that a program may have.
    """

    n_processors: int
    shared_nbytes: int


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up; Triton's own takes microseconds, which every launch would wait."""
    return -(-a // b)


def choose_dialect(device: torch.device) -> Dialect:
    """The dialect of kernels that are launched on a device."""
    if knobs.runtime.interpret:
        return Dialect(assembly=False, upcast=True, hopper=True)  # so that its order is tested
    return _dialect_of(device)


@cache  # asking the driver takes as long as a launch
def _dialect_of(device: torch.device) -> Dialect:
    is_cuda = torch.version.hip is None
    is_hopper = is_cuda and torch.cuda.get_device_capability(device)[0] == 9
    return Dialect(assembly=is_cuda, upcast=False, hopper=is_hopper)


@cache
def limits_of(device: torch.device) -> Limits:
    """How large a GPU is; of one that does not tell, or of the host, what is safe."""
    if device.type != "cuda":
        return Limits(132, MIN_SHARED_NBYTES)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", MIN_SHARED_NBYTES)
    return Limits(found.multi_processor_count, max(shared, MIN_SHARED_NBYTES))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, as launches go to that."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(tensor.device)


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run there: on a GPU, or anywhere in Triton's interpreter."""
    return device.type == "cuda" or bool(knobs.runtime.interpret)


def require_tensor(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Checks an argument of a launcher.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, or not contiguous.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is of {tensor.dtype}; it must be of {dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; copy it first")
