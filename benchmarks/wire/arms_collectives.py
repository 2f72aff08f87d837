"""Ways to run an all-to-all and an all-gather without loss: PyTorch's, with zstd, and ours.

An arm is built once for a group and has two methods, values in and values out. To add one, add
a line to `ARMS`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.wire.transport import exchange, exchange_sizes

__all__ = ["ARMS", "Collective", "CollectiveArm", "available"]

Bytes = NDArray[np.uint8]
PIECE = 1 << 20
ZSTD_LEVEL = 1


class Collective(Protocol):
    """A way to run both collectives on one group."""

    def all_to_all(self, source: Tensor) -> Tensor:
        """Send the k-th of the equal parts of flat values to rank k; returns what all sent here,
        in the order of the ranks."""

    def all_gather(self, source: Tensor) -> Tensor:
        """The flat values of all ranks, end to end."""


@dataclass(frozen=True)
class CollectiveArm:
    """An entry of the comparison.

    Attributes:
        how: what it is.
        make: builds it for a group and a number of threads.
        ours: whether it is Packhorse's.
        warm_ups: calls before the first timed one; a way that measures first needs several.
    """

    how: str
    make: Callable[[dist.ProcessGroup, int], Collective]
    ours: bool = False
    warm_ups: int = 1


class Whole:
    """PyTorch's collectives, one call for all."""

    def __init__(self, group: dist.ProcessGroup, threads: int) -> None:
        self._group, self._world = group, dist.get_world_size(group)

    def all_to_all(self, source: Tensor) -> Tensor:
        out = torch.empty_like(source)
        dist.all_to_all_single(out, source, group=self._group)
        return out

    def all_gather(self, source: Tensor) -> Tensor:
        out = source.new_empty(self._world * source.numel())
        dist.all_gather(list(out.chunk(self._world)), source, self._group)
        return out


class Pieces(Whole):
    """PyTorch's collectives, a call for each piece of at most 1 MiB to each rank."""

    def all_to_all(self, source: Tensor) -> Tensor:
        parts = source.view(self._world, -1)
        out = torch.empty_like(parts)
        for piece in _pieces(parts.shape[1], source.element_size()):
            outs = torch.empty_like(parts[:, piece])
            dist.all_to_all_single(outs, parts[:, piece].contiguous(), group=self._group)
            out[:, piece] = outs
        return out.view(-1)

    def all_gather(self, source: Tensor) -> Tensor:
        out = source.new_empty(self._world, source.numel())
        for piece in _pieces(source.numel(), source.element_size()):
            dist.all_gather(list(out[:, piece].unbind()), source[piece], self._group)
        return out.view(-1)


class InPairs:
    """Receives and sends between all pairs of ranks, in pieces; all receives of a piece come
    first, so that both directions of a link are busy."""

    def __init__(self, group: dist.ProcessGroup, threads: int) -> None:
        self._group, self._world = group, dist.get_world_size(group)

    def all_to_all(self, source: Tensor) -> Tensor:
        out = torch.empty_like(source)
        self._exchange(list(_bytes(source).reshape(self._world, -1)), _bytes(out))
        return out

    def all_gather(self, source: Tensor) -> Tensor:
        out = source.new_empty(self._world * source.numel())
        self._exchange([_bytes(source)] * self._world, _bytes(out))
        return out

    def _exchange(self, parts: list[Bytes], out: Bytes) -> None:
        """Parts of equal size go to the ranks; what they send comes end to end."""
        outs = out.reshape(self._world, -1)
        for piece in _pieces(parts[0].size):
            exchange([part[piece] for part in parts], list(outs[:, piece]), self._group)


