"""Taking a snapshot: batch after batch of tensors, of which only what is new becomes frames."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.disk.packed_frames import Scratch
from packhorse.disk.results import Progress, notice_of
from packhorse.disk.safetensors_header import tensor_nbytes
from packhorse.disk.snapshots.cache import BaseCache
from packhorse.disk.snapshots.chains import Chain
from packhorse.disk.snapshots.manifest import MAX_CHAIN, Content, FrameRef, Manifest, TensorRef
from packhorse.disk.snapshots.names import manifest_file
from packhorse.disk.snapshots.packs import PackReader, PackWriter
from packhorse.disk.snapshots.writer import Session
from packhorse.errors import ChangedError, PackhorseError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.layout import Level
from packhorse.storage.strict_json import shortened
from packhorse.threads import batches, map_tensors

__all__ = ["FramePacker", "Options", "Spec", "State", "Taking", "take_snapshot"]

_CALLER = 4  # levels of the stack: behind `take_snapshot`, `SnapshotStore._take` and `take`


@dataclass(frozen=True, slots=True)
class Options:
    """How tensors are packed.

    Attributes:
        level: how hard to try.
        threads: how many to use.
        max_chain: deltas before a full frame.
        cache: of tensors that may be bases.
    """

    level: Level
    threads: int
    max_chain: int
    cache: BaseCache


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to be packed, without its bytes.

    Attributes:
        path: where it stands in the state.
        dtype: safetensors' name.
        shape: the dimensions.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_nbytes(self.dtype, self.shape)


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
    specs: Sequence[Spec]
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


class _Item(NamedTuple):
    """What one frame is made of: a tensor, and what it may be a delta to, if anything.

    Attributes:
        spec: what it is.
        data: its bytes.
        base: a frame of the store.
        master: instead, the bytes of the tensor that it is a rounded copy of.
        master_hash: the content hash of those.
    """

    spec: Spec
    data: ByteArray
    base: FrameRef | None
    master: ByteArray | None = None
    master_hash: bytes | None = None


def _may_be_base(known: FrameRef | None) -> bool:
    """Whether a chain may get longer. What is not there yet becomes no longer than may be."""
    return known is None or known.n_deltas < MAX_CHAIN


class FramePacker:
    """Packs batches of tensors into one pack, each content once."""

    def __init__(
        self, session: Session, pack: PackWriter, reader: PackReader, options: Options
    ) -> None:
        self._session = session
        self._pack = pack
        self._reader = reader
        self._options = options
        self._memory = np.empty(0, np.uint8)
        self._scratch = Scratch()
        self.new: dict[Content, FrameRef] = {}

    @property
    def notice(self) -> str | None:
        """What should be known of new tensors that are smaller than their frames."""
        return notice_of([(frame.logical_nbytes, frame.nbytes) for frame in self.new.values()])

    def add(
        self,
        specs: Sequence[Spec],
        data: Sequence[ByteArray],
        bases: Sequence[FrameRef | None],
        masters: Mapping[int, int] | None = None,
        *,
        share: bool = True,
    ) -> list[FrameRef]:
        """Frames of some tensors: of those that the store has already, or new ones.

        Args:
            specs: what they are.
            data: their bytes.
            bases: a frame that each may be a delta against; None for a full frame.
            masters: for each that is a rounded copy of one before it, that one's number.
            share: whether frames that were there before will do.
        """
        sizes = [part.size for part in data]
        threads = self._options.threads
        digests = map_tensors(lambda k, n: content_hash(data[k], threads=n), sizes, threads)
        contents = [
            (digest, spec.dtype, math.prod(spec.shape))
            for digest, spec in zip(digests, specs, strict=True)
        ]
        first: dict[Content, int] = {}
        for k, content in enumerate(contents):
            first.setdefault(content, k)
        if share:
            self._session.finder.look_up(content for content in first if content not in self.new)
        known = {content: self._find(content, share) for content in first}
        todo = [first[content] for content, frame in known.items() if frame is None]
        masters = {k: j for k, j in (masters or {}).items() if _may_be_base(known[contents[j]])}
        items = [_Item(specs[k], data[k], bases[k]) for k in todo]
        for i, k in enumerate(todo):
            if k in masters:
                master = masters[k]
                items[i] = _Item(specs[k], data[k], None, data[master], digests[master])
        for k, frame in zip(todo, self._compress(items), strict=True):
            content, base = (
                contents[k],
                bases[k] if k not in masters else known[contents[masters[k]]],
            )
            base = base if frame.base_hash else None
            if frame.content_hash != content[0]:
                raise ChangedError(
                    f"{specs[k].path}: the tensor changed while its snapshot was taken; take it "
                    "when nothing writes to it"
                )
            known[content] = self.new[content] = self._pack.add(frame.buffer(), content, base)
        for content, k in first.items():
            self._options.cache.put(content, data[k])
        return [ref for content in contents if (ref := known[content]) is not None]

    def _find(self, content: Content, share: bool) -> FrameRef | None:
        if content in self.new:
            return self.new[content]
        found = self._session.finder.find(content) if share else None
        if found is not None and not self._reader.is_there(found):
            self._session.finder.drop(content)
            return None
        return found

    def _compress(self, items: list[_Item]) -> list[Frame]:
        """New frames, one behind the other's room in memory that is used again."""
        rooms = [max_frame_nbytes(item.spec.dtype, item.spec.shape) for item in items]
        ends = list(accumulate(rooms))
        if items and self._memory.size < ends[-1]:
            self._memory = np.empty(ends[-1], np.uint8)
        options, memory = self._options, self._memory

        def work(k: int, threads: int) -> Frame:
            item = items[k]
            base, base_dtype, base_hash = item.master, "F32", item.master_hash
            if item.base is not None:
                base = self._decode(item.base, threads)
                base_hash, base_dtype, _ = item.base.content
            return compress_buffer(
                item.data, item.spec.dtype, item.spec.shape, level=options.level, threads=threads,
                out=memory[ends[k] - rooms[k] : ends[k]], name=shortened(item.spec.path), base=base,
                base_dtype=None if base is None else base_dtype, base_hash=base_hash,
            )  # fmt: skip

        return map_tensors(work, [item.data.size for item in items], options.threads)

    def _decode(self, base: FrameRef, threads: int) -> ByteArray | None:
        """The bytes of a base; None if it turns out to be damaged: then a full frame will do."""
        kept = self._options.cache.get(base.content)
        if kept is not None:
            return kept
        try:
            chain = Chain(self._reader, base, None)
            data = self._scratch.take(2, base.logical_nbytes)  # good until the thread's next
            chain.decode_into(data, threads, self._scratch)
        except (PackhorseError, FileNotFoundError):
            return None
        return data


