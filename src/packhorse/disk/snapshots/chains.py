"""From the frames of a chain of deltas back to the tensor."""

from __future__ import annotations

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.disk.packed_frames import Scratch
from packhorse.disk.snapshots.manifest import FrameRef
from packhorse.disk.snapshots.packs import PackReader
from packhorse.errors import BaseMismatchError, CorruptionError, blaming
from packhorse.frame import Frame

__all__ = ["Chain"]


class Chain:
    """The frames that restore a tensor, from its own down to a full one, their headers checked."""

    def __init__(self, reader: PackReader, ref: FrameRef, path: str | None) -> None:
        """Args:
            reader: of the packs.
            ref: the tensor's own frame.
            path: of the tensor, for messages.

        Raises:
            CorruptionError, CompatibilityError: a frame is bad, or not the one that is named.
            FileNotFoundError: a pack is not there.
        """
        self._links = ref.chain
        self._path = path
        self._frames = [reader.frame(link, path) for link in self._links]
        self._labels = [reader.label(link.pack) for link in self._links]
        for link, frame in zip(self._links, self._frames, strict=True):
            wanted = (None, None) if link.base is None else link.base.content[:2]
            if (frame.base_hash, frame.base_dtype) != wanted:
                raise CorruptionError(
                    f"{reader.label(link.pack)}: tensor {path!r}: the frame at byte {link.offset} "
                    "needs another base than the manifest says"
                )

    def verify(self, threads: int, scratch: Scratch) -> None:
        """Decode the tensor and compare all checksums and the hash of each link; a full frame takes
        a window of memory alone.

        Raises:
            CorruptionError: what is wrong.
        """
        if len(self._frames) == 1:
            with blaming(self._labels[0]):
                self._frames[0].verify(threads=threads)
        else:
            dst = scratch.take(2, self._links[0].logical_nbytes)
            self._decode_links(dst, threads, scratch, check=True)
            self._check_hash(dst, threads)

    def decode(self, threads: int, scratch: Scratch) -> ByteArray:
        """The bytes of the tensor, in memory of their own; raises as `decode_into`."""
        data = np.empty(self._links[0].logical_nbytes, np.uint8)
        self.decode_into(data, threads, scratch)
        return data

    def decode_into(self, dst: ByteArray, threads: int, scratch: Scratch) -> None:
        """Decode the tensor.

        Args:
            dst: memory of exactly its size; every second link passes through it.
            threads: how many to use.
            scratch: for the other links.

        Raises:
            CorruptionError: a frame is bad, or the tensor is not the one that is named.
        """
        # The hash of the tensor itself proves the whole chain.
        try:
            self._decode_links(dst, threads, scratch, check=False)
            self._check_hash(dst, threads)
        except CorruptionError:
            self._decode_links(dst, threads, scratch, check=True)  # which link is it?
            raise

    def _decode_links(self, dst: ByteArray, threads: int, scratch: Scratch, *, check: bool) -> None:
        base: ByteArray | None = None
        for i in reversed(range(len(self._links))):
            nbytes = self._links[i].logical_nbytes
            is_dst = i % 2 == 0 and nbytes == dst.size
            place = dst if is_dst else scratch.take(i % 2, nbytes)
            base_hash = None if base is None or check else self._links[i + 1].content[0]
            with blaming(self._labels[i]):
                _decode(self._frames[i], place, base, base_hash, threads)
            base = place

    def _check_hash(self, dst: ByteArray, threads: int) -> None:
        digest = content_hash(dst, threads=threads)
        if digest != self._links[0].content[0]:
            raise CorruptionError(
                f"{self._labels[0]}: tensor {self._path!r}: the content hash of the decoded bytes "
                f"is {digest.hex()}, and the manifest says {self._links[0].content[0].hex()}"
            )


def _decode(
    frame: Frame, dst: ByteArray, base: ByteArray | None, base_hash: bytes | None, threads: int
) -> None:
    try:
        frame.decompress_into(dst, threads=threads, base=base, base_hash=base_hash)
    except BaseMismatchError as error:  # the frame below was not what it said it was
        raise CorruptionError(str(error)) from error