class ZstdPieces(InPairs):
    """The same with zstd for each piece, or the piece as it is if that is shorter. Later pieces
    are packed and earlier ones unpacked while one is under way."""

    def __init__(self, group: dist.ProcessGroup, threads: int) -> None:
        super().__init__(group, threads)
        self._pool = ThreadPoolExecutor(threads)

    def _exchange(self, parts: list[Bytes], out: Bytes) -> None:
        outs = out.reshape(self._world, -1)
        pieces = _pieces(parts[0].size)
        packed = [self._pack([part[piece] for part in parts]) for piece in pieces]
        waits: list[Future[None]] = []
        for piece, futures in zip(pieces, packed, strict=True):
            sent = [future.result() for future in futures]
            sizes = exchange_sizes([part.size for part in sent], self._group)
            got = [np.empty(size, np.uint8) for size in sizes]
            exchange(sent, got, self._group)
            waits += [
                self._pool.submit(_unpack, *pair) for pair in zip(got, outs[:, piece], strict=True)
            ]
        for wait in waits:
            wait.result()

    def _pack(self, parts: list[Bytes]) -> list[Future[Bytes]]:
        """A piece for each rank; one that is the same for all is packed once."""
        if len({part.ctypes.data for part in parts}) == 1:
            return [self._pool.submit(_pack, parts[0])] * len(parts)
        return [self._pool.submit(_pack, part) for part in parts]


class Packhorse:
    """`Collectives` of packhorse.wire."""

    def __init__(self, group: dist.ProcessGroup, threads: int, *, choice: str) -> None:
        wire = import_module("packhorse.wire")
        self._collectives = wire.Collectives(group, choice=choice, threads=threads, timeout=60)
        self._world = dist.get_world_size(group)

    def all_to_all(self, source: Tensor) -> Tensor:
        out = torch.empty_like(source)
        self._collectives.all_to_all_single(out, source)
        return out

    def all_gather(self, source: Tensor) -> Tensor:
        out = source.new_empty(self._world, source.numel())
        self._collectives.all_gather(out, source)
        return out.view(-1)


ARMS = {
    "raw": CollectiveArm("PyTorch's, in pieces of 1 MiB", Pieces),
    "raw, one piece": CollectiveArm("PyTorch's, in one call", Whole),
    "raw, receives first": CollectiveArm(
        "receives and sends between all pairs in pieces of 1 MiB, receives first", InPairs
    ),
    "zstd-1": CollectiveArm("zstd level 1 of each piece, receives first, overlapped", ZstdPieces),
    "packhorse raw": CollectiveArm(
        '`Collectives(choice="raw")`', partial(Packhorse, choice="raw"), ours=True
    ),
    "packhorse packed": CollectiveArm(
        '`Collectives(choice="packed")`', partial(Packhorse, choice="packed"), ours=True
    ),
    "packhorse": CollectiveArm(
        "`Collectives()`, which measures both in its first calls and takes the faster",
        partial(Packhorse, choice="auto"),
        ours=True,
        warm_ups=40,
    ),
}


def available(
    group: dist.ProcessGroup, threads: int, names: Sequence[str] | None = None
) -> tuple[dict[str, Collective], dict[str, str]]:
    """The arms that can run here, built; and for each of the others the reason.

    Args:
        group: all ranks.
        threads: that an arm may use.
        names: those that are wanted; None for all.
    """
    arms, absent = {}, {}
    for name, arm in ARMS.items():
        if names is not None and name not in names:
            continue
        try:
            arms[name] = arm.make(group, threads)
        except (ImportError, AttributeError) as reason:
            absent[name] = str(reason)
    return arms, absent


def _pieces(size: int, itemsize: int = 1) -> list[slice]:
    step = PIECE // itemsize
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _bytes(values: Tensor) -> Any:
    return values.view(torch.uint8).numpy()


def _pack(piece: Bytes) -> Bytes:
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(memoryview(piece))
    return np.frombuffer(packed, np.uint8) if len(packed) < piece.size else piece


def _unpack(packed: Bytes, out: Bytes) -> None:
    if packed.size == out.size:
        out[:] = packed
        return
    out[:] = np.frombuffer(zstandard.ZstdDecompressor().decompress(memoryview(packed)), np.uint8)
