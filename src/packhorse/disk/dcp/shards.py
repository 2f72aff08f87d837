"""What a manifest records of each shard, and how PyTorch's dtypes are stored in frames.

A shard whose dtype safetensors has becomes a frame of that dtype and shape. A shard of any other
dtype becomes a frame of bytes, and so does a value that a planner has serialized. The manifest
records the dtype.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from packhorse.codecs.base import ByteArray
from packhorse.storage.frames.refs import FrameRef
from packhorse.torch_framework import FRAMEWORK

__all__ = ["StoredShard", "dtype_name", "frame_kind", "readable", "torch_dtype"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard of a tensor, or the bytes of another value.

    Attributes:
        dtype: PyTorch's name of the dtype, such as "float32"; None for bytes.
        shape: the shape of the shard; for bytes, how many there are.
        frame: the frame that holds them.
    """

    dtype: str | None
    shape: tuple[int, ...]
    frame: FrameRef


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


@lru_cache(64)
def torch_dtype(name: Any) -> torch.dtype | None:
    """The dtype of this name; None if this PyTorch does not have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and dtype_name(found) == name else None


def frame_kind(dtype: torch.dtype | None, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and the shape of a shard's frame.

    Args:
        dtype: the dtype of the shard; None for bytes.
        shape: the shape of the shard.
    """
    if dtype is None:
        return "U8", shape
    name = FRAMEWORK.dtype_name(dtype)
    return (name, shape) if name else ("U8", (math.prod(shape) * dtype.itemsize,))


def readable(value: Any, name: str) -> tuple[ByteArray, torch.dtype | None, tuple[int, ...]]:
    """The bytes of a value that a planner gave, its dtype (None for bytes) and its shape.

    Args:
        value: a tensor, or a `BytesIO`.
        name: what messages call it.

    Raises:
        TypeError: the value is neither a dense tensor nor a `BytesIO`.
    """
    if not isinstance(value, torch.Tensor):
        if not hasattr(value, "getbuffer"):
            found = type(value).__name__
            raise TypeError(f"{name!r}: the planner gave a {found}, not a tensor or a BytesIO")
        data = np.frombuffer(value.getbuffer(), np.uint8)
        return data, None, (data.size,)
    what = FRAMEWORK.why_unreadable(value)
    if what is None and value.is_quantized:
        what = "a dense tensor is needed, not a quantized one"
    if what is not None:
        raise TypeError(f"{name!r}: {what}")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return FRAMEWORK.writable(plain), value.dtype, tuple(value.shape)
