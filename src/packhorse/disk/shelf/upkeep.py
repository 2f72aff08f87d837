"""Looking after a shelf: what is on it, whether it is whole, and giving back free space."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from packhorse.disk.shelf.arrays import dtype_of
from packhorse.disk.shelf.cache import Cache
from packhorse.disk.shelf.records import (
    Pointer,
    StateRecord,
    TensorRecord,
    parse_chunk,
    parse_pointer,
    parse_uses,
    pointer_place,
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
from packhorse.disk.shelf.unpacking import Unpacker
from packhorse.disk.shelf.versions import State
from packhorse.errors import CompatibilityError, CorruptionError, blaming

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
        for name in self._state.tag_names():
            try:
                tag = self._state.tag(name)
            except (CorruptionError, KeyError) as error:
                yield ShelfProblem("", name, None, str(error))
            else:
                states.append((name, self._state.at(tag.epoch)))
        self._total = sum(len(value) for _, value in self._state.stored())
        for tag_name, state in states:
            yield from self._state_problems(tag_name, state)
        yield from self._use_problems()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _state_problems(self, tag: str | None, state: State) -> Iterator[ShelfProblem]:
        for name in state.names():
            try:
                entry = state.entry(name)
            except (CorruptionError, CompatibilityError) as error:
                yield ShelfProblem(name, tag, None, str(error))
                continue
            for record in tensors_of(entry):
                label = self._label(name, tag)
                n_chunks = record.grid.n_chunks
                try:
                    pointers = list(state.all_pointers(record.id, 0, n_chunks, label))
                except CorruptionError as error:
                    yield ShelfProblem(name, tag, None, str(error))
                    continue
                noted = sum(pointer.nbytes for _, pointer in pointers)
                if noted != record.packed_nbytes:
                    yield ShelfProblem(
                        name, tag, None,
                        f"{self._session.path}: {name!r}: its chunks have {noted} bytes, but "
                        f"{record.packed_nbytes} are noted",
                    )  # fmt: skip
                yield from self._chunk_problems(name, tag, record, pointers)

    def _label(self, name: str, tag: str | None) -> str:
        return f"{self._session.path}: {name!r}" + ("" if tag is None else f", tag {tag!r}")

    def _chunk_problems(
        self, name: str, tag: str | None, record: TensorRecord, found: list[tuple[int, Pointer]]
    ) -> Iterator[ShelfProblem]:
        new = [(n, p) for n, p in found if p.chunk and p.chunk not in self._seen]
        self._seen |= {pointer.chunk for _, pointer in new}
        threads, label = self._session.settings.threads, self._label(name, tag)
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
        """Records of chunks that are damaged; chunks that nothing uses, or that are noted to be
        used more or less often."""
        path = str(self._session.path)
        problems: list[str] = []
        uses: Counter[int] = Counter()
        stored, noted = set(), {}

        def check(parse: Callable[[], None]) -> None:
            try:
                parse()
            except CorruptionError as error:
                problems.append(str(error))

        def count(key: bytes, value: bytes) -> None:
            tensor = pointer_place(key, path)[0]
            uses[parse_pointer(key, value, f"{path}: tensor {tensor}").chunk] += 1

        def count_base(number: int, value: Any) -> None:
            with blaming(f"{path}: the stored chunk {number}"):
                uses[parse_chunk(number, value).base] += 1

        def note(number: int, value: bytes) -> None:
            noted[number] = parse_uses(number, value, path)

        for key, data in self._state.all_versions():
            check(partial(count, key, data))
        for number, value in self._state.stored():
            stored.add(number)
            check(partial(count_base, number, value))
        for number, value in self._state.shares():
            noted[number] = 0
            check(partial(note, number, value))
        for number in sorted((stored | uses.keys() | noted.keys()) - {0}):
            if number >= self._state.head.next_chunk:
                continue  # of a transaction that goes on
            if number not in stored:
                problems.append(f"{path}: the stored chunk {number} is missing")
            elif uses[number] != noted.get(number, 1):
                problems.append(
                    f"{path}: the stored chunk {number} is used {uses[number]} times, but "
                    f"{noted.get(number, 1)} uses are noted"
                )
        yield from (ShelfProblem("", None, None, words) for words in problems)


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
