"""`Shelf`: tensors that lie on disk, packed, typed, and safe when the process or the machine dies.

docs/shelf.md tells what a shelf promises, and what it costs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.shelf.cache import Cache
from packhorse.disk.shelf.changes import Changes
from packhorse.disk.shelf.commits import Commit
from packhorse.disk.shelf.committed import Settings, StateChunks
from packhorse.disk.shelf.elements import read_state
from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.environment import lmdb_module
from packhorse.disk.shelf.exchange_methods import Exports, Imports
from packhorse.disk.shelf.grid import chunk_shape
from packhorse.disk.shelf.records import (
    BASES,
    HEAD_KEY,
    MAX_EPOCH,
    Head,
    StateRecord,
    TensorRecord,
    check_name,
    tag_value,
)
from packhorse.disk.shelf.results import ShelfInfo, ShelfProblem
from packhorse.disk.shelf.rows import Chunks
from packhorse.disk.shelf.session import Session, missing
from packhorse.disk.shelf.store import Folder, local_folder
from packhorse.disk.shelf.tensor import ShelfTensor
from packhorse.disk.shelf.upkeep import Progress, compact, find_problems, look_at
from packhorse.disk.shelf.values import (
    as_array,
    check_size,
    dtype_name,
    form_of,
    whole_number,
)
from packhorse.disk.shelf.versions import Known, delete_tag
from packhorse.disk.state import encode_state
from packhorse.framework import Framework, resolve_framework
from packhorse.layout import Level

__all__ = ["Shelf", "ShelfView"]

_CACHE_NBYTES = 1 << 28
_MAX_TIMEOUT_S = threading.TIMEOUT_MAX  # a good 292 years
_MODES = ("r", "r+")


class ShelfView(Exports):
    """The state of a shelf at a tag, from `Shelf.at`. It is read like a shelf.

    Attributes:
        path: the folder of the shelf.

    Example:
        >>> import tempfile
        >>> from packhorse.disk import Shelf
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Shelf(f"{folder.name}/data.shelf") as shelf:
        ...     shelf["x"] = [1, 2]
        ...     shelf.tag("begin")
        ...     del shelf["x"]
        ...     shelf.at("begin").keys(), shelf.keys()
        (['x'], [])
    """

    def __init__(self, session: Session, framework: Framework, tag: str | None) -> None:
        """Private: use `Shelf.at`."""
        self._session, self._framework = session, framework
        self.path, self._tag = session.path, tag

    def __getitem__(self, name: str) -> ShelfTensor:
        """The tensor of a name; nothing of it is read.

        Raises:
            KeyError: there is no tensor of this name.
            TypeError: it is a nested state, which `load` reads.
        """
        self._session.record(check_name(name), self._tag)
        return ShelfTensor(self._session, name, self._framework, self._tag)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor or a nested state of this name."""
        try:
            found = check_name(name)
        except (TypeError, ValueError):
            return False
        return self._session.has(found, self._tag)

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors and nested states, in order."""
        return iter(self.keys())

    def __len__(self) -> int:
        """How many tensors and nested states there are."""
        return len(self.keys())

    def keys(self, prefix: str = "") -> list[str]:
        """The names of the tensors and nested states that begin so, in order.

        Args:
            prefix: how the names begin.

        Returns:
            The names.

        Raises:
            TypeError, ValueError: `prefix` is no text.
        """
        if prefix != "":
            check_name(prefix, "a tensor, or its beginning,")
        return self._session.names(prefix, self._tag)

    def load(self, name: str, *, framework: str | None = None) -> Any:
        """A nested state that `save` has kept.

        Args:
            name: its name.
            framework: of its tensors: "np" or "pt"; None for that of the shelf.

        Returns:
            Dicts, lists, tuples, values, and new tensors.

        Raises:
            KeyError: there is nothing of this name.
            TypeError: it is a tensor.
            CompatibilityError: the framework lacks the dtype of a tensor; the message names that.
            CorruptionError: a chunk is damaged; the message names it.
        """
        target = self._framework if framework is None else resolve_framework(framework)
        entry = self._session.entry(check_name(name), self._tag)
        if isinstance(entry, TensorRecord):
            raise TypeError(f"{self.path}: {name!r} is a tensor; use shelf[{name!r}]")
        if entry is None:
            raise missing(name, self.path, self._tag, "state")
        with self._reader(name) as chunks:
            return read_state(entry, chunks, target)

    def info(self) -> ShelfInfo:
        """What is in this state, as of the last commit, and of the shelf; nothing is decoded."""
        return look_at(self._session, self._tag)

    @contextmanager
    def reading(self) -> Iterator[Self]:
        """Let all reads of this thread inside the block see one committed state.

        Keep it short where another process writes: what it replaces cannot be used again until the
        block ends.

        Yields:
            The shelf.
        """
        with self._session.folder.hold():
            yield self

    @contextmanager
    def _reader(self, name: str) -> Iterator[Chunks]:
        changes = None if self._tag is not None else self._session.seen()
        if changes is not None:
            yield changes
            return
        with self._session.state(self._tag) as state:
            yield StateChunks(state, self._session.settings, f"{self.path}: {name!r}")

    def __repr__(self) -> str:
        tag = "" if self._tag is None else f", tag={self._tag!r}"
        return f"{type(self).__name__}({os.fspath(self.path)!r}{tag})"


class Shelf(ShelfView, Imports):
    """A folder of tensors, NumPy's and PyTorch's, that may be larger than memory.

    Each statement that writes is one durable commit; `transaction` makes one of many. Whenever the
    process or the machine dies, the shelf has the state of a commit. One process writes at a time;
    any number of processes read, each the newest state at every call.

    Tensors are cut into chunks, which are packed without loss, each with a checksum.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from packhorse.disk import Shelf
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Shelf(f"{folder.name}/data.shelf") as shelf:
        ...     shelf["x"] = np.arange(6.0).reshape(2, 3)
        ...     shelf.tag("begin")
        ...     with shelf.transaction():
        ...         shelf["x"][0] = 7
        ...         shelf["y"] = np.ones(4)
        ...     shelf["x"][:, 1].tolist(), shelf.at("begin")["x"][0].tolist(), shelf.keys()
        ([7.0, 4.0], [0.0, 1.0, 2.0], ['x', 'y'])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r+",
        *,
        framework: str = "np",
        cache_nbytes: int = _CACHE_NBYTES,
        level: Level | str = "default",
        threads: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Open a shelf.

        Args:
            path: its folder, on a local disk.
            mode: "r+" to read and write, as the only writer, and to make the folder if there is
                none; "r" to read.
            framework: what indexing returns: "np" for arrays or "pt" for PyTorch's tensors.
            cache_nbytes: the most bytes of decoded chunks to keep in memory.
            level: how hard to pack: "fast", "default" or "max".
            threads: how many to use; None for one per core, at most 8.
            timeout: how long a write waits for a transaction of another thread, in seconds.

        Raises:
            FileNotFoundError: there is no shelf, and `mode` is "r".
            FileExistsError: the path is a file, or a folder of something else.
            BlockingIOError: another process, or another `Shelf`, has it open for writing.
            CorruptionError: the shelf is damaged.
            CompatibilityError: a later release wrote it.
            MissingBackendError: the package lmdb is not installed.
            OSError: the folder is on a network file system, or the system refuses.
            ValueError: a wrong argument, or the path is a URL.
        """
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}; it must be 'r' or 'r+'")
        if isinstance(cache_nbytes, bool) or not isinstance(cache_nbytes, int) or cache_nbytes < 0:
            raise ValueError(f"cache_nbytes is {cache_nbytes!r}; it must be a number of bytes")
        if not isinstance(timeout, int | float) or not 0 <= timeout < _MAX_TIMEOUT_S:
            raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds")
        settings = Settings(
            Cache(cache_nbytes), Known(), resolve_threads(threads), resolve_level(level)
        )
        resolved = resolve_framework(framework)
        lmdb_module()  # before anything is created
        folder = Folder(local_folder(path), writes=mode == "r+", timeout=timeout)
        super().__init__(Session(folder, settings), resolved, None)
        self.mode = mode

    def __enter__(self) -> Self:
        """The shelf, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shelf. Its tensors cannot be used any more. The transaction of another thread
        may end first.

        Raises:
            RuntimeError: it is closed inside a transaction.
            TimeoutError: the transaction of another thread goes on for longer than `timeout`.
        """
        self._session.close()

    @property
    def is_closed(self) -> bool:
        """Whether the shelf is closed."""
        return self._session.folder.is_closed

    # Writing.

    def create(
        self,
        name: str,
        shape: tuple[int, ...] | int,
        dtype: Any,
        *,
        base: str | None = None,
        keyframe_every: int = 16,
        chunk_nbytes: int | None = None,
        replace: bool = False,
    ) -> ShelfTensor:
        """Make a tensor of zeros, which takes no space until it is written to.

        Args:
            name: of the tensor: 1 to 400 bytes of UTF-8.
            shape: its shape; the first axis may be 0, and grow by `append`.
            dtype: a dtype of NumPy, ml_dtypes or PyTorch, or a name of one or of safetensors.
            base: "previous" to code each row against the row at the last multiple of
                `keyframe_every`, for rows that change little, such as iterates of a training run.
                To read a row, two are decoded at most.
            keyframe_every: how often a row is coded for itself, if there is a base.
            chunk_nbytes: about how many decoded bytes a chunk has: 4 KiB to 16 MiB. Writing one
                element packs a whole chunk again; short chunks pack worse. None for a run of rows
                of 128 KiB, or up to 512 KiB of a long row.
            replace: whether a tensor or state of this name may be replaced.

        Returns:
            The tensor.

        Raises:
            ValueError: the name is taken or wrong, or another argument is.
            TypeError: there is no such dtype, or something that must be an integer is none.
            PermissionError: the shelf is open for reading only.
        """
        kind = dtype_name(dtype)
        form = kind, check_size(kind, shape)
        if base not in BASES:
            raise ValueError(f"base is {base!r}; it must be 'previous' or None")
        keyframe_every = whole_number(keyframe_every, "keyframe_every")
        if keyframe_every < 1:
            raise ValueError(f"keyframe_every is {keyframe_every}; it must be at least 1")
        if chunk_nbytes is not None:
            chunk_nbytes = whole_number(chunk_nbytes, "chunk_nbytes")
        check_name(name)
        with self._session.transaction() as changes:
            if not replace and changes.has(name):
                raise ValueError(
                    f"{self.path}: there is {name!r} already; name another, or pass replace=True"
                )
            record = _new_record(changes, *form, chunk_nbytes, base, keyframe_every)
            changes.put(name, record)
        return ShelfTensor(self._session, name, self._framework, None)

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep an array, under a name that may exist, in one commit.

        Args:
            name: of the tensor.
            value: an array, a tensor, a number, or a tensor of a shelf, which is copied run by run.

        Raises:
            TypeError: the value cannot be stored.
            ValueError: the name is wrong.
            PermissionError: the shelf is open for reading only.
            OSError: the disk is full, or failed; nothing is changed.
        """
        check_name(name)
        if isinstance(value, ShelfTensor):
            self._copy(name, value)
            return
        dtype, shape = form_of(value)
        with self._session.transaction() as changes:
            record = _new_record(changes, dtype, shape, None, None, 16)
            changes.put(name, record)
            if 0 not in shape:
                ShelfTensor(self._session, name, self._framework, None)[...] = as_array(
                    value, dtype
                )

    def _copy(self, name: str, value: ShelfTensor) -> None:
        own = ShelfTensor(self._session, name, self._framework, None)
        if value._is_same(own):
            return  # shelf[name] += 1 ends in this
        with self._session.transaction():
            if not value.shape:
                self[name] = value.numpy()
                return
            shape = value.shape
            self.create(name, (0, *shape[1:]), value.dtype, replace=True)
            for block in value.iter_chunks():
                own.append(block)
            own.resize(shape[0])

    def __delitem__(self, name: str) -> None:
        """Remove a tensor or a nested state; tags keep it.

        Raises:
            KeyError: there is nothing of this name.
            PermissionError: the shelf is open for reading only.
        """
        check_name(name)
        with self._session.transaction() as changes:
            if not changes.has(name):
                raise missing(name, self.path, None)
            changes.put(name, None)

    def rename(self, old: str, new: str) -> None:
        """Give a tensor or a nested state another name.

        Args:
            old: its name.
            new: the name that it gets.

        Raises:
            KeyError: there is nothing of the old name.
            ValueError: the new name is taken or wrong.
        """
        check_name(old), check_name(new)
        with self._session.transaction() as changes:
            if changes.entry(old) is None:
                raise missing(old, self.path, None)
            if changes.has(new):
                raise ValueError(f"{self.path}: there is {new!r} already; remove it first")
            changes.rename(old, new)

    def save(self, name: str, state: Any) -> None:
        """Keep a nested state, such as a `state_dict`, in one commit.

        Args:
            name: of the state, which may exist.
            state: dicts, lists and tuples of tensors, strings, numbers, booleans and None.

        Raises:
            TypeError: something in it cannot be stored; the message gives its path.
            ValueError: it is nested too deeply, or the name is wrong.
            OSError: the disk is full, or failed; nothing is changed.
        """
        check_name(name)
        document, leaves = encode_state(state)
        with self._session.transaction() as changes:
            records = tuple(
                _new_record(changes, leaf.dtype, leaf.shape, None, None, 16) for leaf in leaves
            )
            changes.put(name, StateRecord(document, records))
            for record, leaf in zip(records, leaves, strict=True):
                changes.fill(record, as_array(leaf.tensor, leaf.dtype))
            changes.settle()

    def transaction(self) -> AbstractContextManager[object]:
        """Make one durable commit of all that is written inside the block, or nothing if the block
        ends by an exception.

        The thread sees its own changes; others see the state before. A transaction inside another
        is part of it. If a write inside fails, the whole transaction has failed, even if the
        exception is caught.

        Raises:
            TimeoutError: the transaction of another thread goes on for longer than `timeout`.
            PermissionError: the shelf is open for reading only.
        """
        return self._session.transaction()

    # Tags.

    def tag(self, tag: str) -> None:
        """Keep the newest state under a name. It shares all chunks with later states.

        Args:
            tag: the name, of 1 to 400 bytes.

        Raises:
            ValueError: the tag exists, or its name is wrong.
            RuntimeError: a transaction is open.
        """
        check_name(tag, "a tag")

        def work(txn: Txn, head: Head) -> None:
            if txn.handle.get(tag.encode(), db=txn.tables.tags) is not None:
                raise ValueError(f"{self.path}: there is a tag {tag!r} already; untag it first")
            if head.epoch >= MAX_EPOCH:
                raise ValueError(f"{self.path}: no more tags can be made; copy the shelf")
            time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            value = tag_value(tag, head.epoch, time, head.n_commits)
            txn.handle.put(tag.encode(), value, db=txn.tables.tags)
            _put_head(txn, replace(head, epoch=head.epoch + 1))

        self._alone(work, "tag()")

    def untag(self, tag: str) -> None:
        """Forget a tag, and what only it shows.

        Args:
            tag: its name.

        Raises:
            KeyError: there is no such tag.
            RuntimeError: a transaction is open.
        """

        def work(txn: Txn, head: Head) -> None:
            if not delete_tag(txn, check_name(tag, "a tag")):
                raise KeyError(f"{self.path}: there is no tag {tag!r}")
            commit = Commit(txn, head, str(self.path))
            commit.sweep_all()
            commit.settle()
            _put_head(txn, head)

        self._alone(work, "untag()")

    def tags(self) -> list[str]:
        """The names of all tags, the oldest first."""
        return self._session.tags()

    def at(self, tag: str) -> ShelfView:
        """The state of a tag.

        Args:
            tag: its name.

        Returns:
            The state, which is read like a shelf.

        Raises:
            KeyError: there is no such tag.
        """
        with self._session.state(check_name(tag, "a tag")):
            return ShelfView(self._session, self._framework, tag)

    def rollback(self, tag: str) -> None:
        """Make the newest state equal to that of a tag, in one commit. All tags stay.

        Args:
            tag: its name.

        Raises:
            KeyError: there is no such tag.
            RuntimeError: a transaction is open.
        """

        def work(txn: Txn, head: Head) -> None:
            commit = Commit(txn, head, str(self.path))
            found = commit.state.tag(check_name(tag, "a tag"))
            commit.roll_back(found.epoch)
            commit.settle()
            _put_head(txn, head)

        self._alone(work, "rollback()")

    def _alone(self, work: Any, what: str) -> None:
        """Run a write transaction that is no part of another one."""
        self._session.check_no_transaction(what)
        with self._session.turn():
            self._session.folder.write(work)

    # Upkeep.

    def verify(self, progress: Progress | None = None) -> list[ShelfProblem]:
        """Decode every chunk of the newest state and of all tags, and compare all records.

        Args:
            progress: takes the bytes that were read, and those of all.

        Returns:
            What is damaged; empty if nothing is.
        """
        return find_problems(self._session, progress)

    def compact(self, progress: Progress | None = None) -> int:
        """Write the file again without its free space, which otherwise is used for new chunks.

        Readers in other processes go on, and use the new file at their next call. Meanwhile the
        disk has both files.

        Args:
            progress: takes the bytes that were written, and about how many there are.

        Returns:
            By how many bytes the file became shorter.

        Raises:
            OSError: the disk is full, or failed; the shelf is as before.
            RuntimeError: a transaction is open.
        """
        self._session.check_no_transaction("compact()")
        with self._session.turn():
            return compact(self._session, progress)


def _put_head(txn: Txn, head: Head) -> None:
    changed = replace(head, n_commits=head.n_commits + 1)
    txn.handle.put(HEAD_KEY, changed.to_bytes(), db=txn.tables.meta)


def _new_record(
    changes: Changes,
    dtype: str,
    shape: tuple[int, ...],
    chunk_nbytes: int | None,
    base: str | None,
    keyframe_every: int,
) -> TensorRecord:
    chunk = chunk_shape(dtype, shape, chunk_nbytes, by_row=base is not None)
    number = changes.new_tensor_number()
    return TensorRecord(number, dtype, shape, chunk, base, keyframe_every)
