"""The other ranks of a process group: transfers to all of them that end, whatever happens to one.

Every operation (a collective, an exchange) runs inside `Peers.operation`. All ranks run the same
operations in the same order, and count them. A failure of any rank reaches all others:

- The rank that finds an error writes it down (board.py) before it raises it.
- A rank whose transfer does not end within half a second looks there again and again.
- A rank whose transfer fails asks which connections are closed, and which ranks never arrived,
  writes that down, and raises it.

The first failure that is written down is the one that all ranks raise, now or in their next
operation. After a failure the state of the connections is unknown, so an object refuses every
further operation with the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate

from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, PeerError
from packhorse.wire.backend import dist, torch
from packhorse.wire.board import Board, Failure
from packhorse.wire.flights import Flight, Flights
from packhorse.wire.handshake import ranks_words, shake_hands

__all__ = ["DEFAULT_TIMEOUT", "Peers", "as_timeout"]

DEFAULT_TIMEOUT = timedelta(minutes=5)
# How often a rank that waits looks for failures of others.
_GLANCE = timedelta(seconds=0.5)
# How long a rank whose transfer failed waits for others to say where they are. The others glance
# at the board in this time if they wait for the same transfer.
_GRACE_S = 1.5
# After a time-out of its own, gloo closes connections, and other ranks would take the closing one
# for the culprit. So the time-out here comes first.
_MARGIN = timedelta(seconds=5)
# The tag of the messages that find closed connections. No one receives them.
_PROBE_TAG = 0x5048


def as_timeout(timeout: timedelta | float | None) -> timedelta:
    """A time-out as callers pass it.

    Args:
        timeout: a duration, or seconds; None for five minutes.

    Raises:
        ValueError: it is not positive.
        TypeError: it is not a number.
    """
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout.total_seconds():g} s; it must be above 0")
    return timeout


class Peers:
    """One rank's view of a process group.

    Args:
        group: the group; None for the default one.
        timeout: how long a transfer may take, waiting for others included.
        options: what must be equal on all ranks, by name; compared before the first operation.

    Attributes:
        group: the group.
        rank: this rank in the group.
        size: how many ranks it has.
        number: how many operations have begun.

    Raises:
        ValueError: there is no process group, or this rank is not in it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta,
        options: Mapping[str, str],
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "there is no process group; call torch.distributed.init_process_group first"
            )
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise ValueError("this rank is not a member of the process group")
        self.group: dist.ProcessGroup = found
        self.rank = self.group.rank()
        self.size = self.group.size()
        self.timeout = timeout
        self.number = 0
        self._options = dict(options)
        self._board: Board | None = None
        self._failure: Failure | None = None
        self._what = "nothing"
        if self.size > 1:
            self._board = Board(self.group.get_group_store(), self.rank, self.size)
        self._has_met = self.size == 1
        self._backend_timeout = timeout + _MARGIN
        self._flights = Flights(self.group, self._backend_timeout)

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Runs an operation, in which this rank may transfer something.

        Args:
            what: its name, for messages.

        Raises:
            PackhorseError: this rank or another one failed, in this operation or an earlier one;
                all ranks raise the same error.
            BaseException: an error of this rank that is none of Packhorse's. The other ranks raise
                a PeerError that quotes it.
        """
        if self._failure is not None:
            raise self._failure.error()
        self.number += 1
        self._what = f"{what} (operation {self.number})"
        try:
            if not self._has_met:
                self._meet()
            yield
        except (PeerError, CorruptionError, CompatibilityError) as error:
            official = self._fail(Failure.of(error))
            if official == Failure.of(error):
                raise
            raise official.error() from error
        except BaseException as error:
            found = Failure.of(error)
            self._fail(found._replace(words=f"rank {self.rank} failed in {self._what}: {found[1]}"))
            raise

    def _meet(self) -> None:
        assert self._board is not None
        shake_hands(self._board, self._options, self.timeout)
        self._has_met = True

    def _fail(self, failure: Failure) -> Failure:
        if self._board is not None:
            failure = self._board.post(failure)
            if self._board.is_lost:
                # The others can only find out by themselves, and must not take this rank, whose
                # process may end now, for the culprit.
                time.sleep(_GRACE_S)
        self._failure = failure
        return failure

    def begin(self, collective: Callable[..., dist.Work], *args: object) -> dist.Work:
        """Begins a collective of PyTorch.

        Args:
            collective: takes the group, its time-out, and `args`.

        Returns:
            What to pass to `wait`.
        """
        try:
            return collective(self.group, self._backend_timeout, *args)
        except RuntimeError as error:
            raise self._diagnosis(error) from error

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Flight:
        """Begins to send each rank a part of some bytes, and to receive one from it.

        Args:
            output: where the parts of all ranks go, one after the other; uint8, contiguous. It
                must be left alone until `wait`.
            input: the parts for all ranks, likewise.
            output_splits: the length of each part that comes, in bytes.
            input_splits: the length of each part that goes.

        Returns:
            What to pass to `wait`.
        """
        coming, going = _cut(output, output_splits), _cut(input, input_splits)
        coming[self.rank].copy_(going[self.rank])
        return self.send(going, self.receive(coming))

    def receive(self, coming: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Announces that this rank receives something.

        Args:
            coming: where the bytes of each rank go; uint8, contiguous. Less may come. Nothing
                comes if it is empty, and from this rank itself. It must be left alone until the
                `wait` that follows.

        Returns:
            What to pass to `send`.
        """
        try:
            return self._flights.receive(coming, self.number)
        except RuntimeError as error:
            raise self._diagnosis(error) from error

    def send(self, going: Sequence[torch.Tensor], coming: list[dist.Work]) -> Flight:
        """Begins to send something.

        Args:
            going: the bytes for each rank, likewise.
            coming: what `receive` returned, to wait for both.

        Returns:
            What to pass to `wait`.
        """
        try:
            return self._flights.send(going, coming, self.number)
        except RuntimeError as error:
            raise self._diagnosis(error) from error

    def wait(self, work: dist.Work | Flight) -> None:
        """Waits for a transfer.

        Raises:
            PackhorseError: it failed, or did not end in time, or another rank has failed.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        has_told = False
        while True:
            try:
                work.wait(min(_GLANCE, self.timeout))
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() >= deadline:
                    raise self._diagnosis(error) from error
            else:
                return
            if self._board is None:
                continue
            if not has_told:
                self._board.arrive(self.number)
                has_told = True
            failure = self._board.failure()
            if failure is not None:
                raise failure.error()
            if self._board.is_lost and self._closed():
                raise self._diagnosis(RuntimeError("the store is lost"))

    def wait_on_device(self, work: dist.Work) -> None:
        """Waits for a transfer of a device's tensors as PyTorch does: its backend, which orders
        streams, has time-outs of its own, and would end its connections after one of ours.

        Raises:
            PackhorseError: it failed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._diagnosis(error) from error

    def _diagnosis(self, error: RuntimeError) -> PackhorseError:
        """What a transfer that failed means, as every rank says it."""
        if self._board is None:
            return PeerError(f"{self._what}: {_first_line(error)}")
        failure = self._board.failure()
        if failure is not None:
            return failure.error()
        closed = self._closed()
        if closed:
            return PeerError(
                f"{ranks_words(closed)} closed the connection during {self._what}: the process "
                "died or left; start all ranks again"
            )
        missing = self._missing()
        seconds = self.timeout.total_seconds()
        if missing:
            return PeerError(
                f"{ranks_words(missing)} did not take part in {self._what} within {seconds:g} s: "
                "the process hangs, or the ranks call different operations"
            )
        return PeerError(f"{self._what} failed within {seconds:g} s: {_first_line(error)}")

    def _closed(self) -> list[int]:
        """The ranks whose connections to this one are closed."""
        found, nothing = [], torch.zeros(1, dtype=torch.uint8)
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                self.group.send([nothing], rank, _PROBE_TAG)
            except RuntimeError as error:
                # A connection that this rank itself has given up says something else.
                if "by peer" in str(error) or "reset" in str(error):
                    found.append(rank)
        return found

    def _missing(self) -> list[int]:
        """The ranks that have not arrived where this one is."""
        assert self._board is not None
        self._board.arrive(self.number)
        deadline = time.monotonic() + _GRACE_S
        while (missing := self._board.missing(self.number)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return missing


def _cut(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    ends = accumulate(lengths)
    return [tensor[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
