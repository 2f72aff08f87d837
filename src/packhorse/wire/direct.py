"""Moves tensors' bytes as they are, from the memory of one rank to that of another.

Nothing is copied, stated or checked: this stands in for PyTorch's own collectives, which do not,
either. All receives are announced before anything is sent (flights.py), so both directions of a
link are busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.wire.backend import torch
from packhorse.wire.flights import Flight
from packhorse.wire.peers import Peers
from packhorse.wire.rounds import DEPTH, PIECE_NBYTES, n_pieces_of, piece_of

__all__ = ["Direct"]


class Direct:
    """Moves bytes among the ranks of a group.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._memory: list[list[ByteArray]] = []

    def move(self, outgoing: Sequence[ByteArray], incoming: Sequence[ByteArray]) -> None:
        """Sends bytes to each rank, and receives some from each.

        Args:
            outgoing: what each rank gets; empty for this rank.
            incoming: where that of each rank goes; empty for this rank.
        """
        self._peers.wait(self._begin(outgoing, incoming))

    def reduce(
        self,
        parts: Sequence[ByteArray],
        nbytes: int,
        use: Callable[[int, Sequence[ByteArray]], None],
    ) -> None:
        """Sends a part to each rank, piece by piece, and uses the pieces that come.

        Args:
            parts: what each rank gets; empty for this rank.
            nbytes: the length of what each rank sends to this one.
            use: takes the number of a round, and the piece of each rank; that of this rank is
                memory for one. They are valid during the call.
        """
        flying: deque[tuple[int, Flight, list[ByteArray]]] = deque()
        for round_ in range(n_pieces_of(max(nbytes, *(part.size for part in parts)))):
            if len(flying) == DEPTH:
                self._land(*flying.popleft(), use)
            begin, end = piece_of(nbytes, round_)
            coming = [memory[: end - begin] for memory in self.room(round_)]
            going = [part[slice(*piece_of(part.size, round_))] for part in parts]
            flying.append((round_, self._begin(going, coming), coming))
        while flying:
            self._land(*flying.popleft(), use)

    def _begin(self, going: Sequence[ByteArray], coming: Sequence[ByteArray]) -> Flight:
        works = self._peers.receive([torch.from_numpy(part) for part in coming])
        return self._peers.send([torch.from_numpy(part) for part in going], works)

    def _land(
        self,
        round_: int,
        flight: Flight,
        coming: list[ByteArray],
        use: Callable[[int, Sequence[ByteArray]], None],
    ) -> None:
        self._peers.wait(flight)
        use(round_, coming)

    def room(self, round_: int) -> list[ByteArray]:
        """Memory for a piece of each rank in a round, kept for the next operation."""
        while len(self._memory) < DEPTH:
            one = [np.empty(PIECE_NBYTES, np.uint8) for _ in range(self._peers.size)]
            self._memory.append(one)
        return self._memory[round_ % DEPTH]
