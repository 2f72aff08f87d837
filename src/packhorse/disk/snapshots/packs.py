"""Packs: the files that frames lie in, written and read (docs/snapshots.md).

A pack is a safetensors file of one U8 tensor for each frame, named by content hash and dtype. Its
header is filled in when all frames are there. What reads frames believes nothing of a manifest: a
frame must be where it is said to be, and hold what it is said to hold.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from packhorse.disk.safetensors_header import LENGTH_NBYTES, parse_header
from packhorse.disk.snapshots.manifest import Content, FrameRef
from packhorse.disk.snapshots.names import new_pack, pack_path
from packhorse.errors import CorruptionError, PackhorseError, TruncationError, blaming
from packhorse.frame import Frame
from packhorse.layout import FRAME_ALIGNMENT, MAX_FILE_HEADER_NBYTES
from packhorse.storage.interface import Object, Sink, Storage
from packhorse.storage.strict_json import shortened

__all__ = ["PackReader", "PackWriter"]

_MAX_OPEN = 64  # packs at a time
_ROW_NBYTES = 92  # of the header for each frame, at most, without three numbers: see `_row`


class PackWriter:
    """Writes one pack, once there is a frame to write. A context manager; the pack appears at its
    end, and only if that was reached without an exception."""

    def __init__(self, storage: Storage, max_frames: int, max_nbytes: int) -> None:
        """Room for the header is kept; its size follows from what may come.

        Args:
            storage: where it goes.
            max_frames: how many frames there may be.
            max_nbytes: bytes of all of them together, at most.
        """
        self._storage = storage
        self._stack = ExitStack()
        self._pack = new_pack()
        row_nbytes = _ROW_NBYTES + 3 * len(str(max_nbytes))
        room = LENGTH_NBYTES + 2 + max_frames * row_nbytes
        self._data_offset = -(-room // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
        self._rows: dict[str, str] = {}
        self._nbytes = 0
        self._sink: Sink | None = None
        if self._data_offset - LENGTH_NBYTES > MAX_FILE_HEADER_NBYTES:
            raise ValueError(f"{max_frames} tensors are too many for one pack")

    @property
    def nbytes(self) -> int:
        """Bytes of the pack; 0 if there is none."""
        return self._nbytes

    def add(self, data: memoryview, content: Content, base: FrameRef | None) -> FrameRef:
        """Append a frame.

        Args:
            data: the bytes of the frame.
            content: what it decodes to.
            base: the frame of the base that it needs.

        Returns:
            Where it lies now.
        """
        if self._sink is None:
            self._sink = self._stack.enter_context(self._storage.create(pack_path(self._pack)))
            self._sink.write(bytes(self._data_offset))
            self._nbytes = self._data_offset
        n_deltas = 0 if base is None else base.n_deltas + 1
        frame = FrameRef(self._pack, self._nbytes, data.nbytes, content, base, n_deltas)
        self._rows[frame.name] = _row(frame, self._data_offset)
        self._sink.write(data)
        self._nbytes += data.nbytes
        return frame

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._sink is not None:
            text = "{" + ",".join(self._rows.values()) + "}"
            room = self._data_offset - LENGTH_NBYTES
            header = room.to_bytes(LENGTH_NBYTES, "little") + text.encode().ljust(room)
            assert len(header) == self._data_offset
            try:
                self._sink.patch(0, header)
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._stack.__exit__(kind, error, trace)


def _row(frame: FrameRef, data_offset: int) -> str:
    """A frame's member of the header: at most 44 bytes of name, three numbers, and 48 bytes around
    them."""
    start = frame.offset - data_offset
    info = {"dtype": "U8", "shape": [frame.nbytes], "data_offsets": [start, start + frame.nbytes]}
    return f"{json.dumps(frame.name)}:{json.dumps(info, separators=(',', ':'))}"


class PackReader:
    """Reads frames of packs, some of which it keeps open. Threads may share one."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: OrderedDict[str, Object] = OrderedDict()
        self._lock = threading.Lock()

    def label(self, pack: str) -> str:
        """What messages call a pack."""
        return self._storage.label(pack_path(pack))

    def frame(self, ref: FrameRef, path: str | None = None) -> Frame:
        """A frame, its header checked against what the manifest says.

        Args:
            ref: where it lies, and what it holds.
            path: of the tensor that it is read for, for messages.

        Raises:
            CorruptionError, CompatibilityError: it is bad, or another.
            FileNotFoundError: there is no such pack.
        """
        name = None if path is None else shortened(path)
        try:
            data = self._object(ref.pack).region(ref.offset, ref.nbytes)
        except TruncationError as error:
            if name is None:
                raise
            raise TruncationError(f"tensor {name!r}: {error}") from error
        with blaming(self.label(ref.pack)):
            frame = Frame.from_buffer(data, name=name, offset=ref.offset)
            _check(frame, ref, name)
        return frame

    def is_there(self, ref: FrameRef) -> bool:
        """Whether a frame and its chain can be read, as far as that is cheap to tell."""
        try:
            for link in ref.chain:
                if self._storage.is_local:
                    self.frame(link)
                elif self._object(link.pack).nbytes < link.offset + link.nbytes:
                    return False
        except (PackhorseError, OSError):
            return False
        return True

    def check_header(self, pack: str, refs: list[FrameRef]) -> None:
        """Check that a pack is a safetensors file that has these frames.

        Raises:
            CorruptionError: it is not.
            FileNotFoundError: there is no such pack.
        """
        label = self.label(pack)
        whole = self._object(pack)
        length = int.from_bytes(whole.region(0, LENGTH_NBYTES), "little")
        if length > MAX_FILE_HEADER_NBYTES:
            raise CorruptionError(f"{label}: a header of {length} bytes is declared")
        text = bytes(whole.region(LENGTH_NBYTES, length))
        rest = whole.nbytes - LENGTH_NBYTES - length
        header = parse_header(text, data_nbytes=rest, label=label)
        entries = {entry.name: entry for entry in header.entries}
        for ref in refs:
            entry = entries.get(ref.name)
            place = None if entry is None else (header.data_offset + entry.start, entry.nbytes)
            if place != (ref.offset, ref.nbytes):
                raise CorruptionError(
                    f"{label}: the header has no frame {ref.name} of {ref.nbytes} bytes at byte "
                    f"{ref.offset}"
                )

    def _object(self, pack: str) -> Object:
        with self._lock:
            found = self._open.pop(pack, None) or self._opened(pack)
            self._open[pack] = found
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)  # who still reads from it keeps it
        return found

    def _opened(self, pack: str) -> Object:
        try:
            return self._storage.open(pack_path(pack))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.label(pack)}: the pack is not there") from error

    def close(self) -> None:
        """Let all packs go."""
        with self._lock:
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(frame: Frame, ref: FrameRef, name: str | None) -> None:
    found = (frame.content_hash, frame.dtype, frame.numel)
    tensor = "" if name is None else f"tensor {name!r} "
    if found != ref.content:
        raise CorruptionError(
            f"{tensor}at byte {ref.offset}: the frame holds {found[2]} elements of "
            f"{found[1]} with hash {found[0].hex()}, and the manifest says {ref.content[2]} of "
            f"{ref.content[1]} with {ref.content[0].hex()}"
        )
