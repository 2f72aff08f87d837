"""What all launchers share: how kernels are run, and checks of what they are given.

Triton's interpreter has no inline assembly, and its products of BF16 are wrong, for it multiplies
the bits: kernels take both facts as constants (`ASSEMBLY`, `UPCAST`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from triton import knobs

__all__ = ["Dialect", "choose_dialect", "device_of", "require_tensor", "runs_on"]


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


def choose_dialect() -> Dialect:
    """The dialect of kernels that are launched now."""
    if knobs.runtime.interpret:
        return Dialect(assembly=False, upcast=True, hopper=True)  # so that its order is tested
    target = triton.runtime.driver.active.get_current_target()
    cuda = target.backend == "cuda"
    return Dialect(assembly=cuda, upcast=False, hopper=cuda and target.arch // 10 == 9)


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, as launches go to that."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


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
