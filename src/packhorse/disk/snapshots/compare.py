"""Compares two snapshots, tensor by tensor.

Equal tensors are recognised by their content hashes, and not read. Changed tensors are decoded,
two at a time, and compared in windows, so that the comparison itself takes little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.results import Progress
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.restore import read_newest
from packhorse.disk.snapshots.results import Change, TensorDiff
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.errors import blaming
from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.frames.frame_store import FrameStore
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.interface import Storage
from packhorse.threads import map_tensors

__all__ = ["WINDOW_NBYTES", "compare_snapshots", "differing"]

WINDOW_NBYTES = 3 << 18  # whole elements of every dtype, even of those with 6 bits


def compare_snapshots(
    storage: Storage,
    catalog: Catalog,
    names: tuple[str, str],
    threads: int,
    progress: Progress | None,
) -> list[TensorDiff]:
    """What happened to each tensor: first the tensors of the second snapshot in its order, then
    those that only the first one has.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as for `SnapshotStore.diff`.
    """

    def work(old: Manifest, new: Manifest) -> list[TensorDiff]:
        pairs = list(_pairs(old, new))
        sizes = [_work_nbytes(*pair) for pair in pairs]
        with SnapshotFrames(storage) as store:

            def one(k: int, n_threads: int) -> TensorDiff:
                with blaming(f"snapshots {names[0]!r} and {names[1]!r}"):
                    found = _diff(store, *pairs[k], n_threads)
                if progress is not None:
                    progress(sizes[k])
                return found

            return map_tensors(one, sizes, threads)

    return read_newest(catalog, names, work)


def _pairs(old: Manifest, new: Manifest) -> Iterator[tuple[TensorRef | None, TensorRef | None]]:
    before = {tensor.path: tensor for tensor in old.tensors}
    for tensor in new.tensors:
        yield before.pop(tensor.path, None), tensor
    for tensor in before.values():
        yield tensor, None


def _work_nbytes(old: TensorRef | None, new: TensorRef | None) -> int:
    """Bytes that are decoded of each of the two: none unless values are compared."""
    return new.frame.logical_nbytes if new and _change(old, new) is Change.CHANGED else 0


def _change(old: TensorRef | None, new: TensorRef | None) -> Change:
    if old is None:
        return Change.ADDED
    if new is None:
        return Change.REMOVED
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Change.REPLACED
    return Change.EQUAL if old.frame.content == new.frame.content else Change.CHANGED


def _diff(
    store: FrameStore, old: TensorRef | None, new: TensorRef | None, threads: int
) -> TensorDiff:
    change, tensor = _change(old, new), new or old
    assert tensor is not None
    sums = _Sums(0 if change is Change.EQUAL else None)
    if change is Change.CHANGED and old is not None:
        sums = _compare(_decode(store, old, threads), _decode(store, tensor, threads), old.dtype)
    return TensorDiff(
        tensor.path, change, tensor.dtype, tensor.shape, tensor.frame.logical_nbytes,
        math.prod(tensor.shape), sums.n_changed, sums.largest,
        sums.total / sums.n_finite if sums.n_finite else None,
    )  # fmt: skip


def _decode(store: FrameStore, tensor: TensorRef, threads: int) -> ByteArray:
    return store.chain(tensor.frame, tensor.path).decode(threads, Scratch())


@dataclass(slots=True)
class _Sums:
    """Sums over the differences between two tensors."""

    n_changed: int | None
    largest: float | None = None
    total: float = 0.0
    n_finite: int = 0


def _compare(old: ByteArray, new: ByteArray, dtype: str) -> _Sums:
    n_changed, sums = 0, _Sums(0)
    for start in range(0, old.size, WINDOW_NBYTES):
        before, after = old[start : start + WINDOW_NBYTES], new[start : start + WINDOW_NBYTES]
        places = np.flatnonzero(differing(before, after, DTYPE_BY_NAME[dtype].bits))
        n_changed += places.size
        if places.size:
            _add(sums, before, after, places, dtype)
    sums.n_changed = n_changed
    return sums


def differing(
    old: ByteArray, new: ByteArray, bits: int
) -> np.ndarray[tuple[int], np.dtype[np.bool]]:
    """Which elements differ in their bits."""
    if bits % 8 == 0:
        unit = np.dtype(f"u{bits // 8}")
        return np.asarray(old.view(unit) != new.view(unit))
    unequal = np.unpackbits(old ^ new, bitorder="little").reshape(-1, bits)
    return np.asarray(unequal.any(axis=1))


def _add(
    sums: _Sums, old: ByteArray, new: ByteArray, places: np.ndarray[tuple[int], np.dtype[np.intp]],
    dtype: str,
) -> None:  # fmt: skip
    """Add the differences at some places to the sums."""
    framework = resolve_framework("np")
    numel = old.size * 8 // DTYPE_BY_NAME[dtype].bits
    before, after = framework.empty(dtype, (numel,)), framework.empty(dtype, (numel,))
    framework.fill(before, lambda memory: np.copyto(memory, old))
    framework.fill(after, lambda memory: np.copyto(memory, new))
    wide = np.complex128 if dtype == "C64" else np.float64
    with np.errstate(all="ignore"):
        change = np.abs(after[places].astype(wide) - before[places].astype(wide))
    change = change[np.isfinite(change)]
    if change.size:
        sums.largest = max(sums.largest or 0.0, float(change.max()))
        sums.total += float(change.sum())
        sums.n_finite += change.size
