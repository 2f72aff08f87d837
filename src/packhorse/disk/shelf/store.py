"""The folder of a shelf: its file, its one writer, and the states that are read.

A shelf lies in one file of LMDB, `shelf-<n>.mdb`. `compact` writes the next file, notes in the head
of the old one that the shelf has moved, and removes it. Whoever reads the old file sees the note.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from packhorse.disk.shelf.engine import Engine, Txn, create_file, engine_of, leave_engine
from packhorse.disk.shelf.records import HEAD_KEY, Head
from packhorse.errors import ChangedError, ClosedError, CorruptionError
from packhorse.storage.folder_lock import FolderLock

__all__ = ["Folder", "Held", "file_after", "mark_moved", "newest_file", "remove_file"]

_Result = TypeVar("_Result")
_FILE = re.compile(r"shelf-([0-9]{1,9})\.mdb")
_LOCK = "writer.lock"
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs",
    "beegfs", "orangefs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone",
    "fuse.glusterfs", "virtiofs",
}  # fmt: skip


def newest_file(folder: Path) -> Path | None:
    """The file of a shelf; None if the folder has none."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            match = _FILE.fullmatch(name)
            if match:
                found[int(match[1])] = folder / name
    return found[max(found)] if found else None


def file_after(path: Path) -> Path:
    """The name of the file that comes after a file of a shelf."""
    match = _FILE.fullmatch(path.name)
    assert match is not None
    return path.parent / f"shelf-{int(match[1]) + 1}.mdb"


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return ""


def _refuse_network(folder: Path) -> None:
    kind = _file_system(folder)
    if kind in _NETWORK:
        raise OSError(
            f"{folder}: this is a network file system ({kind}), on which the memory map and the "
            "locks of a shelf do not work; put the shelf on a local disk, and copy it when it is "
            "closed"
        )


class Held:
    """A state that a thread holds, with `reading`.

    Attributes:
        txn: the transaction of LMDB.
        head: the head record of the state.
        depth: how many `reading` blocks hold it.
        engine: what the transaction is of.
        generation: of the engine, when the transaction began.
        pid: the process that began it.
    """

    __slots__ = ("depth", "engine", "generation", "head", "pid", "txn")

    def __init__(self, engine: Engine, txn: Txn, head: Head) -> None:
        self.engine, self.txn, self.head = engine, txn, head
        self.depth, self.generation, self.pid = 1, engine.generation, os.getpid()


