"""The folder of a shelf: its file, its one writer, and the states that are read.

A shelf lies in one file of LMDB, `shelf-<n>.mdb`. `compact` writes the next file beside it, notes
in the head of the old one that the shelf moves, gives the next file its name, and removes the old
one. The name is the step that counts: the note means nothing until there is a file of a higher
number. Whoever uses the old file, also the writer itself, sees the note and goes on to the new one.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from packhorse.disk.shelf.engine import Engine, Txn, engine_of, leave_engine, opening
from packhorse.disk.shelf.environment import create_file, raise_ours, remove_file
from packhorse.disk.shelf.records import HEAD_KEY, Head
from packhorse.errors import ChangedError, ClosedError
from packhorse.storage.atomic import sync_folder
from packhorse.storage.folder_lock import FolderLock

__all__ = ["Folder", "Held", "compact_file", "local_folder", "newest_file"]

_Result = TypeVar("_Result")
_FILE = re.compile(r"shelf-([0-9]{1,9})\.mdb")
_PART = re.compile(r"shelf-[0-9]{1,9}\.(mdb|new)(-lock)?")
_LOCK = "writer.lock"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs",
    "beegfs", "orangefs", "wekafs", "virtiofs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse",
    "fuse.rclone", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs",
    "fuse.blobfuse", "fuse.blobfuse2", "fuse.goofys", "fuse.davfs",
}  # fmt: skip


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a caller names.

    Raises:
        ValueError: it is a URL.
    """
    if "://" in str(path):
        raise ValueError(f"{path}: a shelf lies in a folder of a local disk, never at a URL")
    return Path(path)


def newest_file(folder: Path) -> Path | None:
    """The file of a shelf; None if the folder has none."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            match = _FILE.fullmatch(name)
            if match:
                found[int(match[1])] = folder / name
    return found[max(found)] if found else None


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on; empty if the system does not tell."""
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:
        return ""
    return _type_of_device(os.stat(folder).st_dev, mounts)


