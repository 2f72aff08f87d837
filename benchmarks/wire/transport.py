"""Buffers of bytes over a process group, in pieces or in one: what raw and packed payloads share.

gloo favours small messages: one of tens of megabytes reaches half the rate of the line when both
directions are busy, since they take turns once the buffers of the sockets are full. All payloads
therefore go in pieces of at most 1 MiB, except where an arm shows the difference.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

__all__ = ["broadcast", "exchange", "exchange_sizes"]

Bytes = NDArray[np.uint8]
MAX_PARTS = 15


def broadcast(
    parts: Sequence[Bytes] | None, group: dist.ProcessGroup, *, piece: int | None
) -> list[Bytes]:
    """Send buffers from rank 0 to all others.

    Args:
        parts: at most 15 buffers; None on a receiver.
        group: the ranks.
        piece: bytes of one message at most; None for a buffer in one.

    Returns:
        The buffers, on every rank.
    """
    sizes = torch.zeros(MAX_PARTS + 1, dtype=torch.int64)
    if parts is not None:
        sizes[0] = len(parts)
        sizes[1 : len(parts) + 1] = torch.tensor([part.nbytes for part in parts])
    dist.broadcast(sizes, 0, group)
    if parts is None:
        parts = [np.empty(int(size), np.uint8) for size in sizes[1 : 1 + int(sizes[0])]]
    for part in parts:
        for message in _pieces(_tensor(part), piece):
            dist.broadcast(message, 0, group)
    return list(parts)


def exchange_sizes(sizes: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """How many bytes each rank will send to this one, if this one sends so many to each."""
    out = torch.empty(len(sizes), dtype=torch.int64)
    dist.all_to_all_single(out, torch.tensor(sizes, dtype=torch.int64), group=group)
    return [int(size) for size in out]


def exchange(parts: Sequence[Bytes], outs: Sequence[Bytes], group: dist.ProcessGroup) -> None:
    """Send a buffer to each rank; what this rank sends itself is copied.

    All receives are posted before anything is sent. gloo tells the other side of a receive on
    the connection that carries the data: posted afterwards, it waits behind the data, and the two
    directions of a link take turns. `all_to_all_single` does that.

    Args:
        parts: for each rank.
        outs: where the buffer of each rank goes, of just its size.
        group: the ranks.
    """
    rank = dist.get_rank(group)
    outs[rank][:] = parts[rank]
    others = [other for other in range(len(parts)) if other != rank]
    works = [dist.irecv(_tensor(outs[k]), k, group) for k in others if outs[k].size]
    works += [dist.isend(_tensor(parts[k]), k, group) for k in others if parts[k].size]
    for work in works:
        if work is not None:
            work.wait()


def _pieces(message: torch.Tensor, piece: int | None) -> Sequence[torch.Tensor]:
    if piece is None or message.numel() <= piece:
        return [message] if message.numel() else []
    return torch.split(message, piece)


def _tensor(data: Bytes) -> torch.Tensor:
    if data.flags.writeable:
        return torch.from_numpy(data)
    # PyTorch warns of memory that may not be written; it only sends it.
    return torch.frombuffer(memoryview(data), dtype=torch.uint8) if data.size else torch.empty(0)
