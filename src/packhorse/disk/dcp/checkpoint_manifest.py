"""The manifest, the one file that turns pack files into a checkpoint. JSON, with its own checksum.

The file is `{"crc32c":"xxxxxxxx","manifest":{...}}` and a line break. So it is JSON as a whole, and
the checksum comes before the bytes that it covers, those of the inner object. That object holds
PyTorch's `Metadata`, a table of files, a table of frames, and the frame of each shard. A delta
names its base by an index into the table of frames. The base must come before the delta, so chains
end. It is in the same checkpoint if it is the master of a rounded copy.

Nothing in the manifest is a pickle. It can hold everything that PyTorch's own planners write. If
another planner adds anything else, the save fails.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from packhorse.codecs.content import crc32c
from packhorse.disk.dcp.pack_files import is_pack_name
from packhorse.disk.dcp.shards import (
    StoredShard,
    dtype_name,
    frame_kind,
    torch_dtype,
)
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import MAX_BITS
from packhorse.storage.documents import Document, compact_json
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Storage
from packhorse.storage.strict_json import check_text, shown

__all__ = [
    "MAX_DELTAS",
    "is_rank_manifest",
    "manifest_name",
    "parse_manifest",
    "read_manifest",
    "render_manifest",
]

MAX_DELTAS = 8  # the most frames that are decoded before the wanted one
_MAX_NBYTES = 1 << 30
_MAX_LIST = 1 << 24  # members of a list, which PyTorch fills up to the highest index in a path
_VERSION = 1
_FORMAT = "packhorse.dcp"
_HEAD = b'{"crc32c":"%08x","manifest":'
_TAIL = b"}\n"
_HEAD_NBYTES = len(_HEAD % 0)
_RANK_MANIFEST = re.compile(r"packhorse-\d+\.json")
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


def manifest_name(rank: int | None = None) -> str:
    """The name of a manifest's file.

    Args:
        rank: the rank whose own checkpoint it is; None for a checkpoint of all ranks.
    """
    return "packhorse.json" if rank is None else f"packhorse-{rank}.json"


def is_rank_manifest(name: str) -> bool:
    """Whether a file is the manifest of one rank's own checkpoint."""
    return _RANK_MANIFEST.fullmatch(name) is not None


def render_manifest(metadata: Metadata) -> bytes:
    """The bytes of a manifest's file.

    Args:
        metadata: PyTorch's metadata; `storage_data` has a `StoredShard` for each index.

    Raises:
        TypeError: a planner added something that a manifest cannot hold.
        ValueError: a name is not Unicode text, or a shard of a tensor was not written.
    """
    body = compact_json(_document(metadata))
    return _HEAD % crc32c(body) + body + _TAIL


def _document(metadata: Metadata) -> dict[str, Any]:
    tables = _Tables()
    shards = [
        {
            "fqn": _text(index.fqn),
            "offsets": None if index.offset is None else list(index.offset),
            "dtype": shard.dtype,
            "shape": list(shard.shape),
            "frame": tables.place_of(shard.frame),
        }
        for index, shard in metadata.storage_data.items()
    ]
    stored = {(index.fqn, index.offset) for index in metadata.storage_data}
    for fqn, offsets in _wanted(metadata):
        if (fqn, offsets) not in stored:
            raise ValueError(f"no rank has written the shard of {fqn!r} at offsets {offsets}")
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "state_dict": {
            fqn: _render_entry(fqn, entry) for fqn, entry in metadata.state_dict_metadata.items()
        },
        "planner_data": _render_planner_data(metadata.planner_data),
        "storage_meta": _render_storage_meta(metadata.storage_meta),
        "dcp_version": metadata.version,
        "files": [{"path": _text(path), "nbytes": nbytes} for path, nbytes in tables.files],
        "frames": tables.frames,
        "shards": shards,
    }


