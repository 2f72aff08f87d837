"""What snapshots added to a store, and what they have from older ones: for `list` and `show`.

All of it follows from fingerprints of contents and from sizes. The catalogue has both, so that no
manifest is parsed but those that it does not know. A snapshot builds on the older one that it has
most from: tensors of the same content, or bases of its deltas; of a content that several have, it
is the newest's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.finder import match
from packhorse.disk.snapshots.index import Index
from packhorse.disk.snapshots.names import ManifestFile
from packhorse.disk.snapshots.records import Column, Record, make_record
from packhorse.disk.snapshots.results import (
    Lineage,
    SnapshotProblem,
    SnapshotSummary,
    StoreOverview,
    describe,
)
from packhorse.disk.storage import Stamp, Storage

__all__ = ["look_over", "trace"]

_NOBODY = -1


def look_over(storage: Storage, catalog: Catalog) -> StoreOverview:
    """All snapshots of a store, the oldest first."""
    listing, index = catalog.listing(), Index(storage, catalog)
    index.refresh(listing)
    files, problems = _choose(storage, listing, index)
    return StoreOverview(_Table(files, index).summaries(), problems)


def _choose(
    storage: Storage, listing: Listing, index: Index
) -> tuple[list[ManifestFile], list[SnapshotProblem]]:
    """The manifest that counts of each snapshot, and what has none that can be read."""
    chosen, problems = [], []
    for name, files in listing.items():
        good = next((file for file in files if index.has(file.path)), None)
        bad = next((file for file in files if file.path in index.damaged), None)
        if good is not None:
            chosen.append(good)
        elif bad is not None:  # else it was removed since it was listed
            words = str(index.damaged[bad.path])
            problems.append(SnapshotProblem(name, None, storage.label(bad.path), words))
    return chosen, problems


class _Row(NamedTuple):
    """A snapshot, but for its tensors."""

    tensors: slice  # of the table
    record: Record  # without columns, which are large


class _Table:
    """The tensors of all snapshots, as columns."""

    def __init__(self, files: list[ManifestFile], index: Index) -> None:
        self._files = files
        n_tensors = index.n_tensors()
        self._prints, self._bases = np.empty((2, n_tensors), np.uint64)
        self._nbytes, self._packed = np.empty((2, n_tensors), np.uint64)
        self._rows: dict[str, _Row] = {}
        self._max_deltas: dict[str, int] = {}
        end = 0
        for record in index.records():
            self._add(record, slice(end, end + len(record.sizes.bases)))
            end += len(record.sizes.bases)

    def _add(self, record: Record, place: slice) -> None:
        n_tensors = place.stop - place.start
        self._prints[place] = record.contents.prints[:n_tensors]
        self._bases[place], self._nbytes[place], self._packed[place] = record.sizes
        self._rows[record.path] = _Row(place, record.bare())
        self._max_deltas[record.path] = int(record.contents.n_deltas[:n_tensors].max(initial=0))

    def summaries(self) -> list[SnapshotSummary]:
        """Each snapshot, the oldest first."""
        known, numbers = np.unique(self._prints, return_inverse=True)
        owners = np.full(known.size, _NOBODY, np.int32)
        found = []
        for i, file in enumerate(self._files):
            place, record = self._rows[file.path]
            own, bases = numbers[place], self._bases[place]
            at = np.minimum(np.searchsorted(known, bases), max(known.size - 1, 0))
            base_owners = np.where(known[at] == bases, owners[at], _NOBODY)
            new_nbytes, base = _judge(
                own, owners[own], base_owners, self._nbytes[place], self._packed[place]
            )
            owners[own] = i
            found.append(
                SnapshotSummary(
                    file.snapshot, file.order, record.time, own.size,
                    int(self._nbytes[place].sum()), record.stored_nbytes, new_nbytes,
                    self._max_deltas[file.path],
                    None if base == _NOBODY else self._files[base].snapshot,
                )
            )  # fmt: skip
        return found


def _judge(
    contents: Column, owners: Column, base_owners: Column, nbytes: Column, packed_nbytes: Column
) -> tuple[int, int]:
    """What a snapshot added, and whom it builds on.

    Args:
        contents: of its tensors, as numbers.
        owners: the newest older snapshot that has the same content, by its number.
        base_owners: the same for the base of each frame.
        nbytes: of the tensors.
        packed_nbytes: of their frames.
    """
    new = np.flatnonzero(owners == _NOBODY)
    _, first = np.unique(contents[new], return_index=True)
    added = int(packed_nbytes[new[first]].sum())
    named = np.where(owners == _NOBODY, base_owners, owners)
    voters = named != _NOBODY
    if not voters.any():
        return added, _NOBODY
    votes = np.bincount(named[voters], weights=nbytes[voters])
    return added, int(named[voters][np.argmax(votes[named[voters]])])


def trace(storage: Storage, catalog: Catalog, name: str) -> Lineage:
    """One snapshot, and what it has from older ones.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as `SnapshotStore.info` says.
    """
    manifest = catalog.load(name)
    listing, index = catalog.listing(), Index(storage, catalog)
    index.refresh(listing)
    files, _ = _choose(storage, listing, index)
    older = [file for file in files if file.order < manifest.file.order]
    own = make_record(manifest, 0, Stamp(0, 0))
    prints = own.contents.prints[: len(own.sizes.bases)]
    owners, base_owners = _find_owners([prints, own.sizes.bases], older, index)
    added, base = _judge(prints, owners, base_owners, own.sizes.nbytes, own.sizes.packed_nbytes)
    info = describe(manifest)
    inherited = {
        tensor.content_hash
        for tensor, owner in zip(info.tensors, owners, strict=True)
        if owner != _NOBODY
    }
    base_name = None if base == _NOBODY else older[base].snapshot
    return Lineage(info, added, base_name, frozenset(inherited))


def _find_owners(wanted: list[Column], files: list[ManifestFile], index: Index) -> list[Column]:
    """The newest snapshot that has a tensor of each content, for some columns of fingerprints."""
    places = {file.path: i for i, file in enumerate(files)}
    known, numbers = np.unique(np.concatenate(wanted), return_inverse=True)
    owners = np.full(known.size, _NOBODY)
    for path, contents in index.contents():
        if path in places and known.size:
            _, found = match(contents.prints[: contents.n_tensors], known)
            owners[found] = np.maximum(owners[found], places[path])
    cuts = np.cumsum([column.size for column in wanted])[:-1]
    return np.split(owners[numbers], cuts)
