"""Rows of a packed table that were changed, and that its format cannot hold."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChangedRows"]

_Numbers = NDArray[np.int64]
_Bytes = NDArray[np.uint8]


class ChangedRows:
    """Plain rows by number. They lie in no order, in memory with room for some more, so that many
    small changes cost what a large one does. An array with a place for each row of the table says
    where they are.

    Args:
        n_rows: rows of the table.
        row_nbytes: bytes of a row.
    """

    def __init__(self, n_rows: int, row_nbytes: int) -> None:
        self._n_rows, self._row_nbytes, self._n = n_rows, row_nbytes, 0
        self._clear()

    def _clear(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._rows = np.empty((0, self._row_nbytes), np.uint8)
        # Counted from 1; 0 is a row that is not here. There is none before there are rows.
        self._places: NDArray[np.unsignedinteger] | None = None

    def __len__(self) -> int:
        return self._n

    @property
    def nbytes(self) -> int:
        """Bytes that they take here."""
        places = 0 if self._places is None else self._places.nbytes
        return self._numbers.nbytes + self._rows.nbytes + places

    @property
    def fast_nbytes(self) -> int:
        """Bytes of the rows and their numbers alone, which a GPU has."""
        return self._n * (self._numbers.itemsize + self._row_nbytes)

    def in_order(self) -> tuple[_Numbers, _Bytes]:
        """Copies of the numbers, int64 (n,), ascending, and of their rows: uint8."""
        order = np.argsort(self._numbers[: self._n])
        return self._numbers[order], self._rows[order]

    def keep(self, numbers: _Numbers, rows: _Bytes) -> None:
        """Keeps rows, instead of those that had these numbers; each number is there once."""
        if not len(numbers):
            return
        if self._places is None:  # of pages that the system gives at their first use
            self._places = np.zeros(self._n_rows, np.min_scalar_type(self._n_rows))
        places = self._find(numbers)
        is_new = places < 0
        n = self._n + int(is_new.sum())
        places[is_new] = np.arange(self._n, n)
        self._resize(n)
        self._put(places, numbers, rows)

    def drop(self, numbers: _Numbers) -> bool:
        """Forgets rows, of which some may not be here; returns whether any was."""
        places = self._find(numbers)
        places = places[places >= 0]
        if not len(places) or self._places is None:
            return False
        self._places[self._numbers[places]] = 0
        n = self._n - len(places)
        last = np.arange(n, self._n)
        last = last[self._places[self._numbers[last]] > 0]
        self._put(places[places < n], self._numbers[last], self._rows[last])
        self._resize(n)
        return True

    def put_into(self, numbers: _Numbers, rows: _Bytes) -> None:
        """Overwrites the rows that are kept here, among rows that were gathered."""
        places = self._find(numbers)
        found = places >= 0
        rows[found] = self._rows[places[found]]

    def _find(self, numbers: _Numbers) -> _Numbers:
        """Where rows are; -1 for those that are not here."""
        if self._places is None:
            return np.full(len(numbers), -1)
        return self._places[numbers].astype(np.int64) - 1

    def _put(self, places: _Numbers, numbers: _Numbers, rows: _Bytes) -> None:
        assert self._places is not None
        self._places[numbers] = places + 1
        self._numbers[places] = numbers
        self._rows[places] = rows

    def _resize(self, n: int) -> None:
        """Makes room for half as many rows more, if there is too little or far too much."""
        held = min(n, self._n)
        self._n = n
        if n == 0:
            self._clear()
        elif not n <= len(self._numbers) <= 4 * n:
            old = self._numbers, self._rows
            self._numbers = np.empty(n + n // 2, np.int64)
            self._rows = np.empty((n + n // 2, self._row_nbytes), np.uint8)
            self._numbers[:held], self._rows[:held] = (array[:held] for array in old)
