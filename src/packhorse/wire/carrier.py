"""Carries tensors' bytes to all ranks at once, piece by piece, packed or as they are.

One exchange of statements (statement.py) comes first, and tells the lengths of the first two
messages from each rank. Every message carries the length of the one after the next (pieces.py), so
there is no further exchange of sizes. A message is encoded two rounds before it is sent, and
decoded as soon as it is there, while other rounds are on their way (rounds.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.layout import Level
from packhorse.wire.peers import Peers
from packhorse.wire.pieces import (
    HEAD_NBYTES,
    PieceEncoder,
    capacity_of,
    decode_piece,
    finish,
    peek,
)
from packhorse.wire.repeats import RowFinder, RowMemory
from packhorse.wire.rounds import DEPTH, Rounds, n_pieces_of, piece_of
from packhorse.wire.statement import Statement, check_sizes, exchange_statements

__all__ = ["Carrier", "Delivery", "Effort"]


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
        self._rounds = Rounds(peers)
        self._level = level
        self._threads = threads
        self._row_memory = RowMemory()

    def deliver(self, delivery: Delivery, arm: int, *, is_packed: bool) -> Effort:
        """Carries a delivery. All ranks must call it at the same time.

        Args:
            delivery: what is carried.
            arm: how the operation runs, for statements.
            is_packed: whether to pack pieces; otherwise they travel as they are.

        Returns:
            What it cost.

        Raises:
            PackhorseError: as `Peers.wait` and `exchange_statements`; or a message is damaged.
        """
        level = self._level if is_packed else None
        finder = None
        if is_packed:
            finder = RowFinder(
                self._row_memory, delivery.outgoing, delivery.row_nbytes,
                has_past=delivery.has_past,
            )  # fmt: skip
        encoder = PieceEncoder(delivery.dtype, level, self._threads, finder)
        return _Run(self.peers, self._rounds, delivery, encoder, self._threads).run(arm)


class _Run:
    """One delivery on its way."""

    def __init__(
        self,
        peers: Peers,
        rounds: Rounds,
        delivery: Delivery,
        encoder: PieceEncoder,
        threads: int,
    ) -> None:
        self.peers = peers
        self.rounds = rounds
        self.delivery = delivery
        self.encoder = encoder
        self.threads = threads
        self.encoded: deque[tuple[ByteArray, list[int]]] = deque()
        # The lengths of the messages from each rank, for the next rounds that have none yet.
        self.announced: deque[list[int]] = deque()
        self.encode_seconds = self.decode_seconds = 0.0
        self.decoded_nbytes = 0

    def run(self, arm: int) -> Effort:
        delivery = self.delivery
        for round_ in range(DEPTH):
            self.encode(round_)
        lengths = [lengths for _, lengths in self.encoded]
        mine_rounds = max(n_pieces_of(part.size) for part in delivery.outgoing)
        stated = exchange_statements(
            self.peers,
            [
                Statement(
                    self.peers.number & 0xFFFFFFFF, delivery.what, delivery.argument, arm,
                    part.size, delivery.common, mine_rounds, lengths[0][rank], lengths[1][rank],
                )
                for rank, part in enumerate(delivery.outgoing)
            ],
            delivery.words,
        )  # fmt: skip
        check_sizes(self.peers, stated, delivery.incoming)
        for lengths_from in zip(*[(one.first, one.second) for one in stated], strict=True):
            self.announce(len(self.announced), list(lengths_from))
        n_rounds = max(one.n_rounds for one in stated)
        self.rounds.run(n_rounds, self.prepare, self.expect, self.use)
        return Effort(
            self.encoder.nbytes, self.encoder.encoded_nbytes, self.encode_seconds,
            self.decoded_nbytes, self.decode_seconds,
        )  # fmt: skip

    def encode(self, round_: int) -> None:
        """Encodes the messages of a round, one after the other."""
        start = time.perf_counter()
        delivery = self.delivery
        ends = [piece_of(part.size, round_) for part in delivery.outgoing]
        # A piece that turns out not to be worth packing has already taken the memory of a frame.
        room = sum(capacity_of(delivery.dtype, end - begin) for begin, end in ends if end > begin)
        memory, at = self.rounds.outgoing(round_, room), 0
        lengths, first = [], slice(0, 0)
        for rank, (begin, end) in enumerate(ends):
            if begin == end:
                lengths.append(0)
                continue
            if delivery.is_shared and first.stop:
                length = first.stop - first.start
                memory[at : at + length] = memory[first]
            else:
                part = delivery.outgoing[rank][:end]
                length = self.encoder.encode(part, begin, memory[at:], rank)
                first = slice(at, at + length)
            at += length
            lengths.append(length)
        self.encoded.append((memory[:at], lengths))
        self.encode_seconds += time.perf_counter() - start

    def prepare(self, round_: int) -> tuple[ByteArray, list[int]]:
        self.encode(round_ + DEPTH)
        messages, lengths = self.encoded.popleft()
        at = 0
        for length, next_nbytes in zip(lengths, self.encoded[DEPTH - 1][1], strict=True):
            if length:
                finish(messages[at : at + length], next_nbytes)
            at += length
        return messages, lengths

    def expect(self, round_: int) -> list[int]:
        del round_
        return self.announced.popleft()

    def announce(self, round_: int, lengths: list[int]) -> None:
        """Takes note of the lengths of the messages of a round, if they can be true."""
        for rank, (length, nbytes) in enumerate(zip(lengths, self.delivery.incoming, strict=True)):
            start, stop = piece_of(nbytes, round_)
            most = HEAD_NBYTES + stop - start if stop > start else 0
            if length > most or (most and length <= HEAD_NBYTES):
                raise CorruptionError(
                    f"rank {rank} announces a message of {length} bytes to rank "
                    f"{self.peers.rank}, for a piece of {stop - start} bytes"
                )
        self.announced.append(lengths)

    def use(self, round_: int, messages: Sequence[ByteArray]) -> None:
        """Decodes the messages of a round."""
        start = time.perf_counter()
        for rank, message in enumerate(messages):
            if not message.size:
                continue
            memory, begin = self.delivery.place(round_, rank)
            try:
                decode_piece(message, self.delivery.dtype, memory, self.threads, begin)
            except CorruptionError as error:
                raise CorruptionError(
                    f"piece {round_} that rank {rank} sent to rank {self.peers.rank} in "
                    f"{self.delivery.what} was damaged on its way: {error}"
                ) from error
            self.decoded_nbytes += memory.size - begin
        self.decode_seconds += time.perf_counter() - start
        self.announce(round_ + DEPTH, [peek(one) if one.size else 0 for one in messages])
        self.delivery.after(round_)
