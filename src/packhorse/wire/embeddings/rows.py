"""Rows of embedding tables and their gradients as bytes: one message with all tables in it.

A `RowCodec` turns pieces, one of each shard, into a message for each rank, and a message back into
the same pieces. `RawRows` copies the bytes. Whoever receives a message knows the shape of its
pieces, since it asked for them, or was asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from packhorse.errors import CorruptionError
from packhorse.wire.backend import torch
from packhorse.wire.embeddings.routes import Layout

__all__ = ["Piece", "RawRows", "RowCodec", "as_bytes"]

_Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """Rows of one shard in a message.

    Attributes:
        shard: its number.
        rows: [n, width] of floats, on the CPU.
        ids: [n] int64, which rows of the shard they are; None if they are sums of rows.
    """

    shard: int
    rows: Tensor
    ids: npt.NDArray[np.int64] | None


class RowCodec(Protocol):
    """Turns pieces into messages and back."""

    def attach(self, layout: Layout, rank: int) -> None:
        """Called once, by the exchange that uses it.

        Args:
            layout: its tables and shards.
            rank: who sends.
        """
        ...

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[_Bytes]:
        """The messages of one iteration, to each rank; their tensors stay as they are.

        Args:
            pieces: for each rank, those for it; none for the sender itself.

        Returns:
            For each rank, its message: [nbytes] uint8.
        """
        ...

    def decode(self, message: _Bytes, rows: Sequence[Tensor]) -> None:
        """Fills tensors with the rows of a message.

        Args:
            message: [nbytes] uint8, what `encode` made for this rank.
            rows: for each piece, a contiguous tensor of the shape and the dtype that were encoded,
                on the CPU.

        Raises:
            CorruptionError: the message has no such pieces.
        """
        ...

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """About how many bytes an element of a shard takes.

        Args:
            shard: its number.
            itemsize: bytes of an element as it is.

        Returns:
            Bytes; an exchange compares what ways of sending would cost by them.
        """
        ...


class RawRows:
    """Rows as they are, one piece after the other.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from packhorse.wire.embeddings import Piece, RawRows
        >>> piece = Piece(0, torch.ones(3, 16), np.array([4, 7, 9]))
        >>> _, message = RawRows().encode([[], [piece]])  # nothing for rank 0, 3 rows for rank 1
        >>> rows = torch.empty(3, 16)
        >>> RawRows().decode(message, [rows])
        >>> torch.equal(rows, piece.rows)
        True
    """

    def attach(self, layout: Layout, rank: int) -> None:
        """Does nothing: rows as they are need to know no tables.

        Args:
            layout: tables and shards of the exchange.
            rank: who sends.
        """

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[_Bytes]:
        """The messages of one iteration, to each rank.

        Args:
            pieces: for each rank, those for it; none for the sender itself.

        Returns:
            For each rank, its message: [nbytes] uint8, empty if it gets no rows.
        """
        return [_joined([as_bytes(piece.rows) for piece in parts]) for parts in pieces]

    def decode(self, message: _Bytes, rows: Sequence[Tensor]) -> None:
        """Fills tensors with the rows of a message.

        Args:
            message: [nbytes] uint8, what `encode` made for this rank.
            rows: for each piece, a contiguous tensor of the shape and the dtype that were encoded,
                on the CPU.

        Raises:
            CorruptionError: the message has another length than these rows.
        """
        total = sum(part.nbytes for part in rows)
        if len(message) != total:
            raise CorruptionError(f"{len(message)} bytes of rows came, {total} were asked for")
        at = 0
        for part in rows:
            as_bytes(part)[:] = message[at : at + part.nbytes]
            at += part.nbytes

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """How many bytes an element takes.

        Args:
            shard: its number.
            itemsize: bytes of an element as it is.

        Returns:
            `itemsize`.
        """
        return itemsize


def _joined(parts: Sequence[_Bytes]) -> _Bytes:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def as_bytes(rows: Tensor) -> _Bytes:
    """The bytes of a tensor on the CPU; a view if it is contiguous."""
    flat = rows.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()
