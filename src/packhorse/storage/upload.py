"""Uploads a file as one object, which appears when it is complete.

The object is first written to a temporary file of this machine, because its header is filled in
last. A long one is then uploaded in parts. On S3, the parts become the object in the last request;
if the upload fails or is interrupted, the parts are removed. At most `_N_PARTS` parts are in memory
at the same time.
"""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packhorse.late_import import import_late
from packhorse.storage.output_file import OutputFile
from packhorse.storage.remote_client import Client, reaching

__all__ = ["make_folder", "uploading"]

# Protocols of object stores without folders: creating one would create a bucket.
_WITHOUT_FOLDERS = frozenset(("s3", "s3a", "gs", "gcs"))
_DESCRIPTORS = "/proc/self/fd"  # Linux has it
_PART_NBYTES = 1 << 23
_N_PARTS = 8
_MAX_PARTS = 9000  # S3 allows 10,000


@contextmanager
def uploading(
    client: Client, path: str, label: str, check: Callable[[], None] | None = None
) -> Iterator[OutputFile]:
    """Write an object that appears when the block ends without an exception.

    Args:
        client: the file system.
        path: the path of the object in it; an existing object is replaced.
        label: the name of the object in messages.
        check: is called before the upload begins, and may refuse it.

    Raises:
        OSError: the temporary file cannot be written, or the server refuses the object.
    """
    tempfile: Any = import_late("tempfile")
    with _temporary_file(tempfile) as (file, path_of_file):
        # Only errors of the system show this name, such as those of a full disk.
        folder = tempfile.gettempdir()
        told = f"{folder} (a temporary file for {label}; TMPDIR says where such files go)"
        yield OutputFile(file.fileno(), told)
        if check is not None:
            check()
        make_folder(client, posixpath.dirname(path), label)
        with reaching(label):
            _put(client.fs, path_of_file, path)


@contextmanager
def _temporary_file(tempfile: Any) -> Iterator[tuple[Any, str]]:
    """A new file, and a path by which it can be read."""
    if os.path.isdir(_DESCRIPTORS):
        with tempfile.TemporaryFile() as file:  # without a name: a killed process leaves nothing
            yield file, f"{_DESCRIPTORS}/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory() as folder:  # Windows opens no temporary file again
        name = os.path.join(folder, "object")
        with open(name, "w+b") as file:
            yield file, name


def make_folder(client: Client, folder: str, label: str) -> None:
    """Create a folder, if the file system has folders."""
    protocol = client.fs.protocol
    if _WITHOUT_FOLDERS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
        with suppress(FileExistsError, NotImplementedError), reaching(label):
            client.fs.makedirs(folder, exist_ok=True)


class _Interrupted(Exception):
    """The caller no longer waits for an upload."""


def _put(fs: Any, source: str, path: str) -> None:
    """Upload a file. The upload runs in a thread: if this thread is interrupted, for example by
    Ctrl-C, it still waits until the upload has ended and its parts are removed."""
    stopped, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fs.put_file(source, path, **_options(fs, source, stopped))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ended.wait()  # not join: once that is interrupted, CPython takes the thread for ended
    finally:
        stopped.set()
        ended.wait()
        thread.join()
    if errors:
        raise errors[0]


def _options(fs: Any, source: str, stopped: threading.Event) -> dict[str, Any]:
    """What to tell a file system about an upload."""
    options: dict[str, Any] = {}
    if fs.async_impl:  # others complete the object even if an exception interrupts them
        options["callback"] = _stopping(stopped)
    if any(kind.__module__ == "s3fs.core" for kind in type(fs).__mro__):
        nbytes = Path(source).stat().st_size
        options["chunksize"] = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS))
        options["max_concurrency"] = _N_PARTS
    return options


def _stopping(stopped: threading.Event) -> Any:
    """A callback of fsspec that ends an upload between two parts. s3fs then removes the parts."""
    callbacks: Any = import_late("fsspec.callbacks")

    class Stopping(callbacks.Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            if stopped.is_set():
                raise _Interrupted("the upload was interrupted")

    return Stopping()
