"""Reads a checkpoint of torch.distributed.checkpoint.

In the planning step, before any rank touches a tensor, every rank opens the frames that it will
need. It checks the lengths of the files, and compares the header of each frame with the manifest.
So a damaged header makes all ranks fail together. Then each rank decodes boxes of shards: only the
chunks that a box overlaps, and each chunk is checked. A box whose elements are contiguous is
decoded straight into the tensor that asked for it. Any other box is decoded to a buffer and copied.
"""

from __future__ import annotations

import io
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.dcp.checkpoint_manifest import manifest_name, read_manifest
from packhorse.disk.dcp.open_frames import OpenFrames
from packhorse.disk.dcp.other_formats import explain_absence
from packhorse.disk.dcp.regions import Piece, cut_box, strides_of
from packhorse.disk.dcp.shards import StoredShard, torch_dtype
from packhorse.disk.dcp.values import check_value
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.frames.refs import FrameRef
from packhorse.storage.interface import Storage
from packhorse.storage.locations import is_location, open_storage
from packhorse.storage.strict_json import shown
from packhorse.threads import batches, map_tensors
from packhorse.torch_framework import FRAMEWORK

__all__ = ["PackhorseReader", "ReadStats"]


# The largest buffer for a box that is copied: many chunks, so that few chunks are decoded twice.
_MAX_RUN_NBYTES = 1 << 25


@dataclass(slots=True)
class ReadStats:
    """What one load has cost this rank.

    Attributes:
        n_frames: how many frames were opened.
        n_chunks: how many chunks were decoded.
        decoded_nbytes: bytes of tensors in the parts of chunks that were kept.
    """

    n_frames: int = 0
    n_chunks: int = 0
    decoded_nbytes: int = 0


