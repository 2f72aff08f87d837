"""What the actions on snapshots hand to the renderer, and `--json` prints.

Sizes are bytes, times seconds, speeds uncompressed GB (10^9 bytes) per second. A ratio is restored
bytes / stored bytes; None where nothing was stored because all was there already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.disk import TensorDiff

__all__ = [
    "KindRow",
    "ListedStore",
    "PrunedStore",
    "RestoredSnapshot",
    "ShownSnapshot",
    "SnapshotProblemRow",
    "SnapshotRow",
    "SnapshotsDiff",
    "TakenSnapshot",
    "VerifiedStore",
]


@dataclass(frozen=True)
class SnapshotRow:
    """A snapshot of a store.

    `stored_nbytes` are the frames of tensors that no older snapshot has; `base` is the older one
    that it shares most with, or has most deltas against.
    """

    name: str
    time: str
    n_tensors: int
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    max_deltas: int
    base: str | None


@dataclass(frozen=True)
class SnapshotProblemRow:
    """One thing that is wrong; no tensor where a file as a whole is at fault."""

    snapshot: str
    tensor: str | None
    file: str
    message: str


@dataclass(frozen=True)
class ListedStore:
    """All snapshots of a store, the oldest first; `stored_nbytes` is what it takes on the disk.

    `damaged` are manifests that cannot be read, also beside a good one of the same snapshot.
    """

    store: str
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    snapshots: list[SnapshotRow]
    damaged: list[SnapshotProblemRow]


@dataclass(frozen=True)
class KindRow:
    """Tensors that play the same part; `stored_nbytes` is what older snapshots did not have.

    `n_full` and `n_delta` count those whose frames are the snapshot's own, `n_shared` the others.
    """

    kind: str
    dtype: str
    n_tensors: int
    n_full: int
    n_delta: int
    n_shared: int
    nbytes: int
    stored_nbytes: int
    ratio: float | None


@dataclass(frozen=True)
class ShownSnapshot:
    """A snapshot by kinds of tensors; `needed_nbytes` is what restoring it reads."""

    store: str
    snapshot: SnapshotRow
    needed_nbytes: int
    metadata: dict[str, Any]
    kinds: list[KindRow]


@dataclass(frozen=True)
class TakenSnapshot:
    """A snapshot that was taken; `notice` is what should be known of new tensors that are smaller
    than their frames."""

    store: str
    name: str
    n_tensors: int
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    seconds: float
    gb_per_s: float
    notice: str | None


@dataclass(frozen=True)
class SnapshotsDiff:
    """Two snapshots; `counts` has the number of tensors for each change."""

    store: str
    old: str
    new: str
    counts: dict[str, int]
    tensors: Sequence[TensorDiff]


@dataclass(frozen=True)
class RestoredSnapshot:
    """A snapshot that was written to a file."""

    store: str
    name: str
    dst: str
    n_tensors: int
    nbytes: int
    file_nbytes: int
    seconds: float
    gb_per_s: float


@dataclass(frozen=True)
class VerifiedStore:
    """Snapshots after all their checksums were compared."""

    store: str
    ok: bool
    snapshots: list[str]
    seconds: float
    problems: list[SnapshotProblemRow]


@dataclass(frozen=True)
class PrunedStore:
    """Snapshots that were removed, or would be."""

    store: str
    dry_run: bool
    removed: list[str]
    kept: list[str]
    rewritten: list[str]
    freed_nbytes: int | None
