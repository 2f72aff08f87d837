"""Proves products with a packed weight: each sum against FP64, and several runs against each other.

A kernel rounds a sum of products once, from FP32 to BF16. So a result may differ from the exact one
by half a unit of BF16's last place, and by what sums in FP32 lose. A single missing exception or
a single weight that was read too early is far outside of this bound. A race of threads may be rare,
but runs then differ in some bits: sums are always added in the same order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from packhorse.device.strategy import Choice, Strategy

__all__ = ["ExactProduct", "WrongProductWarning", "are_equal_bits"]

_BLOCK_NBYTES = 128 << 20  # of rows of the weight in FP64 at once
_ROUNDING = 2**-8  # of a result, when it becomes BF16
_LOST_SUMS = 2**-16  # of the sum of sizes: what sums in FP32 lose
# PyTorch may divide a product among programs, and may round the sums of each to BF16.
_LOST_DECODED = 2**-8


class WrongProductWarning(RuntimeWarning):
    """A division gives a wrong product on this GPU."""


class ExactProduct:
    """A product in FP64, and how far a kernel's result may be from it.

    Attributes:
        exact: FP64, n_tokens x n_rows.
    """

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        """Multiplies, a block of rows at a time.

        Args:
            x: BF16, n_tokens x n_columns.
            weight: BF16, n_rows x n_columns, on the same device.
        """
        wide, sizes = x.double().T, x.double().abs().T
        step = max(_BLOCK_NBYTES // (8 * max(weight.shape[1], 1)), 1)
        exact, of_sizes = [], []
        for start in range(0, len(weight), step):
            block = weight[start : start + step].double()
            exact.append((block @ wide).T)
            of_sizes.append((block.abs() @ sizes).T)
        self.exact = torch.cat(exact, dim=1)
        self._sizes = torch.cat(of_sizes, dim=1)

    def allows(self, y: Tensor, choice: Choice) -> bool:
        """Whether a result is right.

        Args:
            y: BF16, n_tokens x n_rows.
            choice: what gave it. Where weights are decoded to memory, PyTorch multiplies, whose
                sums may be rounded more often.
        """
        lost = _LOST_DECODED if choice.strategy is Strategy.DECODE else _LOST_SUMS
        bound = self.exact.abs() * _ROUNDING + self._sizes * lost
        return bool(((y.double() - self.exact).abs() <= bound).all())


def are_equal_bits(runs: Sequence[Tensor]) -> bool:
    """Whether all runs of a product gave the same bits.

    Args:
        runs: BF16, of one shape.
    """
    first = runs[0].view(torch.int16)
    return all(torch.equal(run.view(torch.int16), first) for run in runs[1:])
