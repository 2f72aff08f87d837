"""Storage on any file system that fsspec knows: S3, GCS, Azure, memory.

A large object is first written to a temporary file of this machine, because its header is filled in
last, and then uploaded (`upload.py`). Reading requests ranges of bytes (`remote_object.py`).
Listings are never taken from a cache, because another process may have written since.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from packhorse.errors import CorruptionError
from packhorse.storage.interface import Object, Stamp, Storage
from packhorse.storage.local import LocalStorage
from packhorse.storage.output_file import OutputFile
from packhorse.storage.remote_client import Client, connect, reaching, remote_stamp
from packhorse.storage.remote_object import RemoteObject
from packhorse.storage.upload import make_folder, uploading

__all__ = ["RemoteStorage", "open_remote"]


def open_remote(url: str, options: dict[str, Any]) -> Storage:
    """The storage at a URL of fsspec.

    Raises:
        MissingBackendError: fsspec, or the package that it needs for the protocol, is not
            installed.
        ValueError: fsspec does not know the protocol.
        OSError: the server does not answer.
    """
    client, root = connect(url, options)
    if client is None:  # fsspec's class for local files neither flushes nor renames
        return LocalStorage(root)
    return RemoteStorage(client, root, url)


class RemoteStorage:
    """A folder of an fsspec file system."""

    is_local = False

    def __init__(self, client: Client, root: str, url: str) -> None:
        self._client = client
        self._root = root.rstrip("/")
        self._protocol, _, place = url.partition("://")
        self._place = place.rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._client.fs

    def at(self, path: str = "") -> str:
        """The full path of an object."""
        return _joined(self._root, path)

    def label(self, path: str = "") -> str:
        """The name of an object in messages."""
        return f"{self._protocol}://{_joined(self._place, path)}"

    def make(self) -> None:
        """Create the folder, if the file system has folders."""
        self._make_folder(self._root)

    def names(self, folder: str = "") -> list[str]:
        """The names of files and folders directly in a folder; none if it does not exist."""
        self._fs.invalidate_cache()
        try:
            with reaching(self.label(folder)):
                found = self._fs.ls(self.at(folder), detail=False)
        except FileNotFoundError:
            return []
        # A store may have an object with the name of the folder itself.
        paths = {path.rstrip("/") for path in found} - {self.at(folder)}
        return sorted(path.rpartition("/")[2] for path in paths)

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, with their sizes in bytes."""
        found = {path.rpartition("/"): info for path, info in self._find(folder).items()}
        return {
            name: remote_stamp(info).nbytes
            for (parent, _, name), info in found.items()
            if parent == self.at(folder)
        }

    def files(self, folder: str) -> dict[str, Stamp]:
        """All files one level deeper, as `<subfolder>/<file>`, with their stamps."""
        found = {tuple(path.rsplit("/", 2)): info for path, info in self._find(folder).items()}
        return {
            "/".join(part[1:]): remote_stamp(info)
            for part, info in sorted(found.items(), key=lambda pair: pair[0])
            if part[0] == self.at(folder)
        }

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """All files below a folder; in a store without folders, this takes one listing."""
        self._fs.invalidate_cache()
        try:
            with reaching(self.label(folder)):
                found: dict[str, dict[str, Any]] = self._fs.find(self.at(folder), detail=True)
        except FileNotFoundError:
            return {}
        return found

    def stamp(self, path: str) -> Stamp:
        """The stamp of an object."""
        folder, _, file = path.rpartition("/")
        found = self._find(folder)  # not `info`, which writes times differently from listings
        if self.at(path) not in found:
            raise FileNotFoundError(errno.ENOENT, f"there is no {file}", self.label(path))
        return remote_stamp(found[self.at(path)])

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        with reaching(self.label(path)):
            try:
                return bool(self._fs.info(self._fresh(path))["type"] == "file")
            except FileNotFoundError:
                return False

    def _fresh(self, path: str) -> str:
        full = self.at(path)
        self._fs.invalidate_cache(posixpath.dirname(full))
        return full

    def read(self, path: str, max_nbytes: int) -> bytes:
        """Read a small object as a whole."""
        with reaching(self.label(path)):
            data = self._head(self._fresh(path), max_nbytes + 1)
        if len(data) > max_nbytes:
            raise CorruptionError(f"{self.label(path)}: longer than {max_nbytes} bytes")
        return data

    def _head(self, full: str, nbytes: int) -> bytes:
        """The first bytes of an object."""
        try:
            data: bytes = self._fs.cat_file(full, start=0, end=nbytes)
        except FileNotFoundError:
            raise
        except (OSError, ValueError):
            if self._fs.size(full) == 0:  # S3 refuses a range of an empty object
                return b""
            raise
        return data

    def open(self, path: str) -> Object:
        """Open a large object, which is read in ranges."""
        return RemoteObject(self._client, self._fresh(path), self.label(path))

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small object in one step; an existing one is always replaced."""
        self._make_folder(posixpath.dirname(self.at(path)))
        with reaching(self.label(path)):
            self._fs.pipe_file(self.at(path), data)

    def put_cache(self, path: str, data: bytes) -> None:
        """Like `put`: an object store answers only when the object is stored."""
        self.put(path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a small object if none exists; False if one does, or if the store cannot tell."""
        if self.exists(path):
            return False
        self._make_folder(posixpath.dirname(self.at(path)))
        try:
            with reaching(self.label(path)):
                self._fs.pipe_file(self.at(path), data, mode="create")
        except (FileExistsError, NotImplementedError, TypeError, ValueError):
            return False
        return True

    @contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        """Write an object that appears when the block ends without an exception."""
        with uploading(self._client, self.at(path), self.label(path)) as output:
            yield output

    def _make_folder(self, folder: str) -> None:
        make_folder(self._client, folder, self.label())

    def remove(self, path: str) -> None:
        """Remove an object, if it exists."""
        with suppress(FileNotFoundError), reaching(self.label(path)):
            self._fs.rm_file(self.at(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty, if the file system has folders."""
        with suppress(OSError, NotImplementedError), reaching(self.label(path)):
            self._fs.rmdir(self.at(path))

    def flush(self, folder: str) -> None:
        """Nothing to do: an object store answers only when an object is removed."""

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Nothing to do: temporary files are not in the store."""

    def relative(self, other: Storage, path: str) -> str:
        """The path of an object of another folder, relative to this one."""
        if not isinstance(other, RemoteStorage) or other._fs != self._fs:
            raise ValueError(f"{other.label()} must be on the file system of {self.label()}")
        return posixpath.relpath(other.at(path), self._root)


def _joined(root: str, path: str) -> str:
    """A folder and a path that may begin with `..`. Not `normpath`: a root may be a URL."""
    while path.startswith("../"):
        root, path = root.rpartition("/")[0], path.removeprefix("../")
    return f"{root}/{path}" if path else root