class Folder:
    """A shelf's folder, opened for reading or writing.

    Attributes:
        path: the folder.
        writes: whether this is the one writer.
        timeout: how long to wait for other threads, in seconds.
    """

    def __init__(self, path: Path, *, writes: bool, timeout: float) -> None:
        """Opens the folder.

        Args:
            path: of the folder.
            writes: whether to be the one writer; the shelf is created if there is none.
            timeout: how long to wait for other threads, in seconds.

        Raises:
            FileNotFoundError: there is no shelf, and `writes` is False.
            BlockingIOError: another writer has the shelf open.
            CorruptionError, CompatibilityError: the file is damaged, or of a later release.
            OSError: the folder is on a network file system, or the system refuses.
        """
        self.path, self.writes, self.timeout = path, writes, timeout
        self._engine: Engine | None = None
        self._lock: FolderLock | None = None
        self._held: dict[int, Held] = {}
        self._moving = threading.Lock()
        self._raw, self._head = b"", Head()
        self._pid = os.getpid()
        if writes:
            self._make()
        elif not path.is_dir():
            raise FileNotFoundError(
                f"{path}: there is no shelf; open it with mode 'r+' to make one"
            )
        _refuse_network(path)
        try:
            if writes:
                self._begin_writing()
            self._open()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path}: is a file; a shelf is a folder; name another")
        if self.path.is_dir() and newest_file(self.path) is None:
            others = [name for name in os.listdir(self.path) if not _is_ours(name)]
            if others:
                raise FileExistsError(
                    f"{self.path}: is no shelf, and not empty (it has {others[0]!r}); name a new "
                    "folder"
                )
        self.path.mkdir(parents=True, exist_ok=True)

    def _begin_writing(self) -> None:
        lock = FolderLock(self.path / _LOCK, str(self.path), "the shelf", "Shelf")
        lock.acquire()
        self._lock = lock
        newest = newest_file(self.path)
        if newest is None:
            create_file(self.path / "shelf-1.mdb", Head().to_bytes(), HEAD_KEY)
        for name in os.listdir(self.path):
            path = self.path / name
            is_old = newest is not None and _FILE.fullmatch(name) and path != newest
            if is_old:
                _mark_moved(path, self.timeout)
            if is_old or name.endswith((".new", ".new-lock")):
                remove_file(path)

    def _open(self) -> None:
        """Open the newest file."""
        while True:
            path = newest_file(self.path)
            if path is None:
                raise FileNotFoundError(
                    f"{self.path}: there is no shelf in this folder; open it with mode 'r+' to "
                    "make one"
                )
            try:
                engine = engine_of(path)
            except FileNotFoundError:
                if newest_file(self.path) == path:
                    raise
                continue  # compacted meanwhile
            try:
                with engine.read() as txn:
                    head = self._read_head(txn, engine)
            except BaseException:
                leave_engine(engine)
                raise
            if head.has_moved and newest_file(self.path) != path:
                leave_engine(engine)
                continue
            self._engine = engine
            return

    def _read_head(self, txn: Txn, engine: Engine) -> Head:
        raw = txn.handle.get(HEAD_KEY, db=txn.tables.meta)
        raw = b"" if raw is None else bytes(raw)
        if raw != self._raw:
            self._head = Head.parse(raw, str(engine.path))
            self._raw = raw
        return self._head

    @property
    def engine(self) -> Engine:
        """The engine of the current file.

        Raises:
            ClosedError: the shelf is closed.
        """
        if self._engine is None:
            raise ClosedError(f"{self.path}: the shelf is closed; open it again")
        return self._engine

    @property
    def is_closed(self) -> bool:
        """Whether the shelf is closed."""
        return self._engine is None

    def check_writes(self) -> None:
        """Make sure that this process may write.

        Raises:
            ClosedError: the shelf is closed.
            PermissionError: it is open for reading only, or by the parent of this process.
        """
        if self._engine is None:
            raise ClosedError(f"{self.path}: the shelf is closed; open it again")
        if not self.writes:
            raise PermissionError(
                f"{self.path}: the shelf is open for reading only; open it with mode 'r+'"
            )
        if os.getpid() != self._pid:
            raise PermissionError(
                f"{self.path}: this process was forked from the shelf's writer, and can only read; "
                "open the shelf in the process that writes, when no other has it open"
            )

    # Reading.

    def read(self) -> _State:
        """The newest state, or the one that this thread holds, as a context that gives the
        transaction and the head record."""
        return _State(self, self._held.get(threading.get_ident()))

    def read_newest(self) -> _State:
        """The newest state, even if this thread holds another one; as `read`."""
        return _State(self, None)

    def enter(self, held: Held | None) -> tuple[Txn, Head, Engine]:
        """Begin to read a state that is held, or the newest; the caller leaves the engine."""
        if held is not None:
            held.engine.enter()
            try:
                return self._check_held(held), held.head, held.engine
            except BaseException:
                held.engine.leave()
                raise
        while True:
            engine = self.engine
            engine.enter()
            try:
                if self._engine is not engine:
                    engine.leave()
                    continue
                txn = engine.begin()
            except BaseException:
                engine.leave()
                raise
            try:
                head = self._read_head(txn, engine)
            except BaseException:
                txn.handle.abort()
                engine.leave()
                raise
            if not head.has_moved:
                return txn, head, engine
            txn.handle.abort()
            engine.leave()
            self._follow(engine)

    def _check_held(self, held: Held) -> Txn:
        """The transaction of a state that this thread holds. If a fork or a failed write has ended
        it, the same state is read again, unless it has changed."""
        engine = held.engine
        if held.generation == engine.generation and os.getpid() == held.pid:
            return held.txn
        engine.enter()
        try:
            txn = engine.begin()
            if self._read_head(txn, engine) != held.head:
                txn.handle.abort()
                raise ChangedError(
                    f"{self.path}: the state that reading() held is gone, because the process was "
                    "forked or a write to the disk failed; leave reading() and begin it again"
                )
            held.txn, held.generation, held.pid = txn, engine.generation, os.getpid()
            engine.kept[id(held)] = txn
        finally:
            engine.leave()
        return held.txn

    def _follow(self, engine: Engine) -> None:
        """Open the file that the shelf has moved to."""
        with self._moving:
            if self._engine is engine:
                self._open()
                if self._engine is engine:
                    raise CorruptionError(
                        f"{self.path}: the shelf has moved to another file, which is missing"
                    )
                leave_engine(engine)

    @property
    def holds(self) -> bool:
        """Whether this thread holds a state."""
        return threading.get_ident() in self._held

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let all reads of this thread see one state."""
        me = threading.get_ident()
        held = self._held.get(me)
        if held is not None:
            held.depth += 1
            try:
                yield
            finally:
                held.depth -= 1
            return
        held = self._held[me] = self._keep()
        try:
            yield
        finally:
            if self._held.pop(me, None):
                self._drop(held)

    @contextmanager
    def keep(self) -> Iterator[Held]:
        """The newest state, for some time, and for one thread at a time; each use of it is inside
        `using`."""
        held = self._keep()
        try:
            yield held
        finally:
            self._drop(held)

    @contextmanager
    def using(self, held: Held) -> Iterator[Txn]:
        """Use a state that was kept."""
        held.engine.enter()
        try:
            yield self._check_held(held)
        finally:
            held.engine.leave()

    def _keep(self) -> Held:
        txn, head, engine = self.enter(None)
        held = Held(engine, txn, head)
        engine.kept[id(held)] = txn
        engine.n_users += 1
        engine.leave()
        return held

    def _drop(self, held: Held) -> None:
        held.engine.enter()
        try:
            if held.engine.kept.pop(id(held), None) and held.generation == held.engine.generation:
                held.txn.handle.abort()
        finally:
            held.engine.leave()
            leave_engine(held.engine)

    # Writing.

    def write(self, work: Callable[[Txn, Head], _Result]) -> _Result:
        """Run a function in a write transaction, and commit it durably.

        Args:
            work: takes the transaction and the head record. It may run more than once.

        Raises:
            BlockingIOError: the lock file was removed, so another writer may be at work.
            OSError: the disk is full, or failed.
        """
        self.check_writes()
        assert self._lock is not None
        self._lock.check()
        engine = self.engine
        return engine.write(lambda txn: work(txn, self._read_head(txn, engine)), self.timeout)

    def move(self, path: Path) -> None:
        """Use the file that `compact` has written, and remove the one before."""
        old = self.engine
        with self._moving:
            self._engine = engine_of(path)
        leave_engine(old)
        remove_file(old.path)

    def close(self) -> None:
        """Close the folder, and let another writer in."""
        for thread, held in list(self._held.items()):
            self._held.pop(thread, None)
            self._drop(held)
        engine, self._engine = self._engine, None
        if engine is not None:
            leave_engine(engine)
        lock, self._lock = self._lock, None
        if lock is not None and os.getpid() == self._pid:
            lock.release()


def remove_file(path: Path) -> None:
    """Remove a file of LMDB and its table of readers."""
    for left in (path, Path(f"{path}-lock")):
        with suppress(FileNotFoundError):
            left.unlink()


def mark_moved(txn: Txn, head: Head) -> None:
    """Note in a file that the shelf has moved to the next one."""
    txn.handle.put(HEAD_KEY, replace(head, has_moved=True).to_bytes(), db=txn.tables.meta)


def _mark_moved(path: Path, timeout: float) -> None:
    """Send the readers of a file to the next one, if a crash has kept `compact` from it."""
    engine = engine_of(path)
    try:

        def work(txn: Txn) -> None:
            raw = txn.handle.get(HEAD_KEY, db=txn.tables.meta)
            mark_moved(txn, Head.parse(raw and bytes(raw), str(path)))

        engine.write(work, timeout)
    finally:
        leave_engine(engine)


def _is_ours(name: str) -> bool:
    return name == _LOCK or name.startswith("shelf-")


class _State:
    """A state to read, as a context."""

    __slots__ = ("_engine", "_folder", "_held", "_txn")

    def __init__(self, folder: Folder, held: Held | None) -> None:
        self._folder, self._held = folder, held

    def __enter__(self) -> tuple[Txn, Head]:
        self._txn, head, self._engine = self._folder.enter(self._held)
        return self._txn, head

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._held is None:
                self._txn.handle.abort()
        finally:
            del self._txn
            self._engine.leave()
