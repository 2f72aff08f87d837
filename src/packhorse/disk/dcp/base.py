"""An earlier checkpoint that a new one builds upon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from packhorse.codecs.base import ByteArray
from packhorse.disk.dcp.manifest import read_manifest
from packhorse.disk.dcp.open_frames import OpenFrames
from packhorse.disk.dcp.shards import FrameRef, StoredShard, dtype_name
from packhorse.storage.interface import Storage

__all__ = ["BaseCheckpoint"]


class BaseCheckpoint:
    """The shards of an earlier checkpoint, as the new one refers to them."""

    def __init__(self, base: Storage, new: Storage, manifest: str) -> None:
        """
        Args:
            base: where the earlier checkpoint is.
            new: where the new one will be.
            manifest: the name of the earlier one's manifest.

        Raises:
            CorruptionError, CompatibilityError: the manifest is damaged, or too new.
            FileNotFoundError: there is none.
            ValueError: the two are on different file systems.
        """
        metadata = read_manifest(base, manifest)
        self._shards: dict[MetadataIndex, StoredShard] = metadata.storage_data
        self._base = base
        self._new = new
        self._frames = OpenFrames(new)
        new.relative(base, manifest)

    def find(
        self, index: MetadataIndex, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> FrameRef | None:
        """The frame of the same shard, of the same dtype and shape, if there is one."""
        shard = self._shards.get(index)
        name = None if dtype is None else dtype_name(dtype)
        if shard is None or (shard.dtype, shard.shape) != (name, shape):
            return None
        return self._moved(shard.frame)

    def fetch(self, refs: Sequence[FrameRef]) -> None:
        """Open frames and all that they build upon, and get their bytes."""
        self._frames.open({ref: ref.file for ref in refs})
        self._frames.fetch(
            (at, 0, self._frames[at].logical_nbytes) for ref in refs for at in ref.chain()
        )

    def whole(self, ref: FrameRef, threads: int) -> ByteArray:
        """The bytes of a tensor that was fetched."""
        return self._frames.whole(ref, threads)

    def drop(self, refs: Sequence[FrameRef]) -> None:
        """Forget what was fetched."""
        self._frames.drop(at for ref in refs for at in ref.chain())

    def _moved(self, ref: FrameRef) -> FrameRef:
        """A frame, and those that it builds upon, with paths from the new checkpoint."""
        base = None if ref.base is None else self._moved(ref.base)
        return replace(ref, file=self._new.relative(self._base, ref.file), base=base)
