"""Taking a snapshot: batch after batch of tensors, of which only what is new becomes frames."""

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
from packhorse.disk.snapshots.session import Session
from packhorse.errors import PackhorseError
from packhorse.frame import max_frame_nbytes
from packhorse.storage.frames.packer import FramePacker, Item, PackOptions
from packhorse.storage.frames.refs import FrameRef, TensorSpec
from packhorse.threads import batches

__all__ = ["State", "Taking", "take_snapshot"]

_CALLER = 4  # levels of the stack: behind `take_snapshot`, `SnapshotStore._take` and `take`


@dataclass(frozen=True, slots=True)
class State:
    """A state to be taken.

    Attributes:
        document: the state as JSON values.
        specs: its tensors.
        groups: their numbers in the order of packing; those of a group are taken at once.
        casts: the master, in the same group and before it, of each tensor that is a rounded copy.
        fetch: gives the bytes of each tensor; it is called once for each, in that order.
        release: is called when all tensors that were fetched are packed.
        max_nbytes: of the tensors that may be fetched before that, unless it is one group.
        check: is called when all are packed; raises if they do not belong together.
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
        name: of the snapshot.
        state: what to take.
        base: "auto", the name of the snapshot to make deltas against, or None for none.
        metadata: JSON values to keep.
        replace: whether an older one of this name is replaced.
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


def take_snapshot(
    session: Session, taking: Taking, options: PackOptions
) -> tuple[Manifest, str | None]:
    """Write a snapshot.

    Args:
        session: the writer's.
        taking: what to take.
        options: how to pack.

    Returns:
        The manifest, committed, and what should be known of tensors that grew; that is a warning,
        too, which comes before anything is committed, as it may be made an error.

    Raises:
        FileExistsError: there is a snapshot of this name, and it is not to be replaced.
    """
    if taking.name in session.listing and not taking.replace:
        raise FileExistsError(
            f"{session.storage.label()}: there is a snapshot {taking.name!r} already; allow "
            "replacing it (replace=True, --replace), or name another"
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
    return manifest, notice


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
    """The frame of the tensor that stood at the same path, if it had the same dtype and shape."""
    known = bases.get(spec.name)
    if known is None or (known.dtype, known.shape) != (spec.dtype, spec.shape):
        return None
    return known.frame
