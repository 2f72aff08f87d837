"""Looking after a shelf: what is on it, whether it is whole, and giving back free space."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from packhorse.disk.shelf.chunks import Cache, Unpacker, dtype_of
from packhorse.disk.shelf.records import (
    COUNT,
    Pointer,
    StateRecord,
    TensorRecord,
    base_of,
    parse_pointer,
    tensors_of,
)
from packhorse.disk.shelf.results import (
    ReaderInfo,
    ShelfInfo,
    ShelfProblem,
    TagInfo,
    TensorInfo,
)
from packhorse.disk.shelf.session import Session
from packhorse.disk.shelf.store import compact_file
from packhorse.disk.shelf.versions import State
from packhorse.errors import CompatibilityError, CorruptionError

__all__ = ["Progress", "compact", "find_problems", "look_at"]

Progress: TypeAlias = Callable[[int, int], object]
_AT_ONCE = 64  # chunks that are decoded together


def look_at(session: Session, tag: str | None = None) -> ShelfInfo:
    """What is on a shelf, as of the last commit, or in the state of a tag."""
    with session.state(tag) as state:
        entries, tags, head = dict(state.entries()), state.tags(), state.head
    records = [record for entry in entries.values() for record in tensors_of(entry)]
    engine = session.folder.engine
    file_nbytes, free_nbytes = engine.nbytes()
    mine = os.getpid()
    readers = [ReaderInfo(pid, behind) for pid, behind in engine.readers() if pid != mine]
    return ShelfInfo(
        path=session.path,
        nbytes=sum(map(_nbytes, records)),
        packed_nbytes=sum(record.packed_nbytes for record in records),
        file_nbytes=file_nbytes,
        free_nbytes=free_nbytes,
        n_commits=head.n_commits,
        tags=[TagInfo(tag.name, tag.time, tag.commit) for tag in tags],
        readers=readers,
        tensors=[
            TensorInfo(
                name, entry.dtype, entry.shape, entry.chunk, entry.base, _nbytes(entry),
                entry.packed_nbytes,
            )
            for name, entry in entries.items()
            if isinstance(entry, TensorRecord)
        ],
        states=[name for name, entry in entries.items() if isinstance(entry, StateRecord)],
    )  # fmt: skip


def _nbytes(record: TensorRecord) -> int:
    return math.prod(record.shape) * dtype_of(record.dtype).itemsize


def find_problems(session: Session, progress: Progress | None) -> list[ShelfProblem]:
    """Decode every chunk of every state, and compare all records with each other.

    Args:
        session: the shelf.
        progress: takes the bytes of frames that were read, and those of all.

    Returns:
        What is damaged; empty if nothing is.
    """
    with session.state() as state:
        return list(_Check(session, state, progress).problems())


class _Check:
    """A look at all records of a shelf."""

    def __init__(self, session: Session, state: State, progress: Progress | None) -> None:
        self._session, self._state, self._progress = session, state, progress
        self._seen: set[int] = set()
        self._done = 0
        self._uses: Counter[int] = Counter()

    def problems(self) -> Iterator[ShelfProblem]:
        """Everything that is wrong."""
        states: list[tuple[str | None, State]] = [(None, self._state)]
        try:
            tags = self._state.tags()
        except (CorruptionError, CompatibilityError) as error:
            tags = []
            yield ShelfProblem("", None, None, str(error))
        states += [(tag.name, self._state.at(tag.epoch)) for tag in tags]
        self._total = sum(len(value) for _, value in self._state.stored())
        for tag, state in states:
            yield from self._state_problems(tag, state)
        yield from self._use_problems()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _state_problems(self, tag: str | None, state: State) -> Iterator[ShelfProblem]:
        try:
            entries = list(state.entries())
        except (CorruptionError, CompatibilityError) as error:
            yield ShelfProblem("", tag, None, str(error))
            return
        for name, entry in entries:
            for record in tensors_of(entry):
                try:
                    pointers = list(state.all_pointers(record.id, 0, record.grid.n_chunks))
                except CorruptionError as error:
                    yield ShelfProblem(name, tag, None, f"{name!r}: {error}")
                    continue
                noted = sum(pointer.nbytes for _, pointer in pointers)
                if noted != record.packed_nbytes:
                    yield ShelfProblem(
                        name, tag, None,
                        f"{self._session.path}: {name!r}: its chunks have {noted} bytes, but "
                        f"{record.packed_nbytes} are noted",
                    )  # fmt: skip
                yield from self._chunk_problems(name, tag, record, pointers)

    def _chunk_problems(
        self, name: str, tag: str | None, record: TensorRecord, found: list[tuple[int, Pointer]]
    ) -> Iterator[ShelfProblem]:
        new = [(n, p) for n, p in found if p.chunk and p.chunk not in self._seen]
        self._seen |= {pointer.chunk for _, pointer in new}
        label = f"{self._session.path}: {name!r}" + ("" if tag is None else f", tag {tag!r}")
        threads = self._session.settings.threads
        unpacker = Unpacker(Cache(1 << 26), self._state.chunks, threads, label)
        for at in range(0, len(new), _AT_ONCE):
            some = new[at : at + _AT_ONCE]
            try:
                unpacker.load(record, [n for n, _ in some], [p for _, p in some])
            except (CorruptionError, CompatibilityError):
                for number, pointer in some:
                    try:
                        unpacker.load(record, [number], [pointer])
                    except (CorruptionError, CompatibilityError) as error:
                        yield ShelfProblem(name, tag, number, str(error))
            self._done += sum(pointer.nbytes for _, pointer in some)
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)

    def _use_problems(self) -> Iterator[ShelfProblem]:
        """Chunks that nothing uses, or that are noted to be used more or less often."""
        uses: Counter[int] = Counter()
        for key, value in self._state.all_versions():
            with suppress(CorruptionError):  # reported already
                pointer = parse_pointer(key, value, "")
                uses[pointer.chunk] += pointer.chunk > 0
        stored = set()
        for number, value in self._state.stored():
            stored.add(number)
            base = base_of(value)
            uses[base] += base > 0
        noted = {number: COUNT.unpack(value)[0] for number, value in self._state.shares()}
        for number in sorted(stored | (uses.keys() - {0})):
            path = self._session.path
            if number >= self._state.head.next_chunk:
                continue  # of a transaction that goes on
            if number not in stored:
                yield ShelfProblem("", None, None, f"{path}: stored chunk {number} is missing")
            elif uses[number] != noted.get(number, 1):
                yield ShelfProblem(
                    "", None, None,
                    f"{path}: stored chunk {number} is used {uses[number]} times, but "
                    f"{noted.get(number, 1)} uses are noted",
                )  # fmt: skip


def compact(session: Session, progress: Progress | None) -> int:
    """Write the file again without its free space.

    Args:
        session: the shelf, of which no transaction is open.
        progress: takes the bytes that were written, and about how many there are.

    Returns:
        By how many bytes the file became shorter.
    """
    folder = session.folder
    old = folder.engine
    before = old.path.stat().st_size
    total = max(1, before - old.nbytes()[1])

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done, total), total)

    compact_file(folder, None if progress is None else report)
    if progress is not None:
        progress(total, total)
    return before - folder.engine.path.stat().st_size
