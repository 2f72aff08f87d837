"""PyTorch's own collectives, as the way to run an operation without packing.

Values that only move are passed as bytes, so that all dtypes work with all backends. Each function
begins a collective of a process group and returns what to wait for.
"""

from __future__ import annotations

from datetime import timedelta

from packhorse.wire.backend import c10d, dist, torch

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "can_reduce", "reduce_scatter"]

# What gloo reduces, and NCCL, too. gloo adds truth values as bytes, which makes neither of 1 and 1.
_REDUCED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int8, torch.uint8, torch.int32, torch.int64),
)


def can_reduce(dtype: torch.dtype) -> bool:
    """Whether PyTorch's backends reduce a dtype."""
    return dtype in _REDUCED


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def all_to_all(
    group: dist.ProcessGroup,
    timeout: timedelta,
    output: torch.Tensor,
    input: torch.Tensor,
    output_nbytes: list[int],
    input_nbytes: list[int],
) -> dist.Work:
    """`all_to_all_single`; the lengths of the parts are in bytes."""
    options = c10d.AllToAllOptions()
    options.timeout = timeout
    return group.alltoall_base(
        _as_bytes(output), _as_bytes(input), output_nbytes, input_nbytes, options
    )


def all_gather(
    group: dist.ProcessGroup, timeout: timedelta, output: torch.Tensor, input: torch.Tensor
) -> dist.Work:
    """`all_gather_into_tensor`."""
    options = c10d.AllgatherOptions()
    options.timeout = timeout
    return group._allgather_base(_as_bytes(output), _as_bytes(input), options)


def broadcast(
    group: dist.ProcessGroup, timeout: timedelta, tensor: torch.Tensor, root: int
) -> dist.Work:
    """`broadcast`; the root is a rank of the group."""
    options = c10d.BroadcastOptions()
    options.timeout = timeout
    options.rootRank = root
    options.rootTensor = 0
    return group.broadcast([_as_bytes(tensor)], options)


def reduce_scatter(
    group: dist.ProcessGroup,
    timeout: timedelta,
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType,
) -> dist.Work:
    """`reduce_scatter_tensor`."""
    options = c10d.ReduceScatterOptions()
    options.timeout = timeout
    options.reduceOp = dist.ReduceOp(op)
    return group._reduce_scatter_base(output, input, options)


def all_reduce(
    group: dist.ProcessGroup,
    timeout: timedelta,
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType,
) -> dist.Work:
    """`all_reduce`."""
    options = c10d.AllreduceOptions()
    options.timeout = timeout
    options.reduceOp = dist.ReduceOp(op)
    return group.allreduce([tensor], options)
