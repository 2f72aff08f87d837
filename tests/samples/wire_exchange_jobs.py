"""Jobs of ranks that exchange bytes, rightly and wrongly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch.distributed as dist

from packhorse.errors import CorruptionError
from packhorse.wire import ByteExchange

SIZES = (0, 1, 63, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 7)


def part(sender: int, receiver: int, step: int) -> bytes:
    """What a rank sends to another one in a step."""
    generator = np.random.default_rng((sender, receiver, step))
    return generator.bytes(SIZES[(sender + 3 * receiver + step) % len(SIZES)])


def exchange_all(n_steps: int) -> list[bool]:
    """Whether the bytes of each step came as they were sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = ByteExchange(timeout=30)
    found = []
    for step in range(n_steps):
        theirs = exchange.exchange([part(rank, other, step) for other in range(size)])
        found.append([bytes(t) for t in theirs] == [part(o, rank, step) for o in range(size)])
    return found


def two_on_subgroups() -> list[bytes]:
    """Two objects on the whole group, and one on a group of the odd ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = dist.new_group(list(range(1, size, 2)))
    first, second = ByteExchange(), ByteExchange(timeout=10)
    found = [bytes(b) for b in second.exchange([bytes([rank, i, 2]) for i in range(size)])]
    found += [bytes(b) for b in first.exchange([bytes([rank, i, 1]) for i in range(size)])]
    if rank % 2:
        third = ByteExchange(odd)
        parts = [bytes([rank, i, 3]) for i in range(third.size)]
        found += [bytes(b) for b in third.exchange(parts)]
    return found


def fail_in_exchange(how: str, timeout: float) -> list[str]:
    """Rank 1 misbehaves in the third exchange. Returns the errors of the other ranks, in that
    exchange and in the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = ByteExchange(timeout=timeout, max_nbytes=8 << 20)
    parts: list[Any] = [bytes([rank]) * (3 << 20)] * size
    for _ in range(2):
        exchange.exchange(parts)
    if rank == 1:
        _misbehave(exchange, parts, how, timeout)
    errors = []
    for _ in range(2):
        try:
            exchange.exchange(parts)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def _misbehave(exchange: ByteExchange, parts: list[Any], how: str, timeout: float) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        time.sleep(timeout + 2)  # the others ask a while where it is
    if how == "too much":
        parts[:] = [bytes(9 << 20)] * len(parts)
    if how == "leaves":
        raise RuntimeError("rank 1 leaves")


def count_transfers(sizes: list[int]) -> list[int]:
    """How many transfers each exchange took, of parts of one size after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange, counted = ByteExchange(timeout=30), [0]
    plain = exchange._peers.all_to_all

    def all_to_all(*args: Any) -> Any:
        counted[0] += 1
        return plain(*args)

    exchange._peers.all_to_all = all_to_all  # type: ignore[method-assign]
    found = []
    for nbytes in sizes:
        counted[0] = 0
        theirs = exchange.exchange([bytes([rank]) * nbytes] * size)
        assert [bytes(one) for one in theirs] == [bytes([i]) * nbytes for i in range(size)]
        found.append(counted[0])
    return found


def flip_a_bit() -> str:
    """The error after an exchange in which rank 1 damages the last byte that it sends."""
    exchange = ByteExchange(timeout=30)
    parts = [bytes(100)] * dist.get_world_size()
    exchange.exchange(parts)
    plain = exchange._peers.all_to_all

    def all_to_all(output: Any, input: Any, *splits: Any) -> Any:
        input[-1] ^= 1
        return plain(output, input, *splits)

    if dist.get_rank() == 1:
        exchange._peers.all_to_all = all_to_all  # type: ignore[method-assign]
    try:
        for _ in range(2):  # a rank whose bytes are right hears of it in its next call
            exchange.exchange(parts)
    except CorruptionError as error:
        return str(error)
    return ""
