"""`SnapshotStore` keeps training states as snapshots, small increments (docs/snapshots.md)."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.results import Progress
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.check import verify_snapshots
from packhorse.disk.snapshots.compare import compare_snapshots
from packhorse.disk.snapshots.export import Exporting, export_snapshot
from packhorse.disk.snapshots.manifest import MAX_CHAIN
from packhorse.disk.snapshots.memory import checked_metadata, state_in_memory
from packhorse.disk.snapshots.names import quote_name
from packhorse.disk.snapshots.overview import look_over, trace
from packhorse.disk.snapshots.pending import Pending
from packhorse.disk.snapshots.prune import Keep, delete_snapshot, prune_snapshots
from packhorse.disk.snapshots.restore import Restoring, restore_state
from packhorse.disk.snapshots.results import (
    Lineage,
    PruneResult,
    RestoredFile,
    SnapshotInfo,
    SnapshotProblem,
    StoreOverview,
    TensorDiff,
    describe,
)
from packhorse.disk.snapshots.session import Writer
from packhorse.disk.snapshots.sources import model_files, open_sources
from packhorse.disk.snapshots.staging import Staging
from packhorse.disk.snapshots.take import Taking, take_snapshot
from packhorse.disk.state import Keys
from packhorse.framework import resolve_framework
from packhorse.layout import Level
from packhorse.storage.frames.base_cache import BaseCache
from packhorse.storage.frames.packer import PackOptions
from packhorse.storage.locations import Place, open_place, open_storage, shared_options

__all__ = ["SnapshotStore"]


class SnapshotStore:
    """Snapshots of training states, in a folder or on any file system that fsspec knows.

    A snapshot is a name and a state: nested dicts, lists and tuples of PyTorch tensors, NumPy
    arrays, strings, numbers, booleans and None, as `state_dict()` of models and optimizers gives.
    A tensor that the store has already costs nothing. A tensor that changed is stored as its
    difference from the snapshot before, if that is smaller.

    There is one writer at a time, and any number of readers, which need no lock. Even if a writer
    is killed, every snapshot that was reported as taken can be restored bit for bit. Threads may
    share a store; their snapshots are written one after the other. A pickled store holds only its
    place and its options.

    Example:
        >>> import numpy as np
        >>> from packhorse.disk import SnapshotStore
        >>> state = {"weight": np.zeros((256, 256), np.float32), "step": 100}
        >>> with SnapshotStore("runs/7") as store:
        ...     first = store.take("step-100", state, metadata={"loss": 2.5})
        ...     second = store.take_async("step-200", {"weight": state["weight"] + 1, "step": 200})
        >>> store.restore("step-200", keys="step"), store.diff("step-100", "step-200")[0].n_changed
        ({'step': 200}, 65536)
        >>> store.prune(keep=1).removed, store.verify()
        (('step-100',), [])
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        level: Level | str = "default",
        threads: int | None = None,
        max_chain: int = 8,
        staging_nbytes: int | None = None,
        cache_nbytes: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a store. Nothing is read or written yet; the first `take` creates the store.

        Args:
            url: a path, or a URL such as "s3://bucket/run" (needs the extra `remote`).
            level: "fast", "default" or "max".
            threads: how many threads to use; None for the cores available, at most 8.
            max_chain: how many deltas may build on one another before a tensor is stored in full;
                at most 63.
            staging_nbytes: how many bytes the copies of `take_async` may take; None for as many as
                the state.
            cache_nbytes: how many bytes of the newest snapshot's tensors are kept in memory, so
                that the next `take` of this object need not decode them to make deltas.
            storage_options: options for fsspec's file system.

        Raises:
            ValueError, TypeError: an option is wrong.
            MissingBackendError: the URL needs fsspec, and it is not installed.
        """
        if not isinstance(max_chain, int) or not 0 <= max_chain < MAX_CHAIN:
            raise ValueError(f"max_chain is {max_chain!r}; it must be from 0 to {MAX_CHAIN - 1}")
        if staging_nbytes is not None and staging_nbytes < 1:
            raise ValueError(f"staging_nbytes is {staging_nbytes}; it must be at least 1")
        if cache_nbytes < 0:
            raise ValueError(f"cache_nbytes is {cache_nbytes}; it must be at least 0")
        self._options = PackOptions(
            resolve_level(level), resolve_threads(threads), max_chain, MAX_CHAIN,
            BaseCache(cache_nbytes),
        )  # fmt: skip
        self._staging_nbytes = staging_nbytes
        self._storage = open_storage(url, storage_options)
        self._origin = url, storage_options
        self._arguments = {
            "url": url if "://" in os.fspath(url) else os.path.abspath(url), "level": level,
            "threads": threads, "max_chain": max_chain, "staging_nbytes": staging_nbytes,
            "cache_nbytes": cache_nbytes, "storage_options": storage_options,
        }  # fmt: skip
        self._catalog = Catalog(self._storage)
        self._writer = Writer(self._storage, self._catalog)
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing in the background: in a new store, and in a forked process."""
        self._pid = os.getpid()
        self._staging = Staging(self._staging_nbytes)
        self._lock = threading.RLock()  # guards this object; the store has its own lock
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Pending | None = None

    def take(
        self,
        name: str,
        state: Any,
        *,
        base: str | None = "auto",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> SnapshotInfo:
        """Write a snapshot; when this returns, it is on the disk.

        Args:
            name: any text. It becomes the name of a folder, so it must not be too long.
            state: the state to keep. It is only read, and never copied as a whole.
            base: "auto" stores tensors as differences from those at the same path in the newest
                snapshot, where that is smaller; the name of another snapshot uses that one; None
                stores all tensors in full.
            metadata: JSON values to keep with the snapshot.
            replace: whether a snapshot of this name may be replaced, in one step.
            progress: called with the logical bytes done since the last call.

        Returns:
            What was written. A `RuntimeWarning` is issued if new tensors that are smaller than
            their frames cost much space. If the warning is turned into an error, nothing is taken.

        Raises:
            FileExistsError: there is a snapshot of this name, and `replace` is False.
            BlockingIOError: another process or store is writing; the message names it.
            TypeError: something in the state cannot be kept; the message gives its path.
            ValueError: a bad name, base or metadata.
            CorruptionError, CompatibilityError: the store, or a base that was named, is damaged or
                has a newer version.
            OSError: the file system failed; nothing was taken.
        """
        with self._writing():
            quote_name(name)
            values = checked_metadata(metadata)
            given = state_in_memory(state)
            taking = Taking(name, given, base, values, replace, progress)
            with self._writer.session() as session:
                return take_snapshot(session, taking, self._options)

    def take_files(
        self,
        name: str,
        sources: Sequence[str | os.PathLike[str]],
        *,
        base: str | None = "auto",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SnapshotInfo:
        """Write a snapshot of safetensors files, whose tensors become one dict by name.

        Args:
            name: as for `take`.
            sources: plain or packed files, or folders of them (shards), at paths or URLs.
                Subfolders are ignored.
            base: as for `take`.
            metadata: as for `take`. It is added to the metadata of the files.
            replace: as for `take`.
            progress: as for `take`.
            storage_options: options for the file systems of `sources`, as in fsspec; None for those
                of the store.

        Returns:
            What was written.

        Raises:
            ValueError: a source is a pickle, or a folder without safetensors files, or two files
                have a tensor of the same name.
            CorruptionError, CompatibilityError: a file is damaged, or too new.
            Exception: as for `take`.
        """
        with self._writing():
            quote_name(name)
            files = [
                file
                for source in sources
                for file in model_files(self._place(source, storage_options))
            ]
            with open_sources(files, self._options.threads) as opened:
                values = opened.metadata | checked_metadata(metadata)
                taking = Taking(name, opened.state, base, values, replace, progress)
                with self._writer.session() as session:
                    return take_snapshot(session, taking, self._options)

    def take_async(
        self,
        name: str,
        state: Any,
        *,
        base: str | None = "auto",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Future[SnapshotInfo]:
        """Copy a state, and write the copy in the background. The state may change when this
        returns.

        One snapshot is written at a time, so the call waits for the previous one. The future raises
        any error. If nobody asks the future, the next call of the store raises the error. If the
        program ends before that, it ends with a warning and, with glibc, with exit code 1.

        Args:
            name: as for `take`.
            state: the state to keep.
            base: as for `take`.
            metadata: as for `take`.
            replace: as for `take`.

        Returns:
            A future, which gives the snapshot once it is on the disk.

        Raises:
            TypeError, ValueError: as for `take`.
            Exception: the error of the previous snapshot, unless its future was asked.
        """
        with self._writing():
            quote_name(name)
            values, staging = checked_metadata(metadata), self._staging
            given = state_in_memory(state)
            staged = dataclasses.replace(
                given, fetch=lambda i: staging.get(), release=staging.release,
                max_nbytes=staging.max_nbytes,
            )  # fmt: skip
            taking, sizes = Taking(name, staged, base, values, replace), staged.group_sizes()
            staging.begin(max(sizes, default=0), sum(sizes))
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="packhorse-snapshots")
            try:
                pending = self._pending = Pending(
                    self._pool.submit(self._take_staged, taking),
                    f"{self._storage.label()}: snapshot {name!r}",
                )
                for group in given.groups:
                    for i in group:
                        staging.put(given.fetch(i))
            except BaseException as error:
                staging.fail(error)
                if self._pending is not None:
                    self._pending.wait()  # if this is interrupted too, the next call waits
                    self._pending.forget()
                    self._pending = None
                raise
            return pending.told

    def _take_staged(self, taking: Taking) -> SnapshotInfo:
        try:
            with self._writer.session() as session:
                return take_snapshot(session, taking, self._options)
        except BaseException:
            self._staging.give_up()
            raise

    def restore(
        self,
        name: str,
        *,
        framework: str = "np",
        keys: Keys | None = None,
        into: Any = None,
        max_nbytes: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Restore the state of a snapshot, bit for bit.

        Args:
            name: the name of the snapshot.
            framework: the framework of the tensors, which are in host memory: "np" (or "numpy"), or
                "pt" (or "torch", "pytorch").
            keys: which parts to restore: a path such as "model" or "optimizer.state[3]", which
                selects everything below it, or several paths, or a predicate on the path of each
                tensor and value. Dicts then have only the selected parts, and the other members of
                lists are None.
            into: a state whose tensors are written in place, on any device and with any strides.
                Each must be in the snapshot with the same dtype and shape. The result holds these
                tensors, and new ones where `into` has none. After an error their content is
                undefined.
            max_nbytes: refuse to restore tensors of more bytes together; None for no limit.
            progress: called with the logical bytes done since the last call, from several threads.

        Returns:
            The state. Subclasses of containers come back as the plain type.

        Raises:
            ValueError: there is no such snapshot, a key selects nothing, or a tensor of `into` does
                not fit.
            CorruptionError, CompatibilityError: something that is needed is damaged or too new; the
                message names snapshot, tensor and file. Or the tensors exceed `max_nbytes`.
            MissingBackendError: the framework is not installed.
        """
        self._glance()
        wanted = Restoring(
            resolve_framework(framework), keys, into, self._options.threads, max_nbytes, progress
        )
        return restore_state(self._storage, self._catalog, name, wanted)

    def restore_file(
        self,
        name: str,
        output: str | os.PathLike[str],
        *,
        keys: Keys | None = None,
        force: bool = False,
        max_nbytes: int | None = None,
        progress: Progress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> RestoredFile:
        """Write a snapshot, or parts of it, as a safetensors file (docs/snapshots.md). Tensors are
        stored under their paths, and everything else becomes metadata. The file is written whole or
        not at all.

        Args:
            name: the name of the snapshot.
            output: the file, at a path or a URL, which is packed if its name ends in
                `.ph.safetensors`.
            keys: as for `restore`.
            force: whether an existing file may be replaced.
            max_nbytes: as for `restore`.
            progress: as for `restore`.
            storage_options: options for the file system of `output`, as in fsspec; None for those
                of the store.

        Returns:
            What was written.

        Raises:
            ValueError: there is no such snapshot, a key selects nothing, or a file cannot hold the
                snapshot.
            CorruptionError, CompatibilityError: as for `restore`.
            OSError: the system failed; FileExistsError if `output` exists and `force` is False.
        """
        self._glance()
        options = self._options
        wanted = Exporting(keys, options.level, options.threads, force, max_nbytes, progress)
        place = self._place(output, storage_options)
        return export_snapshot(self._storage, self._catalog, name, place, wanted)

    def _place(self, path: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Place:
        if options is None:
            options = shared_options(path, *self._origin)
        return open_place(path, options)

    def diff(self, old: str, new: str, *, progress: Progress | None = None) -> list[TensorDiff]:
        """Compare two snapshots, tensor by tensor.

        Args:
            old: the name of a snapshot.
            new: the name of another snapshot.
            progress: called with the logical bytes done since the last call, from several threads.

        Returns:
            The tensors of `new` in its order, then those that only `old` has.

        Raises:
            ValueError: there is no such snapshot.
            CorruptionError, CompatibilityError: as for `restore`.
        """
        self._glance()
        names, threads = (old, new), self._options.threads
        return compare_snapshots(self._storage, self._catalog, names, threads, progress)

    def stored_nbytes(self) -> int:
        """Bytes of the whole store: of all packs, of all manifests and of the catalogue."""
        self._glance()
        return self._catalog.stored_nbytes()

    def exists(self) -> bool:
        """Whether there is a store; False if there is no folder, or if it is empty.

        Raises:
            CorruptionError, CompatibilityError: the store is damaged, or of a newer version.
            ValueError: the folder has files, but is not a store.
        """
        self._glance()
        return self._catalog.is_there()

    def names(self) -> list[str]:
        """The names of all snapshots, the oldest first; none if there is no store yet.

        Raises:
            CorruptionError, CompatibilityError, ValueError: as for `exists`.
        """
        self._glance()
        return list(self._catalog.listing())

    def info(self, name: str) -> SnapshotInfo:
        """What a snapshot holds. Only its manifest is read.

        Args:
            name: the name of the snapshot.

        Returns:
            Its tensors, what they cost, and its metadata.

        Raises:
            ValueError: there is no such snapshot.
            CorruptionError, CompatibilityError: its manifest is damaged or too new.
        """
        self._glance()
        return describe(self._catalog.load(name))

    def overview(self) -> StoreOverview:
        """All snapshots without their tensors; none if there is no store yet.

        Raises:
            CorruptionError, CompatibilityError, ValueError: as for `exists`.
        """
        self._glance()
        return look_over(self._storage, self._catalog)

    def lineage(self, name: str) -> Lineage:
        """What a snapshot holds, and what it shares with older ones.

        Args:
            name: the name of the snapshot.

        Returns:
            Its tensors, which of them an older snapshot has, and the snapshot that it builds on.

        Raises:
            ValueError, CorruptionError, CompatibilityError: as for `info`.
        """
        self._glance()
        return trace(self._storage, self._catalog, name)

    def verify(
        self, name: str | None = None, *, progress: Progress | None = None
    ) -> list[SnapshotProblem]:
        """Decode everything, and compare all checksums and hashes. A problem does not end the
        check.

        Args:
            name: the name of a snapshot; None for all.
            progress: called with the logical bytes done since the last call.

        Returns:
            All problems; none if everything is good.

        Raises:
            ValueError: there is no such snapshot.
            OSError, MemoryError: the system failed to read the store.
        """
        self._glance()
        return verify_snapshots(self._storage, name, self._options.threads, progress)

    def delete(self, name: str) -> int:
        """Remove a snapshot. Packs that others need stay; `prune` moves frames to free them, too.

        Args:
            name: the name of the snapshot, which may be damaged.

        Returns:
            How many bytes were freed.

        Raises:
            ValueError: there is no such snapshot.
            BlockingIOError: another process or store is writing.
        """
        quote_name(name)
        with self._writing():
            if name not in self._catalog.listing():
                self._catalog.load(name)
            with self._writer.session() as session:
                return delete_snapshot(session, name)

    def prune(
        self, *, keep: Keep | None = None, remove: Iterable[str] | None = None
    ) -> PruneResult:
        """Remove some snapshots, and free what only they needed.

        Frames of removed snapshots that kept ones need are first written to new packs, so this
        takes extra room until it is done.

        Args:
            keep: the snapshots to keep: how many of the newest, or their names, or a predicate
                that gets the `SnapshotInfo` of each.
            remove: instead of `keep`, the names of the snapshots to remove. All others stay, even
                one that another process takes meanwhile. Names that do not exist are ignored.

        Returns:
            What was done.

        Raises:
            TypeError: neither `keep` nor `remove` is given, or both are.
            ValueError: `keep` names a snapshot that does not exist, or no snapshot would be left.
            CorruptionError, CompatibilityError: a manifest is damaged; delete its snapshot first.
            BlockingIOError: another process or store is writing.
        """
        if (keep is None) == (remove is None):
            raise TypeError("prune takes either `keep` or `remove`")
        with self._writing():
            if not self._catalog.is_there():
                return PruneResult((), (), 0)
            with self._writer.session() as session:
                return prune_snapshots(session, keep, remove, self._options)

    def close(self) -> None:
        """Wait for the snapshot that is written in the background, and release all memory.

        Raises:
            Exception: the error of that snapshot, unless its future was asked.
        """
        if os.getpid() != self._pid:
            self._begin()
        with self._lock:
            try:
                self._settle()
            finally:
                self._staging.drop()
                self._options.cache.clear()
                self._catalog.let_go()
                self._writer.let_go()
                if self._pool is not None:
                    self._pool.shutdown()
                    self._pool = None

    def __reduce__(self) -> tuple[Callable[..., SnapshotStore], tuple[dict[str, Any]]]:
        return _reopen, (self._arguments,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Begin to write: wait for the previous snapshot, and keep other threads waiting."""
        if os.getpid() != self._pid:
            self._begin()
        with self._lock:
            self._settle()
            yield

    def _settle(self) -> None:
        """Wait for the snapshot that is being written, and raise its error if nobody saw it."""
        pending = self._pending
        if pending is not None:
            pending.wait()  # after Ctrl-C here, the snapshot is still pending
            self._pending = None
            pending.raise_unseen()

    def _glance(self) -> None:
        """Begin to read: raise an error of a finished snapshot that nobody saw. A reader never
        waits, neither for the snapshot nor for a thread that writes."""
        if os.getpid() == self._pid and self._lock.acquire(blocking=False):
            try:
                if self._pending is not None and self._pending.is_done():
                    self._settle()
            finally:
                self._lock.release()


def _reopen(arguments: dict[str, Any]) -> SnapshotStore:
    """Make a store from its pickle: the same place and options, nothing else."""
    return SnapshotStore(**arguments)
