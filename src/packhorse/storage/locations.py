"""Opens the storage at a path or URL; the only module that knows all kinds of storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from packhorse.late_import import import_late
from packhorse.storage.interface import Storage
from packhorse.storage.local import LocalStorage

__all__ = ["is_location", "open_storage"]

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
