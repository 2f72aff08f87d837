"""Scenario: what the links carry, by raw TCP and by gloo.

TCP goes from rank 0 to rank 1 alone. With gloo rank 0 sends to all others (broadcast), and every
rank to every other (all-to-all); both in pieces of 1 MiB and in one message. The last way is an
all-to-all of single receives and sends, in which all receives are posted first (see
transport.exchange).
"""

import fcntl
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.wire.rounds import middle
from benchmarks.wire.transport import broadcast, exchange

__all__ = ["merge", "run"]

PIECE = 1 << 20
ROUNDS = 3
SIOCGIFADDR, IFREQ_NBYTES = 0x8915, 40


def run(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second, at rank 0, of each way.

    Args:
        rank: this process.
        world: the number of ranks.
        group: all ranks.
        options: "nbytes", sent by each way.
    """
    nbytes = options["nbytes"]
    data = np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8)

    def timed(call: Callable[[], Any]) -> float:
        dist.barrier(group)
        begin = time.perf_counter()
        call()
        dist.barrier(group)
        return time.perf_counter() - begin

    def all_to_all(piece: int, share: int) -> None:
        for first in range(0, share, piece):
            size = min(piece, share - first)
            source = torch.from_numpy(data[: world * size])
            dist.all_to_all_single(torch.empty_like(source), source, group=group)

    def in_pairs(share: int) -> None:
        for first in range(0, share, PIECE):
            size = min(PIECE, share - first)
            parts = [data[k * share + first :][:size] for k in range(world)]
            exchange(parts, [np.empty(size, np.uint8) for _ in parts], group)

    def send(piece: int | None) -> None:
        broadcast([data] if rank == 0 else None, group, piece=piece)

    # A rank keeps its own share, so less than all of it passes the link.
    share = nbytes // world
    passed = share * (world - 1)
    ways = {
        "broadcast, pieces": (lambda: send(PIECE), nbytes),
        "broadcast, one": (lambda: send(None), nbytes),
        "all-to-all, pieces": (lambda: all_to_all(PIECE, share), passed),
        "all-to-all, one": (lambda: all_to_all(share, share), passed),
        "all-to-all, receives first": (lambda: in_pairs(share), passed),
    }
    found = {"TCP": middle([_tcp(rank, group, nbytes, options["device"]) for _ in range(ROUNDS)])}
    for name, (call, sent) in ways.items():
        found[name] = middle([sent / timed(call) for _ in range(ROUNDS)])
    return found


def merge(results: Sequence[Mapping[str, Any]], *, shared: bool) -> dict[str, Any]:
    """The figures of rank 0, for a table."""
    return dict(results[0])


def _tcp(rank: int, group: dist.ProcessGroup, nbytes: int, device: str) -> float:
    """Bytes a second of one connection from rank 0 to rank 1; the other ranks wait."""
    place: list[Any] = [None]
    listener = None
    if rank == 1:
        listener = socket.create_server((_address(device), 0))
        place = [listener.getsockname()]
    dist.broadcast_object_list(place, 1, group)
    seconds = 0.0
    if rank == 0:
        seconds = _send(place[0], nbytes)
    elif listener is not None:
        with listener, listener.accept()[0] as connection:
            _receive(connection, nbytes)
    dist.barrier(group)
    return nbytes / seconds if seconds else 0.0


def _send(place: Sequence[Any], nbytes: int) -> float:
    data = memoryview(bytes(PIECE))
    with socket.create_connection(tuple(place)) as connection:
        begin = time.perf_counter()
        for first in range(0, nbytes, PIECE):
            connection.sendall(data[: min(PIECE, nbytes - first)])
        connection.recv(1)
        return time.perf_counter() - begin


def _receive(connection: socket.socket, nbytes: int) -> None:
    memory = bytearray(PIECE)
    while nbytes > 0:
        nbytes -= connection.recv_into(memory)
    connection.sendall(b"x")


def _address(device: str) -> str:
    """The IPv4 address of an interface of this namespace."""
    request = device.encode().ljust(IFREQ_NBYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
    return socket.inet_ntoa(found[20:24])
