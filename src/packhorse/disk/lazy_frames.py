"""The frames of a packed file that is open for lazy reading.

Of a file at a URL, the header of a frame is read once and kept; a part of a tensor then takes one
request for the chunks that it needs, whose checksums are in that header. All tensors together are
read from front to back (`remote_source.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Protocol, TypeAlias

import numpy as np

from packhorse import _core
from packhorse._core import OpenFrame
from packhorse.disk.lazy_bytes import MappedBytes, RemoteBytes
from packhorse.disk.packed_frames import open_frame, peek_nbytes, sketch_frames
from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.short_frames import frames_of
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source_file import read_ahead
from packhorse.threads import batches, one_ahead

__all__ = ["LazyFrames", "Run", "lazy_frames"]

Run: TypeAlias = tuple[Sequence[TensorEntry], Mapping[str, memoryview]]


class LazyFrames(Protocol):
    """The frames of an open packed file."""

    def part(self, entry: TensorEntry, start: int, stop: int) -> Frame:
        """The frame of a tensor, with all bytes that decoding bytes `start` to `stop` of the tensor
        needs. Its header is checked."""

    def open_all(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> list[OpenFrame]:
        """The frames of the first tensors, in the core's form, as far as they are right.

        Args:
            entries: tensors of a run.
            data: the bytes of frames that came with the run.
        """

    def outlines(self, entries: Sequence[TensorEntry]) -> Iterator[Frame]:
        """The frames of tensors, with their headers checked; their payload may be zeros."""

    def runs(self, entries: Sequence[TensorEntry]) -> Generator[Run, None, None]:
        """All tensors, in runs that fit into memory together with their frames.

        Yields:
            The tensors of the next run, and the bytes of their frames, by name, as far as these had
            to be read.
        """


def lazy_frames(packed: PackedHeader, content: MappedBytes | RemoteBytes) -> LazyFrames:
    """The frames of a packed file."""
    if isinstance(content, RemoteBytes):
        return _RemoteFrames(packed, content)
    return _MappedFrames(packed, content)


class _MappedFrames:
    def __init__(self, packed: PackedHeader, content: MappedBytes) -> None:
        self._packed = packed
        self._content = content
        self._data = content.data
        self._frames: dict[str, Frame] = {}

    def part(self, entry: TensorEntry, start: int, stop: int) -> Frame:
        frame = self._frames.get(entry.name)
        if frame is None:
            frame = open_frame(self._bytes_of(entry), self._packed, entry)
            self._frames[entry.name] = frame  # two threads may both come here, with equal frames
        return frame

    def _bytes_of(self, entry: TensorEntry) -> memoryview:
        at = self._packed.frame_offset(entry.name)
        return self._data[at : at + self._packed.frames[entry.name].nbytes]

    def open_all(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> list[OpenFrame]:
        frames = [self._packed.frames[entry.name] for entry in entries]
        offset = self._packed.packed.data_offset
        return _core.open_frames(
            self._data,
            [offset + frame.start for frame in frames],
            [frame.nbytes for frame in frames],
            [DTYPE_BY_NAME[entry.dtype].code for entry in entries],
            [entry.shape for entry in entries],
        )

    def outlines(self, entries: Sequence[TensorEntry]) -> Iterator[Frame]:
        return (self.part(entry, 0, 0) for entry in entries)

    def runs(self, entries: Sequence[TensorEntry]) -> Generator[Run, None, None]:
        """All at once if the bytes are in memory, or few; otherwise the next run is read meanwhile,
        before the headers of its frames are: these are far from each other."""
        sizes = [entry.nbytes for entry in entries]
        runs = list(batches(sizes))
        if not self._content.is_cached and len(runs) > 1:
            with closing(one_ahead(self._read(entries, runs), sum(sizes))) as read:
                yield from read
        else:
            yield entries, {}

    def _read(self, entries: Sequence[TensorEntry], runs: Iterable[range]) -> Iterator[Run]:
        for run in runs:
            part = entries[run.start : run.stop]
            read_ahead([self._bytes_of(entry) for entry in part])
            yield part, {}


class _RemoteFrames:
    def __init__(self, packed: PackedHeader, content: RemoteBytes) -> None:
        self._packed = packed
        self._content = content
        self._headers: dict[str, bytes] = {}

    def part(self, entry: TensorEntry, start: int, stop: int) -> Frame:
        header, n_known = self._headers.get(entry.name), peek_nbytes(entry)
        offset, nbytes = self._place(entry)
        if header is None:
            (data,) = sketch_frames(self._content, self._packed, [entry])
        else:
            data, n_known = self._content.sketch(offset, nbytes), len(header)
            data[:n_known] = np.frombuffer(header, np.uint8)
        frame = open_frame(data, self._packed, entry)
        low, high = frame.payload_range(start, stop)
        low = max(low, n_known)
        if low < high:
            self._content.fill_checked(data[low:high], offset + low)
        if header is None:
            self._headers[entry.name] = data[: frame.header.header_nbytes].tobytes()
        return frame

    def _place(self, entry: TensorEntry) -> tuple[int, int]:
        return self._packed.frame_offset(entry.name), self._packed.frames[entry.name].nbytes

    def open_all(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> list[OpenFrame]:
        numbers = range(len(entries))
        found = frames_of(numbers, entries, [data[entry.name] for entry in entries])
        return [found[i] for i in takewhile(found.__contains__, numbers)]

    def outlines(self, entries: Sequence[TensorEntry]) -> Iterator[Frame]:
        for run in batches([self._place(entry)[1] for entry in entries]):
            part = entries[run.start : run.stop]
            sketches = sketch_frames(self._content, self._packed, part)
            for entry, data in zip(part, sketches, strict=True):
                yield open_frame(data, self._packed, entry)

    def runs(self, entries: Sequence[TensorEntry]) -> Generator[Run, None, None]:
        with self._content.blocks() as blocks:
            for run in batches([self._place(entry)[1] for entry in entries]):
                part = entries[run.start : run.stop]
                read = blocks.read_all([self._place(entry) for entry in part])
                yield part, dict(zip([entry.name for entry in part], read, strict=True))
        self._content.doubt()
