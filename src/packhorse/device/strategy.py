"""The ways to run a product with a packed weight on a GPU."""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.kernels.matmul import MatmulConfig
    from packhorse.kernels.stream_product import StreamConfig

__all__ = [
    "BUCKETS",
    "INVARIANT_TOKENS",
    "MAX_FUSED_TOKENS",
    "Choice",
    "Strategy",
    "bucket_of",
]

# Above this number of tokens, no fused product is tried: by the model of time, decoding the weight
# first is faster on every GPU that it knows.
MAX_FUSED_TOKENS = 256
# Up to this number of tokens, the order of sums is always the same, so a token's result does not
# depend on the batch that it is in.
INVARIANT_TOKENS = 32
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Strategy(Enum):
    """How a product is run."""

    FUSED = "fused"  # the product decodes weights in registers; for up to 256 tokens
    STREAM = "stream"  # warps that fetch beside warps that decode; 1 to 256 tokens, Hopper only
    DECODE = "decode"  # weights are decoded to memory, then PyTorch multiplies


@dataclass(frozen=True)
class Choice:
    """How a product is run, and how it is divided.

    Attributes:
        strategy: the way to run it.
        config: the division of a fused product; a `StreamConfig` for `STREAM`. None means the
            launcher's default, and is the only value for `DECODE`.
    """

    strategy: Strategy
    config: "MatmulConfig | StreamConfig | None" = None


def bucket_of(n_tokens: int) -> int:
    """The number of tokens that stands for `n_tokens` in choices and measurements."""
    return BUCKETS[min(bisect_left(BUCKETS, n_tokens), len(BUCKETS) - 1)]
