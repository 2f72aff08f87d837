"""Takes a snapshot, batch by batch. Only contents that the store lacks become frames."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from packhorse.codecs.base import ByteArray
from packhorse.disk.results import Progress, notice_of
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.names import manifest_file
from packhorse.disk.snapshots.results import SnapshotInfo, describe
from packhorse.disk.snapshots.session import Session
from packhorse.errors import PackhorseError
from packhorse.frame import max_frame_nbytes
from packhorse.storage.frames.packer import FramePacker, Item, PackOptions
from packhorse.storage.frames.refs import FrameRef, TensorSpec
from packhorse.threads import batches

__all__ = ["State", "Taking", "take_snapshot"]

_CALLER = 3  # levels of the stack: above `take_snapshot` and `SnapshotStore.take`


@dataclass(frozen=True, slots=True)
class State:
    """A state to be taken.

    Attributes:
        document: the state as JSON values.
        specs: its tensors.
        groups: the numbers of the tensors in the order of packing. The tensors of a group are
            packed together.
        casts: for each tensor that is a rounded copy, the number of its master, which comes before
            it in the same group.
        fetch: returns the bytes of a tensor. It is called once for each, in the order of packing.
        release: called when all tensors that were fetched are packed.
        max_nbytes: the most bytes that may be fetched between two calls of `release`, unless one
            group is larger; None for the default.
        check: called when all tensors are packed; raises if their source has changed meanwhile.
    """

    document: Any
    specs: Sequence[TensorSpec]
    groups: Sequence[Sequence[int]]
    casts: Mapping[int, int]
    fetch: Callable[[int], ByteArray]
    release: Callable[[], None] = lambda: None
    max_nbytes: int | None = None
    check: Callable[[], None] = lambda: None

    def group_sizes(self) -> list[int]:
        """Bytes of each group."""
        return [sum(self.specs[i].nbytes for i in group) for group in self.groups]


@dataclass(frozen=True, slots=True)
class Taking:
    """A snapshot to be taken.

    Attributes:
        name: the name of the snapshot.
        state: the state to take.
        base: "auto", the name of the snapshot to make deltas against, or None for none.
        metadata: JSON values to keep.
        replace: whether a snapshot of this name may be replaced.
        progress: called with the logical bytes done since the last call.
    """

    name: str
    state: State
    base: str | None
    metadata: Mapping[str, Any]
    replace: bool
    progress: Progress | None = None


@dataclass(slots=True)
class _Progress:
    report: Progress | None
    refs: dict[int, FrameRef] = field(default_factory=dict)  # by the number of the tensor

    def add(self, chosen: Sequence[int], refs: list[FrameRef]) -> None:
        self.refs.update(zip(chosen, refs, strict=True))
        if self.report is not None:
            self.report(sum(ref.logical_nbytes for ref in refs))


def take_snapshot(session: Session, taking: Taking, options: PackOptions) -> SnapshotInfo:
    """Write a snapshot.

    Args:
        session: the session of the writer.
        taking: what to take.
        options: how to pack.

    Returns:
        What was taken. If tensors grew too much, it says so, and a warning was issued before
        anything was committed, because a warning may be turned into an error.

    Raises:
        FileExistsError: there is a snapshot of this name, and it must not be replaced.
    """
    if taking.name in session.listing and not taking.replace:
        raise FileExistsError(
            f"{session.storage.label()}: there is already a snapshot {taking.name!r}; allow "
            "replacing it (replace=True, --replace), or choose another name"
        )
    state, older = taking.state, _older(session, taking.base)
    order = session.next_order()
    specs, done = state.specs, _Progress(taking.progress)
    bases = {} if older is None else {tensor.path: tensor for tensor in older.tensors}
    room = sum(max_frame_nbytes(spec.dtype, spec.shape) for spec in specs)
    with session.frames.batch([spec.name for spec in specs], room) as pack:
        packer = FramePacker(session.frames, options)
        for run in batches(state.group_sizes(), state.max_nbytes):
            chosen = [i for group in state.groups[run.start : run.stop] for i in group]
            places = {i: k for k, i in enumerate(chosen)}
            items = [
                Item(specs[i], state.fetch(i), _base(bases, specs[i]),
                     places[state.casts[i]] if i in state.casts else None)
                for i in chosen
            ]  # fmt: skip
            done.add(chosen, packer.add(pack, items))
            del items
            state.release()
        state.check()
        notice = notice_of([(ref.logical_nbytes, ref.nbytes) for ref in packer.new.values()])
        if notice is not None:
            warnings.warn(f"snapshot {taking.name!r}: {notice}", RuntimeWarning, stacklevel=_CALLER)
    tensors = tuple(
        TensorRef(spec.name, spec.dtype, spec.shape, done.refs[i]) for i, spec in enumerate(specs)
    )
    file, now = manifest_file(taking.name, order, 1), datetime.now(UTC)
    manifest = Manifest(file, now, dict(taking.metadata), pack.nbytes, state.document, tensors)
    session.commit(manifest)
    if taking.replace:
        session.collect()
    return describe(manifest, notice)


def _older(session: Session, base: str | None) -> Manifest | None:
    """The snapshot to make deltas against."""
    if base is None:
        return None
    if base != "auto":
        return session.catalog.load(base)
    with suppress(PackhorseError):
        return session.newest()
    return None


def _base(bases: Mapping[str, TensorRef], spec: TensorSpec) -> FrameRef | None:
    """The frame of the base's tensor at the same path, if it has the same dtype and shape."""
    known = bases.get(spec.name)
    if known is None or (known.dtype, known.shape) != (spec.dtype, spec.shape):
        return None
    return known.frame
