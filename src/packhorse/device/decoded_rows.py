"""Rows that were taken out of a packed weight by an index, decoded.

Code that multiplies with a weight part by part, such as a loss over chunks of the vocabulary, reads
`weight[start:stop]`. For a plain tensor that is a view, but rows of a packed weight have to be
decoded, so they are a copy that cannot be written to.
"""

from typing import Any

import torch
from torch import Tensor

from packhorse.device import operators
from packhorse.read_only_rows import DecodedRows

__all__ = ["assign_rows", "decode_rows", "require_frozen"]


def require_frozen(weight: Tensor) -> None:
    """Raises an error for a packed weight that asks for gradients."""
    if weight.requires_grad:
        raise RuntimeError(
            "a packed weight has no gradient; freeze it with requires_grad_(False), or take the "
            "plain one back with unpack_model_, or leave it plain from the start: PackhorseConfig "
            "takes lm_head=False, embeddings=False and modules_to_not_convert"
        )


def decode_rows(weight: Any, index: Any) -> Tensor | None:
    """`weight[index]`, if the index consists of numbers and slices."""
    parts = _split_index(index, weight.shape[0])
    if parts is None:
        return None
    require_frozen(weight)
    if torch.compiler.is_compiling() or weight.is_meta or type(weight.low_bytes) is not Tensor:
        return weight.unpack()[index]  # type: ignore[no-any-return]
    if operators.is_transformed():
        with torch._C._DisableFuncTorch():
            return weight.unpack()[index]  # type: ignore[no-any-return]
    rows, rest = parts
    plain = operators.unpack_range(weight.arrays, weight.format, weight.shape[1], rows)
    return plain[rest].as_subclass(DecodedRows)


def assign_rows(weight: Any, index: Any, value: Any) -> None:
    """`weight[index] = value`."""
    require_frozen(weight)
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a packed weight has no gradient; assign value.detach()")
    plain = weight.unpack()
    plain[index] = value
    with torch.no_grad():
        weight.copy_(plain)


def _split_index(index: Any, n_rows: int) -> tuple[range, tuple[Any, ...]] | None:
    """Splits an index of a matrix, such as `2:5` or `(3, slice(None, 7))`, into the rows that it
    needs and an index into these rows.

    Args:
        index: what stands between the brackets.
        n_rows: rows of the matrix.

    Returns:
        Consecutive rows and the index; None unless the index consists of numbers and slices.

    Raises:
        IndexError: there is no such row.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not 1 <= len(parts) <= 2 or not all(_is_basic(part) for part in parts):
        return None
    first = parts[0]
    if isinstance(first, slice):
        start, stop, step = first.indices(n_rows)
        if step < 1:
            return None  # PyTorch's error names the step
        return range(start, max(start, stop)), (slice(None, None, step), *parts[1:])
    if not -n_rows <= first < n_rows:
        raise IndexError(f"row {first} of a packed weight of {n_rows} rows")
    row = first % n_rows
    return range(row, row + 1), (0, *parts[1:])


def _is_basic(part: Any) -> bool:
    return isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool))
