"""One checkpoint of a series: its samples, at the same places in all checkpoints.

Checkpoints are compared place by place, so where a tensor is sampled follows from its name and its
size alone. A rounded copy is sampled where its master is, and tensors that equal each other are
sampled at the same places, so that samples show what a snapshot store would notice: it packs a
rounded copy against its master, and keeps equal tensors once. Which tensors are copies is looked up
once, in the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.results import SourceRow
from packhorse.reports.sampling import Places, Sample, choose_places, take_sample, whole_places
from packhorse.reports.sources import READ_ERRORS, Entry, Opened
from packhorse.storage.frames.casts import find_casts
from packhorse.storage.frames.refs import TensorSpec
from packhorse.threads import map_tensors

__all__ = ["Checkpoint", "SamplePlan", "plan_samples"]

_HEAD = 64  # elements that must be equal before two tensors of a plain file are compared
_MIN_NUMEL = 1024  # smaller tensors are sampled whole, so that their places never differ


@dataclass(frozen=True)
class SamplePlan:
    """Where the tensors of a series are sampled.

    Attributes:
        share: how much to sample of each tensor, about; None for all of it.
        casts: for each tensor that seems to be a rounded copy, its master.
        twins: for each tensor that seems to equal an earlier one, that tensor.
    """

    share: float | None
    casts: Mapping[str, str]
    twins: Mapping[str, str]

    def places(self, entry: Entry) -> Places:
        """Where to sample a tensor."""
        if self.share is None:
            return whole_places(entry)
        name = self.twins.get(entry.name, entry.name)
        if name not in self.casts or DTYPE_BY_NAME[entry.dtype].bits != 16:
            return choose_places(replace(entry, name=name), self.share)
        master = self.twins.get(self.casts[name], self.casts[name])
        where = choose_places(Entry(master, "F32", entry.shape, 2 * entry.nbytes, None), self.share)
        runs = tuple((start // 2, stop // 2) for start, stop in where.runs)
        return Places(runs, where.shapes, entry.nbytes)


def plan_samples(opened: Opened, share: float | None) -> SamplePlan:
    """Finds the rounded copies and the equal tensors of a checkpoint.

    Args:
        opened: the checkpoint.
        share: how much to sample of each tensor, about; None for all of it.
    """
    entries = opened.entries
    specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries]
    found = find_casts(specs, lambda i, n: _head(opened, entries[i], n))
    casts = {entries[i].name: entries[j].name for i, j in found.items()}
    return SamplePlan(share, casts, _twins(opened))


def _head(opened: Opened, entry: Entry, n: int) -> ByteArray:
    """The first elements; zeros, which match nothing, if they cannot be read."""
    nbytes = min(n * DTYPE_BY_NAME[entry.dtype].bits // 8, entry.nbytes)
    try:
        return opened.runs(entry.name, [(0, nbytes)])[0]
    except READ_ERRORS:
        return np.zeros(nbytes, np.uint8)


def _twins(opened: Opened) -> dict[str, str]:
    groups: dict[tuple[str, int], list[Entry]] = {}
    for entry in opened.entries:
        if entry.numel >= _MIN_NUMEL:
            groups.setdefault((entry.dtype, entry.numel), []).append(entry)
    twins = {}
    for group in groups.values():
        firsts: dict[bytes, str] = {}
        for entry in group if len(group) > 1 else ():
            first = firsts.setdefault(_mark(opened, entry), entry.name)
            if first != entry.name:
                twins[entry.name] = first
    return twins


def _mark(opened: Opened, entry: Entry) -> bytes:
    """Bytes that equal tensors have in common."""
    digest = opened.content_hash(entry.name)
    if digest is not None:
        return digest
    if "://" in opened.source.path:  # a request for each tensor would take longer than it is worth
        return entry.name.encode()
    return bytes(_head(opened, entry, _HEAD))


class Checkpoint:
    """An open checkpoint, or its samples after it was closed.

    Attributes:
        row: what the report says of it.
        entries: its tensors by name.
        damaged: for each tensor that could not be read, the error.
    """

    def __init__(self, opened: Opened, plan: SamplePlan) -> None:
        """Args:
        opened: the checkpoint.
        plan: where to sample.
        """
        self.row: SourceRow = opened.row
        self.entries = {entry.name: entry for entry in opened.entries}
        self.damaged: dict[str, str] = {}
        self._plan = plan
        self._opened: Opened | None = opened
        self._samples: dict[str, Sample] = {}

    def hold(self, threads: int) -> None:
        """Reads all samples into memory, so that the checkpoint can be closed."""
        entries = list(self.entries.values())

        def read(i: int, n_threads: int) -> Sample | None:
            found = self.sample(entries[i].name, n_threads)
            if found is None:
                return None
            # Runs of a plain file are mapped, and would change with the file.
            return replace(found, runs=tuple(run.copy() for run in found.runs))

        found = map_tensors(read, [entry.nbytes for entry in entries], threads)
        self._samples = {sample.entry.name: sample for sample in found if sample is not None}
        self._opened = None

    def sample(self, name: str, threads: int = 1) -> Sample | None:
        """The sample of a tensor; None if there is no such tensor, or if it cannot be read.
        Several threads may call it at once."""
        entry = self.entries.get(name)
        if self._opened is None or entry is None:
            return self._samples.get(name)
        try:
            return take_sample(self._opened, entry, self._plan.places(entry), threads)
        except READ_ERRORS as error:
            self.damaged[name] = str(error)
            return None

    def sampled_nbytes(self, names: Sequence[str]) -> list[int]:
        """Bytes of the samples of some tensors."""
        return [self._plan.places(self.entries[name]).sampled_nbytes for name in names]
