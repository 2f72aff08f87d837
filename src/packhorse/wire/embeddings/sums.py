"""Sums of rows in a defined order, in fp32, forward and backward.

`segment_sums` and `sum_blocks` add rows one after the other in the order that they are given.
Everything here is made of them, so the same batch on the same ranks gives the same bits, whatever
the number of threads:

- a bag is the sum of its rows in the order of its ids, as `torch.nn.EmbeddingBag` adds them;
- the gradient of a row is the sum over the batch of one rank in the order of the batch,
  then over the ranks in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional

from packhorse import _core
from packhorse.wire.backend import torch

__all__ = [
    "Grouping",
    "bags_of",
    "gather_rows",
    "group",
    "join_ids",
    "pool",
    "segment_sums",
    "sum_blocks",
]


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
    n = len(keys)
    if keys.is_cpu:
        unique, inverse, order = (torch.empty(n, dtype=torch.int64) for _ in range(3))
        starts = torch.empty(n + 1, dtype=torch.int64)
        n_unique = _core.group_keys(
            keys.contiguous().numpy(),
            unique.numpy(), inverse.numpy(), order.numpy(), starts.numpy(),
        )  # fmt: skip
        if n_unique >= 0:
            return Grouping(unique[:n_unique], inverse, order, starts[: n_unique + 1])
    return _group_by_comparing(keys)


def _group_by_comparing(keys: Tensor) -> Grouping:
    """As `group`, on any device and for keys of more than 32 bits."""
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
    if scale is None and rows.dtype == torch.float32 and rows.is_cpu:
        return sum_blocks([rows], order, None, starts, [len(starts) - 1])[0]
    if len(order) == 0:
        return rows.new_zeros(len(starts) - 1, rows.shape[1])
    if scale is not None:
        scale = scale.to(rows.dtype)
    return functional.embedding_bag(
        order, rows, starts, mode="sum", per_sample_weights=scale, include_last_offset=True
    )


def sum_blocks(
    blocks: Sequence[Tensor],
    order: Tensor,
    via: Tensor | None,
    starts: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    """As `segment_sums` of rows that lie in several blocks, into several blocks; nothing is joined.

    Args:
        blocks: [m, d] of float32 on the CPU, at least one; their rows are numbered together.
        order: [n] int64.
        via: [v] int64, so that the rows are `via[order]`; None if they are `order`.
        starts: [s + 1] int64, ascending, from 0 to n.
        sizes: how many sums go into each block of the result; together s.

    Returns:
        For each of `sizes`, [size, d] of float32.

    Raises:
        ValueError: a number of a row is outside.
    """
    width = blocks[0].shape[1]
    blocks = [block.contiguous() for block in blocks]
    sums = [torch.empty(size, width) for size in sizes]
    # A thread takes longer to start than to add up a million elements.
    threads = min(torch.get_num_threads(), (len(order) * width >> 20) + 1)
    _core.sum_rows(
        *_places(blocks),
        order.contiguous().numpy(),
        None if via is None else via.contiguous().numpy(),
        starts.contiguous().numpy(),
        *_places(sums), width, threads,
    )  # fmt: skip
    return sums


def _places(blocks: Sequence[Tensor]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The addresses of contiguous tensors, and how many rows each has."""
    addresses = np.array([block.data_ptr() for block in blocks], np.uint64)
    return addresses, np.array([block.size(0) for block in blocks], np.uint64)


def join_ids(
    ids: Sequence[Tensor], limits: Sequence[int], bases: Sequence[int]
) -> tuple[Tensor, int | None]:
    """The ids of several features as keys, each feature's above its base.

    Args:
        ids: for each feature, [n] int64 on the CPU.
        limits: for each feature, what its ids must be below.
        bases: for each feature, what is added to its ids.

    Returns:
        [all ids] int64, and None; or the first feature with an id that is negative or not below
        its limit, and the keys are undefined.
    """
    ids = [part.contiguous() for part in ids]
    addresses, counts = _places(ids)
    keys = torch.empty(int(counts.sum()), dtype=torch.int64)
    found = _core.join_ids(
        addresses, counts, np.array(limits, np.uint64), np.array(bases, np.uint64), keys.numpy()
    )
    return keys, None if found < 0 else found


def pool(
    rows: Tensor,
    grouping: Grouping,
    bags: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    sizes: Sequence[int],
) -> Sequence[Tensor]:
    """Bags of rows, with gradients for the rows and for the weights.

    Args:
        rows: [u, d], a row for each of `grouping.unique`.
        grouping: of the n ids of all bags.
        bags: [n] int64, the bag of each id.
        offsets: [b + 1] int64, where each bag starts among the n ids.
        weights: [n], or None.
        sizes: how many bags go into each tensor of the result; together b.

    Returns:
        For each of `sizes`, [size, d].
    """
    if not sizes:
        return []
    result: tuple[Tensor, ...] = _Pool.apply(  # type: ignore[no-untyped-call]
        rows, weights, grouping, bags, offsets, tuple(sizes)
    )
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
    if int(offsets[-1]) == len(lengths) and bool((lengths == 1).all()):
        return torch.arange(len(lengths), device=offsets.device)
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
        sizes: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.grouping, ctx.bags, ctx.dtype = grouping, bags, rows.dtype
        if weights is None and rows.dtype != torch.float64:
            found = sum_blocks([rows.float()], grouping.inverse, None, offsets, sizes)
            return tuple(found)
        pooled = segment_sums(rows, grouping.inverse, offsets, weights)
        return tuple(part.clone() for part in torch.split(pooled, list(sizes)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        order, starts = ctx.grouping.order, ctx.grouping.starts
        if weights is None and grads[0].dtype == torch.float32:
            (of_rows,) = sum_blocks(grads, order, ctx.bags, starts, [len(starts) - 1])
            return of_rows.to(ctx.dtype), None, None, None, None, None
        grad = torch.cat(grads)
        scale = None if weights is None else weights[order]
        of_rows = segment_sums(grad, ctx.bags[order], starts, scale)
        of_weights = None
        if rows is not None:
            of_weights = (grad[ctx.bags] * rows[ctx.grouping.inverse]).sum(1).to(weights.dtype)
        return of_rows.to(ctx.dtype), of_weights, None, None, None, None


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
