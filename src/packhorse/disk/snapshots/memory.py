"""Prepares a state in memory and its metadata for a take. `sources.py` does the same for files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from packhorse.disk.snapshots.take import State
from packhorse.disk.state import MAX_DEPTH, check_depth, encode_state
from packhorse.storage.frames.casts import find_casts, packing_order
from packhorse.storage.frames.refs import TensorSpec

__all__ = ["checked_metadata", "state_in_memory"]


def state_in_memory(state: Any) -> State:
    """Prepare a state in memory. Its tensors are read only when they are fetched.

    Raises:
        TypeError, ValueError: something in the state cannot be kept; the message gives its path.
    """
    document, leaves = encode_state(state)
    specs = [TensorSpec(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves]
    casts = find_casts(specs, lambda i, n: leaves[i].framework.head(leaves[i].tensor, n))
    groups = packing_order(len(leaves), casts)
    return State(
        document, specs, groups, casts,
        lambda i: leaves[i].framework.readable(leaves[i].tensor)[0],
    )  # fmt: skip


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check metadata, and return a copy.

    Raises:
        ValueError: the metadata is not made of JSON values.
    """
    given = dict(metadata or {})
    try:
        text = json.dumps(given, allow_nan=False, ensure_ascii=False)
        copy: dict[str, Any] = json.loads(text)
        if copy != given:
            raise ValueError("keys must be strings, and tuples must be lists")
        text.encode()
        check_depth(copy, MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must consist of JSON values: {error}") from error
    return copy