def _type_of_device(device: int, mounts: str) -> str:
    """The type of the file system of a device, by the text of /proc/self/mountinfo."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == wanted and "-" in fields[:-1]:
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


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, and flush all their names. Some of them may come from
    a process that was killed before it had flushed them."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in path.parents:
        sync_folder(folder)


class Held:
    """A state that is held, by `reading` or by a loop over a tensor.

    Attributes:
        txn: the transaction of LMDB; None if it was lost.
        head: the head record of the state.
        depth: how many `reading` blocks and loops hold it.
        engine: what the transaction is of.
    """

    __slots__ = ("depth", "engine", "head", "txn")

    def __init__(self, engine: Engine, txn: Txn, head: Head) -> None:
        self.engine, self.head = engine, head
        self.txn: Txn | None = txn
        self.depth = 1


class _MovedError(Exception):
    """The shelf has moved to another file."""


class Folder:
    """A shelf's folder, opened for reading or writing.

    Attributes:
        path: the folder, which stays the same when the process changes its working folder.
        writes: whether this is the one writer.
        timeout: how long to wait for other threads, in seconds.
        is_closed: whether the shelf is closed.
    """

    def __init__(self, path: Path, *, writes: bool, timeout: float) -> None:
        """Opens the folder.

        Args:
            path: of the folder.
            writes: whether to be the one writer; the shelf is created if there is none.
            timeout: how long to wait for other threads, in seconds.

        Raises:
            FileNotFoundError: there is no shelf, and `writes` is False.
            FileExistsError: the path is a file, or a folder of something else.
            BlockingIOError: another writer has the shelf open.
            CorruptionError, CompatibilityError: the file is damaged, or of a later release.
            OSError: the folder is on a network file system, or the system refuses.
        """
        self.path, self.writes, self.timeout = path.absolute(), writes, timeout
        self.is_closed = False
        self._engine: Engine | None = None
        self._lock: FolderLock | None = None
        self._local = threading.local()  # what each thread holds
        self._seen: tuple[bytes, Head] | None = None  # the last head record
        self._pid = os.getpid()
        self._check_path()
        try:
            if writes:
                self._begin_writing()
            self._engine = self._open()
            if writes:
                self._engine.mend()
        except BaseException:
            self.close()
            raise

    def _check_path(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path}: is a file; a shelf is a folder; name another")
        there = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        _refuse_network(there)
        if newest_file(self.path) is not None:
            return
        if not self.writes:
            raise self._no_shelf()
        names = os.listdir(self.path) if there == self.path else []
        others = [name for name in names if name != _LOCK and not _PART.fullmatch(name)]
        if others:
            raise FileExistsError(
                f"{self.path}: is no shelf, and not empty (it has {others[0]!r}); name a new folder"
            )

    def _no_shelf(self) -> FileNotFoundError:
        where = " in this folder" if self.path.is_dir() else ""
        return FileNotFoundError(
            f"{self.path}: there is no shelf{where}; open it with mode 'r+' to make one"
        )

    def _begin_writing(self) -> None:
        if newest_file(self.path) is None:
            _make_folder(self.path)
        lock = FolderLock(self.path / _LOCK, str(self.path), "the shelf", "Shelf")
        lock.acquire()
        self._lock = lock
        newest = newest_file(self.path)
        if newest is None:
            newest = self.path / "shelf-1.mdb"
            create_file(newest, Head().to_bytes(), HEAD_KEY)
        sync_folder(self.path)  # the writer before may have been killed when compact() did it
        kept = {newest.name, f"{newest.name}-lock"}
        for name in os.listdir(self.path):
            if _PART.fullmatch(name) and name not in kept:
                (self.path / name).unlink(missing_ok=True)

    def _open(self) -> Engine:
        """Open the newest file."""
        while True:
            path = newest_file(self.path)
            if path is None:
                raise self._no_shelf()
            try:
                engine = engine_of(path)
            except FileNotFoundError:
                if newest_file(self.path) == path:
                    raise
                continue  # compacted meanwhile
            try:
                with engine.read() as txn:
                    has_moved = self._has_moved(self._read_head(txn, engine), engine)
            except BaseException:
                leave_engine(engine)
                raise
            if not has_moved:
                return engine
            leave_engine(engine)

    def _read_head(self, txn: Txn, engine: Engine) -> Head:
        raw = txn.handle.get(HEAD_KEY, db=txn.tables.meta)
        raw = b"" if raw is None else bytes(raw)
        seen = self._seen  # one attribute, as threads read different states at a time
        if seen is None or raw != seen[0]:
            seen = self._seen = raw, Head.parse(raw, str(engine.path))
        return seen[1]

    def _has_moved(self, head: Head, engine: Engine) -> bool:
        return head.has_moved and newest_file(self.path) != engine.path

    @property
    def engine(self) -> Engine:
        """The engine of the current file, for this process.

        Raises:
            ClosedError: the shelf is closed.
        """
        engine = self._engine
        if engine is None:
            raise self._closed()
        return engine if engine.pid == os.getpid() else self._follow(engine)

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self.path}: the shelf is closed; open it again")

    @property
    def _is_writer(self) -> bool:
        return self.writes and os.getpid() == self._pid

    def check_writes(self) -> None:
        """Make sure that this process may write.

        Raises:
            ClosedError: the shelf is closed.
            PermissionError: it is open for reading only, or by the parent of this process.
        """
        if self._engine is None:
            raise self._closed()
        if not self.writes:
            raise PermissionError(
                f"{self.path}: the shelf is open for reading only; open it with mode 'r+'"
            )
        if not self._is_writer:
            raise PermissionError(
                f"{self.path}: this process was forked from the shelf's writer, and can only read; "
                "open the shelf in the process that writes, when no other has it open"
            )

    # Reading.

    def read(self) -> _State:
        """The newest state, or the one that this thread holds, as a context that gives the
        transaction and the head record."""
        return _State(self, self._held)

    def read_newest(self) -> _State:
        """The newest state, even if this thread holds another one; as `read`."""
        return _State(self, None)

    def enter(self) -> tuple[Txn, Head, Engine]:
        """Begin to read the newest state; the caller ends the transaction, and leaves the
        engine."""
        while True:
            engine = self.engine
            engine.enter()
            try:
                if self._engine is engine:
                    txn = engine.begin()
                    try:
                        head = self._read_head(txn, engine)
                        if not self._has_moved(head, engine):
                            return txn, head, engine
                    except BaseException as error:
                        txn.handle.abort()
                        raise_ours(error, engine.path)
                        raise
                    txn.handle.abort()
            except BaseException:
                engine.leave()
                raise
            engine.leave()
            self._follow(engine)

    def enter_held(self, held: Held) -> tuple[Txn, Head, Engine]:
        """Begin to read a state that is held; the caller leaves the engine. If a fork or a failed
        write has ended the transaction, the same state is read again, unless it has changed."""
        if self._engine is None:
            raise self._closed()
        engine = held.engine
        if engine.pid != os.getpid():
            engine = self.engine
        engine.enter()
        try:
            if held.engine is not engine:
                held.engine = engine
                engine.add_user()
            if held.txn is None:
                held.txn = self._begin_again(held)
                engine.kept[id(held)] = held
        except BaseException as error:
            engine.leave()
            raise_ours(error, engine.path)
            raise
        return held.txn, held.head, engine

    def _begin_again(self, held: Held) -> Txn:
        txn = held.engine.begin()
        head = self._read_head(txn, held.engine)
        if replace(head, has_moved=False) != replace(held.head, has_moved=False):
            txn.handle.abort()
            raise ChangedError(
                f"{self.path}: the state that reading() or iter_chunks() held is gone, because "
                "the process was forked or a write to the disk failed; begin it again"
            )
        return txn

    def _follow(self, engine: Engine) -> Engine:
        """Open the file that the shelf has moved to, or, after a fork, the same file again."""
        with opening():
            if self._engine is engine:
                if self._is_writer:
                    sync_folder(self.path)  # the name of the new file, before anything is in it
                self._engine = self._open()
                leave_engine(engine)
                if self._is_writer and self._engine.path != engine.path:
                    remove_file(engine.path)
            if self._engine is None:
                raise self._closed()
            return self._engine

    @property
    def _held(self) -> Held | None:
        return getattr(self._local, "held", None)

    @property
    def holds(self) -> bool:
        """Whether this thread holds a state."""
        return self._held is not None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let all reads of this thread see one state."""
        held = self._held
        if held is not None:
            held.depth += 1
            try:
                yield
            finally:
                self._let_go(held)
            return
        held = self._local.held = self._keep()
        try:
            yield
        finally:
            self._local.held = None
            self._let_go(held)

    @contextmanager
    def keep(self) -> Iterator[Held]:
        """The state that this thread holds, or else the newest, for some time, and for one thread
        at a time; each use of it is inside `using`."""
        held = self._held
        if held is None:
            held = self._keep()
        else:
            held.depth += 1
        try:
            yield held
        finally:
            self._let_go(held)

    @contextmanager
    def using(self, held: Held) -> Iterator[Txn]:
        """Use a state that was kept."""
        with _State(self, held) as (txn, _):
            yield txn

    def _keep(self) -> Held:
        txn, head, engine = self.enter()
        held = Held(engine, txn, head)
        engine.kept[id(held)] = held
        engine.add_user()
        engine.leave()
        return held

    def _let_go(self, held: Held) -> None:
        held.depth -= 1
        if held.depth:
            return
        engine = held.engine
        if engine.pid == os.getpid():
            with engine.using():
                txn, held.txn = held.txn, None
                if engine.kept.pop(id(held), None) and txn is not None:
                    txn.handle.abort()
        leave_engine(engine)

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
        while True:
            engine = self.engine
            try:
                return engine.write(partial(self._write, work, engine), self.timeout)
            except _MovedError:  # compact() was interrupted when it was as good as done
                self._follow(engine)

    def _write(self, work: Callable[[Txn, Head], _Result], engine: Engine, txn: Txn) -> _Result:
        head = self._read_head(txn, engine)
        if self._has_moved(head, engine):
            raise _MovedError
        return work(txn, replace(head, has_moved=False))

    def move(self) -> None:
        """Use the file that `compact_file` has written, and remove the one before."""
        self._follow(self.engine)

    def close(self) -> None:
        """Close the folder, and let another writer in. States that are held cannot be read any
        more."""
        with opening():
            self.is_closed = True
            engine, self._engine = self._engine, None
        try:
            if engine is not None:
                leave_engine(engine)
        finally:
            lock, self._lock = self._lock, None
            if lock is not None and os.getpid() == self._pid:
                lock.release()


