"""The LMDB environment of a shelf's file: opening, transactions, growth of the map, forks, errors.

LMDB must not open a file twice in a process, so all shelves of the process that use a file share
one `Engine`. Nothing above this module sees an error of LMDB.

A read transaction is short: `Engine.read` begins one and ends it. So the map can grow between
them, and a fork waits until the other threads are between them. The transactions that
`Shelf.reading` keeps are known here, too, because a forked child must forget them first: closing
them in the child would free their places in the table of readers that both processes share.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from packhorse.errors import CompatibilityError, CorruptionError, MissingBackendError
from packhorse.late_import import import_late
from packhorse.process import at_fork
from packhorse.storage.atomic import sync_folder

__all__ = ["Engine", "Tables", "Txn", "create_file", "engine_of", "leave_engine", "lmdb_module"]

_Result = TypeVar("_Result")
# Address space, not memory, and no bytes of the file; a system that refuses as much gets less.
_MAP_NBYTES = 1 << 40
_MIN_MAP_NBYTES = 1 << 22
_PAGE_NBYTES = 4096
_MAX_READERS = 510
_FORK_PATIENCE_S = 60.0
_WATCH_S = 0.1
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


class Txn(NamedTuple):
    """A transaction of LMDB, and the tables of its environment.

    Attributes:
        handle: the transaction. What it returns are views of the map, valid until it ends.
        tables: the tables.
    """

    handle: Any
    tables: Tables


def create_file(path: Path, head: bytes, head_key: bytes) -> None:
    """Make a file with empty tables, which appears under its name complete and on the disk.

    Args:
        path: its name, which nothing has yet.
        head: the head record.
        head_key: its key.
    """
    temporary = path.with_suffix(".new")
    _remove(temporary)
    try:
        with _translated(path):
            env = _open(temporary, writes=True)
            try:
                tables = _tables(env, create=True)
                with env.begin(write=True) as txn:
                    txn.put(head_key, head, db=tables.meta)
            finally:
                env.close()
        os.rename(temporary, path)
    finally:
        _remove(temporary)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-lock")):
        with suppress(FileNotFoundError):
            name.unlink()


def _open(path: Path, *, writes: bool, map_nbytes: int | None = None) -> Any:
    """Open an environment, with the largest map that the system grants."""
    lmdb = lmdb_module()
    nbytes = map_nbytes or _MAP_NBYTES
    needed = path.stat().st_size if path.exists() else 0
    while True:
        try:
            return lmdb.open(
                os.fspath(path), subdir=False, map_size=nbytes, max_dbs=len(_NAMES),
                readonly=not writes, create=writes, lock=os.access(path.parent, os.W_OK),
                max_readers=_MAX_READERS, max_spare_txns=0, readahead=True, mode=0o666,
            )  # fmt: skip
        except (lmdb.MemoryError, lmdb.Error, MemoryError) as error:
            refused = isinstance(error, MemoryError | lmdb.MemoryError)
            refused = refused or getattr(error, "code", 0) in (errno.ENOMEM, errno.EINVAL)
            if not refused or nbytes // 2 < max(_MIN_MAP_NBYTES, needed):
                raise
            nbytes //= 2


def _tables(env: Any, *, create: bool = False) -> Tables:
    return Tables(*(env.open_db(name, create=create) for name in _NAMES))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise LMDB's errors as ours or the system's."""
    lmdb = lmdb_module()
    try:
        yield
    except lmdb.Error as error:
        raise _ours(error, path) from error
    except MemoryError as error:
        if str(error):
            raise
        raise MemoryError(
            f"{path}: the system refuses address space to map the file (ulimit -v)"
        ) from error


def _ours(error: Exception, path: Path) -> Exception:
    lmdb = lmdb_module()
    if isinstance(error, lmdb.VersionMismatchError):
        return CompatibilityError(f"{path}: another version of LMDB wrote this file: {error}")
    corrupted = (
        lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.NotFoundError,
        lmdb.IncompatibleError, lmdb.PageFullError, lmdb.CursorFullError,
    )  # fmt: skip
    if isinstance(error, corrupted):
        return CorruptionError(f"{path}: the file is damaged, or not a shelf: {error}")
    if isinstance(error, lmdb.ReadersFullError):
        return OSError(errno.EAGAIN, f"more than {_MAX_READERS} readers at a time", str(path))
    if isinstance(error, lmdb.MemoryError):
        return MemoryError(f"{path}: the system refuses address space to map the file (ulimit -v)")
    code = getattr(error, "code", 0) or 0
    if isinstance(error, lmdb.DiskError):
        code = errno.ENOSPC
    if isinstance(error, lmdb.ReadonlyError):
        code = errno.EACCES
    if code <= 0:
        return OSError(errno.EIO, f"an earlier write failed: {error}; open the shelf again", path)
    if code == errno.EIO and _is_full(path):
        code = errno.ENOSPC
    return OSError(code, os.strerror(code), str(path))


