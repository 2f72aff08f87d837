"""Finds tensors that the store has already, in any of its snapshots.

The newest manifest is searched first. Tensors that it does not have are looked for by their
fingerprints in the catalogue. A match is then looked up in the manifest itself, because the
catalogue is not trusted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.index import Index
from packhorse.disk.snapshots.manifest import Manifest
from packhorse.disk.snapshots.names import ManifestFile
from packhorse.disk.snapshots.records import Column, fingerprint
from packhorse.errors import PackhorseError
from packhorse.storage.frames.refs import Content, FrameRef

__all__ = ["Finder", "distinct", "match"]

_FILTER_NBITS = 16


class _Hits(NamedTuple):
    """The wanted contents that a manifest seems to have."""

    wanted: Column  # the numbers of the contents
    n_deltas: Column


class _Turns:
    """Chooses which manifest is read next.

    A content is best taken from a manifest in which it has the shortest chain. The next manifest is
    the one that is best for most of the contents that are still wanted, and the newest if there
    are several.

    Contents only ever stop being wanted, so the count of a manifest never grows, and is updated
    only when the manifest comes to the front of the queue. If the catalogue was wrong and a
    manifest does not have a content, the other manifests are searched once the queue is empty.
    """

    def __init__(self, hits: dict[str, _Hits], paths: Sequence[str], n_wanted: int) -> None:
        """Args:
        hits: the contents that each manifest seems to have.
        paths: the paths of the manifests, the oldest first.
        n_wanted: how many contents are wanted.
        """
        self._hits = hits
        self._ages = {path: age for age, path in enumerate(reversed(paths))}
        self._is_open = np.ones(n_wanted, bool)
        self._fewest = np.empty(n_wanted, np.uint8)
        self._queue: list[tuple[int, int, str]] = []  # minus how many at most; age; path

    def next(self) -> tuple[str, Column] | None:
        """A manifest that was not chosen before, and the numbers of the contents to look up in
        it; None if no manifest is left."""
        while self._queue or self._fill():
            count, age, path = heapq.heappop(self._queue)
            best = self._best(path)
            if best.size == -count:
                del self._hits[path]
                return path, best
            if best.size:
                heapq.heappush(self._queue, (-best.size, age, path))
        return None

    def close(self, numbers: Sequence[int]) -> None:
        """Mark contents as no longer wanted, by their numbers."""
        self._is_open[numbers] = False

    def _fill(self) -> bool:
        """Put all manifests that were not chosen yet into the queue; whether there is any."""
        self._fewest.fill(255)
        for path, found in list(self._hits.items()):
            if self._is_open[found.wanted].any():
                np.minimum.at(self._fewest, found.wanted, found.n_deltas)
            else:
                del self._hits[path]
        counts = {path: self._best(path).size for path in self._hits}
        self._queue = [(-n, self._ages[path], path) for path, n in counts.items() if n]
        heapq.heapify(self._queue)
        return bool(self._queue)

    def _best(self, path: str) -> Column:
        found = self._hits[path]
        is_best = self._is_open[found.wanted] & (found.n_deltas == self._fewest[found.wanted])
        best: Column = found.wanted[is_best]
        return best


class Finder:
    """Finds frames by content, during one session of the writer."""

    def __init__(
        self, catalog: Catalog, index: Index, listing: Listing, newest: Manifest | None
    ) -> None:
        self._catalog = catalog
        self._index = index
        self._files = {file.path: file for files in listing.values() for file in files}
        self._found: dict[Content, FrameRef | None] = {}
        if newest is not None:  # the frame with the fewest deltas comes last, and replaces others
            self._found.update((frame.content, frame) for frame in newest.frames())

    def find(self, content: Content) -> FrameRef | None:
        """A frame of this content, with few deltas if there is a choice; None if there is none."""
        self.look_up([content])
        return self._found[content]

    def drop(self, content: Content) -> None:
        """Stop finding this content, because its frame turned out to be bad."""
        self._found[content] = None

    def look_up(self, contents: Iterable[Content]) -> None:
        """Look up many contents at once, which takes no longer than one."""
        new = [content for content in dict.fromkeys(contents) if content not in self._found]
        if not new:
            return
        self._found.update(dict.fromkeys(new))
        hits = self._hits([fingerprint(content) for content in new])
        turns = _Turns(hits, list(self._files), len(new))
        while (turn := turns.next()) is not None:
            path, numbers = turn
            frames = self._frames(self._files[path])
            found = [k for k in numbers if new[k] in frames]
            self._found.update((new[k], frames[new[k]]) for k in found)
            turns.close(found)

    def _hits(self, prints: Sequence[int]) -> dict[str, _Hits]:
        """For each manifest that has some of these fingerprints, by path, which it has."""
        wanted = np.array(prints, np.uint64)
        order = np.argsort(wanted)
        hits = {}
        for path, contents in self._index.contents():
            rows, places = match(contents.prints, wanted[order])
            if rows.size and path in self._files:
                hits[path] = _Hits(order[places], contents.n_deltas[rows])
        return hits

    def _frames(self, file: ManifestFile) -> dict[Content, FrameRef]:
        try:
            return {frame.content: frame for frame in self._catalog.load_file(file).frames()}
        except (PackhorseError, FileNotFoundError):
            return {}


def distinct(prints: Column) -> Column:
    """The fingerprints in order, each once."""
    # Not np.unique, which imports more of NumPy at its first call.
    ordered = np.sort(prints)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if prints.size else prints


def match(prints: Column, wanted: Column) -> tuple[Column, Column]:
    """The rows of `prints` whose fingerprint is wanted, and the place of each in `wanted`.

    Args:
        prints: any fingerprints.
        wanted: the wanted fingerprints, in order.
    """
    # Usually few are wanted, and a look at the low bits rules out nearly all others.
    may_be = np.zeros(1 << _FILTER_NBITS, bool)
    may_be[wanted & ((1 << _FILTER_NBITS) - 1)] = True
    rows = np.flatnonzero(may_be[prints & ((1 << _FILTER_NBITS) - 1)])
    places = np.minimum(np.searchsorted(wanted, prints[rows]), wanted.size - 1)
    is_equal = wanted[places] == prints[rows]
    return rows[is_equal], places[is_equal]
