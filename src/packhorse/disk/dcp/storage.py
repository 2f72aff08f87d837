"""Where a checkpoint lies: a folder on a local disk, or a prefix on any file system of fsspec.

The two differ in how a file becomes durable. On a local disk it is written beside its place,
flushed and renamed (`atomic.py`), and is read by mapping it. On an object store it is put in one
request, which is atomic there, so its bytes are gathered in memory first; parts of it are fetched
by ranges. No file that exists is ever written to; the manifest is replaced at once.

A path from one checkpoint to a file of another is relative, so that a folder of checkpoints may be
moved. It is resolved by its text and without links: both ends go through `realpath` first.
"""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.atomic import atomic_file, sync_folder
from packhorse.disk.frames import map_region
from packhorse.errors import CorruptionError, MissingBackendError, TruncationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FileBytes",
    "LocalStorage",
    "RemoteStorage",
    "Sink",
    "Storage",
    "is_location",
    "open_storage",
]

# Ranges that are this close are fetched as one: a request costs more than the bytes between.
_JOIN_NBYTES = 1 << 18


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Buffer) -> object:
        """Append bytes."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite bytes that were appended before."""


class FileBytes(Protocol):
    """The bytes of a file, there or to be fetched."""

    def region(self, offset: int, nbytes: int) -> ByteArray:
        """A part of the file. What has not been fetched yet reads as zeros."""

    def fetch(self, ranges: Sequence[tuple[ByteArray, int]]) -> None:
        """Make parts of the file real: memory of a region, and its offset in the file."""


class Storage(Protocol):
    """A folder of files that are written once.

    Attributes:
        label: what messages call it.
        max_file_nbytes: how many bytes of tensors go to one file.
    """

    label: str
    max_file_nbytes: int

    def prepare(self) -> None:
        """Make the folder."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def names(self) -> list[str]:
        """The files in the folder."""

    def path(self, name: str) -> str:
        """The full path of a file, for messages and as a key."""

    def read(self, name: str) -> bytes:
        """A small file, whole."""

    def open(self, name: str, nbytes: int) -> FileBytes:
        """A large file, whose length must be `nbytes`.

        Raises:
            TruncationError: it is shorter, or longer.
            FileNotFoundError: it is not there.
        """

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Write a file that is there under its name only once the block has ended well."""

    def commit(self, name: str, data: bytes) -> None:
        """Write a small file at once, in the place of an older one."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def relative(self, other: Storage, name: str) -> str:
        """The path of a file of another checkpoint, from this one.

        Raises:
            ValueError: the other is on another file system.
        """


def open_storage(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> LocalStorage | RemoteStorage:
    """The storage that a path or a URL names.

    Args:
        url: a path, or what `fsspec.core.url_to_fs` understands.
        options: for fsspec's file system.

    Raises:
        ValueError: fsspec does not know the protocol.
        ImportError: it does, and a package is missing that it needs.
    """
    text = os.fspath(url)
    if "://" not in text and "::" not in text:
        return LocalStorage(Path(text))
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            f"{text}: URLs need fsspec; install it with: pip install fsspec"
        ) from error
    fs, path = url_to_fs(text, **(options or {}))
    if isinstance(fs, LocalFileSystem):
        return LocalStorage(Path(path))
    return RemoteStorage(fs, path, text)


def is_location(url: str | os.PathLike[str]) -> bool:
    """Whether `open_storage` takes this: a path, or a URL that fsspec understands."""
    try:
        open_storage(url)
    except (TypeError, ValueError, ImportError):
        return False
    return True


def _check_length(label: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise TruncationError(
            f"{label}: has {found} bytes, and the manifest says {wanted}; get the file again"
        )


class LocalStorage:
    """A folder on a local disk."""

    max_file_nbytes = 1 << 36

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = Path(os.path.realpath(folder))

    def prepare(self) -> None:
        """Make the folder, so that it survives a loss of power too."""
        missing = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._path(name).is_file()

    def names(self) -> list[str]:
        """The files in the folder."""
        return [entry.name for entry in os.scandir(self._folder) if entry.is_file()]

    def path(self, name: str) -> str:
        """The full path of a file."""
        return str(self._path(name))

    def _path(self, name: str) -> Path:
        return Path(os.path.normpath(self._folder / name))

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        return self._regular(name).read_bytes()

    def open(self, name: str, nbytes: int) -> FileBytes:
        """The file, mapped."""
        path = self._regular(name)
        with path.open("rb") as file:
            _check_length(str(path), os.fstat(file.fileno()).st_size, nbytes)
            return _Mapped(map_region(file, 0, nbytes))

    def _regular(self, name: str) -> Path:
        """The path of a file to be read, which must not be a pipe: opening it might never end."""
        path = self._path(name)
        if path.exists() and not path.is_file():
            raise CorruptionError(f"{path}: not a regular file")
        return path

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Write a file that is there whole or not at all."""
        return atomic_file(self._path(name))

    def commit(self, name: str, data: bytes) -> None:
        """Write a small file in the place of an older one."""
        with atomic_file(self._path(name), force=True) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        self._path(name).unlink(missing_ok=True)

    def relative(self, other: Storage, name: str) -> str:
        """The path of a file of another checkpoint, from this one."""
        if not isinstance(other, LocalStorage):
            raise ValueError(f"base {other.label} must be on a local disk, as {self.label} is")
        return Path(os.path.relpath(other._path(name), self._folder)).as_posix()


