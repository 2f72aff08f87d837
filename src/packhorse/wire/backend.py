"""PyTorch and its process groups, for all modules of this package; without PyTorch the error names
the extra to install."""

from packhorse.errors import MissingBackendError

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.wire needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error
if not dist.is_available():
    raise MissingBackendError(
        "packhorse.wire needs torch.distributed, and this build of PyTorch lacks it; install "
        "another build"
    )

from torch._C import _distributed_c10d as c10d  # has types that torch.distributed does not name

__all__ = ["c10d", "dist", "torch"]
