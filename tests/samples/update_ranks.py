"""Ranks that broadcast updates: run as `python update_ranks.py FOLDER RANK SIZE WHAT`.

Each rank prints one line for each check that passed. The test reads the lines of all ranks.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from packhorse.errors import CorruptionError, PeerError
from packhorse.wire.updates import DeltaReceiver, DeltaSender, GroupTransport

TIMEOUT_S = 60
SHORT_S = 3


def main(folder: str, rank: int, size: int, what: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    CHECKS[what](rank, size)
    os._exit(0)  # a group with a dead rank cannot be taken down


def say(words: str) -> None:
    print(words, flush=True)


def rounds(rank: int, size: int) -> None:
    """Whole rounds with several trees and senders; then what a sender and a receiver can refuse."""
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(600_000).astype(np.float32), "b": np.zeros(3)}
    for fanout, src in ((1, 0), (2, 1), (size, 0)):
        transport = GroupTransport(src=src, fanout=fanout, timeout=TIMEOUT_S)
        packer = DeltaSender(state) if rank == src else None
        receiver = DeltaReceiver()
        for step in range(3):
            state["w"][step] = step
            update = None if packer is None else packer.pack()
            receiver.unpack(transport.broadcast(update))
            assert receiver.state["w"].tobytes() == state["w"].tobytes()
        say(f"fanout {fanout} from {src}: version {receiver.version}")
    check_refusals(rank)
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        transport = GroupTransport(group, src=1, timeout=TIMEOUT_S)
        data = transport.broadcast(b"bytes of any kind" if rank else None)
        say(f"in a group: {bytes(data).decode()}")


def check_refusals(rank: int) -> None:
    transport = GroupTransport(timeout=TIMEOUT_S, max_nbytes=1000)
    try:
        transport.broadcast(None if rank == 0 else b"")
    except ValueError as error:
        say(f"refused: {error}")
    if rank == 0:
        transport.fail("the optimizer diverged")
        transport.broadcast(bytes(3_000_000))
        transport.broadcast(b"after")
        return
    try:
        transport.broadcast()
    except PeerError as error:
        say(f"told: {error}")
    try:
        transport.broadcast()
    except CorruptionError as error:
        say(f"bounded: {error}")
    assert bytes(transport.broadcast()) == b"after"  # the ranks are still in step


def killed(rank: int, size: int) -> None:
    """The sender dies in the midst of an update; in a chain, each rank blames the one before."""
    transport = GroupTransport(fanout=1, timeout=SHORT_S)
    receiver = DeltaReceiver(into={"w": np.zeros(3_000_000, np.uint8)})
    if rank == 0:
        rng = np.random.default_rng(0)
        update = DeltaSender({"w": rng.integers(0, 256, 3_000_000, np.uint8)}).pack()
        start = transport._peers.send
        calls = []

        def dying(piece: object, to: int) -> object:
            calls.append(to)
            if len(calls) == 3:
                time.sleep(0.2)
                os._exit(9)
            return start(piece, to)

        transport._peers.send = dying  # type: ignore[method-assign]
        transport.broadcast(update)
    begin = time.monotonic()
    try:
        receiver.unpack(transport.broadcast())
    except PeerError as error:
        say(f"lost: {error}")
    assert time.monotonic() - begin < 10 * SHORT_S
    assert not receiver.state["w"].any()
    try:
        transport.broadcast()
    except PeerError as error:
        say(f"again: {error}")


def silent(rank: int, size: int) -> None:
    """The sender does nothing."""
    transport = GroupTransport(timeout=1)
    if rank == 0:
        time.sleep(2.5)
        return
    try:
        transport.broadcast()
    except PeerError as error:
        say(f"lost: {error}")


CHECKS = {"rounds": rounds, "killed": killed, "silent": silent}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
