"""Opening a shelf's file as an environment of LMDB, and LMDB's errors in our words.

Nothing above `engine` sees an error of LMDB.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from packhorse.errors import CompatibilityError, CorruptionError, MissingBackendError
from packhorse.late_import import import_late
from packhorse.storage.atomic import sync_folder

__all__ = [
    "Tables",
    "create_file",
    "error_of",
    "lmdb_module",
    "open_environment",
    "open_tables",
    "raise_ours",
    "remove_file",
    "translated",
    "watched",
]

# Address space, not memory, and no bytes of the file. Where the system refuses as much, a shelf
# takes little, so that the process has some left for its arrays, and the map grows when it must.
_MAP_NBYTES = 1 << 40
_SMALL_MAP_NBYTES = 1 << 30
_LEAST_MAP_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_MAX_READERS = 510
_WATCH_S = 0.1
_REFUSED = "the system refuses address space to map the file (ulimit -v)"
_NAMES = (b"meta", b"names", b"pointers", b"chunks", b"shares", b"tags")


def lmdb_module() -> Any:
    """The package `lmdb`.

    Raises:
        MissingBackendError: it is not installed.
    """
    try:
        return import_late("lmdb")
    except ImportError as error:
        raise MissingBackendError(
            "a shelf needs the package lmdb; install it with: pip install 'packhorse[shelf]'"
        ) from error


class Tables(NamedTuple):
    """The tables of an environment, as handles of LMDB (see records.py)."""

    meta: Any
    names: Any
    pointers: Any
    chunks: Any
    shares: Any
    tags: Any


def open_tables(env: Any, *, create: bool = False) -> Tables:
    """Open the tables of an environment.

    Args:
        env: the environment.
        create: whether to make them.
    """
    return Tables(*(env.open_db(name, create=create) for name in _NAMES))


def create_file(path: Path, head: bytes, head_key: bytes) -> None:
    """Make a file with empty tables, which appears under its name complete and on the disk.

    Args:
        path: its name, which nothing has yet.
        head: the head record.
        head_key: its key.
    """
    temporary = path.with_suffix(".new")
    remove_file(temporary)
    try:
        with translated(path, written=temporary):
            env = open_environment(temporary, writes=True)
            try:
                tables = open_tables(env, create=True)
                with env.begin(write=True) as txn:
                    txn.put(head_key, head, db=tables.meta)
            finally:
                env.close()
        os.rename(temporary, path)
    finally:
        remove_file(temporary)
    sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file of LMDB and its table of readers."""
    for left in (path, Path(f"{path}-lock")):
        with suppress(FileNotFoundError):
            left.unlink()


def open_environment(path: Path, *, writes: bool, more_than: int = 0) -> Any:
    """Open an environment, with a map that the system grants.

    Args:
        path: the file.
        writes: whether it may be written to.
        more_than: how long the map was that has become too short; 0 if there was none.

    Returns:
        The environment. If the system refuses a longer map, it has one as long as before.
    """
    lmdb = lmdb_module()
    sizes = list(_map_sizes(path, more_than))
    for i, nbytes in enumerate(sizes):
        try:
            return lmdb.open(
                os.fspath(path), subdir=False, map_size=nbytes, max_dbs=len(_NAMES),
                readonly=not writes, create=writes, lock=os.access(path.parent, os.W_OK),
                max_readers=_MAX_READERS, max_spare_txns=0, readahead=True, mode=0o666,
            )  # fmt: skip
        except (lmdb.Error, MemoryError, OverflowError) as error:
            refused = not isinstance(error, lmdb.Error)
            refused = refused or getattr(error, "code", 0) in (errno.ENOMEM, errno.EINVAL)
            if not refused or i + 1 == len(sizes):
                raise
    raise AssertionError(sizes)


def _map_sizes(path: Path, more_than: int) -> Iterator[int]:
    """Lengths of the map to ask for, the best first."""
    needed = max(path.stat().st_size if path.exists() else 0, _LEAST_MAP_NBYTES, more_than)
    if not more_than:
        yield max(_MAP_NBYTES, 2 * needed)
    wanted = [2 * needed, needed * 3 // 2, needed * 5 // 4, needed]
    if not more_than:
        wanted.insert(0, max(_SMALL_MAP_NBYTES, 4 * needed))
    yield from (-(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES for nbytes in wanted)


@contextmanager
def translated(path: Path, written: Path | None = None) -> Iterator[None]:
    """Raise LMDB's errors as ours or the system's.

    Args:
        path, written: as for `error_of`.
    """
    lmdb = lmdb_module()
    try:
        yield
    except lmdb.Error as error:
        raise error_of(error, path, written) from error
    except MemoryError as error:
        if str(error):
            raise
        raise MemoryError(f"{path}: {_REFUSED}") from error


def raise_ours(error: BaseException | None, path: Path) -> None:
    """Raise an error of LMDB as ours, at the end of a context; others go on by themselves.

    Args:
        error: what ended the context.
        path: the file that it is about.
    """
    if error is not None and isinstance(error, lmdb_module().Error):
        raise error_of(error, path) from error


def error_of(error: Any, path: Path, written: Path | None = None) -> Exception:
    """What an error of LMDB is in our words.

    Args:
        error: the error.
        path: the file that it is about.
        written: the file that this process, and no other, was writing to; None if it was reading.
    """
    lmdb = lmdb_module()
    if isinstance(error, lmdb.MemoryError):
        return MemoryError(f"{path}: {_REFUSED}")
    if isinstance(error, lmdb.VersionMismatchError):
        return CompatibilityError(f"{path}: another version of LMDB wrote this file: {error}")
    corrupted = (
        lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.NotFoundError,
        lmdb.IncompatibleError, lmdb.PageFullError, lmdb.CursorFullError,
    )  # fmt: skip
    if isinstance(error, corrupted):
        words = str(error).removeprefix(f"{path}: ")
        return CorruptionError(f"{path}: the file is damaged, or not a shelf: {words}")
    if isinstance(error, lmdb.ReadersFullError):
        return OSError(errno.EAGAIN, f"more than {_MAX_READERS} readers at a time", str(path))
    return _system_error(error, path, written)


def _system_error(error: Any, path: Path, written: Path | None) -> OSError:
    lmdb = lmdb_module()
    code = getattr(error, "code", 0) or 0
    if isinstance(error, lmdb.DiskError):
        code = errno.ENOSPC
    if isinstance(error, lmdb.ReadonlyError):
        code = errno.EACCES
    if code <= 0:
        words = f"an earlier write failed: {error}; open the shelf again"
        return OSError(errno.EIO, words, str(path))
    if code == errno.EIO and written is not None:
        code = _why_cut_short(written)
    return OSError(code, os.strerror(code), str(path))


def _why_cut_short(path: Path) -> int:
    """The error of a write at the end of the file: LMDB calls each write that was cut short EIO,
    even if the disk is full or the file may not grow."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(descriptor).st_size
            try:
                os.pwrite(descriptor, bytes(_PAGE_NBYTES), end)
            finally:
                os.ftruncate(descriptor, end)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.errno or errno.EIO
    return errno.EIO


@contextmanager
def watched(descriptor: int, progress: Callable[[int], object] | None) -> Iterator[None]:
    """Tell how long a file is, while it is written.

    Args:
        descriptor: of the file.
        progress: takes the bytes that were written; None for nobody.
    """
    if progress is None:
        yield
        return
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(_WATCH_S):
            progress(os.fstat(descriptor).st_size)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
