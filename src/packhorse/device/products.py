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

from packhorse.device.choices import TOO_LARGE, choose
from packhorse.device.strategy import Choice, Strategy
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.matmul import multiply_weights
from packhorse.kernels.matmul_many import multiply_many
from packhorse.kernels.weights import decode_weights
from packhorse.layout import W12, WeightFormat

__all__ = ["LAUNCHERS", "multiply", "run_choice"]

_ALIGNMENT = 16  # bytes; kernels are compiled for inputs with this alignment


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
    """
    n_rows, n_tokens = len(weights.first_exponents), x.numel() // n_columns
    if choice is None:
        choice = choose(n_rows, n_columns, n_tokens, format, x.device)
    if choice.strategy is Strategy.DECODE:
        try:
            return F.linear(x, decode_weights(weights, format, n_columns), bias)
        except torch.OutOfMemoryError:
            choice = _choose_without_memory(n_rows, n_columns, format)
    flat = x.reshape(n_tokens, n_columns).contiguous()
    if flat.data_ptr() % _ALIGNMENT:  # Triton would compile once more, perhaps in a capture
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
    Strategy.MANY: multiply_many,
    Strategy.DECODE: _multiply_decoded,
}


def _choose_without_memory(n_rows: int, n_columns: int, format: WeightFormat) -> Choice:
    """The choice that needs no memory for the plain weight."""
    mib = 2 * n_rows * n_columns / 2**20
    warnings.warn(
        f"the GPU has no {mib:.0f} MiB left for the plain weight of {n_rows} x {n_columns}: "
        "the product decodes it in registers, which is slower with many tokens; give the GPU fewer "
        "tokens at once, or a smaller cache",
        RuntimeWarning,
        stacklevel=2,
    )
    return Choice(Strategy.MANY if format is W12 else Strategy.FUSED)
