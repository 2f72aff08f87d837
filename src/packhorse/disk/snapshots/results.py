"""What a store tells its callers: about a snapshot, about what is wrong, about what was pruned."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from packhorse.disk.snapshots.manifest import Manifest

__all__ = [
    "Change",
    "Lineage",
    "PruneResult",
    "RestoredFile",
    "SnapshotInfo",
    "SnapshotProblem",
    "SnapshotSummary",
    "StoreOverview",
    "StoredTensor",
    "TensorDiff",
    "describe",
]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a snapshot.

    Attributes:
        path: where it stands in the state.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
        nbytes: its size.
        packed_nbytes: the size of its frame, which other tensors and snapshots may share.
        n_deltas: how many deltas are decoded to restore it.
        content_hash: names its bytes; equal tensors of all snapshots share one frame.
        base_hash: names the bytes of the tensor that its frame is a delta against, if it is one.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int
    n_deltas: int
    content_hash: bytes
    base_hash: bytes | None


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot.

    Attributes:
        name: the snapshot's name.
        order: its place among all that were taken; larger is newer.
        time: when it was taken, in UTC.
        metadata: what the caller gave.
        nbytes: bytes of all tensors, restored.
        stored_nbytes: by how much the store grew when it was taken, the manifest not counted.
        needed_nbytes: bytes of all frames that restoring it reads, shared ones counted too.
        tensors: in the order of the state.
        notice: of one that was just taken, what should be known of new tensors that are smaller
            than their frames; None if they hardly count.
    """

    name: str
    order: int
    time: datetime
    metadata: dict[str, Any]
    nbytes: int
    stored_nbytes: int
    needed_nbytes: int
    tensors: tuple[StoredTensor, ...]
    notice: str | None = field(default=None, compare=False)

    @property
    def max_deltas(self) -> int:
        """The longest chain of deltas that restoring it decodes."""
        return max((tensor.n_deltas for tensor in self.tensors), default=0)


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """A snapshot without its tensors.

    Attributes:
        name: the snapshot's name.
        order: its place among all that were taken; larger is newer.
        time: when it was taken, in UTC.
        n_tensors: how many tensors it has.
        nbytes: bytes of all tensors, restored.
        stored_nbytes: by how much the store grew when it was taken, the manifest not counted.
        new_nbytes: bytes of the frames of tensors that no older snapshot has.
        max_deltas: the longest chain of deltas that restoring it decodes.
        base: the older snapshot that it has most from, equal tensors or bases of deltas; None if it
            has nothing from any.
    """

    name: str
    order: int
    time: datetime
    n_tensors: int
    nbytes: int
    stored_nbytes: int
    new_nbytes: int
    max_deltas: int
    base: str | None


@dataclass(frozen=True, slots=True)
class StoreOverview:
    """What `SnapshotStore.overview` tells.

    Attributes:
        snapshots: the oldest first.
        damaged: manifests that cannot be read, also where a snapshot has a good one beside it.
    """

    snapshots: list[SnapshotSummary]
    damaged: list[SnapshotProblem]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A snapshot, and what it has from older ones.

    Attributes:
        info: of the snapshot.
        new_nbytes: bytes of the frames of its tensors that no older snapshot has.
        base: the older snapshot that it has most from, equal tensors or bases of deltas; None if it
            has nothing from any.
        inherited: content hashes of those of its tensors that an older snapshot has, too.
    """

    info: SnapshotInfo
    new_nbytes: int
    base: str | None
    inherited: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """Something that `SnapshotStore.verify` found.

    Attributes:
        snapshot: name of a snapshot that is not good; a shared frame can harm others too. If it is
            another manifest of the snapshot that is bad, the snapshot itself may be good.
        tensor: path of the first tensor that cannot be restored; None if the manifest or a pack
            as a whole is bad.
        file: what is damaged.
        message: what is wrong, complete.
    """

    snapshot: str
    tensor: str | None
    file: str
    message: str


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What `SnapshotStore.prune` did.

    Attributes:
        removed: names of the snapshots that are gone.
        rewritten: names of those that have a new manifest, because frames had to move.
        freed_nbytes: bytes of the packs that were removed, less those that were written.
    """

    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    freed_nbytes: int


@dataclass(frozen=True, slots=True)
class RestoredFile:
    """What `SnapshotStore.restore_file` wrote.

    Attributes:
        output: the file.
        n_tensors: how many it holds.
        nbytes: bytes of them, restored.
        file_nbytes: the size of the file.
    """

    output: Path
    n_tensors: int
    nbytes: int
    file_nbytes: int


class Change(StrEnum):
    """What became of a tensor from one snapshot to another."""

    EQUAL = "equal"
    CHANGED = "changed"  # the same dtype and shape, other values
    REPLACED = "replaced"  # another dtype or shape
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor in two snapshots.

    Attributes:
        path: where it stands in the states.
        change: what became of it.
        dtype: safetensors' name, in the second snapshot, or in the first if it was removed.
        shape: the dimensions, likewise.
        nbytes: its size, likewise.
        n_values: how many elements it has.
        n_changed: how many of them have other bits; None if that cannot be compared.
        max_change: the largest absolute difference of changed values, of those that are finite;
            None if there is none, or if nobody knows the numbers of that dtype.
        mean_change: the mean of the same differences.
    """

    path: str
    change: Change
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    n_values: int
    n_changed: int | None
    max_change: float | None
    mean_change: float | None


def describe(manifest: Manifest, notice: str | None = None) -> SnapshotInfo:
    """What a manifest says, for callers; and what there is to say of its tensors."""
    tensors = tuple(
        StoredTensor(
            tensor.path,
            tensor.dtype,
            tensor.shape,
            tensor.frame.logical_nbytes,
            tensor.frame.nbytes,
            tensor.frame.n_deltas,
            tensor.frame.content.digest,
            tensor.frame.base.content.digest if tensor.frame.base else None,
        )
        for tensor in manifest.tensors
    )
    return SnapshotInfo(
        manifest.file.snapshot,
        manifest.file.order,
        manifest.time,
        manifest.metadata,
        sum(tensor.nbytes for tensor in tensors),
        manifest.stored_nbytes,
        sum(frame.nbytes for frame in manifest.frames()),
        tensors,
        notice,
    )
