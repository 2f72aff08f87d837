"""Packs the tensors of a file in batches, and writes each batch while the next one is packed. Of a
mapped file, the batch after that is read meanwhile."""

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
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import Bases, BaseTensor
from packhorse.disk.folder_index import plain_name
from packhorse.disk.results import Progress, TensorResult
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
    "AHEAD_NBYTES", "Coder", "Listed", "Mapped", "Sink", "Written", "tensor_results",
    "write_frames",
]  # fmt: skip

# A batch is packed while the one before is written if they need no more memory together.
AHEAD_NBYTES = 1 << 29
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


class _Batch(NamedTuple):
    """Frames that are packed.

    Attributes:
        pieces: their bytes.
        sizes: the length of each.
        base_hashes: the content hash of the base that each needs; None for none.
    """

    pieces: list[ByteArray]
    sizes: list[int]
    base_hashes: list[bytes | None]


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
    nbytes = [stop - start for _, _, _, start, stop in all_entries]
    with (
        closing(_packed_batches(all_entries, nbytes, rooms, buffers, sink.nbytes, coder)) as packed,
        closing(one_ahead(packed, sum(nbytes))) as batches_of_frames,
    ):
        for pieces, sizes, base_hashes in batches_of_frames:
            sink.write_all(pieces)
            done = slice(len(written.sizes), len(written.sizes) + len(sizes))
            written.sizes.extend(sizes)
            written.base_hashes.extend(base_hashes)
            if sizes:
                coder.progress(sum(nbytes[done]))
    return written


def _packed_batches(
    all_entries: Sequence[TensorEntry],
    nbytes: Sequence[int],
    rooms: Sequence[int],
    buffers: Iterable[Buffer],
    offset: int,
    coder: Coder,
) -> Generator[_Batch, None, None]:
    """The frames of all tensors, batch by batch. A batch lies in one of two buffers, at a place
    that suits its offset in the file. If it and the batch before take too much memory together, it
    is packed when that one is written: an empty batch comes between them."""
    runs = list(batches(nbytes))
    # Room for the worst case; it costs nothing, because only pages that frames reach are touched.
    needed = [sum(rooms[run.start : run.stop]) + PLACING_NBYTES for run in runs]
    both = [one + other <= AHEAD_NBYTES for one, other in pairwise(needed)]
    memory = [
        np.empty(max(needed, default=0), np.uint8),
        np.empty(min(max(needed, default=0), AHEAD_NBYTES), np.uint8),
    ]
    read_nbytes = sum(nbytes) if isinstance(buffers, Mapped) else 0
    number = 0
    with closing(one_ahead(_taken(buffers, runs), read_nbytes)) as taken:
        for run, is_ahead in zip(runs, [False, *both], strict=False):
            if not is_ahead and run.start:
                yield _Batch([], [], [])
            number = 1 - number if is_ahead else 0
            out = placed(memory[number], offset)
            batch = _pack_batch(
                all_entries[run.start : run.stop],
                rooms[run.start : run.stop],
                next(taken),  # nothing else refers to it, so it is released with the batch
                out,
                coder,
            )
            offset += sum(batch.sizes)
            yield batch


def _taken(buffers: Iterable[Buffer], runs: Iterable[range]) -> Iterator[Listed | list[Any]]:
    """The tensors of each run. Those of a mapped file are in memory then."""
    source = iter(buffers)
    for run in runs:
        if isinstance(buffers, Listed):
            part = buffers.order[run.start : run.stop]
            yield Listed(buffers.views.part(part), part, buffers.read)
        elif isinstance(buffers, Mapped):
            views = buffers.source.map_all(buffers.places[run.start : run.stop])
            read_ahead(views)
            yield views
        else:
            yield list(islice(source, len(run)))


def _pack_batch(
    entries: Sequence[TensorEntry],
    rooms: Sequence[int],
    tensors: Listed | list[Any],
    out: ByteArray,
    coder: Coder,
) -> _Batch:
    """Frames of tensors, each in its own room in `out`."""
    ends = list(accumulate(rooms))

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
        return _Batch([frame.data for frame in frames], sizes, [f.base_hash for f in frames])
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
    return _Batch(pieces, sizes, [None] * len(sizes))


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
