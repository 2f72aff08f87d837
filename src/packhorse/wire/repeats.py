"""Finds rows that repeat in the pieces of an operation, so that each is sent once.

A batch of embeddings asks for popular rows again and again, and gradients of embeddings have many
rows of zeros. Rows have one length and begin at multiples of it within the part for a rank.
The last dimension of the tensor may be that length, or powers of two from 64 bytes on find it; a
sample of 128 KiB decides, once for an operation. Where nothing repeats, that takes 15 microseconds.

Repeats may lie in the piece, or up to 65,535 rows before, in an earlier piece of the same part: the
receiver has them in its memory by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs.base import ByteArray

__all__ = ["Found", "RowFinder", "RowMemory", "max_tokens_nbytes"]

_MIN_SLOTS, _MAX_SLOTS = 16, 1 << 16  # of a table; a slot has 8 bytes
# After a piece with too few repeats, so many of the same part are not searched.
_N_UNTRIED = 7
_MIN_NBYTES = 4096  # of a part; a shorter one is not searched


class RowMemory:
    """Memory to search with, kept from one operation to the next.

    Attributes:
        literals: room for the bytes of a piece.
    """

    def __init__(self) -> None:
        self.literals = np.empty(0, np.uint8)
        self._tables: dict[int, NDArray[np.uint64]] = {}

    def table(self, rank: int, n_slots: int) -> NDArray[np.uint64]:
        """The table for the rows that a rank gets; its content may be of any earlier part."""
        table = self._tables.get(rank)
        if table is None or table.size < n_slots:
            table = self._tables[rank] = np.zeros(n_slots, np.uint64)
        return table[:n_slots]


class Found(NamedTuple):
    """Rows of a piece.

    Attributes:
        literals: the bytes before the first whole row, new rows, and the bytes after the last one;
            valid until the next search.
        tokens_nbytes: the length of the tokens that say where each row comes from.
        row_nbytes: the length of a row.
        skipped_nbytes: bytes before the first whole row.
    """

    literals: ByteArray
    tokens_nbytes: int
    row_nbytes: int
    skipped_nbytes: int


class RowFinder:
    """Searches the parts of one operation.

    Args:
        memory: to search with.
        parts: for each rank the bytes that it gets.
        hint: how long a row may be, in bytes; 0 if nobody knows.
        has_past: whether receivers keep earlier pieces of a part in front of a piece, and this rank
            does, too, unchanged.
    """

    def __init__(
        self, memory: RowMemory, parts: Sequence[ByteArray], hint: int, *, has_past: bool
    ) -> None:
        self._memory = memory
        self._has_past = has_past
        self._n_untried = dict.fromkeys(range(len(parts)), 0)
        longest = max(parts, key=len)
        self._row_nbytes = 0
        if longest.size >= _MIN_NBYTES:
            self._row_nbytes = _core.guess_row_nbytes(longest, hint)
        self._n_slots = _MIN_SLOTS
        if self._row_nbytes:
            n_rows = longest.size // self._row_nbytes
            self._n_slots = min(max(1 << n_rows.bit_length(), _MIN_SLOTS), _MAX_SLOTS)

    def find(self, rank: int, part: ByteArray, start: int, tokens: ByteArray) -> Found | None:
        """Searches a piece.

        Args:
            rank: which part it is of. The pieces of a part come in order.
            part: its bytes up to the end of the piece.
            start: where the piece begins.
            tokens: where tokens go; room for `max_tokens_nbytes` bytes.

        Returns:
            What was found; None if too few rows repeat.
        """
        if not self._row_nbytes:
            return None
        if self._n_untried[rank]:
            self._n_untried[rank] -= 1
            return None
        nbytes, memory = part.size - start, self._memory
        if memory.literals.size < nbytes:
            memory.literals = np.empty(nbytes, np.uint8)
        literals_nbytes, tokens_nbytes = _core.find_repeats(
            part, start, self._row_nbytes, self._has_past, memory.table(rank, self._n_slots),
            tokens, memory.literals,
        )  # fmt: skip
        if not tokens_nbytes:
            self._n_untried[rank] = _N_UNTRIED
            return None
        skipped = -start % self._row_nbytes
        return Found(memory.literals[:literals_nbytes], tokens_nbytes, self._row_nbytes, skipped)


def max_tokens_nbytes(nbytes: int) -> int:
    """The most bytes that tokens take for rows of a piece, which have 16 bytes or more."""
    return nbytes // 6 + 24
