"""Finding tensors that the store has already, among those of all its snapshots.

The newest manifest is looked at first. What it does not have is looked for by fingerprint, and what
those find is read in the manifest itself, so that nothing is built on the word of the catalogue.
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
    """What a manifest seems to have of what is wanted."""

    wanted: Column  # numbers
    n_deltas: Column


class _Turns:
    """Which manifest is to be read next: the one that has most of what is still wanted with the
    fewest deltas there are; the newest of several.

    What is wanted only gets less, so a manifest is counted anew when its turn seems to have come,
    and no sooner. What its turn did not bring (the catalogue was wrong) is looked for again when
    all others had theirs.
    """

    def __init__(self, hits: dict[str, _Hits], paths: Sequence[str], n_wanted: int) -> None:
        """Args:
        hits: what each manifest seems to have.
        paths: of the manifests, the oldest first.
        n_wanted: how many contents are wanted.
        """
        self._hits = hits
        self._ages = {path: age for age, path in enumerate(reversed(paths))}
        self._is_open = np.ones(n_wanted, bool)
        self._fewest = np.empty(n_wanted, np.uint8)
        self._queue: list[tuple[int, int, str]] = []  # how many at most, less than 0; age; path

    def next(self) -> tuple[str, Column] | None:
        """A manifest that had no turn before, and the numbers of what it is to bring."""
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
        """These are wanted no more."""
        self._is_open[numbers] = False

    def _fill(self) -> bool:
        """Put all in the queue that had no turn; whether there is any."""
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
    """Finds frames by content, for one session of the writer."""

    def __init__(
        self, catalog: Catalog, index: Index, listing: Listing, newest: Manifest | None
    ) -> None:
        self._catalog = catalog
        self._index = index
        self._files = {file.path: file for files in listing.values() for file in files}
        self._found: dict[Content, FrameRef | None] = {}
        if newest is not None:  # the frame with the fewest deltas comes last
            self._found.update((frame.content, frame) for frame in newest.frames())

    def find(self, content: Content) -> FrameRef | None:
        """A frame that decodes to this content, with as few deltas as any."""
        if content not in self._found:
            self.look_up([content])
        return self._found[content]

    def drop(self, content: Content) -> None:
        """Offer this content no more: its frame turned out to be bad."""
        self._found[content] = None

    def look_up(self, contents: Iterable[Content]) -> None:
        """Find many at once, which takes no longer than one."""
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
        """What has these fingerprints, by path of the manifest."""
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
    """Fingerprints in order, each once."""
    # Not np.unique, which imports more of NumPy at its first call.
    ordered = np.sort(prints)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if prints.size else prints


def match(prints: Column, wanted: Column) -> tuple[Column, Column]:
    """Which of some fingerprints are among those wanted, and where there.

    Args:
        prints: any.
        wanted: in order.
    """
    # Few are wanted as a rule, and their low bits tell nearly all others from them.
    may_be = np.zeros(1 << _FILTER_NBITS, bool)
    may_be[wanted & ((1 << _FILTER_NBITS) - 1)] = True
    rows = np.flatnonzero(may_be[prints & ((1 << _FILTER_NBITS) - 1)])
    places = np.minimum(np.searchsorted(wanted, prints[rows]), wanted.size - 1)
    is_equal = wanted[places] == prints[rows]
    return rows[is_equal], places[is_equal]
