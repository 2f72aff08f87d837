"""The one writer of a store: what it does under the lock, and in which order.

A pack is written before the manifest that names it. A manifest is removed, and the removal flushed,
before the packs that only it named. So every manifest finds its packs at any moment, even if the
work is interrupted. Leftover packs are named by no manifest, and the next writer removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.finder import Finder
from packhorse.disk.snapshots.index import Index
from packhorse.disk.snapshots.lock import WriterLock, open_lock
from packhorse.disk.snapshots.manifest import Manifest, render_manifest
from packhorse.disk.snapshots.names import (
    CATALOG,
    MAX_ORDER,
    PACKS,
    SNAPSHOTS,
    ManifestFile,
    is_pack,
)
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.errors import PackhorseError
from packhorse.layout import FILE_SUFFIX
from packhorse.storage.atomic import is_temporary
from packhorse.storage.interface import Storage

__all__ = ["Session", "Writer"]


class Writer:
    """Opens sessions, one at a time."""

    def __init__(self, storage: Storage, catalog: Catalog) -> None:
        self._storage = storage
        self._catalog = catalog
        self._index = Index(storage, catalog)
        self._is_clean = False

    def let_go(self) -> None:
        """Release the memory that caches the store."""
        self._index.let_go()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Hold the lock until the block ends.

        Raises:
            BlockingIOError: another writer holds the lock.
            CorruptionError, CompatibilityError, ValueError: the store is damaged or too new, or the
                folder is not a store.
        """
        self._catalog.is_there()  # raises before a lock is put into a folder that is not a store
        lock = open_lock(self._storage)
        lock.acquire()
        try:
            self._catalog.make()
            session = Session(self._storage, self._catalog, self._index, lock)
            if lock.was_left or not self._is_clean:
                session.clean()
            self._is_clean = False
            try:
                with session.frames:
                    yield session
            except FileNotFoundError:
                lock.check()  # if the lock was lost, another writer may have removed the file
                raise
            with suppress(Exception):  # the work is committed; the next session saves the index
                self._index.save()
            self._is_clean = True
        finally:
            lock.release()


class Session:
    """The work of a writer while it holds the lock.

    Attributes:
        listing: the manifests in the store.
        index: what the manifests name.
        frames: the frames of the store.
    """

    def __init__(self, storage: Storage, catalog: Catalog, index: Index, lock: WriterLock) -> None:
        self.storage = storage
        self.catalog = catalog
        self._lock = lock
        self._found = storage.files(SNAPSHOTS)
        self.listing: Listing = catalog.listing_of(self._found)
        self.index = index
        self.index.refresh(self.listing)
        self._finder: Finder | None = None
        self.frames = SnapshotFrames(storage, lambda: self.finder)

    @property
    def finder(self) -> Finder:
        """Finds tensors that the store has already."""
        if self._finder is None:
            self._finder = Finder(self.catalog, self.index, self.listing, self.newest())
        return self._finder

    def next_order(self) -> int:
        """The number of a new snapshot: above those of all manifests that can be read, and one that
        no manifest has.

        Raises:
            ValueError: no number is left.
        """
        files = self.files()
        good = [file for file in files if file.path not in self.index.damaged]
        newest = max(good, key=lambda file: file.order, default=None)
        taken = {file.order for file in files}
        order = 1 if newest is None else newest.order + 1
        while order in taken:
            order += 1
        if order > MAX_ORDER:
            name = None if newest is None else newest.snapshot
            raise ValueError(
                f"{self.storage.label()}: no number is left for a snapshot newer than {name!r}, "
                f"which has {order - 1}; delete that snapshot first"
            )
        return order

    def files(self) -> list[ManifestFile]:
        """All manifests."""
        return [file for files in self.listing.values() for file in files]

    def newest(self) -> Manifest | None:
        """The manifest of the newest snapshot that has a good one."""
        for files in reversed(self.listing.values()):
            for file in files:
                if file.path not in self.index.damaged:
                    with suppress(PackhorseError):
                        return self.catalog.load_file(file)
        return None

    def commit(self, manifest: Manifest) -> None:
        """Write a manifest, with which its snapshot exists, and remove the older ones.

        Raises:
            BlockingIOError: the lock was lost; nothing was committed.
        """
        text = render_manifest(manifest)
        self._lock.check()
        self.frames.commit(manifest.file.path, text)
        try:
            self._lock.check()
        except BaseException:
            # Another writer may have begun before it could see the manifest, and taken the packs
            # that it names for leftovers.
            self.storage.remove(manifest.file.path)
            raise
        self.catalog.keep(manifest)
        self.index.add(manifest, text)
        older = self.listing.get(manifest.file.snapshot, [])
        if older and older[0].order != manifest.file.order:
            del self.listing[manifest.file.snapshot]  # inserted again below, as the newest
        self.listing[manifest.file.snapshot] = [manifest.file]
        self.remove_manifests(older)

    def remove_manifests(self, files: Iterable[ManifestFile]) -> None:
        """Remove manifests for good.

        Args:
            files: the newest first; they go in the other order.
        """
        files = list(files)
        if not files:
            return
        self._lock.check()
        for file in reversed(files):
            self.storage.remove(file.path)
        for folder in dict.fromkeys(file.folder for file in reversed(files)):
            self.storage.flush(folder)
            self.storage.remove_folder(folder)
        self.storage.flush(SNAPSHOTS)
        self.index.forget(file.path for file in files)

    def clean(self) -> None:
        """Remove what killed writers left behind, and packs that no snapshot needs.

        While a manifest is damaged, nobody knows which packs it needs, so no pack is removed.
        """
        pairs = [path.split("/") for path in self._found]
        folders = {f"{SNAPSHOTS}/{name}" for name, file in pairs if is_temporary(file)}
        self.storage.remove_temporary(["", CATALOG, PACKS, SNAPSHOTS, *folders])
        for name, files in self.listing.items():
            if len(files) > 1:
                self.index.confirm(files)
            if len(files) > 1 and not any(file.path in self.index.damaged for file in files):
                self.remove_manifests(files[1:])
                self.listing[name] = files[:1]
        self._remove_empty_folders()
        self.collect()

    def _remove_empty_folders(self) -> None:
        used = {file.folder for files in self.listing.values() for file in files}
        for name in self.storage.names(SNAPSHOTS):
            if f"{SNAPSHOTS}/{name}" not in used:
                self.storage.remove_folder(f"{SNAPSHOTS}/{name}")

    def collect(self) -> int:
        """Remove packs that no manifest needs.

        Returns:
            How many bytes the packs had.

        Raises:
            BlockingIOError: the lock was lost; nothing was removed.
        """
        if self.index.damaged:
            return 0
        sizes = {
            file.removesuffix(FILE_SUFFIX): nbytes
            for file, nbytes in self.storage.sizes(PACKS).items()
            if file.endswith(FILE_SUFFIX) and is_pack(file.removesuffix(FILE_SUFFIX))
        }
        unneeded = sizes.keys() - self.index.packs()
        if unneeded:  # according to the catalogue; the manifests themselves decide
            unneeded -= self.index.confirm(self.files())
        if unneeded:
            self._lock.check()  # so no listed pack is another writer's
        if self.index.damaged:
            return 0
        self.frames.delete(sorted(unneeded))
        return sum(sizes[pack] for pack in unneeded)
