"""Rows of a packed table that were changed, and that its format cannot hold."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChangedRows"]

_Numbers = NDArray[np.int64]
_Bytes = NDArray[np.uint8]


class ChangedRows:
    """Plain rows by number. There are few, so they are kept in order, and found by bisection.

    Args:
        row_nbytes: bytes of a row.
    """

    def __init__(self, row_nbytes: int) -> None:
        self._numbers = np.empty(0, np.int64)
        self._rows = np.empty((0, row_nbytes), np.uint8)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def numbers(self) -> _Numbers:
        """The numbers of the rows, int64, ascending."""
        return self._numbers

    @property
    def rows(self) -> _Bytes:
        """The rows: uint8, (n, bytes of a row)."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and their numbers."""
        return self._numbers.nbytes + self._rows.nbytes

    def keep(self, numbers: _Numbers, rows: _Bytes) -> None:
        """Keeps rows, instead of those that had these numbers; each number is there once."""
        places, found = self._find(numbers)
        self._rows[places[found]] = rows[found]
        if found.all():
            return
        numbers, rows = numbers[~found], rows[~found]
        order = np.argsort(numbers)
        places = np.searchsorted(self._numbers, numbers[order])
        self._numbers = np.insert(self._numbers, places, numbers[order])
        self._rows = np.insert(self._rows, places, rows[order], axis=0)

    def _find(self, numbers: _Numbers) -> tuple[_Numbers, NDArray[np.bool_]]:
        """Where rows are, and whether they are there at all."""
        if not len(self._numbers):
            return np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.bool_)
        places = np.searchsorted(self._numbers, numbers)
        places[places == len(self._numbers)] = 0
        return places, self._numbers[places] == numbers

    def drop(self, numbers: _Numbers) -> None:
        """Forgets rows; others are not there."""
        places, found = self._find(numbers)
        if found.any():
            self._numbers = np.delete(self._numbers, places[found])
            self._rows = np.delete(self._rows, places[found], axis=0)

    def put_into(self, numbers: _Numbers, rows: _Bytes) -> None:
        """Overwrites the rows that are kept here, among rows that were gathered."""
        places, found = self._find(numbers)
        rows[found] = self._rows[places[found]]
