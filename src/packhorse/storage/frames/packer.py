"""Turns tensors into stored frames: each content once, and as a delta where that is shorter.

For each tensor of a group, the packer decides whether the store has it already, whether another
tensor of the group is equal to it, whether it may be a delta against a stored frame, and whether it
is packed as a rounded copy of another tensor of the group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.errors import ChangedError, PackhorseError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.frame.many import PackJob, compress_many
from packhorse.layout import Level
from packhorse.storage.frames.base_cache import BaseCache
from packhorse.storage.frames.frame_store import FrameBatch, FrameStore, NewFrame
from packhorse.storage.frames.refs import Content, FrameRef, TensorSpec
from packhorse.storage.frames.scratch import Scratch, Window
from packhorse.storage.strict_json import shortened
from packhorse.threads import map_tensors

__all__ = ["FramePacker", "Item", "PackOptions"]


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How tensors are packed.

    Attributes:
        level: how hard the encoder tries.
        threads: how many threads to use.
        max_chain: a frame with this many deltas in its chain is not used as a base.
        max_deltas: the most deltas that readers accept in a chain; a rounded copy counts as one.
        cache: tensors that may be bases.
        is_strict: whether all tensors are hashed before they are packed. Then a tensor that the
            store has already is never packed, and a tensor that changes meanwhile is an error.
            Otherwise only tensors with a base are hashed first.
        keeps_shapes: whether a frame can only replace another one of the same shape.
        skips_bad_bases: whether a damaged base is skipped, and a full frame is made instead.
    """

    level: Level
    threads: int
    max_chain: int
    max_deltas: int
    cache: BaseCache
    is_strict: bool = True
    keeps_shapes: bool = False
    skips_bad_bases: bool = True


class Item(NamedTuple):
    """A tensor to be packed.

    Attributes:
        spec: its name, dtype and shape.
        data: its bytes.
        base: a stored frame that it may be a delta against; None for none.
        master: the number, in the same group, of the tensor that it is a rounded copy of; None for
            none. A master comes before its copies, and is not a copy itself.
        is_whole: whether it must not become a delta. The base is then only used if it holds the
            same content.
    """

    spec: TensorSpec
    data: ByteArray
    base: FrameRef | None = None
    master: int | None = None
    is_whole: bool = False


