"""The description of a file's packed weights: a pair in the metadata of safetensors.

The arrays themselves do not show which tensors belong together, or how many columns are not
padding. The pair says both, and gives the version of the format. So a reader need not know the
model, and it refuses a later format instead of misreading it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import drop_arrays, join_arrays
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS, WEIGHT_VERSION, WeightFormat

__all__ = [
    "METADATA_KEY",
    "DescribedWeight",
    "describe_weights",
    "join_weights",
    "read_description",
]

METADATA_KEY = "packhorse.weights"


class DescribedWeight(NamedTuple):
    """What a file says about a packed weight.

    Attributes:
        format: its format.
        n_columns: columns of the matrix.
    """

    format: WeightFormat
    n_columns: int


def describe_weights(model: nn.Module, saved: Collection[str] | None = None) -> dict[str, str]:
    """The metadata that describe a model's packed weights, for a file with its state dict.

    Args:
        model: a model with or without packed weights.
        saved: names of the tensors in the file, if it does not hold all of them. If modules share a
            weight, the file may hold it for only one of them.

    Returns:
        One pair, or none if nothing is packed.

    Example:
        >>> import torch
        >>> from packhorse.device import describe_weights, join_weights, pack_model_
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
        >>> report = pack_model_(model)
        >>> metadata = describe_weights(model)
        >>> list(join_weights(model.state_dict(), metadata))
        ['0.bias', '0.weight']
    """
    named = model.named_modules(remove_duplicate=False)
    weights = {
        f"{name}.weight".lstrip("."): {"form": weight.format.name, "n_columns": weight.shape[1]}
        for name, module in named
        if isinstance(weight := module._parameters.get("weight"), PackedWeight)
    }
    if saved is not None:
        weights = {name: what for name, what in weights.items() if f"{name}.low_bytes" in saved}
    if not weights:
        return {}
    return {METADATA_KEY: json.dumps({"version": WEIGHT_VERSION, "weights": weights})}


def read_description(metadata: Mapping[str, str] | None) -> dict[str, DescribedWeight]:
    """The packed weights that a file's metadata name; none if there is no such pair.

    Raises:
        CorruptionError: the pair is not one that `describe_weights` writes.
        CompatibilityError: the pair is of a later version.
    """
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        record = json.loads(text)
        version, weights = record["version"], dict(record["weights"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptionError(f"metadata {METADATA_KEY!r} cannot be read: {error!r}") from error
    if version != WEIGHT_VERSION:
        raise CompatibilityError(
            f"packed weights of version {version!r}; this release reads {WEIGHT_VERSION}: "
            "upgrade packhorse"
        )
    return {name: _read_weight(name, described) for name, described in weights.items()}


def _read_weight(name: str, described: Any) -> DescribedWeight:
    known = described if isinstance(described, dict) else {}
    format, n_columns = known.get("form"), known.get("n_columns")
    if not isinstance(format, str) or format not in WEIGHT_FORMATS:
        raise CorruptionError(f"{name}: the format of the packed weight is {format!r}")
    if type(n_columns) is not int or not 1 <= n_columns <= MAX_WEIGHT_COLUMNS:
        raise CorruptionError(f"{name}: the packed weight has {n_columns!r} columns")
    return DescribedWeight(WEIGHT_FORMATS[format], n_columns)


def join_weights(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Tensor]:
    """The tensors of a file, with packed weights instead of their arrays.

    Args:
        tensors: all tensors of the file by name.
        metadata: the metadata of the file.

    Returns:
        Plain tensors as they are, and a checked `PackedWeight` for each name in the metadata.

    Raises:
        CorruptionError: arrays are missing, break the format, or differ from the metadata.
        CompatibilityError: the file is of a later version.

    Example:
        >>> import torch
        >>> from safetensors import safe_open
        >>> from safetensors.torch import save_file
        >>> from packhorse.device import describe_weights, join_weights, pack_model_
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
        >>> report = pack_model_(model)
        >>> save_file(model.state_dict(), "packed.safetensors", describe_weights(model))
        >>> with safe_open("packed.safetensors", "pt") as file:
        ...     tensors = {name: file.get_tensor(name) for name in file.keys()}
        ...     tensors = join_weights(tensors, file.metadata())
        >>> type(tensors["0.weight"]).__name__
        'PackedWeight'
    """
    joined = dict(tensors)
    for name, described in read_description(metadata).items():
        weight = join_arrays(tensors, name, described.n_columns)
        if weight is None:
            raise CorruptionError(f"{name}: the arrays of the packed weight are missing")
        if weight.format is not described.format:
            found, said = weight.format.name, described.format.name
            raise CorruptionError(f"{name}: the arrays are {found}, the metadata say {said}")
        drop_arrays(joined, name)
        joined[name] = weight
    return joined
