"""Snapshots of training states: `SnapshotStore` (docs/snapshots.md).

`store` is the public class. `take`, `restore`, `check`, `compare`, `prune` and `staging` do its
work, and `sources` and `export` do it for files. `session` is the one writer, and `lock` keeps
other writers out. `state`, `names` and `manifest` turn text into values and back. `catalog` finds
the manifests. `records` and `index` cache their contents, so that `finder` and `overview` need not
parse them. `snapshot_frames` handles frames, on top of `storage/frames/`.
"""

from packhorse.disk.snapshots.results import (
    Change,
    Lineage,
    PruneResult,
    RestoredFile,
    SnapshotInfo,
    SnapshotProblem,
    SnapshotSummary,
    StoredTensor,
    StoreOverview,
    TensorDiff,
)
from packhorse.disk.snapshots.sources import model_files
from packhorse.disk.snapshots.store import SnapshotStore

__all__ = [
    "Change",
    "Lineage",
    "PruneResult",
    "RestoredFile",
    "SnapshotInfo",
    "SnapshotProblem",
    "SnapshotStore",
    "SnapshotSummary",
    "StoreOverview",
    "StoredTensor",
    "TensorDiff",
    "model_files",
]
