"""Grows the tree of cells from the root down, and appends what it finds to tensors of a shelf.

Work waits on a stack. An item is a run of points, which is one of three things:
- points that fit into memory: they are read once, and the whole tree below is made of them;
- more points than that: a sample of them is cut into pieces (`cells.cut_sample`), and all points go
  to the tensor of their piece, in their old order. So X is written once, in the order of the
  pieces, and every cell above them is a run of whole pieces. Pieces that are still too large are
  cut again;
- a cell above pieces: its points are read piece by piece, in two passes.

Each item, and each part of a long one, is one transaction, which also stores the stack. A fit that
was killed goes on from there. All that decides about the arithmetic is in `Plan`: the sizes of
blocks and pieces depend on the budget, and never on where the points come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from packhorse.learn.bases import (
    Array,
    Blocks,
    Spectrum,
    energy_of,
    exact_spectrum,
    leading_directions,
    wavelets_of,
)
from packhorse.learn.cells import Cuts, Plane, cut_sample, leaves_of, route, split_threshold
from packhorse.learn.nodes import Node, NodeTensors
from packhorse.learn.tensors import Rows, Tensors, checked_rows

__all__ = ["Growth", "Item", "Plan"]

_OVERSAMPLING = 8
_EXACT = 128  # fewer points or columns than this have all their directions computed exactly
_PASSES_IN_MEMORY = 3
_PASSES_STREAMED = 2
_SHARES = 5  # of the budget: points read, 1.5; the same centred, 1.5; products and the tree, 2
_MAX_LOADED = 1.5  # pieces
_MAX_PIECES = 64
_BLOCK_NBYTES = 1 << 20
_LEAST_PIECE = 64  # rows
_FIRST_DIRECTIONS = 16  # to try where their number is chosen by energy
_CUTTING, _DIRECTIONS = 1, 2  # what random numbers are for

Item: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a fit depends on, besides the points.

    Attributes:
        width: columns of X.
        dtype: to compute in.
        n_components: the most directions of a cell; None for no limit.
        energy: the share of a cell's energy that its directions keep; 1 for all.
        tolerance: the root mean square distance at which a cell is good enough.
        leaf_size: cells of at most so many points are not cut.
        max_scale: cells of this scale are not cut.
        seed: of all random numbers.
        memory_nbytes: the budget.
    """

    width: int
    dtype: np.dtype[Any]
    n_components: int | None
    energy: float
    tolerance: float
    leaf_size: int
    max_scale: int
    seed: int
    memory_nbytes: int

    @property
    def piece_rows(self) -> int:
        """Rows of a piece, and of a sample."""
        fitting = self.memory_nbytes // _SHARES // (self.width * self.dtype.itemsize)
        return max(fitting, _LEAST_PIECE)

    @property
    def block_rows(self) -> int:
        """Rows that are read at a time."""
        return max(min(self.piece_rows, _BLOCK_NBYTES // (self.width * self.dtype.itemsize)), 1)

    def rng(self, *key: int) -> np.random.Generator:
        """Random numbers for one purpose."""
        return np.random.default_rng([self.seed, *key])


@dataclass
class Growth:
    """One fit.

    Attributes:
        plan: what it depends on.
        source: the points.
        shelf: where tensors are kept.
        name: the beginning of their names.
        stack: the items that wait, the next one last.
        n_parts: how many tensors of pieces there were.
        nodes: the cells that were found.
    """

    plan: Plan
    source: Rows
    shelf: Tensors
    name: str
    stack: list[Item] = field(default_factory=list)
    n_parts: int = 0
    nodes: NodeTensors = field(init=False)

    def resume(self, plan: Plan, stack: list[Item], n_parts: int) -> None:
        """Takes up a fit that was interrupted.

        Args:
            plan: what it depends on.
            stack: the items that wait.
            n_parts: how many tensors of pieces there were.
        """
        self.plan, self.stack, self.n_parts = plan, stack, n_parts
        self.nodes = NodeTensors(self.shelf, self.name)

    def begin(self) -> None:
        """Makes the tensors, and one item of all points."""
        self.nodes = NodeTensors.new(self.shelf, self.name, self.plan.width, self.plan.dtype)
        whole: Cuts = {"leaf": 0, "part": None, "n": self.source.shape[0]}
        self.stack = [{"parent": -1, "scale": 0, "cuts": whole}]

    def step(self) -> None:
        """Does the next item, or a part of it. The caller puts a transaction around it."""
        item = self.stack[-1]
        if "pieces" in item:
            self._move_points(item)
        elif "low" in item["cuts"] or item["cuts"].get("is_whole"):
            self._add_streamed(item)
        elif self._is_loaded(item["cuts"]["n"]):
            self._add_loaded(item)
        else:
            self._begin_pieces(item)

    def _is_loaded(self, n_points: int) -> bool:
        return n_points <= _MAX_LOADED * self.plan.piece_rows

    def _part(self, leaf: Cuts) -> Rows:
        """The points of a piece."""
        if leaf["part"] is None:
            return self.source
        return self.shelf[self._part_name(leaf["part"])]  # type: ignore[no-any-return]

    def _part_name(self, number: int) -> str:
        return f"{self.name}/part-{number}"

    def _read(self, leaf: Cuts, start: int, stop: int) -> Array:
        return checked_rows(self._part(leaf)[start:stop], start, self.plan.dtype)

    def _drop(self, leaf: Cuts) -> None:
        if leaf["part"] is not None:
            del self.shelf[self._part_name(leaf["part"])]

    # A cell that is cut into pieces.

    def _begin_pieces(self, item: Item) -> None:
        """Cuts a sample, and makes an empty tensor for each piece."""
        leaf, plan = item["cuts"], self.plan
        rng = plan.rng(_CUTTING, len(self.nodes))
        chosen = np.sort(rng.choice(leaf["n"], plan.piece_rows, replace=False))
        sample = checked_rows(self._part(leaf)[chosen], chosen, plan.dtype)
        cuts = cut_sample(sample, _MAX_PIECES, plan.piece_rows / leaf["n"], rng)
        pieces = leaves_of(cuts)
        if len(pieces) == 1:  # points that are all equal, or nearly all
            leaf["is_whole"] = True
            return
        for piece in pieces:
            piece.update(part=self.n_parts, n=0, sum=np.zeros(plan.width))
            self.shelf.create(self._part_name(self.n_parts), (0, plan.width), plan.dtype)
            self.n_parts += 1
        item.update(pieces=cuts, done=0)

    def _move_points(self, item: Item) -> None:
        """Appends points to the tensors of their pieces, as many as a piece has at once."""
        leaf, plan = item["cuts"], self.plan
        pieces = leaves_of(item["pieces"])
        waiting: list[list[Array]] = [[] for _ in pieces]
        n_waiting = 0
        while item["done"] < leaf["n"] and n_waiting < plan.piece_rows:
            block = self._read(leaf, item["done"], item["done"] + plan.block_rows)
            numbers = route(item["pieces"], block)
            for number in np.unique(numbers):
                rows, piece = block[numbers == number], pieces[number]
                piece["sum"] = piece["sum"] + rows.sum(axis=0, dtype=np.float64)
                waiting[number].append(rows)
            item["done"] += len(block)
            n_waiting += len(block)
        for piece, runs in zip(pieces, waiting, strict=True):
            if runs:
                rows = np.concatenate(runs)
                self.shelf[self._part_name(piece["part"])].append(rows)
                piece["n"] += len(rows)
        if item["done"] >= leaf["n"]:
            self._drop(leaf)
            item["cuts"] = self._without_empty(item.pop("pieces"))
            del item["done"]

    def _without_empty(self, cuts: Cuts) -> Cuts:
        """The tree without pieces that got no point: rounding can keep the one point of the sample
        out of a piece."""
        if "low" not in cuts:
            if not cuts["n"]:
                self._drop(cuts)
            return cuts
        low, high = self._without_empty(cuts["low"]), self._without_empty(cuts["high"])
        if not _n_points(low):
            return high
        return cuts | {"low": low, "high": high} if _n_points(high) else low

    # A cell above pieces, and a piece that cannot be cut.

    def _add_streamed(self, item: Item) -> None:
        """Adds the node of a cell whose points are not in memory; its halves wait."""
        cuts, scale = item["cuts"], item["scale"]
        pieces = leaves_of(cuts)
        centre = self._mean(pieces)
        blocks = partial(self._centred, pieces, centre)
        parent = self.nodes.read(item["parent"]) if item["parent"] >= 0 else None
        number = len(self.nodes)
        node = self._node(number, parent, item, centre, _n_points(cuts), blocks, None)
        is_leaf = "low" not in cuts or self._is_good(node, scale)
        if not is_leaf:
            node = node._replace(plane=Plane(cuts["direction"], float(cuts["threshold"])))
        self.nodes.append([node])
        self.stack.pop()
        if is_leaf:
            for piece in pieces:
                self._drop(piece)
            return
        for half in ("high", "low"):
            self.stack.append({"parent": number, "scale": scale + 1, "cuts": cuts[half]})

    def _mean(self, pieces: list[Cuts]) -> Array:
        total, n_points = np.zeros(self.plan.width), 0
        for piece in pieces:
            if "sum" not in piece:
                rows = (self._read(piece, *run) for run in self._runs(piece))
                piece["sum"] = sum(r.sum(axis=0, dtype=np.float64) for r in rows)
            total += piece["sum"]
            n_points += piece["n"]
        return (total / n_points).astype(self.plan.dtype)

    def _runs(self, piece: Cuts) -> Iterator[tuple[int, int]]:
        """The blocks of a piece."""
        step = self.plan.block_rows
        for start in range(0, piece["n"], step):
            yield start, min(start + step, piece["n"])

    def _centred(self, pieces: list[Cuts], centre: Array) -> Iterator[Array]:
        for piece in pieces:
            for run in self._runs(piece):
                yield self._read(piece, *run) - centre

    # Cells in memory.

    def _add_loaded(self, item: Item) -> None:
        """Adds the nodes of a cell that fits into memory, and of all below it."""
        leaf = item["cuts"]
        points = self._read(leaf, 0, leaf["n"])
        parent = self.nodes.read(item["parent"]) if item["parent"] >= 0 else None
        found: list[Node] = []
        self._add_below(points, np.arange(len(points)), parent, item, found)
        self.nodes.append(found)
        self._drop(leaf)
        self.stack.pop()

    def _add_below(
        self,
        points: Array,
        members: Array,
        parent: tuple[Array, Array] | None,
        item: Item,
        found: list[Node],
    ) -> None:
        """Adds the node of the points that `members` names, and of all below it, to `found`."""
        number = len(self.nodes) + len(found)
        node, low = self._loaded(points[members], number, parent, item)
        found.append(node)
        if low is None:
            return
        known = (node.centre, node.basis)
        below = {"parent": number, "scale": item["scale"] + 1}
        for half in (members[low], members[~low]):
            self._add_below(points, half, known, below, found)

    def _loaded(
        self, points: Array, number: int, parent: tuple[Array, Array] | None, item: Item
    ) -> tuple[Node, Array | None]:
        """The node of points, which are overwritten; and which of them are on the low side."""
        centre = points.mean(axis=0, dtype=np.float64).astype(self.plan.dtype)
        points -= centre
        node = self._node(number, parent, item, centre, len(points), lambda: [points], points)
        if self._is_good(node, item["scale"]):
            return node, None
        direction = node.basis[0]
        products = points @ direction
        threshold = split_threshold(products)
        if threshold is None:
            return node, None
        shift = float(np.dot(centre.astype(np.float64), direction.astype(np.float64)))
        return node._replace(plane=Plane(direction, threshold + shift)), products <= threshold

    # One node.

    def _is_good(self, node: Node, scale: int) -> bool:
        """Whether a cell is not to be cut."""
        return (
            node.n_points <= self.plan.leaf_size
            or scale >= self.plan.max_scale
            or node.rms <= self.plan.tolerance
            or not len(node.basis)
        )

    def _node(
        self,
        number: int,
        parent: tuple[Array, Array] | None,
        item: Item,
        centre: Array,
        n_points: int,
        blocks: Blocks,
        centred: Array | None,
    ) -> Node:
        """The node of a cell, without its plane."""
        known = parent[1] if parent else np.empty((0, self.plan.width), self.plan.dtype)
        spectrum = self._spectrum(number, known, n_points, blocks, centred)
        n_kept = min(self._n_enough(spectrum, n_points), self._most(n_points))
        basis = np.ascontiguousarray(spectrum.directions[:n_kept])
        rest = max(spectrum.total - float(spectrum.energies[:n_kept].sum()), 0.0)
        if centred is not None:  # without the rounding of that difference
            rest = energy_of(centred - (centred @ basis.T) @ basis)
        wavelets, translation = basis, centre
        if parent is not None:
            wavelets = wavelets_of(parent[1], basis)
            translation = centre - parent[0]
            translation = translation - (translation @ parent[1].T) @ parent[1]
        rms = float(np.sqrt(rest / n_points))
        return Node(
            item["parent"], item["scale"], n_points, rms, centre, basis, wavelets, translation, None
        )

    def _spectrum(
        self, number: int, known: Array, n_points: int, blocks: Blocks, centred: Array | None
    ) -> Spectrum:
        """The leading directions of a cell, at least as many as are kept.

        Args:
            number: of the cell.
            known: directions that are probably near.
            n_points: of the cell.
            blocks: its centred points.
            centred: the same, if they are in memory.
        """
        width, most = self.plan.width, self._most(n_points)
        asked = most if self.plan.energy == 1 else min(most, max(len(known), _FIRST_DIRECTIONS))
        rng = self.plan.rng(_DIRECTIONS, number)
        while True:
            tried = min(asked + _OVERSAMPLING, n_points, width)
            if centred is not None and min(n_points, width) <= max(_EXACT, tried * 5 // 4):
                return exact_spectrum(centred, most)
            extra = rng.standard_normal((max(tried - len(known), 0), width))
            start = np.concatenate([known[:tried], extra.astype(self.plan.dtype)])
            passes = _PASSES_STREAMED if centred is None else _PASSES_IN_MEMORY
            spectrum = leading_directions(blocks, start, passes)
            if asked == most or self._n_enough(spectrum, n_points) <= asked:
                return spectrum
            known, asked = spectrum.directions, min(2 * asked, most)

    def _most(self, n_points: int) -> int:
        """The most directions that a cell can have: centred points have one less than points."""
        limit = min(n_points - 1, self.plan.width)
        return limit if self.plan.n_components is None else min(limit, self.plan.n_components)

    def _n_enough(self, spectrum: Spectrum, n_points: int) -> int:
        """How many directions are enough; more than there are if all of them are not."""
        enough = max((1 - self.plan.energy) * spectrum.total, self.plan.tolerance**2 * n_points)
        rest = spectrum.total - np.concatenate([[0.0], np.cumsum(spectrum.energies)])
        below = np.flatnonzero(rest <= enough)
        return int(below[0]) if len(below) else len(rest)


def _n_points(cuts: Cuts) -> int:
    return sum(piece["n"] for piece in leaves_of(cuts))
