"""The number of tokens up to which products read weights in host memory where they are: measured on
a GPU once, and kept in a file.

`calibrate_offload` times products of layers that take turns, as those of a model, by views and by
the ring (`host_planes.py`). `offload_model_` takes the number of tokens up to which views save the
most time.
"""

import math
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packhorse.device import operators
from packhorse.device.host_planes import VIEW_TOKENS, HostPlanes, planes_nbytes
from packhorse.device.packing import pack_weight
from packhorse.gpu.copy_ring import CopyRing
from packhorse.gpu.cuda_runtime import runtime_of
from packhorse.gpu.figure_cache import FigureCache, require, require_keys
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import W12

__all__ = [
    "CROSSOVER_CACHE",
    "calibrate_offload",
    "crossover_of",
    "kept_crossover",
    "measure_crossover",
]

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_N_LAYERS = 8
_NOISE = 0.05  # of a time: what two measurements of the same may differ by
_Pair = tuple[float, float]  # seconds of a product by views, and by the ring


def _parse(entry: Any) -> tuple[int, _Pair]:
    require_keys(entry, {"n_tokens", "views", "ring"}, "an entry")
    require(type(entry["n_tokens"]) is int and entry["n_tokens"] > 0, "n_tokens is out of range")
    pair = entry["views"], entry["ring"]
    require(
        all(type(seconds) is float and 0 < seconds < math.inf for seconds in pair),
        "a time is not a positive number",
    )
    return entry["n_tokens"], pair


CROSSOVER_CACHE = FigureCache[int, _Pair](
    "offload",
    version=1,
    parse=_parse,
    dump=lambda n, pair: {"n_tokens": n, "views": pair[0], "ring": pair[1]},
    remedy=(
        "the measured crossover of offloaded layers is not used: {}; the default is taken. Call "
        "packhorse.device.calibrate_offload to measure again"
    ),
)


def crossover_of(figures: Mapping[int, _Pair]) -> int:
    """The number of tokens up to which views save the most time; 0 if they never save any.

    All sizes are weighed together, and times that are nearly equal do not count, so that noise does
    not move the crossover. Where both are as good, views are taken: they need no copies.

    Args:
        figures: seconds by views and by the ring, by the number of tokens.
    """
    found, saved, most = 0, 0.0, 0.0
    for n_tokens, (views, ring) in sorted(figures.items()):
        gain = math.log(ring / views)
        saved += gain if abs(gain) > _NOISE else 0.0
        if saved >= most:
            found, most = n_tokens, saved
    return found


def kept_crossover(device: torch.device, folder: str | os.PathLike[str] | None = None) -> int:
    """The crossover that was measured on a GPU, or else the default.

    Args:
        device: the GPU; on the host, the default holds.
        folder: of the file; None for the usual one.
    """
    if device.type != "cuda":
        return VIEW_TOKENS
    from packhorse.gpu.detect import identify

    identity = identify(device)
    figures = CROSSOVER_CACHE.load(CROSSOVER_CACHE.path(identity.device, folder), identity)
    return crossover_of(figures) if figures else VIEW_TOKENS


def calibrate_offload(
    device: torch.device | str = "cuda",
    *,
    n_rows: int = 14336,
    n_columns: int = 4096,
    tokens: Iterable[int] = _TOKENS,
    folder: str | os.PathLike[str] | None = None,
) -> int:
    """Measures up to how many tokens products should read weights in host memory where they are,
    and keeps the result for `offload_model_`. It takes some seconds, and host memory for eight
    matrices.

    Args:
        device: the CUDA device.
        n_rows: rows of the matrices.
        n_columns: their columns.
        tokens: numbers of tokens that are tried.
        folder: where the file is written; None for the folder that `packhorse tune` uses.

    Returns:
        The number of tokens.

    Raises:
        MissingBackendError: PyTorch finds no such GPU, or Triton is not installed.
        ValueError: the device is not a GPU, or `tokens` is empty or has a number below 1.
        MemoryError: the host has too little memory.
        OSError: the file cannot be written.

    Example:
        >>> from packhorse.device import calibrate_offload
        >>> try:
        ...     calibrate_offload("cpu")
        ... except ValueError as error:
        ...     print(error)
        the device is cpu; only a GPU can be measured
    """
    sizes = tuple(tokens)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"tokens is {sizes}; give one number of tokens or more, each at least 1")
    target = torch.device(device)
    runtime_of(target)
    if target.type != "cuda":
        raise ValueError(f"the device is {target}; only a GPU can be measured")
    operators.require_kernels()
    from packhorse.gpu.detect import identify

    figures = measure_crossover(target, n_rows, n_columns, sizes)
    identity = identify(target)
    CROSSOVER_CACHE.write(CROSSOVER_CACHE.path(identity.device, folder), identity, figures)
    return crossover_of(figures)


def measure_crossover(
    device: torch.device, n_rows: int, n_columns: int, tokens: Iterable[int]
) -> dict[int, _Pair]:
    """Seconds of a product by views and by the ring, for each number of tokens.

    Args:
        device: where products run.
        n_rows: rows of the matrices.
        n_columns: their columns.
        tokens: numbers of tokens.
    """
    from packhorse.device.matrix_tuning import random_weight
    from packhorse.gpu.timing import time_calls

    weight = pack_weight(random_weight(n_rows, n_columns, torch.device("cpu")), W12)
    ring = CopyRing(planes_nbytes(weight.arrays), device)
    layers = [HostPlanes(weight.arrays, device, ring, 0) for _ in range(_N_LAYERS)]
    views = [planes.on_device(weight.arrays) for planes in layers]
    ring.expect(layers)
    found = {}
    for n_tokens in tokens:
        x = torch.ones(n_tokens, n_columns, dtype=torch.bfloat16, device=device)
        by_view = [partial(operators.multiply, x, each, None, W12, n_columns) for each in views]
        by_ring = [
            partial(_by_ring, planes, x, each) for planes, each in zip(layers, views, strict=True)
        ]
        found[n_tokens] = time_calls(by_view, device), time_calls(by_ring, device)
    return found


def _by_ring(planes: HostPlanes, x: Tensor, views: WeightTensors) -> Tensor:
    with planes.lend(views, len(x)) as arrays:
        return operators.multiply(x, arrays, None, W12, x.shape[1])
