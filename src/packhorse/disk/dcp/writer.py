"""Writes a checkpoint of torch.distributed.checkpoint.

Every rank packs its part of the plan into pack files with new names. When all ranks are done, the
coordinator writes the manifest in one step, and replaces an older one. Until then a reader sees the
older checkpoint, or none. Then the coordinator removes files that the manifest does not need.

The writer keeps only the caller's options between saves, because PyTorch may skip `reset`, may hand
the plan of an earlier save to `write_data` when it caches plans (so no name may come from a plan),
and sends the writer to another process for `async_save`.
"""

from __future__ import annotations

import io
import os
import posixpath
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.dcp.base_checkpoint import BaseCheckpoint
from packhorse.disk.dcp.cast_plan import plan_casts
from packhorse.disk.dcp.checkpoint_manifest import (
    MAX_DELTAS,
    is_rank_manifest,
    manifest_name,
    render_manifest,
)
from packhorse.disk.dcp.other_formats import check_place
from packhorse.disk.dcp.pack_files import (
    CheckpointFrames,
    is_pack_name,
    max_file_nbytes,
    split_volumes,
)
from packhorse.disk.dcp.shards import StoredShard, dtype_name, frame_kind, readable
from packhorse.disk.dcp.values import storable_value
from packhorse.layout import Level
from packhorse.storage.atomic import is_temporary
from packhorse.storage.frames.base_cache import BaseCache
from packhorse.storage.frames.pack_store import PackWriter
from packhorse.storage.frames.packer import FramePacker, Item, PackOptions
from packhorse.storage.frames.refs import FrameRef, TensorSpec
from packhorse.storage.interface import Storage
from packhorse.storage.locations import is_location, open_storage
from packhorse.storage.strict_json import shortened
from packhorse.threads import batches

__all__ = ["PackhorseWriter"]

_DCP_VERSION = "1.0.0"  # the version of PyTorch's metadata that its own writer gives
_BYTES_NBYTES = 1 << 16  # the assumed size of a value that is not a tensor, before it is known


