"""`GroupTransport`: updates from one rank of a process group to all others, along a tree.

Each rank passes pieces of at most 1 MiB on to its children while the next piece arrives, so the
time hardly grows with the number of ranks, and the sender's link carries the update `fanout` times
only. The length goes first. What an update says about itself is checked by the receiver as always.

Only PyTorch's point-to-point operations are used. With NCCL, pieces go through memory of the GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.codecs.base import as_bytes
from packhorse.errors import CorruptionError, PeerError
from packhorse.late_import import import_late
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["GroupTransport"]

_HEAD = struct.Struct("<4sB3sQ")  # magic, kind, zeros, length of what follows
_MAGIC = b"\x89PHG"
_UPDATE, _FAILURE = 0, 1
_PIECE_NBYTES = 1 << 20  # gloo's rate falls beyond
_N_PIECES = 4  # that may be on their way to the children
_MAX_WORDS_NBYTES = 1 << 12


class GroupTransport:
    """Broadcasts updates over a process group of PyTorch. All ranks make one, with equal arguments,
    and call `broadcast` equally often."""

    def __init__(
        self,
        group: Any = None,
        *,
        src: int = 0,
        fanout: int = 2,
        timeout: float = 300.0,
        max_nbytes: int | None = None,
    ) -> None:
        """
        Args:
            group: the process group; None for the default one.
            src: the sender's rank in the group.
            fanout: to how many ranks each rank passes an update on. 1 makes a chain, which loads
                every link once; as many as there are receivers lets the sender do all.
            timeout: seconds to wait for each piece.
            max_nbytes: the most bytes of an update that are taken; None for no limit.

        Raises:
            ValueError: an argument is out of range, or there is no process group.
        """
        self._dist: Any = import_late("torch.distributed")
        self._torch: Any = import_late("torch")
        if not self._dist.is_initialized():
            raise ValueError("there is no process group; call init_process_group first")
        self._group = group
        self._size = int(self._dist.get_world_size(group))
        if not 0 <= src < self._size:
            raise ValueError(f"src is {src}; the group has ranks 0 to {self._size - 1}")
        if fanout < 1 or timeout <= 0:
            raise ValueError(f"fanout is {fanout} and timeout {timeout}; both must be above 0")
        self._src = src
        self._timeout = timedelta(seconds=timeout)
        self._max_nbytes = max_nbytes
        place = (self._dist.get_rank(group) - src) % self._size  # in the tree, whose root is 0
        first = place * fanout + 1
        self._parent = None if place == 0 else self._rank((place - 1) // fanout)
        self._children = [self._rank(p) for p in range(first, min(first + fanout, self._size))]
        on_gpu = "nccl" in str(self._dist.get_backend(group))
        self._device = "cuda" if on_gpu else "cpu"
        self._failure: PeerError | None = None

    def _rank(self, place: int) -> int:
        return (place + self._src) % self._size

    def broadcast(self, update: Update | Buffer | None = None) -> Buffer:
        """Sends an update to all ranks, or receives one. Every rank calls this.

        Args:
            update: what to send, on rank `src`; None on all others.

        Returns:
            The update's bytes, for `DeltaReceiver.stage`.

        Raises:
            PeerError: another rank died or did not answer in time; or the sender called `fail`.
            CorruptionError: more than `max_nbytes` were announced, or a rank is out of step.
            ValueError: rank `src` has no update, or another rank has one.
        """
        if (update is None) == (self._parent is None):
            raise ValueError(f"rank {self._src}, and no other, passes an update to broadcast()")
        if update is None:
            return self._pass_on()
        data = update.buffer() if isinstance(update, Update) else update
        self._send(_UPDATE, data)
        return data

    def fail(self, words: str) -> None:
        """Tells the ranks that wait in `broadcast` that there is no update; rank `src` calls it.

        Args:
            words: why, for their errors.

        Raises:
            ValueError: another rank calls it.
            PeerError: another rank died or did not answer in time.
        """
        if self._parent is not None:
            raise ValueError(f"only rank {self._src} can fail for all")
        self._send(_FAILURE, words.encode()[:_MAX_WORDS_NBYTES])

    def _send(self, kind: int, payload: Buffer) -> None:
        data = as_bytes(payload)
        head = np.frombuffer(_HEAD.pack(_MAGIC, kind, bytes(3), data.size), np.uint8)
        relay = _Relay(self)
        relay.pass_on(self._tensor(head.copy()))
        for at in range(0, data.size, _PIECE_NBYTES):
            relay.pass_on(self._tensor(data[at : at + _PIECE_NBYTES].copy()))
        relay.finish()

    def _pass_on(self) -> bytearray:
        """Receives what the parent sends, and passes it on."""
        relay = _Relay(self)
        head = self._receive(_HEAD.size)
        magic, kind, zeros, nbytes = _HEAD.unpack(self._bytes(head))
        if magic != _MAGIC or kind > _FAILURE or zeros.strip(b"\0"):
            raise CorruptionError(f"rank {self._parent} sent something else: the ranks are out of "
                                  "step")  # fmt: skip
        relay.pass_on(head)
        data = bytearray()  # grows with what arrives, not with what is announced
        is_too_long = self._max_nbytes is not None and nbytes > self._max_nbytes
        for length in _pieces(nbytes):
            piece = self._receive(length)
            relay.pass_on(piece)
            if not is_too_long:
                data += self._bytes(piece)
        relay.finish()
        if kind == _FAILURE:
            raise PeerError(f"rank {self._src} has no update: {data.decode(errors='replace')}")
        if is_too_long:
            raise CorruptionError(
                f"rank {self._src} sent {nbytes} bytes, more than max_nbytes = {self._max_nbytes}"
            )
        return data

    def _receive(self, nbytes: int) -> Any:
        assert self._parent is not None
        piece = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        with_rank = self._global(self._parent)
        self.wait(self._start(self._dist.irecv, piece, with_rank, self._parent), self._parent)
        return piece

    def start_send(self, piece: Any, rank: int) -> Any:
        """Begins to send a piece to a rank."""
        return self._start(self._dist.isend, piece, self._global(rank), rank)

    def _start(self, operation: Any, piece: Any, global_rank: int, rank: int) -> Any:
        if self._failure is not None:
            raise PeerError(f"the group failed before: {self._failure}") from self._failure
        try:
            return operation(piece, global_rank, group=self._group)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def wait(self, work: Any, rank: int) -> None:
        """Waits for an operation with a rank.

        Raises:
            PeerError: it failed, or took too long.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: Exception) -> PeerError:
        words = str(error).partition("\n")[0][:300]
        self._failure = PeerError(
            f"rank {rank} died, or did not answer within {self._timeout.total_seconds():g} s; "
            f"start the ranks again ({words})"
        )
        return self._failure

    @property
    def children(self) -> list[int]:
        """The ranks to which this one passes updates on."""
        return self._children

    def _global(self, rank: int) -> int:
        return rank if self._group is None else self._dist.get_global_rank(self._group, rank)

    def _tensor(self, data: Any) -> Any:
        return self._torch.from_numpy(data).to(self._device)

    def _bytes(self, piece: Any) -> bytes:
        return bytes(piece.cpu().numpy().tobytes())


class _Relay:
    """Sends pieces to the children of a rank, a few at a time."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport = transport
        self._sending: list[list[tuple[Any, int, Any]]] = []

    def pass_on(self, piece: Any) -> None:
        """Begins to send a piece, once there are few enough on their way."""
        if len(self._sending) == _N_PIECES:
            self._finish_first()
        self._sending.append(
            [
                (self._transport.start_send(piece, rank), rank, piece)
                for rank in self._transport.children
            ]
        )

    def finish(self) -> None:
        """Waits until all pieces are sent."""
        while self._sending:
            self._finish_first()

    def _finish_first(self) -> None:
        for work, rank, _ in self._sending.pop(0):  # the piece lives until it is sent
            self._transport.wait(work, rank)


def _pieces(nbytes: int) -> Iterator[int]:
    """The lengths of the pieces of a payload."""
    for at in range(0, nbytes, _PIECE_NBYTES):
        yield min(_PIECE_NBYTES, nbytes - at)
