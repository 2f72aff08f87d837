"""`GMRA`: geometric multi-resolution analysis, as a transformer of scikit-learn (docs/gmra.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

import numpy as np
from scipy import sparse

from packhorse.errors import MissingBackendError
from packhorse.learn import resuming
from packhorse.learn.bases import Array
from packhorse.learn.coding import (
    Columns,
    LeafCodes,
    check_leaf_codes,
    decode,
    encode,
    from_leaf_codes,
    leaf_codes,
    leaf_numbers,
)
from packhorse.learn.growth import Growth, Plan
from packhorse.learn.nodes import Nodes, finished
from packhorse.learn.tensors import (
    MemoryShelf,
    Rows,
    Tensors,
    as_arrays,
    check_shelf,
    checked_rows,
    float_dtype,
)
from packhorse.learn.writing import MemoryWriter, ShelfWriter

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
    from threadpoolctl import threadpool_limits
except ModuleNotFoundError as error:
    if error.name != "sklearn":
        raise
    raise MissingBackendError(
        "packhorse.learn.GMRA needs scikit-learn; install it with: pip install 'packhorse[learn]'"
    ) from None

__all__ = ["GMRA"]

_DEFAULT_COMPONENTS = 8
_POINTS_PER_COMPONENT = 8  # of a leaf: so all bases take at most about two thirds of X
_LEAST_LEAF = 32
_LEAF_BY_ENERGY = 64
_LEAST_MEMORY = 1 << 20
_DEEPEST = 1 << 20
_FLOATS = (np.float64, np.float32)

_Part = TypeVar("_Part")


def _one_thread() -> Any:
    """Makes BLAS use one thread. The matrices of a cell are small: on two busy cores, two threads
    took ten times as long as one. The result does not depend on the number of cores, too."""
    return threadpool_limits(1, "blas")


class GMRA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Geometric multi-resolution analysis of Allard, Chen and Maggioni (arXiv 1105.4924).

    A tree of nested cells, each cut in two across its direction of greatest energy. Each cell has
    its centre and a local basis, and each below the root the wavelets and the translation that it
    adds to its parent. Where points lie near a curved surface of few dimensions, many small planes
    fit it better than one large plane, as in PCA.

    `transform` gives a sparse matrix with a column for each wavelet of each cell, and for the
    length of each translation. A row is filled only where the cells of its point are. So columns
    mean the same for all points, `inverse_transform` is a sum, and the first columns alone are
    the point at a coarse scale. With `sparse_output=False` the matrix is an ordinary array, mostly
    of zeros.

    X is an array, a `ShelfTensor`, a data set of h5py, or an iterable of batches of rows. Given
    a shelf, `fit` keeps all that it computes there: its memory stays under `memory_nbytes`, apart
    from the cache of the shelf, and it can be killed and called again. The result is the same bit
    for bit with a shelf and without; it depends on `memory_nbytes`, because a sample of that size
    decides about the cuts of cells that do not fit.

    Attributes:
        n_features_in_: columns of X.
        nodes_: the cells; `nodes_[number]` has centre, basis, wavelets and translation.
        n_scales_: scales of the tree; the root is scale 0.
        column_scales_: the scale of each column of the transform, which never falls.
        column_cells_: the number of the cell of each column.
        seed_: of all random numbers.

    Example:
        >>> import numpy as np
        >>> from packhorse.learn import GMRA
        >>> t = np.linspace(0, 3, 1000)[:, None]
        >>> curve = np.hstack([np.cos(t), np.sin(t), t**2])
        >>> gmra = GMRA(n_components=1, random_state=0)
        >>> codes = gmra.fit_transform(curve)
        >>> [float(abs(gmra.inverse_transform(codes, scale) - curve).max().round(4))
        ...     for scale in (0, 2, 4)]
        [0.6874, 0.1481, 0.0222]
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        tolerance: float = 0.0,
        leaf_size: int | None = None,
        max_scale: int | None = None,
        sparse_output: bool = True,
        memory_nbytes: int = 256 << 20,
        random_state: Any = None,
    ) -> None:
        """Keeps the settings.

        Args:
            n_components: the most directions of a cell. A number below 1 is the share of its
                energy that they keep. None for 8, or fewer where X has fewer columns.
            tolerance: a cell whose points have this root mean square distance from its plane is
                good enough: it gets no more directions, and is not cut.
            leaf_size: a cell of at most so many points is not cut. None for 8 for each direction
                and at least 32, or 64 if a share of energy decides.
            max_scale: cells of this scale are not cut; None for no limit.
            sparse_output: whether `transform` gives a sparse matrix.
            memory_nbytes: the memory to use for points.
            random_state: a seed or a generator, as everywhere in scikit-learn.
        """
        self.n_components = n_components
        self.tolerance = tolerance
        self.leaf_size = leaf_size
        self.max_scale = max_scale
        self.sparse_output = sparse_output
        self.memory_nbytes = memory_nbytes
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, *, shelf: Any = None, name: str = "gmra") -> GMRA:
        """Finds the cells.

        Args:
            X: the points.
            y: not used.
            shelf: a `Shelf` that keeps the cells; None for memory. If it has a fit that was
                interrupted, of the same X and the same settings, that one goes on.
            name: the beginning of the names of all tensors there.

        Returns:
            Itself.

        Raises:
            ValueError: X or a setting is wrong, or the fit that was interrupted was another one.
            TypeError: the shelf or the name is something else.
            PermissionError: the shelf cannot be written to.
        """
        self._check_settings()
        if shelf is not None:
            check_shelf(shelf, name, writes=True)
        memory = MemoryShelf()
        tensors = memory if shelf is None else shelf
        source = self._source(X, tensors, name)
        writer = MemoryWriter(memory) if shelf is None else ShelfWriter(shelf)
        growth = Growth(self._plan(source), source, tensors, writer, name)
        with _one_thread():
            resuming.run(growth, self._settings(), shelf)
        return self._finish(growth)

    @classmethod
    def from_shelf(cls, shelf: Any, name: str = "gmra") -> GMRA:
        """The result of a fit that a shelf keeps.

        Args:
            shelf: the shelf.
            name: as it was for `fit`.

        Returns:
            The estimator, with the settings that it had.

        Raises:
            ValueError: there is no such fit, or it was interrupted.
            TypeError: the shelf or the name is something else.
        """
        check_shelf(shelf, name, writes=False)
        settings, nodes, plan = resuming.read(shelf, name)
        return cls(**settings)._keep(nodes, plan)

    def transform(self, X: Any) -> Any:
        """The coefficients of points, from coarse to fine.

        Args:
            X: points.

        Returns:
            A sparse matrix (CSR), or an array if `sparse_output` is false: a row for each point.
        """
        with _one_thread():
            parts = self._of_batches(X, lambda block: encode(self.nodes_, self._columns, block))
        codes = sparse.vstack(parts, format="csr")
        return codes if self.sparse_output else codes.toarray()

    def inverse_transform(self, Z: Any, scale: int | None = None) -> Array:
        """Points from their coefficients.

        Args:
            Z: what `transform` gave.
            scale: the finest scale to use; None for all.

        Returns:
            An array, a row for each point.

        Raises:
            ValueError: Z has a wrong number of columns, or scale is negative.
        """
        check_is_fitted(self)
        Z = check_array(Z, accept_sparse="csc", dtype=_FLOATS, ensure_min_features=0)
        if Z.shape[1] != self._columns.n_columns:
            raise ValueError(
                f"Z has {Z.shape[1]} columns, but transform gives {self._columns.n_columns}"
            )
        if scale is not None and (not isinstance(scale, Integral) or scale < 0):
            raise ValueError(f"scale is {scale!r}; it must be an integer from 0, or None for all")
        finest = _DEEPEST if scale is None else int(scale)
        with _one_thread():
            return decode(self.nodes_, self._columns, sparse.csc_array(Z), finest)

    def apply(self, X: Any) -> Array:
        """The cell at the finest scale that each point belongs to.

        Args:
            X: points.

        Returns:
            The numbers of the cells in `nodes_`.
        """
        with _one_thread():
            return np.concatenate(self._of_batches(X, partial(leaf_numbers, self.nodes_)))

    def encode(self, X: Any) -> LeafCodes:
        """The shortest code of points: their cells at the finest scale, and coefficients there.

        It has fewer numbers than `transform` gives, but not the coarser scales, and its columns
        mean something else in each cell.

        Args:
            X: points.

        Returns:
            The number of a cell, and a row of coefficients, for each point.
        """
        with _one_thread():
            parts = self._of_batches(X, partial(leaf_codes, self.nodes_))
        return LeafCodes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def decode(self, codes: LeafCodes) -> Array:
        """Points from their shortest code: the same as at the finest scale of the transform.

        Args:
            codes: what `encode` gave.

        Returns:
            An array, a row for each point.

        Raises:
            ValueError: the arrays have a wrong shape or dtype, or a number is not that of a cell
                at the finest scale.
        """
        check_is_fitted(self)
        checked = check_leaf_codes(self.nodes_, codes)
        with _one_thread():
            return from_leaf_codes(self.nodes_, checked)

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's tools may expect of it.

        Returns:
            The tags.
        """
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return self._columns.n_columns

    # X.

    def _source(self, X: Any, tensors: Tensors, name: str) -> Rows:
        """The points of a fit, with their width checked."""
        X = as_arrays(X)
        if _is_tensor(X):
            _check_matrix(X.shape)
            self.n_features_in_ = X.shape[1]
            return X  # type: ignore[no-any-return]
        if _is_batches(X):
            source = resuming.gather(X, tensors, name)
            self.n_features_in_ = source.shape[1]
            return source
        X = validate_data(
            self, X, dtype=_floats_for(X), order="C", ensure_min_samples=2, ensure_all_finite=False
        )
        return checked_rows(X, 0, X.dtype)

    def _of_batches(self, X: Any, work: Callable[[Array], _Part]) -> list[_Part]:
        """What a function makes of points, in arrays of bounded size."""
        parts = [work(block) for block in self._batches(X, 0)]
        if not parts:
            raise ValueError("X has no batches; there must be one row or more")
        return parts

    def _batches(self, X: Any, first: int) -> Iterator[Array]:
        """Points to transform, in arrays of bounded size, from the row of a number."""
        check_is_fitted(self)
        X = as_arrays(X)
        if _is_tensor(X):
            _check_matrix(X.shape, self.n_features_in_)
        elif _is_batches(X):
            for batch in X:
                for rows in self._batches(batch, first):
                    yield rows
                    first += len(rows)
            return
        else:
            X = validate_data(
                self, X, dtype=_FLOATS, order="C", reset=False, ensure_all_finite=False
            )
        for start in range(0, X.shape[0], self._plan_.piece_rows):
            rows = X[start : start + self._plan_.piece_rows]
            yield checked_rows(rows, first + start, self._plan_.dtype)

    # Settings.

    def _settings(self) -> dict[str, Any]:
        """The settings as a shelf can keep them."""
        settings = self.get_params(deep=False)
        state = settings["random_state"]
        settings["random_state"] = int(state) if isinstance(state, Integral) else None
        return settings  # type: ignore[no-any-return]

    def _check_settings(self) -> None:
        n = self.n_components
        is_count = isinstance(n, Integral) and not isinstance(n, bool) and n >= 1
        is_share = isinstance(n, Real) and not isinstance(n, Integral) and 0 < n < 1
        if n is not None and not is_count and not is_share:
            raise ValueError(
                f"n_components is {n!r}; it must be an integer from 1, a share of energy between "
                "0 and 1, or None"
            )
        if not isinstance(self.tolerance, Real) or not 0 <= self.tolerance < np.inf:
            raise ValueError(f"tolerance is {self.tolerance!r}; it must be a number from 0")
        _check_integer("leaf_size", self.leaf_size, 1, none=True)
        _check_integer("max_scale", self.max_scale, 0, none=True)
        _check_integer("memory_nbytes", self.memory_nbytes, _LEAST_MEMORY)

    def _plan(self, source: Rows) -> Plan:
        n_points, width = source.shape
        n, leaf_size = self.n_components, self.leaf_size
        if n is not None and n >= 1 and n > min(n_points, width):
            raise ValueError(
                f"n_components is {n}, but {n_points} points of {width} features have at most "
                f"{min(n_points, width)} directions"
            )
        by_energy = n is not None and n < 1
        most = None if by_energy else int(n or min(_DEFAULT_COMPONENTS, width))
        if leaf_size is None:
            leaf_size = max(_LEAST_LEAF, _POINTS_PER_COMPONENT * most) if most else _LEAF_BY_ENERGY
        seed = check_random_state(self.random_state).randint(1 << 31)
        return Plan(
            width=width,
            dtype=float_dtype(source.dtype),
            n_components=most,
            energy=float(n) if n is not None and by_energy else 1.0,
            tolerance=float(self.tolerance),
            leaf_size=int(leaf_size),
            max_scale=_DEEPEST if self.max_scale is None else int(self.max_scale),
            seed=int(seed),
            memory_nbytes=int(self.memory_nbytes),
        )

    def _finish(self, growth: Growth) -> GMRA:
        return self._keep(finished(growth.shelf, growth.name), growth.plan)

    def _keep(self, nodes: Nodes, plan: Plan) -> GMRA:
        self.nodes_, self._plan_ = nodes, plan
        self._columns = Columns(nodes)
        self.n_features_in_ = plan.width
        self.n_scales_ = int(nodes.scale.max()) + 1
        self.column_scales_, self.column_cells_ = self._columns.scales, self._columns.nodes
        self.seed_ = plan.seed
        return self


