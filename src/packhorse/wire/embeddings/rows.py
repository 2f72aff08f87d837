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

    Args:
        shard: its number.
        rows: [n, width]
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
            pieces: for each rank; none for the sender itself.
        """
        ...

    def decode(self, message: _Bytes, rows: Sequence[Tensor]) -> None:
        """Fills `rows`, contiguous tensors of the shapes and dtypes that were encoded.

        Raises:
            CorruptionError: the message has no such pieces.
        """
        ...

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """About how many bytes an element of a shard takes."""
        ...


class RawRows:
    """Rows as they are, one piece after the other."""

    def attach(self, layout: Layout, rank: int) -> None:
        """As `RowCodec`."""

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[_Bytes]:
        """As `RowCodec`."""
        return [_joined([as_bytes(piece.rows) for piece in parts]) for parts in pieces]

    def decode(self, message: _Bytes, rows: Sequence[Tensor]) -> None:
        """As `RowCodec`."""
        total = sum(part.nbytes for part in rows)
        if len(message) != total:
            raise CorruptionError(f"{len(message)} bytes of rows came, {total} were asked for")
        at = 0
        for part in rows:
            as_bytes(part)[:] = message[at : at + part.nbytes]
            at += part.nbytes

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """As `RowCodec`."""
        return itemsize


def _joined(parts: Sequence[_Bytes]) -> _Bytes:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def as_bytes(rows: Tensor) -> _Bytes:
    """The bytes of a tensor on the CPU; a view if it is contiguous."""
    flat = rows.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()
