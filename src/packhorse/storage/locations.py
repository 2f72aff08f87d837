"""From a path or a URL to the storage that is there: the one place that knows all kinds."""

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
    storage: Storage = import_late("packhorse.storage.remote").open_remote(
        text, dict(options or {})
    )
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
