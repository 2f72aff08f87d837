"""Jobs of ranks whose tensors take the ways of a device, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from wire_jobs import moves, noise, same, weights

from packhorse.wire import Collectives, Rates, collectives, ways
from packhorse.wire import device_ways as device_ways_module

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int32)
OPS = ("SUM", "AVG", "MIN", "MAX")


@contextmanager
def as_on_device() -> Iterator[None]:
    """Lets tensors in host memory take the ways of a device, whose kernels are interpreted."""
    with (
        patch.object(collectives, "is_on_device", lambda tensor: True),
        patch.object(ways, "is_on_device", lambda tensor: True),
    ):
        yield


def device_moves(choice: str, sizes: list[int], fill: str) -> list[str]:
    """As `wire_jobs.moves`, by the ways of a device."""
    with as_on_device():
        return moves(choice, sizes, fill)


def device_reductions(n: int) -> list[str]:
    """The cases in which a reduction packed on a device differs from one that the host packs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours, theirs = (Collectives(choice="packed", timeout=30) for _ in range(2))
    bad = []
    for dtype in DTYPES[:2]:
        for name in OPS:
            x, op = weights(n * size, dtype, n + rank), getattr(dist.ReduceOp, name)
            found, expected = x.clone(), x.clone()
            part, other = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
            with as_on_device():
                ours.all_reduce(found, op)
                ours.reduce_scatter(part, x, op)
            theirs.all_reduce(expected, op)
            theirs.reduce_scatter(other, x, op)
            if not (same(found, expected) and same(part, other)):
                bad.append(f"{name} {dtype}")
    return bad


# How a choice is made, the link in GB/s that it goes by, and the ways of BF16 and FP32.
WAYS = (
    ("packed", None, "PACKED"),
    ("raw", None, "TORCH"),
    ("auto", None, "TORCH"),
    ("auto", 10.0, "PACKED"),
    ("auto", 450.0, "TORCH"),
)


def device_ways() -> list[str]:
    """The cases that did not go the way of `WAYS`, or where packing gained too little."""
    bad, size = [], dist.get_world_size()
    for choice, link, arm in WAYS:
        rates = Rates(link=link or 1.0, ratio=1.33, encode=500.0, decode=500.0, latency=1e-7)
        for dtype, least in zip(DTYPES, (1.32, 1.13, 0, 0), strict=True):
            with as_on_device():
                one = Collectives(choice=choice, rates=rates if link else None, timeout=30)
                x = weights(20_000, dtype, dist.get_rank())
                one.all_gather(torch.empty(size, 20_000, dtype=dtype), x)
            (row,) = one.rows()
            expected = arm if least else "TORCH"
            is_told = least or choice == "raw" or "BF16 and F32 are packed" in row.why
            gains = expected != "PACKED" or row.ratio > least - 0.01
            if row.arm.name != expected or not is_told or not gains:
                bad.append(f"{choice} {link} {dtype}: {row}")
    return bad


def device_disagreement() -> None:
    """Rank 1 calls with another dtype."""
    dtype = torch.float32 if dist.get_rank() else torch.bfloat16
    n = 2048 if dist.get_rank() else 4096
    with as_on_device():
        one = Collectives(choice="packed", timeout=10)
        one.broadcast(weights(n, dtype, 1), 0)


def device_lie() -> None:
    """Rank 1 announces one escape too many."""
    pack = device_ways_module._pack

    def lie(parts: Sequence[torch.Tensor]) -> list[Any]:
        return [message._replace(n_escapes=513) for message in pack(parts)]

    if dist.get_rank():
        device_ways_module._pack = lie
    with as_on_device():
        one = Collectives(choice="packed", timeout=10)
        one.all_gather(torch.empty(8192, dtype=torch.bfloat16), weights(4096, torch.bfloat16, 1))
        one.all_gather(torch.empty(8192, dtype=torch.bfloat16), weights(4096, torch.bfloat16, 1))


def device_async(n: int) -> list[bool]:
    """Whether work that is waited for later is right, with and without room for escapes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one = Collectives(choice="packed", timeout=30)
    found = []
    for make in (weights, noise):
        parts = [make(n, torch.bfloat16, i) for i in range(size)]
        out = torch.empty(size * n, dtype=torch.bfloat16)
        with as_on_device():
            pending = one.all_gather(out, parts[rank], async_op=True)
        assert pending is not None
        pending.wait()
        found.append(same(out, torch.cat(parts)))
    return found
