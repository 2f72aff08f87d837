"""Opens, checks and fetches the frames that a load decodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from packhorse._core import Views
from packhorse.codecs.base import ByteArray
from packhorse.disk.dcp.pack_files import CheckpointFrames
from packhorse.errors import blaming
from packhorse.frame import Frame
from packhorse.frame.many import decompress_to_views
from packhorse.storage.frames.chain import Chain
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.interface import Storage

__all__ = ["OpenFrames"]


class OpenFrames:
    """The open frames of a checkpoint, and of the checkpoints that it builds on."""

    def __init__(self, storage: Storage) -> None:
        self._store = CheckpointFrames(storage)
        self._frames: dict[FrameRef, Frame] = {}
        self._names: dict[FrameRef, str] = {}
        self._scratch = Scratch()

    def open(self, wanted: Mapping[FrameRef, str]) -> int:
        """Open frames and their bases.

        Args:
            wanted: for each frame, the name of a tensor that it restores.

        Returns:
            How many frames this call has opened.

        Raises:
            CorruptionError, CompatibilityError: a file or a frame is not what the manifest says.
        """
        new = {
            at: name for ref, name in wanted.items() for at in ref.chain if at not in self._frames
        }
        # A frame may be wanted itself, and be the base of another one too.
        new.update((ref, name) for ref, name in wanted.items() if ref in new)
        self._store.peek(new)
        self._frames.update(zip(new, self._store.open_all(new), strict=True))
        self._names.update(new)
        return len(new)

    def __getitem__(self, ref: FrameRef) -> Frame:
        return self._frames[ref]

    def logical_nbytes(self, refs: Iterable[FrameRef]) -> int:
        """Decoded bytes of frames and of all their bases, each counted once."""
        return sum(at.logical_nbytes for at in {at for ref in refs for at in ref.chain})

    def fetch(self, parts: Iterable[tuple[FrameRef, int, int]]) -> None:
        """Get the bytes of frames that decoding some parts of tensors will read.

        Args:
            parts: for each part, the frame, the first byte in the decoded tensor, and one past the
                last.
        """
        self._store.fetch_parts(
            (ref, *self[ref].payload_range(start, stop)) for ref, start, stop in parts
        )

    def decode_whole(self, refs: Sequence[FrameRef], views: Views, threads: int) -> list[int]:
        """Decode whole tensors without a base, in one call of the core.

        Args:
            refs: the frames of the tensors.
            views: memory for each tensor; unknown where the core cannot write.
            threads: how many threads to use.

        Returns:
            Which ones are left for `decode`.

        Raises:
            CorruptionError: a frame is damaged.
        """
        frames = [self[ref] for ref in refs]
        return decompress_to_views(
            frames, views, threads, lambda i: self._store.label(refs[i].pack)
        )

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
            ref: the frame of the tensor.
            dst: where the bytes go.
            start: first byte.
            stop: one past the last byte.
            base: all bytes of the base's tensor; None for a full frame. Either their hash has been
                compared, or the hash of the result will be.
            threads: how many threads to use.
        """
        base_hash = None if ref.base is None else ref.base.content.digest
        with blaming(self._store.label(ref.pack)):
            self[ref].decompress_into(
                dst, start=start, stop=stop, threads=threads, base=base, base_hash=base_hash
            )

    def whole(self, ref: FrameRef, threads: int) -> ByteArray:
        """Decode all bytes of a tensor, and all of its bases first.

        Raises:
            CorruptionError: a frame of the chain is damaged, or does not hold what its header
                claims.
        """
        frames = [self[link] for link in ref.chain]
        labels = [self._store.label(link.pack) for link in ref.chain]
        return Chain(ref, frames, labels, self._names[ref]).decode(threads, self._scratch)

    def drop(self, refs: Iterable[FrameRef]) -> None:
        """Forget frames that will not be needed again, and the bytes that were fetched for them."""
        for ref in refs:
            self._frames.pop(ref, None)
            self._store.forget(ref)
