"""Finds the snapshots of a store, and reads their manifests.

A manifest never changes, and its name is never used twice. So a manifest that was read stays valid
for as long as its file exists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from packhorse.disk.snapshots.manifest import (
    MAX_MANIFEST_NBYTES,
    Manifest,
    parse_manifest,
    parse_store_file,
    render_store_file,
)
from packhorse.disk.snapshots.names import (
    CATALOG,
    LOCK_FILE,
    PACKS,
    SNAPSHOTS,
    STORE_FILE,
    ManifestFile,
    parse_manifest_file,
    quote_name,
)
from packhorse.errors import PackhorseError, blaming
from packhorse.storage.atomic import is_temporary
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.interface import Stamp, Storage

__all__ = ["Catalog", "Listing"]

_KEPT = 4  # parsed manifests
_MAX_STORE_FILE_NBYTES = 1 << 16

# The manifests of each snapshot, the newest first. The snapshots are in the order of taking.
Listing = dict[str, list[ManifestFile]]


class Catalog:
    """Finds and reads manifests."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: OrderedDict[str, Manifest] = OrderedDict()
        self._is_checked = False

    def is_there(self) -> bool:
        """Whether there is a store; False if there is no folder, or if it is empty.

        Raises:
            CorruptionError, CompatibilityError: the store is damaged, or of a newer version.
            ValueError: the folder has files, but is not a store.
        """
        if self._is_checked:
            return True
        text = self._store_file()
        if text is None:
            others = [n for n in self._storage.names() if n != LOCK_FILE and not is_temporary(n)]
            if not others:
                return False
            text = self._store_file()  # a writer may have made the store in between
            if text is None:
                raise ValueError(
                    f"{self._storage.label()}: not a snapshot store: it holds {others[0]!r}, but "
                    f"no {STORE_FILE}; name another folder, or restore that file"
                )
        parse_store_file(text, self._storage.label(STORE_FILE))
        self._is_checked = True
        return True

    def _store_file(self) -> bytes | None:
        try:
            return self._storage.read(STORE_FILE, _MAX_STORE_FILE_NBYTES)
        except FileNotFoundError:
            return None

    def make(self) -> None:
        """Make the store if there is none. It is looked for again, because someone may have removed
        it."""
        self._is_checked = False
        if not self.is_there():
            self._storage.put(STORE_FILE, render_store_file())

    def listing(self) -> Listing:
        """All manifests in the store, good or damaged."""
        return self.listing_of(self._storage.files(SNAPSHOTS)) if self.is_there() else {}

    def listing_of(self, stamps: Mapping[str, Stamp]) -> Listing:
        """`listing`, given the files in the folder of snapshots and their stamps."""
        files = [parse_manifest_file(path, stamp) for path, stamp in stamps.items()]
        found: Listing = {}
        for file in sorted((file for file in files if file is not None), key=_from_newest):
            found.setdefault(file.snapshot, []).append(file)
        counted = sorted(found, key=lambda name: _from_newest(self._counted(found[name])))
        return {name: found[name] for name in reversed(counted)}

    def _counted(self, files: list[ManifestFile]) -> ManifestFile:
        """The manifest that gives a snapshot its place in the order: the newest that can be read,
        or the newest if none can."""
        if len({file.order for file in files}) > 1:
            for file in files:
                try:
                    return self.load_file(file).file
                except (PackhorseError, FileNotFoundError):
                    continue
        return files[0]

    def stored_nbytes(self) -> int:
        """Bytes of all packs, of all manifests and of the catalogue."""
        if not self.is_there():
            return 0
        stamps = self._storage.files(SNAPSHOTS).values()
        folders = [self._storage.sizes(folder) for folder in (PACKS, CATALOG)]
        return sum(stamp.nbytes for stamp in stamps) + sum(sum(f.values()) for f in folders)

    def load(self, name: str) -> Manifest:
        """The newest good manifest of a snapshot.

        Raises:
            ValueError: there is no such snapshot.
            CorruptionError, CompatibilityError: none of its manifests can be read.
        """
        quote_name(name)
        for _ in range(3):  # a manifest may be replaced between listing and reading
            listing = self.listing()
            if name not in listing:
                break
            try:
                return self.load_first(listing[name])
            except FileNotFoundError:
                continue
        raise ValueError(
            f"{self._storage.label()}: no snapshot is named {name!r}; names() lists the "
            f"{len(self.listing())} in the store"
        )

    def load_first(self, files: Iterable[ManifestFile]) -> Manifest:
        """The first of some manifests of a snapshot that can be read.

        Raises:
            CorruptionError, CompatibilityError: none can be read; the error is that of the first.
        """
        failure: PackhorseError | None = None
        for file in files:
            try:
                return self.load_file(file)
            except PackhorseError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def load_file(
        self, file: ManifestFile, intern: Callable[[FrameRef], FrameRef] = lambda frame: frame
    ) -> Manifest:
        """Read a manifest, unless it is remembered.

        Args:
            file: its name.
            intern: returns an equal frame that is known already, so that manifests share frames.

        Raises:
            CorruptionError, CompatibilityError: the manifest is damaged, or too new.
            FileNotFoundError: the manifest no longer exists.
        """
        known = self._kept.get(file.path)
        return known if known is not None else self.parse(file, self.read(file), intern)

    def read(self, file: ManifestFile) -> bytes:
        """The text of a manifest, always read from the storage.

        Raises:
            CorruptionError: it is too long, or not a regular file.
            FileNotFoundError: the manifest no longer exists.
        """
        with blaming(f"snapshot {file.snapshot!r}"):
            return self._storage.read(file.path, MAX_MANIFEST_NBYTES)

    def parse(
        self,
        file: ManifestFile,
        text: bytes,
        intern: Callable[[FrameRef], FrameRef] = lambda frame: frame,
    ) -> Manifest:
        """Parse the text of a manifest, check it, and remember the manifest.

        Raises:
            CorruptionError, CompatibilityError: the manifest is damaged, or too new.
        """
        return self.keep(parse_manifest(text, file, self.label(file), intern))

    def label(self, file: ManifestFile) -> str:
        """What messages call a manifest."""
        return f"snapshot {file.snapshot!r}: {self._storage.label(file.path)}"

    def keep(self, manifest: Manifest) -> Manifest:
        """Remember a manifest, and forget the oldest one if there are too many."""
        self._kept[manifest.file.path] = manifest
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return manifest

    def let_go(self) -> None:
        """Forget all manifests."""
        self._kept.clear()


def _from_newest(file: ManifestFile) -> tuple[int, int, str]:
    return -file.order, -file.generation, file.unique
