"""Byte exchange: every rank gives every other rank some bytes, of any length.

First each rank tells each other one, in a statement of 32 bytes, how many bytes come and what their
checksum is. Then the bytes travel in rounds (rounds.py). A rank takes no more memory than
`max_nbytes` for the bytes of another rank, whatever that one states.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.wire.backend import dist, torch
from packhorse.wire.peers import Peers, as_timeout
from packhorse.wire.rounds import Rounds, n_pieces_of, piece_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ByteExchange"]

_MAGIC = b"PHWX"
_STATEMENT = struct.Struct("<4sIQII")  # magic, operation, bytes, their CRC32C, bytes' rounds
_CRC = struct.Struct("<I")  # of the fields before it
_STATEMENT_NBYTES = 32
_MAX_NBYTES = 1 << 32


class _Statement(NamedTuple):
    """What a rank says of the bytes that it will send to another one."""

    number: int
    nbytes: int
    crc: int
    most_rounds: int  # to any rank

    def to_bytes(self) -> bytes:
        text = _STATEMENT.pack(_MAGIC, *self)
        return (text + _CRC.pack(_core.crc32c(text))).ljust(_STATEMENT_NBYTES, b"\0")


class ByteExchange:
    """Exchanges bytes among the ranks of a process group.

    All ranks must make their objects, and call them, in the same order. An object may be used by
    one thread at a time.

    Args:
        group: the process group, whose backend must have CPU tensors (gloo); None for the default
            one.
        timeout: how long a transfer may take, waiting for other ranks included; a duration, or
            seconds. None for five minutes.
        max_nbytes: the most bytes that this rank accepts from another one in a call.

    Raises:
        ValueError: there is no process group, or this rank is not in it, or the time-out is not
            positive.

    Example:
        >>> from packhorse.wire import ByteExchange
        >>> def swap(group):
        ...     exchange = ByteExchange(group, timeout=60)
        ...     mine = [f"from {group.rank()} to {rank}".encode() for rank in range(group.size())]
        ...     return [bytes(theirs) for theirs in exchange.exchange(mine)]
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | float | None = None,
        max_nbytes: int = _MAX_NBYTES,
    ) -> None:
        self._peers = Peers(group, as_timeout(timeout), {"object": "ByteExchange"})
        self._rounds = Rounds(self._peers)
        self._max_nbytes = max_nbytes

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._peers.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._peers.size

    def exchange(self, parts: Sequence[Buffer]) -> list[ByteArray]:
        """Sends a part to each rank, and receives one from each.

        Args:
            parts: for each rank its bytes, in any C-contiguous buffer; only read. They must not
                change during the call.

        Returns:
            For each rank the bytes that it sent to this one: new memory, one-dimensional uint8.
            The part for this rank itself is copied.

        Raises:
            CorruptionError: bytes were damaged on their way, or a rank announced more than
                `max_nbytes`.
            CompatibilityError: a rank has another version, or is in another operation.
            PeerError: a rank died, did not take part in time, or failed.
            TypeError: a part is not a C-contiguous buffer.
            ValueError: there is not one part for each rank.
        """
        views = [as_bytes(part, f"part {rank}") for rank, part in enumerate(parts)]
        if len(views) != self.size:
            raise ValueError(f"{len(views)} parts for a group of {self.size} ranks; give one each")
        with self._peers.operation("exchange"):
            return self._exchange(views)

    def _exchange(self, views: list[ByteArray]) -> list[ByteArray]:
        rank = self.rank
        stated = self._state(views)
        received = [np.empty(statement.nbytes, np.uint8) for statement in stated]
        received[rank][:] = views[rank]

        def prepare(round_: int) -> tuple[ByteArray, list[int]]:
            pieces = [view[slice(*piece_of(view.size, round_))] for view in views]
            pieces[rank] = pieces[rank][:0]
            lengths = [piece.size for piece in pieces]
            memory = self._rounds.outgoing(round_, sum(lengths))[: sum(lengths)]
            return np.concatenate(pieces, out=memory), lengths

        def expect(round_: int) -> list[int]:
            ends = [piece_of(part.size, round_) for part in received]
            return [0 if i == rank else stop - start for i, (start, stop) in enumerate(ends)]

        def use(round_: int, messages: Sequence[ByteArray]) -> None:
            for i, message in enumerate(messages):
                if i != rank:
                    received[i][slice(*piece_of(received[i].size, round_))] = message

        self._rounds.run(max(one.most_rounds for one in stated), prepare, expect, use)
        for i, (part, statement) in enumerate(zip(received, stated, strict=True)):
            if i != rank and _core.crc32c(part) != statement.crc:
                raise CorruptionError(
                    f"the {part.size} bytes that rank {i} sent to rank {rank} were damaged on "
                    "their way: their checksum does not match; exchange them again"
                )
        return received

    def _state(self, views: list[ByteArray]) -> list[_Statement]:
        """Exchanges statements."""
        peers = self._peers
        n_rounds = max((n_pieces_of(view.size) for i, view in enumerate(views) if i != self.rank),
                       default=0)  # fmt: skip
        mine = [
            _Statement(peers.number & 0xFFFFFFFF, view.size, _core.crc32c(view), n_rounds)
            for view in views
        ]
        text = bytearray().join(statement.to_bytes() for statement in mine)
        lengths = [_STATEMENT_NBYTES] * self.size
        output = torch.empty(len(text), dtype=torch.uint8)
        peers.wait(
            peers.all_to_all(output, torch.frombuffer(text, dtype=torch.uint8), lengths, lengths)
        )
        found = output.numpy().tobytes()
        return [
            self._read(rank, found[rank * _STATEMENT_NBYTES : (rank + 1) * _STATEMENT_NBYTES])
            for rank in range(self.size)
        ]

    def _read(self, rank: int, text: bytes) -> _Statement:
        """Checks the statement of a rank."""
        magic, *fields = _STATEMENT.unpack_from(text)
        (crc,) = _CRC.unpack_from(text, _STATEMENT.size)
        if magic != _MAGIC or _core.crc32c(text[: _STATEMENT.size]) != crc:
            raise CorruptionError(
                f"rank {self.rank} received no statement from rank {rank}: the bytes were damaged, "
                "or the rank does something else; call the same operations on all ranks"
            )
        statement = _Statement(*fields)
        if statement.number != self._peers.number & 0xFFFFFFFF:
            raise CompatibilityError(
                f"rank {rank} is in exchange {statement.number}, and rank {self.rank} in exchange "
                f"{self._peers.number}; call the same operations on all ranks"
            )
        if rank != self.rank and statement.nbytes > self._max_nbytes:
            raise CorruptionError(
                f"rank {rank} announces {statement.nbytes} bytes to rank {self.rank}, which "
                f"accepts {self._max_nbytes}; raise max_nbytes or send less"
            )
        return statement
