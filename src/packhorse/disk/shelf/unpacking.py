"""Unpacking chunks of a shelf: frames, deltas against other chunks, and patches of some rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from packhorse import _core
from packhorse.disk.shelf.arrays import Array, bytes_of, clear, dtype_of
from packhorse.disk.shelf.cache import Cache, Stored, stored
from packhorse.disk.shelf.records import ChunkRecord, Pointer, TensorRecord
from packhorse.disk.shelf.rows import Target
from packhorse.errors import BaseMismatchError, CompatibilityError, CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME
from packhorse.threads import map_tensors

__all__ = ["Unpacker", "patch_rows"]

_FEW_NBYTES = 1 << 19  # of chunks that one thread decodes as fast as several


class _Job(NamedTuple):
    """A chunk to decode.

    Attributes:
        tensor: of the chunk.
        number: of the chunk in its tensor; ~n for one that chunk n needs.
        pointer: where it is stored.
        record: how it is stored.
        out: memory for its elements; None for new memory.
    """

    tensor: TensorRecord
    number: int
    pointer: Pointer
    record: ChunkRecord
    out: Array | None


# A chunk to decode: its tensor, its number there, where it is stored, and memory for it.
_Wanted: TypeAlias = tuple[TensorRecord, int, Pointer, Array | None]


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
            jobs = self._jobs([(record, numbers[i], pointers[i], None) for i in missing])
            for i, chunk in zip(missing, self._decode_all(jobs), strict=True):
                found[i] = chunk
                self._cache.put(pointers[i].chunk, chunk)
        return found

    def load_into(self, targets: Sequence[Target], pointers: Sequence[Pointer]) -> None:
        """Decode chunks to contiguous memory, past the cache.

        Args:
            targets: the chunks, of one or more tensors. What a stored chunk does not have becomes
                zero.
            pointers: where they are stored.

        Raises:
            CorruptionError: as for `load`.
        """
        wanted: list[_Wanted] = []
        kept = self._cache.get([pointer.chunk for pointer in pointers])
        for (record, number, out), pointer, found in zip(targets, pointers, kept, strict=True):
            if found is not None:
                _fit(found.data, out)
            elif pointer.chunk:
                wanted.append((record, number, pointer, out))
            else:
                clear(out)
        self._decode_all(self._jobs(wanted))

    def _jobs(self, wanted: Sequence[_Wanted]) -> list[_Job]:
        try:
            records = self._find([pointer.chunk for _, _, pointer, _ in wanted])
        except CorruptionError:
            records = [self._find_one(*chunk) for chunk in wanted]  # to name the one
        return [
            _Job(tensor, number, pointer, found, out)
            for (tensor, number, pointer, out), found in zip(wanted, records, strict=True)
        ]

    def _find_one(
        self, tensor: TensorRecord, number: int, pointer: Pointer, _: Array | None
    ) -> ChunkRecord:
        with blaming(f"{self._label}: {_place(tensor, number, pointer)}"):
            return self._find([pointer.chunk])[0]

    def _decode_all(self, jobs: Sequence[_Job]) -> list[Stored]:
        needed = {job.record.base: job for job in jobs if job.record.base}
        found = self._cache.get(list(needed))
        bases = {n: chunk for n, chunk in zip(needed, found, strict=True) if chunk is not None}
        owners = self._jobs(
            [
                (job.tensor, ~job.number, Pointer(n, 0, b""), None)
                for n, job in needed.items()
                if n not in bases
            ],
        )
        for owner, chunk in zip(owners, self._decode_each(owners, {}), strict=True):
            number = owner.pointer.chunk
            bases[number] = chunk
            if needed[number].record.places is None:  # other rows will need it, too
                self._cache.put(number, chunk)
        # Chunks with the same base one after the other: it stays in the processor's cache.
        order = sorted(range(len(jobs)), key=lambda i: jobs[i].record.base) if needed else []
        decoded = self._decode_each([jobs[i] for i in order] or jobs, bases)
        for i, chunk in zip(order, list(decoded), strict=False):
            decoded[i] = chunk
        return decoded

    def _decode_each(self, jobs: Sequence[_Job], bases: Mapping[int, Stored]) -> list[Stored]:
        found = self._decode_together(jobs)
        rest = [i for i in range(len(jobs)) if i not in found]

        def work(k: int, threads: int = 1) -> Stored:
            job = jobs[rest[k]]
            return self._decode(job, bases.get(job.record.base), threads)

        sizes = [_room_nbytes(jobs[i].tensor) for i in rest]
        if self._threads == 1 or sum(sizes) < _FEW_NBYTES:
            found.update(zip(rest, map(work, range(len(rest))), strict=True))
        else:
            found.update(zip(rest, map_tensors(work, sizes, self._threads), strict=True))
        return [found[i] for i in range(len(jobs))]

    def _decode_together(self, jobs: Sequence[_Job]) -> dict[int, Stored]:
        """The chunks whose frames need nothing else, by their numbers in the list: decoded in one
        call of the core. If one of them is damaged, none; then `_decode` finds out which."""
        alone = [
            i for i, job in enumerate(jobs) if not job.record.base and job.record.places is None
        ]
        if len(alone) < 2:
            return {}
        numbers, frames, data = [], [], []
        opened = _core.open_each([jobs[i].record.frame for i in alone])
        for i, frame in zip(alone, opened, strict=True):
            memory = None if frame is None else _memory(jobs[i], frame)
            if frame is not None and memory is not None:
                numbers.append(i)
                frames.append(frame)
                data.append(memory)
        views = _core.views_of_buffers([memory.view(np.uint8) for memory in data], [], [])
        status, _, _, left = _core.unpack_to_views(frames, views, self._threads)
        if status:
            return {}
        is_left, found = set(left), {}
        for k, (i, frame, memory) in enumerate(zip(numbers, frames, data, strict=True)):
            if k not in is_left:
                _finish(memory, jobs[i].out)
                found[i] = stored(memory, frame.content_hash)
        return found

    def _decode(self, job: _Job, base: Stored | None, threads: int) -> Stored:
        record = job.tensor
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


def _room_nbytes(record: TensorRecord) -> int:
    """How many bytes a chunk of a tensor has room for."""
    return math.prod(record.chunk) * dtype_of(record.dtype).itemsize


def _memory(job: _Job, frame: _core.OpenFrame) -> Array | None:
    """Memory for the elements of a frame. None if they do not lie there as in the frame, or if the
    frame is not the one that the tensor points to."""
    dtype = DTYPE_BY_NAME[job.tensor.dtype]
    is_right = job.pointer.check in (b"", frame.content_hash[:4])
    if frame.dtype_code != dtype.code or dtype.bits < 8 or not is_right:
        return None
    numel = math.prod(frame.shape)
    if job.out is None:
        return np.empty(numel, dtype_of(job.tensor.dtype))
    return job.out[:numel] if numel <= job.out.size else None


def _finish(data: Array, out: Array | None) -> None:
    """Clear what the memory of a caller has beyond the elements, or protect new memory."""
    if out is None:
        data.flags.writeable = False
    else:
        clear(out[data.size :])


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
    data_base = None if base is None else bytes_of(base.data)
    if frame.numel:
        resolve_framework("np").fill(
            data,
            lambda memory: frame.decompress_into(
                memory, threads=threads, base=data_base, base_hash=base and base.content_hash
            ),
        )
    if out is None or fits:
        _finish(data, out)
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
