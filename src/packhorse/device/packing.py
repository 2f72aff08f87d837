"""Packs weights from memory or packed files, and builds packed weights from a state dict's
arrays."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packhorse.device.packed_arrays import (
    RowSource,
    check_arrays,
    check_source,
    empty_arrays,
    format_of,
    pack_arrays,
    resolve_format,
)
from packhorse.device.packed_weight import PackedWeight
from packhorse.errors import CorruptionError
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import WeightFormat

__all__ = ["empty_weight", "join_arrays", "pack_weight"]


def pack_weight(
    source: Tensor | RowSource,
    format: WeightFormat | str = "W12",
    *,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs a matrix; it is only read.

    Args:
        source: BF16, n_rows x n_columns: a tensor on any device, or a slice of a packed file, which
            is decoded block by block.
        format: "W12" or "W11".
        device: where to put the packed weight; None for the tensor's device, or for the host.

    Returns:
        The packed weight, which unpacks to the source bit for bit.

    Raises:
        TypeError: the source is neither a tensor nor a slice, is not BF16, or is already packed.
        ValueError: the source is not a matrix of 1 to 65536 columns, or has too many exceptions to
            count.
        CorruptionError, CompatibilityError: as for reading the file.

    Example:
        >>> import torch
        >>> from packhorse.device import pack_weight
        >>> plain = torch.randn(256, 512, dtype=torch.bfloat16)
        >>> weight = pack_weight(plain, "W12")
        >>> weight.packed_nbytes < 0.76 * plain.nbytes
        True
        >>> torch.equal(weight.unpack(), plain)
        True
    """
    format = resolve_format(format)
    if isinstance(source, PackedWeight):
        raise TypeError("the weight is already packed; give its unpack() to pack it anew")
    _, n_columns = check_source(source)
    return PackedWeight(pack_arrays(source, format, device), format, n_columns)


def empty_weight(
    n_rows: int,
    n_columns: int,
    format: WeightFormat | str,
    *,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """A valid packed weight without exceptions, for the caller to overwrite.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns, 1 to 65536.
        format: "W12" or "W11".
        device: where to put it; None for the host.

    Returns:
        The packed weight.

    Raises:
        ValueError: a size or the format is wrong.

    Example:
        >>> from packhorse.device import empty_weight
        >>> weight = empty_weight(256, 512, "W12", device="meta")
        >>> weight.shape, weight.dtype
        (torch.Size([256, 512]), torch.bfloat16)
    """
    format = resolve_format(format)
    return PackedWeight(empty_arrays(n_rows, n_columns, format, device=device), format, n_columns)


def join_arrays(state: Mapping[str, Any], name: str, n_columns: int) -> PackedWeight | None:
    """The packed weight that a state dict or a file holds as arrays, which are checked.

    Args:
        state: tensors by name; `NAME.low_bytes` and the other four belong together.
        name: name of the weight.
        n_columns: columns of the matrix.

    Returns:
        The weight, which shares the tensors of the state; None if the state has none of its arrays.

    Raises:
        CorruptionError: some arrays are missing, they break a rule of the format, or the state also
            has a plain weight.

    Example:
        >>> import torch
        >>> from packhorse.device import PackedLinear, join_arrays, pack_weight
        >>> weight = pack_weight(torch.randn(256, 512, dtype=torch.bfloat16))

        >>> state = PackedLinear(weight).state_dict()
        >>> sorted(state)[:2]
        ['weight.exception_starts', 'weight.exceptions']
        >>> torch.equal(join_arrays(state, "weight", 512).unpack(), weight.unpack())
        True
    """
    keys = {field: f"{name}.{field}" for field in WeightTensors._fields}
    missing = [field for field, key in keys.items() if key not in state]
    if len(missing) == len(keys):
        return None
    if missing:
        raise CorruptionError(f"{name}: packed weight: {', '.join(missing)} is missing")
    if name in state:
        raise CorruptionError(f"{name}: is both packed and plain here; remove one of the two")
    for key in keys.values():
        if not isinstance(state[key], Tensor):
            raise CorruptionError(f"{key} is not a tensor, but {type(state[key]).__name__}")
        if state[key].layout != torch.strided:
            raise CorruptionError(f"{key} is not a plain tensor, but {state[key].layout}")
    arrays = WeightTensors(*(array.contiguous() for array in map(state.__getitem__, keys.values())))
    format = format_of(arrays)
    if format is None:
        shapes = f"{list(arrays.low_bytes.shape)} and {list(arrays.high_bits.shape)}"
        raise CorruptionError(f"{name}: packed weight: no format has low and high bits of {shapes}")
    check_arrays(arrays, format, n_columns, name=name)
    return PackedWeight(arrays, format, n_columns)
