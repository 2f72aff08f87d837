"""Chunks of a shelf: packing and unpacking them, and the decoded ones that are kept in memory.

A decoded chunk is a one-dimensional, read-only array of its elements in C order. The frame of a
chunk has rows and columns, so that the codec sees the rows; elements that do not end at a byte are
filled up with zeros.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.base import ByteArray
from packhorse.disk.shelf.records import ChunkRecord, Pointer, TensorRecord
from packhorse.errors import BaseMismatchError, CompatibilityError, CorruptionError, blaming
from packhorse.frame import Frame, Plan, compress_buffer
from packhorse.frame.template import Template
from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.process import at_fork
from packhorse.threads import map_tensors

__all__ = [
    "SHORT_NBYTES",
    "Array",
    "Cache",
    "Packed",
    "Planner",
    "RowTable",
    "Stored",
    "Unpacker",
    "clear",
    "dtype_of",
    "pack_chunk",
    "patch_rows",
    "stored",
]

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
_USES_OF_PLAN, _SHORT_USES = 31, 127  # the second for short chunks, which take a trial of Zstandard
_LONGER, _BETTER = 1.2, 1.1
_MAX_PLANS, _MAX_TABLES = 1024, 64
_MAX_OF_TABLE = 1 << 20  # chunks: 8 MiB of addresses
_FEW_NBYTES = 1 << 19  # of chunks that one thread decodes as fast as several
SHORT_NBYTES = 1 << 16  # of a chunk for which the fixed cost of a call counts


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of safetensors."""
    dtype: np.dtype[Any] = resolve_framework("np").empty(name, (0,)).dtype
    return dtype


def clear(out: Array) -> None:
    """Let all bits of an array be zero. This is no number 0 for F8_E8M0, which has none."""
    out[...] = np.zeros((), out.dtype)


class Stored(NamedTuple):
    """A decoded chunk.

    Attributes:
        data: its elements, read-only.
        content_hash: of its frame.
        address: where the elements lie in memory.
    """

    data: Array
    content_hash: bytes
    address: int


def stored(data: Array, content_hash: bytes) -> Stored:
    """A decoded chunk.

    Args:
        data: its elements, one-dimensional and contiguous.
        content_hash: of its frame.
    """
    return Stored(data, content_hash, data.__array_interface__["data"][0])


class RowTable:
    """Where chunks of whole rows lie in memory, so that many rows are gathered at once.

    It keeps the chunks alive. The cache forgets its tables when it drops a chunk.

    Attributes:
        addresses: of each chunk of the tensor; 0 if it is not known.
    """

    def __init__(self, record: TensorRecord, n_chunks: int | None = None) -> None:
        """Args:
        record: the tensor.
        n_chunks: for how many chunks; None for all of the tensor.
        """
        grid = record.grid
        self._numel = grid.rows_per_chunk * grid.row_numel
        self._dtype = dtype_of(record.dtype)
        self._kept: dict[int, Array] = {}
        self._zeros: Stored | None = None
        self.addresses = np.zeros(grid.n_chunks if n_chunks is None else n_chunks, np.uint64)

    def add(self, numbers: Sequence[int], chunks: Sequence[Stored | None]) -> None:
        """Note chunks; one of zeros, or with fewer rows than others, is filled up."""
        addresses = []
        for number, chunk in zip(numbers, chunks, strict=True):
            if chunk is None:
                chunk = self._zeros = self._zeros or stored(np.zeros(self._numel, self._dtype), b"")
            elif chunk.data.size < self._numel:
                data = np.zeros(self._numel, self._dtype)
                data[: chunk.data.size] = chunk.data
                chunk = stored(data, b"")
            self._kept[number] = chunk.data
            addresses.append(chunk.address)
        self.addresses[np.asarray(numbers, np.intp)] = addresses


class Packed(NamedTuple):
    """A chunk that was packed.

    Attributes:
        frame: the bytes of its frame.
        content_hash: of its elements.
        has_base: whether the frame is a delta.
    """

    frame: bytes
    content_hash: bytes
    has_base: bool