def compact_file(folder: Folder, progress: Callable[[int], object] | None) -> None:
    """Write the file of a shelf anew without its free space, and use it.

    Args:
        folder: of the shelf, in which nobody writes.
        progress: takes the bytes that were written.

    Raises:
        OSError: the disk is full, or failed. The shelf is as before, in the old file or the new.
    """
    old = folder.engine
    match = _FILE.fullmatch(old.path.name)
    assert match is not None
    path = old.path.with_name(f"shelf-{int(match[1]) + 1}.mdb")
    temporary = path.with_suffix(".new")
    remove_file(temporary)  # another try may have failed
    try:
        old.copy_to(temporary, progress)
        folder.write(_mark_moved)
        os.rename(temporary, path)
    finally:
        remove_file(temporary)
    folder.move()


def _mark_moved(txn: Txn, head: Head) -> None:
    """Note in a file that the shelf moves to the next one."""
    txn.handle.put(HEAD_KEY, replace(head, has_moved=True).to_bytes(), db=txn.tables.meta)


class _State:
    """A state to read, as a context."""

    __slots__ = ("_engine", "_folder", "_held", "_txn")

    def __init__(self, folder: Folder, held: Held | None) -> None:
        self._folder, self._held = folder, held

    def __enter__(self) -> tuple[Txn, Head]:
        held, folder = self._held, self._folder
        self._txn, head, self._engine = folder.enter() if held is None else folder.enter_held(held)
        return self._txn, head

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        engine = self._engine
        try:
            # The transaction of another process's engine is not ours to end.
            if self._held is None and engine.pid == os.getpid():
                self._txn.handle.abort()
        finally:
            del self._txn
            engine.leave()
        raise_ours(error, engine.path)
