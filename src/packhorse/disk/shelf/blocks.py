"""Runs of rows, of which the next one is read while one is used.

New memory costs more than decoding to it: the system clears each page. So the memory of a run that
nothing refers to any more is used again for the runs after the next.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from packhorse.disk.shelf.arrays import Array, dtype_of
from packhorse.disk.shelf.changes import Changes
from packhorse.disk.shelf.committed import StateChunks
from packhorse.disk.shelf.records import TensorRecord
from packhorse.disk.shelf.rows import Chunks, read_rows
from packhorse.disk.shelf.session import Session
from packhorse.disk.shelf.versions import State

__all__ = ["read_blocks"]

_MAX_FREE = 2  # runs whose memory waits to be used again


def read_blocks(
    session: Session, name: str, tag: str | None, nbytes: int
) -> Generator[tuple[str, Array], None, None]:
    """Read a tensor from its first row to its last.

    Args:
        session: the shelf.
        name: of the tensor, which has an axis at least.
        tag: whose state is read; None for the newest.
        nbytes: about how many bytes a run has.

    Yields:
        The name of the dtype, and a run of rows.
    """
    changes = None if tag is not None else session.seen()
    if changes is not None:
        yield from _blocks_of_changes(session, name, nbytes, changes)
        return
    label, known = str(session.path), session.settings.known
    with session.folder.keep() as held, ThreadPoolExecutor(1) as pool:
        with session.folder.using(held) as txn:
            state = State(txn, held.head, held.head.epoch, known, label)
            epoch = state.epoch if tag is None else state.tag(tag).epoch
            record = session.checked(state.at(epoch).entry(name), name, tag)
        runs, memory = _runs(record, nbytes), _Memory()

        def work(rows: range) -> Array:
            with session.folder.using(held) as txn:
                state = State(txn, held.head, epoch, known, label)
                chunks = StateChunks(state, session.settings, f"{label}: {name!r}")
                return _read(record, chunks, rows, memory)

        ahead, has_pool = None, not session.folder.holds
        pid = os.getpid()
        for i, rows in enumerate(runs):
            if os.getpid() != pid:  # a forked child does not have the thread
                ahead, has_pool = None, False
            session.check_open()
            block = ahead() if ahead is not None else work(rows)
            following = runs[i + 1 : i + 2] if has_pool else []
            ahead = _submit(pool, work, following[0]) if following else None
            yield record.dtype, block


def _blocks_of_changes(
    session: Session, name: str, nbytes: int, changes: Changes
) -> Iterator[tuple[str, Array]]:
    """The runs that a transaction sees, each with what was written before it is read."""
    memory = _Memory()
    for rows in _runs(session.record(name, None), nbytes):
        if session.seen() is not changes:
            raise RuntimeError(
                f"{session.path}: {name!r}: the transaction in which this loop began has ended; "
                "begin the loop again"
            )
        with session.tensor(name, None) as (record, chunks):
            there = range(rows.start, min(rows.stop, record.shape[0]))
            if rows and not there:
                return
            block = _read(record, chunks, there, memory)
        yield record.dtype, block


def _submit(
    pool: ThreadPoolExecutor, work: Callable[[range], Array], rows: range
) -> Callable[[], Array]:
    """A function that waits for the rows. It reads them itself if no thread can start."""
    try:
        return pool.submit(work, rows).result
    except RuntimeError:
        return partial(work, rows)


def _runs(record: TensorRecord, nbytes: int) -> list[range]:
    row = max(1, math.prod(record.shape[1:]) * dtype_of(record.dtype).itemsize)
    per_chunk = record.grid.rows_per_chunk
    step = max(1, nbytes // row)
    step = step - step % per_chunk if step > per_chunk else step
    n_rows = record.shape[0]
    return [range(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def _read(record: TensorRecord, chunks: Chunks, rows: range, memory: _Memory) -> Array:
    out: Any = memory.array((len(rows), *record.shape[1:]), dtype_of(record.dtype))
    if out.size:
        flat = out.reshape(len(rows), -1)
        read_rows(chunks, record, rows, 0, flat.shape[1], flat)
    block: Array = out
    return block


class _Memory:
    """Memory for runs of one length, a few at a time."""

    def __init__(self) -> None:
        """Has no memory."""
        self._free: deque[Array] = deque(maxlen=_MAX_FREE)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array with any content. Its memory comes back when nothing refers to it."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._free.pop() if self._free else np.empty(0, np.uint8)
        if memory.nbytes < nbytes:
            memory = np.empty(nbytes, np.uint8)
        array: Array = np.asarray(_Lent(memory, self._free))[:nbytes].view(dtype).reshape(shape)
        return array


class _Lent:
    """Memory that an array is made of, and all views of that array; it goes back with the last."""

    def __init__(self, memory: Array, free: deque[Array]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)
