"""Restores a snapshot, whole or in part, into new tensors or into those of the caller.

A reader takes no lock. If a writer removes a file that is being read, the reader starts again from
the snapshot's newest manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from packhorse.codecs.base import ByteArray
from packhorse.disk.results import Progress
from packhorse.disk.short_frames import ShortFrames, decode_short
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.disk.state import Keys, Leaf, decode_state, find_tensors
from packhorse.errors import CorruptionError, blaming
from packhorse.framework import Framework, new_tensors
from packhorse.storage.frames.frame_store import FrameStore
from packhorse.storage.frames.scratch import Scratch
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
        framework: the framework of new tensors.
        keys: which parts; None for all.
        into: a state whose tensors are written in place; None to make new ones.
        threads: how many threads to use.
        max_nbytes: the most bytes that the tensors may have together; None for no limit.
        progress: called with the logical bytes done since the last call.
    """

    framework: Framework
    keys: Keys | None
    into: object
    threads: int
    max_nbytes: int | None
    progress: Progress | None


class _Target(NamedTuple):
    """A tensor of the caller."""

    leaf: Leaf
    memory: ByteArray | None  # its memory; None if it cannot be decoded into, only copied to


def restore_state(storage: Storage, catalog: Catalog, name: str, wanted: Restoring) -> Any:
    """The state of a snapshot.

    Raises:
        ValueError, CorruptionError, CompatibilityError: as for `SnapshotStore.restore`.
    """
    return read_newest(catalog, [name], lambda manifest: _restore(storage, manifest, wanted))


def read_newest(catalog: Catalog, names: Sequence[str], work: Callable[..., _Result]) -> _Result:
    """Read some snapshots, and start again if a writer has replaced a manifest meanwhile.

    Args:
        catalog: the catalog of the store.
        names: the names of the snapshots.
        work: reads the snapshots, given their manifests. It is called again if a file no longer
            exists and a snapshot has a newer manifest.

    Returns:
        What `work` returned.

    Raises:
        ValueError, CorruptionError, CompatibilityError: there is no such snapshot, or it is
            damaged.
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
    raise CorruptionError(f"snapshot {label} changes faster than it can be read; try again")


def _restore(storage: Storage, manifest: Manifest, wanted: Restoring) -> Any:
    name = manifest.file.snapshot
    chosen: list[TensorRef] = []

    def choose(index: int, path: str) -> int:
        chosen.append(manifest.tensors[index])
        return len(chosen) - 1

    with blaming(f"snapshot {name!r}", (ValueError,)):
        # This finds the wanted tensors; a second pass below puts them into the state.
        decode_state(manifest.state, choose, wanted.keys)
        targets = _targets(chosen, wanted.into)
    check_limit(chosen, name, wanted.max_nbytes)
    with SnapshotFrames(storage) as store, blaming(f"snapshot {name!r}"):
        scratch = Scratch()

        def work(k: int, threads: int) -> Any:
            return _tensor(store, chosen[k], targets.get(k), wanted, threads, scratch)

        found: dict[int, Any] = {}
        groups = _groups(len(chosen), targets)
        found.update(_short_ones(store, chosen, groups[0], targets, wanted))
        for group in [[k for k in group if k not in found] for group in groups]:
            sizes = [chosen[k].frame.logical_nbytes for k in group]
            made = map_tensors(lambda i, n, ks=group: work(ks[i], n), sizes, wanted.threads)  # type: ignore[misc]
            found.update(zip(group, made, strict=True))
    results = (found[k] for k in range(len(chosen)))
    state, _ = decode_state(manifest.state, lambda index, path: next(results), wanted.keys)
    return state


def _groups(n_tensors: int, targets: dict[int, _Target]) -> list[list[int]]:
    """The numbers of the tensors, in groups that threads may work on at the same time.

    Tied weights are one tensor under two names. Decoding a chain of deltas uses the tensor's memory
    for its bases too, so two chains must not be decoded to the same memory at the same time.
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
    """Refuse to decode tensors that are too large together.

    Raises:
        CorruptionError: the tensors have more than `max_nbytes` bytes together.
    """
    nbytes = sum(ref.frame.logical_nbytes for ref in chosen)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"snapshot {name!r}: {nbytes} bytes would be decoded, more than max_nbytes = "
            f"{max_nbytes}; restore parts of the snapshot (keys), or allow more"
        )


