"""Byte exchange: every rank gives every other rank some bytes, of any length.

A message begins with a statement of 32 bytes: how many bytes come, and what their checksum is.
The first bytes follow at once, as many as the receiver has room for: the longest message that this
sender has sent it so far, which both know, at most a piece of a round. So calls like those before
them take one message to each rank. Bytes behind these travel in rounds (rounds.py). A rank takes no
more memory than `max_nbytes` for the bytes of another rank, whatever that one states.
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
from packhorse.wire.backend import dist
from packhorse.wire.peers import Peers, as_timeout
from packhorse.wire.rounds import PIECE_NBYTES, Rounds, n_pieces_of, piece_of

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
    most_rounds: int  # to any rank, of bytes for which there was no room

    def to_array(self) -> ByteArray:
        text = _STATEMENT.pack(_MAGIC, *self)
        text = (text + _CRC.pack(_core.crc32c(text))).ljust(_STATEMENT_NBYTES, b"\0")
        return np.frombuffer(text, np.uint8)


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
        # Behind a statement, for the bytes from each rank here, and for those from here there.
        self._room_here = [0] * self.size
        self._room_there = [0] * self.size

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
        stated, received = self._exchange_first(views)
        rests = [view[room:] for view, room in zip(views, self._room_there, strict=True)]
        missing = [part[room:] for part, room in zip(received, self._room_here, strict=True)]
        rests[rank], missing[rank] = views[rank][:0], received[rank][:0]

        def prepare(round_: int) -> tuple[ByteArray, list[int]]:
            return self._joined(round_, [[r[slice(*piece_of(r.size, round_))]] for r in rests])

        def expect(round_: int) -> list[int]:
            ends = [piece_of(part.size, round_) for part in missing]
            return [stop - start for start, stop in ends]

        def use(round_: int, messages: Sequence[ByteArray]) -> None:
            for part, message in zip(missing, messages, strict=True):
                part[slice(*piece_of(part.size, round_))] = message

        self._rounds.run(max(one.most_rounds for one in stated), prepare, expect, use)
        for i, (part, statement) in enumerate(zip(received, stated, strict=True)):
            if i != rank and _core.crc32c(part) != statement.crc:
                raise CorruptionError(
                    f"the {part.size} bytes that rank {i} sent to rank {rank} were damaged on "
                    "their way: their checksum does not match; exchange them again"
                )
        self._room_there = _grown(self._room_there, views)
        self._room_here = _grown(self._room_here, received)
        return received

    def _exchange_first(self, views: list[ByteArray]) -> tuple[list[_Statement], list[ByteArray]]:
        """Exchanges statements, and the bytes for which there is room.

        Returns:
            The statement of each rank, and memory for its bytes, in which the first ones are.
        """
        rank, number = self.rank, self._peers.number & 0xFFFFFFFF
        rests = [view.size - room for view, room in zip(views, self._room_there, strict=True)]
        rests[rank] = 0
        n_rounds = n_pieces_of(max(0, *rests))
        stated = [_Statement(number, view.size, _core.crc32c(view), n_rounds) for view in views]
        received = [np.empty(0, np.uint8)] * self.size
        received[rank] = views[rank].copy()

        def prepare(round_: int) -> tuple[ByteArray, list[int]]:
            messages = [
                [] if i == rank else [statement.to_array(), view[:room]]
                for i, (statement, view, room) in enumerate(
                    zip(stated, views, self._room_there, strict=True)
                )
            ]
            return self._joined(round_, messages)

        def expect(round_: int) -> list[int]:
            return [
                0 if i == rank else _STATEMENT_NBYTES + room
                for i, room in enumerate(self._room_here)
            ]

        def use(round_: int, messages: Sequence[ByteArray]) -> None:
            for i, message in enumerate(messages):
                if i == rank:
                    continue
                stated[i] = self._read(i, message[:_STATEMENT_NBYTES].tobytes())
                received[i] = np.empty(stated[i].nbytes, np.uint8)
                n_here = min(stated[i].nbytes, self._room_here[i])
                received[i][:n_here] = message[_STATEMENT_NBYTES:][:n_here]

        self._rounds.run(1, prepare, expect, use)
        return stated, received

    def _joined(
        self, round_: int, messages: Sequence[Sequence[ByteArray]]
    ) -> tuple[ByteArray, list[int]]:
        """The messages of a round, each of some parts, one after the other; and their lengths."""
        lengths = [sum(part.size for part in parts) for parts in messages]
        memory = self._rounds.outgoing(round_, sum(lengths))[: sum(lengths)]
        parts = [part for parts in messages for part in parts]
        return np.concatenate(parts or [memory], out=memory), lengths

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


def _grown(room: Sequence[int], parts: Sequence[ByteArray]) -> list[int]:
    """The room for parts that come after these."""
    return [
        max(before, min(part.size, PIECE_NBYTES)) for before, part in zip(room, parts, strict=True)
    ]
