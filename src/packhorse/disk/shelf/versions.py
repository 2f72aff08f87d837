"""The records of one committed state: of each record, the newest version that is not newer than
the epoch of the state (records.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from packhorse import _core
from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.records import (
    CHUNK_KEY,
    EPOCH,
    MAX_EPOCH,
    NO_CHUNK,
    POINTER_KEY,
    ChunkRecord,
    Entry,
    Head,
    Pointer,
    TensorRecord,
    entry_key,
    has_key,
    identity_of,
    is_lost_entry,
    is_lost_pointer,
    is_pointer,
    is_removed,
    name_of_tag,
    parse_chunk,
    parse_entry,
    parse_pointer,
    parse_tag,
    pointer_place,
)
from packhorse.errors import CorruptionError

__all__ = [
    "Known",
    "State",
    "Tag",
    "delete_tag",
    "newest_entry",
    "newest_pointer",
    "versions_of",
]

_LAST_EPOCH = EPOCH.pack((1 << 32) - 1)
_MAX_TENSORS = 256
_FEW = 2  # pointers that are found one by one
_MANY = 4  # chunks that are asked for before the first is read
_MAX_POINTERS = 1 << 18
_MAX_FOLLOWED = 1 << 12  # entries, or pointers of a tensor, that are copied at a commit


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
            self._forget_pointers(record.grid.n_chunks)
            found = self._pointers[key] = {}
        return found

    def follow(
        self,
        before: Head,
        after: Head,
        entries: dict[str, Entry | None],
        pointers: dict[TensorRecord, tuple[TensorRecord, dict[int, Pointer]]],
    ) -> None:
        """Take over what a commit of this process has left as it was, and what it has changed.

        Args:
            before: the head record before the commit.
            after: the head record that it has written.
            entries: the entries that it has written.
            pointers: by the record of a tensor before the commit, its record afterwards and
                the pointers that have changed.
        """
        state, kept = self._entries
        if state == (before.n_commits, before.epoch) and len(kept) <= _MAX_FOLLOWED:
            entries = {**kept, **entries}
        self._entries = (after.n_commits, after.epoch), entries
        for old, (new, changed) in pointers.items():
            found = self._pointers.pop((old.id, old.serial), None)
            if found is not None and len(found) <= _MAX_FOLLOWED:
                self.pointers(new).update({**found, **changed})

    def _forget_pointers(self, n_chunks: int) -> None:
        """Make room for a tensor of so many chunks; every commit makes new ones of those that it
        changes. Short ones cannot become too many, so they are not counted."""
        kept, is_long = self._pointers, n_chunks > _MAX_POINTERS // _MAX_TENSORS
        while len(kept) > _MAX_TENSORS or (
            is_long and sum(map(len, list(kept.values()))) > _MAX_POINTERS
        ):
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
        """The entry of a name; None if there is none.

        Raises:
            CorruptionError, CompatibilityError: it is damaged, or a later release wrote it.
        """
        entries = self._known.entries(self.head, self.epoch)
        if name in entries:
            return entries[name]
        found = self._newest_entry(name)
        entry = parse_entry(*found, self._about(name)) if found else None
        entries[name] = entry
        return entry

    def has(self, name: str) -> bool:
        """Whether there is an entry of a name, which may be damaged."""
        try:
            found = self._newest_entry(name)
        except CorruptionError:
            return True
        return found is not None and not is_removed(found[1])

    def _newest_entry(self, name: str) -> tuple[bytes, bytes] | None:
        return newest_entry(self._txn, entry_key(name, self.epoch), self._about(name))

    def _about(self, name: str) -> str:
        return f"{self._label}: {name!r}"

    def names(self, prefix: str = "") -> list[str]:
        """All names that begin so, in order. Their entries may be damaged."""
        start = prefix.encode()
        cursor = self._txn.handle.cursor(db=self._txn.tables.names)
        newest: dict[str, tuple[int, bool]] = {}
        found = cursor.set_range(start)
        if start and (cursor.prev() if found else cursor.last()):
            key, data = bytes(cursor.key()), bytes(cursor.value())
            is_right = key < start and has_key(key, data)
            found = cursor.next() if is_right else cursor.first()
        else:
            found = cursor.first()  # nothing is before the place, where the cursor was lost
        while found:
            key, data = bytes(cursor.key()), bytes(cursor.value())
            if start and key > start and not key.startswith(start) and has_key(key, data):
                break
            name, epoch = identity_of(key, data)
            if name.startswith(prefix) and newest.get(name, (0, False))[0] <= epoch <= self.epoch:
                newest[name] = epoch, not is_removed(data)
            found = cursor.next()
        return sorted(name for name, (_, is_there) in newest.items() if is_there)

    def entries(self, prefix: str = "") -> Iterator[tuple[str, Entry]]:
        """All names that begin so, with their entries, in order.

        Raises:
            CorruptionError, CompatibilityError: an entry is damaged, or a later release wrote it.
        """
        for name in self.names(prefix):
            entry = self.entry(name)
            if entry is not None:
                yield name, entry

    def pointers(self, record: TensorRecord, numbers: list[int], label: str) -> list[Pointer]:
        """Where chunks of a tensor are.

        Args:
            record: the tensor.
            numbers: of chunks.
            label: the tensor, for messages.

        Raises:
            CorruptionError: the pointer of one of them is damaged.
        """
        known = self._known.pointers(record)
        missing = [number for number in numbers if number not in known]
        if missing:
            known.update(self._read_pointers(record, missing, label))
        return [known[number] for number in numbers]

    def _read_pointers(
        self, record: TensorRecord, numbers: list[int], label: str
    ) -> dict[int, Pointer]:
        """Pointers that are near each other are read in one go. Those that are missing there, or
        come behind a damaged one, are looked for again, each for itself."""
        first, last = min(numbers), max(numbers)
        found: dict[int, Pointer] = {}
        if last - first < 4 * len(numbers) and len(numbers) > _FEW:
            wanted = set(numbers)
            with suppress(CorruptionError):
                for number, key, data in self._versions(record.id, first, last + 1, label):
                    if number in wanted:
                        found[number] = parse_pointer(key, data, label)
        for number in numbers:
            if number not in found:
                key = POINTER_KEY.pack(record.id, number, self.epoch)
                version = newest_pointer(self._txn, key, label)
                found[number] = parse_pointer(*version, label) if version else NO_CHUNK
        return found

    def _versions(
        self, tensor: int, first: int, stop: int, label: str
    ) -> Iterator[tuple[int, bytes, bytes]]:
        """The versions of pointers that this state shows: numbers of chunks, keys and values."""
        last: tuple[int, bytes, bytes] | None = None
        for number, epoch, key, data in versions_of(self._txn, label, tensor, first, stop):
            if last is not None and last[0] != number:
                yield last
                last = None
            if epoch <= self.epoch:
                last = number, key, data
            elif is_lost_pointer(POINTER_KEY.pack(tensor, number, self.epoch), key, data):
                raise CorruptionError(f"{label}: the key of a pointer is damaged")
        if last is not None:
            yield last

    def all_pointers(
        self, tensor: int, first: int, stop: int, label: str
    ) -> Iterator[tuple[int, Pointer]]:
        """The pointers of a run of chunks, in order, without those that have none.

        Raises:
            CorruptionError: one of them is damaged.
        """
        for number, key, data in self._versions(tensor, first, stop, label):
            yield number, parse_pointer(key, data, label)

    def chunks(self, numbers: Sequence[int]) -> list[ChunkRecord]:
        """Stored chunks, whose frames are views. If there are many, the system is asked to read all
        of them from the disk before any is looked at.

        Raises:
            CorruptionError: one is missing or damaged; the caller says which tensor needs it.
        """
        get, table = self._txn.handle.get, self._txn.tables.chunks
        values = [get(CHUNK_KEY.pack(number), db=table) for number in numbers]
        if len(values) >= _MANY:
            _core.will_need([value for value in values if value is not None])
        return [self._parse_chunk(n, value) for n, value in zip(numbers, values, strict=True)]

    def chunk(self, number: int) -> ChunkRecord:
        """A stored chunk, whose frame is a view and was not read.

        Raises:
            CorruptionError: as for `chunks`.
        """
        value = self._txn.handle.get(CHUNK_KEY.pack(number), db=self._txn.tables.chunks)
        return self._parse_chunk(number, value)

    def _parse_chunk(self, number: int, value: Any) -> ChunkRecord:
        if value is None:
            value = self._search_chunk(CHUNK_KEY.pack(number))
        return parse_chunk(number, value)

    def _search_chunk(self, key: bytes) -> Any:
        """A chunk that was not found, in case that the damaged key of another one is the cause."""
        for at, value in self._txn.handle.cursor(db=self._txn.tables.chunks):
            if at == key:
                return value
        raise CorruptionError("it is missing")

    def stored(self) -> Iterator[tuple[int, Any]]:
        """All stored chunks: their numbers, and views of their records."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.chunks):
            yield self._number(key), value

    def shares(self) -> Iterator[tuple[int, bytes]]:
        """The chunks with more than one use: their numbers, and the records of their uses."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.shares):
            yield self._number(key), bytes(value)

    def _number(self, key: Any) -> int:
        if len(key) != CHUNK_KEY.size:
            raise CorruptionError(f"{self._label}: a table of chunks is damaged")
        return int(CHUNK_KEY.unpack(key)[0])

    def all_versions(self) -> Iterator[tuple[bytes, bytes]]:
        """All versions of all pointers."""
        for key, value in self._txn.handle.cursor(db=self._txn.tables.pointers):
            yield bytes(key), bytes(value)

    def tags(self) -> list[Tag]:
        """All tags, the oldest first.

        Raises:
            CorruptionError: one is damaged.
        """
        found = [self._tag(*record) for record in self._tag_records()]
        return sorted(found, key=lambda tag: tag.epoch)

    def tag_names(self) -> list[str]:
        """The names of all tags, the oldest first; after them, those of damaged ones."""
        names: list[tuple[int, str]] = []
        for record in self._tag_records():
            epoch = MAX_EPOCH
            with suppress(CorruptionError):
                epoch = self._tag(*record).epoch
            names.append((epoch, name_of_tag(*record)))
        return [name for _, name in sorted(names)]

    def _tag_records(self) -> list[tuple[bytes, bytes]]:
        cursor = self._txn.handle.cursor(db=self._txn.tables.tags)
        return [(bytes(key), bytes(value)) for key, value in cursor]

    def _tag(self, key: bytes, value: bytes) -> Tag:
        name = name_of_tag(key, value)
        label = f"{self._label}: tag {name!r}"
        return Tag(name, *parse_tag(key.decode(errors="backslashreplace"), value, label))

    def tag(self, name: str) -> Tag:
        """A tag.

        Raises:
            KeyError: there is none of this name.
            CorruptionError: it is damaged.
        """
        for record in self._tag_records():
            if name_of_tag(*record) == name:
                return self._tag(*record)
        raise KeyError(f"{self._label}: there is no tag {name!r}")


def delete_tag(txn: Txn, name: str) -> bool:
    """Delete the record of a tag, which may be damaged. Returns whether there was one."""
    cursor = txn.handle.cursor(db=txn.tables.tags)
    keys = [bytes(key) for key, value in cursor if name_of_tag(bytes(key), bytes(value)) == name]
    return any([txn.handle.delete(key, db=txn.tables.tags) for key in keys])


class _Kind(NamedTuple):
    """Records of a table that have versions.

    Attributes:
        table: the table, of the tables of a transaction.
        has_key: takes a key and a record; whether the key is not damaged.
        is_lost: takes the key of a wanted record, and a key and a record; whether these are
            the wanted record under a damaged key.
    """

    table: Callable[[Txn], Any]
    has_key: Callable[[bytes, bytes], bool]
    is_lost: Callable[[bytes, bytes, bytes], bool]


_ENTRIES = _Kind(lambda txn: txn.tables.names, has_key, is_lost_entry)
_POINTERS = _Kind(lambda txn: txn.tables.pointers, is_pointer, is_lost_pointer)


def newest_entry(txn: Txn, key: bytes, label: str) -> tuple[bytes, bytes] | None:
    """The newest version of an entry that is not newer than an epoch.

    Args:
        txn: the transaction.
        key: the key of the entry, with the epoch.
        label: the tensor or state, for messages.

    Returns:
        The key and the value of the version; None if there is none.

    Raises:
        CorruptionError: its key is damaged.
    """
    return _newest_version(txn, key, _ENTRIES, label)


def newest_pointer(txn: Txn, key: bytes, label: str) -> tuple[bytes, bytes] | None:
    """The newest version of a pointer that is not newer than an epoch; as `newest_entry`."""
    return _newest_version(txn, key, _POINTERS, label)


def _newest_version(txn: Txn, key: bytes, kind: _Kind, label: str) -> tuple[bytes, bytes] | None:
    """Find a version. On both sides of its place there must be records in the right order and with
    good keys; otherwise the search may have gone astray, and all records are looked at."""
    cursor = txn.handle.cursor(db=kind.table(txn))
    if cursor.set_range(key):
        after, data = bytes(cursor.key()), bytes(cursor.value())
        if after == key:
            return key, data
        if after < key or not kind.has_key(after, data):
            return _search_all(cursor, key, kind, label)
        found = cursor.prev()
    else:
        found = cursor.last()
    if not found:
        return None
    before, data = bytes(cursor.key()), bytes(cursor.value())
    if before < key and before[:-4] == key[:-4]:
        return before, data
    if before >= key or not kind.has_key(before, data):
        return _search_all(cursor, key, kind, label)
    return None


def _search_all(cursor: Any, key: bytes, kind: _Kind, label: str) -> tuple[bytes, bytes] | None:
    newest: tuple[bytes, bytes] | None = None
    cursor.first()
    for at, value in cursor:
        other, data = bytes(at), bytes(value)
        if kind.is_lost(key, other, data):
            raise CorruptionError(f"{label}: the key of its record is damaged")
        if other[:-4] == key[:-4] and (newest[0] if newest else b"") <= other <= key:
            newest = other, data
    return newest


def versions_of(
    txn: Txn, label: str, tensor: int, first: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int, bytes, bytes]]:
    """All versions of the pointers of a tensor.

    Args:
        txn: the transaction.
        label: the tensor, for messages.
        tensor: the number of the tensor.
        first: the first chunk.
        stop: one past the last chunk; None for all.

    Yields:
        The number of a chunk, an epoch, the key and the value; in the order of chunks, and then of
        epochs.

    Raises:
        CorruptionError: the key of one of them is damaged, or the table is.
    """
    cursor = txn.handle.cursor(db=txn.tables.pointers)
    at = POINTER_KEY.pack(tensor, first, 0)
    found = cursor.set_range(at)
    if cursor.prev() if found else cursor.last():
        key, data = bytes(cursor.key()), bytes(cursor.value())
        if key >= at or not is_pointer(key, data):  # the search may have gone astray
            raise CorruptionError(f"{label}: the table of pointers is damaged")
        found = cursor.next()
    elif found:
        found = cursor.first()
    while found:
        key, data = bytes(cursor.key()), bytes(cursor.value())
        owner, number, epoch = pointer_place(key, label)
        is_inside = owner == tensor and (stop is None or number < stop)
        if is_pointer(key, data):
            if key < at:
                raise CorruptionError(f"{label}: the table of pointers is damaged")
            if not is_inside:
                return
        elif key[:-4] != at[:-4] and is_lost_pointer(at[:-4] + _LAST_EPOCH, key, data):
            raise CorruptionError(f"{label}: the key of a pointer is damaged")
        if is_inside and key >= at:
            yield number, epoch, key, data
            at = key
        found = cursor.next()
