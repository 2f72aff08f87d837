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

from packhorse import _core

__all__ = ["Moments", "Row", "Wide"]

Row: TypeAlias = NDArray[np.float32]
Wide: TypeAlias = NDArray[np.float64]


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
        _core.add_to_moments(self.mean, self.squares, list(rows), self.count)
        self.count += len(rows)

    def variance(self) -> Wide:
        """The variance of each element, normalised by the number of rows."""
        return self.squares / self.count