@dataclass(slots=True)
class _Pattern:
    """How a chunk was packed, to pack alike ones in the same way.

    Attributes:
        plan: of its frame.
        nbytes: of its frame.
        n_left: how many more chunks may be packed so.
        template: for short chunks.
    """

    plan: Plan
    nbytes: int
    n_left: int
    template: Template | None


class Planner:
    """The plans of frames that were made, to be used again for the next chunks of a tensor.

    A plan is made from samples, which for a short chunk takes about as long as packing it. The
    chunks of a tensor are alike, so a plan is used some times. If a frame comes out longer than
    the one that the plan was made for, the chunk is planned anew. The new plan is used from then on
    if it is better; otherwise only this chunk is harder to pack than others.
    """

    def __init__(self) -> None:
        """Knows no plans."""
        self._patterns: OrderedDict[tuple[int, int], _Pattern] = OrderedDict()

    def pack(
        self, record: TensorRecord, data: ByteArray, shape: Shape, level: Level, threads: int = 1
    ) -> Packed:
        """Pack a chunk.

        Args:
            record: the tensor.
            data: the bytes of the chunk.
            shape: of the chunk.
            level: how hard to try.
            threads: how many to use.

        Returns:
            The frame.
        """
        key = record.id, data.size
        pattern = self._patterns.get(key)
        packed = None
        if pattern is not None and pattern.n_left > 0:
            if pattern.template is not None:
                packed = Packed(*pattern.template.pack(data), False)
            else:
                packed = _packed(_compress(record, data, shape, level, threads, pattern.plan))
            if len(packed.frame) <= pattern.nbytes * _LONGER:
                pattern.n_left -= 1
                return packed
        frame = _compress(record, data, shape, level, threads, None)
        if pattern is not None and packed and len(packed.frame) <= frame.nbytes * _BETTER:
            pattern.nbytes = len(packed.frame)
        elif frame.plan is not None:
            template = Template.of(frame) if data.size < SHORT_NBYTES else None
            n_uses = _SHORT_USES if template is not None and frame.plan.zstd else _USES_OF_PLAN
            self._patterns[key] = _Pattern(frame.plan, frame.nbytes, n_uses, template)
            while len(self._patterns) > _MAX_PLANS:
                self._patterns.popitem(last=False)
        return packed if packed and len(packed.frame) <= frame.nbytes else _packed(frame)


def _compress(
    record: TensorRecord,
    data: ByteArray,
    shape: Shape,
    level: Level,
    threads: int,
    plan: Plan | None,
) -> Frame:
    return compress_buffer(data, record.dtype, shape, level=level, threads=threads, like=plan)


def _packed(frame: Frame) -> Packed:
    return Packed(frame.to_bytes(), frame.content_hash, frame.base_hash is not None)


