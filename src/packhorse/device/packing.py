"""Packs weights from memory or packed files, and builds packed weights from a state dict's
arrays."""

from collections.abc import Mapping, MutableMapping
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

__all__ = [
    "array_names",
    "drop_arrays",
    "empty_weight",
    "join_arrays",
    "pack_weight",
    "split_weight",
]

_HIGH_BITS = "high_bits"


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


def array_names(name: str) -> dict[str, str]:
    """The names of a packed weight's arrays in state dicts and files, by field.

    The high bits have the name of the weight itself. Programs that do not know packed weights look
    for the plain matrix there, find a tensor of another shape, and fail. Without such a tensor,
    some of them would only warn, and start the weight with random numbers.
    """
    return {f: name if f == _HIGH_BITS else f"{name}.{f}" for f in WeightTensors._fields}


def _former_name(name: str) -> str:
    """The name of the high bits in older state dicts and files."""
    return f"{name}.{_HIGH_BITS}"


def split_weight(weight: PackedWeight, name: str) -> dict[str, Tensor]:
    """The arrays of a packed weight as plain tensors for a state dict, by name; nothing is copied.
    The high bits get a third dimension, so that their shape is never that of the matrix. If the
    planes are in host memory, all arrays are tensors of the host."""
    stored = weight.stored_arrays
    arrays = {field: array.to(stored.device) for field, array in stored._asdict().items()}
    arrays[_HIGH_BITS] = stored.high_bits[..., None]
    return {key: arrays[field] for field, key in array_names(name).items()}


def drop_arrays(state: MutableMapping[str, Any], name: str) -> None:
    """Removes the arrays of a packed weight from a state dict."""
    for key in (*array_names(name).values(), _former_name(name)):
        state.pop(key, None)


def join_arrays(state: Mapping[str, Any], name: str, n_columns: int) -> PackedWeight | None:
    """The packed weight that a state dict or a file holds as arrays, which are checked.

    Args:
        state: tensors by name: `NAME` with the high bits, and `NAME.low_bytes` and the other three.
            Older files have the high bits as `NAME.high_bits`, in two dimensions.
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
        >>> sorted(state)[:3]
        ['weight', 'weight.exception_starts', 'weight.exceptions']
        >>> torch.equal(join_arrays(state, "weight", 512).unpack(), weight.unpack())
        True
    """
    keys, held = array_names(name), state.get(name)
    is_plain = isinstance(held, Tensor) and held.dim() != 3
    is_former = _former_name(name) in state
    if is_former or is_plain:
        keys[_HIGH_BITS] = _former_name(name)
    missing = [field for field, key in keys.items() if key not in state]
    if len(missing) == len(keys):
        return None
    if is_plain or (is_former and held is not None):
        raise CorruptionError(f"{name}: is both packed and plain here; remove one of the two")
    if missing:
        raise CorruptionError(f"{name}: packed weight: {', '.join(missing)} is missing")
    for key in keys.values():
        if not isinstance(state[key], Tensor):
            raise CorruptionError(f"{key} is not a tensor, but {type(state[key]).__name__}")
        if state[key].layout != torch.strided:
            raise CorruptionError(f"{key} is not a plain tensor, but {state[key].layout}")
    tensors = {field: state[key] for field, key in keys.items()}
    if not is_former:
        tensors[_HIGH_BITS] = _without_third_dimension(tensors[_HIGH_BITS], name)
    arrays = WeightTensors(**{field: array.contiguous() for field, array in tensors.items()})
    format = format_of(arrays)
    if format is None:
        shapes = f"{list(arrays.low_bytes.shape)} and {list(arrays.high_bits.shape)}"
        raise CorruptionError(f"{name}: packed weight: no format has low and high bits of {shapes}")
    check_arrays(arrays, format, n_columns, name=name)
    return PackedWeight(arrays, format, n_columns)


def _without_third_dimension(high_bits: Tensor, name: str) -> Tensor:
    if high_bits.dim() != 3 or high_bits.shape[2] != 1:
        raise CorruptionError(
            f"{name}: packed weight: {_HIGH_BITS} has shape {list(high_bits.shape)}; it must have "
            "three dimensions, the last of them 1"
        )
    return high_bits[..., 0]