class _Tables:
    """The tables of files and frames, without duplicates."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, int], int] = {}
        self.frames: list[dict[str, Any]] = []
        self._places: dict[FrameRef, int] = {}

    def place_of(self, ref: FrameRef) -> int:
        if ref not in self._places:
            base = None if ref.base is None else self.place_of(ref.base)
            self.frames.append(
                {
                    "file": self.files.setdefault((ref.pack, ref.pack_nbytes), len(self.files)),
                    "offset": ref.offset,
                    "nbytes": ref.nbytes,
                    "content_hash": ref.content.digest.hex(),
                    "dtype": ref.content.dtype,
                    "shape": list(ref.content.shape or ()),
                    "base": base,
                }
            )
            self._places[ref] = len(self.frames) - 1
        return self._places[ref]


def _wanted(metadata: Metadata) -> Iterator[tuple[str, torch.Size | None]]:
    """The shards that the metadata lists: names and offsets."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield fqn, None
        else:
            yield from ((fqn, chunk.offsets) for chunk in entry.chunks)


def _text(value: str) -> str:
    check_text(value)
    return value


def _render_entry(fqn: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> dict[str, Any]:
    _text(fqn)
    if isinstance(entry, BytesStorageMetadata):
        return {"kind": "bytes"}
    properties = entry.properties
    layouts = {value: name for name, value in _LAYOUTS.items()}
    formats = {value: name for name, value in _MEMORY_FORMATS.items()}
    if properties.layout not in layouts or properties.memory_format not in formats:
        raise TypeError(
            f"{fqn!r} has layout {properties.layout} and {properties.memory_format}; only dense "
            "tensors can be stored"
        )
    return {
        "kind": "tensor",
        "dtype": dtype_name(properties.dtype),
        "layout": layouts[properties.layout],
        "requires_grad": properties.requires_grad,
        "memory_format": formats[properties.memory_format],
        "pin_memory": properties.pin_memory,
        "size": list(entry.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
    }


def _render_planner_data(data: Any) -> dict[str, list[str | int]] | None:
    """The path in the state dict for each flat name, which is what PyTorch's planners keep."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise TypeError(
            f"planner_data is a {type(data).__name__}; a manifest can only hold a dict of paths"
        )
    for key, path in data.items():
        parts = path if isinstance(path, tuple) else ()
        if type(key) is not str or not parts or any(type(part) not in (str, int) for part in parts):
            raise TypeError(
                f"planner_data[{key!r}] is {path!r}; a manifest can only hold strings as keys, and "
                "tuples of strings and integers as values"
            )
        for text in (key, *parts):
            check_text(str(text))
    return {key: list(path) for key, path in data.items()}


def _render_storage_meta(meta: StorageMeta | None) -> dict[str, Any] | None:
    if meta is None:
        return None
    where = None if meta.checkpoint_id is None else _text(str(meta.checkpoint_id))
    return {"checkpoint_id": where, "save_id": meta.save_id, "modules": list(meta.modules)}


def read_manifest(storage: Storage, name: str) -> Metadata:
    """Read the manifest of this name, and check all of it.

    Raises:
        CorruptionError, CompatibilityError: as for `parse_manifest`.
        FileNotFoundError: there is no such manifest.
    """
    return parse_manifest(storage.read(name, _MAX_NBYTES), storage.label(name))


def parse_manifest(data: bytes, label: str) -> Metadata:
    """Parse a manifest, and check all of it.

    Args:
        data: all bytes of the file.
        label: what messages call the manifest.

    Returns:
        PyTorch's metadata; `storage_data` has a `StoredShard` for each index.

    Raises:
        CorruptionError: the checksum does not match, or a rule of docs/dcp.md is broken.
        CompatibilityError: the manifest has a newer version, or a dtype that this PyTorch does not
            have.
    """
    body = data[_HEAD_NBYTES : -len(_TAIL)]
    if not data.endswith(_TAIL) or data[:_HEAD_NBYTES] != _HEAD % crc32c(body):
        raise CorruptionError(
            f"{label}: damaged: the checksum does not match the {len(data)} bytes, or it is not a "
            "checkpoint's manifest; get it again, or use an older checkpoint"
        )
    document = Document(body, label, _HEAD_NBYTES)
    document.check_kind("format", _FORMAT, _VERSION)
    try:
        return _Parser(document).metadata()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptionError(f"{label}: {type(error).__name__}: {shown(str(error))}") from error


@dataclass(frozen=True, slots=True)
class _Parser:
    """Takes the document apart. A part with the wrong structure raises one of the errors that
    `parse_manifest` turns into a `CorruptionError`."""

    document: Document

    def metadata(self) -> Metadata:
        get = self.document.require
        frames = self._frames(get("frames"), self._files(get("files")))
        state = {fqn: self._entry(fqn, entry) for fqn, entry in get("state_dict").items()}
        shards = dict(self._shard(row, frames) for row in get("shards"))
        metadata = Metadata(
            state,
            _planner_data(get("planner_data")),
            shards,
            _storage_meta(get("storage_meta")),
            _string_or_none(get("dcp_version")),
        )
        self._check_complete(metadata)
        return metadata

    def _files(self, rows: list[Any]) -> list[tuple[str, int]]:
        return [(_path(row["path"]), self._size(row["nbytes"], "a file")) for row in rows]

    def _frames(self, rows: list[Any], files: list[tuple[str, int]]) -> list[FrameRef]:
        frames: list[FrameRef] = []
        for i, row in enumerate(rows):
            frames.append(self._frame(row, f"frame {i}", files, frames))
        return frames

    def _frame(
        self, row: Any, where: str, files: list[tuple[str, int]], frames: list[FrameRef]
    ) -> FrameRef:
        shape, dtype = self._shape(row["shape"], where), self.document.dtype(row["dtype"], where)
        digest = self.document.digest(row["content_hash"], where)
        content = Content(digest, dtype, math.prod(shape), shape)
        base = None if row["base"] is None else frames[self._size(row["base"], where)]
        n_deltas = 0 if base is None else base.n_deltas + 1
        pack, pack_nbytes = files[self._size(row["file"], where)]
        offset, nbytes = self._size(row["offset"], where), self._size(row["nbytes"], where)
        if offset + nbytes > pack_nbytes:
            raise ValueError(f"{where} ends after the end of its file {pack!r}")
        if base is not None and not _may_build_upon(content, base.content):
            raise ValueError(f"{where} has a base of another dtype or shape")
        if n_deltas > MAX_DELTAS:
            raise ValueError(f"{where} has a chain of more than {MAX_DELTAS} deltas")
        return FrameRef(pack, offset, nbytes, content, base, n_deltas, pack_nbytes)

    def _size(self, value: Any, where: str) -> int:
        return self.document.integer(value, 0, MAX_BITS - 1, where)

    def _shape(self, value: Any, where: str) -> tuple[int, ...]:
        return self.document.shape(value, where)

    def _shard(
        self, row: dict[str, Any], frames: list[FrameRef]
    ) -> tuple[MetadataIndex, StoredShard]:
        name, fqn = row["dtype"], _string(row["fqn"])
        dtype = None if name is None else self._dtype(name, fqn)
        where = f"a shard of {shown(fqn)}"
        frame = frames[self._size(row["frame"], where)]
        shard = StoredShard(name, self._shape(row["shape"], where), frame)
        if frame_kind(dtype, shard.shape) != (shard.frame.content.dtype, shard.frame.content.shape):
            raise ValueError(f"the frame of a shard of {shown(fqn)} has another dtype or shape")
        offsets = None if row["offsets"] is None else self._shape(row["offsets"], where)
        return MetadataIndex(fqn, offsets), shard

    def _dtype(self, name: Any, fqn: str) -> torch.dtype:
        dtype = torch_dtype(name)
        if dtype is None:
            raise CompatibilityError(
                f"{self.document.label}: {shown(fqn)} has dtype {shown(name)}, which this PyTorch "
                f"({torch.__version__}) does not have"
            )
        return dtype

    def _entry(self, fqn: str, row: dict[str, Any]) -> TensorStorageMetadata | BytesStorageMetadata:
        if row["kind"] == "bytes":
            return BytesStorageMetadata()
        if row["kind"] != "tensor":
            raise ValueError(
                f"{shown(fqn)} is of kind {shown(row['kind'])}; 'tensor' and 'bytes' are allowed"
            )
        label = shown(fqn)
        size = self._shape(row["size"], label)
        chunks = []
        for first, second in row["chunks"]:
            offsets, sizes = self._shape(first, label), self._shape(second, label)
            is_whole = sizes == size and not any(offsets) and len(offsets) == len(size)
            if not is_whole and not _is_inside(offsets, sizes, size):
                raise ValueError(f"a shard of {label} extends beyond the tensor")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties(
            self._dtype(row["dtype"], fqn),
            _LAYOUTS[row["layout"]],
            bool(row["requires_grad"]),
            _MEMORY_FORMATS[row["memory_format"]],
            bool(row["pin_memory"]),
        )
        return TensorStorageMetadata(properties, torch.Size(size), chunks)

    def _check_complete(self, metadata: Metadata) -> None:
        """Check that every shard is there, and has the size that the metadata gives."""
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self._check_shard(metadata, MetadataIndex(fqn), None)
                continue
            for chunk in entry.chunks:
                self._check_shard(metadata, MetadataIndex(fqn, chunk.offsets), chunk.sizes)

    def _check_shard(
        self, metadata: Metadata, index: MetadataIndex, sizes: torch.Size | None
    ) -> None:
        shard = metadata.storage_data.get(index)
        if shard is None or (shard.dtype is None) != (sizes is None):
            raise ValueError(f"no shard of {shown(index.fqn)} is stored at offsets {index.offset}")
        if sizes is not None and shard.shape != tuple(sizes):
            raise ValueError(
                f"the shard of {shown(index.fqn)} at offsets {index.offset} has shape "
                f"{list(shard.shape)}, not {list(sizes)}"
            )


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a box lies inside a tensor, and has as many dimensions."""
    if not len(offsets) == len(sizes) == len(size):
        return False
    return all(o + n <= s for o, n, s in zip(offsets, sizes, size, strict=True))


def _may_build_upon(content: Content, base: Content) -> bool:
    """Whether a base has the same shape, and the same dtype or the wider one of a master."""
    is_cast = base.dtype == "F32" and content.dtype in ("BF16", "F16")
    return content.shape == base.shape and (is_cast or content.dtype == base.dtype)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a string")
    return value


def _string_or_none(value: Any) -> str | None:
    return None if value is None else _string(value)


def _path(value: Any) -> str:
    path = _string(value)
    is_relative = not path.startswith("/") and "://" not in path
    is_plain = posixpath.normpath(path) == path
    if not is_relative or not is_plain or not is_pack_name(posixpath.basename(path)):
        raise ValueError(f"{shown(path)} is not the relative path of a pack file")
    return path


def _planner_data(data: Any) -> dict[str, tuple[str | int, ...]] | None:
    if data is None:
        return None
    for path in data.values():
        if not path or any(type(part) not in (str, int) for part in path):
            raise ValueError(f"planner_data has {shown(path)}, not a path of strings and integers")
        if any(type(part) is int and not 0 <= part < _MAX_LIST for part in path):
            raise ValueError(f"planner_data has {shown(path)}; an index must be below {_MAX_LIST}")
    return {key: tuple(path) for key, path in data.items()}


def _storage_meta(row: dict[str, Any] | None) -> StorageMeta:
    if row is None:
        return StorageMeta()
    modules = [_string(name) for name in row["modules"]]
    return StorageMeta(
        _string_or_none(row["checkpoint_id"]), _string_or_none(row["save_id"]), modules=modules
    )
