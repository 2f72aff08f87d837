"""The rows that actions on snapshots return and the renderer draws; `--json` prints them.

Sizes are in bytes, times in seconds, speeds in uncompressed GB (10^9 bytes) per second. A ratio is
restored bytes / stored bytes; None if nothing was stored because the store had everything already.
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

    `stored_nbytes` is the size of the frames of tensors that no older snapshot has. `base` is the
    older snapshot with which it shares most tensors, or against which it has most deltas.
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
    """One problem; `tensor` is None if it concerns a file as a whole."""

    snapshot: str
    tensor: str | None
    file: str
    message: str


@dataclass(frozen=True)
class ListedStore:
    """All snapshots of a store, the oldest first; `stored_nbytes` is the size of the store on disk.

    `damaged` lists manifests that cannot be read, even if the same snapshot has a good one too.
    """

    store: str
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    snapshots: list[SnapshotRow]
    damaged: list[SnapshotProblemRow]


@dataclass(frozen=True)
class KindRow:
    """Tensors of the same kind; `stored_nbytes` counts the frames that older snapshots do not have.

    `n_full` and `n_delta` count the tensors with such a frame, `n_shared` the others.
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
    """A snapshot by kinds of tensors; `needed_nbytes` is how much restoring it reads."""

    store: str
    snapshot: SnapshotRow
    needed_nbytes: int
    metadata: dict[str, Any]
    kinds: list[KindRow]


@dataclass(frozen=True)
class TakenSnapshot:
    """A snapshot that was taken; `notice` is a warning about new tensors that are smaller than
    their frames."""

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
    """Snapshots whose checksums were checked."""

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
