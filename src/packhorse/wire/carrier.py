"""Carries tensors' bytes to all ranks at once, piece by piece, packed.

The first message between each two ranks begins with a statement (statement.py), even if no piece
follows. A receiver announces memory for the longest message that could come, and the message says
how long it is, so no exchange of sizes comes first. A round of pieces is encoded, and one before it
decoded, while others are on their way.

The memory is kept for the next operation: fresh pages cost more than packing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.layout import Level
from packhorse.wire.backend import dist, torch
from packhorse.wire.flights import Flight
from packhorse.wire.peers import Peers
from packhorse.wire.pieces import (
    HEAD_NBYTES,
    PieceEncoder,
    capacity_of,
    decode_piece,
    message_in,
)
from packhorse.wire.repeats import RowFinder, RowMemory
from packhorse.wire.rounds import DEPTH, PIECE_NBYTES, n_pieces_of, piece_of
from packhorse.wire.statement import NBYTES, Statement, check_sizes, read_statements

__all__ = ["Carrier", "Delivery", "Effort"]


_EMPTY = np.empty(0, np.uint8)
_NOTHING = torch.empty(0, dtype=torch.uint8)


def _nothing(round_: int) -> None:
    del round_


class Delivery(NamedTuple):
    """What this rank sends to each rank and receives from each.

    Attributes:
        what: the operation, for statements.
        dtype: of all pieces, as frames name it.
        outgoing: the bytes for each rank; empty for this rank itself.
        incoming: how many bytes come from each rank; 0 from this rank itself.
        place: takes a round and a rank; returns memory, and where in it the piece that comes
            begins, which ends it.
        after: called with a round when all of its pieces are in their places.
        is_shared: whether all other ranks get the same bytes.
        argument: as in a statement.
        words: what the argument means, for messages.
        common: a size that must be the same on all ranks; 0 if there is none.
        row_nbytes: how long rows may be that repeat; 0 if nobody knows.
        has_past: whether `place` gives memory that has all earlier pieces from the rank before the
            piece, on all ranks, and bytes for others do not change during the delivery.
    """

    what: str
    dtype: str
    outgoing: Sequence[ByteArray]
    incoming: Sequence[int]
    place: Callable[[int, int], tuple[ByteArray, int]]
    after: Callable[[int], None] = _nothing
    is_shared: bool = False
    argument: int = 0
    words: Sequence[str] = ()
    common: int = 0
    row_nbytes: int = 0
    has_past: bool = False


class Effort(NamedTuple):
    """What a delivery cost this rank.

    Attributes:
        nbytes: bytes that were encoded.
        encoded_nbytes: bytes of the messages that they became.
        encode_seconds: time that encoding took.
        decoded_nbytes: bytes that were decoded.
        decode_seconds: time that decoding took.
    """

    nbytes: int = 0
    encoded_nbytes: int = 0
    encode_seconds: float = 0.0
    decoded_nbytes: int = 0
    decode_seconds: float = 0.0

    def plus(self, other: Effort) -> Effort:
        """The effort for two deliveries."""
        return Effort(
            self.nbytes + other.nbytes,
            self.encoded_nbytes + other.encoded_nbytes,
            self.encode_seconds + other.encode_seconds,
            self.decoded_nbytes + other.decoded_nbytes,
            self.decode_seconds + other.decode_seconds,
        )


class Carrier:
    """Carries deliveries among the ranks of a group.

    Args:
        peers: the other ranks.
        level: how hard to pack.
        threads: how many to use for a piece.
    """

    def __init__(self, peers: Peers, level: Level, threads: int) -> None:
        self.peers = peers
        self.level = level
        self.threads = threads
        self.row_memory = RowMemory()
        self._memory: dict[tuple[bool, int, int], ByteArray] = {}

    def deliver(self, delivery: Delivery, arm: int) -> Effort:
        """Carries a delivery. All ranks must call it at the same time.

        Args:
            delivery: what is carried.
            arm: how the operation runs, for statements.

        Returns:
            What it cost.

        Raises:
            PackhorseError: as `Peers.wait` and `read_statements`; or a message is damaged.
        """
        return _Run(self, delivery).run(arm)

    def memory(self, is_sent: bool, round_: int, rank: int, nbytes: int) -> ByteArray:
        """Memory for the message to a rank or from it, until `DEPTH` rounds later."""
        key = (is_sent, round_ % DEPTH, rank)
        found = self._memory.get(key, _EMPTY)
        if found.size < nbytes:
            found = self._memory[key] = np.empty(nbytes, np.uint8)
        return found[:nbytes]


class _Run:
    """One delivery on its way."""

    def __init__(self, carrier: Carrier, delivery: Delivery) -> None:
        self.carrier = carrier
        self.peers = carrier.peers
        self.others = [rank for rank in range(self.peers.size) if rank != self.peers.rank]
        self.delivery = delivery
        finder = RowFinder(
            carrier.row_memory, delivery.outgoing, delivery.row_nbytes, has_past=delivery.has_past
        )
        self.encoder = PieceEncoder(delivery.dtype, carrier.level, carrier.threads, finder)
        self.encode_seconds = self.decode_seconds = 0.0
        self.decoded_nbytes = 0

    def run(self, arm: int) -> Effort:
        delivery = self.delivery
        statements = self.statements(arm)
        lengths = [part.size for part in delivery.outgoing] + [*delivery.incoming]
        flying: deque[tuple[int, Flight, list[ByteArray]]] = deque()
        for round_ in range(max(1, n_pieces_of(max(lengths)))):
            if len(flying) == DEPTH:
                self.land(*flying.popleft(), statements)
            memories, works = self.receive(round_)
            flight = self.peers.send(self.encode(round_, statements), works)
            flying.append((round_, flight, memories))
        while flying:
            self.land(*flying.popleft(), statements)
        return Effort(
            self.encoder.nbytes, self.encoder.encoded_nbytes, self.encode_seconds,
            self.decoded_nbytes, self.decode_seconds,
        )  # fmt: skip

    def statements(self, arm: int) -> list[bytes]:
        """What this rank states to each."""
        delivery, number = self.delivery, self.peers.number & 0xFFFFFFFF
        argument, common = delivery.argument, delivery.common
        return [
            Statement(number, delivery.what, argument, arm, part.size, common).to_bytes()
            for part in delivery.outgoing
        ]

    def receive(self, round_: int) -> tuple[list[ByteArray], list[dist.Work]]:
        """Announces memory for a round. A rank that lies about its sizes cannot overrun it."""
        memories = [_EMPTY] * self.peers.size
        for rank in self.others:
            if not round_ or n_pieces_of(self.delivery.incoming[rank]) > round_:
                most = NBYTES + HEAD_NBYTES + PIECE_NBYTES
                memories[rank] = self.carrier.memory(False, round_, rank, most)
        return memories, self.peers.receive([torch.from_numpy(one) for one in memories])

    def encode(self, round_: int, statements: Sequence[bytes]) -> list[torch.Tensor]:
        """The messages of a round."""
        start = time.perf_counter()
        messages = [_NOTHING] * self.peers.size
        for rank in self.others:
            is_same = self.delivery.is_shared and rank != self.others[0]
            first = messages[self.others[0]]
            messages[rank] = first if is_same else self.message(round_, rank, statements[rank])
        self.encode_seconds += time.perf_counter() - start
        return messages

    def message(self, round_: int, rank: int, statement: bytes) -> torch.Tensor:
        """The message of a round to a rank."""
        delivery = self.delivery
        begin, end = piece_of(delivery.outgoing[rank].size, round_)
        # A piece that turns out not to be worth packing has already taken the memory of a frame.
        room = capacity_of(delivery.dtype, end - begin) if end > begin else 0
        memory, at = self.carrier.memory(True, round_, rank, NBYTES + room), 0
        if not round_:
            memory[:NBYTES] = np.frombuffer(statement, np.uint8)
            at = NBYTES
        if end > begin:
            part = delivery.outgoing[rank][:end]
            at += self.encoder.encode(part, begin, memory[at:], rank)
        return torch.from_numpy(memory[:at])

    def land(
        self, round_: int, flight: Flight, memories: list[ByteArray], statements: Sequence[bytes]
    ) -> None:
        """Waits for a round, and decodes its messages."""
        self.peers.wait(flight)
        if not round_:
            self.compare(memories, statements)
            memories = [memory[NBYTES:] for memory in memories]
        start = time.perf_counter()
        for rank in self.others:
            begin, end = piece_of(self.delivery.incoming[rank], round_)
            if end > begin:
                self.decode(round_, rank, memories[rank], end - begin)
        self.decode_seconds += time.perf_counter() - start
        self.delivery.after(round_)

    def compare(self, memories: list[ByteArray], statements: Sequence[bytes]) -> None:
        """Reads the statements of all ranks."""
        texts = [memory[:NBYTES].tobytes() for memory in memories]
        texts[self.peers.rank] = statements[self.peers.rank]
        stated = read_statements(self.peers, texts, self.delivery.words)
        check_sizes(self.peers, stated, self.delivery.incoming)

    def decode(self, round_: int, rank: int, memory: ByteArray, nbytes: int) -> None:
        """Decodes the message of a rank."""
        delivery, rank_here = self.delivery, self.peers.rank
        target, begin = delivery.place(round_, rank)
        try:
            message = message_in(memory, nbytes)
            decode_piece(message, delivery.dtype, target, self.carrier.threads, begin)
        except CorruptionError as error:
            raise CorruptionError(
                f"piece {round_} that rank {rank} sent to rank {rank_here} in {delivery.what} was "
                f"damaged on its way: {error}"
            ) from error
        self.decoded_nbytes += nbytes
