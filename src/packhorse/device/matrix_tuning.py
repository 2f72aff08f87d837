"""Tunes the products of a matrix on this machine's GPU, and keeps the results.

The weights are synthetic. Normal rows with log-normal scales have the same distribution of
exponents as trained weights, and so the same share of exceptions. No other property of weights
affects the times.
"""

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile

import torch

from packhorse.codecs.weights import pack
from packhorse.device.autotune import tune
from packhorse.device.choices import forget_choices
from packhorse.device.cost import predict_plain
from packhorse.device.product_timer import ProductTimer
from packhorse.device.strategy import BUCKETS, Choice, Strategy
from packhorse.device.stream import is_ready
from packhorse.device.tune_cache import TUNE_CACHE, Key, Measured
from packhorse.gpu.detect import describe_device, identify
from packhorse.gpu.figure_cache import CACHE_VARIABLE
from packhorse.gpu.models import PRESETS, DeviceModel
from packhorse.gpu.search import Search
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.matmul import MatmulConfig
from packhorse.kernels.vendor import is_nvidia
from packhorse.layout import WeightFormat

__all__ = [
    "find_gpu",
    "measure_choices",
    "order_in",
    "pack_on",
    "predict_choices",
    "random_weight",
    "resolve_model",
    "tune_on_gpu",
    "tuned_before",
]

_BLOCK_ROWS = 8192  # generated at once, as FP32 takes twice the memory


def find_gpu() -> torch.device:
    """The current GPU.

    Raises:
        OSError: there is none, or it is not NVIDIA's.
    """
    if not torch.cuda.is_available():
        raise OSError("this machine has no CUDA GPU to measure on; --dry-run shows predictions")
    if not is_nvidia():
        raise OSError("the kernels run on NVIDIA GPUs, and this PyTorch is for ROCm (AMD GPUs)")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_model(name: str | None) -> DeviceModel:
    """The model of a GPU.

    Args:
        name: name of a preset; None for this machine's GPU, or for an H200 if it has no GPU.

    Raises:
        ValueError: there is no such preset.
    """
    if name is None:
        return describe_device(find_gpu()) if torch.cuda.is_available() else PRESETS[0]
    found = next((model for model in PRESETS if model.name.lower() == name.lower()), None)
    if found is None:
        names = ", ".join(model.name for model in PRESETS)
        raise ValueError(f"no preset is called {name!r}; there are {names}")
    return found


def predict_choices(
    n_rows: int, n_columns: int, format: WeightFormat, model: DeviceModel
) -> dict[int, Measured]:
    """The choices for an untuned matrix, with predicted times.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        format: its format.
        model: the GPU.
    """
    return {
        n: Measured(found.choice, found.seconds, predict_plain(n_rows, n_columns, n, model))
        for n, found in tune(n_rows, n_columns, format, model).items()
    }


