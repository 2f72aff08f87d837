"""Mean and variance of rows that come one by one.

Iterates of training lie close together: weights near 0.05 may differ by 1e-6. The usual formula
for the variance, the mean of the squares minus the square of the mean, then loses all its digits:
in fp32 it even becomes negative. So rows are added by Welford's method (Technometrics 4, 1962),
which sums squares of differences to the mean, in float64. No term of that sum is negative, so no
clamp is needed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments", "Row", "Wide"]

Row: TypeAlias = NDArray[np.float32]
Wide: TypeAlias = NDArray[np.float64]

# Elements that are handled at once: all that is touched for them stays in the processor's cache.
_BLOCK = 1 << 15


class Moments:
    """Mean and summed squared deviations of rows.

    Attributes:
        count: how many rows were added.
        mean: the mean of each element.
        squares: the sum of the squared deviations from the mean, of each element.
    """

    def __init__(self, count: int, mean: Wide, squares: Wide) -> None:
        self.count = count
        self.mean = mean
        self.squares = squares

    def add(self, *rows: Row) -> None:
        """Add rows, one after the other; the arrays change in place.

        Several rows at once take less time than one by one, because mean and squares go through
        memory once. The result is the same bit for bit.

        Args:
            rows: the rows.
        """
        n = len(self.mean)
        deltas, shares = np.empty(min(n, _BLOCK)), np.empty(min(n, _BLOCK))
        for start in range(0, n, _BLOCK):
            block = slice(start, start + _BLOCK)
            mean, squares = self.mean[block], self.squares[block]
            delta, share = deltas[: len(mean)], shares[: len(mean)]
            for count, row in enumerate(rows, self.count + 1):
                np.subtract(row[block], mean, out=delta)
                np.multiply(delta, 1 / count, out=share)
                mean += share
                delta *= delta
                delta *= (count - 1) / count  # delta * (row - the new mean)
                squares += delta
        self.count += len(rows)

    def variance(self) -> Wide:
        """The variance of each element, normalised by the number of rows."""
        return self.squares / self.count
