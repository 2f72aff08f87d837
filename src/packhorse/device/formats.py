"""Decides in which format a weight is packed, and whether it is packed at all.

Memory decides by default. If a caller gives the number of tokens for which the model should be
fast, speed decides. Formats are judged by their exceptions, which the core counts in a sample of
rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.arguments import resolve_threads
from packhorse.codecs import weights
from packhorse.codecs.weight_plan import SAMPLED_ROWS, suits_w11, was_misjudged, why_no_gain
from packhorse.device.operators import require_kernels
from packhorse.device.packed_arrays import count_exceptions
from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import pack_weight
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat

__all__ = [
    "MAX_FAST_EXCEPTIONS",
    "MIN_SPEED",
    "PackingPlan",
    "StaysPlain",
    "check_tokens",
    "pack_if_smaller",
    "plan_if_smaller",
    "require_speeds",
    "resolve_format_or_auto",
]

# The lowest speed, as a share of the plain weight's, where speed decides. It is below 1 because the
# clocks of GPUs vary that much.
MIN_SPEED = 0.97
# The share of exceptions up to which measured and predicted speeds hold: they were measured with
# rows of normal distributions, where 0.03 % and 1.3 % of the elements are exceptions.
MAX_FAST_EXCEPTIONS = {"W12": 0.001, "W11": 0.015}


class StaysPlain(NamedTuple):
    """A weight is not packed.

    Attributes:
        reason: why, in words for the report.
    """

    reason: str


class PackingPlan(NamedTuple):
    """The format and size that a weight would have when packed.

    Attributes:
        format: the format.
        nbytes: bytes of the packed weight.
    """

    format: WeightFormat
    nbytes: int


def resolve_format_or_auto(format: object) -> WeightFormat | None:
    """The format that the argument of `pack_model_` names; None for "auto".

    Raises:
        ValueError: there is no such format.
    """
    if format == "auto":
        return None
    if isinstance(format, WeightFormat):
        return format
    if not isinstance(format, str) or format not in WEIGHT_FORMATS:
        raise ValueError(f"format is {format!r}; it must be auto, {' or '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[format]


def require_speeds(device: torch.device) -> None:
    """Checks that the speed of packed weights on a device is known, which `for_tokens` needs.

    Raises:
        MissingBackendError: Triton is not installed.
        ValueError: the device is not an NVIDIA GPU.
    """
    require_kernels()
    from packhorse.kernels.launch import runs_on

    if not runs_on(device):
        raise ValueError(
            f"for_tokens needs the model on an NVIDIA GPU, but it is on {device}: move it to a "
            "GPU first, or leave out for_tokens"
        )


def check_tokens(for_tokens: int | None) -> None:
    """Checks the option `for_tokens` of `pack_model_`.

    Raises:
        ValueError: it is neither None nor a positive number.
    """
    if for_tokens is not None and (type(for_tokens) is not int or for_tokens < 1):
        raise ValueError(f"for_tokens is {for_tokens!r}; it must be a positive number of tokens")


def pack_if_smaller(
    weight: Tensor, format: WeightFormat | None, for_tokens: int | None = None
) -> PackedWeight | StaysPlain:
    """Packs a matrix if that saves memory, and if it costs no speed where speed counts.

    Args:
        weight: BF16, n_rows x n_columns.
        format: None to choose as "auto" of `pack_model_` does.
        for_tokens: as there.

    Returns:
        The packed weight, or why the matrix stays plain.

    Raises:
        MissingBackendError, TypeError, ValueError: as `pack_weight` and `pack_model_`.
    """
    weight = weight.detach()
    chosen = _choose(weight, format, for_tokens)
    if isinstance(chosen, StaysPlain):
        return chosen
    packed = pack_weight(weight, chosen)
    if _was_misjudged(packed.exceptions.numel(), weight, chosen, format, for_tokens):
        packed = pack_weight(weight, W12)
    reason = why_no_gain(packed.packed_nbytes, weight.numel(), packed.format)
    return packed if reason is None else StaysPlain(reason)


def plan_if_smaller(
    weight: Tensor, format: WeightFormat | None, for_tokens: int | None = None
) -> PackingPlan | StaysPlain:
    """What `pack_if_smaller` would do, without packing.

    Args:
        weight: as there.
        format: as there.
        for_tokens: as there.

    Returns:
        The format and size of the packed weight, or why the matrix stays plain.

    Raises:
        MissingBackendError, TypeError, ValueError: as there.
    """
    weight = weight.detach()
    chosen = _choose(weight, format, for_tokens)
    if isinstance(chosen, StaysPlain):
        return chosen
    n_exceptions = count_exceptions(weight, chosen)
    if _was_misjudged(n_exceptions, weight, chosen, format, for_tokens):
        chosen, n_exceptions = W12, count_exceptions(weight, W12)
    n_rows, n_columns = weight.shape
    nbytes = weights.packed_nbytes(n_rows, n_columns, n_exceptions, chosen)
    reason = why_no_gain(nbytes, weight.numel(), chosen)
    return PackingPlan(chosen, nbytes) if reason is None else StaysPlain(reason)


def _choose(
    weight: Tensor, format: WeightFormat | None, for_tokens: int | None
) -> WeightFormat | StaysPlain:
    if for_tokens is not None and weight.numel():
        return _fastest(weight, format, for_tokens)
    if format is not None:
        return format
    n_rows, n_columns = weight.shape
    return W11 if suits_w11(_exception_share(weight, W11), n_rows, n_columns) else W12


def _was_misjudged(
    n_exceptions: int, weight: Tensor, chosen: WeightFormat, format: WeightFormat | None,
    for_tokens: int | None,
) -> bool:  # fmt: skip
    """Whether "auto" chose W11 because the sample missed the rows with many exceptions."""
    is_auto = format is None and for_tokens is None
    return is_auto and chosen is W11 and was_misjudged(n_exceptions, weight.numel())


def _exception_share(weight: Tensor, format: WeightFormat) -> float:
    """The share of elements that are exceptions, in a sample of rows."""
    if not (weight.device.type == "cpu" and weight.is_contiguous()):
        weight = weight[:: max(weight.shape[0] // SAMPLED_ROWS, 1)].cpu().contiguous()
    bits = weight.view(torch.uint16).numpy()
    n_exceptions = weights.count_exceptions(
        bits, format, threads=resolve_threads(None), max_rows=SAMPLED_ROWS
    )
    return n_exceptions / max(bits.size, 1)


def _fastest(
    weight: Tensor, format: WeightFormat | None, n_tokens: int
) -> WeightFormat | StaysPlain:
    """The format in which a product is the fastest, or why no format is fast enough."""
    require_speeds(weight.device)
    from packhorse.device.speed import compare_formats

    formats = WEIGHT_FORMATS.values() if format is None else [format]
    n_rows, n_columns = weight.shape
    reason = None
    for speed in compare_formats(n_rows, n_columns, n_tokens, formats, weight.device):
        if speed.times < MIN_SPEED:
            reason = reason or str(speed)
            break
        # Figures are for weights with the usual number of exceptions.
        if _exception_share(weight, speed.format) <= MAX_FAST_EXCEPTIONS[speed.format.name]:
            return speed.format
        reason = "too many exceptions"  # this format would be the fastest, so this is the reason
    return StaysPlain(f"slower with for_tokens={n_tokens}: {reason}")
