"""Snapshots of training states: `SnapshotStore` (docs/snapshots.md).

`store` is what callers see. `take`, `restore`, `check`, `compare`, `prune` and `staging` do the
work, `sources` and `export` for files. `session` is the one writer and `lock` keeps out others.
`state`, `names` and `manifest` turn text into values and back. `catalog` knows which snapshots
there are; `records` and `index` keep what manifests say without parsing them, for `finder` and
`overview`. Frames are the business of `snapshot_frames` and, below it, `storage/frames/`.
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
