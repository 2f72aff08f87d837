"""An earlier checkpoint that a new one builds on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from packhorse.disk.dcp.checkpoint_manifest import read_manifest
from packhorse.disk.dcp.shards import StoredShard, dtype_name
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.interface import Storage

__all__ = ["BaseCheckpoint"]


class BaseCheckpoint:
    """Finds the shards of an earlier checkpoint, with paths as the new checkpoint needs them."""

    def __init__(self, base: Storage, new: Storage, manifest: str) -> None:
        """
        Args:
            base: where the earlier checkpoint is.
            new: where the new checkpoint will be.
            manifest: the name of the earlier checkpoint's manifest.

        Raises:
            CorruptionError, CompatibilityError: the manifest is damaged, or too new.
            FileNotFoundError: there is no such manifest.
            ValueError: the two checkpoints are on different file systems.
        """
        metadata = read_manifest(base, manifest)
        self._shards: dict[MetadataIndex, StoredShard] = metadata.storage_data
        self._base = base
        self._new = new
        new.relative(base, manifest)

    def find(
        self, index: MetadataIndex, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> FrameRef | None:
        """The frame of the same shard if it has the same dtype and shape, otherwise None."""
        shard = self._shards.get(index)
        name = None if dtype is None else dtype_name(dtype)
        if shard is None or (shard.dtype, shard.shape) != (name, shape):
            return None
        return self._moved(shard.frame)

    def _moved(self, ref: FrameRef) -> FrameRef:
        """A frame and its bases, with paths relative to the new checkpoint."""
        base = None if ref.base is None else self._moved(ref.base)
        return replace(ref, pack=self._new.relative(self._base, ref.pack), base=base)
