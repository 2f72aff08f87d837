"""Reads the tensors of a packed folder as a server reads those of a plain one.

Servers read files tensor by tensor, and give each name and tensor to the model. Here they pass
through `plain_tensors`, which makes plain matrices of what is packed: of the five arrays of a
weight (`PackhorseConfig` writes them), and of the frames that `packhorse pack` writes. So joined
matrices, shards of tensor parallelism and any other way to load work as they always do, and the
server packs what it keeps. Only one matrix is plain at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor

from packhorse.device.packed_arrays import format_of
from packhorse.device.packing import array_names, join_arrays
from packhorse.errors import CorruptionError, blaming
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import FRAME_MAGIC
from packhorse.torch import decompress

__all__ = ["plain_tensors"]

_FIELDS = tuple(WeightTensors._fields)
_Named = tuple[str, Tensor]


def plain_tensors(
    weights: Iterable[_Named], widths: Callable[[], Set[int]] | Set[int]
) -> Iterator[_Named]:
    """Passes tensors on, and makes plain ones of packed ones.

    Args:
        weights: names and tensors, as they are in the files, in any order.
        widths: the numbers of columns that weights of the model may have. Arrays do not tell how
            many of their columns are padding. A function is called when the first array comes.

    Returns:
        Names and tensors of a plain checkpoint.

    Raises:
        CorruptionError: arrays are missing or break a rule of the format, or a frame is damaged;
            the message names the tensor.
        CompatibilityError, BaseMismatchError: a frame is of a later version, or needs a base.
        ValueError: the model has no layer of that width, or several that would fit.

    Example:
        >>> import torch
        >>> from packhorse.device import PackedLinear
        >>> from packhorse.integrations.packed_folders import plain_tensors
        >>> layer = PackedLinear.from_linear(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
        >>> found = plain_tensors(layer.state_dict().items(), {512})
        >>> [(name, list(each.shape)) for name, each in found]
        [('bias', [256]), ('weight', [256, 512])]
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    plain: set[str] = set()
    packed: set[str] = set()
    for name, tensor in weights:
        stem = _stem_of(name, tensor)
        if stem is None:
            if name in packed:
                raise _is_double(name)
            plain.add(name)
            yield name, _decoded(name, tensor) if _is_frame(tensor) else tensor
            continue
        if stem in plain:
            raise _is_double(stem)
        packed.add(stem)
        held = waiting.setdefault(stem, {})
        held[name] = tensor
        if len(held) == len(_FIELDS) and not _missing(stem, held):
            known = widths() if callable(widths) else widths
            yield stem, _joined(stem, waiting.pop(stem), known)
    for stem, held in waiting.items():
        raise CorruptionError(
            f"{stem}: packed weight: {', '.join(_missing(stem, held))} is missing"
        )


def _is_double(name: str) -> CorruptionError:
    return CorruptionError(f"{name}: is both packed and plain here; remove one of the two")


def _missing(stem: str, held: Mapping[str, Tensor]) -> list[str]:
    """The names of the arrays that are not there."""
    names = array_names(stem)
    if f"{stem}.high_bits" in held:  # older files
        names["high_bits"] = f"{stem}.high_bits"
    return [name for name in names.values() if name not in held]


def _stem_of(name: str, tensor: Tensor) -> str | None:
    """The name of the weight that an array belongs to; None for another tensor."""
    stem, _, last = name.rpartition(".")
    if last in _FIELDS:
        return stem
    return name if tensor.dtype == torch.uint8 and tensor.dim() == 3 else None


def _joined(stem: str, held: Mapping[str, Tensor], widths: Set[int]) -> Tensor:
    n_columns = _columns_of(stem, held, widths)
    weight = join_arrays(held, stem, n_columns)
    assert weight is not None, "all arrays are there"
    return weight.unpack()


def _columns_of(stem: str, held: Mapping[str, Tensor], widths: Set[int]) -> int:
    """The width of the model that the padded width of the arrays stands for."""
    names = array_names(stem)
    if stem not in held:
        names["high_bits"] = f"{stem}.high_bits"
    arrays = WeightTensors(*(held[names[field]] for field in _FIELDS))
    if arrays.high_bits.dim() == 3:
        arrays = arrays._replace(high_bits=arrays.high_bits[..., 0])
    format = format_of(arrays)
    if format is None:
        return 1  # joining them says what is wrong
    n_padded = arrays.low_bytes.shape[1]
    fitting = sorted(each for each in widths if format.n_padded(each) == n_padded)
    if len(fitting) == 1:
        return fitting[0]
    raise ValueError(
        f"{stem}: its packed rows have {n_padded} columns with padding, which fits "
        f"{' and '.join(map(str, fitting)) or 'no'} columns of the model: load the folder with "
        "transformers, and save model.dequantize() as a plain folder"
    )


def _is_frame(tensor: Tensor) -> bool:
    n = len(FRAME_MAGIC)
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() < n:
        return False
    return bytes(tensor[:n].tolist()) == FRAME_MAGIC


def _decoded(name: str, frame: Tensor) -> Tensor:
    with blaming(name):
        return decompress(frame.contiguous().numpy())