class PackhorseReader(StorageReader):
    """A `StorageReader` of checkpoints that `PackhorseWriter` has written, for `dcp.load`.

    Attributes:
        stats: what the last load has cost this rank.

    Example:
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from packhorse.disk import PackhorseReader, PackhorseWriter
        >>> state = {"weight": torch.zeros(256, 256)}

        >>> saved = dcp.save(state, storage_writer=PackhorseWriter("run/step-100"))
        >>> reader = PackhorseReader("run/step-100", max_nbytes=1 << 30)
        >>> dcp.load(state, storage_reader=reader)
        >>> reader.stats.decoded_nbytes
        262144
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        threads: int | None = None,
        trusted: bool = False,
        max_nbytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            url: the folder or URL of the checkpoint.
            threads: how many threads each rank uses; None for the cores of its process, at most 8.
            trusted: hand values that are not tensors to the planner unchecked, though it may run
                code that is in them.
            max_nbytes: refuse a load for which one rank would have to decode more bytes; None for
                no limit. A small file may hold a large tensor of zeros.
            storage_options: options for fsspec's file system.

        Raises:
            ValueError, TypeError: bad threads.
        """
        super().__init__()
        resolve_threads(threads)
        self._url = os.fspath(url)
        self._threads = threads
        self._trusted = trusted
        self._max_nbytes = max_nbytes
        self._options = dict(storage_options or {})
        self._load_id = str(uuid.uuid4())
        self._shards: dict[Any, StoredShard] = {}
        self._frames: OpenFrames | None = None
        self.stats = ReadStats()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if one is given."""
        if checkpoint_id is not None:
            self._url = os.fspath(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._shards = {}
        self._frames = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the manifest.

        Args:
            args: not used.
            kwargs: `rank`, if each rank has saved a checkpoint of its own.

        Raises:
            CorruptionError, CompatibilityError: the manifest is damaged or too new, or there is a
                checkpoint of another format.
            FileNotFoundError: there is no checkpoint.
        """
        storage = self._storage()
        with explain_absence(storage):
            metadata = read_manifest(storage, manifest_name(kwargs.get("rank")))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata back from PyTorch, after the planner has seen it."""
        self._shards = metadata.storage_data
        self._frames = OpenFrames(self._storage())
        self.stats = ReadStats()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open and check all frames that this rank will need.

        Raises:
            CorruptionError, CompatibilityError: a file or a frame is not what the manifest says, or
                the frames would exceed `max_nbytes`.
        """
        self._open(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode everything that the plan asks for.

        Raises:
            CorruptionError: a chunk is damaged; the message names file, tensor and byte offset. The
                content of the tensor that was being read is then undefined.
            CompatibilityError: a value that is not a tensor might run code when it is loaded.
        """
        frames = self._open(plan.items)
        load = _Load(frames, self._shards, planner, resolve_threads(self._threads), self.stats)
        load.values(_of_type(plan.items, LoadItemType.BYTE_IO), trusted=self._trusted)
        load.tensors(_of_type(plan.items, LoadItemType.TENSOR))
        self._frames = None  # files need not stay open
        future: Future[None] = Future()
        future.set_result(None)
        return future

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

    def _open(self, items: Sequence[ReadItem]) -> OpenFrames:
        frames = self._frames or OpenFrames(self._storage())
        wanted = {}
        for item in items:
            shard = self._shards[item.storage_index]
            _check_item(item, shard)
            wanted[shard.frame] = item.storage_index.fqn
        self.stats.n_frames += frames.open(wanted)
        nbytes = frames.logical_nbytes(wanted)
        if self._max_nbytes is not None and nbytes > self._max_nbytes:
            raise CorruptionError(
                f"{self._url}: this load would decode {nbytes} bytes, more than max_nbytes = "
                f"{self._max_nbytes}"
            )
        self._frames = frames
        return frames


def _of_type(items: Iterable[ReadItem], kind: LoadItemType) -> list[ReadItem]:
    return [item for item in items if item.type == kind]


def _check_item(item: ReadItem, shard: StoredShard) -> None:
    """Check that a plan asks for a stored part of a shard."""
    is_tensor = item.type == LoadItemType.TENSOR
    fits = is_tensor != (shard.dtype is None)
    if fits and is_tensor:
        fits = len(shard.shape) == len(item.storage_offsets) and all(
            min(offset, length) >= 0 and offset + length <= size
            for offset, length, size in zip(
                item.storage_offsets, item.lengths, shard.shape, strict=True
            )
        )
    if not fits:
        raise ValueError(
            f"{item.storage_index.fqn!r}: the plan asks for shape {list(item.lengths)} at offsets "
            f"{list(item.storage_offsets)}, but the stored shard has shape {list(shard.shape)}"
        )


@dataclass(slots=True)
class _Use:
    """A piece of a shard, and the item of the plan that asks for it."""

    item: ReadItem
    shard: StoredShard
    piece: Piece


@dataclass(slots=True)
class _Run:
    """A range of bytes of one frame, decoded once for all pieces that need any of them."""

    ref: FrameRef
    start: int
    stop: int
    uses: list[_Use]
    memory: torch.Tensor | None = None  # of `nbytes`: the tensor that wants the run, or a buffer
    is_direct: bool = False

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def dst(self) -> ByteArray:
        """The bytes of the memory, to write to."""
        assert self.memory is not None
        return FRAMEWORK.writable(self.memory)


@dataclass(slots=True)
class _Load:
    """One rank's part of one load."""

    frames: OpenFrames
    shards: Mapping[Any, StoredShard]
    planner: LoadPlanner
    threads: int
    stats: ReadStats
    _targets: dict[int, torch.Tensor] = field(default_factory=dict)
    _bases: dict[FrameRef, ByteArray] = field(default_factory=dict)  # whole, for these runs

    def values(self, items: Sequence[ReadItem], *, trusted: bool) -> None:
        """Decode values that are not tensors, check all of them, and hand them to the planner."""
        refs = [self.shards[item.storage_index].frame for item in items]
        runs = [_Run(ref, 0, self.frames[ref].logical_nbytes, []) for ref in dict.fromkeys(refs)]
        for run in runs:
            run.memory = FRAMEWORK.empty("U8", (run.nbytes,))
        self._decode(runs)
        found = {run.ref: run.dst().tobytes() for run in runs}
        checked = [
            check_value(item.storage_index.fqn, found[ref], trusted=trusted)
            for item, ref in zip(items, refs, strict=True)
        ]
        for item, data in zip(items, checked, strict=True):
            self.planner.load_bytes(item, io.BytesIO(data))

    def tensors(self, items: Sequence[ReadItem]) -> None:
        """Decode boxes of tensors, in batches of bounded memory."""
        by_frame: dict[FrameRef, list[_Use]] = {}
        n_left: Counter[int] = Counter()
        for item in items:
            shard = self.shards[item.storage_index]
            uses = [_Use(item, shard, piece) for piece in self._pieces(item, shard)]
            n_left[id(item)] = len(uses)
            by_frame.setdefault(shard.frame, []).extend(uses)
            if not uses:  # the planner must hear of an empty tensor too
                self._commit(item)
        runs = [run for ref, uses in by_frame.items() for run in self._runs(ref, uses)]
        runs.sort(key=lambda run: (run.ref.pack, run.ref.offset, run.start))
        n_runs = Counter(ref for run in runs for ref in run.ref.chain)
        for batch in batches([self._cost(run) for run in runs]):
            part = runs[batch.start : batch.stop]
            self._take_memory(part)
            following = runs[batch.stop].ref.base if batch.stop < len(runs) else None
            self._decode(part, following)
            for use in self._copied(part):
                n_left[id(use.item)] -= 1
                if not n_left[id(use.item)]:
                    self._commit(use.item)
            n_runs.subtract(ref for run in part for ref in run.ref.chain)
            self.frames.drop(ref for run in part for ref in run.ref.chain if not n_runs[ref])
            self._bases = {ref: data for ref, data in self._bases.items() if ref == following}

    def _pieces(self, item: ReadItem, shard: StoredShard) -> list[Piece]:
        chunk_nbytes = self.frames[shard.frame].chunk_nbytes
        chunk_numel = -(-chunk_nbytes // _itemsize(shard))
        max_numel = _MAX_RUN_NBYTES // _itemsize(shard)
        return cut_box(shard.shape, item.storage_offsets, item.lengths, chunk_numel, max_numel)

    def _runs(self, ref: FrameRef, uses: list[_Use]) -> Iterator[_Run]:
        """The pieces of one frame as runs. Pieces that need the same chunk share a run."""
        chunk_nbytes = self.frames[ref].chunk_nbytes
        run: _Run | None = None
        # Tensors of different dtypes may have the same bytes, and then share a frame.
        for use in sorted(uses, key=lambda use: use.piece.start * _itemsize(use.shard)):
            itemsize = _itemsize(use.shard)
            start, stop = use.piece.start * itemsize, use.piece.stop * itemsize
            is_near = run is not None and start // chunk_nbytes <= (run.stop - 1) // chunk_nbytes
            if run is not None and is_near and stop - run.start <= _MAX_RUN_NBYTES:
                run.stop = max(run.stop, stop)
                run.uses.append(use)
                continue
            if run is not None:
                yield run
            run = _Run(ref, start, stop, [use])
        if run is not None:
            yield run

    def _take_memory(self, runs: Sequence[_Run]) -> None:
        """Choose where each run is decoded to: straight into the tensor if it wants all elements of
        the run, in their order, and no other run is decoded there; otherwise a buffer."""
        spans = []
        for k, run in enumerate(runs):
            use = run.uses[0]
            run.memory = target = self._target(use)
            run.is_direct = len(run.uses) == 1 and use.piece.is_run and _is_plain(target, use.shard)
            if run.is_direct and run.nbytes:
                spans.append((target.data_ptr(), k))
        end = 0
        for start, k in sorted(spans):  # tied weights may differ in the checkpoint
            runs[k].is_direct = start >= end
            if runs[k].is_direct:
                end = start + runs[k].nbytes
        for run in runs:
            if not run.is_direct:
                run.memory = FRAMEWORK.empty("U8", (run.nbytes,))

    def _decode(self, runs: Sequence[_Run], following: FrameRef | None = None) -> None:
        """Decode runs, and their bases first.

        Args:
            runs: the runs of the batch.
            following: the base that the next batch will need first; None for none.
        """
        todo, needed = self._split(runs, following)
        order = [base for base in needed if base not in self._bases]
        self.frames.fetch(
            [(run.ref, run.start, run.stop) for run in todo]
            + [(at, 0, self._nbytes(at)) for base in order for at in base.chain]
        )
        found = map_tensors(
            lambda i, threads: self.frames.whole(order[i], threads),
            [self._nbytes(base) for base in order],
            self.threads,
        )
        self._bases.update(zip(order, found, strict=True))
        rest = self._decode_whole(todo)

        def decode(i: int, threads: int) -> None:
            run = rest[i]
            base = None if run.ref.base is None else self._bases[run.ref.base]
            self.frames.decode(run.ref, run.dst(), run.start, run.stop, base=base, threads=threads)

        map_tensors(decode, [run.nbytes for run in rest], self.threads)
        for run in runs:
            if run.ref in needed:
                run.dst()[:] = self._bases[run.ref][run.start : run.stop]
        for run in todo:
            self._count(run.ref, run.start, run.stop)
        for base in order:
            for at in base.chain:
                self._count(at, 0, self._nbytes(at))

    def _decode_whole(self, runs: Sequence[_Run]) -> list[_Run]:
        """Decode the runs that are whole tensors and need no base in one call of the core, because
        a call for each takes longer than its tensor if that is short. Returns those that are
        left."""
        whole = [i for i, run in enumerate(runs) if self._is_whole(run)]
        views = FRAMEWORK.views([runs[i].memory for i in whole])
        left = self.frames.decode_whole([runs[i].ref for i in whole], views, self.threads)
        done = set(whole) - {whole[k] for k in left}
        return [run for i, run in enumerate(runs) if i not in done]

    def _is_whole(self, run: _Run) -> bool:
        return run.ref.base is None and run.nbytes == self._nbytes(run.ref)

    def _split(
        self, runs: Sequence[_Run], following: FrameRef | None
    ) -> tuple[list[_Run], dict[FrameRef, None]]:
        """Choose which runs are decoded on their own, and which frames are decoded as a whole
        because they are bases. A run of such a frame is copied from the base."""
        needed = dict.fromkeys(self._bases)
        if following is not None and any(run.ref == following for run in runs):
            needed[following] = None
        todo = []
        for run in sorted(runs, key=lambda run: -run.ref.n_deltas):  # deltas before their bases
            if run.ref in needed:
                continue
            todo.append(run)
            if run.ref.base is not None:
                needed[run.ref.base] = None
        return todo, needed

    def _nbytes(self, ref: FrameRef) -> int:
        return self.frames[ref].logical_nbytes

    def _cost(self, run: _Run) -> int:
        """Memory that decoding a run takes."""
        return run.nbytes + (0 if run.ref.base is None else 2 * self._nbytes(run.ref))

    def _count(self, ref: FrameRef, start: int, stop: int) -> None:
        if stop > start:
            chunk_nbytes = self.frames[ref].chunk_nbytes
            self.stats.n_chunks += (stop - 1) // chunk_nbytes - start // chunk_nbytes + 1
            self.stats.decoded_nbytes += stop - start

    def _copied(self, runs: Sequence[_Run]) -> Iterator[_Use]:
        """Copy buffers to their tensors, and yield each use that is complete."""
        direct = [run.memory for run in runs if run.is_direct and run.memory is not None]
        FRAMEWORK.mark_all_written(direct)
        for run in runs:
            for use in run.uses:
                if not run.is_direct:
                    self._target(use).copy_(_view(use, run))
                yield use
            run.memory = None

    def _target(self, use: _Use) -> torch.Tensor:
        """The part of a tensor that a piece goes to. The planner is asked once for each item."""
        key = id(use.item)
        if key not in self._targets:
            self._targets[key] = self._resolve(use.item)
        target = self._targets[key]
        if use.piece.lengths == target.shape:
            return target
        for axis, (offset, length) in enumerate(
            zip(use.piece.offsets, use.piece.lengths, strict=True)
        ):
            target = target.narrow(axis, offset, length)
        return target

    def _resolve(self, item: ReadItem) -> torch.Tensor:
        target = self.planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"{item.storage_index.fqn!r}: the planner gave a tensor of shape "
                f"{list(target.shape)} for a part of shape {list(item.lengths)}"
            )
        return target

    def _commit(self, item: ReadItem) -> None:
        target = self._targets.pop(id(item), None)
        self.planner.commit_tensor(item, self._resolve(item) if target is None else target)


def _itemsize(shard: StoredShard) -> int:
    return _dtype_of(shard).itemsize


def _dtype_of(shard: StoredShard) -> torch.dtype:
    dtype = torch_dtype(shard.dtype)
    if dtype is None:
        raise CompatibilityError(f"this PyTorch does not have dtype {shown(shard.dtype)}")
    return dtype


def _is_plain(target: torch.Tensor, shard: StoredShard) -> bool:
    """Whether the bytes of a shard can be decoded straight into a tensor."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and target.dtype == _dtype_of(shard)
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _view(use: _Use, run: _Run) -> torch.Tensor:
    """A piece as a tensor, which shares the memory of its run."""
    dtype = _dtype_of(use.shard)
    first = use.piece.start - run.start // dtype.itemsize
    assert run.memory is not None
    flat = run.memory.view(dtype)
    return flat.as_strided(use.piece.lengths, strides_of(use.shard.shape), first)
