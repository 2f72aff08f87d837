"""One safetensors file, packed or not, opened to read the bytes of its tensors one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.packed_frames import open_frame, sketch_frames
from packhorse.disk.packed_header import PackedHeader, is_packed, parse_packed_header
from packhorse.errors import CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.source_file import Source
from packhorse.storage.strict_json import shown
from packhorse.threads import batches

__all__ = ["ModelFile"]


class ModelFile:
    """A plain file, whose tensors are mapped, or a packed file, whose tensors are decoded.

    Attributes:
        source: the open file.
        path: its path.
        original: its header; for a packed file, the header of the original.
    """

    def __init__(self, source: Source) -> None:
        """Read and check the headers.

        Raises:
            CorruptionError, CompatibilityError: the file is bad or too new.
        """
        self.source = source
        self.path = source.path
        self.original: FileHeader = source.header()
        self._packed: PackedHeader | None = None
        if is_packed(self.original):
            self._packed = parse_packed_header(self.original, label=str(self.path))
            self.original = self._packed.original
        self._known: dict[str, tuple[bytes, bool]] = {}

    @property
    def is_packed(self) -> bool:
        """Whether the file is packed, so that tensors are decoded to memory of their own."""
        return self._packed is not None

    def content_of(self, entry: TensorEntry) -> tuple[bytes | None, bool]:
        """The content hash of a tensor if its frame says it, otherwise None; and whether the frame
        needs a base. The headers of a file at a URL are read together, and then known."""
        if self._packed is None:
            return None, False
        if not self.source.is_private:
            self._learn([entry], self._packed)  # again: the file may have changed
        elif not self._known:
            for run in batches([found.nbytes for found in self._packed.frames.values()]):
                self._learn(self.original.entries[run.start : run.stop], self._packed)
        return self._known[entry.name]

    def _learn(self, entries: Sequence[TensorEntry], packed: PackedHeader) -> None:
        for entry, data in zip(entries, sketch_frames(self.source, packed, entries), strict=True):
            with blaming(str(self.path)):
                frame = open_frame(data, packed, entry)
            self._known[entry.name] = frame.content_hash, frame.base_hash is not None

    def frame_nbytes(self, name: str) -> int | None:
        """The size of a tensor's frame; None in a plain file."""
        return self._packed.frames[name].nbytes if self._packed else None

    def frame(self, entry: TensorEntry) -> Frame | None:
        """The frame of a tensor, with its header checked; None in a plain file."""
        packed = self._packed
        if packed is None:
            return None
        offset, nbytes = packed.frame_offset(entry.name), packed.frames[entry.name].nbytes
        with blaming(str(self.path)):
            return open_frame(self.source.map(offset, nbytes), packed, entry)

    def outline(self, entry: TensorEntry, runs: Sequence[tuple[int, int]] = ()) -> Frame | None:
        """As `frame`; but of a file at a URL only the header is read, and the chunks that runs of
        the tensor's bytes are in, in few requests. The rest of the payload is zeros.

        Args:
            entry: the tensor.
            runs: the start and the stop of each run.
        """
        packed = self._packed
        if packed is None:
            return None
        (data,) = sketch_frames(self.source, packed, [entry])
        with blaming(str(self.path)):
            frame = open_frame(data, packed, entry)
        offset = packed.frame_offset(entry.name)
        places = [frame.payload_range(*run) for run in runs]
        self.source.fill([(data[low:high], offset + low) for low, high in places if low < high])
        return frame

    def read(self, entry: TensorEntry, threads: int) -> ByteArray:
        """The bytes of a tensor. Decoded bytes are checked against the frame's content hash.

        Raises:
            CorruptionError, CompatibilityError: the tensor's frame is bad.
            BaseMismatchError: the tensor is packed against a base.
        """
        data, frame = self._decode(entry, entry.nbytes, threads)
        if self._packed is None or frame is None:
            return data
        if frame.digest_of(data, threads) != frame.content_hash:
            raise CorruptionError(
                f"{self.path}: tensor {shown(entry.name)} at byte "
                f"{self._packed.frame_offset(entry.name)}: the content hash of the decoded bytes "
                "is not that of the frame"
            )
        return data

    def head(self, entry: TensorEntry, n: int) -> ByteArray:
        """The bytes of a tensor's first `n` elements; in a packed file, they are decoded."""
        nbytes = min(n * DTYPE_BY_NAME[entry.dtype].bits // 8, entry.nbytes)
        return self._decode(entry, nbytes, 1)[0]

    def _decode(
        self, entry: TensorEntry, nbytes: int, threads: int
    ) -> tuple[ByteArray, Frame | None]:
        frame = self.frame(entry)
        if frame is None:
            start = self.original.data_offset + entry.start
            return np.frombuffer(self.source.map(start, nbytes), np.uint8), None
        decoded = np.empty(nbytes, np.uint8)
        with blaming(str(self.path)):
            frame.decompress_into(decoded, stop=nbytes, threads=threads)
        return decoded, frame