def _is_full(path: Path) -> bool:
    """Whether the disk is full: LMDB reports a write that was cut short as EIO."""
    with suppress(OSError):
        status = os.statvfs(path.parent)
        return status.f_bavail * status.f_frsize < 1 << 16
    return False


class Engine:
    """The environment of a file, for all shelves of this process.

    Attributes:
        path: the file.
        generation: changes when the environment was opened again, which ends all transactions.
    """

    def __init__(self, path: Path) -> None:
        """Opens the environment; use `engine_of`.

        Args:
            path: the file.

        Raises:
            CorruptionError: it is not a file of LMDB, or is damaged.
            OSError: it cannot be opened.
        """
        self.path = path
        self.generation = 0
        self.n_users = 0
        self._changed = threading.Condition()
        self._active: dict[int, int] = {}  # threads that are in transactions
        self._is_closed_to: int | None = None  # the thread that has the environment to itself
        self.kept: dict[int, Any] = {}  # read transactions that outlive a call, by their keepers
        self._pid = os.getpid()
        self._open_env()

    def _open_env(self) -> None:
        writes = os.access(self.path, os.W_OK)
        status = self.path.stat()
        if status.st_size < 2 * _PAGE_NBYTES:
            raise CorruptionError(f"{self.path}: not a shelf, or cut: {status.st_size} bytes")
        with _translated(self.path):
            env = _open(self.path, writes=writes)
            try:
                if writes:
                    # LMDB takes the newest state from the table of readers. If a crash has left a
                    # table that is newer than the file, this mends it.
                    env.begin(write=True).abort()
                self._fill_up(env, writes)
                self._tables = _tables(env)
            except BaseException:
                env.close()
                raise
            self._env = env
        self.generation += 1

    def _fill_up(self, env: Any, writes: bool) -> None:
        """Make the file as long as LMDB takes it to be. A file that was cut would end the process
        by a signal; with zeros at its end, the lost pages are found to be damaged."""
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if self.path.stat().st_size >= needed:
            return
        if not writes:
            raise CorruptionError(f"{self.path}: the file was cut: it must have {needed} bytes")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Unlike ftruncate, this never shortens the file, which another process may be writing.
            os.posix_fallocate(descriptor, needed - 1, 1)
        finally:
            os.close(descriptor)

    @property
    def is_writable(self) -> bool:
        """Whether the file may be written to."""
        return not self._env.flags()["readonly"] if self._env else False

    def nbytes(self) -> tuple[int, int]:
        """The bytes of the file that are in use or free for new chunks, and the free ones."""
        with self.read() as txn, _translated(self.path):
            psize = self._env.stat()["psize"]
            used = self._env.info()["last_pgno"] + 1
            live = 2
            for table in (None, *txn.tables):
                stat = txn.handle.stat(table) if table is not None else txn.handle.stat()
                live += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return used * psize, max(0, used - live) * psize

    def readers(self) -> list[tuple[int, int]]:
        """The processes that keep a state: their numbers, and how many commits of LMDB ago it was.
        Entries of processes that have died are removed."""
        with _translated(self.path):
            self._env.reader_check()
            last = self._env.info()["last_txnid"]
            found = []
            for line in self._env.readers().splitlines()[1:]:
                pid, _, txnid = line.split()[:3]
                if txnid.isdigit():
                    found.append((int(pid), last - int(txnid)))
        return found

    def copy_to(self, path: Path, progress: Callable[[int], object] | None) -> None:
        """Copy the newest state to a new file, without free space, and flush it to the disk.

        Args:
            path: of the new file.
            progress: takes the bytes that were written.

        Raises:
            OSError: the disk is full, or failed.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self.enter()
            try:
                with _translated(path), _watched(descriptor, progress):
                    self._env.copyfd(descriptor, compact=True)
            finally:
                self.leave()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # Transactions.

    def read(self) -> _Read:
        """A read transaction, as a context that gives a `Txn`."""
        return _Read(self)

    def begin(self) -> Txn:
        """Begin a read transaction; the caller is in `active()`."""
        lmdb = lmdb_module()
        while True:
            try:
                return Txn(self._env.begin(buffers=True), self._tables)
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.Error as error:
                raise _ours(error, self.path) from error

    def write(self, work: Callable[[Txn], _Result], timeout: float) -> _Result:
        """Run a function in a write transaction, and commit it durably.

        Args:
            work: takes the transaction. If the map is full, it runs again in another one.
            timeout: how long to wait for other threads, in seconds, if the map must grow.

        Returns:
            What the function returned.

        Raises:
            OSError: the disk is full, or failed.
        """
        lmdb = lmdb_module()
        while True:
            self.enter()
            try:
                with self._env.begin(write=True, buffers=True) as handle:
                    return work(Txn(handle, self._tables))
            except (lmdb.MapFullError, lmdb.MapResizedError) as error:
                grown = 0
                if isinstance(error, lmdb.MapFullError):
                    grown = 2 * self._env.info()["map_size"]
            except lmdb.Error as error:
                failed = _ours(error, self.path)
                self.leave()
                try:
                    self._recover(timeout)
                finally:
                    self.enter()
                raise failed from error
            finally:
                self.leave()
            self._grow(grown, timeout)

    def _recover(self, timeout: float) -> None:
        """Open the environment again after a failed write: LMDB refuses everything otherwise."""
        with suppress(OSError, CorruptionError, TimeoutError), self.alone(timeout):
            self.kept.clear()
            self._env.close()
            self._open_env()

    def _grow(self, nbytes: int, timeout: float) -> None:
        with self.alone(timeout):
            if self.kept:
                raise OSError(
                    errno.EBUSY,
                    "the map must grow, which needs a moment without readers, but reading() is "
                    "active in this process; end it first",
                    str(self.path),
                )
            self._resize(nbytes)

    def _resize(self, nbytes: int) -> None:
        with _translated(self.path):
            self._env.set_mapsize(nbytes)

    # Who is in the environment.

    def enter(self) -> None:
        """Note that this thread is in a transaction."""
        me = threading.get_ident()
        with self._changed:
            if os.getpid() != self._pid:
                self._reopen_in_child()
            while self._is_closed_to not in (None, me):
                self._changed.wait()
            self._active[me] = self._active.get(me, 0) + 1

    def leave(self) -> None:
        """Note that a transaction of this thread has ended."""
        me = threading.get_ident()
        with self._changed:
            n = self._active.get(me, 0) - 1
            if n > 0:
                self._active[me] = n
            else:
                self._active.pop(me, None)
                self._changed.notify_all()

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """Have the environment alone, while no thread is in a transaction.

        Raises:
            TimeoutError: other threads do not end their transactions.
        """
        self.shut_out(timeout)
        try:
            yield
        finally:
            self.let_in()

    def shut_out(self, timeout: float) -> None:
        """Wait until no other thread is in a transaction, and let none begin one.

        Raises:
            TimeoutError: other threads do not end their transactions.
        """
        me = threading.get_ident()
        with self._changed:
            until = time.monotonic() + timeout
            while self._is_closed_to is not None or self._active.keys() - {me}:
                if not self._changed.wait(until - time.monotonic()):
                    raise TimeoutError(
                        f"{self.path}: other threads were reading for {timeout:g} s; try again"
                    )
            self._is_closed_to = me

    def let_in(self) -> None:
        """Let other threads begin transactions again."""
        with self._changed:
            self._is_closed_to = None
            self._changed.notify_all()

    # Forks.

    def before_fork(self) -> None:
        """Wait for the other threads, whose transactions the child would inherit."""
        with suppress(TimeoutError):
            self.shut_out(_FORK_PATIENCE_S)

    def in_child(self) -> None:
        """Forget what belongs to threads that the child does not have."""
        self._changed = threading.Condition()
        self._is_closed_to = None
        self._active.clear()
        self.kept.clear()  # in a child, LMDB frees their memory and not their places as readers

    def _reopen_in_child(self) -> None:
        self._pid = os.getpid()
        with suppress(lmdb_module().Error):
            self._env.close()
        self._open_env()

    def close(self) -> None:
        """Close the environment."""
        with self.alone(_FORK_PATIENCE_S):
            self.kept.clear()
            with _translated(self.path):
                self._env.close()


@contextmanager
def _watched(descriptor: int, progress: Callable[[int], object] | None) -> Iterator[None]:
    """Tell how long a file is, while it is written."""
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


class _Read:
    """A read transaction, as a context."""

    __slots__ = ("_engine", "_txn")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Txn:
        self._engine.enter()
        try:
            self._txn = self._engine.begin()
        except BaseException:
            self._engine.leave()
            raise
        return self._txn

    def __exit__(self, *_: object) -> None:
        try:
            self._txn.handle.abort()
        finally:
            del self._txn
            self._engine.leave()


_engines: dict[tuple[int, int], Engine] = {}
_lock = threading.RLock()


def engine_of(path: Path) -> Engine:
    """The engine of a file, which stays open until everybody who asked for it has left it.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptionError, OSError: as for `Engine`.
    """
    lmdb_module()
    at_fork(before=_before_fork, in_parent=_in_parent, in_child=_in_child)
    with _lock:
        status = path.stat()
        key = status.st_dev, status.st_ino
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(path)
        engine.n_users += 1
        return engine


def leave_engine(engine: Engine) -> None:
    """Say that an engine is not used any more."""
    with _lock:
        engine.n_users -= 1
        if not engine.n_users:
            for key in [key for key, other in _engines.items() if other is engine]:
                del _engines[key]
            engine.close()


def _before_fork() -> None:
    _lock.acquire()
    for engine in _engines.values():
        engine.before_fork()


def _in_parent() -> None:
    for engine in _engines.values():
        engine.let_in()
    _lock.release()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for engine in _engines.values():
        engine.in_child()
