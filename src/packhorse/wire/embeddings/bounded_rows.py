"""Rows and gradients within an error bound for each table: a `RowCodec` with loss.

All pieces for a rank become one message of bounded codes (docs/format.md, section 13), with
a segment for each piece. `TableBounds` says which bound a segment gets.

Gradients need more than a small error: a rounded gradient that is always rounded the same way never
arrives. Stochastic rounding is right on average and keeps no state. Error feedback adds what was
lost of a row to what is sent of it next time; it keeps a copy of each table at each sender,
so name the most rows that a table may have for it. Other tables are rounded stochastically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    decode_bounded,
    encode_bounded,
    read_segments,
)
from packhorse.errors import CorruptionError
from packhorse.torch_dtypes import NAMES
from packhorse.wire.backend import torch
from packhorse.wire.bounds import Bound, TableBounds
from packhorse.wire.embeddings.routes import Layout
from packhorse.wire.embeddings.rows import Piece, as_bytes

__all__ = ["BoundedRows"]

_Bytes = npt.NDArray[np.uint8]


class BoundedRows:
    """Codes rows within the bounds of their tables.

    A message is rounded as `bounds` says, or to the nearest values if all in it has error feedback.

    Args:
        bounds: which bounds. An object serves one direction of one exchange.
        feedback_rows: tables of at most so many rows get error feedback, with rounding to
            the nearest value; 0 for none.
        seed: of stochastic rounding; ranks and iterations differ by themselves.

    Example:
        >>> from packhorse.codecs.bounded import Rounding
        >>> from packhorse.wire.bounds import TableBounds
        >>> from packhorse.wire.embeddings import BoundedRows, EmbeddingExchange, on_rank
        >>> def connect():  # on each rank; rows and gradients travel with loss
        ...     tables = [on_rank("user", 1_000, 16, rank=0)]
        ...     rows = BoundedRows(TableBounds())
        ...     gradients = BoundedRows(TableBounds(rounding=Rounding.STOCHASTIC))
        ...     return EmbeddingExchange(tables, forward=rows, backward=gradients)
    """

    def __init__(self, bounds: TableBounds, *, feedback_rows: int = 0, seed: int = 0) -> None:
        self.bounds = bounds
        self.feedback_rows = feedback_rows
        self.seed = seed
        self._layout: Layout | None = None
        self._rank = 0
        self._lost: dict[int, Tensor] = {}  # by shard: [rows, width] of float32
        self._memory = torch.empty(0)  # of one message's elements: fresh pages cost more than codes

    def attach(self, layout: Layout, rank: int) -> None:
        """Called once, by the exchange that uses it.

        Args:
            layout: its tables and shards.
            rank: who sends.

        Raises:
            ValueError: another exchange uses this object already.
        """
        if self._layout is not None and self._layout is not layout:
            raise ValueError("these BoundedRows serve another exchange; make new ones")
        self._layout, self._rank = layout, rank

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[_Bytes]:
        """The messages of one iteration, to each rank; then the next iteration begins.

        Args:
            pieces: for each rank, those for it; none for the sender itself.

        Returns:
            For each rank, its message: [nbytes] uint8, empty if it gets no rows.
        """
        messages = [self._message(rank, parts) for rank, parts in enumerate(pieces)]
        self.bounds.advance()
        return messages

    def decode(self, message: _Bytes, rows: Sequence[Tensor]) -> None:
        """Fills tensors with the rows of a message.

        Args:
            message: [nbytes] uint8, what `encode` made for this rank.
            rows: for each piece, a tensor of the shape and the dtype that were encoded, on the CPU.

        Raises:
            CorruptionError: the message is damaged, or has other rows.
        """
        total = sum(part.numel() for part in rows)
        if total == 0:
            if len(message):
                raise CorruptionError(f"{len(message)} bytes of rows came, none were asked for")
            return
        flat = self._scratch(total, rows[0].dtype)
        _decode(message, flat)
        for part, values in zip(rows, torch.split(flat, [p.numel() for p in rows]), strict=True):
            part.copy_(values.view_as(part))

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """About how many bytes an element of a shard takes.

        Args:
            shard: its number.
            itemsize: bytes of an element as it is.

        Returns:
            The size of a code with the bits of the last bound; `itemsize` before the first one.
        """
        bits = self.bounds.bits_of(shard)
        return itemsize if bits is None else bits / 8

    def state_dict(self) -> dict[str, object]:
        """What resuming needs: the state of the bounds, and what is still to be sent."""
        return {"bounds": self.bounds.state_dict(), "lost": dict(self._lost)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from where `state_dict` was called.

        Args:
            state: what `state_dict` returned.

        Raises:
            KeyError: something is missing.
        """
        self.bounds.load_state_dict(state["bounds"])  # type: ignore[arg-type]
        self._lost = dict(state["lost"])  # type: ignore[call-overload]

    def _message(self, rank: int, pieces: Sequence[Piece]) -> _Bytes:
        pieces = [piece for piece in pieces if len(piece.rows)]
        if not pieces:
            return np.empty(0, np.uint8)
        values = [self._with_lost(piece) for piece in pieces]
        fed_back = [self._has_feedback(piece) for piece in pieces]
        bounds = [self._bound(piece, part) for piece, part in zip(pieces, values, strict=True)]
        segments = [Segment(v.numel(), *b) for v, b in zip(values, bounds, strict=True)]
        flat = self._scratch(sum(segment.n for segment in segments), values[0].dtype)
        torch.cat([part.reshape(-1) for part in values], out=flat)
        rounding = Rounding.NEAREST if all(fed_back) else self.bounds.rounding
        message = encode_bounded(
            as_bytes(flat), NAMES[flat.dtype], segments, rounding=rounding, seed=self._seed(rank)
        )
        self._count(pieces, message)
        if any(fed_back):
            self._keep_lost(pieces, flat, message)
        return message

    def _scratch(self, n: int, dtype: torch.dtype) -> Tensor:
        """Memory for `n` elements, until it is asked for again."""
        if self._memory.numel() < n or self._memory.dtype != dtype:
            self._memory = torch.empty(n, dtype=dtype)
        return self._memory[:n]

    def _bound(self, piece: Piece, rows: Tensor) -> Bound:
        assert self._layout is not None
        table = self._layout.tables[self._layout.table_of[piece.shard]]
        return self.bounds.bound_for(piece.shard, table.name, table.rows, rows.float().numpy())

    def _has_feedback(self, piece: Piece) -> bool:
        assert self._layout is not None
        rows, _ = self._layout.shards[piece.shard].shape
        return piece.ids is not None and rows <= self.feedback_rows

    def _with_lost(self, piece: Piece) -> Tensor:
        rows = piece.rows.detach()
        if not self._has_feedback(piece) or piece.shard not in self._lost:
            return rows
        return rows + self._lost[piece.shard][torch.from_numpy(piece.ids)].to(rows.dtype)

    def _keep_lost(self, pieces: Sequence[Piece], flat: Tensor, message: _Bytes) -> None:
        assert self._layout is not None
        got = torch.empty_like(flat)
        _decode(message, got)
        lost = (flat - got).float().nan_to_num_(0.0, 0.0, 0.0)
        sizes = [piece.rows.numel() for piece in pieces]
        for piece, part in zip(pieces, torch.split(lost, sizes), strict=True):
            if not self._has_feedback(piece):
                continue
            if piece.shard not in self._lost:
                self._lost[piece.shard] = torch.zeros(self._layout.shards[piece.shard].shape)
            self._lost[piece.shard][torch.from_numpy(piece.ids)] = part.view_as(piece.rows)

    def _count(self, pieces: Sequence[Piece], message: _Bytes) -> None:
        entries = read_segments(message)
        total = sum(entry.n * entry.bits for entry in entries)
        for piece, entry in zip(pieces, entries, strict=True):
            share = entry.n * entry.bits / total
            self.bounds.count(piece.shard, entry.n, entry.n_escapes, round(share * len(message)))

    def _seed(self, rank: int) -> int:
        text = f"{self.seed} {self._rank} {rank} {self.bounds.iteration}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _decode(message: _Bytes, flat: Tensor) -> None:
    try:
        decode_bounded(message, as_bytes(flat), dtype=NAMES[flat.dtype])
    except ValueError as error:
        raise CorruptionError(f"rows were asked for that did not come: {error}") from error
