"""Reading and writing rows of a tensor through its chunks.

A request is some rows and a run of the elements of each row. The rows are a range, or an array of
row numbers: in any order to read, in ascending order to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from packhorse import _core
from packhorse.disk.shelf.arrays import Array, clear
from packhorse.disk.shelf.cache import RowTable, Stored
from packhorse.disk.shelf.grid import Grid
from packhorse.disk.shelf.records import TensorRecord
from packhorse.threads import batches

__all__ = ["Change", "Chunks", "RowIds", "Target", "changes_of", "read_rows", "read_tensors"]

RowIds: TypeAlias = range | Array
_FEW_CHUNKS = 16  # that are in memory at once, even if the cache is smaller


class Target(NamedTuple):
    """Memory for a chunk.

    Attributes:
        record: the tensor.
        number: of the chunk.
        out: the memory, one-dimensional and contiguous, for as many elements as the chunk has.
    """

    record: TensorRecord
    number: int
    out: Array


class Chunks(Protocol):
    """Where rows are read from: a committed state, or what a transaction sees.

    Attributes:
        threads: how many to use.
        cache_nbytes: the most bytes of decoded chunks that are kept.
    """

    threads: int
    cache_nbytes: int

    def load(self, record: TensorRecord, numbers: list[int]) -> list[Array | None]:
        """The elements of chunks, read-only; None for a chunk of zeros. A chunk may have fewer
        elements than it has room for; the rest is zero."""

    def stored(self, record: TensorRecord, numbers: list[int]) -> list[Stored | None]:
        """Chunks, as for `load`."""

    def table(self, record: TensorRecord) -> RowTable | None:
        """Where chunks of the tensor lie in memory, as far as that is known; None if that is not
        noted."""

    def load_into(self, targets: Sequence[Target]) -> None:
        """Decode chunks of a tensor, or of the tensors of a nested state, to memory. Those of one
        tensor follow each other."""


class _Part(NamedTuple):
    """What a request needs of a chunk.

    Attributes:
        number: of the chunk.
        rows: which rows of the chunk.
        start, stop: which elements of a row of the chunk.
        out_rows: the rows of the request.
        out_start: the first element of a row of the request.
    """

    number: int
    rows: slice | Array
    start: int
    stop: int
    out_rows: slice | Array
    out_start: int


def _parts(grid: Grid, rows: RowIds, low: int, high: int) -> Iterator[_Part]:
    """Cut a request into chunks, in ascending order of runs of rows."""
    per_chunk = grid.rows_per_chunk
    pieces = list(grid.parts(low, high))
    for run, inside, wanted in _runs(rows, per_chunk):
        for piece in pieces:
            start, stop = max(low, piece.start), min(high, piece.stop)
            yield _Part(
                run * grid.chunks_per_row + piece.number, inside, start - piece.start,
                stop - piece.start, wanted, start - low,
            )  # fmt: skip


def _runs(rows: RowIds, per_chunk: int) -> Iterator[tuple[int, slice | Array, slice | Array]]:
    """Group rows by runs of `per_chunk` rows: the number of the run, the rows in it, and their
    places in the request."""
    if isinstance(rows, range):
        assert rows.step == 1
        at = rows.start
        while at < rows.stop:
            run = at // per_chunk
            stop = min(rows.stop, (run + 1) * per_chunk)
            first = run * per_chunk
            yield run, slice(at - first, stop - first), slice(at - rows.start, stop - rows.start)
            at = stop
        return
    runs = rows // per_chunk
    stops = [*((runs[1:] != runs[:-1]).nonzero()[0] + 1).tolist(), rows.size]
    starts = [0, *stops[:-1]]
    inside = rows - runs * per_chunk
    firsts = runs[starts].tolist()
    for run, start, stop in zip(firsts, starts, stops, strict=True):
        yield run, inside[start:stop], slice(start, stop)


def read_rows(
    chunks: Chunks, record: TensorRecord, rows: RowIds, low: int, high: int, out: Array
) -> None:
    """Read rows.

    Args:
        chunks: where from.
        record: the tensor.
        rows: which rows, in any order.
        low: the first element of each row.
        high: one past the last.
        out: where to, with the shape (len(rows), high - low), C-contiguous.
    """
    if not out.size:
        return
    grid = record.grid
    if isinstance(rows, np.ndarray) and grid.chunks_per_row == 1:
        _gather(chunks, record, rows, low, out)
        return
    parts = list(_parts(grid, rows, low, high))
    touched = len(parts) * max(1, grid.rows_per_chunk * grid.row_numel // grid.chunks_per_row)
    if touched * out.itemsize > chunks.cache_nbytes // 4 or len(parts) > 1 << 14:
        _stream(chunks, record, grid, parts, out)
        return
    found = chunks.load(record, [part.number for part in parts])
    for part, data in zip(parts, found, strict=True):
        _copy(grid, part, data, out)


def read_tensors(chunks: Chunks, tensors: Iterable[tuple[TensorRecord, Array]]) -> None:
    """Read whole tensors, many at a time.

    Args:
        chunks: where from.
        tensors: each with an array of its shape, C-contiguous, which is written to.
    """
    targets = [target for record, out in tensors for target in _targets(record, out.reshape(-1))]
    for run in batches([target.out.nbytes for target in targets]):
        chunks.load_into(targets[run.start : run.stop])


def _targets(record: TensorRecord, flat: Array) -> Iterator[Target]:
    """The chunks of a whole tensor, which lie one after another in C order."""
    grid, start = record.grid, 0
    for number in range(grid.n_chunks):
        stop = start + grid.numel_of(number)
        yield Target(record, number, flat[start:stop])
        start = stop


def _gather(chunks: Chunks, record: TensorRecord, rows: Array, low: int, out: Array) -> None:
    """Read rows of chunks that have whole rows."""
    grid = record.grid
    numbers = rows // grid.rows_per_chunk
    inside = rows - numbers * grid.rows_per_chunk
    offsets = ((inside * grid.row_numel + low) * out.itemsize).astype(np.uint64)
    chunk_nbytes = grid.rows_per_chunk * grid.row_numel * out.itemsize
    at_once = max(_FEW_CHUNKS, chunks.cache_nbytes // 2 // chunk_nbytes)
    table = chunks.table(record)
    if table is None:
        _gather_in_turn(chunks, record, numbers, offsets, at_once, out)
        return
    addresses = table.addresses[numbers]
    if not addresses.all():
        missing = np.unique(numbers[addresses == 0])
        if len(missing) > at_once:
            _gather_in_turn(chunks, record, numbers, offsets, at_once, out)
            return
        table.add(missing.tolist(), chunks.stored(record, missing.tolist()))
        addresses = table.addresses[numbers]
    _core.gather_rows(addresses + offsets, out.reshape(-1).view(np.uint8))


def _gather_in_turn(
    chunks: Chunks, record: TensorRecord, numbers: Array, offsets: Array, at_once: int, out: Array
) -> None:
    """Read rows from more chunks than the cache should hold.

    Args:
        chunks: where from.
        record: the tensor.
        numbers: of the chunk of each row.
        offsets: where the row begins in the chunk, in bytes.
        at_once: how many chunks to have in memory.
        out: where to.
    """
    order = np.argsort(numbers, kind="stable")
    unique, starts = np.unique(numbers[order], return_index=True)
    starts = np.append(starts, len(order))
    for at in range(0, len(unique), at_once):
        some = unique[at : at + at_once]
        places = order[starts[at] : starts[at + len(some)]]
        table = RowTable(record, len(some))
        table.add(range(len(some)), chunks.stored(record, some.tolist()))
        block = np.empty((len(places), out.shape[1]), out.dtype)
        addresses = table.addresses[np.searchsorted(some, numbers[places])] + offsets[places]
        _core.gather_rows(addresses, block.reshape(-1).view(np.uint8))
        out[places] = block


def _copy(grid: Grid, part: _Part, data: Array | None, out: Array) -> None:
    width = part.stop - part.start
    columns = slice(part.out_start, part.out_start + width)
    if data is None:
        clear(out[part.out_rows, columns])
        return
    rows = _as_rows(grid, part.number, data)
    if isinstance(part.rows, np.ndarray) and part.rows.size == 1:
        place = int(part.rows[0])
        target = out[part.out_rows, columns][0]
        if place < len(rows):
            target[...] = rows[place, part.start : part.stop]
        else:
            clear(target)
        return
    n_missing = _n_missing(part.rows, len(rows))
    if not n_missing:
        out[part.out_rows, columns] = rows[part.rows, part.start : part.stop]
        return
    target = out[part.out_rows, columns]
    n_there = len(target) - n_missing
    if n_there:
        kept = part.rows
        kept = slice(kept.start, len(rows)) if isinstance(kept, slice) else kept[:n_there]
        target[:n_there] = rows[kept, part.start : part.stop]
    clear(target[n_there:])


def _as_rows(grid: Grid, number: int, data: Array) -> Array:
    """A chunk as rows and columns; only whole rows."""
    width = grid.row_numel if grid.chunks_per_row == 1 else grid.numel_of(number)
    n_rows = data.size // width
    return data[: n_rows * width].reshape(n_rows, width)


def _n_missing(rows: slice | Array, n_rows: int) -> int:
    """How many of the rows, which ascend, a chunk does not have."""
    if isinstance(rows, slice):
        start, stop = int(rows.start), int(rows.stop)
        return max(0, stop - max(n_rows, start))
    return len(rows) - int(rows.searchsorted(n_rows))


def _stream(
    chunks: Chunks, record: TensorRecord, grid: Grid, parts: list[_Part], out: Array
) -> None:
    """Read more than the cache should hold: whole chunks go straight to their place, the others
    through the cache, some at a time."""
    whole, rest = [], []
    for part in parts:
        memory = _whole_target(grid, part, out)
        if memory is None:
            rest.append(part)
        else:
            whole.append(Target(record, part.number, memory))
    if whole:
        chunks.load_into(whole)
    step = max(1, chunks.cache_nbytes // 4 // (1 << 19))
    for at in range(0, len(rest), step):
        some = rest[at : at + step]
        found = chunks.load(record, [part.number for part in some])
        for part, data in zip(some, found, strict=True):
            _copy(grid, part, data, out)


def _whole_target(grid: Grid, part: _Part, out: Array) -> Array | None:
    """The memory for a chunk that is needed as a whole; None if only a part is needed, or if the
    memory has gaps."""
    if not isinstance(part.rows, slice) or not isinstance(part.out_rows, slice):
        return None
    n_rows = grid.n_rows_in(part.number)
    if part.rows.start != 0 or part.rows.stop < n_rows:
        return None
    width = part.stop - part.start
    if grid.chunks_per_row == 1:
        if width != grid.row_numel or out.shape[1] != width:
            return None
        return out[part.out_rows].reshape(-1)
    if width != grid.numel_of(part.number):
        return None
    return out[part.out_rows, part.out_start : part.out_start + width].reshape(-1)


class Change(NamedTuple):
    """What is written to a chunk.

    Attributes:
        number: of the chunk.
        rows: which rows of the chunk.
        columns: which elements of each row of the chunk.
        values: the elements, with rows and columns.
        n_rows: how many rows the chunk has.
        is_whole: whether these are all elements of the chunk, and lie in a row in memory.
        has_rows: whether these are whole rows of the tensor.
    """

    number: int
    rows: slice | Array
    columns: slice
    values: Array
    n_rows: int
    is_whole: bool
    has_rows: bool

    @property
    def places(self) -> list[int]:
        """Which rows of the chunk."""
        if isinstance(self.rows, slice):
            return list(range(self.rows.start, self.rows.stop))
        places: list[int] = self.rows.tolist()
        return places

    def write(self, data: Array) -> None:
        """Write into the elements of the chunk."""
        data.reshape(self.n_rows, -1)[self.rows, self.columns] = self.values


def changes_of(
    record: TensorRecord, rows: RowIds, low: int, high: int, block: Array
) -> Iterator[Change]:
    """Cut what is written into chunks.

    Args:
        record: the tensor.
        rows: which rows, ascending, none twice.
        low: the first element of each row.
        high: one past the last.
        block: the elements, of the shape (len(rows), high - low); may be a broadcast view.

    Yields:
        What is written to each chunk, with views of the block.
    """
    if not block.size:
        return
    grid = record.grid
    if grid.chunks_per_row == 1:
        yield from _changes_of_rows(grid, rows, slice(low, high), block)
        return
    for part in _parts(grid, rows, low, high):
        columns = slice(part.out_start, part.out_start + part.stop - part.start)
        values = block[part.out_rows, columns]
        is_whole = values.size == grid.numel_of(part.number) and values.flags.c_contiguous
        yield Change(
            part.number, part.rows, slice(part.start, part.stop), values,
            grid.n_rows_in(part.number), is_whole, False,
        )  # fmt: skip


def _changes_of_rows(grid: Grid, rows: RowIds, columns: slice, block: Array) -> Iterator[Change]:
    """Cut what is written into chunks that have whole rows."""
    has_rows = block.shape[1] == grid.row_numel
    for number, inside, wanted in _runs(rows, grid.rows_per_chunk):
        values, n_rows = block[wanted], grid.n_rows_in(number)
        is_whole = has_rows and len(values) == n_rows and values.flags.c_contiguous
        yield Change(number, inside, columns, values, n_rows, is_whole, has_rows)