def _targets(chosen: Sequence[TensorRef], into: object) -> dict[int, _Target]:
    """The caller's tensors, by the numbers of the chosen tensors, after checking that they fit.

    Raises:
        ValueError: a tensor does not fit, or the snapshot does not have it.
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
                f"two tensors of the snapshot have the path {shortened(ref.path)!r}, but `into` "
                "has one there; restore into new tensors"
            )
        leaf = leaves.pop(ref.path, None)
        if leaf is None:
            continue
        done.add(ref.path)
        if (leaf.dtype, leaf.shape) != (ref.dtype, ref.shape):
            raise ValueError(
                f"{shortened(ref.path)}: the snapshot has {ref.dtype} of shape {list(ref.shape)}, "
                f"but `into` has {leaf.dtype} of shape {list(leaf.shape)}"
            )
        targets[k] = _Target(leaf, leaf.framework.memory(leaf.tensor))
    for path in leaves:
        raise ValueError(f"{shortened(path)}: `into` has this tensor, but the snapshot does not")
    return targets


def _short_ones(
    store: FrameStore,
    chosen: Sequence[TensorRef],
    numbers: Sequence[int],
    targets: dict[int, _Target],
    wanted: Restoring,
) -> dict[int, Any]:
    """Restore the short tensors of these numbers that have no base. Returns those that are done,
    by their numbers."""
    framework = wanted.framework
    alone = [
        k
        for k in numbers
        if chosen[k].frame.base is None
        and (k not in targets or targets[k].leaf.framework is framework)
    ]
    sizes = [ref.frame.logical_nbytes for ref in chosen]
    tensors: dict[int, Any] = {}

    def open_some(part: Sequence[int]) -> ShortFrames:
        refs = {chosen[k].frame: chosen[k].path for k in part}
        frames = dict(zip(refs, store.open_all(refs), strict=True))
        opened = [frames[chosen[k].frame].opened for k in part]
        absent = [chosen[k] for k in part if k not in targets]
        forms = [(ref.dtype, ref.shape) for ref in absent]
        new = iter(new_tensors(framework, forms, lambda i: shortened(absent[i].path)))
        some = [targets[k].leaf.tensor if k in targets else next(new) for k in part]
        tensors.update(zip(part, some, strict=True))
        return ShortFrames(part, opened, framework.views(some))

    found: dict[int, Any] = {}
    try:
        for done in decode_short(alone, sizes, open_some, wanted.threads):
            found.update((k, tensors[k]) for k in done)
            if wanted.progress is not None and done:
                wanted.progress(sum([sizes[k] for k in done]))
    finally:
        framework.mark_all_written(list(tensors.values()))
    return found


def _tensor(
    store: FrameStore,
    ref: TensorRef,
    target: _Target | None,
    wanted: Restoring,
    threads: int,
    scratch: Scratch,
) -> Any:
    """Restore one tensor: a new one, or the caller's."""
    try:
        chain = store.chain(ref.frame, ref.path)
    except FileNotFoundError as error:  # it may have been pruned meanwhile
        raise FileNotFoundError(f"tensor {shortened(ref.path)!r}: {error}") from error
    framework = wanted.framework if target is None else target.leaf.framework
    if target is not None and target.memory is not None:
        tensor = target.leaf.tensor
        try:
            chain.decode_into(target.memory, threads, scratch)
        finally:
            framework.mark_written(tensor)
    else:
        with blaming(shortened(ref.path)):
            tensor = framework.empty(ref.dtype, ref.shape)
        framework.fill(tensor, lambda memory: chain.decode_into(memory, threads, scratch))
        if target is not None:
            with blaming(shortened(ref.path), (ValueError,)):
                framework.assign(target.leaf.tensor, tensor)
            tensor = target.leaf.tensor
    if wanted.progress is not None:
        wanted.progress(ref.frame.logical_nbytes)
    return tensor
