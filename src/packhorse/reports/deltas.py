"""What a tensor takes on its own and as a delta, from samples, as a snapshot store counts it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packhorse.codecs.content import content_hash
from packhorse.reports.bits import packed_estimate
from packhorse.reports.movement import unchanged_share
from packhorse.reports.results import Estimate
from packhorse.reports.sampling import Sample
from packhorse.reports.sources import Entry

__all__ = [
    "Key",
    "Measured",
    "is_cast",
    "is_comparable",
    "key_of",
    "measure_tensor",
    "packed_nbytes",
]

_LEVEL = "default"

# Equal for samples of equal tensors, as far as the samples show: dtype, elements, places, hashes.
Key = tuple[str, int, tuple[tuple[int, int], ...], tuple[bytes, ...]]


@dataclass(frozen=True)
class Measured:
    """What one tensor takes.

    Attributes:
        entry: the tensor.
        key: the same for samples of equal tensors.
        full: bytes if packed on its own, or against its master if it is a rounded copy.
        delta: bytes if packed against the tensor before, or as `full` where that is shorter; None
            if there was no checkpoint before.
        unchanged: the share of its elements with the bits of before; None if there is no tensor of
            this name, dtype and shape before.
    """

    entry: Entry
    key: Key
    full: Estimate
    delta: Estimate | None = None
    unchanged: float | None = None


def measure_tensor(
    new: Sample,
    old: Sample | None = None,
    *,
    master: Sample | None = None,
    full: Estimate | None = None,
) -> Measured:
    """What a tensor takes in full and as a delta, at the level "default".

    Args:
        new: a sample of it.
        old: a sample of the tensor before, at the same places; None if there is none.
        master: if it is a rounded copy, a sample of its master at the same places.
        full: what it takes in full, if the caller knows it.

    Raises:
        ValueError: the samples are of different places or dtypes.

    Example:
        >>> import numpy as np
        >>> from packhorse.reports.sampling import whole_sample
        >>> values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
        >>> old = whole_sample("w", "F32", (4096,), values)
        >>> new = whole_sample("w", "F32", (4096,), values * np.float32(1.0001))
        >>> found = measure_tensor(new, old)
        >>> found.full.nbytes > found.delta.nbytes, found.unchanged < 0.01
        (True, True)
    """
    full = full or packed_nbytes(new, master)
    found = Measured(new.entry, key_of(new), full)
    if old is None:
        return replace(found, delta=full)
    unchanged = unchanged_share(old, new)
    if unchanged == 1.0:  # a store has it already
        return replace(found, delta=Estimate(0), unchanged=unchanged)
    delta = full if master else packed_nbytes(new, old)
    return replace(found, delta=delta, unchanged=unchanged)


def key_of(sample: Sample) -> Key:
    """The same for samples of equal tensors, as far as the samples show."""
    digests = tuple(content_hash(run) for run in sample.runs)
    return sample.entry.dtype, sample.entry.numel, sample.places.runs, digests


def is_comparable(old: Sample, new: Sample) -> bool:
    """Whether a store would make a delta: the dtype and the shape are the same, and the samples are
    of the same places."""
    kinds = [(each.entry.dtype, each.entry.shape, each.places.runs) for each in (old, new)]
    return kinds[0] == kinds[1]


def is_cast(copy: Sample, master: Sample) -> bool:
    """Whether a master was sampled where its rounded copy was."""
    runs = tuple((start * 2, stop * 2) for start, stop in copy.places.runs)
    dtypes = copy.entry.dtype in ("BF16", "F16") and master.entry.dtype == "F32"
    return dtypes and runs == master.places.runs


def packed_nbytes(sample: Sample, base: Sample | None = None) -> Estimate:
    """What a tensor takes as a frame, at the level "default".

    Args:
        sample: a sample of it.
        base: a sample of its base at the same places: of the tensor before, or of the master if it
            is a rounded copy. The frame is a delta only if that is shorter.

    Returns:
        The bytes, with the error of sampling.
    """
    return packed_estimate(sample, _LEVEL, base)[0]
