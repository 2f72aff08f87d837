"""Opens the storage, the file or the folder at a path or URL; the only module that knows all kinds
of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from packhorse.late_import import import_late
from packhorse.storage.atomic import atomic_file, check_output_file
from packhorse.storage.interface import Storage
from packhorse.storage.local import LocalStorage
from packhorse.storage.output_file import OutputFile
from packhorse.storage.remote_path import RemotePath

if TYPE_CHECKING:
    PathLike: TypeAlias = str | os.PathLike[str]

__all__ = [
    "Place",
    "check_output",
    "is_location",
    "is_same_file",
    "is_within",
    "open_place",
    "open_storage",
    "shared_options",
    "writing",
]

# A file or folder: on this machine, or at a URL.
Place: TypeAlias = Path | RemotePath

_FILE = "file://"


def open_storage(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """The storage at a URL: a folder of this machine, or anything that fsspec knows.

    Args:
        url: a path, `file://...`, or a URL such as `s3://bucket/run`.
        options: options for fsspec's file system.

    Raises:
        MissingBackendError: fsspec, or the package that it needs for the protocol, is not
            installed.
        OSError: the server does not answer.
        TypeError, ValueError: `url` is neither a path nor a URL, or its protocol is unknown.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"url must be a string or a path, not {type(url).__name__}")
    if not text:
        raise ValueError("url is empty; give a folder or a URL")
    if text.startswith(_FILE):
        return LocalStorage(_path_of(text))
    if "://" not in text:
        return LocalStorage(text)
    storage: Storage = import_late("packhorse.storage.remote").open_remote(
        text, dict(options or {})
    )
    return storage


def _path_of(url: str) -> str:
    """The path of a `file://` URL, as `Path.as_uri` writes it."""
    path = url.removeprefix(_FILE).removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"{url}: the path must be absolute: {_FILE}/{path}, or give it as a path")
    return unquote(path)


def is_location(url: str | os.PathLike[str]) -> bool:
    """Whether `open_storage` accepts this: a path, or a URL that fsspec knows."""
    try:
        open_storage(url)
    except (TypeError, ValueError, ImportError):
        return False
    return True


def open_place(path: PathLike, options: Mapping[str, Any] | None = None) -> Place:
    """The file or folder at a path or URL.

    Args:
        path: a path, `file://...`, a URL that fsspec knows, or a place that is returned as it is.
        options: options for fsspec's file system.

    Raises:
        MissingBackendError: fsspec, or the package that it needs for the protocol, is not
            installed.
        OSError: the server does not answer.
        ValueError: the protocol is unknown.
    """
    if isinstance(path, (Path, RemotePath)):
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or "://" not in text:
        return Path(path)
    if text.startswith(_FILE):
        return Path(_path_of(text))
    client, full = import_late("packhorse.storage.remote_client").connect(text, options or {})
    return Path(full) if client is None else RemotePath(client, full, text, options or {})


def shared_options(
    path: PathLike, other: PathLike, options: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The options of another URL, if a path is a URL of the same protocol."""
    protocol, sign, _ = os.fspath(path).partition("://")
    return options if sign and protocol == os.fspath(other).partition("://")[0] else None


def is_same_file(a: Place, b: Place) -> bool:
    """Whether two places are the same file, even if links lead to it."""
    if isinstance(a, Path):
        return isinstance(b, Path) and a.samefile(b)
    return isinstance(b, RemotePath) and a.samefile(b)


def is_within(a: Place, b: Place) -> bool:
    """Whether a place is a folder itself, or in it, even if links lead there."""
    if isinstance(a, Path):
        return isinstance(b, Path) and a.resolve().is_relative_to(b.resolve())
    return isinstance(b, RemotePath) and a.is_relative_to(b)


def check_output(destination: Place, *, source: Place | None = None, force: bool = False) -> None:
    """Refuse a destination that must not be written, before any work is done.

    Args:
        destination: the place of the output.
        source: the input; the output must not be the same file.
        force: whether an existing file may be replaced.

    Raises:
        ValueError: the output is the input, or is not a regular file.
        FileExistsError: the output exists and `force` is False.
        IsADirectoryError: the output is a folder.
        FileNotFoundError: the output's folder does not exist.
    """
    if isinstance(destination, Path):
        own = source if isinstance(source, Path) else None
        check_output_file(destination, source=own, force=force)
        return
    if source is not None and is_same_file(destination, source):
        raise ValueError(f"{destination}: the output is the input itself; name another output")
    destination.check_output(force=force)


@contextmanager
def writing(
    destination: Place, *, source: Place | None = None, force: bool = False
) -> Iterator[OutputFile]:
    """Write a file that appears under its name only when the block ends without an exception.

    Args:
        destination: the place of the file.
        source: the input, which the destination must not be. If both are files of this machine,
            the new file gets the input's permissions.
        force: whether an existing file may be replaced.

    Yields:
        The file to write to.

    Raises:
        OSError, ValueError: as for `check_output`; or the file cannot be written.
    """
    check_output(destination, source=source, force=force)
    if isinstance(destination, Path):
        own = source if isinstance(source, Path) else None
        like = None if own is None else os.stat(own)
        with atomic_file(destination, source=own, force=force, like=like) as output:
            yield output
    else:
        with destination.writing(force=force) as output:
            yield output
