"""Snapshots of training states: `SnapshotStore` (docs/snapshots.md).

`state`, `names` and `manifest` are text in, text out; `lock` and, outside, `storage/` know
file systems; `packs` and `chains` frames; `catalog` says what is there; `records` and `index` keep
what manifests say without parsing them, for `finder` and `overview`; `writer` is the one writer;
`take`, `restore`, `check`, `compare`, `prune` and `staging` do the work, `sources` and `export` for
files; `store` is what callers see.
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
