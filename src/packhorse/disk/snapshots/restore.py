"""Restoring a snapshot, whole or in part, into new tensors or those of the caller.

A reader takes no lock. Should a writer remove what is being read, the newest manifest says where
things are now, and the reader begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.arguments import Framework
from packhorse.disk.results import Progress
from packhorse.disk.snapshots.backend import Storage
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.chains import Chain
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.packs import PackReader
from packhorse.disk.snapshots.state import Keys, Leaf, decode_state, find_tensors
from packhorse.disk.strict_json import shortened
from packhorse.errors import CorruptionError, blaming
from packhorse.threads import map_tensors

__all__ = ["Restoring", "restore_state"]

_MAX_TRIES = 5


@dataclass(frozen=True, slots=True)
class Restoring:
    """What is to be restored, and how.

    Attributes:
        framework: of new tensors.
        keys: which parts; None for all.
        into: a state whose tensors are written in place; None to make new ones.
        threads: how many to use.
        max_nbytes: refuse tensors of more bytes together.
        progress: called with the logical bytes done since the last call.
    """

    framework: Framework
    keys: Keys | None
    into: object
    threads: int
    max_nbytes: int | None
    progress: Progress | None


def restore_state(storage: Storage, catalog: Catalog, name: str, wanted: Restoring) -> Any:
    """The state of a snapshot.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as `SnapshotStore.restore` says.
    """
    manifest = catalog.load(name)
    for _ in range(_MAX_TRIES):
        try:
            return _restore(storage, manifest, wanted)
        except FileNotFoundError as error:
            newest = catalog.load(name)
            if newest.file == manifest.file:
                raise CorruptionError(
                    f"snapshot {name!r}: a file that it needs is not there: "
                    f"{error.filename or error}"
                ) from error
            manifest = newest
    raise CorruptionError(f"snapshot {name!r} changes faster than it can be read")


def _restore(storage: Storage, manifest: Manifest, wanted: Restoring) -> Any:
    name = manifest.file.snapshot
    chosen: list[TensorRef] = []

    def choose(index: int, path: str) -> int:
        chosen.append(manifest.tensors[index])
        return len(chosen) - 1

    with blaming(f"snapshot {name!r}", (ValueError,)):
        # Once to see what is wanted, and once more when it is there.
        decode_state(manifest.state, choose, wanted.keys)
        targets = _targets(chosen, wanted.into)
    _check_limit(chosen, name, wanted.max_nbytes)
    with PackReader(storage) as reader, blaming(f"snapshot {name!r}"):

        def work(k: int, threads: int) -> Any:
            return _tensor(reader, chosen[k], targets.get(k), wanted, threads)

        sizes = [ref.frame.logical_nbytes for ref in chosen]
        results = iter(map_tensors(work, sizes, wanted.threads))
    state, _ = decode_state(manifest.state, lambda index, path: next(results), wanted.keys)
    return state


def _check_limit(chosen: Sequence[TensorRef], name: str, max_nbytes: int | None) -> None:
    nbytes = sum(ref.frame.logical_nbytes for ref in chosen)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"snapshot {name!r}: {nbytes} bytes would be decoded, more than max_nbytes = "
            f"{max_nbytes}; restore parts of it (keys), or allow more"
        )


def _targets(chosen: Sequence[TensorRef], into: object) -> dict[int, Leaf]:
    """The caller's tensors, by their number among those chosen; all of them fit.

    Raises:
        ValueError: one does not fit, or the snapshot does not have it.
    """
    if into is None:
        return {}
    leaves = find_tensors(into)
    targets: dict[int, Leaf] = {}
    for k, ref in enumerate(chosen):
        leaf = leaves.pop(ref.path, None)
        if leaf is None:
            continue
        if (leaf.dtype, leaf.shape) != (ref.dtype, ref.shape):
            raise ValueError(
                f"{shortened(ref.path)}: the snapshot has {ref.dtype} of shape {list(ref.shape)}, "
                f"and `into` has {leaf.dtype} of shape {list(leaf.shape)}"
            )
        targets[k] = leaf
    for path in leaves:
        raise ValueError(f"{shortened(path)}: `into` has this tensor, and the snapshot has not")
    return targets


def _tensor(
    reader: PackReader, ref: TensorRef, target: Leaf | None, wanted: Restoring, threads: int
) -> Any:
    """One tensor: a new one, or the caller's."""
    chain = Chain(reader, ref.frame, ref.path)
    framework = wanted.framework if target is None else target.framework
    memory = None if target is None else framework.memory(target.tensor)
    fresh = None
    if memory is None:
        fresh = framework.empty(ref.dtype, ref.shape)
        memory = framework.writable(fresh)
    chain.decode_into(memory, threads)
    if target is not None and fresh is not None:
        with blaming(shortened(ref.path), (ValueError,)):
            framework.assign(target.tensor, fresh)
    if wanted.progress is not None:
        wanted.progress(ref.frame.logical_nbytes)
    return fresh if target is None else target.tensor
