"""The chunks of committed states, and how a shelf works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from packhorse.disk.shelf.arrays import Array
from packhorse.disk.shelf.cache import Cache, RowTable, Stored
from packhorse.disk.shelf.packing import Planner
from packhorse.disk.shelf.records import Pointer, TensorRecord
from packhorse.disk.shelf.rows import Target
from packhorse.disk.shelf.store import Folder
from packhorse.disk.shelf.unpacking import Unpacker
from packhorse.disk.shelf.versions import Known, State
from packhorse.layout import Level

__all__ = ["Committed", "Settings", "StateChunks"]


@dataclass(slots=True)
class Settings:
    """How a shelf works.

    Attributes:
        cache: for decoded chunks.
        known: what was read of earlier states.
        threads: how many to use.
        level: at which chunks are packed.
        planner: knows the plans of chunks that were packed.
    """

    cache: Cache
    known: Known
    threads: int
    level: Level
    planner: Planner = field(default_factory=Planner)


class StateChunks:
    """The chunks of a committed state."""

    def __init__(self, state: State, settings: Settings, label: str) -> None:
        """Args:
        state: the state.
        settings: of the shelf.
        label: the tensor, for messages.
        """
        self._state, self._settings, self._label = state, settings, label
        self.threads, self.cache_nbytes = settings.threads, settings.cache.max_nbytes

    def _unpacker(self) -> Unpacker:
        return Unpacker(
            self._settings.cache, self._state.chunks, self._settings.threads, self._label
        )

    def load(self, record: TensorRecord, numbers: list[int]) -> list[Array | None]:
        """As `rows.Chunks.load`."""
        found = self.stored(record, numbers)
        return [None if chunk is None else chunk.data for chunk in found]

    def table(self, record: TensorRecord) -> RowTable | None:
        """As `rows.Chunks.table`."""
        return self._settings.cache.table(record)

    def stored(self, record: TensorRecord, numbers: list[int]) -> list[Stored | None]:
        """Chunks with their content hashes; None for a chunk of zeros."""
        pointers = self._state.pointers(record, numbers, self._label)
        return self._unpacker().load(record, numbers, pointers)

    def load_into(self, targets: Sequence[Target]) -> None:
        """As `rows.Chunks.load_into`."""
        pointers: list[Pointer] = []
        for record, some in groupby(targets, key=attrgetter("record")):
            numbers = [target.number for target in some]
            pointers += self._state.pointers(record, numbers, self._label)
        self._unpacker().load_into(targets, pointers)


class Committed:
    """A committed state, as a context."""

    __slots__ = ("_folder", "_newest", "_reading", "_settings", "_tag")

    def __init__(
        self, folder: Folder, settings: Settings, tag: str | None = None, *, newest: bool = False
    ) -> None:
        """Args:
        folder: of the shelf.
        settings: of the shelf.
        tag: of the state; None for no tag.
        newest: whether it is the newest one also if this thread holds another.
        """
        self._folder, self._settings = folder, settings
        self._tag, self._newest = tag, newest

    def __enter__(self) -> State:
        folder = self._folder
        self._reading = folder.read_newest() if self._newest else folder.read()
        txn, head = self._reading.__enter__()
        state = State(txn, head, head.epoch, self._settings.known, str(folder.path))
        if self._tag is None:
            return state
        try:
            return state.at(state.tag(self._tag).epoch)
        except BaseException as error:
            self._reading.__exit__(type(error), error, None)
            raise

    def __exit__(self, *error: Any) -> None:
        self._reading.__exit__(*error)
