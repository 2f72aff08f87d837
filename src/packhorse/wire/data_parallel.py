"""Data parallel training whose gradients and weights travel packed: DDP and FSDP2.

Both are lossless: PyTorch's own would compute the same bits, on two ranks; on more, PyTorch adds
gradients in an order of its own (sums.py). PyTorch's public hooks are used, and nothing is patched.
Tensors on a device are packed there if the `Collectives` were made with `choice="packed"`.

DDP compares the annotations of its hook with types, so this module leaves them evaluated.
"""

from collections.abc import Sequence
from itertools import pairwise

from packhorse.wire.backend import c10d, dist, torch
from packhorse.wire.collectives import Collectives
from packhorse.wire.pending import Pending

__all__ = ["PackedAllGather", "PackedReduceScatter", "compression_hook", "shard_traffic"]


def compression_hook(
    state: Collectives, bucket: c10d.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DistributedDataParallel: averages gradients, without loss.

    Buckets are averaged in the background, in their order, while backward goes on. Use the same
    `Collectives` for nothing else during backward.

    Args:
        state: what runs the collectives, of the process group of the model.
        bucket: gradients, from DDP.

    Returns:
        A future of the averaged gradients.

    Example:
        >>> from packhorse.wire import Collectives, compression_hook
        >>> def wrap(model):
        ...     from torch.nn.parallel import DistributedDataParallel
        ...     model = DistributedDataParallel(model)
        ...     model.register_comm_hook(Collectives(), compression_hook)
        ...     return model
    """
    gradients = bucket.buffer()
    # As DDP does it without a hook: divided first, then summed.
    gradients.mul_(1.0 / state.size)
    pending = state.all_reduce(gradients, async_op=True, label="ddp")
    assert pending is not None
    return pending.get_future()


class _Comm:
    """What FSDP2 asks of both of its collectives."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor for FSDP2 to put values in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, group: dist.ProcessGroup) -> None:
        mine = self._collectives.group
        if group is not mine and group.group_name != mine.group_name:
            raise ValueError(
                f"the model is sharded over the process group {group.group_name!r} of "
                f"{group.size()} ranks, and the collectives have {mine.group_name!r} of "
                f"{mine.size()}; make them with Collectives(mesh.get_group())"
            )


class PackedAllGather(_Comm):
    """The all-gather of FSDP2, which collects the shards of weights.

    Args:
        collectives: what runs it, of the process group that the model is sharded over.

    Example:
        >>> from packhorse.wire import PackedAllGather
        >>> def pack_weights_of(layer, collectives):  # `shard_traffic` does so for all layers
        ...     layer.set_custom_all_gather(PackedAllGather(collectives))
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Pending | None:
        """Gathers shards. The input may be a part of the output.

        On the host it goes on in the background, whatever `async_op` says: FSDP2 waits for what
        this returns before it uses the weights, and may compute until then. On a device the
        stream has the same effect.
        """
        self._check(group)
        async_op = async_op or output_tensor.device.type == "cpu"
        return self._collectives.all_gather(
            output_tensor, input_tensor, async_op=async_op, label="fsdp"
        )


class PackedReduceScatter(_Comm):
    """The reduce-scatter of FSDP2, which averages gradients.

    Args:
        collectives: what runs it, of the process group that the model is sharded over.

    Example:
        >>> from packhorse.wire import PackedReduceScatter
        >>> def pack_gradients_of(layer, collectives):  # `shard_traffic` does so for all layers
        ...     layer.set_custom_reduce_scatter(PackedReduceScatter(collectives))
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Pending | None:
        """Reduces gradients, and keeps this rank's shard."""
        self._check(group)
        return self._collectives.reduce_scatter(
            output_tensor, input_tensor, op, async_op=async_op, label="fsdp"
        )


def shard_traffic(model: torch.nn.Module, collectives: Collectives, *, ahead: bool = False) -> int:
    """Lets all parts of a model that FSDP2 shards send their weights and gradients packed.

    Weights for the backward pass are gathered while the part behind them computes. With HSDP only
    the traffic within a shard group changes: PyTorch has no way to replace the all-reduce between
    the groups.

    Args:
        model: after `fully_shard` was applied to all of its parts.
        collectives: of the process group that the model is sharded over.
        ahead: whether to gather the weights of each part while the part before it computes in the
            forward pass, too. Every forward pass must then use all parts, in the order of
            `model.modules()`.

    Returns:
        How many modules were changed.

    Raises:
        ValueError: no part of the model is sharded by `fully_shard`.
        RuntimeError: PyTorch refuses it, as for meshes that differ by parameter.

    Example:
        >>> from packhorse.wire import Collectives, shard_traffic
        >>> def shard(model):
        ...     from torch.distributed.fsdp import fully_shard
        ...     for layer in model.layers:
        ...         fully_shard(layer)
        ...     shard_traffic(fully_shard(model), Collectives(), ahead=True)
        ...     return model
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"no part of {type(model).__name__} is sharded; call fully_shard of "
            "torch.distributed.fsdp first"
        )
    for module in modules:
        module.set_custom_all_gather(PackedAllGather(collectives))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(PackedReduceScatter(collectives))  # type: ignore[arg-type]
    for module, following in pairwise(modules if ahead else ()):
        module.set_modules_to_forward_prefetch([following])
    return len(modules)
