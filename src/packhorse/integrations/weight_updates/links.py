"""How the engines here reach their trainer: the transport that a URL names.

`tcp://host:port` is an `UpdateServer` at the trainer, and everything else a folder or an object
store. All ranks of an engine must load the same version, so a follower asks for one by its number,
and waits for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from packhorse.errors import PeerError
from packhorse.wire.updates import (
    DeltaReceiver,
    StagedUpdate,
    Update,
    UpdateClient,
    UpdateFolder,
    UpdateServer,
)

__all__ = ["Follower", "Publisher", "open_publisher", "this_host"]

_TCP = "tcp"
_PAUSE_S = 0.05  # between two looks into a folder


class Publisher(Protocol):
    """Where a trainer puts its updates."""

    def publish(self, update: Update) -> None:
        """Offers an update."""


def open_publisher(url: str, options: Mapping[str, Any] | None = None) -> tuple[Publisher, str]:
    """Opens the sending side of a URL.

    Args:
        url: `tcp://host:port`, with port 0 for a free one; or a folder or URL for `UpdateFolder`.
        options: options for fsspec's file system.

    Returns:
        Where to publish, and the URL for followers, in which the port is the one that is used.

    Raises:
        OSError, ValueError, MissingBackendError: the URL cannot be opened.
    """
    parts = urlsplit(url)
    if parts.scheme != _TCP:
        return UpdateFolder(url, options), url
    server = UpdateServer((_host(url), parts.port or 0))
    return server, f"{_TCP}://{_host(url)}:{server.address[1]}"


def _host(url: str) -> str:
    host = urlsplit(url).hostname
    if not host:
        raise ValueError(f"{url!r} names no host; give {_TCP}://host:port")
    return host


def this_host() -> str:
    """An address of this machine that others can reach, as far as its name tells."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class Follower:
    """The receiving side of a URL."""

    def __init__(
        self, url: str, *, timeout: float = 300.0, options: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            url: as `open_publisher` returns it.
            timeout: seconds to wait for a version.
            options: options for fsspec's file system.

        Raises:
            OSError, ValueError, MissingBackendError: the URL cannot be opened.
        """
        self._url = url
        self._timeout = timeout
        self._client: UpdateClient | None = None
        self._folder: UpdateFolder | None = None
        parts = urlsplit(url)
        if parts.scheme == _TCP:
            self._client = UpdateClient((_host(url), parts.port or 0), timeout=timeout)
        else:
            self._folder = UpdateFolder(url, options)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._client is not None:
            self._client.close()

    def stage(self, receiver: DeltaReceiver, stream: bytes, version: int) -> StagedUpdate:
        """Waits for a version, and stages it.

        Args:
            receiver: holds an earlier version, or none, or one of another stream.
            stream: the stream that is wanted. After a restart of the trainer, the updates that are
                there may be those of the old one.
            version: the version that is wanted.

        Raises:
            PeerError: it does not come in time.
            PackhorseError, OSError: as `DeltaReceiver.stage`, and of the transport.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            staged = self._look(receiver, version, max(left, 0.0))
            if staged is not None and (staged.stream_id, staged.version) == (stream, version):
                return staged
            if left <= 0:
                raise PeerError(
                    f"version {version} did not come from {self._url} within {self._timeout:g} s; "
                    f"version {receiver.version} is held"
                )
            time.sleep(_PAUSE_S)

    def _look(self, receiver: DeltaReceiver, version: int, wait: float) -> StagedUpdate | None:
        if self._client is not None:
            return self._client.stage_newest(receiver, wait=wait, upto=version)
        assert self._folder is not None
        return self._folder.stage_newest(receiver, upto=version)