@dataclass(slots=True)
class _Progress:
    report: Progress | None
    refs: dict[int, FrameRef] = field(default_factory=dict)  # by the number of the tensor

    def add(self, chosen: Sequence[int], refs: list[FrameRef]) -> None:
        self.refs.update(zip(chosen, refs, strict=True))
        if self.report is not None:
            self.report(sum(ref.logical_nbytes for ref in refs))


def take_snapshot(
    session: Session, taking: Taking, options: Options
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
    with (
        PackReader(session.storage) as reader,
        PackWriter(session.storage, len(specs), room) as pack,
    ):
        packer = FramePacker(session, pack, reader, options)
        for run in batches(state.group_sizes(), state.max_nbytes):
            chosen = [i for group in state.groups[run.start : run.stop] for i in group]
            part = [specs[i] for i in chosen]
            data = [state.fetch(i) for i in chosen]
            places = {i: k for k, i in enumerate(chosen)}
            masters = {places[i]: places[state.casts[i]] for i in chosen if i in state.casts}
            refs = packer.add(part, data, [_base(bases, spec, options) for spec in part], masters)
            done.add(chosen, refs)
            del data
            state.release()
        state.check()
        notice = packer.notice
        if notice is not None:
            warnings.warn(f"snapshot {taking.name!r}: {notice}", RuntimeWarning, stacklevel=_CALLER)
    tensors = tuple(
        TensorRef(spec.path, spec.dtype, spec.shape, done.refs[i]) for i, spec in enumerate(specs)
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


def _base(bases: Mapping[str, TensorRef], spec: Spec, options: Options) -> FrameRef | None:
    """The frame of the tensor that stood at the same path, if a delta against it may be made."""
    known = bases.get(spec.path)
    if known is None or (known.dtype, known.shape) != (spec.dtype, spec.shape):
        return None
    return known.frame if known.frame.n_deltas < options.max_chain else None
