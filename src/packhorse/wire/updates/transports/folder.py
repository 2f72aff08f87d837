"""`UpdateFolder`: updates as files in a folder, on this machine or in an object store.

    stream.json                      which stream is current; replaced when a new trainer starts
    <stream>/<version>.anchor        an update of format.md's kind, each in one file
    <stream>/<version>.<base>.delta

A file is complete or absent, and never changes, so readers need no lock: they list the folder, find
a route to the newest version, and read its files. One writer at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packhorse.errors import CorruptionError
from packhorse.storage.documents import Document, read_checksum, sign
from packhorse.storage.locations import open_storage
from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.transports.routes import Entry, find_route, stage_newest
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    PathLike = str | os.PathLike[str]

__all__ = ["UpdateFolder"]

_STREAM_FILE = "stream.json"
_MAX_STREAM_FILE_NBYTES = 4096
_KIND = "updates"
_VERSION = 1
_FILE = re.compile(r"([0-9a-f]{16})\.(?:(anchor)|([0-9a-f]{16})\.delta)")


class UpdateFolder:
    """A folder through which a sender's updates reach any number of receivers.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaReceiver, DeltaSender, UpdateFolder
        >>> folder = UpdateFolder(tempfile.mkdtemp())
        >>> folder.publish(DeltaSender({"w": np.arange(3.0)}).pack())
        >>> receiver = DeltaReceiver()
        >>> receiver.commit(folder.stage_newest(receiver))
        >>> receiver.version
        1
    """

    def __init__(self, url: PathLike, options: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            url: a path, or a URL that fsspec knows, such as `s3://bucket/run/updates`.
            options: options for fsspec's file system.

        Raises:
            MissingBackendError: fsspec, or the package that it needs for the protocol, is missing.
            OSError: the server does not answer.
            ValueError: `url` is no location.
        """
        self._storage = open_storage(url, options)
        self._stream: bytes | None = None  # that this writer has made current

    def publish(self, update: Update) -> None:
        """Writes an update, which readers see once it is complete.

        Raises:
            FileExistsError: there is this version already (on an object store it is replaced).
            OSError: it cannot be written.
        """
        kind = "anchor" if update.base_version is None else f"{update.base_version:016x}.delta"
        path = f"{update.stream_id.hex()}/{update.version:016x}.{kind}"
        if self._stream is None:
            self._storage.make()
        with self._storage.create(path) as sink:
            sink.write(update.buffer())
        if update.stream_id != self._stream:
            document = {"kind": _KIND, "version": _VERSION, "stream": update.stream_id.hex()}
            self._storage.put(_STREAM_FILE, sign(document), replace=True)
            self._stream = update.stream_id

    def stream_id(self) -> bytes | None:
        """The current stream; None if nothing was published.

        Raises:
            CorruptionError, CompatibilityError: `stream.json` is bad.
        """
        try:
            text = self._storage.read(_STREAM_FILE, _MAX_STREAM_FILE_NBYTES)
        except FileNotFoundError:
            return None
        label = self._storage.label(_STREAM_FILE)
        read_checksum(text, label)
        document = Document(text, label)
        document.check_kind("kind", _KIND, _VERSION)
        return document.digest(document.get("stream"), "stream")

    def entries(self) -> list[Entry]:
        """The updates of the current stream, in the order of their versions."""
        stream = self.stream_id()
        if stream is None:
            return []
        found = []
        for name, nbytes in self._storage.sizes(stream.hex()).items():
            match = _FILE.fullmatch(name)
            if match is not None:
                base = None if match[2] else int(match[3], 16)
                found.append(Entry(int(match[1], 16), base, nbytes))
        return sorted(found, key=lambda entry: (entry.number, entry.base_number or 0))

    def stage_newest(
        self, receiver: DeltaReceiver, *, upto: int | None = None
    ) -> StagedUpdate | None:
        """Reads what brings a receiver to the newest version, and stages it.

        Args:
            receiver: if it holds a version of the stream, the later updates are read; otherwise, or
                if that takes more bytes, the newest anchor and what follows it.
            upto: the last version that is wanted; None for the newest.

        Returns:
            What `receiver.commit` takes; None if there is nothing newer.

        Raises:
            PackhorseError: as `DeltaReceiver.stage`; the message names the file if the file is bad.
            OSError: a file cannot be read.
        """
        stream = self.stream_id()
        if stream is None:
            return None
        entries = self.entries()

        def fetch(held: int | None) -> list[Update]:
            return [self._read(stream, entry) for entry in find_route(entries, held, upto)]

        return stage_newest(receiver, stream, fetch)

    def prune(self, keep_anchors: int = 1) -> int:
        """Removes what is older than the newest anchors. A receiver that reads at the same time may
        find a file missing, and asks again.

        Args:
            keep_anchors: how many anchors to keep, with everything after the oldest of them.

        Returns:
            How many files were removed.

        Raises:
            ValueError: `keep_anchors` is below 1.
        """
        if keep_anchors < 1:
            raise ValueError(f"keep_anchors is {keep_anchors}; it must be at least 1")
        stream, entries = self.stream_id(), self.entries()
        anchors = [entry.number for entry in entries if entry.base_number is None]
        if stream is None or len(anchors) < keep_anchors:
            return 0
        old = [entry for entry in entries if entry.number < anchors[-keep_anchors]]
        for entry in old:
            self._storage.remove(_path(stream, entry))
        self._storage.flush(stream.hex())
        return len(old)

    def _read(self, stream: bytes, entry: Entry) -> Update:
        path = _path(stream, entry)
        file = self._storage.open(path)
        label = self._storage.label(path)
        try:
            update = Update(bytes(file.region(0, file.nbytes)))
        except CorruptionError as error:
            raise type(error)(f"{label}: {error}") from error
        if (update.stream_id, update.version) != (stream, entry.number):
            raise CorruptionError(f"{label}: it holds another update than its name says")
        return update


def _path(stream: bytes, entry: Entry) -> str:
    kind = "anchor" if entry.base_number is None else f"{entry.base_number:016x}.delta"
    return f"{stream.hex()}/{entry.number:016x}.{kind}"
