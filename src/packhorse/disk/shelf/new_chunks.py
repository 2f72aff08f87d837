"""The packed chunks of a transaction, before its commit.

They get numbers that no commit has used. When they take too much memory, they are written to the
file already. If the transaction does not end by a commit, they are deleted then, or by the next
writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from packhorse.disk.shelf.arrays import Array
from packhorse.disk.shelf.cache import Cache, Stored, stored
from packhorse.disk.shelf.commits import Commit
from packhorse.disk.shelf.committed import Settings
from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.packing import Packed
from packhorse.disk.shelf.records import (
    CHUNK_KEY,
    NO_CHUNK,
    ChunkRecord,
    Head,
    Pointer,
    TensorRecord,
    chunk_value,
)
from packhorse.disk.shelf.slots import Slot
from packhorse.disk.shelf.store import Folder
from packhorse.disk.shelf.unpacking import Unpacker
from packhorse.disk.shelf.versions import State

__all__ = ["NewChunks", "delete_unused_chunks"]

_MAX_PACKED_NBYTES = 1 << 26


@dataclass(slots=True)
class _NewChunk:
    """A packed chunk that is not committed.

    Attributes:
        record: what is stored; None if it is in the file already.
        nbytes: of its frame.
        content_hash: of the elements of its frame.
        base: the number of the stored chunk that it needs; 0 for none.
        base_nbytes: of the frame of that chunk, if this one is a patch of it.
        n_uses: how many pointers and chunks use it.
        kept: its elements, or the rows of a patch, for the cache; None if they are not kept.
    """

    record: ChunkRecord | None
    nbytes: int
    content_hash: bytes
    base: int
    base_nbytes: int
    n_uses: int = 1
    kept: Array | None = None


class NewChunks:
    """The packed chunks of a transaction, and the uses that it makes of committed ones."""

    def __init__(self, folder: Folder, settings: Settings, head: Head) -> None:
        """Args:
        folder: of the shelf.
        settings: of the shelf.
        head: the head record before the transaction.
        """
        self._folder, self._settings = folder, settings
        self._first = self._next = head.next_chunk
        self._new: dict[int, _NewChunk] = {}
        self._more_uses: Counter[int] = Counter()  # of committed chunks
        self._nbytes = self._kept_nbytes = 0
        self._has_spilled = False
        settings.planner.memory.begin(settings.cache.max_nbytes)

    # Adding.

    def add(self, slot: Slot, rows: Array | None, packed: Packed, base: int) -> int:
        """Take a chunk that was packed.

        Args:
            slot: what was packed.
            rows: those of a patch, if they may be kept.
            packed: its packed form.
            base: the number of the stored chunk that it is a delta against; 0 for none.

        Returns:
            Its number.
        """
        number = self._next
        self._next += 1
        places = tuple(sorted(slot.patch)) if slot.patch else None
        base, base_nbytes = (slot.base, slot.base_nbytes) if places else (base, 0)
        if base:
            self._use(base)
        record = ChunkRecord(base, places, packed.frame, packed.memory)
        nbytes, kept = len(packed.frame), self._kept(slot, rows)
        new = _NewChunk(record, nbytes, packed.content_hash, base, base_nbytes, 1, kept)
        self._new[number] = new
        self._nbytes += nbytes
        return number

    def _kept(self, slot: Slot, rows: Array | None) -> Array | None:
        """The elements of a chunk, or the rows of a patch, if they are to be kept for the cache."""
        kept = rows if slot.patch else slot.data if slot.is_own else None
        if kept is None or not self._has_room(kept.nbytes):
            return None
        kept.flags.writeable = False
        self._kept_nbytes += kept.nbytes
        return kept

    def _use(self, number: int) -> None:
        new = self._new.get(number)
        if new is None:
            self._more_uses[number] += 1
        else:
            new.n_uses += 1

    def release(self, number: int) -> None:
        """End one use of a chunk; 0 is none."""
        while number:
            new = self._new.get(number)
            if new is None:
                self._more_uses[number] -= 1
                return
            new.n_uses -= 1
            if new.n_uses:
                return
            del self._new[number]
            self._nbytes -= new.nbytes if new.record is not None else 0
            self._forget(new)
            number = new.base

    # Reading.

    def kept(self, number: int) -> Stored | None:
        """The elements of a chunk, if they are in memory; not those of a patch."""
        new = self._new.get(number)
        if new is None or new.kept is None or new.base_nbytes:
            return None
        return stored(new.kept, new.content_hash)

    def pointer(self, number: int) -> Pointer:
        """Where a chunk of a tensor is stored that has become one of these; 0 is zeros."""
        if not number:
            return NO_CHUNK
        new = self._new[number]
        return Pointer(number, new.nbytes + new.base_nbytes, new.content_hash[:4])

    def load(
        self, record: TensorRecord, state: State, numbers: list[int], label: str
    ) -> list[Stored | None]:
        """Decode chunks. They do not get into the cache, because another transaction may use their
        numbers.

        Args:
            record: the tensor.
            state: the newest committed state.
            numbers: of the chunks.
            label: the tensor, for messages.
        """

        def find(wanted: Sequence[int]) -> list[ChunkRecord]:
            return [self._find(state, number) for number in wanted]

        beside = _Beside(self._settings.cache, self._first, self._keep)
        unpacker = Unpacker(beside, find, self._settings.threads, label)
        return unpacker.load(record, [-1] * len(numbers), list(map(self.pointer, numbers)))

    def _keep(self, number: int, data: Array) -> None:
        """Keep the elements of a chunk that was decoded: it may be the keyframe of the next rows,
        too."""
        new = self._new.get(number)
        if new is None or new.base_nbytes or new.kept is not None:  # of a patch, rows are kept
            return
        if self._has_room(data.nbytes):
            self._kept_nbytes += data.nbytes
            new.kept = data

    def _has_room(self, nbytes: int) -> bool:
        return self._kept_nbytes + nbytes <= self._settings.cache.max_nbytes // 4

    def _find(self, state: State, number: int) -> ChunkRecord:
        new = self._new.get(number)
        if new is None or new.record is None:
            return state.chunks([number])[0]
        return new.record

    # Writing.

    def spill_if_many(self) -> None:
        """Write the packed chunks to the file already if they take too much memory.

        Raises:
            OSError: the disk is full, or failed.
        """
        if self._nbytes <= _MAX_PACKED_NBYTES:
            return
        spilled = [(n, new) for n, new in self._new.items() if new.record is not None]

        def work(txn: Txn, _: Head) -> None:
            for number, new in spilled:
                assert new.record is not None
                value = chunk_value(number, new.record)
                txn.handle.put(CHUNK_KEY.pack(number), value, db=txn.tables.chunks)

        self._has_spilled = True
        self._folder.write(work)
        for _, new in spilled:
            self._forget(new)
            new.kept = None
        self._nbytes = 0

    def write(self, commit: Commit, txn: Txn) -> int:
        """Write the chunks and their uses in a commit.

        Returns:
            The number of the next chunk.
        """
        delete_unused_chunks(txn, commit.head, self._new)
        for number, n in self._more_uses.items():
            if n:
                commit.use(number, n)
        for number, new in self._new.items():
            if new.record is not None:
                commit.put_chunk(number, new.record, new.n_uses)
            elif new.n_uses > 1:
                commit.set_uses(number, new.n_uses)
        return self._next

    def _forget(self, new: _NewChunk) -> None:
        """Forget the frame of a chunk, which is in the file or which nothing needs any longer."""
        record, new.record = new.record, None  # first, so that no memory is given back twice
        if record is not None and record.memory is not None:
            self._settings.planner.memory.give(record.memory, was_held=True)

    def fill_cache(self) -> None:
        """Put the elements that were kept into the cache, once the chunks are committed."""
        cache = self._settings.cache
        for number, new in self._new.items():
            self._forget(new)
            if new.kept is None:
                continue
            if new.base_nbytes:
                cache.put_rows(number, new.kept)
            else:
                cache.put(number, stored(new.kept, new.content_hash))

    def drop(self) -> None:
        """Delete what was written early."""
        if self._has_spilled:
            self._folder.write(delete_unused_chunks)


def delete_unused_chunks(txn: Txn, head: Head, used: Container[int] = ()) -> None:
    """Delete the chunks that a transaction wrote early which was never committed.

    Args:
        txn: a write transaction.
        head: the head record; chunks from its next number on are of no commit.
        used: numbers of chunks that stay, because a commit is about to use them.
    """
    cursor = txn.handle.cursor(db=txn.tables.chunks)
    found = cursor.set_range(CHUNK_KEY.pack(head.next_chunk))
    while found and (key := bytes(cursor.key())):
        is_used = CHUNK_KEY.unpack(key)[0] in used
        found = cursor.next() if is_used else cursor.delete()


class _Beside(Cache):
    """A cache to look up committed chunks in, which takes none that are not committed."""

    def __init__(self, cache: Cache, next_chunk: int, keep: Callable[[int, Array], None]) -> None:
        """Args:
        cache: with the committed chunks.
        next_chunk: the number of the first chunk that is not committed.
        keep: takes such chunks, when they are decoded.
        """
        super().__init__(0)
        self._cache, self._next_chunk, self._keep = cache, next_chunk, keep

    def put(self, number: int, chunk: Stored) -> None:
        if number >= self._next_chunk:
            self._keep(number, chunk.data)

    def get(self, numbers: Sequence[int]) -> list[Stored | None]:
        found = self._cache.get(numbers)
        return [
            chunk if number < self._next_chunk else None
            for number, chunk in zip(numbers, found, strict=True)
        ]
