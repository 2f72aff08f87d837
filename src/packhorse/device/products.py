"""Products with packed weights on a GPU: the path from a layer to a kernel.

Every token of a model takes this path, so it is short: six calls from the layer at most. After the
first product of a shape, nothing here is searched, read or compiled.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from packhorse.device.choices import SHORT_OF_MEMORY, TOO_LARGE, choose
from packhorse.device.shortage import SHORTAGES, may_fit, note_shortage
from packhorse.device.strategy import Choice, Strategy
from packhorse.device.stream import is_ready, multiply_stream
from packhorse.kernels.arrays import ALIGNMENT, WeightTensors
from packhorse.kernels.matmul import multiply_weights
from packhorse.kernels.weights import decode_weights
from packhorse.layout import WeightFormat

__all__ = ["LAUNCHERS", "multiply", "run_choice"]


def multiply(
    x: Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: Tensor | None = None,
    choice: Choice | None = None,
) -> Tensor:
    """Runs a product by a choice. If the GPU is too small for it, warns once and decodes the weight
    first instead.

    Args:
        x: BF16, any dimensions, the last of n_columns; not empty.
        weights: checked arrays of `n_rows` rows.
        format: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.
        choice: what to run; None for the result of `packhorse.device.choices.choose`.

    Returns:
        BF16, the dimensions of x except for the last, which is n_rows.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, or is on another device.
        torch.OutOfMemoryError: a CUDA graph is captured, and there is no memory for the plain
            weight.
    """
    n_rows, n_tokens = len(weights.first_exponents), x.numel() // n_columns
    if choice is None:
        choice = choose(n_rows, n_columns, n_tokens, format, x.device)
    if choice.strategy is Strategy.DECODE:
        nbytes = 2 * n_rows * n_columns
        if not SHORTAGES or may_fit(nbytes, x.device):
            try:
                return F.linear(x, decode_weights(weights, format, n_columns), bias)
            except torch.OutOfMemoryError as error:
                if _is_capturing(x.device):  # the capture is void: nothing can go on
                    raise torch.OutOfMemoryError(_capture_failed(n_rows, n_columns)) from error
                note_shortage(nbytes, x.device)
        choice = _choose_without_memory(n_rows, n_columns, x.device)
    flat = x.reshape(n_tokens, n_columns).contiguous()
    if flat.data_ptr() % ALIGNMENT:  # Triton would compile once more, perhaps in a capture
        flat = flat.clone()
    if TOO_LARGE and (choice, format.name, x.device) in TOO_LARGE:
        choice = Choice(Strategy.DECODE)
    try:
        run = LAUNCHERS[choice.strategy]
        y = run(flat, weights, format, n_columns, bias=bias, config=choice.config)
    except OutOfResources as error:
        _note_too_large(choice, format, x.device, error)
        y = _multiply_decoded(flat, weights, format, n_columns, bias=bias)
    return y.view(*x.shape[:-1], n_rows)


def _note_too_large(
    choice: Choice, format: WeightFormat, device: torch.device, error: OutOfResources
) -> None:
    TOO_LARGE.add((choice, format.name, device))
    warnings.warn(
        f"{choice} does not fit on this GPU ({error}): weights are decoded first instead, which is "
        "slower. Run `packhorse tune` to find what fits",
        RuntimeWarning,
        stacklevel=3,
    )


def run_choice(
    choice: Choice,
    x: Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Runs a product by the given choice, and never by another.

    Args:
        choice: what to run.
        x: BF16, n_tokens x n_columns.
        weights: checked arrays of `n_rows` rows.
        format: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.

    Returns:
        BF16, n_tokens x n_rows.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
        OutOfResources: Triton's error if a program is too large for the GPU.
    """
    run = LAUNCHERS[choice.strategy]
    return run(x, weights, format, n_columns, bias=bias, config=choice.config)


def _multiply_decoded(
    x: Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: Tensor | None = None,
    config: None = None,
) -> Tensor:
    return F.linear(x, decode_weights(weights, format, n_columns), bias)


# The function for each strategy. It takes the arguments of `run_choice`, with the division instead
# of the choice.
LAUNCHERS: dict[Strategy, Callable[..., Tensor]] = {
    Strategy.FUSED: multiply_weights,
    Strategy.STREAM: multiply_stream,
    Strategy.DECODE: _multiply_decoded,
}


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _lacks_memory(n_rows: int, n_columns: int) -> str:
    mib = 2 * n_rows * n_columns / 2**20
    return f"the GPU has no {mib:.0f} MiB left for the plain weight of {n_rows} x {n_columns}"


def _capture_failed(n_rows: int, n_columns: int) -> str:
    return (
        f"{_lacks_memory(n_rows, n_columns)}, and a CUDA graph is being captured, which this ends: "
        "capture batches of fewer tokens, or leave the GPU more memory (a smaller cache of keys "
        "and values), and capture again"
    )


def _choose_without_memory(n_rows: int, n_columns: int, device: torch.device) -> Choice:
    """The choice that needs no memory for the plain weight; a warning says so once for a shape."""
    if (n_rows, n_columns, device) not in SHORT_OF_MEMORY:
        SHORT_OF_MEMORY.add((n_rows, n_columns, device))
        warnings.warn(
            f"{_lacks_memory(n_rows, n_columns)}: the product decodes it in registers, which is "
            "slower with many tokens; give the GPU fewer tokens at once, or a smaller cache",
            RuntimeWarning,
            stacklevel=3,
        )
    return Choice(Strategy.STREAM if is_ready(device) else Strategy.FUSED)
