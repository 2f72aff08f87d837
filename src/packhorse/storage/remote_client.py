"""A file system of fsspec: opened by a URL, opened again after a fork, and its errors put in words.

Each file system has its own exceptions for a network that is down, an unknown name and refused
credentials. `reaching` turns all of these into `OSError`, with the original as the cause. It
treats an exception as the server's unless it is an error of Packhorse, of the caller or of the
system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xxhash

from packhorse.errors import MissingBackendError, PackhorseError
from packhorse.late_import import import_late
from packhorse.storage.attempts import with_few_attempts
from packhorse.storage.interface import Stamp

__all__ = ["Client", "connect", "reaching", "remote_stamp"]

_OF_EXTRA = ("s3", "s3a")  # protocols whose package the extra `remote` installs
_REMEDIES: dict[type, str] = {
    FileNotFoundError: "check the address",
    PermissionError: "check the credentials, and what they allow",
}
# The fields by which file systems show that the content of an object has changed.
_CHANGE_KEYS = (
    *("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified"),
    *("Last-Modified", "created"),
)


class Client:
    """A file system of fsspec, for this process and for the processes that are forked from it."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._pid = os.getpid()

    @property
    def fs(self) -> Any:
        """The file system. The loop of fsspec runs in a thread, which a forked process does not
        have, so such a process gets a file system of its own."""
        if self._pid != os.getpid():
            self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._pid = os.getpid()
        return self._fs


def connect(url: str, options: Mapping[str, Any]) -> tuple[Client | None, str]:
    """Open the file system of a URL.

    Args:
        url: a URL of fsspec.
        options: options for fsspec's file system.

    Returns:
        The file system, and the path of the URL in it; None instead of the file system if it is
        that of this machine.

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
    with reaching(url):
        try:
            fs, root = core.url_to_fs(url, **options)
        except ImportError as error:
            raise MissingBackendError(f"{url}: {_missing(url, error)}") from error
        except ValueError as error:  # an unknown protocol, above all
            raise ValueError(f"{url}: {error}; check the address") from error
    if isinstance(fs, local.LocalFileSystem):
        return None, root
    with reaching(url):
        return Client(with_few_attempts(fs)), root


def _missing(url: str, error: ImportError) -> str:
    """What to install for a protocol. The extra installs s3fs; fsspec names other packages."""
    if url.partition("://")[0] in _OF_EXTRA:
        return "needs s3fs; install it with: pip install 'packhorse[remote]'"
    return f"needs a package that is not installed: {error}"


@contextmanager
def reaching(label: str) -> Iterator[None]:
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
        if kind is FileNotFoundError and label.endswith(words.strip("/")):
            words = "no such file or folder"
        remedy = _REMEDIES.get(kind, "check the address, the network and the credentials")
        made = OSError if kind is Exception else kind
        text = words if words.startswith(label) else f"{label}: {words}"
        raise made(text if remedy in text else f"{text}; {remedy}") from error


def remote_stamp(info: Mapping[str, Any]) -> Stamp:
    """The stamp of an object, from the fields of its file system."""
    change = next((info[key] for key in _CHANGE_KEYS if info.get(key) is not None), None)
    return Stamp(int(info.get("size") or 0), xxhash.xxh3_64_intdigest(repr(change).encode()))
