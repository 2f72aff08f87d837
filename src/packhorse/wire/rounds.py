"""Transfers in rounds: pieces to all ranks at once, two rounds on their way at a time.

gloo moves small messages faster than large ones, so much data travels in pieces of at most 1 MiB
for each rank. While a round is on its way, the next one is prepared and the one before is used.
The sizes of a round must be known when it begins.

The memory of the rounds is kept for the next operation: fresh pages cost more than packing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.wire.backend import torch
from packhorse.wire.flights import Flight
from packhorse.wire.peers import Peers

__all__ = ["DEPTH", "PIECE_NBYTES", "Rounds", "n_pieces_of", "piece_of"]

PIECE_NBYTES = 1 << 20  # a multiple of the size of every element
DEPTH = 2  # rounds on their way at once
_N_OUTGOING = DEPTH + 1  # for rounds on their way, and for the one that begins


def n_pieces_of(nbytes: int) -> int:
    """How many pieces some bytes are."""
    return -(-nbytes // PIECE_NBYTES)


def piece_of(nbytes: int, round_: int) -> tuple[int, int]:
    """Where a piece begins and ends in `nbytes` bytes; pieces after the last one are empty."""
    start = min(round_ * PIECE_NBYTES, nbytes)
    return start, min(start + PIECE_NBYTES, nbytes)


class Rounds:
    """Runs rounds of transfers, and keeps their memory.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._outgoing = [np.empty(0, np.uint8) for _ in range(_N_OUTGOING)]
        self._incoming = [np.empty(0, np.uint8) for _ in range(DEPTH)]

    def outgoing(self, round_: int, nbytes: int) -> ByteArray:
        """Memory to prepare the messages of a round in, of at least `nbytes` bytes."""
        return _grown(self._outgoing, round_ % _N_OUTGOING, nbytes)

    def run(
        self,
        n_rounds: int,
        prepare: Callable[[int], tuple[ByteArray, list[int]]],
        expect: Callable[[int], list[int]],
        use: Callable[[int, Sequence[ByteArray]], None],
    ) -> None:
        """Runs some rounds.

        Args:
            n_rounds: how many; the same number on all ranks.
            prepare: takes the number of a round. Returns the messages for all ranks, one after the
                other in the memory of `outgoing`, and the length of each.
            expect: returns the length of the message that comes from each rank in a round. The
                messages of the rounds before the last one have been used by then.
            use: takes the number of a round, and the message of each rank. They are valid during
                the call.
        """
        flying: deque[tuple[int, Flight, ByteArray, list[int]]] = deque()
        for round_ in range(n_rounds):
            messages, lengths = prepare(round_)
            if len(flying) == DEPTH:
                self._land(flying.popleft(), use)
            coming = expect(round_)
            memory = _grown(self._incoming, round_ % DEPTH, sum(coming))
            work = self._peers.all_to_all(
                torch.from_numpy(memory[: sum(coming)]), torch.from_numpy(messages), coming, lengths
            )
            flying.append((round_, work, memory, coming))
        while flying:
            self._land(flying.popleft(), use)

    def _land(
        self,
        flight: tuple[int, Flight, ByteArray, list[int]],
        use: Callable[[int, Sequence[ByteArray]], None],
    ) -> None:
        round_, work, memory, lengths = flight
        self._peers.wait(work)
        messages, start = [], 0
        for length in lengths:
            messages.append(memory[start : start + length])
            start += length
        use(round_, messages)


def _grown(memories: list[ByteArray], index: int, nbytes: int) -> ByteArray:
    if memories[index].size < nbytes:
        memories[index] = np.empty(nbytes, np.uint8)
    return memories[index]
