"""The records of one committed state: of each record, the newest version that is not newer than
the epoch of the state (records.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from packhorse import _core
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
    entry_key,
    name_of,
    parse_chunk,
    parse_entry,
    parse_pointer,
    parse_tag,
)
from packhorse.errors import CorruptionError

__all__ = ["Known", "State", "Tag", "newest_version", "versions_of"]

_MAX_TENSORS = 256
_MANY = 4  # chunks that are asked for before the first is read
_MAX_POINTERS = 1 << 18


class Tag(NamedTuple):
    """A tag.

    Attributes:
        name: of the tag.
        epoch: whose last state it is.
        time: when it was made, in UTC.
        commit: the number of the commit.
    """

    name: str
    epoch: int
    time: str
    commit: int


class Known:
    """What was read of earlier states, and is still true.

    A version of a tensor has a number of its own, its serial, so what it points to never changes.
    Everything here may be forgotten at any time.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self._entries: tuple[tuple[int, int], dict[str, Entry | None]] = (0, 0), {}
        self._pointers: OrderedDict[tuple[int, int], dict[int, Pointer]] = OrderedDict()

    def entries(self, head: Head, epoch: int) -> dict[str, Entry | None]:
        """The entries of a state that were read already, to look up and to add to."""
        state, kept = (head.n_commits, epoch), self._entries
        if state != kept[0]:
            kept = self._entries = state, {}
        return kept[1]

    def pointers(self, record: TensorRecord) -> dict[int, Pointer]:
        """The pointers of a tensor that were read already, to look up and to add to."""
        key = record.id, record.serial
        found = self._pointers.get(key)
        if found is None or len(found) > _MAX_POINTERS:
            self._forget_pointers()
            found = self._pointers[key] = {}
        return found

    def _forget_pointers(self) -> None:
        """Make room for a tensor; every commit makes new ones of those that it changes."""
        kept = self._pointers
        while len(kept) > _MAX_TENSORS or sum(map(len, list(kept.values()))) > _MAX_POINTERS:
            with suppress(KeyError):  # another thread was faster
                kept.popitem(last=False)


