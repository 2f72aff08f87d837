"""Snapshots of training states: `SnapshotStore` (docs/snapshots.md).

`state`, `names` and `manifest` are text in, text out; `backend`, `remote` and `lock` know file
systems; `packs` and `chains` frames; `catalog` says what is there; `writer` is the one writer;
`take`, `restore`, `check`, `prune` and `staging` do the work; `store` is what callers see.
"""

from packhorse.disk.snapshots.results import (
    PruneResult,
    SnapshotInfo,
    SnapshotProblem,
    StoredTensor,
)
from packhorse.disk.snapshots.store import SnapshotStore

__all__ = ["PruneResult", "SnapshotInfo", "SnapshotProblem", "SnapshotStore", "StoredTensor"]