def pack_chunk(
    record: TensorRecord,
    chunk: Array,
    level: Level,
    base: Stored | None,
    planner: Planner,
    threads: int = 1,
) -> Packed:
    """Pack a chunk.

    Args:
        record: the tensor.
        chunk: the elements of the chunk, one-dimensional.
        level: how hard to try.
        base: the chunk to code it against; None for none.
        planner: knows the plans of the chunks before.
        threads: how many to use.

    Returns:
        The frame; without a base if the base does not help.
    """
    bits, n_rows = DTYPE_BY_NAME[record.dtype].bits, _n_rows(record, chunk.size)
    shape: Shape = (n_rows, chunk.size // n_rows)
    if chunk.size * bits % 8:
        chunk = np.concatenate([chunk, np.zeros(-chunk.size % 8, chunk.dtype)])
        shape = (chunk.size,)
    data = chunk.view(np.uint8) if bits >= 8 else _bytes_of(chunk)
    if base is None or base.data.size != chunk.size:
        return planner.pack(record, data, shape, level, threads)
    frame = compress_buffer(
        data, record.dtype, shape, level=level, threads=threads, base=_bytes_of(base.data),
        base_hash=base.content_hash, base_is_fixed=True,
    )  # fmt: skip
    return _packed(frame)


def _n_rows(record: TensorRecord, numel: int) -> int:
    """The rows of a chunk of whole rows; 1 for a part of a row."""
    row = record.grid.row_numel
    return numel // row if row and numel % row == 0 else 1


def _bytes_of(chunk: Array) -> ByteArray:
    return resolve_framework("np").readable(chunk)[0]


class Cache:
    """Decoded chunks, of which those that were used last are kept, within a number of bytes.

    They are found by the number of the stored chunk. No other chunk ever gets the number, so what
    is here stays right whatever is committed, also by other processes. Of patches, the rows alone
    are kept too, under ~number.
    """

    def __init__(self, nbytes: int) -> None:
        """Args:
        nbytes: the most bytes that it keeps.
        """
        self.max_nbytes = nbytes
        self.nbytes = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, Stored] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], RowTable] = OrderedDict()
        at_fork(in_child=_replace_locks)
        _caches.add(self)

    def get(self, numbers: Sequence[int]) -> list[Stored | None]:
        """Chunks; None for each that is not here."""
        with self._lock:
            kept, move = self._chunks, self._chunks.move_to_end
            found = [kept.get(number) for number in numbers]
            for number, chunk in zip(numbers, found, strict=True):
                if chunk is not None:
                    move(number)
        return found

    def take_rows(self, number: int) -> Array | None:
        """The decoded rows of a patch, which are not kept any longer; None if they are not here."""
        with self._lock:
            found = self._chunks.pop(~number, None)
            self.nbytes -= 0 if found is None else found.data.nbytes
        return None if found is None else found.data

    def put_rows(self, number: int, rows: Array) -> None:
        """Keep the decoded rows of a patch, for the next one that takes its place."""
        self.put(~number, Stored(rows, b"", 0))

    def put(self, number: int, chunk: Stored) -> None:
        """Keep a chunk, and drop the ones that were used longest ago."""
        if chunk.data.nbytes > self.max_nbytes:
            return
        with self._lock:
            before = self._chunks.pop(number, None)
            self._chunks[number] = chunk
            self.nbytes += chunk.data.nbytes - (before.data.nbytes if before else 0)
            if self.nbytes > self.max_nbytes:
                self._tables.clear()
            while self.nbytes > self.max_nbytes:
                _, dropped = self._chunks.popitem(last=False)
                self.nbytes -= dropped.data.nbytes

    def table(self, record: TensorRecord) -> RowTable | None:
        """Where the chunks of a tensor lie in memory, as far as that was found already; None if
        its chunks are not kept, or are too many for a table."""
        grid, key = record.grid, (record.id, record.serial)
        chunk_nbytes = grid.rows_per_chunk * grid.row_numel * dtype_of(record.dtype).itemsize
        if chunk_nbytes > self.max_nbytes or grid.n_chunks > _MAX_OF_TABLE:
            return None
        with self._lock:
            found = self._tables.get(key)
            if found is None:
                found = self._tables[key] = RowTable(record)
                if len(self._tables) > _MAX_TABLES:
                    self._tables.popitem(last=False)
            return found

    def in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held during the fork."""
        self._lock = threading.Lock()


_caches: WeakSet[Cache] = WeakSet()


def _replace_locks() -> None:
    for kept in _caches:
        kept.in_child()


class _Job(NamedTuple):
    """A chunk to decode.

    Attributes:
        number: of the chunk in its tensor; ~n for one that chunk n needs.
        pointer: where it is stored.
        record: how it is stored.
        out: memory for its elements; None for new memory.
    """

    number: int
    pointer: Pointer
    record: ChunkRecord
    out: Array | None


# A chunk to decode: its number in the tensor, where it is stored, and memory for it.
_Wanted: TypeAlias = tuple[int, Pointer, Array | None]


class Unpacker:
    """Unpacks stored chunks of a tensor, in threads if that pays, and keeps them in a cache."""

    def __init__(
        self,
        cache: Cache,
        find: Callable[[Sequence[int]], list[ChunkRecord]],
        threads: int,
        label: str,
    ) -> None:
        """Args:
        cache: for decoded chunks.
        find: takes the numbers of stored chunks, and returns their records. Only the thread
            that calls the methods calls it.
        threads: how many to use.
        label: the tensor, for messages.
        """
        self._cache, self._find = cache, find
        self._threads, self._label = threads, label

    def load(
        self, record: TensorRecord, numbers: list[int], pointers: list[Pointer]
    ) -> list[Stored | None]:
        """Decoded chunks.

        Args:
            record: the tensor.
            numbers: of the chunks.
            pointers: where they are stored.

        Returns:
            The chunks; None for one that is nowhere stored, because it is zero.

        Raises:
            CorruptionError: a chunk is damaged; the message names tensor, chunk and place.
        """
        found = self._cache.get([pointer.chunk for pointer in pointers])
        missing = [i for i, pointer in enumerate(pointers) if pointer.chunk and found[i] is None]
        if missing:
            jobs = self._jobs(record, [(numbers[i], pointers[i], None) for i in missing])
            for i, chunk in zip(missing, self._decode_all(record, jobs), strict=True):
                found[i] = chunk
                self._cache.put(pointers[i].chunk, chunk)
        return found

    def load_into(
        self,
        record: TensorRecord,
        numbers: list[int],
        pointers: list[Pointer],
        outs: list[Array],
    ) -> None:
        """Decode chunks to contiguous memory, past the cache.

        Args:
            record, numbers, pointers: as for `load`.
            outs: for each chunk as many elements as the chunk has room for, one-dimensional; what
                a stored chunk does not have becomes zero.

        Raises:
            CorruptionError: as for `load`.
        """
        wanted: list[_Wanted] = []
        kept = self._cache.get([pointer.chunk for pointer in pointers])
        for number, pointer, out, found in zip(numbers, pointers, outs, kept, strict=True):
            if found is not None:
                _fit(found.data, out)
            elif pointer.chunk:
                wanted.append((number, pointer, out))
            else:
                clear(out)
        self._decode_all(record, self._jobs(record, wanted))

    def _jobs(self, record: TensorRecord, wanted: list[_Wanted]) -> list[_Job]:
        try:
            records = self._find([pointer.chunk for _, pointer, _ in wanted])
        except CorruptionError:
            records = [self._find_one(record, *chunk) for chunk in wanted]  # to name the one
        return [
            _Job(number, pointer, found, out)
            for (number, pointer, out), found in zip(wanted, records, strict=True)
        ]

    def _find_one(
        self, record: TensorRecord, number: int, pointer: Pointer, _: Array | None
    ) -> ChunkRecord:
        with blaming(f"{self._label}: {_place(record, number, pointer)}"):
            return self._find([pointer.chunk])[0]

    def _decode_all(self, record: TensorRecord, jobs: list[_Job]) -> list[Stored]:
        needed = {job.record.base: job for job in jobs if job.record.base}
        found = self._cache.get(list(needed))
        bases = {n: chunk for n, chunk in zip(needed, found, strict=True) if chunk is not None}
        owners = self._jobs(
            record,
            [
                (~job.number, Pointer(n, 0, b""), None)
                for n, job in needed.items()
                if n not in bases
            ],
        )
        for owner, chunk in zip(owners, self._decode_each(record, owners, {}), strict=True):
            number = owner.pointer.chunk
            bases[number] = chunk
            if needed[number].record.places is None:  # other rows will need it, too
                self._cache.put(number, chunk)
        # Chunks with the same base one after the other: it stays in the processor's cache.
        order = sorted(range(len(jobs)), key=lambda i: jobs[i].record.base) if needed else []
        decoded = self._decode_each(record, [jobs[i] for i in order] or jobs, bases)
        for i, chunk in zip(order, list(decoded), strict=False):
            decoded[i] = chunk
        return decoded

    def _decode_each(
        self, record: TensorRecord, jobs: list[_Job], bases: dict[int, Stored]
    ) -> list[Stored]:
        def work(i: int, threads: int = 1) -> Stored:
            return self._decode(record, jobs[i], bases.get(jobs[i].record.base), threads)

        size = math.prod(record.chunk) * dtype_of(record.dtype).itemsize
        if self._threads == 1 or size * len(jobs) < _FEW_NBYTES:
            return [work(i) for i in range(len(jobs))]
        return map_tensors(work, [size] * len(jobs), self._threads)

    def _decode(self, record: TensorRecord, job: _Job, base: Stored | None, threads: int) -> Stored:
        try:
            frame = Frame.from_buffer(job.record.frame)
            if job.pointer.check not in (b"", frame.content_hash[:4]):
                raise CorruptionError("the stored chunk is another one than the tensor points to")
            if frame.dtype != record.dtype:
                raise CorruptionError(f"the stored chunk has elements of {frame.dtype}")
            if job.record.places is not None:
                data = _patched(record, job.record, base)
                if job.out is not None:
                    _fit(data, job.out)
            else:
                if base is not None and base.content_hash != frame.base_hash:
                    raise CorruptionError("the chunk that it is a delta against has other content")
                data = _decoded(frame, record, base, job.out, threads)
        except BaseMismatchError as error:
            raise CorruptionError(
                f"{self._label}: {_place(record, job.number, job.pointer)}: {error}"
            ) from error
        except (CorruptionError, CompatibilityError) as error:
            raise type(error)(
                f"{self._label}: {_place(record, job.number, job.pointer)}: {error}"
            ) from error
        return stored(data, frame.content_hash)


def patch_rows(record: TensorRecord, patch: ChunkRecord) -> Array:
    """The rows that a patch has, with rows and columns.

    Args:
        record: the tensor.
        patch: how it is stored.

    Raises:
        CorruptionError: it is damaged.
    """
    assert patch.places is not None
    width = record.grid.row_numel
    rows = _decoded(Frame.from_buffer(patch.frame), record, None, None)
    if rows.size != len(patch.places) * width or max(patch.places) >= record.chunk[0]:
        raise CorruptionError("the rows of a patch do not fit their places")
    return rows.reshape(-1, width)


def _patched(record: TensorRecord, patch: ChunkRecord, base: Stored | None) -> Array:
    """The elements of a chunk, some rows of which are in a patch, and the others in a base."""
    assert patch.places is not None
    rows = patch_rows(record, patch)
    before = np.empty(0, rows.dtype) if base is None else base.data
    width = rows.shape[1]
    numel = max(before.size, (max(patch.places) + 1) * width)
    data = np.empty(numel, rows.dtype)
    data[: before.size] = before
    clear(data[before.size :])
    data.reshape(-1, width)[list(patch.places)] = rows
    data.flags.writeable = False
    return data


def _decoded(
    frame: Frame, record: TensorRecord, base: Stored | None, out: Array | None, threads: int = 1
) -> Array:
    """The elements of a chunk, in `out` if that is given."""
    dtype = dtype_of(record.dtype)
    fits = out is not None and frame.numel <= out.size and DTYPE_BY_NAME[record.dtype].bits >= 8
    data = out[: frame.numel] if out is not None and fits else np.empty(frame.numel, dtype)
    data_base = None if base is None else _bytes_of(base.data)
    if frame.numel:
        resolve_framework("np").fill(
            data,
            lambda memory: frame.decompress_into(
                memory, threads=threads, base=data_base, base_hash=base and base.content_hash
            ),
        )
    if out is None:
        data.flags.writeable = False
    elif fits:
        clear(out[frame.numel :])
    else:
        _fit(data, out)
    return data


def _fit(data: Array, out: Array) -> None:
    """Copy what there is room for, and fill up with zeros."""
    n = min(data.size, out.size)
    out[:n] = data[:n]
    clear(out[n:])


def _place(record: TensorRecord, number: int, pointer: Pointer) -> str:
    """The place of a chunk, for messages."""
    if number < 0:
        return f"what chunk {~number} is a change of, stored as {pointer.chunk}"
    grid = record.grid
    piece = grid.piece(number)
    rows = f"rows {piece.first_row} to {piece.first_row + grid.n_rows_in(number) - 1}"
    if grid.chunks_per_row > 1:
        rows = f"row {piece.first_row}, elements {piece.start} to {piece.stop - 1}"
    return f"chunk {number} ({rows}), stored as {pointer.chunk}"
