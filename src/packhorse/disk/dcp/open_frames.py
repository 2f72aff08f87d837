"""The frames that a load, or a save with a base, decodes: opened, checked and fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.disk.dcp.shards import FrameRef
from packhorse.disk.packed_frames import Scratch
from packhorse.errors import CorruptionError, TruncationError, blaming
from packhorse.frame import Frame
from packhorse.storage.interface import Object, Storage
from packhorse.storage.strict_json import shortened, shown

__all__ = ["OpenFrames"]

_PEEK_NBYTES = 1 << 16  # of a remote frame: all of a small one, or more than most headers


class OpenFrames:
    """The open frames of a checkpoint, and of those that it builds upon."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files: dict[str, Object] = {}
        self._frames: dict[FrameRef, Frame] = {}
        self._names: dict[FrameRef, str] = {}
        self._memory: dict[FrameRef, ByteArray] = {}
        self._scratch = Scratch()

    def open(self, wanted: Mapping[FrameRef, str]) -> int:
        """Open frames, and those that they are deltas to.

        Args:
            wanted: for each frame, the name of a tensor in it.

        Returns:
            How many were opened now.
        """
        new = {
            at: name for ref, name in wanted.items() for at in ref.chain() if at not in self._frames
        }
        # A frame may be wanted itself and be what another builds upon.
        new.update((ref, name) for ref, name in wanted.items() if ref in new)
        for ref in new:
            file = self._file(ref)
            self._memory[ref] = file.sketch(ref.offset, ref.nbytes)
        self._fetch([(ref, 0, min(ref.nbytes, _PEEK_NBYTES)) for ref in new])
        for ref, name in new.items():
            self._frames[ref] = self._checked(ref, name)
            self._names[ref] = name
        return len(new)

    def __getitem__(self, ref: FrameRef) -> Frame:
        return self._frames[ref]

    def logical_nbytes(self, refs: Iterable[FrameRef]) -> int:
        """Decoded bytes of frames, and of all that they build upon."""
        needed = {at for ref in refs for at in ref.chain()}
        return sum(self[ref].logical_nbytes for ref in needed)

    def fetch(self, parts: Iterable[tuple[FrameRef, int, int]]) -> None:
        """Get what the decoding of some ranges of bytes will read.

        Args:
            parts: frame, first byte and the byte after the last, of the decoded tensor.
        """
        self._fetch([(ref, *self[ref].payload_range(start, stop)) for ref, start, stop in parts])

    def decode(
        self,
        ref: FrameRef,
        dst: ByteArray,
        start: int,
        stop: int,
        *,
        base: ByteArray | None,
        threads: int,
    ) -> None:
        """Decode bytes `start` to `stop` of a tensor.

        Args:
            ref: the frame.
            dst: where they go.
            start: first byte.
            stop: one past the last.
            base: all bytes of the tensor that the frame is a delta to, if it is one; their hash is
                known to be right, or that of what comes of them is going to be compared.
            threads: how many to use.
        """
        base_hash = None if ref.base is None else bytes.fromhex(ref.base.content_hash)
        with blaming(self._path(ref)):
            self[ref].decompress_into(
                dst, start=start, stop=stop, threads=threads, base=base, base_hash=base_hash
            )

    def whole(self, ref: FrameRef, threads: int) -> ByteArray:
        """All bytes of a tensor, after those that it builds upon one by one.

        Raises:
            CorruptionError: a frame of the chain is bad, or holds something else than it says.
        """
        data = np.empty(self[ref].logical_nbytes, np.uint8)
        try:
            self._decode_chain(ref, data, threads, check=False)
            self._check_hash(ref, data, threads)
        except CorruptionError:
            self._decode_chain(ref, data, threads, check=True)  # which link is it?
            raise
        return data

    def _decode_chain(self, ref: FrameRef, data: ByteArray, threads: int, *, check: bool) -> None:
        links = list(ref.chain())
        base: ByteArray | None = None
        for i in reversed(range(len(links))):
            nbytes = self[links[i]].logical_nbytes
            dst = self._scratch.take(i % 2, nbytes) if i else data
            if check and base is not None:
                self._check_hash(links[i + 1], base, threads)
            self.decode(links[i], dst, 0, nbytes, base=base, threads=threads)
            base = dst

    def _check_hash(self, ref: FrameRef, data: ByteArray, threads: int) -> None:
        digest = content_hash(data, threads=threads).hex()
        if digest != ref.content_hash:
            raise CorruptionError(
                f"{self._path(ref)}: tensor {shown(self._names[ref])} at byte {ref.offset}: the "
                f"content hash of the decoded bytes is {digest}, and the manifest says "
                f"{ref.content_hash}"
            )

    def drop(self, refs: Iterable[FrameRef]) -> None:
        """Forget frames that will not be needed again, and what was fetched of them."""
        for ref in refs:
            self._frames.pop(ref, None)
            self._memory.pop(ref, None)

    def _file(self, ref: FrameRef) -> Object:
        if ref.file not in self._files:
            try:
                file = self._storage.open(ref.file)
            except FileNotFoundError as error:
                raise CorruptionError(
                    f"{self._path(ref)}: is not there, and the checkpoint {self._storage.label()} "
                    "needs it"
                ) from error
            if file.nbytes != ref.file_nbytes:
                raise TruncationError(
                    f"{self._path(ref)}: has {file.nbytes} bytes, and the manifest says "
                    f"{ref.file_nbytes}; get the file again"
                )
            self._files[ref.file] = file
        return self._files[ref.file]

    def _path(self, ref: FrameRef) -> str:
        return self._storage.label(ref.file)

    def _fetch(self, parts: Iterable[tuple[FrameRef, int, int]]) -> None:
        by_file: dict[str, list[tuple[ByteArray, int]]] = {}
        for ref, start, stop in parts:
            self._file(ref)
            place = self._memory[ref][start:stop], ref.offset + start
            by_file.setdefault(ref.file, []).append(place)
        for name, ranges in by_file.items():
            self._files[name].fill(ranges)

    def _checked(self, ref: FrameRef, name: str) -> Frame:
        with blaming(self._path(ref)):
            nbytes = _header_nbytes(self._memory[ref])
            if _PEEK_NBYTES < nbytes <= ref.nbytes:
                self._fetch([(ref, 0, nbytes)])
            frame = Frame.from_buffer(self._memory[ref], name=shortened(name), offset=ref.offset)
            found = frame.dtype, frame.shape, frame.content_hash.hex()
            base = None if frame.base_hash is None else frame.base_hash.hex()
            expected = (None, None) if ref.base is None else (ref.base.content_hash, ref.base.dtype)
            if (base, frame.base_dtype) != expected:
                raise CorruptionError(
                    f"tensor {shown(name)} at byte {ref.offset}: the frame is a delta to {base}, "
                    "and the manifest names another base"
                )
            if found != (ref.dtype, ref.shape, ref.content_hash):
                raise CorruptionError(
                    f"tensor {shown(name)} at byte {ref.offset}: the frame holds {found[0]} of "
                    f"shape {list(found[1])} with content hash {found[2]}, and the manifest says "
                    f"{ref.dtype} of shape {list(ref.shape)} with {ref.content_hash}"
                )
        return frame


def _header_nbytes(data: ByteArray) -> int:
    """The length that a frame's header declares, to know how much of it to get."""
    return int.from_bytes(data[12:16].tobytes(), "little")
