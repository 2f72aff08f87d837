"""`UpdateServer` and `UpdateClient`: updates over TCP, from one sender to clients that ask.

A client sends one request of 48 bytes, which says what it holds, and gets the updates that it
needs. The server keeps packed updates only, each once for all clients.

    request   magic 4s, version u8, flags u8, zeros 2s, stream 16s, version held u64,
              milliseconds to wait u32, zeros 4s, last version that is wanted u64
    answer    magic 4s, version u8, zeros 1s, number of updates u16, length of each u64,
              then the updates

Flag 1: the client holds a version of the stream. Flag 2: it wants to begin at an anchor. Flag 4: it
wants no version after the last one that it names, and waits for that one.

Updates are checked as anywhere, but nobody's identity is: whoever reaches the port gets the
weights, and a client believes whoever answers. Use it inside a network that you trust, or through a
tunnel.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from packhorse.errors import CorruptionError, PeerError
from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.transports.routes import Entry, find_route, stage_newest
from packhorse.wire.updates.update import Update

__all__ = ["UpdateClient", "UpdateServer"]

_REQUEST = struct.Struct("<4sBB2s16sQI4sQ")
_ANSWER = struct.Struct("<4sB1sH")
_LENGTH = struct.Struct("<Q")
_REQUEST_MAGIC, _ANSWER_MAGIC = b"\x89PHR", b"\x89PHA"
_VERSION = 1
_HOLDS, _ANCHORED, _LIMITED = 1, 2, 4
_PIECE_NBYTES = 1 << 20
_KEPT_ANCHORS = 2
_BACKLOG = 128
_PAUSE_S = 0.1  # before the next try to accept a connection


class _Kept(NamedTuple):
    """An update that the server keeps."""

    entry: Entry
    update: Update


class UpdateServer:
    """Offers a sender's updates to clients over TCP.

    It keeps what is needed from the last but one anchor on. Without a later anchor that grows, so
    publish `DeltaSender.anchor()` now and then.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import (
        ...     DeltaReceiver, DeltaSender, UpdateClient, UpdateServer
        ... )
        >>> receiver = DeltaReceiver()
        >>> with UpdateServer() as server:
        ...     server.publish(DeltaSender({"w": np.arange(3.0)}).pack())
        ...     with UpdateClient(server.address) as client:
        ...         receiver.commit(client.stage_newest(receiver))
        >>> receiver.version
        1
    """

    def __init__(
        self, address: tuple[str, int] = ("127.0.0.1", 0), *, timeout: float = 60.0
    ) -> None:
        """
        Args:
            address: host and port to listen at; port 0 takes a free one.
            timeout: seconds after which a client that takes nothing is given up.

        Raises:
            OSError: nobody can listen there.
        """
        self._timeout = timeout
        self._changed = threading.Condition()
        self._kept: list[_Kept] = []
        self._stream: bytes | None = None
        self._is_closed = False
        self._socket = socket.create_server(address, backlog=_BACKLOG)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> UpdateServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def publish(self, update: Update) -> None:
        """Offers an update; clients that wait for it get it at once."""
        entry = Entry(update.version, update.base_version, update.nbytes)
        with self._changed:
            if update.stream_id != self._stream:
                self._kept, self._stream = [], update.stream_id
            self._kept.append(_Kept(entry, update))
            anchors = sorted(k.entry.number for k in self._kept if k.entry.base_number is None)
            oldest = anchors[-_KEPT_ANCHORS] if len(anchors) >= _KEPT_ANCHORS else 0
            self._kept = [kept for kept in self._kept if kept.entry.number >= oldest]
            self._changed.notify_all()

    def close(self) -> None:
        """Stops listening, and closes the connections."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it is closed, or there are too many connections
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, _PAUSE_S):
                        return
                continue
            connection.settimeout(self._timeout)
            with self._changed:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answers the requests of one client until it goes."""
        try:
            with connection:
                while self._answer(connection):
                    pass
        except (OSError, PeerError):
            pass  # the client is gone, or asks for something else; it notices
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket) -> bool:
        """Answers one request; False if there is none, or none of ours."""
        data = bytearray()
        if not _receive(connection, data, _REQUEST.size):
            return False
        magic, version, flags, zeros, stream, held, wait_ms, more, last = _REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC or version != _VERSION or (zeros + more).strip(b"\0"):
            return False
        upto = last if flags & _LIMITED else None
        updates = self._wait_for(flags, stream, held, upto, wait_ms / 1000)
        lengths = b"".join(_LENGTH.pack(update.nbytes) for update in updates)
        connection.sendall(_ANSWER.pack(_ANSWER_MAGIC, _VERSION, b"\0", len(updates)) + lengths)
        for update in updates:
            view = update.buffer()
            for at in range(0, view.nbytes, _PIECE_NBYTES):  # each piece within the time-out
                connection.sendall(view[at : at + _PIECE_NBYTES])
        return True

    def _wait_for(
        self, flags: int, stream: bytes, held: int, upto: int | None, wait_s: float
    ) -> list[Update]:
        """The updates that a client needs, once there are some, or the last one that it wants."""
        found: list[Update] = []

        def is_ready() -> bool:
            found[:] = self._route(flags, stream, held, upto)
            return self._is_closed or (bool(found) and upto in (None, found[-1].version))

        with self._changed:
            self._changed.wait_for(is_ready, wait_s)
        return found

    def _route(self, flags: int, stream: bytes, held: int, upto: int | None) -> list[Update]:
        start: int | None = held if flags & _HOLDS and stream == self._stream else 0
        if flags & _ANCHORED:
            start = None
        route = set(find_route((kept.entry for kept in self._kept), start, upto))
        chosen = {kept.entry: kept.update for kept in self._kept if kept.entry in route}
        return [chosen[entry] for entry in sorted(chosen, key=lambda entry: entry.number)]


class UpdateClient:
    """Asks an `UpdateServer` for updates, over one connection that is made when it is needed."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        timeout: float = 60.0,
        max_nbytes: int | None = None,
    ) -> None:
        """
        Args:
            address: the server's host and port.
            timeout: seconds in which the server must answer, beyond the time that the client lets
                it wait; and for each MiB.
            max_nbytes: the most bytes of updates that are taken at once; None for no limit.
        """
        self._address = address
        self._timeout = timeout
        self._max_nbytes = max_nbytes
        self._connection: socket.socket | None = None

    def __enter__(self) -> UpdateClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stage_newest(
        self, receiver: DeltaReceiver, *, wait: float = 0.0, upto: int | None = None
    ) -> StagedUpdate | None:
        """Fetches what brings a receiver to the newest version, and stages it.

        Args:
            receiver: the receiver.
            wait: seconds to wait for a newer version.
            upto: the last version that is wanted, for which it waits; None for the newest.

        Returns:
            What `receiver.commit` takes; None if there is nothing newer.

        Raises:
            PeerError: the server died, or does not answer in time.
            OSError: it cannot be reached.
            CorruptionError: the answer is none, or longer than `max_nbytes`.
            PackhorseError: as `DeltaReceiver.stage`.
        """

        def fetch(held: int | None) -> list[bytearray]:
            return self.fetch(receiver.stream_id, held, wait=wait, upto=upto)

        return stage_newest(receiver, None, fetch)

    def fetch(
        self,
        stream: bytes | None,
        held: int | None,
        *,
        wait: float = 0.0,
        upto: int | None = None,
    ) -> list[bytearray]:
        """Fetches the updates that lead from a version to the newest one.

        Args:
            stream: the stream of which a version is held; None for none.
            held: the version; None to begin at an anchor.
            wait: seconds to wait for a newer version.
            upto: the last version that is wanted, for which it waits; None for the newest.

        Raises:
            PeerError, OSError, CorruptionError: as `stage_newest`.
        """
        flags = _HOLDS * (stream is not None) | _ANCHORED * (held is None)
        flags |= _LIMITED * (upto is not None)
        request = _REQUEST.pack(
            _REQUEST_MAGIC, _VERSION, flags, bytes(2), stream or bytes(16), held or 0,
            round(wait * 1000), bytes(4), upto or 0,
        )  # fmt: skip
        is_new = self._connection is None
        try:
            return self._ask(request, wait)
        except PeerError:
            self.close()
            if is_new:
                raise
        except BaseException:
            self.close()
            raise
        return self._ask(request, wait)  # the server may have given up an idle connection

    def close(self) -> None:
        """Closes the connection; the next call makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: bytes, wait: float) -> list[bytearray]:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, self._timeout)
        connection, place = self._connection, "{}:{}".format(*self._address)
        connection.settimeout(self._timeout + wait)
        try:
            connection.sendall(request)
            head = bytearray()
            _receive(connection, head, _ANSWER.size, whole=True)
            connection.settimeout(self._timeout)
            return self._take(connection, bytes(head))
        except TimeoutError as error:
            raise PeerError(
                f"the server at {place} did not answer within {self._timeout + wait:g} s"
            ) from error
        except (ConnectionError, PeerError) as error:
            raise PeerError(f"the server at {place} is gone: {error}") from error

    def _take(self, connection: socket.socket, head: bytes) -> list[bytearray]:
        """The updates of an answer. Memory grows with what arrives, not with what is announced."""
        magic, version, zero, count = _ANSWER.unpack(head)
        if (magic, version, zero) != (_ANSWER_MAGIC, _VERSION, b"\0"):
            raise CorruptionError(f"an answer begins with {head.hex()}: no server of updates")
        table = bytearray()
        _receive(connection, table, count * _LENGTH.size, whole=True)
        lengths: Sequence[int] = [length for (length,) in _LENGTH.iter_unpack(table)]
        if self._max_nbytes is not None and sum(lengths) > self._max_nbytes:
            raise CorruptionError(
                f"the updates have {sum(lengths)} bytes, more than max_nbytes = {self._max_nbytes}"
            )
        updates = []
        for length in lengths:
            updates.append(bytearray())
            _receive(connection, updates[-1], length, whole=True)
        return updates


def _receive(
    connection: socket.socket, data: bytearray, nbytes: int, *, whole: bool = False
) -> bool:
    """Appends bytes from a connection; False if it ended before the first.

    Raises:
        PeerError: it ended in the midst, or before the first byte if all must be there.
    """
    piece = memoryview(bytearray(min(nbytes, _PIECE_NBYTES)))
    while len(data) < nbytes:
        n = connection.recv_into(piece[: nbytes - len(data)])
        if n == 0 and not data and not whole:
            return False
        if n == 0:
            raise PeerError(f"the connection ended after {len(data)} of {nbytes} bytes")
        data += piece[:n]
    return True
