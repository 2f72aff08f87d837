"""Where the bits of a tensor go: entropies of planes and bits, exponents, packed sizes by level.

Each run of a sample is split into the planes of its dtype (docs/format.md, section 4), and the
values of each plane are counted. Everything else follows from the counts: the bits of a plane are
bits of the element, so that their probabilities are sums of counts. The sample is then packed at
each level; what it takes, without what a tensor has once, is what as many bytes of the tensor take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.codecs.source import natural_geometry
from packhorse.frame import Frame, compress_buffer
from packhorse.layout import CHUNK_NBYTES, DTYPE_BY_NAME, DType, Level, Split
from packhorse.reports.names import kind_of, layer_of, role_of
from packhorse.reports.results import Estimate, ExponentRow, PlaneRow, TensorRow
from packhorse.reports.sampling import Sample, estimate, joined
from packhorse.reports.sources import Opened

__all__ = [
    "FLOATS",
    "FloatFormat",
    "PlaneCounts",
    "bit_entropies",
    "describe_tensor",
    "entropy",
    "exponent_rows",
    "packed_estimate",
]

# How much longer samples of a quarter were than real matrices and embeddings, and some more.
_JOINING = 0.002
_NOISE = 0.99  # bits of entropy of one bit, above which it counts as noise
_ROTATION = {"F64": 4}  # of the 16 leading bits, to the left; 1 for other floats (section 4)
_BITS_OF_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float64)


class FloatFormat(NamedTuple):
    """The parts of a float: bits of its exponent and its mantissa, and the exponent of 1."""

    exponent_bits: int
    mantissa_bits: int
    bias: int


FLOATS = {
    "F16": FloatFormat(5, 10, 15),
    "BF16": FloatFormat(8, 7, 127),
    "F32": FloatFormat(8, 23, 127),
    "F64": FloatFormat(11, 52, 1023),
    "C64": FloatFormat(8, 23, 127),  # of each of its two parts
    "F8_E4M3": FloatFormat(4, 3, 7),
    "F8_E5M2": FloatFormat(5, 2, 15),
    "F8_E4M3FNUZ": FloatFormat(4, 3, 8),
    "F8_E5M2FNUZ": FloatFormat(5, 2, 16),
}


class PlaneCounts:
    """How often each value of each plane occurs, and each exponent.

    Attributes:
        dtype: the dtype of the elements.
        planes: counts of the 256 values of each plane, the most significant plane first;
            (planes, 256).
        exponents: counts of the values of the exponent; empty if the dtype is no float.
        bits: bits that the values of each plane take at their entropy, if each piece as long as a
            chunk has a table of its own, as chunks have; (planes,).
    """

    def __init__(self, dtype: str) -> None:
        self.dtype: DType = DTYPE_BY_NAME[dtype]
        self._float = FLOATS.get(dtype)
        self.planes: NDArray[np.int64] = np.zeros((self.dtype.unit_nbytes, 256), np.int64)
        self.bits: NDArray[np.float64] = np.zeros(self.dtype.unit_nbytes)
        size = 1 << self._float.exponent_bits if self._float else 0
        self.exponents: NDArray[np.int64] = np.zeros(size, np.int64)

    @property
    def n_units(self) -> int:
        """How many units were counted; an element is one unit, but for complex numbers (two) and
        floats of 4 and 6 bits (whose bytes are counted)."""
        return int(self.planes[0].sum())

    def add(self, data: ByteArray) -> None:
        """Counts the elements of a run."""
        for start in range(0, data.size, CHUNK_NBYTES):
            self._add(data[start : start + CHUNK_NBYTES])

    def entropy(self, plane: int) -> float:
        """The entropy of a plane's values, in bits a value: the mean of its pieces."""
        return float(self.bits[plane]) / max(self.n_units, 1)

    def _add(self, data: ByteArray) -> None:
        geometry = natural_geometry(self.dtype, data.size)
        planes = data.reshape(1, -1)
        if geometry.split != Split.WHOLE:
            planes = np.empty((self.dtype.unit_nbytes, geometry.n_units), np.uint8)
            _core.split(data, geometry, planes.reshape(-1))
        for i, plane in enumerate(planes):
            counts = np.bincount(plane, minlength=256)
            self.planes[i] += counts
            self.bits[i] += entropy(counts) * plane.size
        if self._float and self._float.exponent_bits > 8:
            exponents = data.view(np.uint64) >> np.uint64(52) & np.uint64(0x7FF)
            self.exponents += np.bincount(exponents.astype(np.int64), minlength=2048)
        elif self._float:
            low = 8 - self._float.exponent_bits
            self.exponents += np.bincount(planes[0] >> low, minlength=self.exponents.size)


