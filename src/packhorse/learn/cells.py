"""Nested cells: where a cell is cut in two, and which cell a point belongs to.

A cell is cut by a plane across its direction of greatest energy. The place of the plane is the best
for two means along that direction, so that clusters are kept whole; each side gets at least a
quarter of the points, so that the tree stays shallow.

A cell too large for memory is cut into many at once: a sample of its points is cut as above, again
and again, and the planes then send every point to its place in one pass (`Cuts`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from packhorse.learn.bases import Array, exact_spectrum, leading_directions

__all__ = ["Cuts", "Plane", "Router", "cut_sample", "leaves_of", "split_threshold"]

_SMALLEST_SHARE = 0.25
_PASSES = 4  # over a sample, for its first direction, from random ones
_TRIED = 4  # directions, of which the first is used
_EXACT = 64  # fewer points than this have their directions computed exactly


class Plane(NamedTuple):
    """A point lies on the low side if its product with `direction` is at most `threshold`."""

    direction: Array
    threshold: float


# An inner node has "direction", "threshold", "low" and "high"; a leaf has "leaf", its number. They
# are plain values and arrays, so that a shelf can keep them.
Cuts: TypeAlias = dict[str, Any]


def split_threshold(values: Array) -> float | None:
    """The threshold that parts values best into two means; None if all are equal."""
    ordered = np.sort(values.astype(np.float64))
    n = len(ordered)
    low_sums = np.cumsum(ordered - ordered.mean())[:-1]  # of those below each gap, about the mean
    counts = np.arange(1, n)
    with np.errstate(invalid="ignore"):
        gains = low_sums**2 / (counts * (n - counts))
    gains[ordered[1:] <= ordered[:-1]] = -1.0  # no plane fits between equal values
    least = max(1, int(n * _SMALLEST_SHARE))
    allowed = gains.copy()
    allowed[: least - 1] = allowed[n - least :] = -1.0
    gains = allowed if (allowed >= 0).any() else gains
    if not len(gains) or gains.max() < 0:
        return None
    place = int(np.argmax(gains))
    middle = ordered[place] + (ordered[place + 1] - ordered[place]) / 2
    return float(ordered[place] if middle >= ordered[place + 1] else middle)


def cut_sample(sample: Array, n_leaves: int, share: float, rng: np.random.Generator) -> Cuts:
    """Cuts a sample, always the largest piece next.

    Args:
        sample: points.
        n_leaves: the most pieces.
        share: pieces with at most this share of the sample stay whole.
        rng: for the directions to begin with.
    """
    root: Cuts = {}
    pieces = [(root, np.arange(len(sample)))]
    whole: list[Cuts] = []
    while pieces and len(pieces) + len(whole) < n_leaves:
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i][1]))
        cuts, members = pieces.pop(largest)
        plane = None
        if len(members) > share * len(sample):
            plane = _plane_through(sample[members], rng)
        if plane is None:
            whole.append(cuts)
            continue
        low = sample[members] @ plane.direction <= plane.threshold
        cuts.update(plane._asdict(), low={}, high={})
        pieces += [(cuts["low"], members[low]), (cuts["high"], members[~low])]
    for number, leaf in enumerate(leaves_of(root)):
        leaf["leaf"] = number
    return root


def _plane_through(points: Array, rng: np.random.Generator) -> Plane | None:
    """The plane that cuts points in two; None if it would leave one side empty."""
    centre = points.mean(axis=0, dtype=np.float64).astype(points.dtype)
    centred = points - centre
    if min(points.shape) <= _EXACT:
        spectrum = exact_spectrum(centred, 1)
    else:
        start = rng.standard_normal((min(_TRIED, points.shape[1]), points.shape[1]))
        spectrum = leading_directions(lambda: [centred], start.astype(points.dtype), _PASSES)
    if not len(spectrum.directions):
        return None
    threshold = split_threshold(points @ spectrum.directions[0])
    return None if threshold is None else Plane(spectrum.directions[0], threshold)


def leaves_of(cuts: Cuts) -> list[Cuts]:
    """The leaves, from low to high."""
    if "low" not in cuts:
        return [cuts]
    return leaves_of(cuts["low"]) + leaves_of(cuts["high"])


class Router:
    """Sends points to the leaves of a tree of cuts, many at a time."""

    def __init__(self, cuts: Cuts) -> None:
        """Args:
        cuts: the tree, with a cut at least.
        """
        inner: list[Cuts] = []
        waiting = [cuts]
        while waiting:
            node = waiting.pop()
            if "low" in node:
                inner.append(node)
                waiting += [node["high"], node["low"]]
        numbers = {id(node): i for i, node in enumerate(inner)}
        # Of both halves of each cut: the number of its cut, or ~n for leaf n.
        self._halves = np.array(
            [
                [numbers.get(id(node[half]), ~node[half].get("leaf", 0)) for node in inner]
                for half in ("low", "high")
            ]
        )
        self._directions = np.stack([node["direction"] for node in inner])
        self._thresholds = np.array([node["threshold"] for node in inner])

    def route(self, points: Array) -> Array:
        """The number of the leaf that each point belongs to."""
        is_high = points @ self._directions.T > self._thresholds
        found = np.zeros(len(points), np.int64)
        inside = np.arange(len(points))
        while len(inside):
            at = found[inside]
            found[inside] = self._halves[is_high[inside, at].astype(np.intp), at]
            inside = inside[found[inside] >= 0]
        return ~found