def random_weight(n_rows: int, n_columns: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """A matrix like a trained one: normal rows with log-normal scales.

    Args:
        n_rows: rows.
        n_columns: columns.
        device: where the matrix is made.
        seed: seed of the random numbers.

    Returns:
        BF16, n_rows x n_columns.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scales = torch.randn(n_rows, 1, generator=generator, device=device).mul_(0.4).exp_()
    weight = torch.empty(n_rows, n_columns, dtype=torch.bfloat16, device=device)
    for start in range(0, n_rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, n_rows)
        part = torch.randn(stop - start, n_columns, generator=generator, device=device)
        weight[start:stop] = part * (0.02 * scales[start:stop])
    return weight


def pack_on(weight: torch.Tensor, format: WeightFormat, *, threads: int = 8) -> WeightTensors:
    """Packs a weight on the host, and puts the arrays on the weight's device.

    Args:
        weight: BF16, n_rows x n_columns.
        format: the format.
        threads: number of threads on the host.
    """
    bits = weight.contiguous().view(torch.int16).cpu().view(torch.uint16).numpy()
    arrays = pack(bits, format, threads=threads)
    return WeightTensors(*(torch.from_numpy(array).to(weight.device) for array in arrays))


def tuned_before(
    key: Key, device: torch.device, folder: str | PathLike[str] | None = None
) -> dict[int, Measured]:
    """The choices that the cache holds for a matrix.

    Args:
        key: the matrix.
        device: the GPU.
        folder: of the cache; None for the usual one.
    """
    identity = identify(device)
    return TUNE_CACHE.load(TUNE_CACHE.path(identity.device, folder), identity).get(key, {})


def order_in(before: dict[int, Measured]) -> MatmulConfig | None:
    """A division with the order of sums that an earlier run has found and this one must keep."""
    configs = (row.choice.config for row in before.values() if row.choice.strategy is _FUSED)
    return next((config for config in configs if isinstance(config, MatmulConfig)), None)


_FUSED = Strategy.FUSED


def _require_folder(folder: Path) -> None:
    """Fails before minutes are spent on measurements if the results could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "the system refused").lower()
        raise OSError(
            f"{folder}: measurements cannot be kept here: {reason}; name another folder with "
            f"--cache, or in the variable {CACHE_VARIABLE}"
        ) from error


def tune_on_gpu(
    n_rows: int,
    n_columns: int,
    format: WeightFormat,
    device: torch.device,
    *,
    folder: str | PathLike[str] | None = None,
    again: bool = False,
    buckets: Iterable[int] = BUCKETS,
    search: Search[Choice, int] | None = None,
) -> dict[int, Measured]:
    """Measures what the cache lacks, writes it there, and uses it from now on.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        format: its format.
        device: the GPU.
        folder: of the cache; None for the usual one.
        again: also measure what the cache already has.
        buckets: numbers of tokens.
        search: limits of the search; buckets for which time ran out are left out.

    Returns:
        The best choice for each number of tokens, from earlier runs and from this one.

    Raises:
        OSError: the cache cannot be written.
        MemoryError: the copies of the matrix do not fit in the GPU's memory.
    """
    key = Key(n_rows, n_columns, format.name)
    before = {} if again else tuned_before(key, device, folder)
    missing = [n for n in buckets if n not in before]
    if not missing:
        return before
    identity = identify(device)
    path = TUNE_CACHE.path(identity.device, folder)
    _require_folder(path.parent)
    found = measure_choices(
        n_rows, n_columns, format, device, buckets=missing, order=order_in(before), search=search
    )
    both = before | found
    if found:
        TUNE_CACHE.update(path, identity, {key: both})
        forget_choices()
    return both


def measure_choices(
    n_rows: int,
    n_columns: int,
    format: WeightFormat,
    device: torch.device,
    *,
    buckets: Iterable[int],
    order: MatmulConfig | None = None,
    search: Search[Choice, int] | None = None,
    make_timer: Callable[[WeightTensors, WeightFormat, int], ProductTimer] | None = None,
) -> dict[int, Measured]:
    """Measures a matrix without the cache.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        format: its format.
        device: where it is multiplied.
        buckets: numbers of tokens.
        order: a division; its order of sums is kept.
        search: limits of the search.
        make_timer: makes the object that times products with packed arrays; None for a
            `ProductTimer`.

    Returns:
        The best choice for each number of tokens for which there was time.

    Raises:
        MemoryError: the copies of the matrix do not fit in the device's memory.
    """
    try:
        weights = pack_on(random_weight(n_rows, n_columns, device), format)
        timer = (make_timer or ProductTimer)(weights, format, n_columns)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"copies of {n_rows} x {n_columns} do not fit on the GPU") from error
    found = tune(
        n_rows, n_columns, format, describe_device(device), timer,
        buckets=list(buckets), order=order, search=search, streams=is_ready(device),
    )  # fmt: skip
    return {n: Measured(row.choice, row.seconds, timer.plain(n)) for n, row in found.items()}
