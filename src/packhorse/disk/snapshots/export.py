"""Writes a snapshot as a safetensors file, plain or packed.

Each tensor is stored under its path. Everything else in the state goes into the file's metadata, as
JSON under one key. Each pair of the snapshot's own metadata goes there under its own key. Tensors
are decoded batch by batch, so the state is never in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.codecs.base import ByteArray
from packhorse.disk.container import write_packed
from packhorse.disk.results import Progress
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.manifest import Manifest, TensorRef
from packhorse.disk.snapshots.restore import check_limit, read_newest
from packhorse.disk.snapshots.results import RestoredFile
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.disk.state import Keys, list_state
from packhorse.errors import blaming
from packhorse.layout import FILE_METADATA_KEY, FILE_SUFFIX, Level
from packhorse.storage.frames.frame_store import FrameStore
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.interface import Storage
from packhorse.storage.locations import Place, check_output, writing
from packhorse.storage.safetensors_header import FileHeader, build_header
from packhorse.storage.strict_json import shortened
from packhorse.threads import batches, map_tensors

__all__ = ["VALUES_KEY", "Exporting", "export_snapshot"]

VALUES_KEY = "packhorse.values"  # in the metadata: all values that are not tensors, by path


@dataclass(frozen=True, slots=True)
class Exporting:
    """What is to be written, and how.

    Attributes:
        keys: which parts; None for all.
        level: the level of a packed file.
        threads: how many threads to use.
        force: whether an existing file may be replaced.
        max_nbytes: the most bytes that the tensors may have together; None for no limit.
        progress: called with the logical bytes done since the last call.
    """

    keys: Keys | None
    level: Level
    threads: int
    force: bool
    max_nbytes: int | None
    progress: Progress | None


def export_snapshot(
    storage: Storage, catalog: Catalog, name: str, target: Place, wanted: Exporting
) -> RestoredFile:
    """Write a snapshot to a file, which is packed if its name ends in `.ph.safetensors`.

    Raises:
        ValueError, OSError, CorruptionError, CompatibilityError: as for
            `SnapshotStore.restore_file`.
    """
    check_output(target, force=wanted.force)
    return read_newest(catalog, [name], lambda manifest: _export(storage, manifest, target, wanted))


def _export(storage: Storage, manifest: Manifest, target: Place, wanted: Exporting) -> RestoredFile:
    label = f"snapshot {manifest.file.snapshot!r}"
    with blaming(label, (ValueError,)):
        chosen, header = _lay_out(manifest, wanted.keys)
    check_limit(list(chosen.values()), manifest.file.snapshot, wanted.max_nbytes)
    refs = [chosen[entry.name] for entry in header.entries]
    with SnapshotFrames(storage) as store, blaming(label):
        buffers = _decoded(store, refs, wanted.threads)
        file_nbytes = _write(target, header, buffers, wanted)
    return RestoredFile(target, len(refs), header.data_nbytes, file_nbytes)


def _write(
    target: Place, header: FileHeader, buffers: Iterator[ByteArray], wanted: Exporting
) -> int:
    """Write the file, and return its size."""
    if target.name.endswith(FILE_SUFFIX):
        packed_nbytes, _ = write_packed(
            target, header, buffers, level=wanted.level, threads=wanted.threads,
            progress=wanted.progress, force=wanted.force,
        )  # fmt: skip
        return packed_nbytes
    with writing(target, force=wanted.force) as output:
        output.write(header.prefix())
        for data in buffers:
            output.write(data)
            if wanted.progress is not None:
                wanted.progress(data.size)
    return header.file_nbytes


def _lay_out(manifest: Manifest, keys: Keys | None) -> tuple[dict[str, TensorRef], FileHeader]:
    """The wanted tensors by path, and the header of a file that holds them."""
    indices, values = list_state(manifest.state, keys)
    chosen: dict[str, TensorRef] = {}
    for index in indices:
        ref = manifest.tensors[index]
        if chosen.setdefault(ref.path, ref) is not ref:
            raise ValueError(
                f"two tensors have the path {shortened(ref.path)!r}, but names in a file must be "
                "unique; restore the snapshot in Python"
            )
    described = {path: (ref.dtype, ref.shape) for path, ref in chosen.items()}
    return chosen, build_header(described, _metadata(manifest.metadata, values))


def _metadata(given: dict[str, Any], values: dict[str, Any]) -> dict[str, str] | None:
    """The metadata of the file: the snapshot's own, and the values of the state."""
    for key in (FILE_METADATA_KEY, *((VALUES_KEY,) if values else ())):
        if key in given:
            raise ValueError(f"its metadata has the key {key!r}, which is reserved in files")
    pairs = {key: value if isinstance(value, str) else _json(value) for key, value in given.items()}
    if values:
        pairs[VALUES_KEY] = _json(values)
    return pairs or None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _decoded(store: FrameStore, refs: Sequence[TensorRef], threads: int) -> Iterator[ByteArray]:
    """The bytes of each tensor, in order."""
    sizes = [ref.frame.logical_nbytes for ref in refs]
    scratch = Scratch()
    for run in batches(sizes):
        part = refs[run.start : run.stop]
        yield from map_tensors(
            lambda k, n, part=part: _decode(store, part[k], n, scratch),  # type: ignore[misc]
            sizes[run.start : run.stop],
            threads,
        )


def _decode(store: FrameStore, ref: TensorRef, threads: int, scratch: Scratch) -> ByteArray:
    return store.chain(ref.frame, ref.path).decode(threads, scratch)
