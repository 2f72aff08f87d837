"""Updates over TCP: waiting, joining late, and peers that die, lie or say nothing."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from update_samples import TinyModel, same

from packhorse.errors import CorruptionError, PeerError
from packhorse.wire.updates import DeltaReceiver, DeltaSender, UpdateClient, UpdateServer

TIMEOUT_S = 20.0


def test_clients_follow_a_server() -> None:
    trained = TinyModel(1)
    packer = DeltaSender(trained, anchor_every=None)
    receivers = [DeltaReceiver(into=TinyModel(seed)) for seed in (2, 3)]
    with UpdateServer() as server:
        clients = [UpdateClient(server.address, timeout=TIMEOUT_S) for _ in receivers]
        for step in range(3):
            server.publish(packer.pack())
            for client, receiver in zip(clients, receivers, strict=True):
                staged = client.stage_newest(receiver)
                assert staged is not None
                receiver.commit(staged)
                assert same(receiver.state, trained.state_dict())
                assert client.stage_newest(receiver) is None
            trained.step(step)
        server.publish(packer.pack())
        server.publish(packer.anchor())
        joiner = DeltaReceiver()
        with UpdateClient(server.address, timeout=TIMEOUT_S) as client:
            staged = client.stage_newest(joiner)
            assert staged is not None
            joiner.commit(staged)
        assert same(joiner.state, trained.state_dict())
        for client in clients:
            client.close()


def test_a_client_can_wait() -> None:
    state = {"w": np.zeros(100)}
    packer, receiver = DeltaSender(state), DeltaReceiver()
    with UpdateServer() as server, UpdateClient(server.address, timeout=TIMEOUT_S) as client:
        timer = threading.Timer(0.2, lambda: server.publish(packer.pack()))
        timer.start()
        staged = client.stage_newest(receiver, wait=TIMEOUT_S)
        timer.join()
        assert staged is not None
        receiver.commit(staged)
        assert receiver.version == 1
        assert client.stage_newest(receiver, wait=0.05) is None


def test_a_client_can_ask_for_one_version() -> None:
    """The ranks of an engine must all take the same version, even if a newer one is there."""
    state = {"w": np.zeros(100)}
    packer, receiver = DeltaSender(state), DeltaReceiver()
    with UpdateServer() as server, UpdateClient(server.address, timeout=TIMEOUT_S) as client:
        for step in range(3):
            state["w"][step] = 1
            server.publish(packer.pack())
        staged = client.stage_newest(receiver, upto=2)
        assert staged is not None
        receiver.commit(staged)
        assert (receiver.version, receiver.state["w"].sum()) == (2, 2)
        timer = threading.Timer(0.2, lambda: server.publish(packer.pack()))
        timer.start()
        staged = client.stage_newest(receiver, wait=TIMEOUT_S, upto=4)
        timer.join()
        assert staged is not None
        assert staged.version == 4


def test_a_new_stream_replaces_the_old_one() -> None:
    receiver = DeltaReceiver()
    with UpdateServer() as server, UpdateClient(server.address, timeout=TIMEOUT_S) as client:
        for value in (1.0, 2.0):
            state = {"w": np.full(100, value)}
            packer = DeltaSender(state)
            for _ in range(2):
                server.publish(packer.pack())
            staged = client.stage_newest(receiver)
            assert staged is not None
            receiver.commit(staged)
            assert same(receiver.state, state)


def test_a_connection_that_was_given_up_is_made_again() -> None:
    packer, receiver = DeltaSender({"w": np.zeros(3)}), DeltaReceiver()
    with UpdateServer(timeout=0.05) as server:
        server.publish(packer.pack())
        with UpdateClient(server.address, timeout=TIMEOUT_S) as client:
            staged = client.stage_newest(receiver)
            assert staged is not None
            receiver.commit(staged)
            threading.Event().wait(0.3)
            server.publish(packer.pack())
            assert client.stage_newest(receiver) is not None


def test_a_server_that_is_gone_is_named() -> None:
    server = UpdateServer()
    address = server.address
    with UpdateClient(address, timeout=TIMEOUT_S) as client:
        assert client.fetch(None, 0) == []
        server.close()
        with pytest.raises(OSError, match=r"gone|refused"):
            client.fetch(None, 0)


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """A server that does something else."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(48)
                    answer(connection)
        except OSError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def head(*lengths: int) -> bytes:
    table = b"".join(struct.pack("<Q", length) for length in lengths)
    return struct.pack("<4sB1sH", b"\x89PHA", 1, b"\0", len(lengths)) + table


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (lambda c: None, PeerError, "is gone"),
        (lambda c: c.sendall(head(1 << 60) + bytes(1000)), PeerError, "after 1000 of 1152921504"),
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request"), CorruptionError, "no server of updates"),
        (lambda c: threading.Event().wait(1.5), PeerError, "did not answer within 0.5 s"),
    ],
)
def test_a_server_that_dies_or_lies(
    answer: Callable[[socket.socket], object], kind: type[Exception], words: str
) -> None:
    with answering(answer) as address, UpdateClient(address, timeout=0.5) as client:
        receiver = DeltaReceiver(into={"w": np.zeros(3)})
        with pytest.raises(kind, match=words):
            client.stage_newest(receiver)
        assert not receiver.state["w"].any()


def test_a_client_bounds_what_it_takes() -> None:
    with (
        answering(lambda c: c.sendall(head(1 << 60, 1 << 60))) as address,
        UpdateClient(address, timeout=TIMEOUT_S, max_nbytes=1 << 20) as client,
        pytest.raises(CorruptionError, match="more than max_nbytes = 1048576"),
    ):
        client.fetch(None, 0)


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\n\r\n".ljust(48), b"\x89PHR\x02".ljust(48)]
)
def test_a_server_ends_a_connection_that_asks_for_something_else(request_: bytes) -> None:
    with UpdateServer() as server:
        with socket.create_connection(server.address, TIMEOUT_S) as connection:
            connection.sendall(request_)
            assert connection.recv(10) == b""
        with UpdateClient(server.address, timeout=TIMEOUT_S) as client:
            assert client.fetch(None, 0) == []
