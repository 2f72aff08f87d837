"""A folder of this machine as a storage: objects are files, which are written and then renamed.

A file is written under a temporary name, flushed and renamed, and its folder is flushed
(`atomic.py`). `..` in paths is resolved in the text of the path, so links in the path of the folder
itself are resolved first.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError, TruncationError
from packhorse.storage.atomic import (
    atomic_file,
    is_temporary,
    sync_folder,
    temporary_beside,
)
from packhorse.storage.interface import Object, Stamp, Storage, check_region
from packhorse.storage.opening import LOST, naming
from packhorse.storage.output_file import OutputFile
from packhorse.storage.system import NO_WAIT, OPEN_FLAGS

if TYPE_CHECKING:
    pass

__all__ = ["LocalStorage"]


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
        """The name of an object in messages: its full path."""
        return os.path.normpath(f"{self._text}/{path}")

    def make(self) -> None:
        """Create the folder, so that it survives a loss of power."""
        _make_folder(self._root)

    def names(self, folder: str = "") -> list[str]:
        """The names of files and folders directly in a folder; none if it does not exist."""
        try:
            return sorted(os.listdir(self.at(folder)))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, with their sizes in bytes."""
        return {name: stamp.nbytes for name, stamp in _stamps(self.label(folder)).items()}

    def files(self, folder: str) -> dict[str, Stamp]:
        """All files one level deeper, as `<subfolder>/<file>`, with their stamps."""
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
        """Read a small file as a whole."""
        with _opened(self.label(path)) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > max_nbytes:
                raise CorruptionError(f"{self.label(path)}: longer than {max_nbytes} bytes")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(nbytes)

    def open(self, path: str) -> Object:
        """Open a large file, by mapping it."""
        return _MappedFile(self.label(path))

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file in one step."""
        with self._writing(path, replace=replace) as sink:
            sink.write(data)

    def put_cache(self, path: str, data: bytes) -> None:
        """Write a small file in one step, without waiting for the disk."""
        target = self.at(path)
        target.parent.mkdir(exist_ok=True)
        temporary = temporary_beside(target)
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o666)
            try:
                OutputFile(descriptor, target).write(data)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: str) -> AbstractContextManager[OutputFile]:
        """Write a file that appears when the block ends without an exception."""
        return self._writing(path, replace=False)

    @contextmanager
    def _writing(self, path: str, *, replace: bool) -> Iterator[OutputFile]:
        target = self.at(path)
        _make_folder(target.parent)
        with atomic_file(target, force=replace) as sink:
            yield sink

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        self.at(path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            self.at(path).rmdir()

    def flush(self, folder: str) -> None:
        """Make sure that removals from a folder survive a loss of power."""
        with suppress(FileNotFoundError):
            sync_folder(self.at(folder))

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Remove the unfinished files of a killed writer."""
        for folder in folders:
            for name in filter(is_temporary, _stamps(self.label(folder))):
                self.remove(f"{folder}/{name}" if folder else name)

    def relative(self, other: Storage, path: str) -> str:
        """The path of a file of another folder, relative to this one."""
        if not isinstance(other, LocalStorage):
            raise ValueError(f"{other.label()} must be on a local disk, as {self.label()} is")
        return Path(os.path.relpath(other.at(path), self._root)).as_posix()


def _stamps(folder: str) -> dict[str, Stamp]:
    """The stamps of everything in a folder except folders, by name; none if it does not exist."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed in the meantime
                stamp = _stamp_of(entry)
                if stamp is not None:
                    found[entry.name] = stamp
    return found


def _stamp_of(entry: os.DirEntry[str]) -> Stamp | None:
    """The stamp of an entry, or None for a folder. A link that leads nowhere gets its own stamp,
    so that it is noticed."""
    try:
        return None if entry.is_dir() else _stamp(entry.stat())
    except OSError:
        if not entry.is_symlink():
            raise
        return _stamp(entry.stat(follow_symlinks=False))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns % (1 << 64))


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, so that they survive a loss of power."""
    missing = [part for part in (folder, *folder.parents) if not part.is_dir()]
    for part in reversed(missing):
        with suppress(FileExistsError):
            part.mkdir()
        sync_folder(part.parent)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a regular file. Anything else is refused: opening a pipe can wait forever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS | NO_WAIT)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and os.path.islink(path):
            raise CorruptionError(f"{path}: a link that leads nowhere") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptionError(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


class _MappedFile:
    """A file that is mapped as a whole; the mapping stays valid if the file is removed."""

    def __init__(self, path: str) -> None:
        self._path = path
        with _opened(path) as descriptor, naming(path):
            self.nbytes = os.fstat(descriptor).st_size
            self._mapper = _core.FileMapper()
            self._view = memoryview(b"")
            if self.nbytes:  # the system cannot map an empty file
                self._view = self._mapper.map(descriptor, 0, self.nbytes)

    def region(self, offset: int, nbytes: int) -> memoryview:
        if self._mapper.has_lost:
            raise TruncationError(f"{self._path}: {LOST}")
        check_region(self._path, self.nbytes, offset, nbytes)
        return self._view[offset : offset + nbytes]

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        return np.frombuffer(self.region(offset, nbytes), np.uint8)

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        pass