class PackhorseWriter(StorageWriter):
    """A `StorageWriter` of packed shards, for `dcp.save` and `dcp.async_save`.

    Example:
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from packhorse.disk import PackhorseReader, PackhorseWriter
        >>> state = {"weight": torch.zeros(256, 256)}

        >>> saved = dcp.save(state, storage_writer=PackhorseWriter("run/step-100"))
        >>> state["weight"][0] += 1
        >>> writer = PackhorseWriter("run/step-200", base="run/step-100")
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> dcp.load(state, storage_reader=PackhorseReader("run/step-100"))
        >>> state["weight"].sum()
        tensor(0.)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        level: Level | str = "default",
        threads: int | None = None,
        overwrite: bool = False,
        trusted: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            url: a folder, or a URL that fsspec understands ("s3://bucket/run/step-100").
            base: an earlier checkpoint that this one may build on. Shards that have not changed are
                not written again, and others are stored as deltas where that is shorter. The files
                of the base must stay as long as this checkpoint is wanted.
            level: "fast", "default" or "max".
            threads: how many threads each rank uses; None for the cores of its process, at most 8.
            overwrite: replace a checkpoint that is already there. It stays whole until the new one
                is complete.
            trusted: also save values that `PackhorseReader` loads only with `trusted=True`, because
                loading them may run code.
            storage_options: options for fsspec's file system.

        Raises:
            ValueError, TypeError: bad level or threads.
        """
        super().__init__()
        resolve_threads(threads)
        self._url = os.fspath(url)
        self._base_url = None if base is None else os.fspath(base)
        self._level = resolve_level(level)
        self._threads = threads
        self._overwrite = overwrite
        self._trusted = trusted
        self._options = dict(storage_options or {})
        self._save_id = str(uuid.uuid4())
        self._rank = 0
        self._own_manifest = False
        self._is_coordinator = True
        self._older: frozenset[str] = frozenset()
        self._base: BaseCheckpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, at `checkpoint_id` if one is given."""
        if checkpoint_id is not None:
            self._url = os.fspath(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn from PyTorch which rank this is, and whether it is the coordinator."""
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        self._own_manifest = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, and refuse to replace a checkpoint unless that is allowed.

        Raises:
            FileExistsError: there is already a checkpoint, and `overwrite` is False, or there is a
                checkpoint of another format.
            FileNotFoundError: there is no checkpoint at `base`.
            CorruptionError, CompatibilityError: the manifest of `base` is damaged, or too new.
            ValueError: `base` is on another file system.
        """
        storage = self._storage()
        check_place(storage)
        storage.make()
        decides = self._is_coordinator or self._own_manifest
        if decides and not self._overwrite and storage.exists(self._manifest_name()):
            raise FileExistsError(
                f"{storage.label()}: there is already a checkpoint; allow replacing it "
                "(overwrite=True), or choose another place"
            )
        if self._own_manifest and storage.exists(manifest_name()):
            raise FileExistsError(
                f"{storage.label()}: holds a checkpoint of all ranks, which would hide the "
                "checkpoints of single ranks (use_collectives=False); choose another place"
            )
        self._base = None
        if self._base_url is not None:
            base = open_storage(self._base_url, self._options)
            self._base = BaseCheckpoint(base, storage, self._manifest_name())
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged, and note which files are there before any rank writes."""
        self._older = frozenset(self._storage().names())
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Pack and write this rank's part of the plan.

        Raises:
            TypeError: a tensor is not dense, or a value that is not a tensor cannot be loaded
                without running code.
            OSError: the file system failed. No file that this rank wrote is left behind.
        """
        storage = self._storage()
        base, self._base = self._base, None
        threads = resolve_threads(self._threads)
        job = _Job(storage, planner, base, self._level, threads, self._rank)
        try:
            job.prepare_values(plan.items, trusted=self._trusted)
            results = [result for volume in job.volumes(plan.items) for result in volume]
        except BaseException:
            _remove(storage, job.written)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, which completes the checkpoint, and remove the files that it no
        longer needs.

        Raises:
            TypeError: the planner added something that a manifest cannot hold.
            OSError: the file system failed.
        """
        storage = self._storage()
        metadata.version = _DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        frames = {shard.frame for shard in metadata.storage_data.values()}
        needed = {posixpath.normpath(ref.pack) for frame in frames for ref in frame.chain}
        try:
            manifest = render_manifest(metadata)
        except (TypeError, ValueError):
            _remove(storage, [n for n in needed if is_pack_name(n) and n not in self._older])
            raise
        storage.put(self._manifest_name(), manifest, replace=True)
        with suppress(OSError):  # the checkpoint is complete; the next save tries again
            _remove(storage, [n for n in storage.names() if self._is_old(n) and n not in needed])

    def _is_old(self, name: str) -> bool:
        """Whether a file is of a kind that this save may have replaced."""
        if self._own_manifest:
            return is_pack_name(name, self._rank)
        return is_pack_name(name) or is_rank_manifest(name) or is_temporary(name)

    def storage_meta(self) -> StorageMeta:
        """What PyTorch passes on to planners and loggers."""
        return StorageMeta(checkpoint_id=self._url, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """The folder or URL of the checkpoint."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path, or a URL that fsspec understands."""
        return is_location(checkpoint_id)

    def _storage(self) -> Storage:
        return open_storage(self._url, self._options)

    def _manifest_name(self) -> str:
        return manifest_name(self._rank if self._own_manifest else None)


@dataclass(frozen=True, slots=True)
class _Part:
    """An item of the plan with the data to be stored.

    Attributes:
        item: the item.
        dtype: the dtype of the shard; None for a value that is not a tensor.
        shape: the shape of the shard.
        packed: what the packer makes its frame from.
    """

    item: WriteItem
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    packed: Item

    def stored(self, frame: FrameRef) -> StoredShard:
        """The shard as the manifest records it."""
        return StoredShard(
            None if self.dtype is None else dtype_name(self.dtype), self.shape, frame
        )


class _Job:
    """One rank's part of one save.

    Attributes:
        written: the files that this rank has written.
    """

    def __init__(
        self,
        storage: Storage,
        planner: SavePlanner,
        base: BaseCheckpoint | None,
        level: Level,
        threads: int,
        rank: int,
    ) -> None:
        self.written: list[str] = []
        self._store = CheckpointFrames(storage, rank)
        self._planner = planner
        self._base = base
        self._values: dict[MetadataIndex, Any] = {}
        # A save that cannot read its base fails, because unchanged shards are not written again and
        # would depend on the damaged base, too.
        options = PackOptions(
            level, threads, MAX_DELTAS, MAX_DELTAS, BaseCache(0),
            is_strict=False, keeps_shapes=True, skips_bad_bases=False,
        )  # fmt: skip
        self._packer = FramePacker(self._store, options)

    def prepare_values(self, items: Sequence[WriteItem], *, trusted: bool) -> None:
        """Take the values that are not tensors from the planner before anything is written, so that
        a value that is refused costs no time.

        Args:
            items: the items of the plan.
            trusted: also take values whose loading may run code.

        Raises:
            TypeError: loading a value might run code.
        """
        for item in items:
            if item.tensor_data is None:
                value = self._planner.resolve_data(item)
                if isinstance(value, io.BytesIO):
                    data = storable_value(item.index.fqn, value.getvalue(), trusted=trusted)
                    value = io.BytesIO(data)
                self._values[item.index] = value

    def volumes(self, items: Sequence[WriteItem]) -> Iterator[list[WriteResult]]:
        """Write one pack file after the other, and yield the results of each."""
        groups, casts = plan_casts(items, self._planner)
        sizes = [[_expected_nbytes(items[i]) for i in group] for group in groups]
        for volume in split_volumes(sizes, max_file_nbytes(self._store.storage)):
            run = groups[volume.start : volume.stop]
            names = [_tensor_name(items[i]) for group in run for i in group]
            nbytes = [sum(group) for group in sizes[volume.start : volume.stop]]
            with self._store.batch(names, sum(nbytes)) as pack:
                stored = []
                for batch in batches(nbytes):
                    chosen = [i for group in run[batch.start : batch.stop] for i in group]
                    places = {i: k for k, i in enumerate(chosen)}
                    masters = {places[i]: places[casts[i]] for i in chosen if i in casts}
                    stored += self._write(pack, [items[i] for i in chosen], masters)
            if pack.nbytes:
                self.written.append(pack.pack)
            new = self._packer.new
            new.update({content: _whole(ref, pack) for content, ref in new.items()})
            yield [self._result(part, _whole(ref, pack)) for part, ref in stored]

    def _result(self, part: _Part, ref: FrameRef) -> WriteResult:
        return WriteResult(part.item.index, ref.nbytes, part.stored(ref))

    def _write(
        self, pack: PackWriter, items: Sequence[WriteItem], masters: Mapping[int, int]
    ) -> list[tuple[_Part, FrameRef]]:
        """Resolve a group of items, pack them and write them.

        Args:
            pack: the pack that the frames go to.
            items: items of the plan.
            masters: the number of the master for each item that seems to be a rounded copy.
        """
        parts = [self._resolve(item) for item in items]
        packed = [part.packed for part in parts]
        for k, j in masters.items():
            if _may_be_copy(packed[k].spec, packed[j].spec):
                packed[k] = packed[k]._replace(master=j)
        for item in packed:
            if item.base is not None:
                self._store.know(item.base)
        return list(zip(parts, self._packer.add(pack, packed), strict=True))

    def _resolve(self, item: WriteItem) -> _Part:
        is_value = item.tensor_data is None
        value = self._values[item.index] if is_value else self._planner.resolve_data(item)
        data, dtype, shape = readable(value, shortened(item.index.fqn))
        wanted = None if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)
        if wanted is not None and (dtype is None or shape != wanted):
            raise ValueError(
                f"{item.index.fqn!r}: the planner gave shape {list(shape)} for a shard of shape "
                f"{list(wanted)}"
            )
        spec = TensorSpec(_tensor_name(item), *frame_kind(dtype, shape))
        old = None if self._base is None else self._base.find(item.index, dtype, shape)
        # A value that is not a tensor never becomes a delta.
        packed = Item(spec, data, old, is_whole=dtype is None or data.size == 0)
        return _Part(item, dtype, shape, packed)


def _whole(ref: FrameRef, pack: PackWriter) -> FrameRef:
    """A frame with the length of its file, which is only known when the file is complete."""
    if ref.pack != pack.pack or ref.pack_nbytes == pack.nbytes:
        return ref
    base = None if ref.base is None else _whole(ref.base, pack)
    return replace(ref, pack_nbytes=pack.nbytes, base=base)


def _may_be_copy(copy: TensorSpec, master: TensorSpec) -> bool:
    """Whether the planner gave the dtypes and shapes of a copy and its master, as announced."""
    return copy.dtype in ("BF16", "F16") and master.dtype == "F32" and copy.shape == master.shape


def _tensor_name(item: WriteItem) -> str:
    offset = () if item.index.offset is None else item.index.offset
    return f"{item.index.fqn}@{','.join(map(str, offset))}"


def _expected_nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return _BYTES_NBYTES
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _remove(storage: Storage, names: Sequence[str]) -> None:
    """Remove files, and ignore those that cannot be removed."""
    for name in names:
        with suppress(OSError):
            storage.remove(name)
