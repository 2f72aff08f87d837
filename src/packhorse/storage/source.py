"""Opens a source file, on this machine or at a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packhorse.storage.locations import Place
from packhorse.storage.remote_source import open_remote_source, read_remote_header
from packhorse.storage.safetensors_header import FileHeader, read_header
from packhorse.storage.source_file import Source, open_local

__all__ = ["header_at", "open_source"]


def header_at(path: Place) -> FileHeader:
    """`read_header` for a file on this machine or at a URL."""
    if isinstance(path, Path):
        return read_header(path)
    return read_remote_header(path.open(), str(path))


@contextmanager
def open_source(path: Place) -> Iterator[Source]:
    """Open a file for the time of the block. If the block fails because the file changed, the error
    says so.

    A block that writes output calls `check` before the output becomes visible.

    Raises:
        OSError: the file cannot be opened or read, or it changed.
        ValueError: it is not a regular file.
    """
    if isinstance(path, Path):
        with open_local(path) as local:
            yield local
    else:
        with open_remote_source(path) as remote:
            yield remote
