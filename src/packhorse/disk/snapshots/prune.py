"""Removes snapshots, and moves frames that others still need out of packs that are mostly unneeded.

A kept snapshot may need frames in the packs of removed ones: bases of its deltas, or equal tensors.
Frames that restore tensors of kept snapshots are moved as they are. A delta whose base is removed
becomes a delta against the nearest base that stays, or a full frame. First the kept snapshots get
new manifests, then the other snapshots are removed, then the packs. So every snapshot is whole at
any moment, even if the work is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from packhorse.disk.snapshots.manifest import MAX_CHAIN, Manifest, sharing
from packhorse.disk.snapshots.names import PACKS, manifest_file, pack_path
from packhorse.disk.snapshots.results import PruneResult, SnapshotInfo, describe
from packhorse.disk.snapshots.session import Session
from packhorse.errors import CorruptionError, PackhorseError, blaming
from packhorse.frame import max_frame_nbytes
from packhorse.storage.frames.frame_store import FrameBatch, FrameStore, NewFrame
from packhorse.storage.frames.packer import FramePacker, Item, PackOptions
from packhorse.storage.frames.refs import Content, FrameRef, TensorSpec
from packhorse.storage.frames.scratch import Scratch

__all__ = ["Keep", "delete_snapshot", "prune_snapshots"]

# How many of the newest snapshots to keep, or their names, or a predicate.
Keep: TypeAlias = int | Iterable[str] | Callable[[SnapshotInfo], bool]

_MIN_LIVE = 0.75  # if less of a pack's bytes is needed, the needed frames are moved


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
    session: Session, keep: Keep | None, remove: Iterable[str] | None, options: PackOptions
) -> PruneResult:
    """Remove some snapshots, and move frames that the kept ones need.

    Raises:
        ValueError: `keep` names a snapshot that does not exist, or no snapshot would be left.
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
    """Refuse to remove anything while a manifest is damaged, because nobody knows which frames it
    needs, or whether its snapshot is among the newest."""
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
        raise type(error)(f"{error}; nothing is pruned while a manifest cannot be read: {remedy}")


def _kept_names(keep: Keep, session: Session) -> set[str]:
    names = list(session.listing)
    if isinstance(keep, int):
        if isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep is {keep!r}; keep at least 1, or delete all snapshots by name")
        _check_order(session, keep)
        return set(names[-keep:])
    if callable(keep):
        load = session.catalog.load_file
        kept = {name for name in names if keep(describe(load(session.listing[name][0])))}
    else:
        kept = _checked(keep, session)
    if names and not kept:
        raise ValueError(
            "keep would leave no snapshot; if you want that, delete the snapshots by name"
        )
    return kept


def _checked(given: Iterable[str], session: Session) -> set[str]:
    names = {given} if isinstance(given, str) else set(given)
    for name in names - session.listing.keys():
        raise ValueError(f"keep names {name!r}, but there is no such snapshot")
    return names


def _check_order(session: Session, keep: int) -> None:
    """Refuse to choose between two snapshots if their numbers do not tell which one is newer."""
    around = list(session.listing.values())[-keep - 1 :][:2]
    if keep < len(session.listing) and around[0][0].order == around[1][0].order:
        first, second = (files[0].snapshot for files in around)
        raise ValueError(
            f"keep is {keep}, but the snapshots {first!r} and {second!r} have the same number "
            f"{around[0][0].order}, so neither is newer; keep snapshots by name, or delete one of "
            "the two"
        )


def _choose_heads(
    session: Session, kept: Sequence[Manifest], threads: int
) -> dict[Content, FrameRef]:
    """For each content of the kept snapshots, the one frame that all of them will use. If there are
    several frames, it is the first good one: there may be a second one because the first is
    damaged."""
    heads: dict[Content, FrameRef] = {}
    several: dict[Content, list[FrameRef]] = {}
    for manifest in kept:
        for frame in (tensor.frame for tensor in manifest.tensors):
            head = heads.setdefault(frame.content, frame)
            if (head.pack, head.offset) != (frame.pack, frame.offset):
                several.setdefault(frame.content, [head]).append(frame)
    for content, frames in several.items():
        unique = {(frame.pack, frame.offset): frame for frame in frames}.values()
        good = (frame for frame in unique if _is_good(frame, session.frames, threads))
        heads[content] = next(good, frames[0])
    return heads


def _is_good(frame: FrameRef, store: FrameStore, threads: int) -> bool:
    try:
        store.chain(frame).verify(threads, Scratch())
    except (PackhorseError, FileNotFoundError):
        return False
    return True


