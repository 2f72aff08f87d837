"""Where snapshots and checkpoints lie: what they ask of a file system, and the local one.

Every object is whole or absent: written under a temporary name, flushed, renamed, and its folder
flushed (`atomic.py`). The order of these calls is the order in which they survive a loss of power.
No object that exists is ever changed; small ones may be replaced at once.

Paths are relative, parts joined by `/`, and may begin with `..`: a checkpoint names files of
another so that a folder of both may be moved. They are resolved by their text, which is why the
folder itself is resolved first.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.atomic import (
    OutputFile,
    atomic_file,
    is_temporary,
    sync_folder,
    temporary_beside,
)
from packhorse.disk.opening import naming
from packhorse.errors import CorruptionError, TruncationError
from packhorse.late_import import import_late

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "LocalStorage",
    "Object",
    "Sink",
    "Stamp",
    "Storage",
    "check_region",
    "is_location",
    "open_storage",
]

_FILE = "file://"


class Stamp(NamedTuple):
    """By what it is seen that an object may be another than before, without reading it.

    Attributes:
        nbytes: its size.
        changed: stands for when it was written; from 0 to 2^64 - 1.
    """

    nbytes: int
    changed: int


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

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """The same, but what is remote reads as zeros until `fill` was called.

        Raises:
            TruncationError: it does not have them.
        """

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Make parts of a sketch real: memory of it, and its offset in the object."""


class Storage(Protocol):
    """What a store needs of a file system.

    Attributes:
        is_local: whether it is a folder of this machine, where looking at a byte costs no request.
    """

    is_local: bool

    def label(self, path: str = "") -> str:
        """What messages call an object; no other has the same."""

    def make(self) -> None:
        """Make the folder, where there are folders."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, and how many bytes each has."""

    def files(self, folder: str) -> dict[str, Stamp]:
        """`<folder>/<file>` of all files one level deeper, and their stamps."""

    def stamp(self, path: str) -> Stamp:
        """The stamp of an object.

        Raises:
            FileNotFoundError: it is not there.
        """

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small object, whole.

        Raises:
            FileNotFoundError: it is not there.
            CorruptionError: it is longer than that, or no regular file.
        """

    def open(self, path: str) -> Object:
        """A large object.

        Raises:
            FileNotFoundError: it is not there.
            CorruptionError: it is no regular file.
        """

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small object in one step; its folder is made if need be.

        Args:
            path: of the object.
            data: all of it.
            replace: there may be one, which is replaced at once.
        """

    def put_cache(self, path: str, data: bytes) -> None:
        """Write a small object that was not there and can be made again: it appears in one step,
        but may be lost or cut when the power goes."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a large object that is there when the block ends without an exception."""

    def remove(self, path: str) -> None:
        """Remove an object; it may be gone already."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""

    def flush(self, folder: str) -> None:
        """Make sure that what was removed from a folder stays removed."""

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Remove what a killed writer left unfinished; only the one writer may."""

    def relative(self, other: Storage, path: str) -> str:
        """The path of an object of another storage, from this one.

        Raises:
            ValueError: the other is on another file system.
        """


