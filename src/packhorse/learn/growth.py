"""Grows the tree of cells from the root down, and writes what it finds to tensors of a shelf.

Work waits on a stack. An item is a run of points, which is one of three things:
- points that fit into memory: they are read once, and the whole tree below is made of them;
- more points than that: a sample of them is cut into pieces (`cells.cut_sample`), and all points go
  to the tensor of their piece, in their old order. So X is written once, in the order of the
  pieces, and every cell above them is a run of whole pieces. Pieces that are still too large are
  cut again;
- a cell above pieces: the bases of all such cells, or of as many as there is memory for, are found
  together, in two passes over the pieces (`streaming`).

Each step is one transaction, and most of them keep the stack. A fit that was killed goes on from
there; what was written after that is cut off. All that decides about the arithmetic is in `Plan`:
the sizes of blocks and pieces depend on the budget, and never on where the points come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from packhorse.learn.bases import (
    Array,
    Spectrum,
    energy_of,
    exact_spectrum,
    leading_directions,
    wavelets_of,
)
from packhorse.learn.cells import Cuts, Plane, Router, cut_sample, leaves_of, split_threshold
from packhorse.learn.nodes import Node, NodeTensors
from packhorse.learn.notes import Notes
from packhorse.learn.streaming import Piece, WideCell, nbytes_of, spectra_of
from packhorse.learn.tensors import Rows, Tensors, as_arrays, blocks_of, checked_rows, chunk_rows
from packhorse.learn.writing import Writer

__all__ = ["Growth", "Item", "Plan"]

_OVERSAMPLING = 8
_EXACT = 128  # fewer points or columns than this have all their directions computed exactly
_PASSES_IN_MEMORY = 3
_PASSES_STREAMED = 2
_PASSES_OF_SAMPLE = 2
# Of the budget. Points in memory: read, 1.5; the same centred, 1.5; products, 1; nodes, found and
# being written, 1. Cells above pieces: a sample, 1; the cells, 3.5; blocks of points, 0.5. Points
# that are moved: read, 1.2; in order, 1.2; being written, 1.2; until chunks are full, 1.4 at most.
_SHARES = 5
_MAX_LOADED = 1.5  # pieces
_MOVED = 1.2
_FILLING = 1.4
_CELLS_SHARES = 3.5
_MAX_PIECES = 128
_BLOCK_NBYTES = 1 << 20
_PIECE_BLOCKS = 4  # at least
_MAX_FOUND_NBYTES = 1 << 23  # of nodes that wait to be written
_MOVES_KEPT = 16  # after so many steps a fit can go on from there
_LEAST_CHUNK_NBYTES, _MOST_CHUNK_NBYTES = 1 << 12, 1 << 18
_LEAST_PIECE = 64  # rows
_FIRST_DIRECTIONS = 16  # to try where their number is chosen by energy
_CUTTING, _DIRECTIONS, _AHEAD = 1, 2, 3  # what random numbers are for

# An item has "cuts", the "scale" of their top, and the number and the known centre and basis of its
# "parent". While points are moved, it has the tree of their "pieces", and how many are "done".
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
        """Rows that are read at a time: whole chunks of a piece, if there is room for one."""
        fitting = _BLOCK_NBYTES // (self.width * self.dtype.itemsize)
        rows = max(min(self.piece_rows // _PIECE_BLOCKS, fitting), 1)
        chunk = chunk_rows(self.width, self.dtype, self.chunk_nbytes)
        return rows - rows % chunk if rows > chunk else rows

    @property
    def found_nbytes(self) -> int:
        """Bytes of nodes that wait to be written."""
        return min(_MAX_FOUND_NBYTES, self.memory_nbytes // (2 * _SHARES))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk of a piece: of each piece, one may wait to be full."""
        fitting = int(_FILLING * self.memory_nbytes) // _SHARES // _MAX_PIECES
        return min(max(fitting, _LEAST_CHUNK_NBYTES), _MOST_CHUNK_NBYTES)

    def rng(self, *key: int) -> np.random.Generator:
        """Random numbers for one purpose."""
        return np.random.default_rng([self.seed, *key])