def entropy(counts: NDArray[np.int64]) -> float:
    """The entropy of counted values, in bits a value (Shannon, 1948)."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return abs(float(-(shares * np.log2(shares)).sum()))


def bit_entropies(counts: PlaneCounts) -> tuple[float, ...]:
    """The entropy of each bit of a unit, the most significant first."""
    ones = (counts.planes @ _BITS_OF_BYTES).reshape(-1) / max(counts.n_units, 1)
    if counts.dtype.splits[-1] == Split.FLOAT:  # undo the rotation of the leading bits
        n_bits, rotation = min(16, ones.size), _ROTATION.get(counts.dtype.name, 1)
        ones[:n_bits] = np.concatenate(
            [ones[n_bits - rotation : n_bits], ones[: n_bits - rotation]]
        )
    both = np.stack([ones, 1 - ones])
    logs = np.log2(both, where=both > 0, out=np.zeros_like(both))
    return tuple(np.abs((both * logs).sum(axis=0)).tolist())


def _noise_bits(dtype: str, entropies: Sequence[float]) -> int:
    """Bits that are noise. Bits of the exponent are not counted one by one: they depend on each
    other, so that all of them together are far from noise even if each one is even."""
    parts = FLOATS.get(dtype)
    others = [*entropies[:1], *entropies[1 + parts.exponent_bits :]] if parts else entropies
    return sum(each > _NOISE for each in others)


def packed_estimate(
    sample: Sample, level: Level | str, base: Sample | None = None
) -> tuple[Estimate, Frame]:
    """What a tensor takes as a frame, from its sample.

    The runs are packed as one tensor, because what chunks and columns have once weighs too much in
    a single run: differences from a base would seem several percent longer than they are. Each run
    is then packed alone, and the spread of their sizes gives the error of sampling. A chunk of the
    sample has values of several places, which makes it a little longer than chunks of the tensor;
    a share of the size for that is part of the error.

    Args:
        sample: the tensor's sample.
        level: "fast", "default" or "max".
        base: the sample of its base, at the same places.

    Returns:
        The bytes of its frame, header included, and the frame of the sample.
    """
    places, olds = sample.places, base.runs if base else [None] * len(sample.runs)
    whole = _packed(sample, *joined(sample), level, base, joined(base)[0] if base else None)
    if len(sample.runs) == 1:
        return estimate(places, [whole.nbytes]), whole
    runs = zip(sample.runs, places.shapes, olds, strict=True)
    alone = [_packed(sample, run, shape, level, base, old) for run, shape, old in runs]
    error = estimate(places, [sum(_parts(frame)) for frame in alone]).error
    fixed, varying = _parts(whole)
    nbytes = round(fixed + varying * places.nbytes / places.sampled_nbytes)
    joining = _JOINING * nbytes * (1 - places.sampled_nbytes / places.nbytes)
    return Estimate(nbytes, error + round(joining)), whole


def _packed(
    sample: Sample, data: ByteArray, shape: tuple[int, ...], level: Level | str,
    base: Sample | None, old: ByteArray | None,
) -> Frame:  # fmt: skip
    """Some bytes of a sample as a frame."""
    base_dtype = base.entry.dtype if base else None
    return compress_buffer(
        data, sample.entry.dtype, shape, level=level, threads=1, base=old, base_dtype=base_dtype
    )


def _parts(frame: Frame) -> tuple[float, float]:
    """Bytes of a frame that a tensor has once, and those that more rows have more of."""
    header, n = frame.header, frame.header.n_row_dims
    n_rows, n_columns = (math.prod(dims) for dims in (frame.shape[:n], frame.shape[n:]))
    # Side data has a byte for each row and each column.
    side = len(header.side_stream) * n_rows / (n_rows + n_columns)
    table = 4 * (1 + header.n_planes) * frame.n_chunks
    return header.header_nbytes - side - table, frame.nbytes - header.header_nbytes + side + table


def _counts_of(sample: Sample) -> PlaneCounts:
    counts = PlaneCounts(sample.entry.dtype)
    counts.add(joined(sample)[0])
    return counts


def describe_tensor(opened: Opened, sample: Sample) -> tuple[TensorRow, PlaneCounts]:
    """What the report says of one tensor, and the counts of its values.

    Args:
        opened: the source.
        sample: a sample of the tensor.
    """
    entry, counts = sample.entry, _counts_of(sample)
    packed = {level: packed_estimate(sample, level) for level in ("fast", "default", "max")}
    levels = {level: nbytes for level, (nbytes, _) in packed.items()}
    frame, stored = packed["default"][1], opened.frame(entry.name)
    if stored is not None:
        frame = stored
        if frame.level is not None:
            levels[frame.level.name.lower()] = Estimate(frame.nbytes)
    entropies = bit_entropies(counts)
    n_units = entry.nbytes // counts.dtype.unit_nbytes
    bits = sum(counts.entropy(i) for i in range(len(counts.planes)))
    row = TensorRow(
        opened.row.name, entry.name, entry.dtype, entry.shape,
        role_of(entry.name), kind_of(entry.name), layer_of(entry.name),
        entry.nbytes, sample.places.sampled_nbytes, levels,
        Estimate(round(bits * n_units / 8), levels["default"].error),
        entry.packed_nbytes, frame.split.name.lower(),
        frame.plan.reason if frame.plan else "as the packed file has it",
        _planes(counts, frame), entropies, _noise_bits(entry.dtype, entropies),
    )  # fmt: skip
    return row, counts


def _planes(counts: PlaneCounts, frame: Frame) -> tuple[PlaneRow, ...]:
    """The planes, with entropies of the dtype's own split; the frame may be cut otherwise."""
    entropies = [counts.entropy(i) for i in range(len(counts.planes))]
    n_units = frame.logical_nbytes / counts.dtype.unit_nbytes or 1
    found = [
        (
            plane.name,
            8 * plane.nbytes / n_units,
            {m.name.lower(): n for m, n in plane.modes.items()},
        )
        for plane in frame.planes()
    ]
    if len(found) != len(entropies):  # whole units are one plane
        _, packed, modes = found[0]
        return (PlaneRow("all", 8 * counts.dtype.unit_nbytes, sum(entropies), packed, modes),)
    return tuple(
        PlaneRow(name, 8, value, packed, modes)
        for value, (name, packed, modes) in zip(entropies, found, strict=True)
    )


