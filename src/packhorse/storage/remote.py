"""Storage on any file system that fsspec knows: S3, GCS, Azure, memory.

A large object is first written to a temporary file of this machine, because its header is filled in
last, and then uploaded in one call, which is atomic on an object store. Reading requests ranges of
bytes. Listings are never taken from a cache, because another process may have written since.

Each file system has its own exceptions for a network that is down, an unknown name and refused
credentials. `_reaching` turns all of these into `OSError`, with the original as the cause. It
treats an exception as the server's unless it is an error of Packhorse, of the caller or of the
system.
"""

from __future__ import annotations

import errno
import posixpath
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError, MissingBackendError, PackhorseError, TruncationError
from packhorse.late_import import import_late
from packhorse.storage.atomic import OutputFile
from packhorse.storage.attempts import with_few_attempts
from packhorse.storage.interface import Object, Stamp, Storage, check_region
from packhorse.storage.local import LocalStorage

__all__ = ["RemoteStorage", "open_remote"]

_OF_EXTRA = ("s3", "s3a")  # protocols whose package the extra `remote` installs
# Protocols of object stores without folders: creating one would create a bucket.
_WITHOUT_FOLDERS = frozenset(("s3", "s3a", "gs", "gcs"))
_REMEDIES: dict[type, str] = {
    FileNotFoundError: "check the address",
    PermissionError: "check the credentials, and what they allow",
}
_READ_NBYTES = 1 << 23  # bytes per request; frames are often read in the order in which they lie
# Ranges this close are fetched as one: a request costs more than the bytes between them.
_JOIN_NBYTES = 1 << 18
# The fields by which file systems show that the content of an object has changed.
_CHANGE_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")


def open_remote(url: str, options: dict[str, Any]) -> Storage:
    """The storage at a URL of fsspec.

    Raises:
        MissingBackendError: fsspec, or the package that it needs for the protocol, is not
            installed.
        ValueError: fsspec does not know the protocol.
        OSError: the server does not answer.
    """
    try:
        core: Any = import_late("fsspec.core")
        local: Any = import_late("fsspec.implementations.local")
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            f"{url}: needs fsspec; install it with: pip install 'packhorse[remote]'"
        ) from error
    with _reaching(url):
        try:
            fs, root = core.url_to_fs(url, **options)
        except ImportError as error:
            raise MissingBackendError(f"{url}: {_missing(url, error)}") from error
    if isinstance(fs, local.LocalFileSystem):  # fsspec's class neither flushes nor renames
        return LocalStorage(root)
    with _reaching(url):
        return RemoteStorage(with_few_attempts(fs), root, url)


def _missing(url: str, error: ImportError) -> str:
    """What to install for a protocol. The extra installs s3fs; fsspec names other packages."""
    if url.partition("://")[0] in _OF_EXTRA:
        return "needs s3fs; install it with: pip install 'packhorse[remote]'"
    return f"needs a package that is not installed: {error}"


