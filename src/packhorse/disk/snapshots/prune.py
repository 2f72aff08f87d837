"""Removing snapshots, and moving what others still need out of packs that are mostly dead.

A kept snapshot may need frames in the packs of removed ones: bases of its deltas, or tensors that
were equal. Frames that are tensors of kept snapshots are moved as they are; a delta whose base goes
becomes a delta against the nearest base that stays, or a full frame. First all kept snapshots get
new manifests, then the others go, then the packs: whenever the work ends, every snapshot is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from packhorse.codecs.base import ByteArray
from packhorse.disk.packed_frames import Scratch
from packhorse.disk.snapshots.chains import Chain
from packhorse.disk.snapshots.manifest import MAX_CHAIN, Content, FrameRef, Manifest, sharing
from packhorse.disk.snapshots.names import PACKS, manifest_file, pack_path
from packhorse.disk.snapshots.packs import PackReader, PackWriter
from packhorse.disk.snapshots.results import PruneResult, SnapshotInfo, describe
from packhorse.disk.snapshots.take import FramePacker, Options, Spec
from packhorse.disk.snapshots.writer import Session
from packhorse.errors import CorruptionError, PackhorseError, blaming
from packhorse.frame import max_frame_nbytes

__all__ = ["Keep", "delete_snapshot", "prune_snapshots"]

# How many of the newest, which names, or a predicate.
Keep: TypeAlias = int | Iterable[str] | Callable[[SnapshotInfo], bool]

_MIN_LIVE = 0.75  # of a pack's bytes; what is needed of a pack that has less is moved


def delete_snapshot(session: Session, name: str) -> int:
    """Remove a snapshot and the packs that only it needed.

    Returns:
        The bytes that were freed.

    Raises:
        ValueError: there is no such snapshot.
    """
    if name not in session.listing:
        session.catalog.load(name)
    session.remove_manifests(session.listing.pop(name))
    return session.collect()


def prune_snapshots(
    session: Session, keep: Keep | None, remove: Iterable[str] | None, options: Options
) -> PruneResult:
    """Remove all snapshots but some, and move what those need.

    Raises:
        ValueError: `keep` names what is not there, or nothing is left.
        CorruptionError, CompatibilityError: a manifest is damaged; nothing was done.
    """
    _check_all(session)
    if keep is None:
        gone = {remove} if isinstance(remove, str) else set(remove or ())
        keep = session.listing.keys() - gone  # another process may have removed some of them
    names = _kept_names(keep, session)
    intern = sharing()
    kept = [
        session.catalog.load_file(files[0], intern)
        for name, files in session.listing.items()
        if name in names
    ]
    mover = _Mover(session, kept, options)
    rewritten, written = mover.move()
    removed = [name for name in session.listing if name not in names]
    files = [file for name in reversed(removed) for file in session.listing.pop(name)]
    session.remove_manifests(files)
    return PruneResult(tuple(removed), tuple(rewritten), session.collect() - written)


def _check_all(session: Session) -> None:
    """Refuse to remove anything while a manifest is damaged: which snapshots are the newest, and
    what they need, only manifests say that can be read."""
    session.index.confirm(session.files())
    for path, error in session.index.damaged.items():
        name, files = next(
            (name, files)
            for name, files in session.listing.items()
            if any(file.path == path for file in files)
        )
        remedy = f"delete snapshot {name!r} first"
        if len(files) > 1:
            remedy = f"remove {session.storage.label(path)}, or {remedy}"
        raise type(error)(f"{error}. Nothing is pruned while a manifest cannot be read: {remedy}")


def _kept_names(keep: Keep, session: Session) -> set[str]:
    names = list(session.listing)
    if isinstance(keep, int):
        if isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep is {keep!r}; keep at least 1, or delete snapshots by name")
        _check_order(session, keep)
        return set(names[-keep:])
    if callable(keep):
        load = session.catalog.load_file
        kept = {name for name in names if keep(describe(load(session.listing[name][0])))}
    else:
        kept = _checked(keep, session)
    if names and not kept:
        raise ValueError("keep leaves no snapshot; delete them by name if that is meant")
    return kept


def _checked(given: Iterable[str], session: Session) -> set[str]:
    names = {given} if isinstance(given, str) else set(given)
    for name in names - session.listing.keys():
        raise ValueError(f"keep names {name!r}, and there is no such snapshot")
    return names


def _check_order(session: Session, keep: int) -> None:
    """Refuse to choose between two snapshots of which nobody knows which is the newer."""
    around = list(session.listing.values())[-keep - 1 :][:2]
    if keep < len(session.listing) and around[0][0].order == around[1][0].order:
        first, second = (files[0].snapshot for files in around)
        raise ValueError(
            f"keep is {keep}, and the snapshots {first!r} and {second!r} have the same number "
            f"{around[0][0].order}: keep snapshots by their names, or delete one of the two"
        )


def _choose_heads(
    session: Session, kept: Sequence[Manifest], threads: int
) -> dict[Content, FrameRef]:
    """For each content that kept snapshots want, the frame that shall serve them all: the first, or
    where there are several, the first that is good. Another one may be there because that one is
    damaged."""
    heads: dict[Content, FrameRef] = {}
    several: dict[Content, list[FrameRef]] = {}
    for manifest in kept:
        for frame in (tensor.frame for tensor in manifest.tensors):
            head = heads.setdefault(frame.content, frame)
            if (head.pack, head.offset) != (frame.pack, frame.offset):
                several.setdefault(frame.content, [head]).append(frame)
    with PackReader(session.storage) as reader:
        for content, frames in several.items():
            unique = {(frame.pack, frame.offset): frame for frame in frames}.values()
            good = (frame for frame in unique if _is_good(frame, reader, threads))
            heads[content] = next(good, frames[0])
    return heads


def _is_good(frame: FrameRef, reader: PackReader, threads: int) -> bool:
    try:
        Chain(reader, frame, None).verify(threads, Scratch())
    except (PackhorseError, FileNotFoundError):
        return False
    return True


class _Mover:
    """Gives kept snapshots chains that stay."""

    def __init__(self, session: Session, kept: Sequence[Manifest], options: Options) -> None:
        self._session = session
        self._kept = kept
        self._options = options
        self._heads = _choose_heads(session, kept, options.threads)
        self._doomed: set[str] = set()
        self._doom_packs()
        self._moved: dict[Content, FrameRef] = {}
        self._moving: set[Content] = set()

    def _doom_packs(self) -> None:
        """Doom packs until all others hold mostly what kept snapshots go on needing."""
        packs = {pack for manifest in self._kept for pack in manifest.packs()}
        there = self._session.storage.sizes(PACKS)
        sizes = {pack: self._size(there, pack) for pack in packs}
        while True:
            live = dict.fromkeys(packs - self._doomed, 0)
            for frame in self._heads.values():
                if self._keeps_its_place(frame):
                    live[frame.pack] += frame.nbytes
            more = {pack for pack, nbytes in live.items() if nbytes < _MIN_LIVE * sizes[pack]}
            if not more:
                return
            self._doomed |= more

    def _size(self, there: Mapping[str, int], pack: str) -> int:
        path = pack_path(pack)
        nbytes = there.get(path.removeprefix(f"{PACKS}/"))
        if nbytes is not None:
            return nbytes
        harmed = next(m.file.snapshot for m in self._kept if pack in m.packs())
        raise CorruptionError(
            f"snapshot {harmed!r}: {self._session.storage.label(path)}: the pack is not there; "
            "delete what needs it first (verify lists that)"
        )

    def _keeps_its_place(self, frame: FrameRef) -> bool:
        if frame.pack in self._doomed:
            return False
        return not self._is_doomed(frame) or self._wants_base(frame)

    def _wants_base(self, frame: FrameRef) -> bool:
        """Whether some kept snapshot wants what a frame is a delta against."""
        return frame.base is None or frame.base.content in self._heads

    def move(self) -> tuple[list[str], int]:
        """Write new manifests where they are needed.

        Returns:
            The names of those snapshots, and the bytes that were written.
        """
        rewritten, written = [], 0
        todo = [m for m in self._kept if any(self._is_doomed(t.frame) for t in m.tensors)]
        # None is begun if one has no number left.
        new = [manifest_file(m.file.snapshot, m.file.order, m.file.generation + 1) for m in todo]
        for manifest, file in zip(todo, new, strict=True):
            name = manifest.file.snapshot
            with (
                blaming(f"snapshot {name!r}"),
                PackReader(self._session.storage) as reader,
                PackWriter(self._session.storage, *self._room(manifest)) as pack,
            ):
                packer = FramePacker(self._session, pack, reader, self._options)
                tensors = tuple(
                    replace(tensor, frame=self._stay(tensor.frame, reader, pack, packer))
                    for tensor in manifest.tensors
                )
            self._session.commit(replace(manifest, file=file, tensors=tensors))
            rewritten.append(name)
            written += pack.nbytes
        return rewritten, written

    def _room(self, manifest: Manifest) -> tuple[int, int]:
        """How many frames may have to move for a snapshot, and their bytes at most."""
        links: dict[tuple[str, int], FrameRef] = {}
        todo = [self._heads[tensor.frame.content] for tensor in manifest.tensors]
        while todo:
            link = todo.pop()
            if (link.pack, link.offset) not in links:
                links[link.pack, link.offset] = link
                # The head of a content may be another frame than the one below.
                below = link.chain[1:]
                todo += [*below, *(self._heads[at.content] for at in below if self._is_head(at))]
        rooms = [max_frame_nbytes(ref.content[1], ref.content[2:]) for ref in links.values()]
        return len(links), sum(rooms) + sum(ref.nbytes for ref in links.values())

    def _is_head(self, frame: FrameRef) -> bool:
        return frame.content in self._heads

    def _is_doomed(self, frame: FrameRef) -> bool:
        return any(link.pack in self._doomed for link in frame.chain)

    def _stay(
        self, frame: FrameRef, reader: PackReader, pack: PackWriter, packer: FramePacker
    ) -> FrameRef:
        """A frame of the same content whose whole chain stays."""
        frame = self._heads[frame.content]
        if not self._is_doomed(frame):
            return frame
        known = self._moved.get(frame.content)
        if known is not None:
            return known
        # The nearest content down the chain that some kept snapshot wants anyway. That is moved
        # first; what is being moved is none, should manifests lead in a circle.
        self._moving.add(frame.content)
        below = next((link for link in frame.chain[1:] if self._is_wanted(link)), None)
        base = None if below is None else self._stay(below, reader, pack, packer)
        if base is not None and base.n_deltas >= MAX_CHAIN:
            base = None
        if below is frame.base and (base is None) == (below is None):
            moved = self._as_it_is(frame, base, reader, pack)
        else:
            moved = self._anew(frame, base, reader, packer)
        self._moving.discard(frame.content)
        self._moved[frame.content] = moved
        return moved

    def _is_wanted(self, frame: FrameRef) -> bool:
        return self._is_head(frame) and frame.content not in self._moving

    def _as_it_is(
        self, frame: FrameRef, base: FrameRef | None, reader: PackReader, pack: PackWriter
    ) -> FrameRef:
        """The same frame: in its place if its pack stays, or moved byte for byte."""
        n_deltas = 0 if base is None else base.n_deltas + 1
        if frame.pack not in self._doomed:
            return replace(frame, base=base, n_deltas=n_deltas)
        whole = reader.frame(frame)
        return pack.add(whole.buffer(), frame.content, base)

    def _anew(
        self, frame: FrameRef, base: FrameRef | None, reader: PackReader, packer: FramePacker
    ) -> FrameRef:
        """Another frame of the same content, against a base that stays."""
        data = _decoded(frame, reader, self._options.threads)
        spec = Spec(frame.name, frame.content[1], reader.frame(frame).shape)
        return packer.add([spec], [data], [base], share=False)[0]


def _decoded(frame: FrameRef, reader: PackReader, threads: int) -> ByteArray:
    return Chain(reader, frame, None).decode(threads, Scratch())
