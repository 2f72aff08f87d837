"""Decodes a chain of deltas back to the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.errors import BaseMismatchError, CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.frame.chain import can_decode_chain, decode_chain
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.frames.scratch import Scratch

__all__ = ["Chain"]


class Chain:
    """The frames that restore a tensor: its own, its base, and so on down to a full frame."""

    def __init__(
        self, ref: FrameRef, frames: Sequence[Frame], labels: Sequence[str], name: str | None
    ) -> None:
        """
        Args:
            ref: the tensor's own frame.
            frames: the frames in the order of `ref.chain`, each checked against its link.
            labels: what messages call the pack of each frame.
            name: the name of the tensor, for messages.
        """
        self._links = ref.chain
        self._frames = frames
        self._labels = labels
        self._name = "" if name is None else f"tensor {name!r}: "

    def verify(self, threads: int, scratch: Scratch) -> None:
        """Decode the tensor, and compare all checksums and the content hash of each frame. A full
        frame is decoded piece by piece, and does not take as much memory as the tensor.

        Raises:
            CorruptionError: a checksum or a content hash does not match.
        """
        if len(self._frames) == 1:
            with blaming(self._labels[0]):
                self._frames[0].verify(threads=threads)
        else:
            dst = scratch.take(2, self._links[0].logical_nbytes)
            self._decode_links(dst, threads, scratch, check=True)
            self._check_hash(dst, threads)

    def decode(self, threads: int, scratch: Scratch) -> ByteArray:
        """The bytes of the tensor, in new memory. Raises what `decode_into` raises."""
        data = np.empty(self._links[0].logical_nbytes, np.uint8)
        self.decode_into(data, threads, scratch)
        return data

    def decode_into(self, dst: ByteArray, threads: int, scratch: Scratch) -> None:
        """Decode the tensor.

        Args:
            dst: memory of exactly the tensor's size. The frames of the chain are decoded into it,
                range by range.
            threads: how many threads to use.
            scratch: memory for whole frames, if they cannot be decoded so.

        Raises:
            CorruptionError: a frame is damaged, or the tensor is not the one that `ref` names.
        """
        # The tensor's content hash proves the whole chain, so the bases are not hashed.
        try:
            self._decode_ranges(dst, threads, scratch)
            self._check_hash(dst, threads)
        except CorruptionError:
            self._decode_links(dst, threads, scratch, check=True)  # names the damaged frame
            raise

    def _decode_ranges(self, dst: ByteArray, threads: int, scratch: Scratch) -> None:
        if len(self._frames) == 1 or not can_decode_chain(self._frames):
            self._decode_links(dst, threads, scratch, check=False)
            return
        with blaming(self._labels[-1]):
            fault = decode_chain(self._frames, dst, threads)
        if fault is not None:
            with blaming(self._labels[fault.number]):
                raise fault.error

    def _decode_links(self, dst: ByteArray, threads: int, scratch: Scratch, *, check: bool) -> None:
        base: ByteArray | None = None
        for i in reversed(range(len(self._links))):
            nbytes = self._links[i].logical_nbytes
            is_dst = i % 2 == 0 and nbytes == dst.size
            place = dst if is_dst else scratch.take(i % 2, nbytes)
            base_hash = None if base is None or check else self._links[i + 1].content.digest
            with blaming(self._labels[i]):
                _decode(self._frames[i], place, base, base_hash, threads)
            base = place

    def _check_hash(self, dst: ByteArray, threads: int) -> None:
        digest, wanted = content_hash(dst, threads=threads), self._links[0].content.digest
        if digest != wanted:
            raise CorruptionError(
                f"{self._labels[0]}: {self._name}the content hash of the decoded bytes is "
                f"{digest.hex()}, but the manifest says {wanted.hex()}"
            )


def _decode(
    frame: Frame, dst: ByteArray, base: ByteArray | None, base_hash: bytes | None, threads: int
) -> None:
    try:
        frame.decompress_into(dst, threads=threads, base=base, base_hash=base_hash)
    except BaseMismatchError as error:  # the base frame does not hold what its header claims
        raise CorruptionError(str(error)) from error
