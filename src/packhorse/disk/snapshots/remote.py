"""A store on any file system that fsspec knows: S3, GCS, Azure, memory.

A pack is written to a temporary file of this machine first, because its header is filled in last,
and then put as one object. Reading asks for ranges of bytes, and for some more than it needs at
once, since frames lie in the order in which they are read.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from packhorse.disk.atomic import OutputFile
from packhorse.disk.snapshots.backend import Object, check_region
from packhorse.disk.snapshots.lock import Lease, WriterLock
from packhorse.disk.snapshots.names import LOCK_FILE
from packhorse.errors import CorruptionError, MissingBackendError, TruncationError

__all__ = ["RemoteStorage"]

_READ_NBYTES = 1 << 23  # asked for at once


class RemoteStorage:
    """A folder of an fsspec file system."""

    reads_are_cheap = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            core: Any = import_module("fsspec.core")
        except ModuleNotFoundError as error:
            raise MissingBackendError(
                f"{url}: needs fsspec; install it with: pip install 'packhorse[remote]'"
            ) from error
        self._fs, root = core.url_to_fs(url, **options)
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def label(self, path: str = "") -> str:
        """What messages call an object."""
        return f"{self._url}/{path}" if path else self._url

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""
        self._fs.invalidate_cache()  # another process may have written
        try:
            found = self._fs.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def files(self, folder: str) -> list[str]:
        """`<folder>/<file>` of all files one level deeper."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._at(folder))  # one listing, where there are no folders
        except FileNotFoundError:
            return []
        parts = [path.rsplit("/", 2) for path in found]
        return sorted("/".join(part[1:]) for part in parts if part[0] == self._at(folder))

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small object, whole."""
        data: bytes = self._fs.cat_file(self._at(path), start=0, end=max_nbytes + 1)
        if len(data) > max_nbytes:
            raise CorruptionError(f"{self.label(path)}: longer than {max_nbytes} bytes")
        return data

    def open(self, path: str) -> Object:
        """A large object, read in ranges."""
        return _RemoteObject(self._fs, self._at(path), self.label(path))

    def put(self, path: str, data: bytes) -> None:
        """Write a small object in one step."""
        self._make_folder(path)
        self._fs.pipe_file(self._at(path), data)

    @contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        """Write an object that is there when the block ends without an exception."""
        with tempfile.NamedTemporaryFile(prefix="packhorse-") as file:
            yield OutputFile(file.fileno(), Path(file.name))
            self._make_folder(path)
            self._fs.put_file(file.name, self._at(path))

    def _make_folder(self, path: str) -> None:
        """Make the folder of an object, where there are folders."""
        with suppress(FileExistsError, NotImplementedError):
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove an object; it may be gone already."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty, where there are folders."""
        with suppress(OSError, NotImplementedError):
            self._fs.rmdir(self._at(path))

    def flush(self, folder: str) -> None:
        """Nothing to do: an object store answers when it is done."""

    def remove_temporary(self) -> None:
        """Nothing to do: temporary files are not in the store."""

    def lock(self) -> WriterLock:
        """The lock of the one writer, not yet taken."""
        return Lease(self, self.label())

    def read_lease(self) -> bytes | None:
        """The lease object, or None."""
        self._fs.invalidate_cache()
        try:
            data: bytes = self._fs.cat_file(self._at(LOCK_FILE))
        except FileNotFoundError:
            return None
        return data

    def create_lease(self, data: bytes) -> bool:
        """Write the lease if there is none; False if there is one, or if nobody can tell."""
        if self.read_lease() is not None:
            return False
        self._make_folder(LOCK_FILE)
        try:
            self._fs.pipe_file(self._at(LOCK_FILE), data, mode="create")
        except (FileExistsError, NotImplementedError, TypeError, ValueError):
            return False
        return True

    def write_lease(self, data: bytes) -> None:
        """Write the lease, whatever is there."""
        self._fs.pipe_file(self._at(LOCK_FILE), data)

    def remove_lease(self) -> None:
        """Remove the lease."""
        self.remove(LOCK_FILE)


class _RemoteObject:
    """An object that is read in ranges; the last that was read is kept."""

    def __init__(self, fs: Any, path: str, label: str) -> None:
        self._fs, self._path, self._label = fs, path, label
        self.nbytes: int = fs.size(path)
        self._start = 0
        self._data = b""
        self._lock = threading.Lock()

    def region(self, offset: int, nbytes: int) -> memoryview:
        check_region(self._label, self.nbytes, offset, nbytes)
        with self._lock:
            start, data = self._start, self._data
            if not start <= offset <= offset + nbytes <= start + len(data):
                stop = min(self.nbytes, offset + max(nbytes, _READ_NBYTES))
                data = self._fs.cat_file(self._path, start=offset, end=stop)
                start = offset
                if len(data) != stop - start:
                    found = f"bytes {start} to {stop} were asked for, and {len(data)} came"
                    raise TruncationError(f"{self._label}: {found}")
                self._start, self._data = start, data
        return memoryview(data)[offset - start : offset - start + nbytes]
