"""Sums of rows in a defined order, in fp32, forward and backward.

`segment_sums` adds rows one after the other in the order that it is given. Everything here is made
of it, so the same batch on the same ranks gives the same bits, whatever the number of threads:

- a bag is the sum of its rows in the order of its ids, as `torch.nn.EmbeddingBag` adds them;
- the gradient of a row is the sum over the batch of one rank in the order of the batch,
  then over the ranks in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from packhorse.wire.backend import torch

__all__ = ["Grouping", "bags_of", "gather_rows", "group", "pool", "segment_sums"]


class Grouping(NamedTuple):
    """Equal keys brought together: `keys[order]` ascends, and equal keys keep their order."""

    unique: Tensor  # [u] int64, ascending
    inverse: Tensor  # [n] int64: which of `unique` each key is
    order: Tensor  # [n] int64
    starts: Tensor  # [u + 1] int64: where in `order` each of `unique` starts


def group(keys: Tensor) -> Grouping:
    """Finds the distinct keys with one stable sort.

    Args:
        keys: [n] int64.
    """
    ascending, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=is_first[1:])
    starts = is_first.nonzero().flatten()
    inverse = torch.empty_like(order)
    inverse[order] = is_first.cumsum(0) - 1
    return Grouping(
        ascending[starts], inverse, order, torch.cat([starts, starts.new_tensor([len(keys)])])
    )


def segment_sums(rows: Tensor, order: Tensor, starts: Tensor, scale: Tensor | None) -> Tensor:
    """Row i of the result is the sum of `rows[order[starts[i]:starts[i + 1]]]`, in that order.

    Args:
        rows: [m, d] of floats; they are added as fp32, or as float64 if they are.
        order: [n] int64.
        starts: [s + 1] int64, ascending, from 0 to n.
        scale: [n], what each of the n rows is multiplied by; None is 1.

    Returns:
        [s, d], in the dtype in which they were added.
    """
    if rows.dtype != torch.float64:
        rows = rows.float()
    if len(order) == 0:
        return rows.new_zeros(len(starts) - 1, rows.shape[1])
    if scale is None and len(starts) - 1 == len(order) and bool((starts.diff() == 1).all()):
        return rows.index_select(0, order)  # one row each: a copy is quicker
    if scale is not None:
        scale = scale.to(rows.dtype)
    return functional.embedding_bag(
        order, rows, starts, mode="sum", per_sample_weights=scale, include_last_offset=True
    )


def pool(
    rows: Tensor, grouping: Grouping, bags: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Bags of rows, with gradients for the rows and for the weights.

    Args:
        rows: [u, d], a row for each of `grouping.unique`.
        grouping: of the n ids of all bags.
        bags: [n] int64, the bag of each id.
        offsets: [b + 1] int64, where each bag starts among the n ids.
        weights: [n], or None.

    Returns:
        [b, d]
    """
    result: Tensor = _Pool.apply(rows, weights, grouping, bags, offsets)  # type: ignore[no-untyped-call]
    return result


def gather_rows(
    shard: Tensor, ids: Tensor, offsets: Tensor | None, counts: Sequence[int]
) -> Tensor:
    """Rows of a shard, or sums of them; the gradient of the shard is sparse and coalesced.

    Args:
        shard: [rows, d]
        ids: [n] int64.
        offsets: [b + 1] int64 where each bag starts among the ids; None for one row each.
        counts: how many rows or bags are for each rank. Gradients are summed for each rank first.

    Returns:
        [n, d] or [b, d]
    """
    result: Tensor = _Gather.apply(shard, ids, offsets, counts)  # type: ignore[no-untyped-call]
    return result


def bags_of(offsets: Tensor) -> Tensor:
    """[n] int64: the bag of each id, for [b + 1] offsets."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        grouping: Grouping,
        bags: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.grouping, ctx.bags, ctx.dtype = grouping, bags, rows.dtype
        return segment_sums(rows, grouping.inverse, offsets, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        (grad,) = grads
        order, starts = ctx.grouping.order, ctx.grouping.starts
        scale = None if weights is None else weights[order]
        of_rows = segment_sums(grad.contiguous(), ctx.bags[order], starts, scale)
        of_weights = None
        if rows is not None:
            of_weights = (grad[ctx.bags] * rows[ctx.grouping.inverse]).sum(1).to(weights.dtype)
        return of_rows.to(ctx.dtype), of_weights, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, ids: Tensor, offsets: Tensor | None, counts: Sequence[int]
    ) -> Tensor:
        ctx.ids, ctx.offsets, ctx.counts = ids, offsets, counts
        ctx.shape, ctx.dtype = shard.shape, shard.dtype
        if offsets is None:
            return shard.index_select(0, ids)
        return segment_sums(shard, ids, offsets, None).to(shard.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, rows = ctx.ids, grads[0].contiguous()
        if ctx.offsets is not None:
            ids, rows = _sums_by_rank(ids, ctx.offsets, ctx.counts, rows, ctx.shape[0])
        grouping = group(ids)
        sums = segment_sums(rows, grouping.order, grouping.starts, None).to(ctx.dtype)
        of_shard = torch.sparse_coo_tensor(
            grouping.unique[None], sums, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return of_shard, None, None, None


def _sums_by_rank(
    ids: Tensor, offsets: Tensor, counts: Sequence[int], of_bags: Tensor, n_rows: int
) -> tuple[Tensor, Tensor]:
    """Ids and gradients of rows, of one rank after the other, from the gradients of bags."""
    cuts = offsets[torch.tensor([0, *counts]).cumsum(0)]
    rank = torch.repeat_interleave(torch.arange(len(counts)), cuts.diff())
    grouping = group(rank * n_rows + ids)
    order = bags_of(offsets)[grouping.order]
    return grouping.unique % n_rows, segment_sums(of_bags, order, grouping.starts, None)