class _Mapped:
    def __init__(self, data: memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)

    def region(self, offset: int, nbytes: int) -> ByteArray:
        return self._data[offset : offset + nbytes]

    def fetch(self, ranges: Sequence[tuple[ByteArray, int]]) -> None:
        pass


class RemoteStorage:
    """A prefix on a file system of fsspec."""

    max_file_nbytes = 1 << 28  # as many are gathered in memory

    def __init__(self, fs: Any, root: str, label: str) -> None:
        self.label = label
        self._fs = fs
        self._root = root.rstrip("/")

    def prepare(self) -> None:
        """Make the folder, where the file system has any."""
        self._fs.makedirs(self._root, exist_ok=True)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self._fs.isfile(self._fresh(name)))

    def names(self) -> list[str]:
        """The files in the folder."""
        self._fs.invalidate_cache(self._root)
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:  # an object store knows a folder by what is in it
            return []
        return [posixpath.basename(row["name"]) for row in entries if row["type"] == "file"]

    def path(self, name: str) -> str:
        """The full path of a file."""
        return posixpath.normpath(posixpath.join(self._root, name))

    def _fresh(self, name: str) -> str:
        """The full path of a file, of which nothing that was seen before is believed: another
        process may have replaced it."""
        path = self.path(name)
        self._fs.invalidate_cache(posixpath.dirname(path))
        return path

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        return bytes(self._fs.cat_file(self.path(name)))

    def open(self, name: str, nbytes: int) -> FileBytes:
        """The file, of which parts can be fetched."""
        path = self._fresh(name)
        _check_length(f"{self.label}: {name}", int(self._fs.info(path)["size"]), nbytes)
        return _Ranges(self._fs, path)

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Gather a file in memory, and put it."""
        memory = _Memory()
        yield memory
        self._fs.pipe_file(self.path(name), memory.getvalue())

    def commit(self, name: str, data: bytes) -> None:
        """Put a small file in the place of an older one."""
        self._fs.pipe_file(self.path(name), data)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._fs.rm_file(self.path(name))

    def relative(self, other: Storage, name: str) -> str:
        """The path of a file of another checkpoint, from this one."""
        if not isinstance(other, RemoteStorage) or other._fs != self._fs:
            raise ValueError(f"base {other.label} must be on the file system of {self.label}")
        return posixpath.relpath(other.path(name), self._root)


class _Memory(io.BytesIO):
    def patch(self, offset: int, data: Buffer) -> None:
        self.seek(offset)
        self.write(data)
        self.seek(0, os.SEEK_END)


class _Ranges:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def region(self, offset: int, nbytes: int) -> ByteArray:
        return np.zeros(nbytes, np.uint8)  # pages of it that nothing is fetched to cost nothing

    def fetch(self, ranges: Sequence[tuple[ByteArray, int]]) -> None:
        joined: list[tuple[int, int, list[tuple[ByteArray, int]]]] = []
        for memory, offset in sorted(ranges, key=lambda pair: pair[1]):
            stop = offset + memory.size
            if joined and offset <= joined[-1][1] + _JOIN_NBYTES:
                start, end, parts = joined[-1]
                joined[-1] = start, max(end, stop), [*parts, (memory, offset)]
            elif memory.size:
                joined.append((offset, stop, [(memory, offset)]))
        starts, stops = [start for start, _, _ in joined], [stop for _, stop, _ in joined]
        found = self._fs.cat_ranges([self._path] * len(joined), starts, stops, on_error="raise")
        for data, (start, stop, parts) in zip(found, joined, strict=True):
            if len(data) != stop - start:
                raise TruncationError(
                    f"{self._path}: {len(data)} bytes at byte {start}, where {stop - start} were "
                    "asked for"
                )
            for memory, offset in parts:
                memory[:] = np.frombuffer(data, np.uint8)[offset - start :][: memory.size]