class FramePacker:
    """Packs groups of tensors for one store.

    Attributes:
        new: the frames that this packer has written, by content.
    """

    def __init__(self, store: FrameStore, options: PackOptions) -> None:
        self._store = store
        self._options = options
        self._window = Window()
        self._scratch = Scratch()
        self.new: dict[Content, FrameRef] = {}

    def add(
        self, batch: FrameBatch, items: Sequence[Item], *, share: bool = True
    ) -> list[FrameRef]:
        """Store tensors, and return their frames: those that the store has already, and new ones.

        Args:
            batch: where new frames go.
            items: the tensors.
            share: whether frames that were stored before may be used again.

        Returns:
            The frame of each tensor.

        Raises:
            ChangedError: a tensor was written to meanwhile.
            CorruptionError: a base is damaged, and damaged bases are not skipped.
        """
        contents = self._hash(items)
        known = self._find(contents.values(), share)
        jobs = self._plan(items, contents, known)
        frames = self._compress(items, jobs, contents)
        queue = _Queue(batch, self.new)
        for job in jobs:
            k, frame, spec = job.number, frames[job.number], items[job.number].spec
            content = contents.get(k)
            if content is None:
                contents[k] = content = self._content(spec, frame.content_hash)
            elif content.digest != frame.content_hash:
                raise ChangedError(
                    f"{spec.name}: the tensor changed while it was packed; pack it when nothing "
                    "writes to it"
                )
            if content not in queue:
                base = job.base
                if job.master is not None:
                    base = queue.place_of(contents[job.master]) or known[contents[job.master]]
                if base is not None and base.n_deltas >= self._options.max_deltas:
                    # The master turned out to equal a tensor at the end of a long chain.
                    whole = job._replace(base=None, master=None)
                    frame = self._frame(items, [whole], {}, 0, self._options.threads)
                base = base if frame.base_hash else None
                queue.add(NewFrame(frame.buffer(), content, base, spec.name))
        queue.write()
        known |= {contents[job.number]: self.new[contents[job.number]] for job in jobs}
        for k, content in contents.items():
            self._options.cache.put(content, items[k].data)
        return [known[contents[k]] for k in range(len(items))]

    def _find(self, contents: Iterable[Content], share: bool) -> dict[Content, FrameRef]:
        """Frames that were written before, in this batch or in an earlier one."""
        wanted = set(contents)
        known = {content: self.new[content] for content in wanted & self.new.keys()}
        if share:
            known |= self._store.find(list(wanted - known.keys()))
        return known

    def _hash(self, items: Sequence[Item]) -> dict[int, Content]:
        """The contents of the tensors that are hashed before they are packed, by their numbers."""
        chosen = [k for k, item in enumerate(items) if self._options.is_strict or item.base]
        digests = map_tensors(
            lambda i, threads: content_hash(items[chosen[i]].data, threads=threads),
            [items[k].data.size for k in chosen],
            self._options.threads,
        )
        pairs = zip(chosen, digests, strict=True)
        return {k: self._content(items[k].spec, digest) for k, digest in pairs}

    def _content(self, spec: TensorSpec, digest: bytes) -> Content:
        shape = spec.shape if self._options.keeps_shapes else None
        return Content(digest, spec.dtype, spec.numel, shape)

    def _plan(
        self, items: Sequence[Item], contents: Mapping[int, Content],
        known: Mapping[Content, FrameRef],
    ) -> list[_Job]:  # fmt: skip
        """The frames to be made, by the numbers of their tensors."""
        new = _new_of(len(items), contents, known)
        max_deltas = self._options.max_deltas
        masters: dict[int, int] = {}
        for k in new:
            master = items[k].master
            if master is None:
                continue
            stored = known.get(contents[master]) if master in contents else None
            if stored is None or stored.n_deltas < max_deltas:
                masters[k] = master
        specs = [items[k].spec for k in new]
        rooms = self._window.cut([max_frame_nbytes(spec.dtype, spec.shape) for spec in specs])
        leaders, jobs = set(masters.values()), []
        for k, room in zip(new, rooms, strict=True):
            # A master leaves room in its chain for its copies.
            limit = min(self._options.max_chain, max_deltas - (k in leaders))
            base = None if items[k].is_whole else items[k].base
            if base is not None and (k in masters or base.n_deltas >= limit):
                base = None
            jobs.append(_Job(k, base, masters.get(k), room))
        return jobs

    def _compress(
        self, items: Sequence[Item], jobs: Sequence[_Job], contents: Mapping[int, Content]
    ) -> dict[int, Frame]:
        """The frames, by the numbers of their tensors."""
        digests = {k: content.digest for k, content in contents.items()}
        # A copy can only be packed once the hash of its master is known.
        late = [job for job in jobs if job.master is not None and job.master not in digests]
        numbers = {job.number for job in late}
        bases = [job.base for job in jobs if job.base is not None]
        frames: dict[int, Frame] = {}
        self._fetch(bases)
        for part in ([job for job in jobs if job.number not in numbers], late):
            alone = [job for job in part if job.base is None and job.master is None]
            rest = [job for job in part if job.base is not None or job.master is not None]
            made = compress_many(
                [_pack_job(items[job.number], job.room) for job in alone],
                level=self._options.level,
                threads=self._options.threads,
            )
            sizes = [items[job.number].data.size for job in rest]
            work = partial(self._frame, items, rest, digests)
            made += map_tensors(work, sizes, self._options.threads)
            for job, frame in zip(alone + rest, made, strict=True):
                frames[job.number] = frame
                digests[job.number] = frame.content_hash
        self._store.release(bases)
        return frames

    def _frame(
        self, items: Sequence[Item], jobs: Sequence[_Job], digests: Mapping[int, bytes],
        i: int, threads: int,
    ) -> Frame:  # fmt: skip
        """The frame of one tensor, as a delta if there is a base and that is shorter."""
        job = jobs[i]
        spec, data, _, _, _ = items[job.number]
        base = dtype = digest = None
        if job.master is not None:
            base, dtype = items[job.master].data, items[job.master].spec.dtype
            digest = digests[job.master]
        elif job.base is not None:
            base = self._decode(job.base, threads)
            digest, dtype = job.base.content[:2] if base is not None else (None, None)
        return compress_buffer(
            data, spec.dtype, spec.shape, level=self._options.level, threads=threads, out=job.room,
            name=shortened(spec.name), base=base, base_dtype=dtype, base_hash=digest,
        )  # fmt: skip

    def _fetch(self, bases: Sequence[FrameRef]) -> None:
        """Get the bytes of stored bases that are not in the cache."""
        try:
            self._store.fetch([b for b in bases if self._options.cache.get(b.content) is None])
        except (PackhorseError, FileNotFoundError):
            if not self._options.skips_bad_bases:  # otherwise `_decode` finds the bad base
                raise

    def _decode(self, base: FrameRef, threads: int) -> ByteArray | None:
        """The bytes of a stored base; None if it is damaged and damaged bases are skipped."""
        kept = self._options.cache.get(base.content)
        if kept is not None:
            return kept
        try:
            chain = self._store.chain(base)
            data = self._scratch.take(2, base.logical_nbytes)  # valid until this thread's next call
            chain.decode_into(data, threads, self._scratch)
        except (PackhorseError, FileNotFoundError):
            if self._options.skips_bad_bases:
                return None
            raise
        return data


