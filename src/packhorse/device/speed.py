"""Compares the speed of a packed weight, in each format, with that of the plain weight on a GPU.

The figures are those that `packhorse tune` has measured, or else those of the model of time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from packhorse.device.choices import expect
from packhorse.gpu.detect import describe_device
from packhorse.gpu.models import GENERIC
from packhorse.layout import WeightFormat

__all__ = ["Speed", "compare_formats"]


@dataclass(frozen=True)
class Speed:
    """How fast a product with a packed weight is.

    Attributes:
        format: the format.
        times: how many times as fast the product is as with the BF16 weight.
        source: "measured", or the GPU for which the speed is predicted.
    """

    format: WeightFormat
    times: float
    source: str

    def __str__(self) -> str:
        return f"{self.times:.2f} times as fast as BF16 in {self.format.name}, {self.source}"


def compare_formats(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    formats: Iterable[WeightFormat],
    device: torch.device,
) -> list[Speed]:
    """The speed of each format, the fastest first.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        formats: the formats.
        device: the GPU. If anything was measured on it for this matrix, only measured formats are
            compared, because predictions are less certain.
    """
    name = describe_device(device).name
    gpu = "an unknown GPU" if name == GENERIC.name else f"{name}"
    found = []
    for format in formats:
        figures, is_measured = expect(n_rows, n_columns, n_tokens, format, device)
        if figures.plain_seconds is not None:
            source = "measured" if is_measured else f"predicted for {gpu}"
            found.append(Speed(format, figures.plain_seconds / figures.seconds, source))
    measured = [speed for speed in found if speed.source == "measured"]
    return sorted(measured or found, key=lambda speed: -speed.times)
