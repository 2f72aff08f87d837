"""A file or folder at a URL of fsspec, with the methods of `pathlib.Path` that the disk hop uses.

An object store has no folders: a folder is what the names of objects have in common. Names are
compared as text, so nothing is ever outside of its folder, and links do not exist.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath, PurePosixPath
from typing import Any

from packhorse.storage.interface import Stamp
from packhorse.storage.output_file import OutputFile
from packhorse.storage.remote_client import Client, connect, reaching, remote_stamp
from packhorse.storage.remote_object import RemoteObject
from packhorse.storage.upload import uploading

__all__ = ["RemotePath"]

_WITH_QUERY = ("http", "https")


class RemotePath:
    """A file or folder at a URL. `str` gives the URL."""

    def __init__(self, client: Client, full: str, url: str, options: Mapping[str, Any]) -> None:
        """
        Args:
            client: the file system.
            full: the path in it.
            url: the URL, for messages and for opening it again.
            options: the options that the file system was opened with.
        """
        self._client = client
        self._full = full.rstrip("/")
        self._url = url.rstrip("/")
        self._options = dict(options)
        self.is_called_folder = url.endswith("/")

    @property
    def protocol(self) -> str:
        """The protocol of the URL, such as `s3`."""
        return self._url.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        full = self._full.partition("?")[0] if self.protocol in _WITH_QUERY else self._full
        return posixpath.basename(full)

    @property
    def suffix(self) -> str:
        """The name's last dot and what follows it; empty if there is none."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder that the file is in."""
        return self._at(self._full.rpartition("/")[0], self._url.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """A file of another name in the same folder."""
        return self.parent / name

    def __truediv__(self, path: str | PurePath) -> RemotePath:
        text = str(path)
        return self if text == "." else self._at(f"{self._full}/{text}", f"{self._url}/{text}")

    def _at(self, full: str, url: str) -> RemotePath:
        return RemotePath(self._client, full, url, self._options)

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """The path from a folder that this file is in."""
        return PurePosixPath(self._full).relative_to(folder._full)

    def is_relative_to(self, folder: RemotePath) -> bool:
        """Whether this is the folder itself, or in it."""
        same = self._client.fs == folder._client.fs
        return same and f"{self._full}/".startswith(f"{folder._full}/")

    def samefile(self, other: RemotePath) -> bool:
        """Whether both are the same file."""
        return self._full == other._full and bool(self._client.fs == other._client.fs)

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.samefile(other)

    def __hash__(self) -> int:
        return hash(self._full)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _reopen, (self._url, self._options)

    # What is there.

    def _info(self) -> dict[str, Any]:
        fs = self._client.fs
        fs.invalidate_cache(posixpath.dirname(self._full))
        with reaching(self._url):
            info: dict[str, Any] = fs.info(self._full)
        return info

    def _kind(self) -> str:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return ""

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return bool(self._kind())

    def is_dir(self) -> bool:
        """Whether there is a folder."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._kind() == "file"

    def stamp(self) -> Stamp:
        """The stamp of the file.

        Raises:
            FileNotFoundError: there is none.
        """
        return remote_stamp(self._info())

    def modified(self) -> float | None:
        """When the file was written last, in seconds since 1970; None if the server does not say.

        Raises:
            FileNotFoundError: there is none.
        """
        try:
            with reaching(self._url):
                return float(self._client.fs.modified(self._full).timestamp())
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            return None

    def iterdir(self) -> list[RemotePath]:
        """The files and folders directly in the folder."""
        fs = self._client.fs
        fs.invalidate_cache()
        with reaching(self._url):
            found = fs.ls(self._full, detail=False)
        names = {path.rstrip("/").rpartition("/")[2] for path in found if path[-1] != "/"}
        return [self / name for name in sorted(names)]

    def files(self) -> dict[PurePosixPath, Stamp]:
        """The stamps of all files in a folder and its subfolders, by their paths in the folder.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: a name could lead out of the folder, if it were the name of a local file.
        """
        fs = self._client.fs
        fs.invalidate_cache()
        with reaching(self._url):
            found: dict[str, dict[str, Any]] = fs.find(self._full, detail=True)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", self._url)
        top = len(self._full) + 1
        # Some tools make an empty object for a folder, whose name ends in a slash.
        names = {path[top:]: info for path, info in sorted(found.items()) if path[-1] != "/"}
        for name in names:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise ValueError(
                    f"{self._url}/{name}: this name has a part that is empty, '.' or '..', which "
                    "no file can have; rename the object"
                )
        return {PurePosixPath(name): remote_stamp(info) for name, info in names.items()}

    # Reading and writing.

    def open(self) -> RemoteObject:
        """Open the file, which is then read in ranges.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a folder.
            OSError: the server refuses, or cannot be reached.
        """
        self._client.fs.invalidate_cache(posixpath.dirname(self._full))
        return RemoteObject(self._client, self._full, self._url)

    def check_output(self, *, force: bool) -> None:
        """Refuse to write here, before any work is done.

        Raises:
            FileExistsError: the file exists and `force` is False.
            IsADirectoryError: the URL ends in a slash.
        """
        if self.is_called_folder:
            raise IsADirectoryError(f"{self._url}/: is a folder; name a file in it")
        if not force and self.is_file():
            raise FileExistsError(
                f"{self._url}: already exists; allow replacing it (force, --force) or name another"
            )

    @contextmanager
    def writing(self, *, force: bool) -> Iterator[OutputFile]:
        """Write a file that appears under its name only when the block ends without an exception.

        Args:
            force: whether an existing file may be replaced. Without it, existence is checked
                before the block and again before the upload, but not during the upload.

        Raises:
            OSError: as for `check_output`; or the file cannot be written.
        """
        self.check_output(force=force)

        def check() -> None:
            self.check_output(force=force)

        with uploading(self._client, self._full, self._url, check) as output:
            yield output

    def remove(self) -> None:
        """Remove the file."""
        with reaching(self._url):
            self._client.fs.rm_file(self._full)


def _reopen(url: str, options: dict[str, Any]) -> RemotePath:
    client, full = connect(url, options)
    assert client is not None  # the URL had a file system of its own when it was pickled
    return RemotePath(client, full, url, options)
