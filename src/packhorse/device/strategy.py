"""What can be run for a product with a packed weight on a GPU."""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.kernels.matmul import MatmulConfig
    from packhorse.kernels.matmul_many import ManyConfig

__all__ = [
    "BUCKETS",
    "INVARIANT_TOKENS",
    "MAX_FUSED_TOKENS",
    "Choice",
    "Strategy",
    "bucket_of",
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
    return BUCKETS[min(bisect_left(BUCKETS, n_tokens), len(BUCKETS) - 1)]
