"""The choice that a product runs: the one measured for its matrix, or else the one that the model
of time expects to be the fastest.

The first product of a matrix reads the cache or asks the model; all later ones look up its result.
This module holds everything that the process remembers about these results.
"""

import math
import os
from dataclasses import replace
from functools import cache
from threading import Lock

import torch

from packhorse.device.autotune import expect_order, tune
from packhorse.device.cost import predict_plain
from packhorse.device.shortage import forget_shortages
from packhorse.device.strategy import INVARIANT_TOKENS, Choice, Strategy, bucket_of
from packhorse.device.stream import is_ready, prepare, waits_for_capture
from packhorse.device.stream_cost import expect_stream
from packhorse.device.tune_cache import TUNE_CACHE, Entries, Key, Measured
from packhorse.gpu.cuda_driver import DriverError
from packhorse.gpu.detect import describe_device, identify
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.matmul import MatmulConfig, default_config
from packhorse.kernels.stream_product import (
    MAX_STREAM_TOKENS,
    StreamConfig,
)
from packhorse.layout import WeightFormat

__all__ = ["SHORT_OF_MEMORY", "TOO_LARGE", "choose", "expect", "forget_choices", "use_cache"]

# Choices that did not fit on a GPU, with their format.
TOO_LARGE: set[tuple[Choice, str, torch.device]] = set()
# Matrices (rows and columns) whose plain weight once did not fit on a GPU, which was said.
SHORT_OF_MEMORY: set[tuple[int, int, torch.device]] = set()

_EXPECTED: dict[tuple[int, int, int, str, str, int | None], tuple[Measured, bool]] = {}
_ENTRIES: dict[str, Entries] = {}  # of each GPU, by its name; read once
_FOLDERS: list[str | os.PathLike[str] | None] = [None]
_LOCK = Lock()


def choose(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: torch.device
) -> Choice:
    """What to run for a product of a packed weight with some tokens.

    Cheap, except for the first product of a shape. It neither reads from the device nor waits for
    it, except before the first product on a GPU whose kernels must be tried out (`stream.py`).

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        device: the GPU.
    """
    return expect(n_rows, n_columns, n_tokens, format, device)[0].choice


def expect(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: torch.device
) -> tuple[Measured, bool]:
    """The expected time of a product with a packed weight, when it runs the choice that `choose`
    makes.

    Args:
        n_rows: rows of the weight.
        n_columns: columns of the weight.
        n_tokens: vectors.
        format: format of the weight.
        device: the GPU.

    Returns:
        The figures, which include the plain product's time where it is known, and whether they were
        measured. Predicted seconds are infinite if the model does not know the division.
    """
    bucket = bucket_of(n_tokens)
    key = n_rows, n_columns, bucket, format.name, device.type, device.index
    found = _EXPECTED.get(key)
    if found is None:
        found = _expect(n_rows, n_columns, bucket, format, device)
        if not waits_for_capture(device):
            _EXPECTED[key] = found
    return found


def _expect(
    n_rows: int, n_columns: int, bucket: int, format: WeightFormat, device: torch.device
) -> tuple[Measured, bool]:
    model = describe_device(device)
    measured = _entries(device).get(Key(n_rows, n_columns, format.name), {})
    if bucket in measured and _can_run(measured[bucket].choice, format, device):
        return measured[bucket], True
    few = [row.choice.config for n, row in measured.items() if n <= INVARIANT_TOKENS]
    order = next((config for config in few if isinstance(config, MatmulConfig)), None)
    if order is None and bucket <= INVARIANT_TOKENS:
        order = _order_of(n_rows, n_columns, format, model)
    found = tune(n_rows, n_columns, format, model, buckets=[bucket], order=order).get(bucket)
    if found is None:
        found = Measured(_default(n_rows, n_columns, bucket, format, model), math.inf)
    found = _streamed(n_rows, n_columns, bucket, format, device, found)
    return replace(found, plain_seconds=predict_plain(n_rows, n_columns, bucket, model)), False


def _can_run(choice: Choice, format: WeightFormat, device: torch.device) -> bool:
    """Whether a measured choice can run now; the kernels that only some machines have may be
    missing on this one."""
    if choice.strategy is not Strategy.STREAM:
        return True
    if not isinstance(choice.config, StreamConfig) or not is_ready(device):
        return False
    try:
        return prepare(choice.config, format, device)
    except (DriverError, ValueError):  # it does not fit this card
        return False


def _streamed(
    n_rows: int,
    n_columns: int,
    bucket: int,
    format: WeightFormat,
    device: torch.device,
    other: Measured,
) -> Measured:
    """The kernels with warps that fetch, where they run and are expected to be faster. Up to 32
    tokens they always are taken, so that all small batches add in the same order."""
    if bucket > MAX_STREAM_TOKENS or not is_ready(device):
        return other
    model = describe_device(device)
    config, seconds = expect_stream(n_rows, n_columns, bucket, format, model)
    if bucket > INVARIANT_TOKENS and seconds > other.seconds:
        return other
    if not prepare(config, format, device):
        return other
    return Measured(Choice(Strategy.STREAM, config), seconds)


@cache  # all small batches share it, and finding it takes far longer than the rest of a choice
def _order_of(
    n_rows: int, n_columns: int, format: WeightFormat, model: DeviceModel
) -> MatmulConfig | None:
    return expect_order(n_rows, n_columns, format, model)


def _default(
    n_rows: int, n_columns: int, n: int, format: WeightFormat, model: DeviceModel
) -> Choice:
    """The choice for a GPU that is too small for all divisions that the model knows."""
    if n > INVARIANT_TOKENS:
        return Choice(Strategy.DECODE)
    shared_nbytes = model.shared_nbytes - 1024  # what the system keeps
    config = default_config(n_rows, n_columns, n, format, model.n_processors, shared_nbytes)
    return Choice(Strategy.FUSED, config)


def _entries(device: torch.device) -> Entries:
    if device.type != "cuda":
        return {}
    identity = identify(device)
    with _LOCK:
        if identity.device not in _ENTRIES:
            path = TUNE_CACHE.path(identity.device, _FOLDERS[0])
            _ENTRIES[identity.device] = TUNE_CACHE.load(path, identity)
        return _ENTRIES[identity.device]


def use_cache(folder: str | os.PathLike[str] | None) -> None:
    """Reads measured choices from another folder from now on.

    Args:
        folder: None for the usual one.
    """
    _FOLDERS[0] = folder
    forget_choices()


def forget_choices() -> None:
    """Makes the next products read the cache again, after it was written."""
    with _LOCK:
        _ENTRIES.clear()
    _EXPECTED.clear()
    TOO_LARGE.clear()
    SHORT_OF_MEMORY.clear()
    forget_shortages()