class _Mover:
    """Moves frames, so that kept snapshots only need packs that stay."""

    def __init__(self, session: Session, kept: Sequence[Manifest], options: PackOptions) -> None:
        self._session = session
        self._kept = kept
        self._options = options
        self._heads = _choose_heads(session, kept, options.threads)
        self._doomed: set[str] = set()
        self._doom_packs()
        self._moved: dict[Content, FrameRef] = {}
        self._moving: set[Content] = set()

    def _doom_packs(self) -> None:
        """Choose the packs to remove, until every other pack is mostly needed by kept snapshots."""
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
            f"snapshot {harmed!r}: {self._session.storage.label(path)}: the pack does not exist; "
            "first delete the snapshots that need it (verify lists them)"
        )

    def _keeps_its_place(self, frame: FrameRef) -> bool:
        if frame.pack in self._doomed:
            return False
        return not self._is_doomed(frame) or self._wants_base(frame)

    def _wants_base(self, frame: FrameRef) -> bool:
        """Whether a frame needs no base, or a kept snapshot has the content of its base."""
        return frame.base is None or frame.base.content in self._heads

    def move(self) -> tuple[list[str], int]:
        """Write new manifests for the snapshots that need frames in packs to be removed.

        Returns:
            The names of these snapshots, and the bytes of the packs that were written.
        """
        rewritten, written = [], 0
        todo = [m for m in self._kept if any(self._is_doomed(t.frame) for t in m.tensors)]
        # All names are made first, so that nothing is written if a number has run out.
        new = [manifest_file(m.file.snapshot, m.file.order, m.file.generation + 1) for m in todo]
        for manifest, file in zip(todo, new, strict=True):
            name = manifest.file.snapshot
            store, options = self._session.frames, replace(self._options, max_chain=MAX_CHAIN)
            with blaming(f"snapshot {name!r}"), store.batch(*self._room(manifest)) as pack:
                way = _Way(pack, FramePacker(store, options))
                tensors = tuple(
                    replace(tensor, frame=self._stay(tensor.frame, way))
                    for tensor in manifest.tensors
                )
            self._session.commit(replace(manifest, file=file, tensors=tensors))
            rewritten.append(name)
            written += pack.nbytes
        return rewritten, written

    def _room(self, manifest: Manifest) -> tuple[list[str], int]:
        """The names of the frames that may have to move for a snapshot, and the most bytes that
        they may take together."""
        links: dict[tuple[str, int], FrameRef] = {}
        todo = [self._heads[tensor.frame.content] for tensor in manifest.tensors]
        while todo:
            link = todo.pop()
            if (link.pack, link.offset) not in links:
                links[link.pack, link.offset] = link
                # The head of a content may be a different frame from the one in this chain.
                below = link.chain[1:]
                todo += [*below, *(self._heads[at.content] for at in below if self._is_head(at))]
        contents = [ref.content for ref in links.values()]
        rooms = [max_frame_nbytes(content.dtype, (content.numel,)) for content in contents]
        names = [ref.name for ref in links.values()]
        return names, sum(rooms) + sum(ref.nbytes for ref in links.values())

    def _is_head(self, frame: FrameRef) -> bool:
        return frame.content in self._heads

    def _is_doomed(self, frame: FrameRef) -> bool:
        return any(link.pack in self._doomed for link in frame.chain)

    def _stay(self, frame: FrameRef, way: _Way) -> FrameRef:
        """A frame of the same content whose whole chain stays, after moving what must move."""
        frame = self._heads[frame.content]
        if not self._is_doomed(frame):
            return frame
        known = self._moved.get(frame.content)
        if known is not None:
            return known
        # The new base is the nearest frame down the chain whose content a kept snapshot has anyway.
        # It is moved first. Frames that are being moved are skipped, in case manifests lead in a
        # circle.
        self._moving.add(frame.content)
        below = next((link for link in frame.chain[1:] if self._is_wanted(link)), None)
        base = None if below is None else self._stay(below, way)
        if base is not None and base.n_deltas >= MAX_CHAIN:
            base = None
        if below is frame.base and (base is None) == (below is None):
            moved = self._as_it_is(frame, base, way)
        else:
            moved = self._anew(frame, base, way)
        self._moving.discard(frame.content)
        self._moved[frame.content] = moved
        return moved

    def _is_wanted(self, frame: FrameRef) -> bool:
        return self._is_head(frame) and frame.content not in self._moving

    def _as_it_is(self, frame: FrameRef, base: FrameRef | None, way: _Way) -> FrameRef:
        """Keep the same frame: in its place if its pack stays, otherwise copied byte for byte."""
        n_deltas = 0 if base is None else base.n_deltas + 1
        if frame.pack not in self._doomed:
            return replace(frame, base=base, n_deltas=n_deltas)
        data = self._session.frames.open(frame).buffer()
        return way.pack.put([NewFrame(data, frame.content, base, frame.name)])[0]

    def _anew(self, frame: FrameRef, base: FrameRef | None, way: _Way) -> FrameRef:
        """Make another frame of the same content, as a delta against a base that stays."""
        store = self._session.frames
        data = store.chain(frame).decode(self._options.threads, Scratch())
        spec = TensorSpec(frame.name, frame.content.dtype, store.open(frame).shape)
        return way.packer.add(way.pack, [Item(spec, data, base)], share=False)[0]


class _Way(NamedTuple):
    """Where frames are moved to: `pack` takes frames as they are, `packer` packs tensors again."""

    pack: FrameBatch
    packer: FramePacker
