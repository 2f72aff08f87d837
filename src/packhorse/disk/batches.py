"""Packs the tensors of a file in batches, and writes each batch while the next one is packed. Of a
mapped file, the batch after that is read meanwhile. A long tensor is packed in parts, so that it
needs no more memory than a batch; its header is written when its last part is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from packhorse import _core
from packhorse._core import Views
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.disk.base_files import Bases, BaseTensor
from packhorse.disk.folder_index import plain_name
from packhorse.disk.results import Progress, TensorResult
from packhorse.frame.compress import FrameInParts
from packhorse.frame.header import padded
from packhorse.frame.many import PackJob, compress_in_rooms, compress_many
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.storage.locations import Place
from packhorse.storage.output_file import PLACING_NBYTES, placed
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.source_file import SourceFile, read_ahead
from packhorse.storage.strict_json import shortened
from packhorse.threads import batches, one_ahead

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "AHEAD_NBYTES", "PART_NBYTES", "WHOLE_NBYTES", "Coder", "Listed", "Mapped", "Sink", "Written",
    "tensor_results", "write_frames",
]  # fmt: skip

# A batch is packed while the one before is written if they need no more memory together.
AHEAD_NBYTES = 1 << 29
# A longer tensor is packed in parts, unless it has a base. One of few parts is better read as a
# whole before it is planned: samples of a file on disk take their time.
WHOLE_NBYTES = 3 << 26
PART_NBYTES = 1 << 26  # a multiple of all chunks
# A shorter frame is moved to the end of the one before it, so that both are written as one piece.
_MOVED_NBYTES = 1 << 14


class Sink(Protocol):
    """What a packed file is written to: a file or memory."""

    @property
    def nbytes(self) -> int:
        """The number of bytes appended so far."""

    def write(self, data: Buffer) -> object:
        """Append bytes."""

    def write_all(self, pieces: Iterable[Buffer]) -> None:
        """Append several pieces."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite bytes that were appended before."""


@dataclass(frozen=True, slots=True)
class Coder:
    """How the tensors of a file are packed.

    Attributes:
        level: how hard to try.
        threads: how many to use.
        progress: called with the bytes of tensors that were packed and written.
        bases: the base of each tensor that has one, by name.
        base_name: what the file calls its base.
    """

    level: Level
    threads: int
    progress: Progress
    bases: Mapping[str, BaseTensor] = field(default_factory=dict)
    base_name: str | None = None

    def against(
        self, bases: Bases, header: FileHeader, source: Place | None, output: Place = Path()
    ) -> Coder:
        """This coder, with the bases of a file's tensors."""
        name = plain_name((source or output).name)
        chosen = bases.for_packing(header.entries, source, name)
        return replace(self, bases=chosen, base_name=bases.name)

    def base_of(self, entry: TensorEntry, threads: int) -> tuple[Buffer | None, str | None]:
        """The bytes and the dtype of a tensor's base; None for both if it has no base."""
        base = self.bases.get(entry.name)
        return (None, None) if base is None else (base.read(threads), base.dtype)


