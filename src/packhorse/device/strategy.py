"""How a product with a packed weight is computed on a GPU: chosen here, and nowhere else."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from packhorse.layout import WeightFormat

if TYPE_CHECKING:
    import torch

    from packhorse.kernels.matmul import MatmulConfig
    from packhorse.kernels.matmul_many import ManyConfig

__all__ = [
    "BUCKETS",
    "INVARIANT_TOKENS",
    "MAX_FUSED_TOKENS",
    "Choice",
    "Strategy",
    "bucket_of",
    "choose_strategy",
]

MAX_FUSED_TOKENS = (
    1024  # above, the product is bound by arithmetic, and decoding first costs little
)
# Up to so many tokens the order of sums is one and the same, so that a token's result does not
# depend on the batch that it is in.
INVARIANT_TOKENS = 32
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Strategy(Enum):
    """What is run for a product."""

    FUSED = "fused"  # weights are decoded in registers, inside the product, for few tokens
    MANY = "many"  # the same for more tokens than the weight should be read again for (W12)
    DECODE = "decode"  # weights are decoded to memory, then multiplied by PyTorch


@dataclass(frozen=True)
class Choice:
    """What is run for a product, and how it is divided.

    Attributes:
        strategy: what is run.
        config: the division of a fused product, a `ManyConfig` for `MANY`; None for the launcher's
            own, and for `DECODE`.
    """

    strategy: Strategy
    config: "MatmulConfig | ManyConfig | None" = None


def bucket_of(n_tokens: int) -> int:
    """The number of tokens that stands for `n_tokens` in what is chosen and measured."""
    return next((bucket for bucket in BUCKETS if n_tokens <= bucket), BUCKETS[-1])


def choose_strategy(
    n_rows: int, n_columns: int, n_tokens: int, device: "torch.device", form: WeightFormat
) -> Choice:
    """The strategy of a product of `n_tokens` vectors with a matrix.

    Cheap, but for the first product of a shape; nothing on the device is read.

    Args:
        n_rows: outputs of the layer.
        n_columns: inputs of the layer.
        n_tokens: vectors in the batch.
        device: the GPU.
        form: format of the packed weight.
    """
    from packhorse.device.autotune import choose

    return choose(n_rows, n_columns, n_tokens, form, device)