class State:
    """One committed state, while a transaction reads it."""

    __slots__ = ("_known", "_label", "_txn", "epoch", "head")

    def __init__(self, txn: Txn, head: Head, epoch: int, known: Known, label: str) -> None:
        """Args:
        txn: the transaction.
        head: its head record.
        epoch: whose last state it is.
        known: what was read before.
        label: the shelf, for messages.
        """
        self._txn, self.head, self.epoch = txn, head, epoch
        self._known, self._label = known, label

    def at(self, epoch: int) -> State:
        """Another state, of the same transaction."""
        return State(self._txn, self.head, epoch, self._known, self._label)

    def entry(self, name: str) -> Entry | None:
        """The entry of a name; None if there is none."""
        entries = self._known.entries(self.head, self.epoch)
        if name in entries:
            return entries[name]
        found = newest_version(self._txn, self._txn.tables.names, entry_key(name, self.epoch))
        entry = self._parse(*found) if found else None
        entries[name] = entry
        return entry

    def _parse(self, key: bytes, value: bytes) -> Entry | None:
        return parse_entry(value, f"{self._label}: {name_of(key)!r}") if value else None

    def entries(self, prefix: str = "") -> Iterator[tuple[str, Entry]]:
        """All names that begin so, with their entries, in the order of their bytes."""
        start = prefix.encode()
        cursor = self._txn.handle.cursor(db=self._txn.tables.names)
        kept: tuple[bytes, bytes] | None = None
        found = cursor.set_range(start)
        while found:
            key = bytes(cursor.key())
            if not key.startswith(start):
                break
            if kept is not None and kept[0][:-4] != key[:-4]:
                yield from self._listed(kept)
                kept = None
            if EPOCH.unpack(key[-4:])[0] <= self.epoch:
                kept = key, bytes(cursor.value())
            found = cursor.next()
        if kept is not None:
            yield from self._listed(kept)

    def _listed(self, record: tuple[bytes, bytes]) -> Iterator[tuple[str, Entry]]:
        entry = self._parse(*record)
        if entry is not None:
            yield name_of(record[0]), entry

    def pointers(self, record: TensorRecord, numbers: list[int]) -> list[Pointer]:
        """Where chunks of a tensor are.

        Args:
            record: the tensor.
            numbers: of chunks.
        """
        known = self._known.pointers(record)
        missing = [number for number in numbers if number not in known]
        if missing:
            known.update(self._read_pointers(record, missing))
        return [known[number] for number in numbers]

    def _read_pointers(self, record: TensorRecord, numbers: list[int]) -> dict[int, Pointer]:
        first, last = min(numbers), max(numbers)
        if last - first < 4 * len(numbers):
            found = dict.fromkeys(range(first, last + 1), NO_CHUNK)
            found.update(self.all_pointers(record.id, first, last + 1))
            return found
        table, found = self._txn.tables.pointers, {}
        for number in numbers:
            key = POINTER_KEY.pack(record.id, number, self.epoch)
            version = newest_version(self._txn, table, key)
            found[number] = parse_pointer(*version, self._label) if version else NO_CHUNK
        return found

    def all_pointers(self, tensor: int, first: int, stop: int) -> Iterator[tuple[int, Pointer]]:
        """The pointers of a run of chunks, in order, without those that have none."""
        last: tuple[int, bytes, bytes] | None = None
        for number, epoch, key, value in versions_of(self._txn, tensor, first, stop):
            if last is not None and last[0] != number:
                yield last[0], parse_pointer(last[1], last[2], self._label)
                last = None
            if epoch <= self.epoch:
                last = number, key, value
        if last is not None:
            yield last[0], parse_pointer(last[1], last[2], self._label)

    def chunks(self, numbers: Sequence[int]) -> list[ChunkRecord]:
        """Stored chunks, whose frames are views. If there are many, the system is asked to read all
        of them from the disk before any is looked at.

        Raises:
            CorruptionError: one is missing or damaged.
        """
        get, table = self._txn.handle.get, self._txn.tables.chunks
        values = [get(CHUNK_KEY.pack(number), db=table) for number in numbers]
        if len(values) >= _MANY:
            _core.will_need([value for value in values if value is not None])
        return [self._parse_chunk(n, value) for n, value in zip(numbers, values, strict=True)]

    def _parse_chunk(self, number: int, value: Any) -> ChunkRecord:
        label = f"{self._label}: the stored chunk {number}"
        if value is None:
            raise CorruptionError(f"{label} is missing")
        return parse_chunk(value, label)

    def stored(self) -> Iterator[tuple[int, Any]]:
        """All stored chunks: their numbers, and views of their records."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.chunks):
            yield CHUNK_KEY.unpack(key)[0], value

    def shares(self) -> Iterator[tuple[int, bytes]]:
        """The chunks with more than one use: their numbers, and the records of their uses."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.shares):
            yield CHUNK_KEY.unpack(key)[0], bytes(value)

    def all_versions(self) -> Iterator[tuple[bytes, bytes]]:
        """All versions of all pointers."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.pointers):
            yield bytes(key), bytes(value)

    def tags(self) -> list[Tag]:
        """All tags, the oldest first."""
        cursor = self._txn.handle.cursor(db=self._txn.tables.tags)
        found = []
        for key, value in cursor:
            name = bytes(key).decode()
            found.append(Tag(name, *parse_tag(bytes(value), f"{self._label}: tag {name!r}")))
        return sorted(found, key=lambda tag: tag.epoch)

    def tag(self, name: str) -> Tag | None:
        """A tag; None if there is none of this name."""
        value = self._txn.handle.get(name.encode(), db=self._txn.tables.tags)
        if value is None:
            return None
        return Tag(name, *parse_tag(bytes(value), f"{self._label}: tag {name!r}"))


def newest_version(txn: Txn, table: Any, key: bytes) -> tuple[bytes, bytes] | None:
    """The newest version of a record that is not newer than an epoch.

    Args:
        txn: the transaction.
        table: where the record is.
        key: the record's key, which ends in the epoch.

    Returns:
        The key and the value of the version; None if there is none.
    """
    cursor = txn.handle.cursor(db=table)
    if cursor.set_range(key):
        if cursor.key() == key:
            return key, bytes(cursor.value())
        found = cursor.prev()
    else:
        found = cursor.last()
    if not found:
        return None
    at = bytes(cursor.key())
    if len(at) != len(key) or at[:-4] != key[:-4]:
        return None
    return at, bytes(cursor.value())


def versions_of(
    txn: Txn, tensor: int, first: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int, bytes, bytes]]:
    """All versions of the pointers of a tensor.

    Args:
        txn: the transaction.
        tensor: the number of the tensor.
        first: the first chunk.
        stop: one past the last chunk; None for all.

    Yields:
        The number of a chunk, an epoch, the key and the value; in the order of chunks, and then of
        epochs.
    """
    cursor = txn.handle.cursor(db=txn.tables.pointers)
    if not cursor.set_range(POINTER_KEY.pack(tensor, first, 0)):
        return
    unpack = POINTER_KEY.unpack
    for view, value in cursor.iternext():
        key = bytes(view)
        owner, number, epoch = unpack(key)
        if owner != tensor or (stop is not None and number >= stop):
            return
        yield number, epoch, key, bytes(value)
