"""What a store holds: which snapshots, by which manifests, and which frames they need.

Manifests never change and their names are never used twice, so what was read of one stays true for
as long as its file is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from packhorse.disk.atomic import is_temporary
from packhorse.disk.snapshots.manifest import (
    MAX_MANIFEST_NBYTES,
    Content,
    FrameRef,
    Manifest,
    parse_manifest,
    parse_store_file,
    render_store_file,
)
from packhorse.disk.snapshots.names import (
    LOCK_FILE,
    PACKS,
    SNAPSHOTS,
    STORE_FILE,
    ManifestFile,
    parse_manifest_file,
    quote_name,
)
from packhorse.disk.storage import Storage
from packhorse.errors import PackhorseError

__all__ = ["Catalog", "Index", "Listing"]

_KEPT = 4  # parsed manifests
_MAX_STORE_FILE_NBYTES = 1 << 16

# Manifests of each snapshot, the newest first; snapshots in the order in which they were taken.
Listing = dict[str, list[ManifestFile]]


class Catalog:
    """Finds and reads manifests."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: OrderedDict[str, Manifest] = OrderedDict()
        self._is_checked = False
        self.index = Index(self)

    def is_there(self) -> bool:
        """Whether there is a store; False for nothing or an empty folder.

        Raises:
            CorruptionError, CompatibilityError: it is damaged, or of a newer version.
            ValueError: the folder is something else.
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
                    f"{self._storage.label()}: no snapshot store: it holds {others[0]!r} and no "
                    f"{STORE_FILE}; name another folder, or bring that file back"
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
        """Make the store if there is none; somebody may have removed it since it was seen."""
        self._is_checked = False
        if not self.is_there():
            self._storage.put(STORE_FILE, render_store_file())

    def listing(self) -> Listing:
        """All manifests that there are, good or damaged."""
        if not self.is_there():
            return {}
        files = [parse_manifest_file(path) for path in self._storage.files(SNAPSHOTS)]
        found: Listing = {}
        for file in sorted(
            (file for file in files if file is not None),
            key=lambda file: (-file.order, -file.generation, file.unique),
        ):
            found.setdefault(file.snapshot, []).append(file)
        return dict(reversed(found.items()))

    def stored_nbytes(self) -> int:
        """Bytes of all packs and manifests."""
        paths = [f"{PACKS}/{file}" for file in self._storage.names(PACKS)]
        paths += [f"{SNAPSHOTS}/{path}" for path in self._storage.files(SNAPSHOTS)]
        nbytes = 0
        for path in paths if self.is_there() else ():
            with suppress(FileNotFoundError):  # a writer may remove it meanwhile
                nbytes += self._storage.open(path).nbytes
        return nbytes

    def load(self, name: str) -> Manifest:
        """The newest good manifest of a snapshot.

        Raises:
            ValueError: there is no such snapshot.
            CorruptionError, CompatibilityError: no manifest of it can be read.
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
            f"{len(self.listing())} there are"
        )

    def load_first(self, files: Iterable[ManifestFile]) -> Manifest:
        """The first good one of some manifests of a snapshot.

        Raises:
            CorruptionError, CompatibilityError: what is wrong with the newest.
        """
        failure: PackhorseError | None = None
        for file in files:
            try:
                return self.load_file(file)
            except PackhorseError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def load_file(self, file: ManifestFile) -> Manifest:
        """One manifest.

        Raises:
            CorruptionError, CompatibilityError: it cannot be read.
            FileNotFoundError: it is gone.
        """
        known = self._kept.get(file.path)
        if known is not None:
            return known
        text = self._storage.read(file.path, MAX_MANIFEST_NBYTES)
        label = f"snapshot {file.snapshot!r}: {self._storage.label(file.path)}"
        return self.keep(parse_manifest(text, file, label, self.index.intern))

    def keep(self, manifest: Manifest) -> Manifest:
        """Remember a manifest, in the place of one that was remembered for longer."""
        self._kept[manifest.file.path] = manifest
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return manifest


class Index:
    """All frames that manifests name: what a writer must know before it adds or removes any."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._frames: dict[str, list[FrameRef]] = {}  # by path of the manifest
        self._contents: dict[Content, FrameRef] = {}
        self._known: dict[tuple[str, int], FrameRef] = {}
        self.damaged: dict[str, PackhorseError] = {}

    def refresh(self, listing: Listing) -> None:
        """Read what is new, and forget what is gone."""
        files = {file.path: file for files in listing.values() for file in files}
        if not self._frames.keys() <= files.keys():
            self.forget(self._frames.keys() - files.keys())
        self.damaged = {}
        for path, file in files.items():
            try:
                if path not in self._frames:
                    self.add(self._catalog.load_file(file))
            except PackhorseError as error:
                self.damaged[path] = error

    def add(self, manifest: Manifest) -> None:
        """Take a manifest's frames in."""
        frames = self._frames[manifest.file.path] = manifest.frames()
        for frame in frames:
            self._add_frame(frame)

    def _add_frame(self, frame: FrameRef) -> None:
        known = self._contents.get(frame.content)
        if known is None or frame.n_deltas < known.n_deltas:
            self._contents[frame.content] = frame

    def forget(self, paths: Iterable[str]) -> None:
        """Drop the manifests at some paths."""
        for path in list(paths):
            self._frames.pop(path, None)
            self.damaged.pop(path, None)
        self._known.clear()
        self._contents.clear()
        for frames in self._frames.values():
            for frame in frames:
                self._add_frame(frame)

    def find(self, content: Content) -> FrameRef | None:
        """A frame that decodes to this content."""
        return self._contents.get(content)

    def drop(self, content: Content) -> None:
        """Offer this content no more: its frame turned out to be bad."""
        self._contents.pop(content, None)

    def packs(self) -> set[str]:
        """All packs that some manifest needs."""
        return {frame.pack for frames in self._frames.values() for frame in frames}

    def intern(self, frame: FrameRef) -> FrameRef:
        """An equal frame that is known already, or this one."""
        known = self._known.setdefault((frame.pack, frame.offset), frame)
        return known if known == frame else frame
