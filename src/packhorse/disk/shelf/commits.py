"""Writing the records of a commit: pointers, entries, chunks and their uses, in one transaction.

A stored chunk is used by the pointer of one chunk of a tensor, and by the chunks that are deltas
against it. A rollback adds pointers. When nothing uses a chunk any more, it is deleted. Uses that
begin and end in one commit, as those of a chunk that a patch takes the place of, leave no trace:
the sums are noted at the end (`settle`).

What is damaged can be overwritten and removed like the rest. Where it is not known what a damaged
record had used, that stays in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import groupby

from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.records import (
    CHUNK_KEY,
    EPOCH,
    NO_CHUNK,
    POINTER_KEY,
    ChunkRecord,
    Entry,
    Head,
    Pointer,
    TensorRecord,
    chunk_value,
    entry_key,
    entry_value,
    is_removed,
    parse_chunk,
    parse_pointer,
    parse_uses,
    pointer_place,
    pointer_value,
    tensors_of,
    uses_value,
)
from packhorse.disk.shelf.versions import (
    Known,
    State,
    newest_entry,
    newest_pointer,
    versions_of,
)
from packhorse.errors import CompatibilityError, CorruptionError

__all__ = ["Commit"]


class Commit:
    """One commit, while its transaction is open."""

    def __init__(self, txn: Txn, head: Head, label: str) -> None:
        """Args:
            txn: a write transaction.
            head: the head record before the commit.
            label: the shelf, for messages.

        Raises:
            CorruptionError: a tag is damaged, so it is not known what it shows.
        """
        self._txn, self._label = txn, label
        self.head = head
        self.state = State(txn, head, head.epoch, Known(), label)
        try:
            self._tags = [tag.epoch for tag in self.state.tags()]
        except CorruptionError as error:
            raise CorruptionError(
                f"{error}; nothing can be written before untag() has removed the tag"
            ) from error
        self._newest_tag = max(self._tags, default=0)
        self._shown: dict[int, set[int] | None] | None = None
        self._more_uses: dict[int, int] = {}  # of stored chunks, by this commit
        uses = txn.handle.cursor(db=txn.tables.shares)
        self._has_stray = uses.set_range(CHUNK_KEY.pack(head.next_chunk))  # damaged keys

    # Chunks.

    def put_chunk(self, number: int, record: ChunkRecord, n_uses: int) -> None:
        """Store a chunk.

        Args:
            number: of the chunk, which nothing has yet.
            record: the chunk.
            n_uses: how many pointers and chunks use it.
        """
        key = CHUNK_KEY.pack(number)
        value = chunk_value(number, record)
        self._txn.handle.put(key, value, db=self._txn.tables.chunks)
        if n_uses > 1 or self._has_stray:
            self.set_uses(number, n_uses)

    def set_uses(self, number: int, n_uses: int) -> None:
        """Note how many pointers and chunks use a chunk, which is at least one."""
        key = CHUNK_KEY.pack(number)
        if n_uses > 1:
            self._txn.handle.put(key, uses_value(number, n_uses), db=self._txn.tables.shares)
        else:
            self._txn.handle.delete(key, db=self._txn.tables.shares)

    def use(self, number: int, n: int = 1) -> None:
        """Add uses of a stored chunk, which `settle` will note."""
        self._more_uses[number] = self._more_uses.get(number, 0) + n

    def release(self, number: int) -> None:
        """End one use of a stored chunk; `settle` deletes it if that was the last. 0 is none."""
        if number:
            self.use(number, -1)

    def settle(self) -> None:
        """Note the uses that this commit has added and ended, and delete chunks without any. The
        last step of a commit."""
        # A chunk has a greater number than the one that it needs, which may go with it.
        queue = [-number for number in self._more_uses]
        heapify(queue)
        while queue:
            number = -heappop(queue)
            n = self._more_uses.pop(number, 0)
            uses = self._uses(number) if n else None
            if uses is None:
                continue
            if uses + n > 0:
                self.set_uses(number, uses + n)
                continue
            base = self._delete_chunk(number, has_record=uses > 1)
            if base:
                if base not in self._more_uses:
                    heappush(queue, -base)
                self.release(base)

    def _delete_chunk(self, number: int, *, has_record: bool) -> int:
        """Delete a stored chunk, and the record of its uses if it has one. Returns the number of
        the chunk that it needed; 0 for none."""
        key, base = CHUNK_KEY.pack(number), 0
        value = self._txn.handle.get(key, db=self._txn.tables.chunks)
        if value is not None:
            with suppress(CorruptionError):
                base = parse_chunk(number, value).base
        self._txn.handle.delete(key, db=self._txn.tables.chunks)
        if has_record:
            self._txn.handle.delete(key, db=self._txn.tables.shares)
        return base

    def _uses(self, number: int) -> int | None:
        """How many uses of a chunk are noted; None if that is damaged."""
        cursor = self._txn.handle.cursor(db=self._txn.tables.shares)
        key = CHUNK_KEY.pack(number)
        found = cursor.set_range(key)
        if found and cursor.key() == key:
            with suppress(CorruptionError):
                return parse_uses(number, bytes(cursor.value()), self._label)
            return None
        beside = [bytes(cursor.item()[0]) + bytes(cursor.item()[1])] if found else []
        if cursor.prev() if found else cursor.last():
            beside.append(bytes(cursor.item()[0]) + bytes(cursor.item()[1]))
        for record in beside:  # one under a damaged key, perhaps that of this chunk
            try:
                parse_uses(int.from_bytes(record[:8], "big"), record[8:], self._label)
            except CorruptionError:
                return None
        return 1

    # Pointers.

    def point(self, record: TensorRecord, number: int, pointer: Pointer, is_new: bool) -> int:
        """Let a chunk of a tensor be a stored chunk, or zero.

        Args:
            record: the tensor.
            number: the number of the chunk in the tensor.
            pointer: where it is stored.
            is_new: whether the tensor has no pointers from earlier commits.

        Returns:
            By how many bytes the frames of the tensor grow.
        """
        table, epoch = self._txn.tables.pointers, self.head.epoch
        key = POINTER_KEY.pack(record.id, number, epoch)
        grown, has_older = pointer.nbytes, False
        found = None if is_new else self._older(key)
        if found is not None:
            old = self._old_pointer(*found)
            grown -= old.nbytes
            has_older = True
            is_kept = found[0] == key and pointer.chunk  # and written over
            if EPOCH.unpack(found[0][-4:])[0] > self._newest_tag:
                self.release(old.chunk)
                if not is_kept:
                    self._txn.handle.delete(found[0], db=table)
                    has_older = self._older(key) is not None
        if pointer.chunk or has_older:
            self._txn.handle.put(key, pointer_value(key, pointer), db=table)
        return grown

    def _older(self, key: bytes) -> tuple[bytes, bytes] | None:
        try:
            return newest_pointer(self._txn, key, self._label)
        except CorruptionError:  # another key than it should have: it stays where it is
            return None

    def _old_pointer(self, key: bytes, data: bytes) -> Pointer:
        """What a pointer that is not needed any more had used."""
        try:
            return parse_pointer(key, data, self._label)
        except CorruptionError:
            return NO_CHUNK

    def sweep(self, tensor: int, epochs: Iterable[int]) -> None:
        """Delete the versions of a tensor's pointers that no state shows.

        Args:
            tensor: the number of the tensor.
            epochs: of the states that show the tensor.
        """
        states = sorted(epochs)
        try:
            versions = list(versions_of(self._txn, self._label, tensor))
        except CorruptionError:
            return
        for _, group in groupby(versions, key=lambda version: version[0]):
            chunk = list(group)
            shown = {max((v[1] for v in chunk if v[1] <= epoch), default=0) for epoch in states}
            shown.discard(0)
            for _, epoch, key, value in chunk:
                if epoch in shown:
                    continue
                self._txn.handle.delete(key, db=self._txn.tables.pointers)
                self.release(self._old_pointer(key, value).chunk)

    def _epochs_of(self, tensor: int, *, and_newest: bool = False) -> list[int]:
        """The epochs of the tags that show a tensor, and of the newest state if it does."""
        if self._shown is None:
            epochs = [*self._tags, self.head.epoch]
            self._shown = {epoch: self._tensors_at(epoch) for epoch in epochs}
        shown = (
            self._shown.items()
            if and_newest
            else ((epoch, self._shown[epoch]) for epoch in self._tags)
        )
        return [epoch for epoch, tensors in shown if tensors is None or tensor in tensors]

    def _tensors_at(self, epoch: int) -> set[int] | None:
        """The tensors that a state shows; None if it is not known, because an entry is damaged or
        of a later release."""
        state = State(self._txn, self.head, epoch, Known(), self._label)
        try:
            return {r.id for _, entry in state.entries() for r in tensors_of(entry)}
        except (CorruptionError, CompatibilityError):
            return None

    def remove_tensor(self, tensor: int) -> None:
        """Delete what no tag shows of a tensor that the newest state does not have any more."""
        self.sweep(tensor, self._epochs_of(tensor) if self._tags else [])

    # Entries.

    def enter(self, name: str, entry: Entry | None) -> None:
        """Set the entry of a name, or remove it."""
        table = self._txn.tables.names
        key = entry_key(name, self.head.epoch)
        found = self._older_entry(key)
        is_kept = found is not None and found[0] == key and entry is not None  # and written over
        if found is not None and not is_kept and EPOCH.unpack(found[0][-4:])[0] > self._newest_tag:
            self._txn.handle.delete(found[0], db=table)
            found = self._older_entry(key)
        if entry is not None or (found is not None and not is_removed(found[1])):
            self._txn.handle.put(key, entry_value(name, self.head.epoch, entry), db=table)

    def _older_entry(self, key: bytes) -> tuple[bytes, bytes] | None:
        with suppress(CorruptionError):
            return newest_entry(self._txn, key, self._label)
        return None

    # Tags.

    def roll_back(self, epoch: int) -> None:
        """Make the newest state equal to that of a tag.

        Args:
            epoch: of the tag.
        """
        then = State(self._txn, self.head, epoch, Known(), self._label)
        before, after = self._readable_entries(), dict(then.entries())
        for name in set(self.state.names()) | after.keys():
            if name not in after or before.get(name) != after[name]:
                self.enter(name, after.get(name))
        old = {r.id: r for entry in before.values() for r in tensors_of(entry)}
        new = {r.id: r for entry in after.values() for r in tensors_of(entry)}
        for tensor in old.keys() | new.keys():
            if tensor not in new:
                self.remove_tensor(tensor)
            elif old.get(tensor) != new[tensor]:
                self._roll_back_tensor(new[tensor], epoch)

    def _readable_entries(self) -> dict[str, Entry]:
        found = {}
        for name in self.state.names():
            with suppress(CorruptionError, CompatibilityError):
                entry = self.state.entry(name)
                if entry is not None:
                    found[name] = entry
        return found

    def _roll_back_tensor(self, record: TensorRecord, epoch: int) -> None:
        versions = list(versions_of(self._txn, self._label, record.id))
        for number, group in groupby(versions, key=lambda version: version[0]):
            chunk = list(group)
            if chunk[-1][1] <= epoch:
                continue
            then = [v for v in chunk if v[1] <= epoch]
            pointer = parse_pointer(*then[-1][2:], self._label) if then else NO_CHUNK
            if pointer.chunk:
                self.use(pointer.chunk)
            self.point(record, number, pointer, False)
            key = POINTER_KEY.pack(record.id, number, self.head.epoch)
            newest = newest_pointer(self._txn, key, self._label)
            self._drop_repeated(newest, pointer)

    def _drop_repeated(self, newest: tuple[bytes, bytes] | None, pointer: Pointer) -> None:
        """Delete the version that a rollback has just written if the one before says the same."""
        if newest is None or newest[0][-4:] != EPOCH.pack(self.head.epoch):
            return
        table = self._txn.tables.pointers
        earlier = newest[0][:-4] + EPOCH.pack(self.head.epoch - 1)
        found = newest_pointer(self._txn, earlier, self._label)
        if found is not None and parse_pointer(*found, self._label) == pointer:
            self._txn.handle.delete(newest[0], db=table)
            self.release(pointer.chunk)

    def sweep_all(self) -> None:
        """Delete what no state shows any more, after a tag was removed."""
        self._sweep_entries()
        for tensor in self._stored_tensors():
            self.sweep(tensor, self._epochs_of(tensor, and_newest=True))

    def _stored_tensors(self) -> list[int]:
        """The numbers of all tensors that have pointers."""
        cursor = self._txn.handle.cursor(db=self._txn.tables.pointers)
        found, at = [], 0
        while at < 1 << 64 and cursor.set_range(POINTER_KEY.pack(at, 0, 0)):
            tensor = pointer_place(bytes(cursor.key()), self._label)[0]
            found.append(tensor)
            at = tensor + 1
        return found

    def _sweep_entries(self) -> None:
        """Delete the versions of entries that no state shows."""
        states = [*self._tags, self.head.epoch]
        cursor = self._txn.handle.cursor(db=self._txn.tables.names)
        listed = [(bytes(key), not is_removed(bytes(value))) for key, value in cursor]
        for _, group in groupby(listed, key=lambda record: record[0][:-4]):
            versions = {EPOCH.unpack(key[-4:])[0]: (key, is_there) for key, is_there in group}
            shown = {max((e for e in versions if e <= at), default=0) for at in states}
            kept = [e for e in sorted(versions) if e in shown]
            if kept and not versions[kept[0]][1]:
                shown.discard(kept[0])  # a name that is absent needs no record at the start
            for epoch, (key, _) in versions.items():
                if epoch not in shown:
                    self._txn.handle.delete(key, db=self._txn.tables.names)
