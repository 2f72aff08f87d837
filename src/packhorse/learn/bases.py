"""Linear algebra of one cell: the leading directions of its points, and the wavelets of a child.

All functions are pure. Points and directions are rows. A cell hands its centred points over in
blocks, so that a cell larger than memory and one in memory go through the same arithmetic.

`leading_directions` is a randomised SVD (subspace iteration on the covariance, then Rayleigh-Ritz).
Cells begin with the directions of their parent instead of random ones, which are close already, so
that two passes over the points are enough. scikit-learn's `randomized_svd` takes a whole matrix,
and begins at random. A cell whose matrix is small, or which needs most directions, gets the exact
decomposition.

LAPACK's QR and SVD of these narrow matrices take longer than the products with the points. So
matrices are made orthonormal by their products, in float64, and QR is for hard cases alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
    "Blocks",
    "Spectrum",
    "energy_of",
    "exact_spectrum",
    "leading_directions",
    "orthonormal_rows",
    "spectrum_of",
    "wavelets_of",
]

Array = NDArray[Any]
Blocks = Callable[[], Iterable[Array]]  # centred points; each call begins another pass

# Rows whose products have a worse condition than this go to QR.
_WORST_CONDITION = 1e10
# An angle between a child's direction and the parent's span that rounding alone may cause.
_ROUNDING = 32
# Energies of directions that the points do not have are rounding errors of the greatest.
_NOISE = 4


class Spectrum(NamedTuple):
    """Directions of a cell, by falling energy.

    Attributes:
        directions: orthonormal rows.
        energies: the sum of squares of the points along each of them, in float64.
        total: the sum of squares of the points.
    """

    directions: Array
    energies: Array
    total: float


def orthonormal_rows(rows: Array) -> Array:
    """Orthonormal rows, in float64, with the span of those given.

    Args:
        rows: independent rows.
    """
    rows = rows.astype(np.float64)
    if not len(rows):
        return rows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, 1)
    for _ in range(2):  # the second time takes away what rounding left
        values, vectors = np.linalg.eigh(rows @ rows.T)
        if values[0] * _WORST_CONDITION <= values[-1]:
            return np.ascontiguousarray(np.linalg.qr(rows.T)[0].T)
        # The symmetric root keeps rows near those that they were, and so in their order.
        rows = (vectors / np.sqrt(values)) @ vectors.T @ rows
    return rows


def _principal_rows(rows: Array, n_most: int) -> tuple[Array, Array]:
    """The right singular vectors of a matrix with few rows, and its singular values.

    Small values are not lost in the matrix of products: each is the length of a sum of the rows,
    which has an error of the precision of the rows and not of its root.
    """
    rows = rows.astype(np.float64)
    vectors = np.linalg.eigh(rows @ rows.T)[1]
    turned = vectors[:, ::-1][:, :n_most].T @ rows
    return turned, np.linalg.norm(turned, axis=1)


def exact_spectrum(points: Array, n_most: int) -> Spectrum:
    """The leading directions of centred points that lie in memory.

    Args:
        points: centred points.
        n_most: the most directions to give back; there are fewer if the rank is less.
    """
    n_points, width = points.shape
    wide = points.astype(np.float64)
    if width <= n_points:
        directions = np.linalg.eigh(wide.T @ wide)[1][:, ::-1][:, :n_most].T
        sizes = np.linalg.norm(wide @ directions.T, axis=0)
    else:
        directions, sizes = _principal_rows(wide, n_most)
    least = sizes.max(initial=0) * max(points.shape) * np.finfo(points.dtype).eps
    kept = sizes > least
    directions = directions[kept] if width <= n_points else orthonormal_rows(directions[kept])
    return Spectrum(directions.astype(points.dtype), sizes[kept] ** 2, float((wide**2).sum()))


def leading_directions(blocks: Blocks, start: Array, n_passes: int) -> Spectrum:
    """The leading directions of centred points, as many as there are to begin with.

    Args:
        blocks: gives the centred points, block by block.
        start: independent rows, near the leading directions if possible.
        n_passes: how often the points are read.
    """
    image = start.astype(np.float64)
    total = 0.0
    for done in range(n_passes):
        directions = orthonormal_rows(image).astype(start.dtype)
        image[:] = 0.0
        for points in blocks():
            image += (points @ directions.T).T @ points
            total += 0.0 if done else energy_of(points)
    return spectrum_of(image, directions, total)


def spectrum_of(image: Array, directions: Array, total: float) -> Spectrum:
    """The leading directions inside the span of some.

    Args:
        image: the products of these directions with the points, times the points, in float64.
        directions: orthonormal rows.
        total: the sum of squares of the points.
    """
    energies, vectors = np.linalg.eigh(image @ directions.T.astype(np.float64))
    turned = orthonormal_rows(vectors[:, ::-1].T @ directions).astype(directions.dtype)
    n_kept = np.count_nonzero(energies > _NOISE * np.finfo(directions.dtype).eps * energies[-1])
    return Spectrum(turned[:n_kept], energies[::-1][:n_kept], total)


def energy_of(points: Array) -> float:
    """The sum of squares. A row is summed in its own precision, and the rows in float64."""
    return float(np.einsum("ij,ij->i", points, points).sum(dtype=np.float64))


def wavelets_of(parent: Array, child: Array) -> Array:
    """An orthonormal basis of what the child's span adds to the parent's; it may have no rows.

    Args:
        parent: orthonormal rows.
        child: orthonormal rows.
    """
    if not len(child):
        return child
    beyond = child - (child @ parent.T) @ parent
    rows, sines = _principal_rows(beyond, len(child))
    rows = rows[sines > _ROUNDING * np.finfo(child.dtype).eps]
    for _ in range(2 if len(rows) else 0):
        # A small sine leaves rounding errors along the parent's span; here they go away.
        rows = orthonormal_rows(rows)
        rows -= (rows @ parent.T) @ parent
    return rows.astype(child.dtype)
