"""What a transaction has changed, in memory until it is committed.

Chunks that are written in part are kept decoded. When they take too much memory, and at the end,
they are packed, in threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from packhorse.disk.shelf.arrays import Array, clear, dtype_of
from packhorse.disk.shelf.cache import Stored, stored
from packhorse.disk.shelf.commits import Commit
from packhorse.disk.shelf.committed import Committed, Settings, StateChunks
from packhorse.disk.shelf.engine import Txn
from packhorse.disk.shelf.new_chunks import NewChunks
from packhorse.disk.shelf.packing import SHORT_NBYTES, Content, Packed, pack_chunk
from packhorse.disk.shelf.patches import begin_patches, most_rows
from packhorse.disk.shelf.records import (
    HEAD_KEY,
    Entry,
    Head,
    Pointer,
    StateRecord,
    TensorRecord,
    tensors_of,
)
from packhorse.disk.shelf.rows import Change, Target, changes_of
from packhorse.disk.shelf.slots import Slot, content_of, nbytes_of
from packhorse.disk.shelf.store import Folder
from packhorse.disk.shelf.versions import State
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import DTYPE_BY_NAME, Level, Split
from packhorse.threads import map_tensors

__all__ = ["Changes"]

_MAX_DIRTY_NBYTES = 1 << 26
_AT_ONCE = 256  # chunks that are changed or packed before the packed ones may be written


# A chunk to pack: the number of its tensor, its own, and what it has become.
_Job: TypeAlias = tuple[int, int, Slot]
# Chunks that others are coded against, by the tensor and the chunk that need them: their numbers as
# stored chunks, and they.
_Bases: TypeAlias = dict[tuple[int, int], tuple[int, Stored]]
# What a commit has written: the head record, the entries, and the tensors with their new pointers.
_Written: TypeAlias = tuple[
    Head, dict[str, Entry | None], dict[TensorRecord, tuple[TensorRecord, dict[int, Pointer]]]
]


class Changes:
    """The changes of a transaction.

    Attributes:
        entries: the entries that were changed, by name; None for a name that was removed.
        threads: how many to use.
        cache_nbytes: the most bytes of decoded chunks that are kept.
        n_writes: how many changes there were.
    """

    def __init__(self, folder: Folder, settings: Settings) -> None:
        """Args:
        folder: of the shelf.
        settings: of the shelf.
        """
        self._folder, self._settings = folder, settings
        self.threads, self.cache_nbytes = settings.threads, settings.cache.max_nbytes
        self.entries: dict[str, Entry | None] = {}
        self._found: dict[str, Entry | None] = {}  # entries before the transaction
        self._slots: dict[int, dict[int, Slot]] = {}
        self._foreign: dict[tuple[int, int], Slot] = {}  # with memory of the caller
        self._records: dict[int, TensorRecord] = {}
        self._names: dict[int, str] = {}  # of tensors, for messages
        self._dirty_nbytes = 0
        self.n_writes = 0
        with folder.read_newest() as (_, head):
            self._head = head
        self._next_tensor = head.next_tensor
        self._new = NewChunks(folder, settings, head)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was changed."""
        return not self.entries and not any(self._slots.values())

    # Entries.

    def new_tensor_number(self) -> int:
        """A number for a new tensor."""
        self._next_tensor += 1
        return self._next_tensor - 1

    def entry(self, name: str) -> Entry | None:
        """The entry of a name; None if there is none."""
        if name in self.entries:
            return self.entries[name]
        if name not in self._found:
            with self._committed() as state:
                self._found[name] = self._named(name, state.entry(name))
        return self._found[name]

    def _named(self, name: str, entry: Entry | None) -> Entry | None:
        self._names.update({record.id: name for record in tensors_of(entry)})
        return entry

    def has(self, name: str) -> bool:
        """Whether there is an entry of a name, which may be damaged."""
        if name in self.entries:
            return self.entries[name] is not None
        with self._committed() as state:
            return state.has(name)

    def names(self, prefix: str) -> list[str]:
        """All names that begin so, in order."""
        with self._committed() as state:
            found = {name for name in state.names(prefix) if name not in self.entries}
        found |= {n for n, entry in self.entries.items() if entry and n.startswith(prefix)}
        return sorted(found)

    def put(self, name: str, entry: Entry | None) -> None:
        """Set the entry of a name, or remove it."""
        old = self._replaced(name)
        self.n_writes += 1
        kept = {record.id for record in tensors_of(entry)}
        self.entries[name] = self._named(name, entry)
        for record in tensors_of(old):
            if record.id not in kept:
                self._forget(record.id)
        for record in tensors_of(entry):
            self._records[record.id] = record
            self._names[record.id] = name

    def _replaced(self, name: str) -> Entry | None:
        """The entry that a name has had; None also for one that is damaged."""
        with suppress(CorruptionError, CompatibilityError):
            return self.entry(name)
        return None

    def rename(self, old: str, new: str) -> None:
        """Give an entry another name."""
        entry = self.entry(old)
        self.n_writes += 1
        self.entries[new], self.entries[old] = self._named(new, entry), None

    def _forget(self, tensor: int) -> None:
        """Drop the changed chunks of a tensor."""
        for slot in self._slots.pop(tensor, {}).values():
            self._empty(slot)
        self._records.pop(tensor, None)

    def _empty(self, slot: Slot) -> None:
        if slot.data is not None and slot.is_own:
            self._dirty_nbytes -= slot.data.nbytes
        if slot.patch:
            self._dirty_nbytes -= nbytes_of(slot)
        self._new.release(slot.chunk)
        slot.data, slot.chunk, slot.is_own = None, 0, True
        slot.patch, slot.base, slot.base_nbytes = None, 0, 0

    # Reading.

    def _committed(self) -> Committed:
        return Committed(self._folder, self._settings, newest=True)

    def load(self, record: TensorRecord, numbers: list[int]) -> list[Array | None]:
        """As `rows.Chunks.load`."""
        found = self.stored(record, numbers)
        return [None if chunk is None else chunk.data for chunk in found]

    def table(self, _: TensorRecord) -> None:
        """As `rows.Chunks.table`; none, because chunks change."""

    def stored(self, record: TensorRecord, numbers: list[int]) -> list[Stored | None]:
        """Chunks; the content hash is empty for one that is not packed. None for zeros."""
        slots = self._slots.get(record.id, {})
        found: list[Stored | None] = [None] * len(numbers)
        packed, patched, committed = [], [], []
        for i, number in enumerate(numbers):
            slot = slots.get(number)
            if slot is None:
                committed.append(i)
            elif slot.data is not None:
                found[i] = stored(slot.data, b"")
            elif slot.patch is not None:
                patched.append(i)
            elif slot.chunk:
                packed.append(i)
        if record.id >= self._head.next_tensor:
            committed = []
        if not (packed or patched or committed):
            return found
        with self._committed() as state:
            if committed:
                chunks = StateChunks(state, self._settings, self._label(record))
                some = chunks.stored(record, [numbers[i] for i in committed])
                for i, chunk in zip(committed, some, strict=True):
                    found[i] = chunk
            if packed:
                new = [slots[numbers[i]].chunk for i in packed]
                some = self._new.load(record, state, new, self._label(record))
                for i, chunk in zip(packed, some, strict=True):
                    found[i] = chunk
            for i in patched:
                found[i] = stored(self._patched(record, state, numbers[i]), b"")
        return found

    def _patched(self, record: TensorRecord, state: State, number: int) -> Array:
        """The elements of a chunk of which some rows were changed, in new memory."""
        slot = self._slots[record.id][number]
        assert slot.patch is not None
        width = record.grid.row_numel
        numel = max(record.grid.numel_of(number), (max(slot.patch) + 1) * width)
        data = np.zeros(numel, dtype_of(record.dtype))
        chunks = StateChunks(state, self._settings, self._label(record))
        (before,) = chunks.load(record, [number])
        if before is not None:
            n = min(before.size, data.size)
            data[:n] = before[:n]
        rows = data.reshape(-1, width)
        for place, row in slot.patch.items():
            rows[place] = row
        return data

    def _label(self, record: TensorRecord) -> str:
        name = self._names.get(record.id)
        return f"{self._folder.path}: {f'tensor {record.id}' if name is None else repr(name)}"

    def load_into(self, targets: Sequence[Target]) -> None:
        """As `rows.Chunks.load_into`."""
        rest = []
        for target in targets:
            record, number, out = target
            if number in self._slots.get(record.id, {}):
                (data,) = self.load(record, [number])
                n = 0 if data is None else min(data.size, out.size)
                if data is not None:
                    out[:n] = data[:n]
                clear(out[n:])
            elif record.id < self._head.next_tensor:
                rest.append(target)
            else:
                clear(out)
        if rest:
            with self._committed() as state:
                chunks = StateChunks(state, self._settings, self._label(rest[0].record))
                chunks.load_into(rest)

    # Writing.

    def _slots_of(self, record: TensorRecord) -> dict[int, Slot]:
        """The changed chunks of a tensor, to add to; they may have to be packed before the
        statement ends, so the tensor is noted."""
        self._records[record.id] = record
        return self._slots.setdefault(record.id, {})

    def change(self, record: TensorRecord, changes: Iterable[Change]) -> None:
        """Change chunks.

        Args:
            record: the tensor.
            changes: what is written to which chunk, each chunk once. Memory of the caller stays as
                it is until `settle`.
        """
        left = iter(changes)
        while some := list(islice(left, _AT_ONCE)):
            begun = self._begin_patches(record, some)
            for change in some:
                self._change(record, change, begun.get(change.number))

    def _begin_patches(self, record: TensorRecord, changes: list[Change]) -> dict[int, Slot]:
        """Patches of the chunks that may have one and have no changes yet, to add to."""
        most = most_rows(record) if record.id < self._head.next_tensor else 0
        slots = self._slots.get(record.id, {})
        n_rows = {
            change.number: len(change.values)
            for change in changes
            if change.has_rows
            and not change.is_whole
            and len(change.values) <= most
            and change.number not in slots
        }
        if not n_rows:
            return {}
        with self._committed() as state:
            return begin_patches(state, self._settings.cache, record, n_rows, self._label(record))

    def _change(self, record: TensorRecord, change: Change, begun: Slot | None) -> None:
        """Change a chunk, by a patch if one was begun."""
        slots = self._slots_of(record)
        self.n_writes += 1
        number = change.number
        slot = slots.get(number)
        if change.is_whole:
            if slot is None:
                slot = slots[number] = Slot(None)
            self._empty(slot)
            slot.data, slot.is_own = change.values.reshape(-1), False
            self._foreign[record.id, number] = slot
            return
        if slot is None and begun is not None:
            slot = slots[number] = begun
            self._dirty_nbytes += nbytes_of(begun)
        if change.has_rows and slot is not None and self._patch(record, change, slot):
            return
        data = self._writable(record, number, slot)
        change.write(data)
        if slot is None:
            slot = slots[number] = Slot(None)
        if slot.data is not data:
            self._empty(slot)
            slot.data = data
            self._dirty_nbytes += data.nbytes
        self._pack_if_full()

    def _pack_if_full(self) -> None:
        if self._dirty_nbytes > _MAX_DIRTY_NBYTES:
            self.settle(everything=True)

    def _patch(self, record: TensorRecord, change: Change, slot: Slot) -> bool:
        """Add rows to a patch. Returns False if the chunk has none, or it would have too many."""
        patch, places = slot.patch, change.places
        if patch is None:
            return False
        most = most_rows(record)
        if len(patch) + len(places) > most and len(patch.keys() | set(places)) > most:
            return False
        for place, row in zip(places, change.values.copy(), strict=True):
            before = patch.get(place)
            self._dirty_nbytes += row.nbytes - (0 if before is None else before.nbytes)
            patch[place] = row
        self._pack_if_full()
        return True

    def _writable(self, record: TensorRecord, number: int, slot: Slot | None) -> Array:
        """The elements of a chunk to write to."""
        numel = record.grid.numel_of(number)
        has_own = slot is not None and slot.is_own and slot.data is not None
        if has_own and slot is not None and slot.data is not None and slot.data.size == numel:
            return slot.data
        (before,) = self.load(record, [number])
        data = np.zeros(numel, dtype_of(record.dtype))
        if before is not None:
            n = min(numel, before.size)
            data[:n] = before[:n]
        return data

    def fill(self, record: TensorRecord, array: Array) -> None:
        """Write all elements of a tensor.

        Args:
            record: the tensor.
            array: the elements, of its shape.
        """

        n_rows = record.shape[0] if record.shape else 1
        if array.size:
            block = array.reshape(n_rows, -1)
            self.change(record, changes_of(record, range(n_rows), 0, block.shape[1], block))

    def cut(self, record: TensorRecord, number: int) -> None:
        """Drop the elements of a chunk that the tensor does not have any more."""
        slots = self._slots_of(record)
        slot = slots.get(number)
        if self.load(record, [number])[0] is None:
            return  # all are zero
        self.n_writes += 1
        data = self._writable(record, number, slot)
        slot = slots.setdefault(number, Slot(None))
        if slot.data is not data:
            self._empty(slot)
            slot.data = data
            self._dirty_nbytes += data.nbytes

    def clear(self, record: TensorRecord, first: int, stop: int) -> None:
        """Make a run of chunks zero."""
        slots = self._slots_of(record)
        self.n_writes += 1
        for number in [n for n in slots if first <= n < stop]:
            self._empty(slots[number])
        if record.id < self._head.next_tensor:
            with self._committed() as state:
                label = self._label(record)
                for number, pointer in state.all_pointers(record.id, first, stop, label):
                    if pointer.chunk:
                        slots.setdefault(number, Slot(None))

    def settle(self, *, everything: bool = False) -> None:
        """Pack what lies in the caller's memory.

        Args:
            everything: whether to pack also what lies in the memory of the transaction.
        """
        jobs: list[_Job] = [
            (tensor, number, slot)
            for (tensor, number), slot in self._foreign.items()
            if slot.data is not None and not slot.is_own
        ]
        self._foreign.clear()
        if everything:
            jobs = [
                (tensor, number, slot)
                for tensor, slots in self._slots.items()
                for number, slot in slots.items()
                if slot.data is not None or slot.patch
            ]
        first: list[_Job] = []
        second: list[_Job] = []
        for job in jobs:
            (second if self._keyframe_of(job) is not None else first).append(job)
        # Keyframes are packed first, also those that other chunks of the same statement need.
        wanted = {(job[0], self._keyframe_of(job)) for job in second}
        for tensor, number in wanted:
            slot = None if number is None else self._slots[tensor].get(number)
            if number is None or slot is None or slot.data is None or not slot.is_own:
                continue  # not there, packed, or in `first` already
            if not everything:
                first.append((tensor, number, slot))
        for some in (first, second):
            self._pack(some)
            self._new.spill_if_many()

    def _keyframe_of(self, job: _Job) -> int | None:
        return self._records[job[0]].keyframe_of(job[1])

    def _pack(self, jobs: list[_Job]) -> None:
        bases = self._bases_of(jobs)
        for at in range(0, len(jobs), _AT_ONCE):
            some = jobs[at : at + _AT_ONCE]
            packed = self._pack_some(some, bases)
            for (tensor, number, slot), (result, rows) in zip(some, packed, strict=True):
                base = bases[tensor, number][0] if result.has_base else 0
                added = self._new.add(slot, rows, result, base)
                self._empty(slot)
                slot.chunk = added
            self._new.spill_if_many()

    def _pack_some(self, jobs: list[_Job], bases: _Bases) -> list[tuple[Packed, Array | None]]:
        """Pack chunks, the short ones together. Returns also the rows of short patches."""
        sizes = [nbytes_of(slot) for *_, slot in jobs]
        packed: dict[int, tuple[Packed, Array | None]] = {}
        packed.update(self._pack_short(jobs, sizes, bases))
        rest = [i for i in range(len(jobs)) if i not in packed]
        work = partial(self._pack_one, [jobs[i] for i in rest], bases)
        if any(sizes[i] >= SHORT_NBYTES for i in rest):
            found = map_tensors(work, [sizes[i] for i in rest], self.threads)
        else:
            found = [work(k) for k in range(len(rest))]
        packed.update(zip(rest, found, strict=True))
        return [packed[i] for i in range(len(jobs))]

    def _pack_short(
        self, jobs: list[_Job], sizes: list[int], bases: _Bases
    ) -> dict[int, tuple[Packed, None]]:
        """Pack the short chunks in one call, as far as they need no base and no plan: floats below
        level `max`. Returns them by the numbers of their jobs."""
        settings = self._settings
        if settings.level == Level.MAX:
            return {}
        contents = {
            i: Content.of(self._records[tensor], slot.data.reshape(-1))
            for i, (tensor, number, slot) in enumerate(jobs)
            if sizes[i] < SHORT_NBYTES
            and slot.data is not None
            and (tensor, number) not in bases
            and Split.FLOAT in DTYPE_BY_NAME[self._records[tensor].dtype].splits
        }
        packed = settings.planner.pack_short([*contents.values()], settings.level, self.threads)
        return {i: (one, None) for i, one in zip(contents, packed, strict=True) if one is not None}

    def _pack_one(
        self, jobs: list[_Job], bases: _Bases, i: int, threads: int = 1
    ) -> tuple[Packed, Array | None]:
        """Pack a chunk, as `map_tensors` asks. Returns also the rows of a short patch."""
        tensor, number, slot = jobs[i]
        found = bases.get((tensor, number))
        base = None if found is None else found[1]
        record, settings, content = self._records[tensor], self._settings, content_of(slot)
        packed = pack_chunk(
            record, content.reshape(-1), settings.level, base, settings.planner, threads
        )
        is_short = slot.patch is not None and content.nbytes < SHORT_NBYTES
        return packed, content if is_short else None

    def _bases_of(self, jobs: list[_Job]) -> _Bases:
        """The chunks that others are coded against."""
        bases: _Bases = {}
        for tensor, number, _ in jobs:
            record = self._records[tensor]
            keyframe = record.keyframe_of(number)
            if keyframe is None:
                continue
            slot = self._slots[tensor].get(keyframe)
            if slot is not None:
                chunk = slot.chunk
            elif tensor < self._head.next_tensor:
                with self._committed() as state:
                    chunk = state.pointers(record, [keyframe], self._label(record))[0].chunk
            else:
                chunk = 0
            if not chunk:
                continue
            found = self._new.kept(chunk) or self.stored(record, [keyframe])[0]
            if found is not None:
                bases[tensor, number] = chunk, found
        return bases

    # The end.

    def commit(self) -> None:
        """Commit all changes durably, in one step.

        Raises:
            OSError: the disk is full, or failed; nothing is changed.
        """
        self.settle(everything=True)
        if self.is_empty:
            return
        head, entries, pointers = self._folder.write(self._write)
        self._settings.known.follow(self._head, head, entries, pointers)
        self._new.fill_cache()

    def _write(self, txn: Txn, head: Head) -> _Written:
        commit = Commit(txn, head, str(self._folder.path))
        serial = head.n_commits + 1
        next_chunk = self._new.write(commit, txn)
        pointers = {
            tensor: {n: self._new.pointer(slot.chunk) for n, slot in slots.items()}
            for tensor, slots in self._slots.items()
        }
        grown = {
            tensor: self._point(commit, head, tensor, changed)
            for tensor, changed in pointers.items()
        }
        entries = {name: _grown(entry, grown, serial) for name, entry in self.entries.items()}
        self._enter(commit, entries)
        commit.settle()
        new_head = replace(
            head, next_tensor=self._next_tensor, next_chunk=next_chunk, n_commits=serial
        )
        txn.handle.put(HEAD_KEY, new_head.to_bytes(), db=txn.tables.meta)
        followed = {
            old: (new, pointers.get(old.id, {}))
            for name, entry in entries.items()
            for old, new in zip(tensors_of(self.entries[name]), tensors_of(entry), strict=True)
        }
        return new_head, entries, followed

    def _point(self, commit: Commit, head: Head, tensor: int, pointers: dict[int, Pointer]) -> int:
        """Let the pointers of a tensor be those of its changed chunks. Returns by how many bytes
        its frames grow."""
        record, is_new = self._records[tensor], tensor >= head.next_tensor
        return sum([commit.point(record, number, to, is_new) for number, to in pointers.items()])

    def _enter(self, commit: Commit, entries: dict[str, Entry | None]) -> None:
        """Write the entries that have changed, and delete the tensors that have no entry any
        more."""
        gone: set[int] = set()
        for name, entry in entries.items():
            with suppress(CorruptionError, CompatibilityError):
                found = self._found[name] if name in self._found else commit.state.entry(name)
                gone |= {record.id for record in tensors_of(found)}
            commit.enter(name, entry)
        for entry in entries.values():
            gone -= {record.id for record in tensors_of(entry)}
        for tensor in gone:
            commit.remove_tensor(tensor)

    def abort(self) -> None:
        """Drop all changes."""
        with suppress(OSError):  # the next commit deletes what was written early, too
            self._new.drop()


def _grown(entry: Entry | None, grown: dict[int, int], serial: int) -> Entry | None:
    """An entry after a commit.

    Args:
        entry: the entry before.
        grown: by how many bytes the frames of tensors grow, by the number of the tensor.
        serial: the number of the commit.
    """

    def changed(record: TensorRecord) -> TensorRecord:
        packed = record.packed_nbytes + grown.get(record.id, 0)
        return replace(record, packed_nbytes=packed, serial=serial)

    if isinstance(entry, StateRecord):
        return StateRecord(entry.state, tuple(map(changed, entry.tensors)))
    return None if entry is None else changed(entry)
