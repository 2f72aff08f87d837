"""How a product with a packed weight is computed on a GPU: chosen here, and nowhere else."""

from enum import Enum

import torch

from packhorse.layout import WeightFormat

__all__ = ["MAX_FUSED_TOKENS", "Strategy", "choose_strategy"]

MAX_FUSED_TOKENS = 256  # above, the product is bound by arithmetic, and decoding first costs little


class Strategy(Enum):
    """What is run for a product."""

    FUSED = "fused"  # weights are decoded in registers, inside the product
    DECODE = "decode"  # weights are decoded to memory, then multiplied by PyTorch


def choose_strategy(
    n_rows: int, n_columns: int, n_tokens: int, device: torch.device, form: WeightFormat
) -> Strategy:
    """The strategy of a product of `n_tokens` vectors with a matrix.

    Args:
        n_rows: outputs of the layer.
        n_columns: inputs of the layer.
        n_tokens: vectors in the batch.
        device: the GPU.
        form: format of the packed weight.
    """
    return Strategy.FUSED if n_tokens <= MAX_FUSED_TOKENS else Strategy.DECODE