def _pack_job(item: Item, room: ByteArray) -> PackJob:
    """A tensor that is packed without a base."""
    spec = item.spec
    return PackJob(item.data, spec.dtype, spec.shape, room, shortened(spec.name))


class _Job(NamedTuple):
    """A frame to be made.

    Attributes:
        number: the number of its tensor.
        base: a stored frame that it may be a delta against.
        master: instead of a base, the number of the tensor that this one is a rounded copy of.
        room: memory for the frame.
    """

    number: int
    base: FrameRef | None
    master: int | None
    room: ByteArray


class _Queue:
    """New frames that are written together, because a call of the system for each takes longer than
    a short frame."""

    def __init__(self, batch: FrameBatch, written: dict[Content, FrameRef]) -> None:
        """
        Args:
            batch: where the frames go.
            written: the frames that have a place; those of the queue are added when they get one.
        """
        self._batch = batch
        self._written = written
        self._waiting: dict[Content, NewFrame] = {}

    def __contains__(self, content: Content) -> bool:
        """Whether there is a frame of this content, written or not."""
        return content in self._waiting or content in self._written

    def add(self, new: NewFrame) -> None:
        """Let a frame wait."""
        self._waiting[new.content] = new

    def place_of(self, content: Content) -> FrameRef | None:
        """Where the frame of a content is stored; None if it was not written by this packer."""
        if content in self._waiting:
            self.write()
        return self._written.get(content)

    def write(self) -> None:
        """Write the frames that wait."""
        if self._waiting:
            refs = self._batch.put(list(self._waiting.values()))
            self._written.update(zip(self._waiting, refs, strict=True))
            self._waiting.clear()


def _new_of(n_items: int, contents: Mapping[int, Content], known: Container[Content]) -> list[int]:
    """The numbers of the tensors that need a new frame. Of equal tensors only the first does."""
    seen: set[Content] = set()
    new = []
    for k in range(n_items):
        content = contents.get(k)
        if content is None:
            new.append(k)
        elif content not in known and content not in seen:
            seen.add(content)
            new.append(k)
    return new
