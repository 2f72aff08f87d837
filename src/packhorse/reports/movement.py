"""How values move between two checkpoints: what share stays, and how far the others go.

A step of an optimizer such as Adam moves a value by about the learning rate, however large the
value is. Representable values are 2^(e - m) apart among values of exponent e (with m bits of
mantissa), so the same step crosses half as many of them with each exponent. That is why the delta
codec keeps one table of differences for each class of exponents (docs/format.md, section 6.6), and
why bf16 weights often do not change at all. Distances are differences of the order-preserving
integers of that section: how many representable values lie between. A value that changes its sign
crosses all small ones, so the distances of the smallest exponents are long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.base import ByteArray
from packhorse.disk.snapshots.compare import WINDOW_NBYTES, differing
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.bits import FLOATS
from packhorse.reports.names import role_of
from packhorse.reports.results import StepSizeRow
from packhorse.reports.sampling import Sample

__all__ = ["StepSizes", "step_sizes", "unchanged_share"]

_MIN_SHARE = 1e-4  # of a role's values; fewer say little
# Distances are counted in bins: 0, then 32 to the octave, so that those below 64 are exact.
_BIN_BITS = 5
_DROPPED_BITS = 23 - _BIN_BITS  # of the mantissa of a distance as F32
_ONE = 127 << _BIN_BITS  # the bin of distance 1 before `+ 1`
_HAS_INFINITY = ("F16", "BF16", "F32", "F64", "C64", "F8_E5M2")
_Units = NDArray[np.unsignedinteger]


def unchanged_share(old: Sample, new: Sample) -> float:
    """The share of elements whose bits are the same in two samples of the same places.

    Raises:
        ValueError: the samples are of different places or dtypes.

    Example:
        >>> import numpy as np
        >>> from packhorse.reports.sampling import whole_sample
        >>> old = whole_sample("w", "F32", (4,), np.float32([1, 2, 3, 4]))
        >>> new = whole_sample("w", "F32", (4,), np.float32([1, 2, 3, 5]))
        >>> unchanged_share(old, new)
        0.75
    """
    bits, n_changed, nbytes = DTYPE_BY_NAME[new.entry.dtype].bits, 0, 0
    for before, after in _windows(old, new):
        n_changed += int(np.count_nonzero(differing(before, after, bits)))
        nbytes += after.size
    return 1 - n_changed / (nbytes * 8 // bits) if nbytes else 1.0


def _windows(old: Sample, new: Sample) -> Iterator[tuple[ByteArray, ByteArray]]:
    """The bytes of two samples, side by side, a few at a time."""
    if old.places.runs != new.places.runs or old.entry.dtype != new.entry.dtype:
        raise ValueError(
            f"{new.entry.name}: the two samples are of different places or dtypes; take both at "
            "the places of one"
        )
    for before, after in zip(old.runs, new.runs, strict=True):
        for start in range(0, after.size, WINDOW_NBYTES):
            yield before[start : start + WINDOW_NBYTES], after[start : start + WINDOW_NBYTES]


class StepSizes:
    """Counts how far values move, by role, dtype and the exponent of the value before. Several
    threads may add to it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], NDArray[np.float64]] = {}
        self._lock = threading.Lock()

    def add(self, old: Sample, new: Sample) -> None:
        """Counts a tensor, by its size, however much of it was sampled. A tensor that holds no
        floats has no exponents, and is not counted.

        Raises:
            ValueError: the samples are of different places or dtypes.
        """
        dtype = new.entry.dtype
        if dtype not in FLOATS or not new.places.sampled_nbytes:
            return
        key, weight = (role_of(new.entry.name), dtype), new.entry.nbytes / new.places.sampled_nbytes
        for before, after in _windows(old, new):
            counts = _counted(before, after, dtype) * np.float64(weight)
            with self._lock:
                if key in self._counts:
                    self._counts[key] += counts
                else:
                    self._counts[key] = counts

    def rows(self) -> tuple[StepSizeRow, ...]:
        """What was counted, the smallest exponents first. Values that were zero, subnormal,
        infinite or NaN are left out, and so are exponents of less than a 10,000th of the values."""
        return tuple(row for key, counts in self._counts.items() for row in _rows(*key, counts))


def step_sizes(old: Sample, new: Sample) -> tuple[StepSizeRow, ...]:
    """How far the values of one tensor moved, by the exponent of the value before.

    Args:
        old: a sample of the tensor before.
        new: a sample of it afterwards, at the same places.

    Returns:
        A row for each exponent; none if the dtype is no float.

    Raises:
        ValueError: the samples are of different places or dtypes.

    Example:
        >>> import numpy as np
        >>> from packhorse.reports.sampling import whole_sample
        >>> values = np.float32([1, 2, 4, 8])
        >>> old = whole_sample("w", "F32", (4,), values)
        >>> new = whole_sample("w", "F32", (4,), values + np.float32(2**-20))
        >>> [(row.exponent, row.median) for row in step_sizes(old, new)]
        [(0, 8.0), (1, 4.0), (2, 2.0), (3, 1.0)]
    """
    sizes = StepSizes()
    sizes.add(old, new)
    return sizes.rows()


def _ordered(units: _Units) -> _Units:
    """Floats as integers that are ordered by value (section 6.6)."""
    bits = 8 * units.itemsize
    signed = units.view(f"i{units.itemsize}")
    ones_if_negative = (signed >> (bits - 1)).view(units.dtype)
    return units ^ (ones_if_negative | units.dtype.type(1 << (bits - 1)))


def _counted(old: ByteArray, new: ByteArray, dtype: str) -> NDArray[np.int64]:
    """Counts by exponent field of the value before, and by bin of the distance."""
    unit_nbytes, parts = DTYPE_BY_NAME[dtype].unit_nbytes, FLOATS[dtype]
    before, after = (data.view(f"u{unit_nbytes}") for data in (old, new))
    n_exponents, n_bins = 1 << parts.exponent_bits, (8 * unit_nbytes + 1 << _BIN_BITS) + 2
    exponents = (before >> parts.mantissa_bits & (n_exponents - 1)).astype(np.uint32)
    a, b = _ordered(before), _ordered(after)
    distances = (np.maximum(a, b) - np.minimum(a, b)).astype(np.float32)
    bins = np.maximum(distances.view(np.uint32) >> _DROPPED_BITS, _ONE - 1) - np.uint32(_ONE - 1)
    counted = np.bincount(exponents * n_bins + bins, minlength=n_exponents * n_bins)
    return counted.reshape(n_exponents, n_bins)


def _rows(role: str, dtype: str, counts: NDArray[np.float64]) -> Iterator[StepSizeRow]:
    by_exponent, last = counts.sum(axis=1), counts.shape[0] - (dtype in _HAS_INFINITY)
    shares = by_exponent / by_exponent.sum()
    for field in range(1, last):
        if shares[field] >= _MIN_SHARE:
            sums = counts[field].cumsum() / by_exponent[field]
            yield StepSizeRow(
                role, dtype, field - FLOATS[dtype].bias, float(shares[field]),
                _distance(sums, 0.5), _distance(sums, 0.9),
            )  # fmt: skip


def _distance(sums: NDArray[np.float64], share: float) -> float:
    """The distance that a share of the values stays within."""
    found = int(np.searchsorted(sums, share - 1e-9))
    if found == 0:
        return 0.0
    edges = np.array([found - 1 + _ONE, found + _ONE], np.uint32) << _DROPPED_BITS
    low, high = edges.astype(np.uint32).view(np.float32).tolist()
    return float(low) if low < 2 << _BIN_BITS else float((low * high) ** 0.5)