@dataclass(frozen=True, slots=True)
class Listed:
    """Tensors that the core knows: their bytes, in the order of a file.

    Attributes:
        views: where they lie, in another order.
        order: the number of each tensor there.
        read: the bytes of a tensor, by its number.
    """

    views: Views
    order: list[int]
    read: Callable[[int], ByteArray]

    def __iter__(self) -> Iterator[ByteArray]:
        return map(self.read, self.order)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Tensors of a mapped file, in its order. Their bytes are pages of the file.

    Attributes:
        source: the file.
        places: the first byte and the number of bytes of each.
    """

    source: SourceFile
    places: Sequence[tuple[int, int]]

    def __iter__(self) -> Iterator[memoryview]:
        return (self.source.map(*place) for place in self.places)


class _Work(NamedTuple):
    """What is packed at a time: some tensors, or a part of a long one.

    Attributes:
        run: the numbers of the tensors.
        nbytes: the bytes of the tensors, or of the part.
        room: the most bytes that their frames may take; those of the part, without the header.
        start: where the part begins in its tensor; None if the tensors are packed as a whole.
        is_last: whether the part is the last one of its tensor.
    """

    run: range
    nbytes: int
    room: int
    start: int | None = None
    is_last: bool = True


class _Part(NamedTuple):
    """A part of a long tensor.

    Attributes:
        data: its bytes.
        frame: the tensor's frame so far.
    """

    data: Buffer
    frame: FrameInParts


class _Batch(NamedTuple):
    """What is packed and can be written.

    Attributes:
        pieces: the bytes that come next.
        sizes: the length of each frame that ends here.
        base_hashes: the content hash of the base that each of them needs; None for none.
        nbytes: the bytes of tensors that the pieces stand for.
        header: the header of a frame that was packed in parts, and its offset; else None.
    """

    pieces: list[ByteArray]
    sizes: list[int]
    base_hashes: list[bytes | None]
    nbytes: int
    header: tuple[int, ByteArray] | None = None


class Written(NamedTuple):
    """Frames that were written, in the order of a file.

    Attributes:
        sizes: the length of each.
        base_hashes: the content hash of the base that each needs; None for none.
    """

    sizes: list[int]
    base_hashes: list[bytes | None]


def write_frames(
    sink: Sink,
    all_entries: Sequence[TensorEntry],
    buffers: Iterable[Buffer],
    rooms: Sequence[int],
    coder: Coder,
) -> Written:
    """Pack tensors and write their frames.

    Args:
        sink: where the frames go.
        all_entries: the tensors, in the order of the file.
        buffers: their bytes, in the same order.
        rooms: the length of the longest frame of each.
        coder: how they are packed.

    Returns:
        What was written.
    """
    written = Written([], [])
    works = list(_cut(all_entries, rooms, coder.bases))
    with (
        closing(_packed_batches(works, all_entries, rooms, buffers, sink.nbytes, coder)) as packed,
        closing(one_ahead(packed, sum([work.nbytes for work in works]))) as batches_of_frames,
    ):
        for pieces, sizes, base_hashes, nbytes, header in batches_of_frames:
            sink.write_all(pieces)
            if header is not None:
                sink.patch(*header)
            written.sizes.extend(sizes)
            written.base_hashes.extend(base_hashes)
            if sizes or nbytes:
                coder.progress(nbytes)
    return written


def _cut(
    entries: Sequence[TensorEntry], rooms: Sequence[int], bases: Mapping[str, BaseTensor]
) -> Iterator[_Work]:
    """Cuts the tensors of a file into what is packed at a time."""
    sizes = [stop - start for _, _, _, start, stop in entries]
    for run in batches(sizes):
        nbytes = sum(sizes[run.start : run.stop])
        is_short = len(run) > 1 or nbytes <= WHOLE_NBYTES
        if is_short or entries[run.start].name in bases:
            yield _Work(run, nbytes, sum(rooms[run.start : run.stop]))
            continue
        for start in range(0, nbytes, PART_NBYTES):
            length = min(PART_NBYTES, nbytes - start)
            yield _Work(run, length, padded(length), start, start + length == nbytes)


def _packed_batches(
    works: Sequence[_Work],
    all_entries: Sequence[TensorEntry],
    rooms: Sequence[int],
    buffers: Iterable[Buffer],
    offset: int,
    coder: Coder,
) -> Generator[_Batch, None, None]:
    """The frames of all tensors, batch by batch. A batch lies in one of two buffers, at a place
    that suits its offset in the file. If it and the batch before take too much memory together, it
    is packed when that one is written: an empty batch comes between them."""
    # Room for the worst case; it costs nothing, because only pages that frames reach are touched.
    needed = [work.room + PLACING_NBYTES for work in works]
    both = [one + other <= AHEAD_NBYTES for one, other in pairwise(needed)]
    memory = [
        np.empty(max(needed, default=0), np.uint8),
        np.empty(min(max(needed, default=0), AHEAD_NBYTES), np.uint8),
    ]
    read_nbytes = sum([work.nbytes for work in works]) if isinstance(buffers, Mapped) else 0
    number = 0
    all_tensors = _taken(buffers, works, all_entries, coder.level)
    with closing(one_ahead(all_tensors, read_nbytes)) as all_taken:
        for k, (work, is_ahead) in enumerate(zip(works, [False, *both], strict=False)):
            if not is_ahead and k:
                yield _Batch([], [], [], 0)
            number = 1 - number if is_ahead else 0
            taken = next(all_taken)
            if isinstance(taken, _Part):
                batch = _pack_part(work, taken, memory[number], offset, coder.threads)
            else:
                run, out = slice(work.run.start, work.run.stop), placed(memory[number], offset)
                batch = _pack_batch(all_entries[run], rooms[run], taken, out, coder)
            del taken  # before the next is taken
            offset += sum([piece.size for piece in batch.pieces])
            yield batch


def _taken(
    buffers: Iterable[Buffer],
    works: Iterable[_Work],
    all_entries: Sequence[TensorEntry],
    level: Level,
) -> Iterator[Listed | list[Any] | _Part]:
    """What each work packs. The bytes of a mapped file are in memory then."""
    others = iter(()) if isinstance(buffers, Listed | Mapped) else iter(buffers)
    for work in works:
        run = work.run
        if work.start is not None:
            if work.start == 0:
                entry = all_entries[run.start]
                whole = _long_tensor(buffers, run.start, others, entry, level)
                frame = FrameInParts(whole, entry.dtype, entry.shape, level=level)
                if isinstance(buffers, Mapped):
                    whole = b""  # each part has a mapping of its own
            yield _Part(_part_of(buffers, whole, work), frame)
            if work.is_last:
                del whole, frame
        elif isinstance(buffers, Listed):
            order = buffers.order[run.start : run.stop]
            yield Listed(buffers.views.part(order), order, buffers.read)
        elif isinstance(buffers, Mapped):
            views = buffers.source.map_all(buffers.places[run.start : run.stop])
            read_ahead(views)
            yield views
        else:
            yield list(islice(others, len(run)))


def _long_tensor(
    buffers: Iterable[Buffer], i: int, others: Iterator[Buffer], entry: TensorEntry, level: Level
) -> Buffer:
    """All bytes of a tensor, for its plan."""
    if isinstance(buffers, Listed):
        return buffers.read(buffers.order[i])
    if not isinstance(buffers, Mapped):
        return next(others)
    source, place = buffers.source, buffers.places[i]
    whole = source.map_for_samples(*place)
    if not _core.needs_no_plan(
        as_bytes(whole), DTYPE_BY_NAME[entry.dtype].code, entry.shape, level
    ):
        whole = source.map(*place)  # side data, for instance, follow from all of it
        read_ahead([whole])
    return whole


def _part_of(buffers: Iterable[Buffer], whole: Buffer, work: _Work) -> memoryview:
    """The bytes of a part. Of a mapped file, they have a mapping of their own, which ends with
    them, and are in memory."""
    start = work.start or 0
    if not isinstance(buffers, Mapped):
        return memoryview(as_bytes(whole))[start : start + work.nbytes]
    part = buffers.source.map(buffers.places[work.run.start][0] + start, work.nbytes)
    read_ahead([part])
    return part


def _pack_part(work: _Work, part: _Part, memory: ByteArray, offset: int, threads: int) -> _Batch:
    """Packs a part of a long tensor.

    Args:
        work: which part it is.
        part: its bytes.
        memory: where to.
        offset: where the batch will lie in the file.
        threads: how many to use.
    """
    frame = part.frame
    header_nbytes = 0 if work.start else frame.header_nbytes
    out = placed(memory, offset + header_nbytes)
    pieces = [np.zeros(header_nbytes, np.uint8), frame.add(part.data, out, threads)]
    if not work.is_last:
        return _Batch(pieces, [], [], work.nbytes)
    begin = offset + sum([piece.size for piece in pieces]) - frame.nbytes
    return _Batch(pieces, [frame.nbytes], [None], work.nbytes, (begin, frame.header()))


def _pack_batch(
    entries: Sequence[TensorEntry],
    rooms: Sequence[int],
    tensors: Listed | list[Any],
    out: ByteArray,
    coder: Coder,
) -> _Batch:
    """Frames of tensors, each in its own room in `out`."""
    ends = list(accumulate(rooms))
    nbytes = sum([stop - start for _, _, _, start, stop in entries])

    def job_of(i: int) -> PackJob:
        entry = entries[i]
        base, base_dtype = coder.base_of(entry, coder.threads)
        data = tensors.read(tensors.order[i]) if isinstance(tensors, Listed) else tensors[i]
        room = out[ends[i] - rooms[i] : ends[i]]
        name = shortened(entry.name)
        return PackJob(data, entry.dtype, entry.shape, room, name, base, base_dtype)

    if coder.bases:
        jobs = [job_of(i) for i in range(len(entries))]
        frames = compress_many(jobs, level=coder.level, threads=coder.threads)
        sizes = [frame.nbytes for frame in frames]
        base_hashes = [frame.base_hash for frame in frames]
        return _Batch([frame.data for frame in frames], sizes, base_hashes, nbytes)
    if isinstance(tensors, Listed):
        views = tensors.views
    else:
        views = _core.views_of_buffers(
            tensors,
            [DTYPE_BY_NAME[entry.dtype].code for entry in entries],
            [entry.shape for entry in entries],
        )
    sizes = compress_in_rooms(views, rooms, out, job_of, coder.level, coder.threads)
    places = _core.close_gaps(out, rooms, sizes, _MOVED_NBYTES)
    pieces = [out[start:stop] for start, stop in places]
    return _Batch(pieces, sizes, [None] * len(sizes), nbytes)


def tensor_results(
    entries: Sequence[TensorEntry],
    packed_sizes: Iterable[int],
    base_hashes: Iterable[bytes | None],
) -> Iterator[TensorResult]:
    """The results of packing or unpacking tensors."""
    items = (
        (name, dtype, shape, stop - start, nbytes, base_hash)
        for (name, dtype, shape, start, stop), nbytes, base_hash in zip(
            entries, packed_sizes, base_hashes, strict=True
        )
    )
    # This takes a third of the time of calling the class.
    return map(tuple.__new__, repeat(TensorResult), items)