def exponent_rows(
    counted: Sequence[tuple[TensorRow, PlaneCounts]],
) -> tuple[ExponentRow, ...]:
    """How often each exponent occurs, by role, kind and dtype. Tensors count by their size, however
    much of them was sampled."""
    sums: dict[tuple[str, str, str], NDArray[np.float64]] = {}
    for row, counts in counted:
        if counts.n_units and counts.exponents.size:
            key = row.role, row.kind, row.dtype
            weighted = counts.exponents * (row.nbytes / max(row.sampled_nbytes, 1))
            sums[key] = sums.get(key, np.zeros(counts.exponents.size)) + weighted
    return tuple(_exponent_row(*key, found) for key, found in sums.items())


def _exponent_row(role: str, kind: str, dtype: str, counts: NDArray[np.float64]) -> ExponentRow:
    shares = counts / counts.sum()
    zeros, shares = float(shares[0]), shares[1:]
    used = np.flatnonzero(shares > 0)
    if not used.size:
        return ExponentRow(role, kind, dtype, 0, (), zeros)
    first, last = int(used[0]), int(used[-1])
    found = tuple(round(float(share), 6) for share in shares[first : last + 1])
    return ExponentRow(role, kind, dtype, first + 1 - FLOATS[dtype].bias, found, zeros)