@contextmanager
def _reaching(label: str) -> Iterator[None]:
    """Turn errors of the network and of the server into `OSError`.

    Args:
        label: the name of the object in messages.
    """
    try:
        yield
    except (PackhorseError, MemoryError, TypeError, ValueError, NotImplementedError):
        raise
    except Exception as error:
        # The closest exception of Python: FileNotFoundError, PermissionError or TimeoutError.
        kinds = (kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        kind = next(kind for kind in kinds if issubclass(kind, OSError) or kind is Exception)
        words = " ".join(str(error).split()) or type(error).__name__
        remedy = _REMEDIES.get(kind, "check the address, the network and the credentials")
        made = OSError if kind is Exception else kind
        text = words if words.startswith(label) else f"{label}: {words}"
        raise made(text if remedy in text else f"{text}; {remedy}") from error


class RemoteStorage:
    """A folder of an fsspec file system."""

    is_local = False

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._protocol, _, place = url.partition("://")
        self._place = place.rstrip("/")

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
            with _reaching(self.label(folder)):
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
            name: _stamp(info).nbytes
            for (parent, _, name), info in found.items()
            if parent == self.at(folder)
        }

    def files(self, folder: str) -> dict[str, Stamp]:
        """All files one level deeper, as `<subfolder>/<file>`, with their stamps."""
        found = {tuple(path.rsplit("/", 2)): info for path, info in self._find(folder).items()}
        return {
            "/".join(part[1:]): _stamp(info)
            for part, info in sorted(found.items(), key=lambda pair: pair[0])
            if part[0] == self.at(folder)
        }

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """All files below a folder; in a store without folders, this takes one listing."""
        self._fs.invalidate_cache()
        try:
            with _reaching(self.label(folder)):
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
        return _stamp(found[self.at(path)])

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        with _reaching(self.label(path)):
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
        with _reaching(self.label(path)):
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
        return _RemoteObject(self._fs, self._fresh(path), self.label(path))

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small object in one step; an existing one is always replaced."""
        self._make_folder(posixpath.dirname(self.at(path)))
        with _reaching(self.label(path)):
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
            with _reaching(self.label(path)):
                self._fs.pipe_file(self.at(path), data, mode="create")
        except (FileExistsError, NotImplementedError, TypeError, ValueError):
            return False
        return True

    @contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        """Write an object that appears when the block ends without an exception."""
        with tempfile.NamedTemporaryFile(prefix="packhorse-") as file:
            yield OutputFile(file.fileno(), Path(file.name))
            self._make_folder(posixpath.dirname(self.at(path)))
            with _reaching(self.label(path)):
                self._fs.put_file(file.name, self.at(path))

    def _make_folder(self, folder: str) -> None:
        """Create a folder, if the file system has folders."""
        protocol = self._fs.protocol
        if _WITHOUT_FOLDERS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
            with suppress(FileExistsError, NotImplementedError), _reaching(self.label()):
                self._fs.makedirs(folder, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove an object, if it exists."""
        with suppress(FileNotFoundError), _reaching(self.label(path)):
            self._fs.rm_file(self.at(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty, if the file system has folders."""
        with suppress(OSError, NotImplementedError), _reaching(self.label(path)):
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


def _stamp(info: dict[str, Any]) -> Stamp:
    """The stamp of an object, from the fields of its file system."""
    change = next((info[key] for key in _CHANGE_KEYS if info.get(key) is not None), None)
    return Stamp(int(info.get("size") or 0), xxhash.xxh3_64_intdigest(repr(change).encode()))


def _joined(root: str, path: str) -> str:
    """A folder and a path that may begin with `..`. Not `normpath`: a root may be a URL."""
    while path.startswith("../"):
        root, path = root.rpartition("/")[0], path.removeprefix("../")
    return f"{root}/{path}" if path else root


class _RemoteObject:
    """An object that is read in ranges; it keeps the last range, if that is short."""

    def __init__(self, fs: Any, path: str, label: str) -> None:
        self._fs, self._path, self._label = fs, path, label
        with _reaching(label):
            self.nbytes = int(fs.size(path))
        self._start = 0
        self._data = b""
        self._lock = threading.Lock()

    def region(self, offset: int, nbytes: int) -> memoryview:
        check_region(self._label, self.nbytes, offset, nbytes)
        with self._lock:
            start, data = self._start, self._data
            if not start <= offset <= offset + nbytes <= start + len(data):
                start = offset
                stop = min(self.nbytes, offset + max(nbytes, _READ_NBYTES))
                with _reaching(self._label):
                    data = self._fs.cat_file(self._path, start=start, end=stop)
                self._check_length(data, start, stop)
                if len(data) <= _READ_NBYTES:
                    self._start, self._data = start, data
        return memoryview(data)[offset - start : offset - start + nbytes]

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        check_region(self._label, self.nbytes, offset, nbytes)
        return np.zeros(nbytes, np.uint8)  # pages of it that are never filled cost nothing

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        joined: list[tuple[int, int, list[tuple[ByteArray, int]]]] = []
        for memory, offset in sorted(parts, key=lambda pair: pair[1]):
            stop = offset + memory.size
            if joined and offset <= joined[-1][1] + _JOIN_NBYTES:
                start, end, found = joined[-1]
                joined[-1] = start, max(end, stop), [*found, (memory, offset)]
            elif memory.size:
                joined.append((offset, stop, [(memory, offset)]))
        starts, stops = [start for start, _, _ in joined], [stop for _, stop, _ in joined]
        paths = [self._path] * len(joined)
        with _reaching(self._label):
            pieces = self._fs.cat_ranges(paths, starts, stops, on_error="raise")
        for data, (start, stop, found) in zip(pieces, joined, strict=True):
            self._check_length(data, start, stop)
            for memory, offset in found:
                memory[:] = np.frombuffer(data, np.uint8)[offset - start :][: memory.size]

    def _check_length(self, data: bytes, start: int, stop: int) -> None:
        if len(data) != stop - start:
            raise TruncationError(
                f"{self._label}: bytes {start} to {stop} were requested, but {len(data)} bytes came"
            )
