"""Samples of tensors, and what they say of the whole, with the error.

A sample is some runs of a tensor: the tensor is cut into as many equal parts as there are runs, and
each part gives one run at a random place (stratified sampling; Cochran, Sampling Techniques, 1977,
chapter 5). Runs have whole rows where rows are short, so that they pack as the tensor does. A small
tensor is its own sample, without error. The places follow from the tensor's name and size, so that
reports of the same files agree, and so that checkpoints are compared at the same places.
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
from packhorse.layout import DTYPE_BY_NAME
from packhorse.report.results import Estimate
from packhorse.report.sources import Entry, Opened

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "RUN_NBYTES",
    "Places",
    "Sample",
    "budget",
    "choose_places",
    "estimate",
    "take_sample",
    "whole_sample",
]

# A chunk or two of the format: long enough to pack as well as the whole tensor.
RUN_NBYTES = 1 << 18
_MIN_RUNS = 4  # fewer would say nothing of the error
_UNIT = math.lcm(*(dtype.bits for dtype in DTYPE_BY_NAME.values())) // 8


@dataclass(frozen=True)
class Places:
    """Where a sample lies.

    Attributes:
        runs: the first and the last byte but one of each run, in order.
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


def budget(entries: Sequence[Entry], sample_nbytes: int) -> int:
    """The bytes to sample of each tensor that has more, so that all samples together have about
    `sample_nbytes`: what small tensors leave goes to the large ones."""
    left, sizes = sample_nbytes, sorted(entry.nbytes for entry in entries)
    for i, nbytes in enumerate(sizes):
        share = left // (len(sizes) - i)
        if nbytes > share:
            return max(share, _MIN_RUNS * RUN_NBYTES // 16)
        left -= nbytes
    return max(sizes, default=0)


def choose_places(entry: Entry, limit: int) -> Places:
    """Where to sample a tensor.

    Args:
        entry: the tensor.
        limit: bytes to sample, about; a tensor that is hardly longer is taken whole.
    """
    if entry.nbytes <= limit + limit // 2 or entry.nbytes <= _MIN_RUNS * _UNIT:
        return Places(((0, entry.nbytes),), (entry.shape,), entry.nbytes)
    n_runs = max(_MIN_RUNS, limit // RUN_NBYTES)
    run_nbytes, shape = _run_of(entry, limit // n_runs)
    rng = np.random.default_rng(zlib.crc32(entry.name.encode()) + entry.nbytes)
    n_units = entry.nbytes // run_nbytes  # the rest at the end is never sampled; it is short
    n_runs = min(n_runs, n_units)
    edges = [i * n_units // n_runs for i in range(n_runs + 1)]
    starts = [int(rng.integers(a, b)) * run_nbytes for a, b in pairwise(edges)]
    runs = tuple((start, start + run_nbytes) for start in starts)
    return Places(runs, (shape,) * n_runs, entry.nbytes)


def _run_of(entry: Entry, nbytes: int) -> tuple[int, tuple[int, ...]]:
    """The bytes and the shape of a run of about `nbytes`: whole rows if many fit, otherwise whole
    elements."""
    bits = DTYPE_BY_NAME[entry.dtype].bits
    row_nbytes = entry.nbytes // entry.shape[0] if entry.shape else entry.nbytes
    if len(entry.shape) > 1 and row_nbytes * 16 <= nbytes and row_nbytes * 8 % bits == 0:
        n_rows = nbytes // row_nbytes
        if n_rows * row_nbytes % _UNIT == 0 or bits % 8 == 0:
            return n_rows * row_nbytes, (n_rows, *entry.shape[1:])
    nbytes = max(nbytes // _UNIT, 1) * _UNIT
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
