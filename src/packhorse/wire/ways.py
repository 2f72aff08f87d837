"""The ways to run each collective: by PyTorch itself, in pieces, or packed.

The functions here trust their arguments, which `Collectives` has checked. Tensors are contiguous.
Those on a device are packed there (device_ways.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.errors import CompatibilityError
from packhorse.wire import torch_ways
from packhorse.wire.backend import dist, torch
from packhorse.wire.carrier import Carrier, Delivery, Effort
from packhorse.wire.device_ways import DeviceWays, is_on_device
from packhorse.wire.direct import Direct
from packhorse.wire.dtypes import bytes_of, frame_dtype, tensor_of
from packhorse.wire.rounds import piece_of
from packhorse.wire.selector import Arm
from packhorse.wire.statement import ROOT_WORDS, described
from packhorse.wire.sums import OPERATIONS, REDUCTION_WORDS, reduce_into

__all__ = ["Ways"]

_EMPTY = np.empty(0, np.uint8)


class Ways:
    """Runs collectives, each in the way that it is told.

    Args:
        carrier: carries pieces.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._peers = carrier.peers
        self._on_device = DeviceWays(carrier.peers)
        self._direct = Direct(carrier.peers)

    def _run(
        self, collective: Callable[..., dist.Work], tensor: torch.Tensor, *args: Any
    ) -> Effort:
        """Runs a collective of PyTorch."""
        work = self._peers.begin(collective, tensor, *args)
        if is_on_device(tensor):
            self._peers.wait_on_device(work)
        else:
            self._peers.wait(work)
        return Effort()

    def _move(self, outgoing: Sequence[ByteArray], incoming: Sequence[ByteArray]) -> Effort:
        """Moves bytes as they are."""
        self._direct.move(outgoing, incoming)
        return Effort()

    def _carry(self, delivery: Delivery, arm: Arm) -> Effort:
        if self._peers.size == 1:
            return Effort()
        return self._carrier.deliver(delivery, arm)

    def all_to_all(
        self,
        arm: Arm,
        output: torch.Tensor,
        input: torch.Tensor,
        output_nbytes: Sequence[int],
        input_nbytes: Sequence[int],
    ) -> Effort:
        """`all_to_all_single`; the lengths of the parts are in bytes.

        Raises:
            CompatibilityError: the part for this rank itself has two lengths.
        """
        peers = self._peers
        if output_nbytes[peers.rank] != input_nbytes[peers.rank]:
            raise CompatibilityError(
                f"rank {peers.rank} sends {input_nbytes[peers.rank]} bytes to itself, and expects "
                f"{output_nbytes[peers.rank]}; make the splits fit"
            )
        if arm == Arm.TORCH:
            return self._run(
                torch_ways.all_to_all, output, input, list(output_nbytes), list(input_nbytes)
            )
        if is_on_device(input):
            return self._on_device.all_to_all(output, input, output_nbytes, input_nbytes)
        source, target = bytes_of(input), bytes_of(output)
        is_in_place = np.may_share_memory(source, target)  # then what comes changes what goes
        if is_in_place and arm == Arm.PIECES:
            source = source.copy()
        sent, received = _cut(source, input_nbytes), _cut(target, output_nbytes)
        np.copyto(received[peers.rank], sent[peers.rank])
        sent[peers.rank] = received[peers.rank] = _EMPTY
        if arm == Arm.PIECES:
            return self._move(sent, received)
        return self._carry(
            Delivery(
                described("a2a", input.dtype), frame_dtype(input.dtype), sent,
                [part.size for part in received], _places(received),
                row_nbytes=_row_nbytes(input),
                has_past=not is_in_place,
            ),
            arm,
        )  # fmt: skip

    def all_gather(self, arm: Arm, output: torch.Tensor, input: torch.Tensor) -> Effort:
        """`all_gather_into_tensor`."""
        if arm == Arm.TORCH:
            return self._run(torch_ways.all_gather, output, input)
        if is_on_device(input):
            return self._on_device.all_gather(output, input)
        size, mine = self._peers.size, bytes_of(input)
        parts = _cut(bytes_of(output), [mine.size] * size)
        np.copyto(parts[self._peers.rank], mine)
        return self._gather(arm, "ag", input, mine, parts)

    def _gather(
        self, arm: Arm, what: str, like: torch.Tensor, mine: ByteArray, parts: list[ByteArray]
    ) -> Effort:
        """Sends this rank's bytes to all others, and puts theirs in their places."""
        rank, size = self._peers.rank, self._peers.size
        outgoing = [_EMPTY if i == rank else mine for i in range(size)]
        if arm == Arm.PIECES:
            return self._move(outgoing, [_EMPTY if i == rank else parts[i] for i in range(size)])
        incoming = [0 if i == rank else part.size for i, part in enumerate(parts)]
        total = sum(part.size for part in parts)
        delivery = Delivery(
            described(what, like.dtype), frame_dtype(like.dtype), outgoing, incoming,
            _places(parts),
            is_shared=True, common=total, row_nbytes=_row_nbytes(like), has_past=True,
        )  # fmt: skip
        return self._carry(delivery, arm)

    def broadcast(self, arm: Arm, tensor: torch.Tensor, root: int) -> Effort:
        """`broadcast`; the root is a rank of the group."""
        if arm == Arm.TORCH:
            return self._run(torch_ways.broadcast, tensor, root)
        if is_on_device(tensor):
            return self._on_device.broadcast(tensor, root)
        rank, size, data = self._peers.rank, self._peers.size, bytes_of(tensor)
        is_root = rank == root
        outgoing = [data if is_root and i != rank else _EMPTY for i in range(size)]
        if arm == Arm.PIECES:
            coming = [data if i == root and not is_root else _EMPTY for i in range(size)]
            return self._move(outgoing, coming)
        incoming = [data.size if i == root and not is_root else 0 for i in range(size)]
        delivery = Delivery(
            described("bc", tensor.dtype), frame_dtype(tensor.dtype), outgoing, incoming,
            _places([data] * size), is_shared=True, argument=root, words=ROOT_WORDS,
            common=data.size, row_nbytes=_row_nbytes(tensor), has_past=True,
        )  # fmt: skip
        return self._carry(delivery, arm)

    def reduce_scatter(
        self, arm: Arm, output: torch.Tensor, input: torch.Tensor, name: str
    ) -> Effort:
        """`reduce_scatter_tensor`."""
        if arm == Arm.TORCH:
            op = getattr(dist.ReduceOp, name)
            return self._run(torch_ways.reduce_scatter, output, input, op)
        if is_on_device(input):
            return self._on_device.reduce_scatter(output, input, name)
        result = bytes_of(output)
        parts = _cut(bytes_of(input), [result.size] * self._peers.size)
        return self._reduce(arm, "rs", input, parts, result, name)

    def all_reduce(self, arm: Arm, tensor: torch.Tensor, name: str) -> Effort:
        """`all_reduce`: each rank reduces a part, and sends it to all others."""
        if arm == Arm.TORCH:
            op = getattr(dist.ReduceOp, name)
            return self._run(torch_ways.all_reduce, tensor, op)
        if is_on_device(tensor):
            return self._on_device.all_reduce(tensor, name)
        size, n = self._peers.size, tensor.numel()
        lengths = [(n * (i + 1) // size - n * i // size) * tensor.itemsize for i in range(size)]
        parts = _cut(bytes_of(tensor), lengths)
        mine = parts[self._peers.rank]
        effort = self._reduce(arm, "ar", tensor, parts, mine, name)
        return effort.plus(self._gather(arm, "ar2", tensor, mine, parts))

    def _reduce(
        self,
        arm: Arm,
        what: str,
        like: torch.Tensor,
        parts: list[ByteArray],
        result: ByteArray,
        name: str,
    ) -> Effort:
        """Sends a part to each rank, and reduces those that come with this rank's own. The result
        may lie in this rank's part."""
        rank, size = self._peers.rank, self._peers.size
        own = parts[rank]

        def reduce(round_: int, pieces: Sequence[ByteArray]) -> None:
            start, stop = piece_of(result.size, round_)
            if start == stop:
                return
            np.copyto(pieces[rank], own[start:stop])
            values = [tensor_of(piece, like.dtype) for piece in pieces]
            reduce_into(tensor_of(result[start:stop], like.dtype), values, name)

        outgoing = [_EMPTY if i == rank else part for i, part in enumerate(parts)]
        if arm == Arm.PIECES or size == 1:
            self._direct.reduce(outgoing, result.size, reduce)
            return Effort()

        def pieces(round_: int) -> list[ByteArray]:
            start, stop = piece_of(result.size, round_)
            return [memory[: stop - start] for memory in self._direct.room(0)]

        def place(round_: int, source: int) -> tuple[ByteArray, int]:
            return pieces(round_)[source], 0

        def after(round_: int) -> None:
            reduce(round_, pieces(round_))

        incoming = [0 if i == rank else result.size for i in range(size)]
        delivery = Delivery(
            described(what, like.dtype), frame_dtype(like.dtype), outgoing, incoming, place, after,
            argument=OPERATIONS.index(name), words=REDUCTION_WORDS,
            common=sum(part.size for part in parts), row_nbytes=_row_nbytes(like),
        )  # fmt: skip
        return self._carry(delivery, arm)


def _cut(data: ByteArray, lengths: Sequence[int]) -> list[ByteArray]:
    """Consecutive parts of some bytes."""
    ends = list(accumulate(lengths))
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _places(parts: Sequence[ByteArray]) -> Callable[[int, int], tuple[ByteArray, int]]:
    """Where the piece of a rank goes in a round, if its part lies in one piece of memory."""

    def place(round_: int, rank: int) -> tuple[ByteArray, int]:
        start, stop = piece_of(parts[rank].size, round_)
        return parts[rank][:stop], start

    return place


def _row_nbytes(tensor: torch.Tensor) -> int:
    """How long rows may be that repeat: the last dimension; 0 if there is only one."""
    return tensor.shape[-1] * tensor.itemsize if tensor.dim() > 1 else 0
