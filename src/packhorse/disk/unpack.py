"""Unpacking whole packed files, tensor by tensor (docs/format.md, section 8).

Tensors are decoded batch by batch to a buffer of 32 MiB, and a large tensor window by window. There
are two such buffers: while one is written, the other is filled. Every base is looked up before any
output is written. Output is complete or absent, and the source is only read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, count, cycle
from typing import Any

from packhorse import _core
from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import BaseLike, Lender, based_frames, open_bases, place_base
from packhorse.disk.batches import tensor_results
from packhorse.disk.packed_frames import open_frame
from packhorse.disk.packed_header import PackedHeader, parse_packed_header
from packhorse.disk.results import FileResult, Progress
from packhorse.disk.short_frames import ShortFrames, decode_short, frames_of
from packhorse.errors import blaming
from packhorse.frame import Frame
from packhorse.storage.frames.scratch import Window
from packhorse.storage.locations import Place, open_place, writing
from packhorse.storage.output_file import PLACING_NBYTES, placed
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source, SourceFile
from packhorse.threads import batches, map_tensors, one_ahead

__all__ = ["check_bases", "unpack_file"]


def unpack_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FileResult:
    """Restore the file that was packed, byte for byte.

    Args:
        src: a packed file, at a path or a URL of fsspec.
        dst: the file to write, at a path or a URL. A file at a URL is written to a temporary file
            first, and uploaded as a whole.
        threads: the number of threads; None for one per core, at most 8.
        force: whether an existing file at `dst` may be replaced.
        progress: called with the number of tensor bytes unpacked since the last call.
        max_nbytes: refuse a file whose tensors take more bytes in total; None for no limit.
        base: what the file was packed against, if it has a base: a file, a folder, or tensors by
            name.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError: `src` is not packed, `dst` is `src` or the base, or an option is wrong.
        CorruptionError, CompatibilityError: `src` or the base is damaged or too new, or `src`
            exceeds the limit.
        BaseMismatchError: a tensor needs a base, and no base or another one was given.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read or written; FileExistsError if `dst` exists and `force` is
            False.

    Example:
        >>> from pathlib import Path
        >>> from packhorse.disk import unpack_file
        >>> result = unpack_file("model.ph.safetensors", "same.safetensors")
        >>> Path("same.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
        True
    """
    path, target = open_place(src, storage_options), open_place(dst, storage_options)
    n_threads = resolve_threads(threads)
    with open_source(path) as source, open_bases(place_base(base, storage_options)) as bases:
        packed = parse_packed_header(source.header(), label=str(path))
        packed.original.check_limit(max_nbytes, str(path))
        if bases is not None:
            bases.refuse_output(target)
        lender = Lender(bases, packed.base_name)
        based = _find_bases(source, packed, lender)
        with writing(target, source=path, force=force) as output:
            output.write(packed.original.prefix())
            unpacker = _Unpacker(source, packed, n_threads, lender)
            entries = packed.original.entries
            pieces = unpacker.pieces(entries, output.nbytes)
            with closing(one_ahead(pieces, packed.original.data_nbytes)) as decoded:
                for piece in decoded:
                    output.write(piece)
                    if progress is not None:
                        progress(piece.nbytes)
            source.check()
    names = [entry.name for entry in entries]
    sizes = [packed.frames[name].nbytes for name in names]
    tensors = tuple(tensor_results(entries, sizes, map(based.get, names)))
    original = packed.original.file_nbytes
    return FileResult(path, target, original, packed.packed.file_nbytes, tensors)


def check_bases(path: Place, base: BaseLike | None) -> None:
    """Check that the bases of a packed file's tensors are there, without reading their data.

    Args:
        path: a packed file; only headers are read.
        base: as for `unpack_file`.

    Raises:
        BaseMismatchError, ValueError, CorruptionError, CompatibilityError, OSError: as for
            `unpack_file`.
    """
    with open_source(path) as source, open_bases(base) as bases:
        packed = parse_packed_header(source.header(), label=str(path))
        _find_bases(source, packed, Lender(bases, packed.base_name))


def _find_bases(source: Source, packed: PackedHeader, lender: Lender) -> dict[str, bytes | None]:
    """Find the bases of a packed file's tensors, and return the content hash of each base by the
    name of its tensor."""
    found: dict[str, bytes | None] = {}
    first: tuple[str, Frame] | None = None
    for name, frame in based_frames(source, packed):
        first = first or (name, frame)
        if lender.bases is not None:
            with blaming(str(source.path)):
                lender.find(name, frame)
        found[name] = frame.base_hash
    if first is not None and lender.bases is None:
        with blaming(str(source.path)):
            raise lender.missing(*first, n_more=len(found) - 1)
    return found


@dataclass(frozen=True, slots=True)
class _Unpacker:
    """Decodes tensors batch by batch, and checks their content hashes."""

    source: Source
    packed: PackedHeader
    threads: int
    lender: Lender
    # Memory for the pieces. While one is written, the next is decoded.
    windows: Iterator[Window] = field(default_factory=lambda: cycle((Window(), Window())))

    def pieces(self, entries: Sequence[TensorEntry], offset: int) -> Iterator[ByteArray]:
        """The bytes of all tensors, in pieces; a piece is valid until the next but one is taken.

        Args:
            entries: the tensors.
            offset: where their bytes begin in the output.
        """
        for run in batches([entry.nbytes for entry in entries]):
            start = offset + entries[run.start].start
            if len(run) == 1:
                yield from self._large(entries[run.start], start)
            else:
                yield self._batch(entries[run.start : run.stop], start)

    def _large(self, entry: TensorEntry, offset: int) -> Iterator[ByteArray]:
        with blaming(str(self.source.path)):
            frame = self._open(entry)
            windows = (self._window(frame.window_nbytes, offset) for _ in count())
            with self.lender.lend(entry.name, frame, self.threads) as loan:
                yield from frame.pieces(threads=self.threads, windows=windows, base=loan.data)

    def _batch(self, entries: Sequence[TensorEntry], offset: int) -> ByteArray:
        sizes = [entry.nbytes for entry in entries]
        window = self._window(sum(sizes), offset)
        ends = list(accumulate(sizes))

        def unpack(i: int, threads: int) -> None:
            with blaming(str(self.source.path)):
                frame = self._open(entries[i])
                place = window[ends[i] - sizes[i] : ends[i]]
                with self.lender.lend(entries[i].name, frame, threads) as loan:
                    frame.verify(threads=threads, window=place, base=loan.data)

        done = self._short_ones(entries, sizes, window)
        rest = [i for i in range(len(entries)) if i not in done]
        map_tensors(lambda k, n: unpack(rest[k], n), [sizes[i] for i in rest], self.threads)
        return window

    def _short_ones(
        self, entries: Sequence[TensorEntry], sizes: Sequence[int], window: ByteArray
    ) -> set[int]:
        """Decode the short tensors of a batch. Returns which are done; none of a file at a URL,
        which is read in order."""
        source = self.source
        if not isinstance(source, SourceFile):
            return set()
        places = _core.views_of_rooms(window, sizes)

        def open_some(numbers: Sequence[int]) -> ShortFrames:
            some = [entries[i] for i in numbers]
            found = frames_of(numbers, some, source.map_all(map(self._place, some)))
            return ShortFrames(list(found), list(found.values()), places.part(list(found)))

        parts = decode_short(range(len(entries)), sizes, open_some, self.threads)
        return {i for part in parts for i in part}

    def _window(self, nbytes: int, offset: int) -> ByteArray:
        """Memory for a piece, at a place that suits its offset in the output."""
        memory = next(self.windows).take(nbytes + PLACING_NBYTES)
        return placed(memory, offset)[:nbytes]

    def _open(self, entry: TensorEntry) -> Frame:
        return open_frame(self.source.map(*self._place(entry)), self.packed, entry)

    def _place(self, entry: TensorEntry) -> tuple[int, int]:
        """The first byte of a tensor's frame in the file, and its length."""
        frame = self.packed.frames[entry.name]
        return self.packed.packed.data_offset + frame.start, frame.nbytes
