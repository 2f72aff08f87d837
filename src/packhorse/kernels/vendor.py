"""Which GPUs the kernels run on. This module does not need Triton.

PyTorch calls AMD's GPUs "cuda" too, and reports compute capabilities for them. The kernels were
never tried there, and Triton compiles other code for them: so they are refused by the vendor.
"""

import torch

__all__ = ["has_waiting_products", "is_nvidia", "why_no_kernels"]

_MIN_CAPABILITY = (8, 0)  # the first with tensor cores that take BF16
# Ampere and Ada, and Blackwell's cards for desktops: their tensor cores only have mma.sync.
_WAITING = (8, 12)


def is_nvidia() -> bool:
    """Whether the GPUs of this PyTorch are NVIDIA's: a build for ROCm has AMD's."""
    return torch.version.hip is None


def has_waiting_products(capability: int) -> bool:
    """Whether a warp waits for its products on a GPU, however large they are. On Hopper and on
    Blackwell's GPUs for data centers, Triton makes products of 64 rows by four warps run on while
    the warps do (wgmma, tcgen05), and has overwritten what they still read.

    Args:
        capability: its compute capability: 80 for 8.0.
    """
    return capability // 10 in _WAITING


def why_no_kernels(device: torch.device) -> str | None:
    """Why the kernels for packed weights do not run on a GPU; None if they do.

    Args:
        device: of type "cuda".
    """
    if not is_nvidia():
        return (
            f"the kernels run on NVIDIA GPUs, and {device} is an AMD GPU (this PyTorch is for ROCm)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _MIN_CAPABILITY:
        return (
            f"the kernels need compute capability 8.0, and {device} has {major}.{minor} "
            f"({torch.cuda.get_device_name(device)})"
        )
    return None
