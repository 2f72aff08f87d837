"""Verifies snapshots: every manifest, every pack and every frame that they need.

A chain is decoded from its full frame up, and the content hash of each frame is compared, so one
pass over the longest chains proves all frames. A missing pack is a fault of the store. Other
failures of the system (memory, open files, permissions) say nothing about the store, and are
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from packhorse.disk.results import Progress
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.manifest import Manifest, sharing
from packhorse.disk.snapshots.names import ManifestFile, pack_path
from packhorse.disk.snapshots.results import SnapshotProblem
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.errors import PackhorseError
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.interface import Storage
from packhorse.storage.strict_json import shortened
from packhorse.threads import batches, map_tensors

__all__ = ["verify_snapshots"]

_Key = tuple[str, int]

_MAX_TRIES = 5


def verify_snapshots(
    storage: Storage, name: str | None, threads: int, progress: Progress | None
) -> list[SnapshotProblem]:
    """Find everything that is wrong with one snapshot, or with all.

    Args:
        storage: the storage of the store.
        name: the name of the snapshot; None for all.
        threads: how many threads to use.
        progress: called with the logical bytes done since the last call.

    Raises:
        ValueError: there is no such snapshot.
        OSError, MemoryError: the system failed to read the store.
    """
    for _ in range(_MAX_TRIES):
        catalog = Catalog(storage)  # a new one, which remembers nothing
        intern = sharing()
        listing = catalog.listing()
        if name is not None and name not in listing:
            catalog.load(name)
        problems: list[SnapshotProblem] = []
        manifests: list[Manifest] = []
        for snapshot, files in listing.items():
            if name in (None, snapshot):
                problems += _read(storage, catalog, files, manifests, intern)
        with SnapshotFrames(storage) as store:
            checker = _Checker(storage, store, manifests, threads, progress)
            problems += checker.packs() + checker.frames()
        bad = {problem.snapshot for problem in problems}
        now = catalog.listing() if bad else {}
        if all(now.get(snapshot) == listing[snapshot] for snapshot in bad):
            break  # otherwise a writer has removed or moved what was read
    return problems


def _read(
    storage: Storage,
    catalog: Catalog,
    files: list[ManifestFile],
    manifests: list[Manifest],
    intern: Callable[[FrameRef], FrameRef],
) -> Iterator[SnapshotProblem]:
    """Read all manifests of a snapshot, and append the first good one to `manifests`."""
    is_found = False
    for file in files:
        try:
            manifest = catalog.load_file(file, intern)
        except FileNotFoundError:
            continue  # replaced in the meantime
        except PackhorseError as error:
            yield SnapshotProblem(file.snapshot, None, storage.label(file.path), str(error))
        else:
            manifests += [] if is_found else [manifest]
            is_found = True


class _Checker:
    def __init__(
        self,
        storage: Storage,
        store: SnapshotFrames,
        manifests: list[Manifest],
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._storage = storage
        self._store = store
        self._manifests = manifests
        self._threads = threads
        self._progress = progress
        self._missing: set[str] = set()
        self._scratch = Scratch()

    def packs(self) -> list[SnapshotProblem]:
        """What is wrong with packs as files, once for each snapshot that needs the pack."""
        frames: dict[str, dict[_Key, FrameRef]] = {}
        for manifest in self._manifests:
            for frame in manifest.frames():
                frames.setdefault(frame.pack, {})[_key(frame)] = frame
        problems = []
        for pack, found in frames.items():
            message = self._check_pack(pack, list(found.values()))
            if message is not None:
                problems += [
                    SnapshotProblem(
                        manifest.file.snapshot,
                        None,
                        self._storage.label(pack_path(pack)),
                        f"snapshot {manifest.file.snapshot!r}: {message}",
                    )
                    for manifest in self._manifests
                    if pack in manifest.packs()
                ]
        return problems

    def _check_pack(self, pack: str, frames: list[FrameRef]) -> str | None:
        try:
            self._store.check_header(pack, frames)
        except PackhorseError as error:
            return str(error)
        except FileNotFoundError as error:
            self._missing.add(pack)
            return str(error)
        return None

    def frames(self) -> list[SnapshotProblem]:
        """What is wrong with frames, once for each tensor that needs the frame."""
        heads = {
            _key(tensor.frame): tensor.frame
            for manifest in self._manifests
            for tensor in manifest.tensors
            if not self._missing & {link.pack for link in tensor.frame.chain}
        }
        left = sorted(heads.values(), key=lambda frame: -frame.n_deltas)
        bad: dict[_Key, str] = {}
        proven: set[_Key] = set()
        while left:
            chosen = _uncovered(left)
            for frame, message in zip(chosen, self._decode(chosen), strict=True):
                if message is None:
                    proven.update(_key(link) for link in frame.chain)
                else:
                    bad[_key(frame)] = message
            left = [f for f in left if _key(f) not in proven and _key(f) not in bad]
        return [problem for manifest in self._manifests for problem in self._told(manifest, bad)]

    def _told(self, manifest: Manifest, bad: dict[_Key, str]) -> Iterator[SnapshotProblem]:
        name = manifest.file.snapshot
        for tensor in manifest.tensors:
            message = bad.get(_key(tensor.frame))
            if message is not None:
                file = self._storage.label(pack_path(tensor.frame.pack))
                words = f"snapshot {name!r}: tensor {shortened(tensor.path)!r}: {message}"
                yield SnapshotProblem(name, tensor.path, file, words)

    def _decode(self, frames: list[FrameRef]) -> list[str | None]:
        """What is wrong with each chain; None for a good one."""
        sizes = [frame.logical_nbytes for frame in frames]
        messages: list[str | None] = []
        for run in batches(sizes):
            check = partial(self._check_chain, frames[run.start : run.stop])
            messages += map_tensors(check, sizes[run.start : run.stop], self._threads)
            if self._progress is not None:
                self._progress(sum(sizes[run.start : run.stop]))
        return messages

    def _check_chain(self, frames: list[FrameRef], k: int, threads: int) -> str | None:
        frame = frames[k]
        try:
            self._store.chain(frame).verify(threads, self._scratch)
        except (PackhorseError, FileNotFoundError) as error:
            return str(error)
        return None


def _key(frame: FrameRef) -> _Key:
    return frame.pack, frame.offset


def _uncovered(frames: list[FrameRef]) -> list[FrameRef]:
    """Frames whose chains cover all the others. The frames must be given with the longest chain
    first."""
    covered: set[_Key] = set()
    chosen = []
    for frame in frames:
        if _key(frame) not in covered:
            chosen.append(frame)
            covered.update(_key(link) for link in frame.chain)
    return chosen
