"""Leading directions of many cells in the same few passes over their points.

Cells above pieces overlap: a point belongs to one cell of each scale. So a pass reads each piece
once, and serves all cells that it is part of. The points of a piece are centred at its own mean,
which is inside of all these cells; what that lacks to the centre of a cell is added to the products
afterwards, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packhorse.learn.bases import (
    Array,
    Blocks,
    Spectrum,
    energy_of,
    orthonormal_rows,
    spectrum_of,
)

__all__ = ["Piece", "WideCell", "nbytes_of", "spectra_of"]


class Piece(NamedTuple):
    """A run of points.

    Attributes:
        centre: their mean.
        n_points: how many there are.
        blocks: gives them, block by block.
    """

    centre: Array
    n_points: int
    blocks: Blocks


class WideCell(NamedTuple):
    """A cell above pieces.

    Attributes:
        centre: the mean of its points.
        pieces: the numbers of its pieces.
        start: independent rows to begin with, near its leading directions if possible.
    """

    centre: Array
    pieces: range
    start: Array


def nbytes_of(n_directions: int, width: int, itemsize: int) -> int:
    """The memory that a cell takes.

    Args:
        n_directions: the rows to begin with.
        width: columns of the points.
        itemsize: bytes of an element.
    """
    return n_directions * width * (8 + itemsize)


def spectra_of(pieces: Sequence[Piece], cells: Sequence[WideCell], n_passes: int) -> list[Spectrum]:
    """The leading directions of cells, of each as many as there are to begin with.

    Args:
        pieces: all pieces of the cells.
        cells: the cells.
        n_passes: how often the points are read.
    """
    images = [cell.start.astype(np.float64) for cell in cells]
    energies = np.zeros(len(pieces))
    for done in range(n_passes):
        directions = [
            orthonormal_rows(image).astype(cell.start.dtype)
            for image, cell in zip(images, cells, strict=True)
        ]
        for image in images:
            image[:] = 0.0
        for number, piece in enumerate(pieces):
            inside = [i for i, cell in enumerate(cells) if number in cell.pieces]
            parts = [_Part(cells[i].centre, directions[i], images[i]) for i in inside]
            if parts:
                energy = _add_piece(piece, parts, with_energy=not done)
                energies[number] += energy
    return [
        spectrum_of(image, rows, _total(pieces, energies, cell))
        for image, rows, cell in zip(images, directions, cells, strict=True)
    ]


class _Part(NamedTuple):
    """What a piece adds to one cell: its centre, its directions, and where the image goes."""

    centre: Array
    directions: Array
    image: Array


def _add_piece(piece: Piece, parts: Sequence[_Part], *, with_energy: bool) -> float:
    """Add the products of a piece to the images. Returns the energy of the piece, if asked."""
    rows = np.concatenate([part.directions for part in parts])
    ends = np.cumsum([len(part.directions) for part in parts])
    offsets = [piece.centre.astype(np.float64) - part.centre for part in parts]
    shifts = [part.directions @ offset for part, offset in zip(parts, offsets, strict=True)]
    shift = np.concatenate(shifts).astype(rows.dtype)
    image, sums, energy = np.zeros(rows.shape), np.zeros(len(rows)), 0.0
    for block in piece.blocks():
        centred = block - piece.centre
        energy += energy_of(centred) if with_energy else 0.0
        products = centred @ rows.T
        products += shift
        image += products.T @ centred
        sums += products.sum(axis=0, dtype=np.float64)
    for part, offset, end in zip(parts, offsets, ends, strict=True):
        own = slice(end - len(part.directions), end)
        part.image[:] += image[own] + sums[own, None] * offset
    return energy


def _total(pieces: Sequence[Piece], energies: Array, cell: WideCell) -> float:
    """The sum of squares of a cell's points, about its centre."""
    total = 0.0
    for number in cell.pieces:
        offset = pieces[number].centre.astype(np.float64) - cell.centre
        total += energies[number] + pieces[number].n_points * float(offset @ offset)
    return total
