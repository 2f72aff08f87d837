"""Jobs of ranks in which rank 1 fails, lies, or disagrees with the others.

Damage on the way is made by rank 1 itself, which changes what it hands to the transfer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packhorse.wire import Collectives, flights, handshake

N = 3_000_000  # elements of float32: a dozen pieces
Tamper = Callable[[int, torch.Tensor], None]


def errors_of(fault: str, operation: str, choice: str, timeout: float) -> list[str]:
    """The errors of two operations of which the first meets the fault."""
    flights._PATIENCE_S = 0.2  # for transfers that a failure has left without an end
    return _errors_of(fault, operation, choice, timeout)


def _errors_of(fault: str, operation: str, choice: str, timeout: float) -> list[str]:
    rank = dist.get_rank()
    if fault == "another version" and rank == 1:
        handshake.WIRE_VERSION = 7  # type: ignore[misc]
    level = "fast" if fault == "another option" and rank == 1 else "default"
    collectives = Collectives(choice=choice, timeout=timeout, level=level)
    if rank == 1 and fault in _TAMPERS:
        _tamper_with(collectives, _TAMPERS[fault])
    dtype = torch.int32 if fault == "another dtype" and rank == 1 else torch.float32
    n = N - 4 if fault == "another size" and rank == 1 else N
    x = (torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 0.02).to(dtype)
    found = []
    for _ in range(2):
        if rank == 1 and fault == "sleeps" and not found:
            time.sleep(timeout + 2)  # the others ask a while where it is
        if rank == 1 and fault == "raises":
            _tamper_with(collectives, _raise)
        try:
            _run(collectives, operation, x, fault if rank == 1 else "")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("none")
    return found


def _run(collectives: Collectives, operation: str, x: torch.Tensor, fault: str) -> None:
    size, label = collectives.size, "other" if fault == "another label" else ""
    if fault == "another operation":
        operation = {"all_gather": "all_reduce"}.get(operation, "all_gather")
    if operation == "all_gather":
        collectives.all_gather(torch.empty(size * x.numel(), dtype=x.dtype), x, label=label)
    elif operation == "broadcast":
        collectives.broadcast(x, 0 if fault == "another root" else 1)
    elif operation == "all_to_all_single":
        splits = [x.numel() // size] * size
        coming = [N // size] * size
        coming[collectives.rank] = splits[0]
        out = torch.empty(sum(coming), dtype=x.dtype)
        collectives.all_to_all_single(out, x[: sum(splits)], coming, splits)
    else:
        is_other = fault == "another reduction"
        op = dist.ReduceOp.MAX if is_other else dist.ReduceOp.SUM
        if operation == "all_reduce":
            collectives.all_reduce(x, op)
        else:
            whole = x[: x.numel() // size * size]
            collectives.reduce_scatter(torch.empty(whole.numel() // size), whole, op)


def _tamper_with(collectives: Collectives, tamper: Tamper) -> None:
    """Lets a function see, and change, all that this rank hands to transfers."""
    peers, n = collectives._peers, 0
    plain = peers.send

    def send(going: Sequence[torch.Tensor], coming: Any) -> Any:
        nonlocal n
        for message in {one.data_ptr(): one for one in going if one.numel()}.values():
            tamper(n, message)
        n += 1
        return plain(going, coming)

    peers.send = send  # type: ignore[method-assign]


def _flip(n: int, message: torch.Tensor) -> None:
    if n == 3:
        message[message.numel() // 2] ^= 16


def _flip_head(n: int, message: torch.Tensor) -> None:
    if n == 2:
        message[9] ^= 1  # in the zeros


def _flip_statement(n: int, message: torch.Tensor) -> None:
    if n == 0:
        message[9] ^= 1


def _lie(n: int, message: torch.Tensor) -> None:
    """Says that a message is longer than its piece."""
    if n == 1:
        message[7] = 255


def _die(n: int, message: torch.Tensor) -> None:
    del message
    if n == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(n: int, message: torch.Tensor) -> None:
    del message
    if n == 3:
        raise MemoryError("none is left")


_TAMPERS: dict[str, Tamper] = {
    "a flipped bit": _flip,
    "a flipped bit in a head": _flip_head,
    "a flipped bit in a statement": _flip_statement,
    "a lie": _lie,
    "dies": _die,
}


def die_between(choice: str, culprit: int, timeout: float) -> list[str]:
    """A rank dies while the others are in their second collective."""
    collectives, x = Collectives(choice=choice, timeout=timeout), torch.ones(100_000)
    collectives.all_reduce(x)
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.all_reduce(x)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def fail_and_end(rank: int, size: int, store: str) -> None:
    """A whole process that meets damage, and ends as programs do."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    assert "CorruptionError" in _errors_of("a flipped bit", "all_gather", "packed", 60)[-1]
