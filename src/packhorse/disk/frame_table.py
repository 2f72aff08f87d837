"""Decodes the tensors of a packed file that is open for lazy reading.

A tensor that was packed against a base needs the base's whole tensor of the same name, and no
other. That tensor is mapped, or decoded if its file is packed.

- For a slice, the base tensor is copied and its content hash is checked. The copy is kept for the
  next slice of the same tensor, unless the base's file has changed since. A base tensor in memory
  is copied and checked each time, because its owner may write to it.
- For a whole tensor, the decoded tensor is checked against the content hash in its frame instead.
  This check holds even if the base is written to at that moment.

For a device, the framework is asked first: it may upload whole tensors packed, and decode them
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse import _core
from packhorse._core import OpenFrame
from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import Bases, Lender
from packhorse.disk.lazy_bytes import MappedBytes, RemoteBytes
from packhorse.disk.lazy_frames import Run, lazy_frames
from packhorse.disk.packed_frames import open_frame
from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.tensor_table import TensorTable
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.framework import Framework
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.strict_json import shown
from packhorse.threads import batches, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FrameTable"]


class FrameTable(TensorTable):
    """The tensors of an open packed file, which are decoded."""

    def __init__(
        self,
        packed: PackedHeader,
        content: MappedBytes | RemoteBytes,
        label: str,
        framework: Framework,
        threads: int | None,
        max_nbytes: int | None,
        bases: Bases | None,
        device: Any,
    ) -> None:
        """Args:
        packed: the checked header of the file.
        content: the bytes of the file.
        label: the name of the file in messages.
        framework: makes the tensors.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: the most bytes that one call may decode; None for no limit.
        bases: the tensors of the base; None if there is none.
        device: where tensors are placed (PyTorch only); None for host memory.
        """
        super().__init__(content, packed.original, label, framework, device, max_nbytes)
        self.packed = packed
        self.base_name = packed.base_name
        self._frames = lazy_frames(packed, content)
        self._lender = Lender(bases, packed.base_name)
        self._threads = resolve_threads(threads)

    def identity(self) -> tuple[int, str]:
        """An identity of this file."""
        return self.content.identity(self.packed.packed)

    def frame(self, name: str) -> Frame:
        """The tensor's frame, with its header checked."""
        entry = self.entry(name)
        with self.blaming():
            return self._frames.part(entry, 0, entry.nbytes)

    def outlines(self) -> Iterator[tuple[str, Frame]]:
        """All frames with their names; see `LazyFrames.outlines`."""
        entries = self.original.entries
        frames = self._frames.outlines(entries)
        for entry in entries:
            with self.blaming():
                frame = next(frames)
            yield entry.name, frame

    def decode(
        self,
        name: str,
        shape: Sequence[int],
        start: int,
        stop: int,
        threads: int | None = None,
        frame: Frame | None = None,
    ) -> Any:
        """Decode bytes `start` to `stop` of a tensor to a new tensor of this shape, in host
        memory. `frame` is the tensor's frame, if it has been read."""
        entry = self.entry(name)
        self.check_limit(name, stop - start)
        n_threads = threads or self._threads
        is_part = stop - start < entry.nbytes
        lend = self._lender.lend
        with self.blaming():
            opened = frame or self._frames.part(entry, start, stop)
        tensor = self.new_tensor(entry, shape)

        def write(memory: ByteArray) -> None:
            with lend(name, opened, n_threads, keep=is_part) as loan:
                if loan.is_shared:  # a whole tensor; for a part, the base was copied
                    _decode_against(loan.data, opened, memory, name, n_threads)
                    return
                opened.decompress_into(
                    memory,
                    start=start,
                    stop=stop,
                    threads=n_threads,
                    base=loan.data,
                    base_hash=loan.content_hash,
                )

        with self.blaming():
            self.framework.fill(tensor, write)
        return tensor

    def tensor(self, name: str) -> Any:
        """Decode a whole tensor, to its device."""
        entry = self.entry(name)
        self.check_limit(name, entry.nbytes)
        if self._decodes_on_device:
            tensor = self._decode_on_device([self.frame(name)])[0]
            if tensor is not None:
                return tensor
        return self.place(self.decode(name, entry.shape, 0, entry.nbytes))

    def tensors(self) -> dict[str, Any]:
        """Decode all tensors to their device, in the order of the original data. Those that are
        decoded in host memory are moved to the device in batches."""
        self.original.check_limit(self.max_nbytes, self.label)
        tensors: dict[str, Any] = {}
        with closing(self._frames.runs(self.original.entries)) as runs:
            while (run := self._next(runs)) is not None:
                tensors.update(self._decode_run(*run))
        return tensors

    def _next(self, runs: Iterator[Run]) -> Run | None:
        with self.blaming():
            return next(runs, None)

    def _decode_run(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> dict[str, Any]:
        names = [entry.name for entry in entries]
        if self.is_on_host and not self._decodes_on_device:
            return dict(zip(names, self._decode_all(entries, data), strict=True))
        tensors = dict.fromkeys(names)
        if self._decodes_on_device:
            given = [self._opened_frame(entry, data) for entry in entries]
            tensors = dict(zip(names, self._decode_on_device(given), strict=True))
        rest = [entry for entry in entries if tensors[entry.name] is None]
        for run in batches([entry.nbytes for entry in rest]):
            part = rest[run.start : run.stop]
            decoded = self._decode_all(part, data)
            for entry, tensor in zip(part, decoded, strict=True):
                tensors[entry.name] = self.place(tensor)
        return tensors

    @property
    def _decodes_on_device(self) -> bool:
        return self.device is not None and self.framework.decodes_on(self.device)

    def _decode_on_device(self, frames: Sequence[Frame]) -> list[Any]:
        """The tensors that the device decodes, and None for each other tensor."""
        with self.blaming():
            return self.framework.decode_on(frames, self.device, self._threads)

    def _decode_all(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> list[Any]:
        """Decode whole tensors to host memory. Those that need nothing else are decoded in one
        call."""
        if self.max_nbytes is not None:
            for entry in entries:
                self.check_limit(entry.name, entry.nbytes)
        opened = self._open_all(entries, data)
        found: dict[str, Any] = {}
        together = [i for i, frame in enumerate(opened) if frame.stands_alone]
        tensors = self.new_tensors([entries[i] for i in together])
        views = self.framework.views(tensors)
        status, bad, chunk, left = _core.unpack_to_views(
            [opened[i] for i in together], views, self._threads
        )
        if status:
            frame = self._opened_frame(entries[together[bad]], data)
            with self.blaming():
                raise frame.chunk_error(chunk, status)
        self.content.settle(has_failed=False)
        if len(tensors) - len(left) == len(entries):
            return tensors
        is_left = set(left)
        for k, tensor in enumerate(tensors):
            if k not in is_left:
                found[entries[together[k]].name] = tensor
        rest = [entry for entry in entries if entry.name not in found]

        def decode(i: int, threads: int) -> Any:
            name, shape, nbytes = rest[i].name, rest[i].shape, rest[i].nbytes
            frame = self._opened_frame(rest[i], data)
            return self.decode(name, shape, 0, nbytes, threads, frame)

        decoded = map_tensors(decode, [entry.nbytes for entry in rest], self._threads)
        found.update(zip([entry.name for entry in rest], decoded, strict=True))
        return [found[entry.name] for entry in entries]

    def _open_all(
        self, entries: Sequence[TensorEntry], data: Mapping[str, memoryview]
    ) -> list[OpenFrame]:
        """The frames of tensors, in the core's form."""
        opened = self._frames.open_all(entries, data)
        for entry in entries[len(opened) :]:
            opened.append(self._opened_frame(entry, data).opened)
        return opened

    def _opened_frame(self, entry: TensorEntry, data: Mapping[str, memoryview]) -> Frame:
        if entry.name not in data:
            return self.frame(entry.name)
        with self.blaming():
            return open_frame(data[entry.name], self.packed, entry)


def _decode_against(
    base: Buffer | None, frame: Frame, dst: Buffer, name: str, threads: int
) -> None:
    """Decode a whole tensor with a base that others may write to at any time. So the result is
    checked; the base is only checked if the result is wrong, to name the reason."""

    def is_right() -> bool:
        return frame.digest_of(np.frombuffer(dst, np.uint8), threads) == frame.content_hash

    with suppress(CorruptionError):
        frame.decompress_into(dst, threads=threads, base=base, base_hash=frame.base_hash)
        if is_right():
            return
    frame.decompress_into(dst, threads=threads, base=base)
    if not is_right():
        raise CorruptionError(
            f"tensor {shown(name)}: the content hash of the decoded bytes is not that of the frame"
        )
