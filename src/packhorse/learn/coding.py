"""The transform of geometric wavelets, forward and inverse.

A point x in leaf k of scale J is replaced by its projection on the leaf's plane, x_J, that by its
projection on the parent's plane, x_(J-1), and so on up to the root. Then

    x_J = centre_0 + basis_0 p_0 + sum over the cells below the root of (translation + wavelets q)

exactly, because x_j - x_(j-1) lies in the span of the translation and the wavelets of the cell at
scale j. Stopping the sum at scale j gives x_j: no finer coefficient is needed. (Allard, Chen and
Maggioni project x itself on each plane. Their x_j is a little nearer to x, but needs the finer
coefficients for a correction.)

So a point is a sparse sum of vectors that do not depend on it. Each wavelet has a column, and so
has each translation, whose coefficient is its length; columns go from coarse to fine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import sparse

from packhorse.learn.bases import Array
from packhorse.learn.nodes import Nodes

__all__ = [
    "Columns",
    "LeafCodes",
    "check_leaf_codes",
    "decode",
    "encode",
    "from_leaf_codes",
    "leaf_codes",
    "leaf_numbers",
]


class Columns:
    """Which columns belong to which cell."""

    def __init__(self, nodes: Nodes) -> None:
        """Numbers them from coarse to fine.

        Args:
            nodes: the tree.
        """
        self.widths = nodes.n_wavelets + 1  # the translation comes first
        self.widths[0] -= 1  # the centre of the root belongs to every point
        order = np.argsort(nodes.scale, kind="stable")
        self.starts = np.empty(len(nodes), np.int64)
        self.starts[order] = np.cumsum(self.widths[order]) - self.widths[order]
        self.n_columns = int(self.widths.sum())
        self.scales = np.repeat(nodes.scale[order], self.widths[order])
        self.nodes = np.repeat(order, self.widths[order])
        # Where the columns of a cell lie among those on the way from the root to it.
        self.depths = np.zeros(len(nodes), np.int64)
        for number in range(1, len(nodes)):
            parent = nodes.parent[number]
            self.depths[number] = self.depths[parent] + self.widths[parent]

    def of_leaf(self, nodes: Nodes, leaf: int) -> Array:
        """All columns that the points of a leaf have.

        Args:
            nodes: the tree.
            leaf: the number of the cell.

        Returns:
            Their numbers, in order.
        """
        runs = []
        number = leaf
        while number >= 0:
            start = self.starts[number]
            runs.append(np.arange(start, start + self.widths[number]))
            number = nodes.parent[number]
        return np.concatenate(runs[::-1])


def leaf_numbers(nodes: Nodes, points: Array) -> Array:
    """The number of the leaf that each point belongs to.

    Args:
        nodes: the tree.
        points: of the dtype of the tree.

    Returns:
        A number for each point.
    """
    found = np.empty(len(points), np.int64)
    waiting = [(0, np.arange(len(points)))]
    while waiting:
        number, members = waiting.pop()
        if nodes.is_leaf[number]:
            found[members] = number
            continue
        plane = nodes.plane(number)
        low = points[members] @ plane.direction <= plane.threshold
        halves = zip(nodes.children[number], (members[low], members[~low]), strict=True)
        waiting += [(int(child), half) for child, half in halves if len(half)]
    return found


class LeafCodes(NamedTuple):
    """Points as coefficients of their leaves alone: the shortest code, without coarser scales.

    Attributes:
        cells: the number of the leaf of each point.
        coefficients: a row for each point, in the basis of its leaf; zeros after the last.
    """

    cells: Array
    coefficients: Array


def leaf_codes(nodes: Nodes, points: Array) -> LeafCodes:
    """The coefficients of points in their leaves.

    Args:
        nodes: the tree.
        points: of the dtype of the tree.

    Returns:
        Cells and coefficients.
    """
    cells = leaf_numbers(nodes, points)
    codes = np.zeros((len(points), nodes.n_directions[nodes.is_leaf].max()), points.dtype)
    for cell, members in _by_cell(cells):
        node = nodes[cell]
        codes[members, : len(node.basis)] = (points[members] - node.centre) @ node.basis.T
    return LeafCodes(cells, codes)


def check_leaf_codes(nodes: Nodes, codes: LeafCodes) -> LeafCodes:
    """Codes that a caller gives, as arrays.

    Args:
        nodes: the tree.
        codes: cells and coefficients.

    Raises:
        ValueError: the arrays have a wrong shape or dtype, or a number is not that of a leaf.
    """
    cells, coefficients = np.asarray(codes.cells), np.asarray(codes.coefficients)
    width = int(nodes.n_directions[nodes.is_leaf].max())
    if cells.ndim != 1 or cells.dtype.kind not in "iu":
        raise ValueError(
            f"codes.cells is {cells.dtype} of shape {cells.shape}; it must be a list "
            "of the numbers of cells"
        )
    if coefficients.shape != (len(cells), width):
        raise ValueError(
            f"codes.coefficients has the shape {coefficients.shape}; for these cells "
            f"it must have {(len(cells), width)}"
        )
    inside = (cells >= 0) & (cells < len(nodes))
    if not inside.all() or not nodes.is_leaf[cells].all():
        raise ValueError("codes.cells has a number that is not of a cell at the finest scale")
    return LeafCodes(cells, coefficients)


def from_leaf_codes(nodes: Nodes, codes: LeafCodes) -> Array:
    """Points from their coefficients in their leaves.

    Args:
        nodes: the tree.
        codes: cells and coefficients.

    Returns:
        A row for each point.
    """
    points = np.empty((len(codes.cells), len(nodes[0].centre)), codes.coefficients.dtype)
    for cell, members in _by_cell(codes.cells):
        node = nodes[cell]
        own = codes.coefficients[members, : len(node.basis)]
        points[members] = node.centre + own @ node.basis
    return points


def _by_cell(cells: Array) -> Iterator[tuple[int, Array]]:
    """Each cell that has points, with their places."""
    order = np.argsort(cells, kind="stable")
    found, starts = np.unique(cells[order], return_index=True)
    for cell, members in zip(found, np.split(order, starts[1:]), strict=True):
        yield int(cell), members


def encode(nodes: Nodes, columns: Columns, points: Array) -> sparse.csr_array:
    """The coefficients of points.

    Args:
        nodes: the tree.
        columns: of the tree.
        points: of the dtype of the tree.

    Returns:
        A row for each point.
    """
    leaves = leaf_numbers(nodes, points)
    order = np.argsort(leaves, kind="stable")
    bounds = np.searchsorted(leaves[order], np.arange(len(nodes) + 1))
    used, places = np.unique(leaves, return_inverse=True)
    lists = [columns.of_leaf(nodes, leaf) for leaf in used]
    lengths = np.array([len(numbers) for numbers in lists], np.int64)
    paths = np.zeros((len(points), lengths.max(initial=0)), points.dtype)
    for number, start, block in _blocks(nodes, points[order], bounds):
        depth = columns.depths[number]
        paths[order[start : start + len(block)], depth : depth + block.shape[1]] = block
    numbers = np.zeros((len(used), paths.shape[1]), np.int64)
    for row, list_ in zip(numbers, lists, strict=True):
        row[: len(list_)] = list_
    filled = np.arange(paths.shape[1]) < lengths[places][:, None]
    ends = np.concatenate([[0], np.cumsum(lengths[places])])
    shape = (len(points), columns.n_columns)
    return sparse.csr_array((paths[filled], numbers[places][filled], ends), shape=shape)


def _blocks(nodes: Nodes, points: Array, bounds: Array) -> Iterator[tuple[int, int, Array]]:
    """The coefficients of each cell that has points, in the order of leaves, and the first point.

    Cells come after all that are below them, so that their own coefficients are known.
    """
    own: dict[int, Array] = {}  # products with the basis, of a cell's points
    for number in range(len(nodes) - 1, -1, -1):
        start, stop = bounds[number], bounds[nodes.ends[number]]
        if start == stop:
            continue
        node = nodes[number]
        if node.plane is None:
            own[number] = (points[start:stop] - node.centre) @ node.basis.T
        else:
            children = [int(child) for child in nodes.children[number]]
            halves = [_lifted(nodes, node.basis, node.centre, c, own) for c in children]
            own[number] = np.concatenate([half for half in halves if half is not None])
            for child in children:
                own.pop(child, None)
        if number == 0:
            yield number, 0, own[number]
            return
        length = np.full((stop - start, 1), np.linalg.norm(node.translation), points.dtype)
        yield number, start, np.hstack([length, own[number] @ (node.basis @ node.wavelets.T)])


def _lifted(
    nodes: Nodes, basis: Array, centre: Array, child: int, own: dict[int, Array]
) -> Array | None:
    """Products with the parent's basis of the child's points, from those with its own."""
    if child not in own:
        return None
    node = nodes[child]
    return own[child] @ (node.basis @ basis.T) + (node.centre - centre) @ basis.T  # type: ignore[no-any-return]


def decode(nodes: Nodes, columns: Columns, codes: sparse.csc_array, scale: int) -> Array:
    """Points from their coefficients.

    Args:
        nodes: the tree.
        columns: of the tree.
        codes: a row for each point.
        scale: the finest scale to add.

    Returns:
        A row for each point.
    """
    root = nodes[0]
    points = np.tile(root.centre, (codes.shape[0], 1))
    for number in range(len(nodes)):
        start, stop = columns.starts[number], columns.starts[number] + columns.widths[number]
        if nodes.scale[number] > scale or codes.indptr[start] == codes.indptr[stop]:
            continue
        rows, block = _dense(codes, start, stop)
        node = nodes[number]
        atoms = (
            node.wavelets if number == 0 else np.vstack([_unit(node.translation), node.wavelets])
        )
        points[rows] += block.astype(points.dtype) @ atoms
    return points


def _dense(codes: sparse.csc_array, start: int, stop: int) -> tuple[Array, Array]:
    """The rows that have coefficients in some columns, and these."""
    entries = slice(codes.indptr[start], codes.indptr[stop])
    rows, places = np.unique(codes.indices[entries], return_inverse=True)
    columns = np.repeat(np.arange(stop - start), np.diff(codes.indptr[start : stop + 1]))
    block = np.zeros((len(rows), stop - start), codes.dtype)
    block[places, columns] = codes.data[entries]
    return rows, block


def _unit(vector: Array) -> Array:
    length = np.linalg.norm(vector)
    return vector / length if length else vector