@dataclass
class Growth:
    """One fit.

    Attributes:
        plan: what it depends on.
        source: the points.
        shelf: where tensors are read.
        writer: what writes them.
        name: the beginning of their names.
        stack: the items that wait, the next one last.
        n_parts: how many tensors of pieces there were.
        nodes: the cells that were found.
        notes: what a fit that goes on needs besides.
    """

    plan: Plan
    source: Rows
    shelf: Tensors
    writer: Writer
    name: str
    stack: list[Item] = field(default_factory=list)
    n_parts: int = 0
    nodes: NodeTensors = field(init=False)
    notes: Notes = field(init=False)
    _moving: Generator[Array] | None = field(default=None, init=False)
    _router: Router = field(init=False)
    _has_moved: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.nodes = NodeTensors(self.name, self.writer)
        self.notes = Notes(self.name, self.writer)

    def begin(self) -> None:
        """Makes the tensors, and one item of all points."""
        self.nodes.create(self.plan.width, self.plan.dtype)
        self.notes.create(self.plan.width, self.plan.dtype)
        whole: Cuts = {"leaf": 0, "part": None, "n": self.source.shape[0]}
        self.stack = [{"parent": -1, "known": None, "scale": 0, "cuts": whole}]

    def stop(self) -> None:
        """Ends what goes on from step to step; call it when a fit ends before its time."""
        if self._moving is not None:
            self._moving.close()
        self._moving = None

    def step(self) -> bool:
        """Does the next item, or a part of it. The caller commits.

        Returns:
            Whether a fit can go on from here, once the caller has kept the stack.
        """
        item = self.stack[-1]
        if "pieces" in item:
            return self._move_points(item)
        if "low" in item["cuts"] or item["cuts"].get("is_whole"):
            self._look_ahead(item["cuts"])
        elif self._is_loaded(item["cuts"]["n"]):
            self._add_loaded(item)
        else:
            self._begin_pieces(item)
        while self.stack and "basis" in self.stack[-1]["cuts"]:
            self._add_known(self.stack[-1])
        return True

    def _is_loaded(self, n_points: int) -> bool:
        return n_points <= _MAX_LOADED * self.plan.piece_rows

    def _part(self, leaf: Cuts) -> Rows:
        """The points of a piece."""
        if leaf["part"] is None:
            return self.source
        return as_arrays(self.shelf[self._part_name(leaf["part"])])  # type: ignore[no-any-return]

    def _part_name(self, number: int) -> str:
        return f"{self.name}/part-{number}"

    def _read(self, leaf: Cuts, stop: int) -> Array:
        if leaf["part"] is not None:  # its points were checked when they were moved
            return np.asarray(self._part(leaf)[:stop])
        return checked_rows(self.source[:stop], 0, self.plan.dtype)

    def _wait_for_parts(self) -> None:
        """Waits until the points that were moved can be read."""
        if self._has_moved:
            self.writer.wait()
        self._has_moved = False

    def _blocks(self, leaf: Cuts, first: int = 0) -> Generator[Array]:
        dtype = self.plan.dtype if leaf["part"] is None else None
        return blocks_of(self._part(leaf), first, self.plan.block_rows, dtype)

    def _drop(self, leaf: Cuts) -> None:
        if leaf["part"] is not None:
            self.writer.delete(self._part_name(leaf["part"]))

    # A cell that is cut into pieces.

    def _begin_pieces(self, item: Item) -> None:
        """Cuts a sample, and makes an empty tensor for each piece."""
        self._wait_for_parts()
        leaf, plan = item["cuts"], self.plan
        rng = plan.rng(_CUTTING, len(self.nodes))
        chosen = np.sort(rng.choice(leaf["n"], plan.piece_rows, replace=False))
        sample = checked_rows(self._part(leaf)[chosen], chosen, plan.dtype)
        cuts = cut_sample(sample, _MAX_PIECES, 0.75 * plan.piece_rows / leaf["n"], rng)
        pieces = leaves_of(cuts)
        if len(pieces) == 1:  # points that are all equal, or nearly all
            leaf["is_whole"] = True
            return
        for piece in pieces:
            piece.update(part=self.n_parts, n=0, sum=np.zeros(plan.width))
            name = self._part_name(self.n_parts)
            self.writer.create(name, plan.width, plan.dtype, plan.chunk_nbytes)
            self.n_parts += 1
        self.notes.keep_cuts(cuts)
        item.update(pieces=cuts, done=0)

    def _move_points(self, item: Item) -> bool:
        """Appends points to the tensors of their pieces, as many as a piece has at once. Returns
        whether a fit can go on from here."""
        leaf, pieces = item["cuts"], leaves_of(item["pieces"])
        if self._moving is None:
            self._moving = self._blocks(leaf, item["done"])
            self._router = Router(item["pieces"])
        blocks: list[Array] = []
        numbers: list[Array] = []
        n_blocks = max(1, int(_MOVED * self.plan.piece_rows) // self.plan.block_rows)
        while item["done"] < leaf["n"] and len(blocks) < n_blocks:
            blocks.append(next(self._moving))
            numbers.append(self._router.route(blocks[-1]))
            item["done"] += len(blocks[-1])
        for number, rows in _by_piece(blocks, np.concatenate(numbers)):
            piece = pieces[number]
            self.writer.append_some(self._part_name(piece["part"]), rows)
            piece["sum"] = piece["sum"] + rows.sum(axis=0, dtype=np.float64)
            piece["n"] += len(rows)
        item["moves"] = item.get("moves", 0) + 1
        is_done = item["done"] >= leaf["n"]
        if not is_done and item["moves"] % _MOVES_KEPT:
            return False
        self.writer.settle()
        self.notes.keep_sums(pieces)
        if is_done:
            self._moving, self._has_moved = None, True
            self._drop(leaf)
            item["cuts"] = self._without_empty(item.pop("pieces"))
            del item["done"], item["moves"]
        return True

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

    # Cells above pieces, and pieces that cannot be cut.

    def _look_ahead(self, top: Cuts) -> None:
        """Finds the bases of a cell above pieces, and of as many below it as there is memory for.
        Where a share of energy decides, some of them may need more directions; they wait."""
        self._wait_for_parts()
        cells = self._group(top)
        leaves = leaves_of(top)
        pieces = [self._piece(leaf) for leaf in leaves]
        heads = [self._read(leaf, self._head_rows(leaf, len(leaves))) for leaf in leaves]
        wide = [self._wide(cuts, leaves, heads) for cuts in cells]
        del heads
        spectra = spectra_of(pieces, wide, _PASSES_STREAMED)
        for cuts, spectrum in zip(cells, spectra, strict=True):
            n_points, asked = _n_points(cuts), self._asked(cuts)
            most, enough = self._most(n_points), self._n_enough(spectrum, n_points)
            if asked < most and enough > asked:
                cuts["asked"] = min(2 * asked, most)
                continue
            n_kept = min(enough, most)
            rest = max(spectrum.total - float(spectrum.energies[:n_kept].sum()), 0.0)
            cuts["rms"] = float(np.sqrt(rest / n_points))
            cuts["basis"] = np.ascontiguousarray(spectrum.directions[:n_kept])
            self.notes.keep_basis(cuts)

    def _group(self, top: Cuts) -> list[Cuts]:
        """The cell, and those below it, from coarse to fine, while there is memory."""
        left = self.plan.memory_nbytes / _SHARES * _CELLS_SHARES
        found: list[Cuts] = []
        waiting = deque([top])
        while waiting:
            cuts = waiting.popleft()
            n = min(self._asked(cuts) + _OVERSAMPLING, self.plan.width)
            left -= nbytes_of(n, self.plan.width, self.plan.dtype.itemsize)
            if left < 0 and found:
                break
            found.append(cuts)
            below = [cuts[half] for half in ("low", "high") if half in cuts]
            waiting += [half for half in below if "low" in half and "basis" not in half]
        return found

    def _asked(self, cuts: Cuts) -> int:
        """How many directions a cell above pieces tries to do with."""
        most = self._most(_n_points(cuts))
        first = most if self.plan.energy == 1 else min(most, _FIRST_DIRECTIONS)
        return int(cuts.get("asked", first))

    def _piece(self, leaf: Cuts) -> Piece:
        """A piece as the passes over all points need it."""
        return Piece(self._mean([leaf]), leaf["n"], partial(self._blocks, leaf))

    def _head_rows(self, leaf: Cuts, n_pieces: int) -> int:
        """How many of its first points a piece adds to a sample."""
        return min(int(leaf["n"]), -(-self.plan.piece_rows // n_pieces))

    def _wide(self, cuts: Cuts, leaves: list[Cuts], heads: list[Array]) -> WideCell:
        """A cell above pieces, with the leading directions of a sample to begin with."""
        own = leaves_of(cuts)
        first = next(i for i, leaf in enumerate(leaves) if leaf is own[0])
        inside = range(first, first + len(own))
        centre = self._mean(own)
        sample = np.concatenate([heads[number] for number in inside])
        sample -= centre
        width, n_points = self.plan.width, _n_points(cuts)
        tried = min(self._asked(cuts) + _OVERSAMPLING, n_points, width)
        rng = self.plan.rng(_AHEAD, 1 + (own[0]["part"] or 0), len(own), tried)
        start = rng.standard_normal((tried, width)).astype(self.plan.dtype)
        if len(sample) > tried:
            found = leading_directions(lambda: [sample], start, _PASSES_OF_SAMPLE).directions
            start[: len(found)] = found
        return WideCell(centre, inside, start)

    def _mean(self, pieces: list[Cuts]) -> Array:
        total, n_points = np.zeros(self.plan.width), 0
        for piece in pieces:
            if "sum" not in piece:
                piece["sum"] = sum(b.sum(axis=0, dtype=np.float64) for b in self._blocks(piece))
            total += piece["sum"]
            n_points += piece["n"]
        return (total / n_points).astype(self.plan.dtype)

    def _add_known(self, item: Item) -> None:
        """Adds the node of a cell above pieces; its halves wait."""
        cuts, scale = item["cuts"], item["scale"]
        pieces = leaves_of(cuts)
        number = len(self.nodes)
        node = self._node(item, self._mean(pieces), _n_points(cuts), cuts["basis"], cuts["rms"])
        is_leaf = "low" not in cuts or self._is_good(node, scale)
        if not is_leaf:
            node = node._replace(plane=Plane(cuts["direction"], float(cuts["threshold"])))
        self.nodes.append([node])
        self.stack.pop()
        if is_leaf:
            for piece in pieces:
                self._drop(piece)
            return
        below = {"parent": number, "known": (node.centre, node.basis), "scale": scale + 1}
        self.stack += [below | {"cuts": cuts[half]} for half in ("high", "low")]

    # Cells in memory.

    def _add_loaded(self, item: Item) -> None:
        """Adds the nodes of a cell that fits into memory, and of all below it."""
        self._wait_for_parts()
        leaf = item["cuts"]
        points = self._read(leaf, leaf["n"])
        found: list[Node] = []
        self._add_below(points, np.arange(len(points)), item, found)
        self._write_found(found)
        self._drop(leaf)
        self.stack.pop()

    def _add_below(self, points: Array, members: Array, item: Item, found: list[Node]) -> None:
        """Adds the node of the points that `members` names, and of all below it, to `found`."""
        number = len(self.nodes) + len(found)
        node, low = self._loaded(points[members], number, item)
        found.append(node)
        if sum(n.basis.nbytes + n.wavelets.nbytes for n in found) > self.plan.found_nbytes:
            self._write_found(found)
            self.writer.commit()  # without the stack: a fit that goes on removes these nodes
        if low is None:
            return
        below = {"parent": number, "known": (node.centre, node.basis), "scale": item["scale"] + 1}
        for half in (members[low], members[~low]):
            self._add_below(points, half, below, found)

    def _write_found(self, found: list[Node]) -> None:
        if found:
            self.nodes.append(found)
        found.clear()

    def _loaded(self, points: Array, number: int, item: Item) -> tuple[Node, Array | None]:
        """The node of points, which are overwritten; and which of them are on the low side."""
        centre = points.mean(axis=0, dtype=np.float64).astype(self.plan.dtype)
        points -= centre
        n_points = len(points)
        spectrum = self._spectrum(number, item["known"], points)
        n_kept = min(self._n_enough(spectrum, n_points), self._most(n_points))
        basis = np.ascontiguousarray(spectrum.directions[:n_kept])
        products = points @ basis.T
        rest = energy_of(points - products @ basis)
        node = self._node(item, centre, n_points, basis, float(np.sqrt(rest / n_points)))
        if self._is_good(node, item["scale"]):
            return node, None
        direction, along = basis[0], products[:, 0]
        threshold = split_threshold(along)
        if threshold is None:
            return node, None
        shift = float(np.dot(centre.astype(np.float64), direction.astype(np.float64)))
        return node._replace(plane=Plane(direction, threshold + shift)), along <= threshold

    # One node.

    def _is_good(self, node: Node, scale: int) -> bool:
        """Whether a cell is not to be cut."""
        return (
            node.n_points <= self.plan.leaf_size
            or scale >= self.plan.max_scale
            or node.rms <= self.plan.tolerance
            or not len(node.basis)
        )

    def _node(self, item: Item, centre: Array, n_points: int, basis: Array, rms: float) -> Node:
        """The node of a cell, without its plane."""
        wavelets, translation = basis, centre
        if item["known"] is not None:
            parent_centre, parent_basis = item["known"]
            wavelets = wavelets_of(parent_basis, basis)
            translation = centre - parent_centre
            translation = translation - (translation @ parent_basis.T) @ parent_basis
        return Node(
            item["parent"], item["scale"], n_points, rms, centre, basis, wavelets, translation, None
        )

    def _spectrum(self, number: int, parent: tuple[Array, Array] | None, points: Array) -> Spectrum:
        """The leading directions of centred points, at least as many as are kept.

        Args:
            number: of the cell.
            parent: centre and basis of its parent.
            points: the points.
        """
        n_points, width = points.shape
        most = self._most(n_points)
        known = parent[1] if parent else np.empty((0, width), self.plan.dtype)
        asked = most if self.plan.energy == 1 else min(most, max(len(known), _FIRST_DIRECTIONS))
        rng = self.plan.rng(_DIRECTIONS, number)
        while True:
            tried = min(asked + _OVERSAMPLING, n_points, width)
            if min(n_points, width) <= max(_EXACT, tried * 5 // 4):
                return exact_spectrum(points, most)
            extra = rng.standard_normal((max(tried - len(known), 0), width))
            start = np.concatenate([known[:tried], extra.astype(self.plan.dtype)])
            spectrum = leading_directions(lambda: [points], start, _PASSES_IN_MEMORY)
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


def _by_piece(blocks: list[Array], numbers: Array) -> Iterator[tuple[int, Array]]:
    """The rows of each piece, in their order. The blocks are removed from the list."""
    order = np.argsort(numbers, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    rows = np.empty((len(order), blocks[0].shape[1]), blocks[0].dtype)
    start = 0
    while blocks:
        block = blocks.pop(0)
        rows[places[start : start + len(block)]] = block
        start += len(block)
    found, starts = np.unique(numbers[order], return_index=True)
    for number, run in zip(found, np.split(rows, starts[1:]), strict=True):
        yield int(number), run


def _n_points(cuts: Cuts) -> int:
    return sum(piece["n"] for piece in leaves_of(cuts))
