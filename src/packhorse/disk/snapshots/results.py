"""The results of a store's calls: about snapshots, problems, and what was pruned or changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from packhorse.disk.snapshots.manifest import Manifest
from packhorse.storage.locations import Place

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
        path: its path in the state.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
        nbytes: its size.
        packed_nbytes: the size of its frame, which other tensors and snapshots may share.
        n_deltas: how many deltas are decoded to restore it.
        content_hash: identifies its bytes; equal tensors of all snapshots share one frame.
        base_hash: identifies the bytes of the base if its frame is a delta, otherwise None.
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
        order: its place among all snapshots that were taken; larger is newer.
        time: when it was taken, in UTC.
        metadata: the caller's metadata.
        nbytes: bytes of all tensors, restored.
        stored_nbytes: how much the store grew when it was taken, without the manifest.
        needed_nbytes: bytes of all frames that restoring it reads, including shared ones.
        tensors: its tensors, in the order of the state.
        notice: the text of the warning if it was just taken and new tensors that are smaller than
            their frames cost much space; None otherwise.
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
        order: its place among all snapshots that were taken; larger is newer.
        time: when it was taken, in UTC.
        n_tensors: how many tensors it has.
        nbytes: bytes of all tensors, restored.
        stored_nbytes: how much the store grew when it was taken, without the manifest.
        new_nbytes: bytes of the frames of tensors that no older snapshot has.
        max_deltas: the longest chain of deltas that restoring it decodes.
        base: the older snapshot that it shares most bytes with, as equal tensors or as bases of
            deltas; None if it shares nothing.
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
    """The result of `SnapshotStore.overview`.

    Attributes:
        snapshots: the snapshots, the oldest first.
        damaged: manifests that cannot be read, even if the snapshot also has a good one.
    """

    snapshots: list[SnapshotSummary]
    damaged: list[SnapshotProblem]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A snapshot, and what it shares with older ones.

    Attributes:
        info: the snapshot with its tensors.
        new_nbytes: bytes of the frames of its tensors that no older snapshot has.
        base: the older snapshot that it shares most bytes with, as equal tensors or as bases of
            deltas; None if it shares nothing.
        inherited: content hashes of its tensors that an older snapshot has too.
    """

    info: SnapshotInfo
    new_nbytes: int
    base: str | None
    inherited: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """A problem that `SnapshotStore.verify` found.

    Attributes:
        snapshot: name of the snapshot that is harmed. If the problem is one of several manifests
            of the snapshot, the snapshot itself may be good.
        tensor: path of the tensor that cannot be restored; None if a manifest or a whole pack is
            bad.
        file: the damaged file.
        message: the complete description.
    """

    snapshot: str
    tensor: str | None
    file: str
    message: str


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What `SnapshotStore.prune` did.

    Attributes:
        removed: names of the snapshots that were removed.
        rewritten: names of the snapshots that got a new manifest, because frames had to move.
        freed_nbytes: bytes of the packs that were removed, minus those that were written.
    """

    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    freed_nbytes: int


@dataclass(frozen=True, slots=True)
class RestoredFile:
    """What `SnapshotStore.restore_file` wrote.

    Attributes:
        output: the file.
        n_tensors: how many tensors it holds.
        nbytes: bytes of the tensors, restored.
        file_nbytes: the size of the file.
    """

    output: Place
    n_tensors: int
    nbytes: int
    file_nbytes: int


class Change(StrEnum):
    """What happened to a tensor from one snapshot to another."""

    EQUAL = "equal"
    CHANGED = "changed"  # the same dtype and shape, other values
    REPLACED = "replaced"  # another dtype or shape
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor in two snapshots.

    Attributes:
        path: its path in the states.
        change: what happened to it.
        dtype: safetensors' name of its dtype in the second snapshot, or in the first if it was
            removed.
        shape: the dimensions there.
        nbytes: its size there.
        n_values: how many elements it has there.
        n_changed: how many elements differ in their bits; None if the two cannot be compared.
        max_change: the largest finite absolute difference; None if there is none.
        mean_change: the mean of the finite absolute differences of changed elements; None as for
            `max_change`.
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
    """The information about a snapshot, from its manifest and the notice of a take."""
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