def _floats_for(X: Any) -> Any:
    """The dtypes that X may have after scikit-learn's checks, which would make float64 of bfloat16
    and float16; tensors of a shelf become float32, and so must arrays."""
    dtype = getattr(X, "dtype", None)
    is_float = isinstance(dtype, np.dtype) and dtype.kind in "fV"
    return float_dtype(dtype) if is_float else _FLOATS


def _is_tensor(X: Any) -> bool:
    """Whether X is a matrix of a shelf, or of h5py: it is read in parts."""
    return hasattr(X, "iter_chunks") and hasattr(X, "shape")


def _is_batches(X: Any) -> bool:
    """Whether X is an iterable of matrices. Arrays, data frames and lists are one matrix each."""
    others = ("__array__", "__dataframe__", "shape", "toarray")
    return isinstance(X, Iterable) and not (
        isinstance(X, list | tuple | str | bytes) or any(hasattr(X, name) for name in others)
    )


def _check_matrix(shape: tuple[int, ...], width: int | None = None) -> None:
    if len(shape) != 2 or 0 in shape or (width is None and shape[0] < 2):
        raise ValueError(f"X has the shape {shape}; it must have two axes, and two rows or more")
    if width not in (None, shape[1]):
        raise ValueError(f"X has {shape[1]} features, but GMRA is expecting {width} features")


def _check_integer(name: str, value: Any, least: int, none: bool = False) -> None:
    if none and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        choice = " or None" if none else ""
        raise ValueError(f"{name} is {value!r}; it must be an integer from {least}{choice}")
