"""Finds what each snapshot added to a store, and what it shares with older ones.

`list` and `show` print this. It follows from fingerprints of contents and from sizes, which the
catalogue has, so only manifests that the catalogue lacks are parsed. A snapshot builds on the older
snapshot that it has most bytes from: tensors of the same content, or bases of its deltas. If
several older snapshots have a content, the newest of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.finder import distinct, match
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
from packhorse.storage.interface import Stamp, Storage

__all__ = ["look_over", "trace"]

_NOBODY = -1


def look_over(storage: Storage, catalog: Catalog) -> StoreOverview:
    """All snapshots of a store, the oldest first."""
    listing, index = catalog.listing(), Index(storage, catalog)
    index.refresh(listing)
    files, problems = _choose(storage, listing, index)
    return StoreOverview(_summaries(files, index), problems)


def _choose(
    storage: Storage, listing: Listing, index: Index
) -> tuple[list[ManifestFile], list[SnapshotProblem]]:
    """The valid manifest of each snapshot, and all manifests that cannot be read. A bad manifest
    beside a good one harms no snapshot, but nothing is pruned while it exists."""
    chosen, problems = [], []
    for name, files in listing.items():
        chosen += [file for file in files if index.has(file.path)][:1]
        for file in files:
            if file.path in index.damaged:  # a file in neither was removed since it was listed
                words = str(index.damaged[file.path])
                problems.append(SnapshotProblem(name, None, storage.label(file.path), words))
    return chosen, problems


class _Change(NamedTuple):
    """How a snapshot differs from the previous one, tensor by tensor in their order.

    Attributes:
        record: the record of the snapshot.
        prints: the fingerprints of all its tensors.
        rows: the numbers of the tensors that differ from the previous snapshot.
        bases: for each of these, the fingerprint of its base, or 0.
        is_near: for each of these, whether its base is the tensor of the same number in the
            previous snapshot.
    """

    record: Record
    prints: Column
    rows: Column
    bases: Column
    is_near: Column


def _changes(records: Iterable[Record]) -> Iterator[_Change]:
    before = np.empty(0, np.uint64)
    for record in records:
        prints = record.contents.prints[: record.contents.n_tensors]
        is_alike = before.size == prints.size
        rows = np.flatnonzero(prints != before) if is_alike else np.arange(prints.size)
        bases = record.sizes.bases[rows]
        is_near = bases == before[rows] if is_alike else np.zeros(rows.size, bool)
        yield _Change(record, prints, rows, bases, is_near)
        before = prints


def _summaries(files: list[ManifestFile], index: Index) -> list[SnapshotSummary]:
    """A summary of each snapshot, the oldest first."""
    paths = [file.path for file in files]
    known = _looked_for(_changes(index.records(paths)))
    owners = np.full(known.size + 1, _NOBODY)  # the last one is for contents that are not known
    numbers = np.empty(0, np.intp)  # the place of each tensor's content in `owners`
    found = []
    for i, change in enumerate(_changes(index.records(paths))):
        n_tensors, rows, record = change.prints.size, change.rows, change.record
        numbers = numbers.copy() if numbers.size == n_tensors else np.empty(n_tensors, np.intp)
        numbers[rows] = _numbers(known, change.prints[rows])
        own = owners[numbers[rows]]
        bases = np.where(change.is_near, i - 1, owners[_numbers(known, change.bases)])
        named = np.full(n_tensors, i - 1)
        named[rows] = np.where(own == _NOBODY, bases, own)
        base = _most(named, record)
        new = rows[own == _NOBODY]
        is_once = numbers[new] == known.size  # true of most, so that few are left to sort
        new_nbytes = int(record.sizes.packed_nbytes[new[is_once]].sum())
        new_nbytes += _added(change.prints, new[~is_once], record)
        owners[numbers], owners[-1] = i, _NOBODY
        found.append(
            SnapshotSummary(
                files[i].snapshot, files[i].order, record.time, n_tensors,
                int(record.sizes.nbytes.sum()), record.stored_nbytes, new_nbytes,
                int(record.contents.n_deltas[:n_tensors].max(initial=0)),
                None if base is None else files[base].snapshot,
            )
        )  # fmt: skip
    return found


def _looked_for(changes: Iterable[_Change]) -> Column:
    """The contents that must be looked up, in order: those that occur more than once, and bases
    that are not in the previous snapshot. In a training run there are few."""
    parts, others = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for change in changes:
        parts.append(change.prints[change.rows])
        others.append(change.bases[~change.is_near & (change.bases != 0)])
    prints = np.sort(np.concatenate(parts))
    repeated = prints[1:][prints[1:] == prints[:-1]]
    return distinct(np.concatenate([repeated, *others]))


def _numbers(known: Column, prints: Column) -> Column:
    """The place of each fingerprint in `known`; `known.size` if it is not there."""
    if not known.size:
        return np.zeros(prints.size, np.intp)
    at = np.minimum(np.searchsorted(known, prints), known.size - 1)
    return np.where(known[at] == prints, at, known.size)


def _added(contents: Column, new: Column, record: Record) -> int:
    """Bytes of the frames of new tensors, with each content counted once."""
    order = new[np.argsort(contents[new], kind="stable")]
    is_first = np.ones(order.size, bool)
    is_first[1:] = contents[order[1:]] != contents[order[:-1]]
    return int(record.sizes.packed_nbytes[order[is_first]].sum())


def _most(named: Column, record: Record) -> int | None:
    """The snapshot that most bytes come from, given the snapshot that each tensor comes from. If
    several are equal, the first one is chosen."""
    voters = np.flatnonzero(named != _NOBODY)
    if not voters.size:
        return None
    votes = np.bincount(named[voters], weights=record.sizes.nbytes[voters])
    return int(named[voters[np.argmax(votes[named[voters]])]])


def trace(storage: Storage, catalog: Catalog, name: str) -> Lineage:
    """One snapshot, and what it shares with older ones.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as for `SnapshotStore.info`.
    """
    manifest = catalog.load(name)
    listing, index = catalog.listing(), Index(storage, catalog)
    index.refresh(listing)
    files, _ = _choose(storage, listing, index)
    older = [file for file in files if file.order < manifest.file.order]
    own, info = make_record(manifest, 0, Stamp(0, 0)), describe(manifest)
    prints = own.contents.prints[: len(info.tensors)]
    named, bases = _find_owners([prints, own.sizes.bases], older, index)
    new = np.flatnonzero(named == _NOBODY)
    inherited = frozenset(
        tensor.content_hash
        for tensor, owner in zip(info.tensors, named, strict=True)
        if owner != _NOBODY
    )
    named[new] = bases[new]
    base = _most(named, own)
    base_name = None if base is None else older[base].snapshot
    return Lineage(info, _added(prints, new, own), base_name, inherited)


def _find_owners(wanted: list[Column], files: list[ManifestFile], index: Index) -> list[Column]:
    """For each fingerprint of some columns, the newest snapshot that has a tensor of that
    content."""
    places = {file.path: i for i, file in enumerate(files)}
    joined = np.concatenate(wanted)
    known = distinct(joined)
    owners = np.full(known.size, _NOBODY)
    for path, contents in index.contents():
        if path in places and known.size:
            _, found = match(contents.prints[: contents.n_tensors], known)
            owners[found] = np.maximum(owners[found], places[path])
    cuts = np.cumsum([column.size for column in wanted])[:-1]
    return np.split(owners[np.searchsorted(known, joined)], cuts)
