"""Samples of tensors, and what they say of the whole, with the error.

A sample is some runs of a tensor: the tensor is cut into as many equal parts as there are runs, and
each part gives one run at a random place (stratified sampling; Cochran, Sampling Techniques, 1977,
chapter 5). Large tensors have more runs than small ones, and very small ones are taken whole.

Runs are short, because values that are unlike the others often lie together, such as the rows of
words that were never used: many short runs meet them, and show how much they vary. A run has whole
rows, so that runs can be packed together as a smaller tensor of the same kind. The places follow
from the tensor's name and size, so that reports of the same files agree, and so that checkpoints
are compared at the same places.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.layout import CHUNK_NBYTES, DTYPE_BY_NAME
from packhorse.reports.results import Estimate
from packhorse.reports.sources import Entry, Opened

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "RUN_NBYTES",
    "Places",
    "Sample",
    "budget",
    "choose_places",
    "estimate",
    "joined",
    "take_sample",
    "whole_places",
    "whole_sample",
]

RUN_NBYTES = 1 << 16
_MIN_NBYTES = 8 * RUN_NBYTES  # of a sample, unless it is the tensor
_MIN_RUNS = 2  # one would say nothing of the error
_WHOLE_NBYTES = _MIN_NBYTES * 3 // 2  # a tensor of up to so many bytes is taken whole
_UNIT = math.lcm(*(dtype.bits for dtype in DTYPE_BY_NAME.values())) // 8


@dataclass(frozen=True)
class Places:
    """Where a sample lies.

    Attributes:
        runs: the first byte of each run, and the one after its last, in order.
        shapes: the shape of each run.
        nbytes: bytes of the tensor.
    """

    runs: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int

    @property
    def sampled_nbytes(self) -> int:
        """Bytes of the sample."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def is_whole(self) -> bool:
        """Whether the sample is the tensor."""
        return self.sampled_nbytes == self.nbytes


@dataclass(frozen=True)
class Sample:
    """Some runs of a tensor, and where they lie."""

    entry: Entry
    places: Places
    runs: tuple[ByteArray, ...]


def budget(entries: Sequence[Entry], sample_nbytes: int) -> float:
    """The share of each tensor to sample, so that all samples together have about `sample_nbytes`.
    Each has at least eight runs, however many tensors there are.

    Args:
        entries: the tensors of a source.
        sample_nbytes: bytes to look at.
    """
    small = [entry.nbytes for entry in entries if entry.nbytes <= _WHOLE_NBYTES]
    large = sum(entry.nbytes for entry in entries) - sum(small)
    return max(sample_nbytes - sum(small), 0) / large if large else 1.0


def whole_places(entry: Entry) -> Places:
    """The whole tensor, as its own sample."""
    return Places(((0, entry.nbytes),), (entry.shape,), entry.nbytes)


def choose_places(entry: Entry, share: float) -> Places:
    """Where to sample a tensor.

    Args:
        entry: the tensor.
        share: how much of it to sample, about, between 0 and 1; a tensor that is hardly longer than
            that is taken whole.
    """
    run_nbytes, shape = _run_of(entry)
    n_units = entry.nbytes // run_nbytes  # the rest at the end is never sampled; it is short
    n_runs = max(round(max(entry.nbytes * share, _MIN_NBYTES) / run_nbytes), _MIN_RUNS)
    if entry.nbytes <= n_runs * run_nbytes * 3 // 2 or n_units <= n_runs:
        return whole_places(entry)
    rng = np.random.default_rng(zlib.crc32(entry.name.encode()) + entry.nbytes)
    edges = [i * n_units // n_runs for i in range(n_runs + 1)]
    starts = [int(rng.integers(a, b)) * run_nbytes for a, b in pairwise(edges)]
    runs = tuple((start, start + run_nbytes) for start in starts)
    return Places(runs, (shape,) * n_runs, entry.nbytes)


def _run_of(entry: Entry) -> tuple[int, tuple[int, ...]]:
    """The bytes and the shape of a run: whole rows, unless one is longer than a chunk, then whole
    elements."""
    bits, nbytes = DTYPE_BY_NAME[entry.dtype].bits, RUN_NBYTES
    row_bits = math.prod(entry.shape[1:]) * bits
    if len(entry.shape) > 1 and row_bits % 8 == 0 and 0 < row_bits <= 8 * CHUNK_NBYTES:
        n_rows = max(8 * nbytes // row_bits, 1)
        return n_rows * row_bits // 8, (n_rows, *entry.shape[1:])
    nbytes = nbytes // _UNIT * _UNIT
    return nbytes, (nbytes * 8 // bits,)


def take_sample(opened: Opened, entry: Entry, places: Places, threads: int = 1) -> Sample:
    """Reads a sample.

    Raises:
        CorruptionError, CompatibilityError, BaseMismatchError: as for `Opened.read`.
    """
    if places.is_whole:
        return Sample(entry, places, (opened.read(entry.name, threads),))
    return Sample(entry, places, tuple(opened.runs(entry.name, places.runs, threads)))


def whole_sample(name: str, dtype: str, shape: tuple[int, ...], data: Buffer) -> Sample:
    """A tensor in memory as its own sample, for the functions that take samples.

    Args:
        name: its name, from which its role and its kind are guessed.
        dtype: safetensors' name of its dtype.
        shape: its shape.
        data: its bytes in C order, which are not copied.

    Raises:
        TypeError: the data is not C-contiguous.
    """
    memory = as_bytes(data, "data")
    places = Places(((0, memory.size),), (shape,), memory.size)
    return Sample(Entry(name, dtype, shape, memory.size, None), places, (memory,))


def joined(sample: Sample) -> tuple[ByteArray, tuple[int, ...]]:
    """The runs of a sample as one tensor: its bytes and its shape. Runs have the same rows, or are
    vectors."""
    first = sample.places.shapes[0]
    if len(sample.runs) == 1:
        return sample.runs[0], first
    n_rows = sum(shape[0] for shape in sample.places.shapes)
    return np.concatenate(sample.runs), (n_rows, *first[1:])


def estimate(places: Places, sizes: Sequence[float], fixed: int = 0) -> Estimate:
    """What all of a tensor takes, from what the runs of its sample take.

    Args:
        places: where the runs lie.
        sizes: the packed bytes of each run, without what every tensor has once.
        fixed: bytes that every tensor has once.

    Returns:
        The bytes, with two standard errors of the mean of the runs' ratios, less the share that was
        sampled. Strata make the true error smaller than that.
    """
    nbytes = places.sampled_nbytes
    if not nbytes:
        return Estimate(fixed + round(sum(sizes)))
    expected = sum(sizes) / nbytes * places.nbytes + fixed
    if places.is_whole:
        return Estimate(round(expected))
    ratios = np.array(sizes) / [stop - start for start, stop in places.runs]
    spread = float(ratios.std(ddof=1)) / math.sqrt(len(sizes)) if len(sizes) > 1 else 1.0
    left = math.sqrt(1 - nbytes / places.nbytes)
    return Estimate(round(expected), round(2 * spread * left * places.nbytes))
