"""The cells of a tree, as ragged tensors: one row or a run of rows for each cell.

Cells are numbered as they are found: a cell before its children, and all that is below its low
child before its high child. So the children of a cell follow from the parents alone, and the cells
below it are a run of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from packhorse.learn.bases import Array
from packhorse.learn.cells import Plane
from packhorse.learn.tensors import Shelf, Tensors, as_arrays
from packhorse.learn.writing import Writer

__all__ = ["Node", "NodeTensors", "Nodes", "finished", "read_parent"]

_INTEGERS = ("parent", "scale", "n_points", "n_directions", "n_wavelets", "n_planes")
_FLOATS = ("threshold", "rms")
_MATRICES = ("centres", "translations", "bases", "wavelets", "planes")
_CHUNK_NBYTES = 1 << 18  # rows are written, and mostly read, in long runs
_RAGGED = {"bases": "n_directions", "wavelets": "n_wavelets", "planes": "n_planes"}


class Node(NamedTuple):
    """One cell.

    Attributes:
        parent: the number of its parent; -1 for the root.
        scale: how many cells are above it.
        n_points: points that it was found from.
        rms: the root mean square distance of these from the plane of its basis.
        centre: their mean.
        basis: orthonormal rows, by falling energy.
        wavelets: orthonormal rows, with the span of what the basis adds to that of the parent; for
            the root the basis itself.
        translation: what the centre adds to the parent's, outside the span of the parent's basis.
        plane: what cuts it; None if it is a leaf.
    """

    parent: int
    scale: int
    n_points: int
    rms: float
    centre: Array
    basis: Array
    wavelets: Array
    translation: Array
    plane: Plane | None


class NodeTensors:
    """The tensors of all cells of a fit, which grow."""

    def __init__(self, name: str, writer: Writer) -> None:
        """No cells.

        Args:
            name: the beginning of the names of the tensors.
            writer: what writes them.
        """
        self._writer, self._prefix = writer, f"{name}/nodes/"
        self._count = 0

    def create(self, width: int, dtype: np.dtype[Any]) -> None:
        """Makes the tensors, without rows.

        Args:
            width: columns of X.
            dtype: of directions.
        """
        kinds: dict[str, tuple[int, Any]] = dict.fromkeys(_MATRICES, (width, dtype))
        kinds["integers"] = len(_INTEGERS), np.int64
        kinds["floats"] = len(_FLOATS), np.float64
        for name, (n_columns, kind) in kinds.items():
            self._writer.create(self._prefix + name, n_columns, kind, _CHUNK_NBYTES)

    def go_on(self, shelf: Shelf, count: int) -> None:
        """Goes on after some cells. Those that were written after them are removed.

        Args:
            shelf: where the tensors are.
            count: how many cells there were.
        """
        integers = np.asarray(shelf[f"{self._prefix}integers"][:count])
        columns = dict(zip(_INTEGERS, integers.sum(axis=0).tolist(), strict=True))
        lengths = {name: columns[key] for name, key in _RAGGED.items()}
        for name in ("integers", "floats", *_MATRICES):
            shelf[self._prefix + name].resize(lengths.get(name, count))
        self._count = count

    def __len__(self) -> int:
        """How many cells there are."""
        return self._count

    def append(self, nodes: Sequence[Node]) -> None:
        """Adds cells.

        Args:
            nodes: the next ones.
        """
        integers = [
            (n.parent, n.scale, n.n_points, len(n.basis), len(n.wavelets), n.plane is not None)
            for n in nodes
        ]
        floats = [(n.plane.threshold if n.plane else 0.0, n.rms) for n in nodes]
        self._append("integers", np.array(integers, np.int64))
        self._append("floats", np.array(floats))
        self._append("centres", np.stack([n.centre for n in nodes]))
        self._append("translations", np.stack([n.translation for n in nodes]))
        self._append("bases", np.concatenate([n.basis for n in nodes]))
        self._append("wavelets", np.concatenate([n.wavelets for n in nodes]))
        planes = [n.plane.direction for n in nodes if n.plane]
        if planes:
            self._append("planes", np.stack(planes))
        self._count += len(nodes)

    def _append(self, name: str, rows: Array) -> None:
        if len(rows):
            self._writer.append(self._prefix + name, rows)


def read_parent(shelf: Tensors, name: str, number: int) -> tuple[Array, Array]:
    """The centre and the basis of a cell of a fit that was interrupted.

    Args:
        shelf: where the tensors are.
        name: the beginning of their names.
        number: of the cell.

    Returns:
        A vector, and orthonormal rows.
    """
    counts = np.asarray(shelf[f"{name}/nodes/integers"][: number + 1])
    counts = counts[:, _INTEGERS.index("n_directions")]
    start, stop = int(counts[:-1].sum()), int(counts.sum())
    centre = np.asarray(shelf[f"{name}/nodes/centres"][number])
    return centre, np.asarray(shelf[f"{name}/nodes/bases"][start:stop])


def finished(shelf: Tensors, name: str) -> Nodes:
    """All cells of a fit that is done.

    Args:
        shelf: where the tensors are.
        name: the beginning of their names.

    Returns:
        The cells.
    """
    parts = ("integers", "floats", *_MATRICES)
    tensors = {part: as_arrays(shelf[f"{name}/nodes/{part}"]) for part in parts}
    integers, floats = (np.array(tensors.pop(part)[:]) for part in ("integers", "floats"))
    return Nodes(integers, floats, tensors)


class Nodes:
    """The cells of a tree that is complete."""

    def __init__(self, integers: Array, floats: Array, tensors: dict[str, Any]) -> None:
        """Finds the children of each cell, and the rows of each in the tensors.

        Args:
            integers: a row for each cell.
            floats: a row for each cell.
            tensors: matrices, which stay where they are.
        """
        self._tensors = tensors
        columns = dict(zip(_INTEGERS, integers.T, strict=True))
        self.parent, self.scale, self.n_points = (columns[name] for name in _INTEGERS[:3])
        self.thresholds, self.rms = floats.T
        self.is_leaf = columns["n_planes"] == 0
        self._starts = {
            name: np.concatenate([[0], np.cumsum(columns[key])]) for name, key in _RAGGED.items()
        }
        self.children = np.full((len(integers), 2), -1)
        for number in range(len(integers) - 1, 0, -1):  # the low child comes last, and so stays
            parent = self.parent[number]
            if self.children[parent, 1] < 0:
                self.children[parent, 1] = number
            else:
                self.children[parent, 0] = number
        self.ends = self._ends()

    def _ends(self) -> Array:
        """One more than the greatest number below each cell."""
        ends = np.arange(1, len(self) + 1)
        for number in range(len(self) - 1, 0, -1):
            parent = self.parent[number]
            ends[parent] = max(ends[parent], ends[number])
        return ends

    def __len__(self) -> int:
        """How many cells there are."""
        return len(self.parent)

    @property
    def n_directions(self) -> Array:
        """How many directions the basis of each cell has."""
        return np.diff(self._starts["bases"])

    @property
    def n_wavelets(self) -> Array:
        """How many wavelets each cell has."""
        return np.diff(self._starts["wavelets"])

    def _run(self, name: str, number: int) -> Array:
        start, stop = self._starts[name][number : number + 2]
        return np.asarray(self._tensors[name][start:stop])

    def plane(self, number: int) -> Plane:
        """What cuts a cell that is not a leaf."""
        return Plane(self._run("planes", number)[0], float(self.thresholds[number]))

    def __getitem__(self, number: int) -> Node:
        """One cell."""
        centre, translation = (
            np.asarray(self._tensors[name][number : number + 1])[0]
            for name in ("centres", "translations")
        )
        return Node(
            int(self.parent[number]),
            int(self.scale[number]),
            int(self.n_points[number]),
            float(self.rms[number]),
            centre,
            self._run("bases", number),
            self._run("wavelets", number),
            translation,
            None if self.is_leaf[number] else self.plane(number),
        )
