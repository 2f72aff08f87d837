"""Transactions on a shelf's file, for all shelves of the process: threads, forks, the map.

LMDB must not open a file twice in a process, so all shelves of the process that use a file share
one `Engine`. Nothing above this module sees an error of LMDB.

A read transaction is short: `Engine.read` begins one and ends it. So the environment can be opened
again between them, when the map must grow or a write has failed, and a fork waits until the other
threads are between them. The transactions that outlive a call are known here: a forked child must
forget them before it opens the file for itself. If it closed them, it would free their places in
the table of readers, which it shares with its parent, and a writer would use their pages again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from packhorse.disk.shelf.environment import (
    Tables,
    error_of,
    lmdb_module,
    open_environment,
    open_tables,
    raise_ours,
    remove_file,
    translated,
    watched,
)
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.process import at_fork

__all__ = ["Engine", "Kept", "Txn", "engine_of", "leave_engine", "opening"]

_Result = TypeVar("_Result")
_PAGE_NBYTES = 4096
_PATIENCE_S = 60.0  # for other threads that read
_CHECK_S = 1.0  # between looks at which readers have died


class Txn(NamedTuple):
    """A transaction of LMDB, and the tables of its environment.

    Attributes:
        handle: the transaction. What it returns are views of the map, valid until it ends.
        tables: the tables.
    """

    handle: Any
    tables: Tables


class Kept(Protocol):
    """What keeps a read transaction for longer than a call.

    Attributes:
        txn: the transaction; None if it is lost.
    """

    txn: Txn | None


class Engine:
    """The environment of a file, for all shelves of this process.

    Attributes:
        path: the file.
        pid: the process that opened it. A forked child must open the file for itself.
        generation: changes when the environment was opened again, which ends all transactions.
        kept: what keeps read transactions, by the numbers of the objects.
        n_users: how many use it; see `engine_of`.
    """

    def __init__(self, path: Path) -> None:
        """Opens the environment; use `engine_of`.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: there is no such file, or it was removed meanwhile.
            CorruptionError: it is not a file of LMDB, or is damaged.
            OSError: it cannot be opened.
        """
        self.path = path
        self.pid = os.getpid()
        self.generation = 0
        self.n_users = 0
        self.kept: dict[int, Kept] = {}
        self.is_caught = False  # the fork came amid a transaction
        self._changed = threading.Condition()
        self._active: dict[int, int] = {}  # threads that are in transactions
        self._closed_to: int | None = None  # the thread that has the environment to itself
        self._n_waiting = 0  # threads that want it to themselves
        self._was_left = False
        self._env: Any = None
        self._tables: Any = None
        self._next_check = 0.0
        self._open_env()

    def _open_env(self, more_than: int = 0) -> None:
        writes = os.access(self.path, os.W_OK)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes < 2 * _PAGE_NBYTES:
                raise CorruptionError(f"{self.path}: not a shelf, or cut: {nbytes} bytes")
            with translated(self.path):
                env = open_environment(self.path, writes=writes, more_than=more_than)
                try:
                    self._check_same(descriptor)
                    self._fill_up(env, writes)
                    self._tables = open_tables(env)
                except BaseException:
                    env.close()
                    raise
        finally:
            os.close(descriptor)
        self._env = env
        self.generation += 1

    def _check_same(self, descriptor: int) -> None:
        """Make sure that LMDB has opened a file that was there. If the writer has removed it in
        this moment, after `compact`, LMDB has made an empty one."""
        opened = os.stat(self.path)
        if os.path.samestat(opened, os.fstat(descriptor)):
            return
        if opened.st_size <= 2 * _PAGE_NBYTES:
            remove_file(self.path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

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

    def _opened(self) -> Any:
        """The environment.

        Raises:
            OSError: it could not be opened again.
        """
        if self._env is None:
            raise OSError(
                errno.EIO, "an earlier write failed, or the map could not grow; open the shelf "
                "again", str(self.path),
            )  # fmt: skip
        return self._env

    def mend(self) -> None:
        """Make the table of readers agree with the file: a writer that was killed may not have
        noted there what it had committed. Waits for a write transaction that goes on."""
        with self.using(), translated(self.path):
            if not self._opened().flags()["readonly"]:
                self._env.begin(write=True).abort()

    def nbytes(self) -> tuple[int, int]:
        """The bytes of the file that are in use or free for new chunks, and the free ones."""
        with self.read() as txn:
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
        with self.using(), translated(self.path):
            env = self._opened()
            env.reader_check()
            last = env.info()["last_txnid"]
            found = []
            for line in env.readers().splitlines()[1:]:
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
            CorruptionError: the file is damaged.
            OSError: the disk is full, or failed.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with self.using(), translated(path), watched(descriptor, progress):
                self._opened().copyfd(descriptor, compact=True)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # Transactions.

    def read(self) -> _Read:
        """A read transaction, as a context that gives a `Txn`."""
        return _Read(self)

    def begin(self) -> Txn:
        """Begin a read transaction; the caller has entered once.

        Raises:
            OSError: LMDB has no room for another reader, or another process has let the file grow
                while this thread cannot let go of it.
        """
        lmdb = lmdb_module()
        while True:
            env, generation = self._opened(), self.generation
            try:
                return Txn(env.begin(buffers=True), self._tables)
            except lmdb.MapResizedError:
                self._follow_growth(generation)
            except lmdb.Error as error:
                raise error_of(error, self.path) from error

    def _follow_growth(self, generation: int) -> None:
        """Open the environment again, because the file is longer than the map."""
        if self._active.get(threading.get_ident(), 0) > 1:
            raise self._busy("another process has let the file grow")
        self.leave()
        try:
            with self._alone(_PATIENCE_S):
                if self.generation == generation:
                    if self.kept:
                        raise self._busy("another process has let the file grow")
                    self._open_again()
        finally:
            self.enter()

    def _busy(self, why: str) -> OSError:
        return OSError(
            errno.EBUSY,
            f"{why}, so the file must be mapped again, which needs a moment without readers; but "
            "reading() or iter_chunks() is active in this process; end it first",
            str(self.path),
        )

    def write(self, work: Callable[[Txn], _Result], timeout: float) -> _Result:
        """Run a function in a write transaction, and commit it durably.

        Args:
            work: takes the transaction. If the map is full, it runs again in another one.
            timeout: how long to wait for other threads, in seconds, if the map must grow.

        Returns:
            What the function returned.

        Raises:
            OSError: the disk is full, or failed; or the map must grow, but a thread reads.
            MemoryError: the map must grow, but the system refuses.
        """
        lmdb = lmdb_module()
        while True:
            with self.using():
                env, generation = self._opened(), self.generation
                self._forget_dead_readers(env)
                try:
                    with env.begin(write=True, buffers=True) as handle:
                        return work(Txn(handle, self._tables))
                except lmdb.Error as caught:
                    error = caught
                map_nbytes = env.info()["map_size"]
            if isinstance(error, lmdb.MapFullError):
                self._grow(map_nbytes, timeout)
            elif isinstance(error, lmdb.MapResizedError):
                self._grow(0, timeout)
            else:
                failed = error_of(error, self.path, self.path)
                self._recover(generation, timeout)
                raise failed from error

    def _forget_dead_readers(self, env: Any) -> None:
        """Free the pages of states that processes held when they were killed."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_S
            env.reader_check()

    def _recover(self, generation: int, timeout: float) -> None:
        """Open the environment again after a failed write: LMDB refuses everything otherwise."""
        with suppress(OSError, PackhorseError, MemoryError), self._alone(timeout):
            if self.generation == generation:
                self._open_again()

    def _grow(self, map_nbytes: int, timeout: float) -> None:
        """Open the environment again with a longer map.

        Args:
            map_nbytes: how long the map was; 0 if another process has let the file grow.
            timeout: how long to wait for other threads, in seconds.
        """
        with self._alone(timeout):
            if map_nbytes and self._opened().info()["map_size"] > map_nbytes:
                return  # another thread was first
            if self.kept:
                raise self._busy("the map is full")
            self._open_again(map_nbytes)
            if map_nbytes and self._opened().info()["map_size"] <= map_nbytes:
                raise MemoryError(
                    f"{self.path}: the shelf needs more than {map_nbytes} bytes of address space, "
                    "and the system refuses (ulimit -v); nothing was committed"
                )

    def _open_again(self, more_than: int = 0) -> None:
        """End all transactions, and open the environment again; this thread has it alone."""
        env, self._env = self._env, None
        for kept in self.kept.values():
            kept.txn = None
        self.kept.clear()
        if env is not None:
            env.close()
        self._open_env(more_than)

    # Who is in the environment.

    def enter(self) -> None:
        """Note that this thread is in a transaction."""
        me = threading.get_ident()
        with self._changed:
            while self._is_shut(me):
                self._changed.wait()
            self._active[me] = self._active.get(me, 0) + 1

    def _is_shut(self, me: int) -> bool:
        if self._closed_to is not None:
            return self._closed_to != me
        return self._n_waiting > 0 and me not in self._active

    def leave(self) -> None:
        """Note that a transaction of this thread has ended."""
        me = threading.get_ident()
        with self._changed:
            n = self._active.get(me, 0) - 1
            if n > 0:
                self._active[me] = n
                return
            self._active.pop(me, None)
            if self._n_waiting:
                self._changed.notify_all()
            closes = self._was_left and not self._active
        if closes:
            _close_unused(self)

    @contextmanager
    def using(self) -> Iterator[None]:
        """Be in a transaction, for a block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def _alone(self, timeout: float) -> Iterator[None]:
        """Have the environment alone, while no other thread is in a transaction.

        Raises:
            TimeoutError: other threads do not end their transactions.
        """
        self._shut_out(timeout)
        try:
            yield
        finally:
            self._let_in()

    def _shut_out(self, timeout: float) -> None:
        me, until = threading.get_ident(), time.monotonic() + timeout
        with self._changed:
            self._n_waiting += 1
            try:
                while self._closed_to is not None or self._active.keys() - {me}:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(
                            f"{self.path}: other threads were reading for {timeout:g} s; try again"
                        )
                    self._changed.wait(left)
                self._closed_to = me
            finally:
                self._n_waiting -= 1
                self._changed.notify_all()

    def _let_in(self) -> None:
        with self._changed:
            if self._closed_to == threading.get_ident():
                self._closed_to = None
                self._changed.notify_all()

    def add_user(self) -> None:
        """Note one more user, by a thread that is in a transaction."""
        with self._changed:
            self.n_users += 1
            self._was_left = False

    def drop_user(self) -> bool:
        """Note one user less. If it was the last, the environment is closed, now or when the last
        thread has left it.

        Returns:
            Whether it is closed.
        """
        with self._changed:
            self.n_users -= 1
        return self.close_if_unused()

    def close_if_unused(self) -> bool:
        """Close the environment, unless there are users; if threads are in it, the last closes it.

        Returns:
            Whether it is closed.
        """
        with self._changed:
            if self.n_users:
                return False
            if self._active or self._closed_to is not None:
                self._was_left = True
                return False
            env, self._env = self._env, None
            if env is not None:
                env.close()
            return True

    # Forks.

    def before_fork(self) -> None:
        """Wait for the other threads, whose transactions the child would inherit."""
        self.is_caught = threading.get_ident() in self._active
        try:
            self._shut_out(_PATIENCE_S)
        except TimeoutError:
            self.is_caught = True

    def in_parent(self) -> None:
        """Let the other threads go on."""
        self.is_caught = False
        self._let_in()

    def in_child(self) -> None:
        """Forget the transactions, before anything can close them. In a child, LMDB frees the
        memory of one that is forgotten, and leaves its place as a reader alone."""
        self._changed = threading.Condition()
        self._closed_to = None
        self._active.clear()
        for kept in self.kept.values():
            kept.txn = None
        self.kept.clear()

    def close_in_child(self) -> None:
        """Close the environment of the parent, so that the child can open it for itself."""
        env, self._env = self._env, None
        if env is not None:
            with suppress(lmdb_module().Error):
                env.close()


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        path = self._engine.path
        try:
            self._txn.handle.abort()
        finally:
            del self._txn
            self._engine.leave()
        raise_ours(error, path)


_engines: dict[tuple[int, int], Engine] = {}
_inherited: dict[tuple[int, int], Engine] = {}  # of the parent of this process
_lock = threading.RLock()


def opening() -> AbstractContextManager[object]:
    """The lock that is held while files are opened, also during a fork."""
    return _lock


def engine_of(path: Path) -> Engine:
    """The engine of a file, which stays open until everybody who asked for it has left it.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptionError, OSError: as for `Engine`.
        RuntimeError: the process was forked while a thread of its parent was in the file.
    """
    lmdb_module()
    at_fork(before=_before_fork, in_parent=_in_parent, in_child=_in_child)
    with _lock:
        _close_inherited()
        status = path.stat()
        key = status.st_dev, status.st_ino
        if key in _inherited:
            raise RuntimeError(
                f"{path}: this process was forked while its parent was amid a long use of the "
                "shelf, such as compact(); fork before or after it, or use another start method"
            )
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(path)
        engine.add_user()
        return engine


def leave_engine(engine: Engine) -> None:
    """Say that an engine is not used any more."""
    if engine.pid != os.getpid():
        return
    with _lock:
        if engine.drop_user():
            _forget(engine)


def _close_unused(engine: Engine) -> None:
    with _lock:
        if engine.close_if_unused():
            _forget(engine)


def _forget(engine: Engine) -> None:
    for key in [key for key, other in _engines.items() if other is engine]:
        del _engines[key]


def _close_inherited() -> None:
    """Close what the parent had open. All of it at once, and before anything is opened: closing
    a file ends all locks that the process has on it."""
    for key, engine in list(_inherited.items()):
        if not engine.is_caught:
            engine.close_in_child()
            del _inherited[key]


def _before_fork() -> None:
    _lock.acquire()
    for engine in _engines.values():
        engine.before_fork()


def _in_parent() -> None:
    for engine in _engines.values():
        engine.in_parent()
    _lock.release()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for engine in _engines.values():
        engine.in_child()
    _inherited.update(_engines)
    _engines.clear()
