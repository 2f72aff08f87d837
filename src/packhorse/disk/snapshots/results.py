"""What a store tells its callers: about a snapshot, about what is wrong, about what was pruned."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from packhorse.disk.snapshots.manifest import Manifest

__all__ = ["PruneResult", "SnapshotInfo", "SnapshotProblem", "StoredTensor", "describe"]


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
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int
    n_deltas: int


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
    """

    name: str
    order: int
    time: datetime
    metadata: dict[str, Any]
    nbytes: int
    stored_nbytes: int
    needed_nbytes: int
    tensors: tuple[StoredTensor, ...]

    @property
    def max_deltas(self) -> int:
        """The longest chain of deltas that restoring it decodes."""
        return max((tensor.n_deltas for tensor in self.tensors), default=0)


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """Something that `SnapshotStore.verify` found.

    Attributes:
        snapshot: name of a snapshot that is not good; a shared frame can harm others too.
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


def describe(manifest: Manifest) -> SnapshotInfo:
    """What a manifest says, for callers."""
    tensors = tuple(
        StoredTensor(
            tensor.path,
            tensor.dtype,
            tensor.shape,
            tensor.frame.logical_nbytes,
            tensor.frame.nbytes,
            tensor.frame.n_deltas,
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
    )
