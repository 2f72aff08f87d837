"""How fast this machine packs, unpacks, copies and stores two checkpoints, measured on a sample.

The sample of each tensor is packed as one tensor, in full and as a delta, with as many threads as
the caller uses, and unpacked again. Each pass is timed twice, and the quicker one counts: the first
one waits for fresh memory. Small tensors are sampled whole and large ones are not, so the time of
each tensor counts by its size. The disk is timed with a temporary file that has no name, so that
nothing of it is left.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.frame import Frame, compress_buffer
from packhorse.reports.checkpoint import Checkpoint, SamplePlan, plan_samples
from packhorse.reports.deltas import is_cast, is_comparable, key_of
from packhorse.reports.sampling import budget, joined
from packhorse.reports.sources import Source, opened
from packhorse.threads import map_tensors

__all__ = ["DiskRate", "Rates", "measure_disk", "measure_rates"]

_DISK_NBYTES = 1 << 26
_PIECE_NBYTES = 1 << 22
_ROUNDS = 2


@dataclass(frozen=True)
class Rates:
    """Seconds for each byte of a checkpoint, and shares of packed bytes.

    Attributes:
        sampled_nbytes: bytes that were measured.
        threads: how many threads worked.
        pack_full: packing all tensors on their own.
        pack_delta: packing the tensors that changed as deltas, once their bases are decoded.
        unpack_full: unpacking all tensors, stored in full, into new memory.
        unpack_base: unpacking those that changed.
        unpack_delta: undoing one delta of those that are stored as deltas.
        copy: copying the tensors.
        changed: share of the bytes of full frames that tensors which changed take.
        differences: share of a delta's bytes that are differences from the one before; the rest are
            frames that need nothing older.
    """

    sampled_nbytes: int
    threads: int
    pack_full: float
    pack_delta: float
    unpack_full: float
    unpack_base: float
    unpack_delta: float
    copy: float
    changed: float
    differences: float


@dataclass(frozen=True)
class DiskRate:
    """Bytes a second, and where they were measured; an empty place if the caller gave them."""

    write: float
    read: float
    place: str


@dataclass(frozen=True)
class _Tensor:
    """A tensor that a store would not have twice.

    Attributes:
        data: its sample.
        dtype, shape: of the sample.
        old: the sample before; None if it is new.
        master: the sample of its master if it is a rounded copy.
        is_equal: whether it did not change.
        weight: bytes of the tensor / bytes of the sample.
    """

    data: ByteArray
    dtype: str
    shape: tuple[int, ...]
    old: ByteArray | None
    master: ByteArray | None
    is_equal: bool
    weight: float

    def pack(self, base: ByteArray | None, threads: int) -> Frame:
        """As a store packs it: the content is hashed first."""
        content_hash(self.data, threads=threads)
        base, dtype = (self.master, "F32") if self.master is not None else (base, None)
        return compress_buffer(
            self.data, self.dtype, self.shape, threads=threads, base=base, base_dtype=dtype
        )

    def unpack(self, frame: Frame, dst: ByteArray, threads: int) -> None:
        """As a store unpacks it: the content is hashed at the end."""
        base = self.master if self.master is not None else self.old
        base = base if frame.base_hash is not None else None
        frame.decompress_into(dst, threads=threads, base=base, base_hash=frame.base_hash)
        content_hash(dst, threads=threads)


def measure_rates(old: Source, new: Source, *, sample_nbytes: int, threads: int) -> Rates:
    """Packs and unpacks a sample of a checkpoint, in full and as a delta.

    Args:
        old: the checkpoint before.
        new: the checkpoint.
        sample_nbytes: bytes to sample of each, about.
        threads: how many threads to use.

    Raises:
        PackhorseError, OSError, ValueError: one of them cannot be opened any more.
    """
    with opened(new) as found:
        plan = plan_samples(found, budget(found.entries, sample_nbytes))
        after = _held(Checkpoint(found, plan), threads)
    with opened(old) as found:
        before = _held(Checkpoint(found, plan), threads)
    return _measured(_tensors(after, before, plan), after.row.nbytes, threads)


def _held(checkpoint: Checkpoint, threads: int) -> Checkpoint:
    checkpoint.hold(threads)
    return checkpoint


def _tensors(new: Checkpoint, old: Checkpoint, plan: SamplePlan) -> list[_Tensor]:
    """The tensors of a checkpoint, those that equal another one only once."""
    found, seen = [], set()
    for name in new.entries:
        sample, before = new.sample(name), old.sample(name)
        if sample is None or key_of(sample) in seen:
            continue
        seen.add(key_of(sample))
        master = new.sample(plan.casts[name]) if name in plan.casts else None
        is_same = before is not None and is_comparable(before, sample)
        data, shape = joined(sample)
        found.append(
            _Tensor(
                data, sample.entry.dtype, shape,
                joined(before)[0] if before is not None and is_same else None,
                joined(master)[0] if master is not None and is_cast(sample, master) else None,
                before is not None and is_same and key_of(before) == key_of(sample),
                sample.entry.nbytes / max(data.size, 1),
            )
        )  # fmt: skip
    return found


def _measured(tensors: Sequence[_Tensor], nbytes: int, threads: int) -> Rates:
    """The rates, by the bytes of the whole checkpoint."""
    changed = [tensor for tensor in tensors if not tensor.is_equal]
    fulls, pack_full = _packed(tensors, threads, with_base=False)
    deltas, pack_delta = _packed(changed, threads, with_base=True)
    pairs = list(zip(tensors, fulls, strict=True))
    bases = [pair for pair in pairs if not pair[0].is_equal]
    pairs_of_deltas = list(zip(changed, deltas, strict=True))
    differing = [
        pair for pair in pairs_of_deltas if pair[1].base_hash is not None and pair[0].master is None
    ]
    nbytes = max(nbytes, 1)
    return Rates(
        sampled_nbytes=sum(tensor.data.size for tensor in tensors),
        threads=threads,
        pack_full=pack_full / nbytes,
        pack_delta=pack_delta / nbytes,
        unpack_full=_unpacked(pairs, threads, new=True) / nbytes,
        unpack_base=_unpacked(bases, threads) / nbytes,
        unpack_delta=_unpacked(differing, threads) / nbytes,
        copy=_copied([tensor.data for tensor in tensors]),
        changed=_total(bases) / (_total(pairs) or 1),
        differences=_total(differing) / (_total(pairs_of_deltas) or 1),
    )


def _total(pairs: Sequence[tuple[_Tensor, Frame]]) -> float:
    """Bytes of the frames of whole tensors."""
    return sum(tensor.weight * frame.nbytes for tensor, frame in pairs)


def _seconds(work: Callable[[int, int], object], tensors: Sequence[_Tensor], threads: int) -> float:
    """How long the work takes for whole tensors, given that on their samples."""
    own = [0.0] * len(tensors)

    def one(i: int, n_threads: int) -> None:
        start = time.perf_counter()
        work(i, n_threads)
        own[i] = time.perf_counter() - start

    def run() -> float:
        start = time.perf_counter()
        map_tensors(one, [tensor.data.size for tensor in tensors], threads)
        seconds = time.perf_counter() - start
        weighted = sum(tensor.weight * each for tensor, each in zip(tensors, own, strict=True))
        return seconds * weighted / (sum(own) or 1.0)

    return min(run() for _ in range(_ROUNDS))


def _packed(
    tensors: Sequence[_Tensor], threads: int, *, with_base: bool
) -> tuple[list[Frame], float]:
    """The frames, and the seconds that they take."""
    frames: dict[int, Frame] = {}

    def work(i: int, n_threads: int) -> None:
        frames[i] = tensors[i].pack(tensors[i].old if with_base else None, n_threads)

    seconds = _seconds(work, tensors, threads)
    return [frames[i] for i in range(len(tensors))], seconds


def _unpacked(pairs: Sequence[tuple[_Tensor, Frame]], threads: int, *, new: bool = False) -> float:
    """The seconds of unpacking: into new memory, which a restore has to wait for, or into memory
    that is used again, as for bases."""
    tensors = [tensor for tensor, _ in pairs]
    places = [np.empty(0 if new else tensor.data.size, np.uint8) for tensor in tensors]

    def one(i: int, n_threads: int) -> None:
        place = np.empty(tensors[i].data.size, np.uint8) if new else places[i]
        tensors[i].unpack(pairs[i][1], place, n_threads)

    return _seconds(one, tensors, threads)


def _copied(data: Sequence[ByteArray]) -> float:
    """The seconds for each byte of copying on one thread into memory that was used before, as
    `take_async` does."""
    places, seconds = [np.zeros(each.size, np.uint8) for each in data], []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for place, each in zip(places, data, strict=True):
            place[:] = each
        seconds.append(time.perf_counter() - start)
    return min(seconds) / max(sum(each.size for each in data), 1)


def measure_disk(path: str, nbytes: int = _DISK_NBYTES) -> DiskRate:
    """Writes and reads a temporary file without a name.

    Args:
        path: a source. The file is written into its folder, or into the folder itself; into the
            system's temporary folder if it is at a URL, or if its folder cannot be written to.
        nbytes: the size of the file.

    Raises:
        OSError: the temporary folder cannot be written to either, or is full.
    """
    place = Path(path)
    folder = str(place if place.is_dir() else place.parent)
    if "://" not in path:
        with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return DiskRate(*_timed(file, nbytes), folder)
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return DiskRate(*_timed(file, nbytes), f"{folder}, not where the checkpoints are")


def _timed(file: IO[bytes], nbytes: int) -> tuple[float, float]:
    """Bytes a second of writing, flush included, and of reading what no memory caches."""
    piece = np.random.default_rng(0).integers(0, 256, min(_PIECE_NBYTES, nbytes), np.uint8)
    start = time.perf_counter()
    for _ in range(nbytes // piece.size):
        file.write(piece)
    os.fsync(file.fileno())
    written = time.perf_counter() - start
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    start = time.perf_counter()
    while file.readinto(memoryview(piece)):  # type: ignore[attr-defined]
        pass
    return nbytes / written, nbytes / (time.perf_counter() - start)
