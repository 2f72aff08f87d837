"""Where a store lies: what it asks of a file system, and the local one.

Every object is whole or absent, and none is ever changed: written under a temporary name, flushed,
renamed, and the folder flushed (`disk/atomic.py`). The order of these calls is the order in which
they survive a loss of power.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from packhorse.disk.atomic import OutputFile, atomic_file, sync_folder
from packhorse.disk.snapshots.lock import FolderLock, WriterLock
from packhorse.disk.snapshots.names import LOCK_FILE, is_temporary
from packhorse.errors import CorruptionError, TruncationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LocalStorage", "Object", "Sink", "Storage", "check_region", "open_storage"]


class Sink(Protocol):
    """An object being written."""

    nbytes: int

    def write(self, data: Buffer) -> None:
        """Append."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite what was appended before."""


class Object(Protocol):
    """An object being read. Threads may share it."""

    nbytes: int

    def region(self, offset: int, nbytes: int) -> memoryview:
        """Some of its bytes.

        Raises:
            TruncationError: it does not have them.
        """


class Storage(Protocol):
    """What a store needs of a file system. Paths are relative to the store, parts joined by `/`.

    Attributes:
        reads_are_cheap: whether a region may be looked at without fetching all of it.
    """

    reads_are_cheap: bool

    def label(self, path: str = "") -> str:
        """What messages call an object."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""

    def files(self, folder: str) -> list[str]:
        """`<folder>/<file>` of all files one level deeper."""

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small object, whole.

        Raises:
            FileNotFoundError: it is not there.
            CorruptionError: it is longer than that.
        """

    def open(self, path: str) -> Object:
        """A large object.

        Raises:
            FileNotFoundError: it is not there.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write a small object in one step; its folder is made if need be."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a large object that is there when the block ends without an exception."""

    def remove(self, path: str) -> None:
        """Remove an object; it may be gone already."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""

    def flush(self, folder: str) -> None:
        """Make sure that what was removed from a folder stays removed."""

    def remove_temporary(self) -> None:
        """Remove what a killed writer left unfinished; only the one writer may."""

    def lock(self) -> WriterLock:
        """The lock of the one writer, not yet taken."""


def check_region(label: str, nbytes: int, offset: int, wanted: int) -> None:
    """Refuse a region that does not lie in an object.

    Raises:
        TruncationError: it ends behind it.
    """
    if offset + wanted > nbytes:
        raise TruncationError(
            f"{label}: cut short: bytes {offset} to {offset + wanted} are needed, and it has "
            f"{nbytes}"
        )


class LocalStorage:
    """A folder of this machine."""

    reads_are_cheap = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()

    def label(self, path: str = "") -> str:
        """What messages call an object."""
        return str(self._root / path)

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""
        try:
            return sorted(os.listdir(self._root / folder))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> list[str]:
        """`<folder>/<file>` of all files one level deeper."""
        found = []
        for name in self.names(folder):
            with suppress(NotADirectoryError):
                found += [f"{name}/{file}" for file in self.names(f"{folder}/{name}")]
        return found

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small object, whole."""
        with (self._root / path).open("rb") as file:
            data = file.read(max_nbytes + 1)
        if len(data) > max_nbytes:
            raise CorruptionError(f"{self.label(path)}: longer than {max_nbytes} bytes")
        return data

    def open(self, path: str) -> Object:
        """A large object, mapped."""
        return _MappedFile(self._root / path)

    def put(self, path: str, data: bytes) -> None:
        """Write a small object in one step."""
        with self.create(path) as sink:
            sink.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        """Write an object that is there when the block ends without an exception."""
        target = self._root / path
        self._make_folder(target.parent)
        with atomic_file(target) as sink:
            yield sink

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, so that they stay."""
        missing = [part for part in (folder, *folder.parents) if not part.is_dir()]
        for part in reversed(missing):
            with suppress(FileExistsError):
                part.mkdir()
            sync_folder(part.parent)

    def remove(self, path: str) -> None:
        """Remove an object; it may be gone already."""
        with suppress(FileNotFoundError):
            (self._root / path).unlink()

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            (self._root / path).rmdir()

    def flush(self, folder: str) -> None:
        """Make sure that what was removed from a folder stays removed."""
        with suppress(FileNotFoundError):
            sync_folder(self._root / folder)

    def remove_temporary(self) -> None:
        """Remove what a killed writer left unfinished."""
        for folder, _, files in os.walk(self._root):
            for file in files:
                if is_temporary(file):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, file))

    def lock(self) -> WriterLock:
        """The lock of the one writer, not yet taken."""
        self._make_folder(self._root)
        return FolderLock(self._root / LOCK_FILE, self.label())


class _MappedFile:
    """A file, mapped as a whole; the mapping outlives the file's removal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            self._view = memoryview(b"")
            if self.nbytes:  # the system maps no empty file
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def region(self, offset: int, nbytes: int) -> memoryview:
        check_region(str(self._path), min(self.nbytes, self._view.nbytes), offset, nbytes)
        return self._view[offset : offset + nbytes]


def open_storage(url: str | os.PathLike[str], options: dict[str, Any]) -> Storage:
    """The storage at a URL: a folder of this machine, or anything that fsspec knows.

    Args:
        url: a path, `file://...`, or a URL such as `s3://bucket/run`.
        options: for the file system of fsspec.

    Raises:
        MissingBackendError: fsspec is not installed.
        TypeError, ValueError: `url` is none.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"url must be a string or a path, not {type(url).__name__}")
    if not text:
        raise ValueError("url is empty; name a folder, or give a URL")
    if text.startswith("file://"):
        return LocalStorage(unquote(urlsplit(text).path))
    if "://" not in text:
        return LocalStorage(text)
    from packhorse.disk.snapshots.remote import RemoteStorage

    return RemoteStorage(text, options)
