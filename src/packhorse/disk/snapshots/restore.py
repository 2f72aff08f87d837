"""Restoring a snapshot, whole or in part, into new tensors or those of the caller.

A reader takes no lock. Should a writer remove what is being read, the newest manifest says where
things are now, and the reader begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from packhorse.codecs.base import ByteArray
from packhorse.disk.packed_frames import Scratch
from packhorse.disk.results import Progress
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.chains import Chain
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.packs import PackReader
from packhorse.disk.state import Keys, Leaf, decode_state, find_tensors
from packhorse.errors import CorruptionError, blaming
from packhorse.framework import Framework
from packhorse.storage.interface import Storage
from packhorse.storage.strict_json import shortened
from packhorse.threads import map_tensors

__all__ = ["Restoring", "check_limit", "read_newest", "restore_state"]

_Result = TypeVar("_Result")

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


class _Target(NamedTuple):
    """A tensor of the caller's."""

    leaf: Leaf
    memory: ByteArray | None  # to decode into; None if it takes a copy


def restore_state(storage: Storage, catalog: Catalog, name: str, wanted: Restoring) -> Any:
    """The state of a snapshot.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as `SnapshotStore.restore` says.
    """
    return read_newest(catalog, [name], lambda manifest: _restore(storage, manifest, wanted))


def read_newest(catalog: Catalog, names: Sequence[str], work: Callable[..., _Result]) -> _Result:
    """What a reader makes of the manifests of some snapshots, once they stay while it reads.

    Args:
        catalog: of the store.
        names: of the snapshots.
        work: gets their manifests; it is called again if a file is gone and one of them is newer.

    Raises:
        ValueError, CorruptionError, CompatibilityError: there is no such snapshot, or it is bad.
    """
    manifests = [catalog.load(name) for name in names]
    label = " or ".join(repr(name) for name in names)
    for _ in range(_MAX_TRIES):
        try:
            return work(*manifests)
        except FileNotFoundError as error:
            newest = [catalog.load(name) for name in names]
            if [new.file for new in newest] == [old.file for old in manifests]:
                raise CorruptionError(f"snapshot {label}: {error}") from error
            manifests = newest
    raise CorruptionError(f"snapshot {label} changes faster than it can be read")


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
    check_limit(chosen, name, wanted.max_nbytes)
    with PackReader(storage) as reader, blaming(f"snapshot {name!r}"):
        scratch = Scratch()

        def work(k: int, threads: int) -> Any:
            return _tensor(reader, chosen[k], targets.get(k), wanted, threads, scratch)

        found: dict[int, Any] = {}
        for group in _groups(len(chosen), targets):
            sizes = [chosen[k].frame.logical_nbytes for k in group]
            made = map_tensors(lambda i, n, ks=group: work(ks[i], n), sizes, wanted.threads)  # type: ignore[misc]
            found.update(zip(group, made, strict=True))
    results = (found[k] for k in range(len(chosen)))
    state, _ = decode_state(manifest.state, lambda index, path: next(results), wanted.keys)
    return state


def _groups(n_tensors: int, targets: dict[int, _Target]) -> list[list[int]]:
    """The numbers of tensors, those that threads may work on at once together.

    Tied weights are one tensor under two names. A chain of deltas passes through the memory that it
    is decoded to, so two of them must not at the same time.
    """
    spans = sorted(
        (target.memory.ctypes.data, target.memory.ctypes.data + target.memory.size, k)
        for k, target in targets.items()
        if target.memory is not None and target.memory.size
    )
    shared: set[int] = set()
    last, stop = -1, 0
    for start, end, k in spans:
        if start < stop:
            shared |= {last, k}
        if end > stop:
            last, stop = k, end
    copied = {k for k, target in targets.items() if target.memory is None}
    apart = [k for k in range(n_tensors) if k not in shared and k not in copied]
    return [apart, sorted(copied), *([k] for k in sorted(shared))]


def check_limit(chosen: Sequence[TensorRef], name: str, max_nbytes: int | None) -> None:
    """Refuse to decode tensors of more bytes together.

    Raises:
        CorruptionError: they have more.
    """
    nbytes = sum(ref.frame.logical_nbytes for ref in chosen)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"snapshot {name!r}: {nbytes} bytes would be decoded, more than max_nbytes = "
            f"{max_nbytes}; restore parts of it (keys), or allow more"
        )


def _targets(chosen: Sequence[TensorRef], into: object) -> dict[int, _Target]:
    """The caller's tensors, by their number among those chosen; all of them fit.

    Raises:
        ValueError: one does not fit, or the snapshot does not have it.
    """
    if into is None:
        return {}
    with blaming("into", (ValueError,)):
        leaves = find_tensors(into)
    targets: dict[int, _Target] = {}
    done: set[str] = set()
    for k, ref in enumerate(chosen):
        if ref.path in done:
            raise ValueError(
                f"two tensors of the snapshot stand at {shortened(ref.path)!r}, and `into` has one "
                "there; restore into new tensors"
            )
        leaf = leaves.pop(ref.path, None)
        if leaf is None:
            continue
        done.add(ref.path)
        if (leaf.dtype, leaf.shape) != (ref.dtype, ref.shape):
            raise ValueError(
                f"{shortened(ref.path)}: the snapshot has {ref.dtype} of shape {list(ref.shape)}, "
                f"and `into` has {leaf.dtype} of shape {list(leaf.shape)}"
            )
        targets[k] = _Target(leaf, leaf.framework.memory(leaf.tensor))
    for path in leaves:
        raise ValueError(f"{shortened(path)}: `into` has this tensor, and the snapshot has not")
    return targets


def _tensor(
    reader: PackReader,
    ref: TensorRef,
    target: _Target | None,
    wanted: Restoring,
    threads: int,
    scratch: Scratch,
) -> Any:
    """One tensor: a new one, or the caller's."""
    try:
        chain = Chain(reader, ref.frame, ref.path)
    except FileNotFoundError as error:  # pruned meanwhile, perhaps
        raise FileNotFoundError(f"tensor {shortened(ref.path)!r}: {error}") from error
    framework = wanted.framework if target is None else target.leaf.framework
    memory = None if target is None else target.memory
    fresh = None
    if memory is None:
        fresh = framework.empty(ref.dtype, ref.shape)
        memory = framework.writable(fresh)
    try:
        chain.decode_into(memory, threads, scratch)
    finally:
        if target is not None and fresh is None:
            framework.mark_written(target.leaf.tensor)
    if target is not None and fresh is not None:
        with blaming(shortened(ref.path), (ValueError,)):
            framework.assign(target.leaf.tensor, fresh)
    if wanted.progress is not None:
        wanted.progress(ref.frame.logical_nbytes)
    return fresh if target is None else target.leaf.tensor
