"""Collectives that gradients flow through.

The functions return new tensors. A gradient goes the way back: that of an all-to-all is one with
the splits exchanged, that of an all-gather is a reduce-scatter of sums, and so on. Gradients travel
packed, too, wherever that is faster. All ranks must call backward in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packhorse.wire.backend import dist, torch
from packhorse.wire.collectives import Collectives
from packhorse.wire.sums import check_operation

__all__ = ["all_gather", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter"]

_Splits = list[int] | None


def all_to_all_single(
    collectives: Collectives,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sends a part of a tensor to each rank, and returns the parts that come.

    Args:
        collectives: what runs it.
        input: the parts for all ranks, one after the other in the first dimension.
        output_split_sizes: how many rows each rank sends; None for as many as go.
        input_split_sizes: how many rows each rank gets; None for equal parts.

    Returns:
        The parts of all ranks, in their order.

    Raises:
        PackhorseError, ValueError: as `Collectives.all_to_all_single`.
    """
    coming = None if output_split_sizes is None else list(output_split_sizes)
    going = None if input_split_sizes is None else list(input_split_sizes)
    return _apply(_AllToAll, collectives, input, coming, going)


def all_gather(collectives: Collectives, input: torch.Tensor) -> torch.Tensor:
    """Gathers the tensors of all ranks.

    Args:
        collectives: what runs it.
        input: this rank's tensor; the same shape on all ranks.

    Returns:
        The tensors of all ranks, joined in the first dimension. (Numbers become a vector.)

    Raises:
        PackhorseError: as `Collectives.all_gather`.
    """
    return _apply(_AllGather, collectives, input)


def reduce_scatter(
    collectives: Collectives,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduces tensors of all ranks, and returns this rank's part.

    Args:
        collectives: what runs it.
        input: the parts for all ranks, of equal size in the first dimension.
        op: SUM or AVG.

    Returns:
        This rank's part.

    Raises:
        PackhorseError: as `Collectives.reduce_scatter`.
        ValueError: the first dimension cannot be shared equally, or `op` has no gradient.
    """
    name = _differentiable(op, input)
    if not input.dim() or input.shape[0] % collectives.size:
        raise ValueError(
            f"input is {list(input.shape)}; {collectives.size} ranks must be able to share its "
            "first dimension equally"
        )
    return _apply(_ReduceScatter, collectives, input, name)


def all_reduce(
    collectives: Collectives,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduces tensors of all ranks.

    Args:
        collectives: what runs it.
        input: this rank's tensor; the same shape on all ranks.
        op: SUM or AVG.

    Returns:
        The result, the same on all ranks.

    Raises:
        PackhorseError: as `Collectives.all_reduce`.
        ValueError: `op` has no gradient.
    """
    return _apply(_AllReduce, collectives, input, _differentiable(op, input))


def broadcast(collectives: Collectives, input: torch.Tensor, src: int) -> torch.Tensor:
    """Sends a tensor of one rank to all. Its gradient there is the sum of those of all ranks, and
    zero elsewhere.

    Args:
        collectives: what runs it.
        input: what is sent; on other ranks a tensor of the same shape, whose values do not matter.
        src: the rank that sends, in the default group.

    Returns:
        The tensor of the rank that sends.

    Raises:
        PackhorseError, ValueError: as `Collectives.broadcast`.
    """
    return _apply(_Broadcast, collectives, input, src)


def _differentiable(op: dist.ReduceOp.RedOpType, input: torch.Tensor) -> str:
    name = check_operation(op, input.dtype)
    if name not in ("SUM", "AVG"):
        raise ValueError(f"{name} has no gradient here; use SUM or AVG")
    return name


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _op(name: str) -> dist.ReduceOp.RedOpType:
    found: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name)
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, collectives: Collectives, input: torch.Tensor, output: _Splits, sent: _Splits
    ) -> torch.Tensor:
        ctx.collectives, ctx.splits = collectives, (output, sent)
        n_rows = input.shape[0] if output is None else sum(output)
        result = input.new_empty(n_rows, *input.shape[1:])
        collectives.all_to_all_single(result, input, output, sent)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        output, sent = ctx.splits
        return None, _apply(_AllToAll, ctx.collectives, grads[0], sent, output), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, input: torch.Tensor) -> torch.Tensor:
        ctx.collectives, ctx.shape = collectives, input.shape
        rows = input.shape if input.dim() else (1,)
        result = input.new_empty(collectives.size * rows[0], *rows[1:])
        collectives.all_gather(result, input)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = _apply(_ReduceScatter, ctx.collectives, grads[0], "SUM")
        return None, grad.reshape(ctx.shape)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, input: torch.Tensor, name: str) -> torch.Tensor:
        ctx.collectives, ctx.divisor = collectives, collectives.size if name == "AVG" else 1
        result = input.new_empty(input.shape[0] // collectives.size, *input.shape[1:])
        collectives.reduce_scatter(result, input, _op(name))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered = _apply(_AllGather, ctx.collectives, grads[0])
        return None, gathered / ctx.divisor, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, input: torch.Tensor, name: str) -> torch.Tensor:
        ctx.collectives, ctx.name = collectives, name
        result = input.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(result, _op(name))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, _apply(_AllReduce, ctx.collectives, grads[0], ctx.name), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, input: torch.Tensor, src: int) -> torch.Tensor:
        ctx.collectives, ctx.is_root = collectives, dist.get_rank() == src
        result = input.clone(memory_format=torch.contiguous_format)
        collectives.broadcast(result, src)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = _apply(_AllReduce, ctx.collectives, grads[0], "SUM")
        return None, total if ctx.is_root else torch.zeros_like(grads[0]), None
