"""Transfers between all pairs of ranks, whose receives are announced before anything is sent.

gloo's own all-to-all announces what it sends first, and then the two directions of a connection
take turns: on a link of 1 Gb/s it moves half of what the link could, or three quarters in pieces.
Receives that are announced first keep both directions busy.

gloo ends all connections when someone waits too long for a single receive. So a thread waits as
long as it takes, and the caller waits for the thread, and may give up. When the program ends, or
the object, and transfers are still on their way because something failed, that same behaviour of
gloo ends them: a thread that still waits would abort the program.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

from packhorse.wire.backend import dist, torch

__all__ = ["Flight", "Flights"]

_FIRST_TAG, _N_TAGS = 0x50480000, 1 << 15
_PATIENCE_S = 5  # for the thread to end


class Flight:
    """A transfer on its way. It has the methods of `torch.distributed.Work` that are needed."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.error: RuntimeError | None = None
        self.done = threading.Event()

    def wait(self, timeout: timedelta) -> bool:
        """Waits.

        Raises:
            RuntimeError: the transfer failed, or the time is over.
        """
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("the time is over")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self.done.is_set()


class Flights:
    """Begins transfers among the ranks of a group.

    Args:
        group: the group.
        timeout: after which gloo gives up, and closes its connections.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        rank, size = group.rank(), group.size()
        self._others = [(rank + step) % size for step in range(1, size)]
        self._queue: SimpleQueue[Flight | None] | None = None
        self._flying: list[Flight] = []

    def receive(self, coming: Sequence[torch.Tensor], number: int) -> list[dist.Work]:
        """Announces what this rank receives, as `Peers.receive` describes it."""
        tag = _FIRST_TAG + number % _N_TAGS
        return [self._group.recv([coming[i]], i, tag) for i in self._others if coming[i].numel()]

    def send(self, going: Sequence[torch.Tensor], coming: list[dist.Work], number: int) -> Flight:
        """Sends, as `Peers.send` describes it."""
        tag = _FIRST_TAG + number % _N_TAGS
        works = [self._group.send([going[i]], i, tag) for i in self._others if going[i].numel()]
        flight = Flight(coming + works)
        queue = self._waiting()
        self._flying.append(flight)
        queue.put(flight)
        return flight

    def _waiting(self) -> SimpleQueue[Flight | None]:
        """The queue of the thread, which starts when it is first needed and ends with this
        object."""
        if self._queue is None:
            self._queue = SimpleQueue()
            thread = threading.Thread(
                target=_wait_for_all, args=(self._queue, self._flying, self._timeout), daemon=True,
                name="packhorse-wire-flights",
            )  # fmt: skip
            thread.start()
            weakref.finalize(self, _end, self._queue, self._flying, thread)
        return self._queue


def _wait_for_all(
    queue: SimpleQueue[Flight | None], flying: list[Flight], timeout: timedelta
) -> None:
    while (flight := queue.get()) is not None:
        try:
            for work in flight.works:
                work.wait(timeout)
        except RuntimeError as error:
            flight.error = error
        flying.remove(flight)
        flight.works = ()
        flight.done.set()
        del flight


def _end(queue: SimpleQueue[Flight | None], flying: list[Flight], thread: threading.Thread) -> None:
    """Ends the thread, and transfers that are still on their way."""
    queue.put(None)
    for flight in list(flying):
        for work in flight.works:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
