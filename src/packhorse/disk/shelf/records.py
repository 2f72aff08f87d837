"""The records of a shelf in LMDB (docs/shelf.md, "What lies in the folder").

All keys order as their numbers do, because numbers in keys are big-endian. A version of a record is
found by its *epoch*: each tag ends an epoch, and the state of a tag has, of each record, the newest
version that is not newer than the tag's epoch. Records of the current epoch are overwritten.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from packhorse import _core
from packhorse.codecs.content import crc32c
from packhorse.disk.shelf.grid import Grid
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.documents import Document, compact_json, read_checksum, sign
from packhorse.storage.strict_json import check_text, shortened

__all__ = [
    "BASES",
    "CHUNK_KEY",
    "COUNT",
    "EPOCH",
    "HEAD_KEY",
    "MAX_EPOCH",
    "NO_CHUNK",
    "POINTER_KEY",
    "ChunkRecord",
    "Entry",
    "Head",
    "Pointer",
    "StateRecord",
    "TensorRecord",
    "base_of",
    "check_name",
    "chunk_value",
    "entry_key",
    "entry_value",
    "name_of",
    "parse_chunk",
    "parse_entry",
    "parse_pointer",
    "parse_tag",
    "pointer_value",
    "tag_value",
    "tensors_of",
]

HEAD_KEY = b"head"
_VERSION = 1
_MAGIC = b"PHSHELF\0"
_HEAD = struct.Struct(
    "<8sHHIQQQI"
)  # magic, version, moved, epoch, next tensor, next chunk, commits
POINTER_KEY = struct.Struct(">QQI")  # tensor, chunk of the tensor, epoch
_POINTER = struct.Struct("<QI4sI")  # chunk, bytes of its frame, start of its content hash, CRC
CHUNK_KEY = struct.Struct(">Q")
_OWNER = struct.Struct("<Q")  # the chunk that a stored chunk needs, in front of its frame
_IS_PATCH = 1 << 63  # in the same number
_N_PLACES = struct.Struct("<II")  # rows of a patch, and the CRC of their places
COUNT = struct.Struct("<Q")
EPOCH = struct.Struct(">I")
MAX_EPOCH = (1 << 32) - 2
_MAX_NAME_NBYTES = 400  # LMDB's keys have at most 511 bytes
BASES = (None, "previous")


@dataclass(frozen=True, slots=True)
class Head:
    """What a shelf knows of itself.

    Attributes:
        epoch: the current epoch.
        next_tensor: the number of the next tensor.
        next_chunk: the number of the next chunk; chunks from here on are of no commit.
        n_commits: how many commits there were.
        has_moved: whether `compact` has put a newer file in the place of this one.
    """

    epoch: int = 1
    next_tensor: int = 1
    next_chunk: int = 1
    n_commits: int = 0
    has_moved: bool = False

    def to_bytes(self) -> bytes:
        """The record."""
        body = _HEAD.pack(
            _MAGIC, _VERSION, self.has_moved, self.epoch, self.next_tensor, self.next_chunk,
            self.n_commits, 0,
        )[:-4]  # fmt: skip
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def parse(cls, data: bytes | None, label: str) -> Head:
        """Read the record.

        Raises:
            CorruptionError: it is damaged, or the file is not a shelf.
            CompatibilityError: a later release wrote it.
        """
        if data is None or data[:8] != _MAGIC:
            raise CorruptionError(f"{label}: this LMDB file is not a shelf; it has no head record")
        version = int.from_bytes(data[8:10], "little")
        if version > _VERSION:
            raise CompatibilityError(
                f"{label}: a shelf of version {version}; this release reads version {_VERSION}; "
                "upgrade packhorse"
            )
        if len(data) != _HEAD.size or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptionError(f"{label}: the head record is damaged: its checksum differs")
        _, _, moved, epoch, tensor, chunk, commits, _ = _HEAD.unpack(data)
        return cls(epoch, tensor, chunk, commits, bool(moved))


class Pointer(NamedTuple):
    """Where the content of a tensor's chunk is.

    Attributes:
        chunk: the number of the stored chunk; 0 if all elements are zero.
        nbytes: the length of its frame; for a patch, with that of the chunk that it needs.
        check: the first bytes of its content hash.
    """

    chunk: int
    nbytes: int
    check: bytes


NO_CHUNK = Pointer(0, 0, bytes(4))


def pointer_value(key: bytes, pointer: Pointer) -> bytes:
    """The record of a pointer; its checksum covers the key, too."""
    body = _POINTER.pack(*pointer, 0)[:-4]
    return body + struct.pack("<I", crc32c(key[:16] + body))


def parse_pointer(key: bytes, data: bytes, label: str) -> Pointer:
    """Read the record of a pointer.

    Raises:
        CorruptionError: its checksum does not match.
    """
    if len(data) == _POINTER.size:
        chunk, nbytes, check, crc = _POINTER.unpack(data)
        if _core.crc32c(key[:16] + data[:-4]) == crc:  # of many, so by the core itself
            return Pointer(chunk, nbytes, check)
    raise CorruptionError(f"{label}: the pointer of chunk {key[8:16].hex()} is damaged")


class ChunkRecord(NamedTuple):
    """A stored chunk.

    Attributes:
        base: the number of the stored chunk that it needs; 0 for none.
        places: None if the frame has all rows of the chunk, perhaps as a delta against the base.
            Otherwise it is a *patch*: the frame has some rows, which take these places in the base.
        frame: the bytes of the frame, or a view of them.
    """

    base: int
    places: tuple[int, ...] | None
    frame: Any


def chunk_value(record: ChunkRecord) -> bytes:
    """The record of a stored chunk."""
    if record.places is None:
        return b"".join((_OWNER.pack(record.base), record.frame))
    places = struct.pack(f"<{len(record.places)}I", *record.places)
    header = _N_PLACES.pack(len(record.places), crc32c(places))
    return b"".join((_OWNER.pack(record.base | _IS_PATCH), header, places, record.frame))


def parse_chunk(value: Any, label: str) -> ChunkRecord:
    """Read the record of a stored chunk; its frame stays a view.

    Raises:
        CorruptionError: it is too short, or the places of a patch are damaged.
    """
    start = _OWNER.size
    if len(value) < start:
        raise CorruptionError(f"{label}: it has {len(value)} bytes")
    owner = _OWNER.unpack_from(value)[0]
    if not owner & _IS_PATCH:
        return ChunkRecord(owner, None, value[start:])
    if len(value) >= start + _N_PLACES.size:
        n, crc = _N_PLACES.unpack_from(value, start)
        at = start + _N_PLACES.size
        places = bytes(value[at : at + 4 * n])
        if len(places) == 4 * n and n and crc32c(places) == crc:
            return ChunkRecord(
                owner & ~_IS_PATCH, struct.unpack(f"<{n}I", places), value[at + 4 * n :]
            )
    raise CorruptionError(f"{label}: the places of its rows are damaged")


def base_of(value: Any) -> int:
    """The number of the stored chunk that another one needs, from its record; 0 for none."""
    return int(_OWNER.unpack_from(value)[0]) & ~_IS_PATCH if len(value) >= _OWNER.size else 0


@lru_cache(256)
def _grid_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Grid:
    return Grid(shape, chunk)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The catalogue's entry of a tensor.

    Attributes:
        id: its number, which no other tensor ever gets.
        dtype: safetensors' name of the dtype.
        shape: its shape.
        chunk: the shape of a chunk.
        base: "previous" if rows are coded against a keyframe row; None for no bases.
        keyframe_every: every so many rows are coded without a base.
        packed_nbytes: the bytes of the frames of all its chunks, by its pointers.
        serial: the number of the commit that changed it last.
    """

    id: int
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    base: str | None = None
    keyframe_every: int = 16
    packed_nbytes: int = 0
    serial: int = 0

    @property
    def grid(self) -> Grid:
        """How the tensor is cut."""
        return _grid_of(self.shape, self.chunk)

    def with_rows(self, n_rows: int) -> TensorRecord:
        """The record with another number of rows."""
        return replace(self, shape=(n_rows, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The catalogue's entry of a nested state.

    Attributes:
        state: the document of `packhorse.disk.state.encode_state`.
        tensors: its tensors, in order.
    """

    state: Any
    tensors: tuple[TensorRecord, ...]


Entry: TypeAlias = TensorRecord | StateRecord


def tensors_of(entry: Entry | None) -> tuple[TensorRecord, ...]:
    """The tensors of an entry."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, TensorRecord) else entry.tensors


def _tensor_document(record: TensorRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "chunk": list(record.chunk),
        "base": record.base,
        "keyframe_every": record.keyframe_every,
        "packed_nbytes": record.packed_nbytes,
        "serial": record.serial,
    }


def entry_value(entry: Entry) -> bytes:
    """An entry of the catalogue, as a signed document."""
    if isinstance(entry, TensorRecord):
        return sign({"kind": "tensor", **_tensor_document(entry)})
    tensors = [_tensor_document(record) for record in entry.tensors]
    return sign({"kind": "state", "state": entry.state, "tensors": tensors})


def parse_entry(data: bytes, label: str) -> Entry:
    """Read an entry of the catalogue.

    Raises:
        CorruptionError: the entry is damaged.
        CompatibilityError: a later release wrote it.
    """
    read_checksum(data, label)
    document = Document(data, label)
    kind = document.get("kind")
    if kind == "tensor":
        return _parse_tensor(document)
    if kind == "state":
        tensors = document.field("tensors", list)
        parts = (Document(compact_json(tensor), label) for tensor in tensors)
        return StateRecord(document.require("state"), tuple(map(_parse_tensor, parts)))
    raise CompatibilityError(f"{label}: an entry of an unknown kind; upgrade packhorse")


def _parse_tensor(document: Document) -> TensorRecord:
    shape = document.shape(document.get("shape"), "shape")
    chunk = document.shape(document.get("chunk"), "chunk")
    base = document.get("base")
    if len(shape) != len(chunk) or 0 in chunk:
        raise document.fail(f"a chunk of shape {list(chunk)} does not fit shape {list(shape)}")
    if base not in BASES:
        raise CompatibilityError(f"{document.label}: base {base!r} is unknown; upgrade packhorse")
    return TensorRecord(
        document.count("id"), document.dtype(document.get("dtype"), "dtype"), shape, chunk, base,
        max(1, document.count("keyframe_every")), document.count("packed_nbytes"),
        document.count("serial"),
    )  # fmt: skip


def check_name(name: object, what: str = "a tensor") -> str:
    """Check a name that a caller gives.

    Raises:
        TypeError: it is not a string.
        ValueError: it is empty or too long, or has characters that cannot be stored.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of {what} is a string, not {type(name).__name__}")
    check_text(name)
    if not name or "\0" in name or len(name.encode()) > _MAX_NAME_NBYTES:
        raise ValueError(
            f"{shortened(name)!r}: the name of {what} has 1 to {_MAX_NAME_NBYTES} bytes in UTF-8 "
            "and no NUL"
        )
    return name


def entry_key(name: str, epoch: int) -> bytes:
    """The key of an entry of the catalogue."""
    return name.encode() + b"\0" + EPOCH.pack(epoch)


def name_of(key: bytes) -> str:
    """The name in the key of an entry."""
    return bytes(key[:-5]).decode()


def tag_value(epoch: int, time: str, commit: int) -> bytes:
    """The record of a tag."""
    return sign({"epoch": epoch, "time": time, "commit": commit})


def parse_tag(data: bytes, label: str) -> tuple[int, str, int]:
    """Read the record of a tag: its epoch, its time and the number of its commit.

    Raises:
        CorruptionError: it is damaged.
    """
    read_checksum(data, label)
    document = Document(data, label)
    return document.count("epoch"), document.field("time", str), document.count("commit")
