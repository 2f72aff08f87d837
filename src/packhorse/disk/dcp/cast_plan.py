"""Finds the shards of a rank that are rounded copies of others, and the order of packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from packhorse.codecs.base import ByteArray
from packhorse.storage.frames.casts import find_casts, packing_order
from packhorse.storage.frames.refs import TensorSpec
from packhorse.torch_framework import FRAMEWORK

__all__ = ["plan_casts"]


def plan_casts(
    items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[list[int]], dict[int, int]]:
    """Groups of items that must be packed together, each copy after its master, and the master of
    each copy. The planner must allow that it is asked twice for the same shard.

    Args:
        items: the items that the plan gives this rank.
        planner: the planner of the save.
    """
    specs = [_spec(item) for item in items]
    casts = find_casts(specs, lambda i, n: _head(planner, items[i], specs[i], n))
    return packing_order(len(items), casts), casts


def _spec(item: WriteItem) -> TensorSpec:
    if item.tensor_data is None:
        return TensorSpec(item.index.fqn, "U8", ())
    dtype = FRAMEWORK.dtype_name(item.tensor_data.properties.dtype)
    return TensorSpec(item.index.fqn, dtype or "U8", tuple(item.tensor_data.chunk.sizes))


def _head(planner: SavePlanner, item: WriteItem, spec: TensorSpec, n: int) -> ByteArray:
    """The bytes of the first elements. If the planner does not give what it has announced, the
    result is zeros, which match no master; the error is raised when all of the item is read."""
    value = planner.resolve_data(item)
    if (
        isinstance(value, torch.Tensor)
        and FRAMEWORK.why_unreadable(value) is None
        and FRAMEWORK.dtype_name(value.dtype) == spec.dtype
        and tuple(value.shape) == spec.shape
    ):
        return FRAMEWORK.head(value, n)
    return np.zeros(n * (4 if spec.dtype == "F32" else 2), np.uint8)
