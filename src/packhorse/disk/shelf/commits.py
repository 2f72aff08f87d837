"""Writing the records of a commit: pointers, entries, chunks and their uses, in one transaction.

A stored chunk is used by the pointer of one chunk of a tensor, and by the chunks that are deltas
against it. A rollback adds pointers. When nothing uses a chunk any more, it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.records import (
    CHUNK_KEY,
    COUNT,
    EPOCH,
    NO_CHUNK,
    POINTER_KEY,
    ChunkRecord,
    Entry,
    Head,
    Pointer,
    TensorRecord,
    base_of,
    chunk_value,
    entry_key,
    entry_value,
    parse_pointer,
    pointer_value,
    tensors_of,
)
from packhorse.disk.shelf.versions import Known, State, newest_version, versions_of

__all__ = ["Commit"]


class Commit:
    """One commit, while its transaction is open."""

    def __init__(self, txn: Txn, head: Head, label: str) -> None:
        """Args:
        txn: a write transaction.
        head: the head record before the commit.
        label: the shelf, for messages.
        """
        self._txn, self._label = txn, label
        self.head = head
        self.state = State(txn, head, head.epoch, Known(), label)
        self._tags = [tag.epoch for tag in self.state.tags()]
        self._newest_tag = max(self._tags, default=0)
        self._shown: dict[int, set[int]] | None = None

    # Chunks.

    def put_chunk(self, number: int, record: ChunkRecord, n_uses: int) -> None:
        """Store a chunk.

        Args:
            number: of the chunk, which nothing has yet.
            record: the chunk.
            n_uses: how many pointers and chunks use it.
        """
        key = CHUNK_KEY.pack(number)
        self._txn.handle.put(key, chunk_value(record), db=self._txn.tables.chunks)
        self.set_uses(number, n_uses)

    def set_uses(self, number: int, n_uses: int) -> None:
        """Note how many pointers and chunks use a chunk, which is at least one."""
        key = CHUNK_KEY.pack(number)
        if n_uses > 1:
            self._txn.handle.put(key, COUNT.pack(n_uses), db=self._txn.tables.shares)
        else:
            self._txn.handle.delete(key, db=self._txn.tables.shares)

    def use(self, number: int, n: int = 1) -> None:
        """Note more uses of a stored chunk."""
        self.set_uses(number, self._uses(number) + n)

    def _uses(self, number: int) -> int:
        value = self._txn.handle.get(CHUNK_KEY.pack(number), db=self._txn.tables.shares)
        return 1 if value is None else int(COUNT.unpack(value)[0])

    def release(self, number: int) -> None:
        """Note that one use of a chunk has ended; the last one deletes it."""
        while number:
            uses = self._uses(number)
            if uses > 1:
                self.set_uses(number, uses - 1)
                return
            key = CHUNK_KEY.pack(number)
            value = self._txn.handle.get(key, db=self._txn.tables.chunks)
            base = base_of(value) if value is not None else 0
            self._txn.handle.delete(key, db=self._txn.tables.chunks)
            number = base

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
        found = None if is_new else newest_version(self._txn, table, key)
        if found is not None:
            old = parse_pointer(found[0], found[1], self._label)
            grown -= old.nbytes
            has_older = True
            if EPOCH.unpack(found[0][-4:])[0] > self._newest_tag:
                self._txn.handle.delete(found[0], db=table)
                self.release(old.chunk)
                has_older = newest_version(self._txn, table, key) is not None
        if pointer.chunk or has_older:
            self._txn.handle.put(key, pointer_value(key, pointer), db=table)
        return grown

    def sweep(self, tensor: int, epochs: Iterable[int]) -> None:
        """Delete the versions of a tensor's pointers that no state shows.

        Args:
            tensor: the number of the tensor.
            epochs: of the states that show the tensor.
        """
        states = sorted(epochs)
        versions = list(versions_of(self._txn, tensor))
        for _, group in groupby(versions, key=lambda version: version[0]):
            chunk = list(group)
            shown = {max((v[1] for v in chunk if v[1] <= epoch), default=0) for epoch in states}
            shown.discard(0)
            for _, epoch, key, value in chunk:
                if epoch in shown:
                    continue
                pointer = parse_pointer(key, value, self._label)
                self._txn.handle.delete(key, db=self._txn.tables.pointers)
                self.release(pointer.chunk)

    def _tensors_by_tag(self) -> dict[int, set[int]]:
        """The tensors that each tag shows, by the epoch of the tag."""
        if self._shown is None:
            self._shown = {}
            for epoch in self._tags:
                state = State(self._txn, self.head, epoch, Known(), self._label)
                entries = (entry for _, entry in state.entries())
                self._shown[epoch] = {r.id for entry in entries for r in tensors_of(entry)}
        return self._shown

    def remove_tensor(self, tensor: int) -> None:
        """Delete what no tag shows of a tensor that the newest state does not have any more."""
        shown = self._tensors_by_tag() if self._tags else {}
        self.sweep(tensor, [epoch for epoch, tensors in shown.items() if tensor in tensors])

    # Entries.

    def enter(self, name: str, entry: Entry | None) -> None:
        """Set the entry of a name, or remove it."""
        table = self._txn.tables.names
        key = entry_key(name, self.head.epoch)
        found = newest_version(self._txn, table, key)
        if found is not None and EPOCH.unpack(found[0][-4:])[0] > self._newest_tag:
            self._txn.handle.delete(found[0], db=table)
            found = newest_version(self._txn, table, key)
        if entry is not None:
            self._txn.handle.put(key, entry_value(entry), db=table)
        elif found is not None and found[1]:
            self._txn.handle.put(key, b"", db=table)

    # Tags.

    def roll_back(self, epoch: int) -> None:
        """Make the newest state equal to that of a tag.

        Args:
            epoch: of the tag.
        """
        then = State(self._txn, self.head, epoch, Known(), self._label)
        before, after = dict(self.state.entries()), dict(then.entries())
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self.enter(name, after.get(name))
        old = {r.id: r for entry in before.values() for r in tensors_of(entry)}
        new = {r.id: r for entry in after.values() for r in tensors_of(entry)}
        for tensor in old.keys() | new.keys():
            if tensor not in new:
                self.remove_tensor(tensor)
            elif old.get(tensor) != new[tensor]:
                self._roll_back_tensor(new[tensor], epoch)

    def _roll_back_tensor(self, record: TensorRecord, epoch: int) -> None:
        versions = list(versions_of(self._txn, record.id))
        for number, group in groupby(versions, key=lambda version: version[0]):
            chunk = list(group)
            if chunk[-1][1] <= epoch:
                continue
            then = [v for v in chunk if v[1] <= epoch]
            pointer = parse_pointer(*then[-1][2:], self._label) if then else NO_CHUNK
            if pointer.chunk:
                self.use(pointer.chunk)
            self.point(record, number, pointer, False)
            newest = newest_version(
                self._txn, self._txn.tables.pointers,
                POINTER_KEY.pack(record.id, number, self.head.epoch),
            )  # fmt: skip
            self._drop_repeated(newest, pointer)

    def _drop_repeated(self, newest: tuple[bytes, bytes] | None, pointer: Pointer) -> None:
        """Delete the version that a rollback has just written if the one before says the same."""
        if newest is None or newest[0][-4:] != EPOCH.pack(self.head.epoch):
            return
        table = self._txn.tables.pointers
        earlier = POINTER_KEY.pack(*POINTER_KEY.unpack(newest[0])[:2], self.head.epoch - 1)
        found = newest_version(self._txn, table, earlier)
        if found is not None and parse_pointer(*found, self._label) == pointer:
            self._txn.handle.delete(newest[0], db=table)
            self.release(pointer.chunk)

    def forget_tag(self, name: str) -> None:
        """Remove a tag, and what only it shows."""
        self._txn.handle.delete(name.encode(), db=self._txn.tables.tags)
        self._tags = [tag.epoch for tag in self.state.tags()]
        self._newest_tag = max(self._tags, default=0)
        self._shown = None
        self._sweep_entries()
        shown = {**self._tensors_by_tag()}
        live = {r.id for _, entry in self.state.entries() for r in tensors_of(entry)}
        shown[self.head.epoch] = live
        for tensor in self._stored_tensors():
            self.sweep(tensor, [epoch for epoch, tensors in shown.items() if tensor in tensors])

    def _stored_tensors(self) -> list[int]:
        """The numbers of all tensors that have pointers."""
        cursor = self._txn.handle.cursor(db=self._txn.tables.pointers)
        found, at = [], 0
        while cursor.set_range(POINTER_KEY.pack(at, 0, 0)):
            tensor = POINTER_KEY.unpack(cursor.key())[0]
            found.append(tensor)
            at = tensor + 1
        return found

    def _sweep_entries(self) -> None:
        """Delete the versions of entries that no state shows."""
        states = [*self._tags, self.head.epoch]
        cursor = self._txn.handle.cursor(db=self._txn.tables.names)
        listed = [(bytes(key), bool(len(value))) for key, value in cursor]
        for _, group in groupby(listed, key=lambda record: record[0][:-4]):
            versions = {EPOCH.unpack(key[-4:])[0]: (key, is_there) for key, is_there in group}
            shown = {max((e for e in versions if e <= at), default=0) for at in states}
            kept = [e for e in sorted(versions) if e in shown]
            if kept and not versions[kept[0]][1]:
                shown.discard(kept[0])  # a name that is absent needs no record at the start
            for epoch, (key, _) in versions.items():
                if epoch not in shown:
                    self._txn.handle.delete(key, db=self._txn.tables.names)
