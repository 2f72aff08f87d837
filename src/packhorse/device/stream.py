"""Products by the kernels of `packhorse.kernels.stream_product`, on GPUs that they run on.

They run on compute capability 9.0, where NVRTC and the driver are there, and where a small product
of integers, whose sums are exact, has come out right to the bit in both formats. This is tried once
for a device, before the first product, and never while a CUDA graph is captured. If anything is
missing or wrong, one warning says so, and products run as on other GPUs.
"""

import os
import warnings

import torch
from torch import Tensor

from packhorse.codecs import weights as coder
from packhorse.errors import MissingBackendError
from packhorse.gpu.cuda_driver import DriverError
from packhorse.gpu.stream_kernels import StreamKernels
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import device_of, limits_of
from packhorse.kernels.matmul import add_splits, check_product, memory_for_sums
from packhorse.kernels.stream_product import (
    FEW_TOKENS,
    MAX_STREAM_TOKENS,
    StreamConfig,
    default_stream_config,
)
from packhorse.kernels.vendor import is_nvidia
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

__all__ = ["forget_devices", "is_ready", "multiply_stream", "prepare", "waits_for_capture"]

_VARIABLE = "PACKHORSE_STREAM"
_CAPABILITY = (9, 0)
_CHECKED_TOKENS = (8, 64)  # one product for each kind of tensor core instruction
_CHECKED_SHAPE = 300, 1000  # rows and columns; neither fits blocks

_KERNELS: dict[torch.device, StreamKernels | None] = {}  # None where they do not run


def is_ready(device: torch.device) -> bool:
    """Whether the kernels run on a device. The first call for a device tries them; it answers False
    for now if a CUDA graph is captured meanwhile."""
    if device not in _KERNELS:
        if not _is_offered(device):
            _KERNELS[device] = None
        elif torch.cuda.is_current_stream_capturing():
            return False
        else:
            _KERNELS[device] = _try_out(device)
    return _KERNELS[device] is not None


def waits_for_capture(device: torch.device) -> bool:
    """Whether a CUDA graph is captured that these kernels may have missed, because nothing may be
    compiled or tried meanwhile: what is chosen now should not be remembered."""
    is_possible = _KERNELS[device] is not None if device in _KERNELS else _is_offered(device)
    return is_possible and torch.cuda.is_current_stream_capturing()


def forget_devices() -> None:
    """Makes the next product try the kernels again."""
    _KERNELS.clear()


def _is_offered(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and is_nvidia()
        and torch.cuda.get_device_capability(device) == _CAPABILITY
        and os.environ.get(_VARIABLE) != "0"
    )


def _try_out(device: torch.device) -> StreamKernels | None:
    kernels = StreamKernels(device)
    try:
        for format in WEIGHT_FORMATS.values():
            for n_tokens in _CHECKED_TOKENS:
                if not _is_right(kernels, format, n_tokens, device):
                    raise ValueError(f"a product of {n_tokens} tokens in {format.name} is wrong")
    except (MissingBackendError, DriverError, ValueError) as error:
        warnings.warn(
            f"the kernels for Hopper in CUDA C++ do not run on {device} ({error}): products are "
            f"slower. {_VARIABLE}=0 turns these kernels off, and this warning",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return kernels


def _is_right(
    kernels: StreamKernels, format: WeightFormat, n_tokens: int, device: torch.device
) -> bool:
    """Multiplies small integers, among them exceptions. Whatever the order, sums are exact, so the
    result has only one value."""
    generator = torch.Generator().manual_seed(n_tokens)
    plain = torch.randint(-8, 9, _CHECKED_SHAPE, generator=generator).bfloat16()
    x = torch.randint(-4, 5, (n_tokens, _CHECKED_SHAPE[1]), generator=generator).bfloat16()
    arrays = coder.pack(plain.view(torch.uint16).numpy(), format)
    packed = WeightTensors(*(torch.from_numpy(array).to(device) for array in arrays))
    expected = (x.double() @ plain.double().T).bfloat16()
    y = torch.full_like(expected, torch.nan, device=device)
    config = default_stream_config(
        *_CHECKED_SHAPE, n_tokens, format, limits_of(device).n_processors
    )
    with device_of(y):
        _run(kernels, x.to(device), packed, format, None, y, config)
    return torch.equal(y.cpu().view(torch.int16), expected.view(torch.int16))


def prepare(config: StreamConfig, format: WeightFormat, device: torch.device) -> bool:
    """Compiles and loads a division, so that its first product does not take a second, and may be
    captured.

    Returns:
        Whether the division can run: not if a CUDA graph is captured and it is not loaded.

    Raises:
        ValueError: the compiler refuses the division.
        DriverError: the driver refuses it.
    """
    kernels = _KERNELS.get(device)
    if kernels is None:
        return False
    if not kernels.is_loaded(config, format):
        if torch.cuda.is_current_stream_capturing():
            return False
        with torch.cuda.device(device):
            kernels.load(config, format)
    return True


def multiply_stream(
    x: Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: Tensor | None = None,
    config: StreamConfig | None = None,
) -> Tensor:
    """y = x W^T + bias with a packed weight, as `torch.nn.functional.linear` computes it; with more
    than 256 tokens, in parts.

    Args:
        x: BF16, n_tokens x n_columns.
        weights: checked arrays of `n_rows` rows.
        format: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.
        config: how the work is divided.

    Returns:
        BF16, n_tokens x n_rows, rounded once from sums in FP32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
        MissingBackendError: the kernels do not run on this device.
        DriverError: the driver refuses the division.
    """
    y = check_product(x, weights, format, n_columns, bias)
    if not y.numel():
        return y
    kernels = _KERNELS.get(x.device) if is_ready(x.device) else None
    if kernels is None:
        raise MissingBackendError(f"the kernels for Hopper in CUDA C++ do not run on {x.device}")
    if config is None:
        n_processors = limits_of(x.device).n_processors
        config = default_stream_config(y.shape[1], n_columns, len(x), format, n_processors)
    with device_of(x):
        for start in range(0, len(x), MAX_STREAM_TOKENS):
            some = slice(start, start + MAX_STREAM_TOKENS)
            _run(kernels, x[some], weights, format, bias, y[some], config)
    return y


def _run(
    kernels: StreamKernels,
    x: Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    bias: Tensor | None,
    y: Tensor,
    config: StreamConfig,
) -> None:
    sums = y
    if config.block_tokens <= FEW_TOKENS:  # above, the kernels add the sums of parts themselves
        sums = memory_for_sums(y, config.n_splits)
    kernels.run(x, weights, format, bias, sums, config)
    if sums is not y:
        add_splits(sums, y)