def open_storage(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """The storage at a URL: a folder of this machine, or anything that fsspec knows.

    Args:
        url: a path, `file://...`, or a URL such as `s3://bucket/run`.
        options: for the file system of fsspec.

    Raises:
        MissingBackendError: fsspec is not installed, or what it needs for this protocol.
        OSError: the other side does not answer.
        TypeError, ValueError: `url` is none, or of an unknown protocol.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"url must be a string or a path, not {type(url).__name__}")
    if not text:
        raise ValueError("url is empty; name a folder, or give a URL")
    if text.startswith(_FILE):
        return LocalStorage(_path_of(text))
    if "://" not in text:
        return LocalStorage(text)
    storage: Storage = import_late("packhorse.disk.remote").open_remote(text, dict(options or {}))
    return storage


def _path_of(url: str) -> str:
    """The path that a `file://` URL means, as `Path.as_uri` writes it."""
    path = url.removeprefix(_FILE).removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"{url}: the path must be absolute: {_FILE}/{path}, or give it as a path")
    return unquote(path)


def is_location(url: str | os.PathLike[str]) -> bool:
    """Whether `open_storage` takes this: a path, or a URL that fsspec understands."""
    try:
        open_storage(url)
    except (TypeError, ValueError, ImportError):
        return False
    return True


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

    is_local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._text = os.path.realpath(root)
        self._root = Path(self._text)

    def at(self, path: str = "") -> Path:
        """The full path of an object."""
        return Path(self.label(path))

    def label(self, path: str = "") -> str:
        """What messages call an object: its full path."""
        return os.path.normpath(f"{self._text}/{path}")

    def make(self) -> None:
        """Make the folder, so that it stays."""
        _make_folder(self._root)

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""
        try:
            return sorted(os.listdir(self.at(folder)))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, and how many bytes each has."""
        return {name: stamp.nbytes for name, stamp in _stamps(self.label(folder)).items()}

    def files(self, folder: str) -> dict[str, Stamp]:
        """`<folder>/<file>` of all files one level deeper, and their stamps."""
        found, root = {}, self.label(folder)
        for name in self.names(folder):
            for file, stamp in _stamps(f"{root}/{name}").items():
                found[f"{name}/{file}"] = stamp
        return found

    def stamp(self, path: str) -> Stamp:
        """The stamp of a file."""
        return _stamp(os.stat(self.at(path)))

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return self.at(path).is_file()

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small file, whole."""
        with _opened(self.label(path)) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > max_nbytes:
                raise CorruptionError(f"{self.label(path)}: longer than {max_nbytes} bytes")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(nbytes)

    def open(self, path: str) -> Object:
        """A large file, mapped."""
        return _MappedFile(self.label(path))

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file in one step."""
        with self._writing(path, replace=replace) as sink:
            sink.write(data)

    def put_cache(self, path: str, data: bytes) -> None:
        """Write a small file in one step, and wait for no disk."""
        target = self.at(path)
        target.parent.mkdir(exist_ok=True)
        temporary = temporary_beside(target)
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                OutputFile(descriptor, target).write(data)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: str) -> AbstractContextManager[OutputFile]:
        """Write a file that is there when the block ends without an exception."""
        return self._writing(path, replace=False)

    @contextmanager
    def _writing(self, path: str, *, replace: bool) -> Iterator[OutputFile]:
        target = self.at(path)
        _make_folder(target.parent)
        with atomic_file(target, force=replace) as sink:
            yield sink

    def remove(self, path: str) -> None:
        """Remove a file; it may be gone already."""
        self.at(path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            self.at(path).rmdir()

    def flush(self, folder: str) -> None:
        """Make sure that what was removed from a folder stays removed."""
        with suppress(FileNotFoundError):
            sync_folder(self.at(folder))

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Remove what a killed writer left unfinished."""
        for folder in folders:
            for name in filter(is_temporary, _stamps(self.label(folder))):
                self.remove(f"{folder}/{name}" if folder else name)

    def relative(self, other: Storage, path: str) -> str:
        """The path of a file of another folder, from this one."""
        if not isinstance(other, LocalStorage):
            raise ValueError(f"{other.label()} must be on a local disk, as {self.label()} is")
        return Path(os.path.relpath(other.at(path), self._root)).as_posix()


def _stamps(folder: str) -> dict[str, Stamp]:
    """What lies in a folder but folders, by name; nothing if there is no such folder."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed in the meantime, or a link to nothing
                if not entry.is_dir():
                    found[entry.name] = _stamp(entry.stat())
    return found


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns % (1 << 64))


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they stay."""
    missing = [part for part in (folder, *folder.parents) if not part.is_dir()]
    for part in reversed(missing):
        with suppress(FileExistsError):
            part.mkdir()
        sync_folder(part.parent)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a regular file; opening a pipe might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptionError(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


class _MappedFile:
    """A file, mapped as a whole; the mapping outlives the file's removal."""

    def __init__(self, path: str) -> None:
        self._path = path
        with _opened(path) as descriptor, naming(path):
            self.nbytes = os.fstat(descriptor).st_size
            self._view = memoryview(b"")
            if self.nbytes:  # the system maps no empty file
                self._view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))

    def region(self, offset: int, nbytes: int) -> memoryview:
        check_region(self._path, min(self.nbytes, self._view.nbytes), offset, nbytes)
        return self._view[offset : offset + nbytes]

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        return np.frombuffer(self.region(offset, nbytes), np.uint8)

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        pass
