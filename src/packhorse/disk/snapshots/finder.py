"""Finding tensors that the store has already, among those of all its snapshots.

The newest manifest is looked at first. What it does not have is looked for by fingerprint, and what
those find is read in the manifest itself, so that nothing is built on the word of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.index import Index
from packhorse.disk.snapshots.manifest import Content, FrameRef, Manifest
from packhorse.disk.snapshots.names import ManifestFile
from packhorse.disk.snapshots.records import Column, fingerprint
from packhorse.errors import PackhorseError

__all__ = ["Finder", "distinct", "match"]

_FILTER_NBITS = 16


class _Hits(NamedTuple):
    """What a manifest seems to have of what is wanted."""

    wanted: Column  # numbers
    n_deltas: Column


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
        is_open = np.ones(len(new), bool)
        while hits:
            path, best = _choose(hits, is_open, list(self._files))
            if path is None:
                return
            frames = self._frames(self._files[path])
            for k in best:
                frame = frames.get(new[k])
                if frame is not None:
                    self._found[new[k]] = frame
                    is_open[k] = False
            del hits[path]

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


def _choose(
    hits: dict[str, _Hits], is_open: Column, paths: Sequence[str]
) -> tuple[str | None, Column]:
    """The manifest that has most of what is still wanted with the fewest deltas there are; the
    newest of several."""
    fewest = np.full(is_open.size, 255, np.uint8)
    for each in hits.values():
        np.minimum.at(fewest, each.wanted, each.n_deltas)
    path, best = None, np.empty(0, np.intp)
    for other in reversed(paths):
        if other in hits:
            found = hits[other]
            is_best = is_open[found.wanted] & (found.n_deltas == fewest[found.wanted])
            if np.count_nonzero(is_best) > best.size:
                path, best = other, found.wanted[is_best]
    return path, best
