"""The records of a shelf in LMDB (docs/shelf.md, "What lies in the folder").

All keys order as their numbers do, because numbers in keys are big-endian. A version of a record is
found by its *epoch*: each tag ends an epoch, and the state of a tag has, of each record, the newest
version that is not newer than the tag's epoch. Records of the current epoch are overwritten.

LMDB's pages have no checksums, but our records have, and these cover the keys, too. So a record
whose key was damaged is not taken for another one. It is missed where it should be, though, it may
lead a search astray, and a pointer that is missing means a chunk of zeros. So whoever misses
a record looks at those beside its place.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from packhorse import _core  # there are many records, so their checksums take no detour
from packhorse.disk.shelf.grid import Grid
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.documents import CRC_END, Document, compact_json, read_checksum, sign
from packhorse.storage.strict_json import check_text, shortened

__all__ = [
    "BASES",
    "CHUNK_HEAD_NBYTES",
    "CHUNK_KEY",
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
    "check_name",
    "chunk_value",
    "entry_key",
    "entry_value",
    "has_key",
    "identity_of",
    "is_lost_entry",
    "is_lost_pointer",
    "is_pointer",
    "is_removed",
    "name_of_tag",
    "parse_chunk",
    "parse_entry",
    "parse_pointer",
    "parse_tag",
    "parse_uses",
    "pointer_place",
    "pointer_value",
    "tag_value",
    "tensors_of",
    "uses_value",
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
_CHUNK = struct.Struct("<QII")  # the chunk that it needs, rows of a patch, CRC; then the places
CHUNK_HEAD_NBYTES = _CHUNK.size  # what is in front of the frame of a chunk that is no patch
_BEFORE = struct.Struct("<QQI")  # what that CRC covers: the number of the chunk, and these two
_USES = struct.Struct("<QI")  # uses, CRC
EPOCH = struct.Struct(">I")
MAX_EPOCH = (1 << 32) - 2
_NAME_END = 5  # a zero byte and the epoch
_MAX_NAME_NBYTES = 400  # LMDB's keys have at most 511 bytes
BASES = (None, "previous")
_REMOVED = "removed"
_END_OF_REMOVED = b'"kind":"removed"}'


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
        return body + struct.pack("<I", _core.crc32c(body))

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
        if len(data) != _HEAD.size or _core.crc32c(data[:-4]) != int.from_bytes(
            data[-4:], "little"
        ):
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
    """The record of a pointer."""
    body = _POINTER.pack(*pointer, 0)[:-4]
    return body + _core.crc32c(key + body).to_bytes(4, "little")


def parse_pointer(key: bytes, data: bytes, label: str) -> Pointer:
    """Read the record of a pointer.

    Raises:
        CorruptionError: its checksum does not match.
    """
    if is_pointer(key, data):
        return Pointer(*_POINTER.unpack(data)[:3])
    number = int.from_bytes(key[8:16], "big")
    raise CorruptionError(f"{label}: the pointer of chunk {number} is damaged")


def pointer_place(key: bytes, label: str) -> tuple[int, int, int]:
    """The numbers of the tensor and of the chunk in it, and the epoch, of the key of a pointer.

    Raises:
        CorruptionError: it is not such a key.
    """
    if len(key) != POINTER_KEY.size:
        raise CorruptionError(f"{label}: the table of pointers is damaged")
    tensor, chunk, epoch = POINTER_KEY.unpack(key)
    return tensor, chunk, epoch


def is_pointer(key: bytes, data: bytes) -> bool:
    """Whether the checksum of a pointer matches."""
    sum_ = _core.crc32c(key + data[:-4])
    return len(data) == _POINTER.size and sum_ == int.from_bytes(data[-4:], "little")


def is_lost_pointer(key: bytes, other: bytes, data: bytes) -> bool:
    """Whether a record is a version of a pointer under a damaged key.

    Args:
        key: of the pointer, with the epoch of the newest version that counts.
        other: the key of the record.
        data: the record.
    """
    if is_pointer(other, data):
        return False
    if other[:16] != key[:16]:
        return other[16:] <= key[16:] and is_pointer(key[:16] + other[16:], data)
    epoch = EPOCH.unpack(other[16:])[0]
    tried = (EPOCH.pack(epoch ^ 1 << bit) for bit in range(32))
    return any(e <= key[16:] and is_pointer(key[:16] + e, data) for e in tried)


class ChunkRecord(NamedTuple):
    """A stored chunk.

    Attributes:
        base: the number of the stored chunk that it needs; 0 for none.
        places: None if the frame has all rows of the chunk, perhaps as a delta against the base.
            Otherwise it is a *patch*: the frame has some rows, which take these places in the base.
        frame: the bytes of the frame, or a view of them.
        memory: begins with room for `CHUNK_HEAD_NBYTES` bytes and goes on with the frame; None if
            there is no such room.
    """

    base: int
    places: tuple[int, ...] | None
    frame: Any
    memory: Any = None


def chunk_value(number: int, record: ChunkRecord) -> Any:
    """The record of a stored chunk, as bytes or a buffer; made in `record.memory` if that fits."""
    places = record.places or ()
    packed = struct.pack(f"<{len(places)}I", *places)
    crc = _core.crc32c(_BEFORE.pack(number, record.base, len(places)) + packed)
    if record.memory is not None and not places:  # the frame is not copied
        _CHUNK.pack_into(record.memory, 0, record.base, 0, crc)
        return record.memory[: CHUNK_HEAD_NBYTES + len(record.frame)]
    return b"".join((_CHUNK.pack(record.base, len(places), crc), packed, record.frame))


def parse_chunk(number: int, value: Any) -> ChunkRecord:
    """Read the record of a stored chunk; its frame stays a view.

    Raises:
        CorruptionError: it is too short, or what is in front of the frame is damaged.
    """
    if len(value) >= _CHUNK.size:
        base, n, crc = _CHUNK.unpack_from(value)
        end = _CHUNK.size + 4 * n
        packed = bytes(value[_CHUNK.size : end])
        if len(value) >= end and _core.crc32c(_BEFORE.pack(number, base, n) + packed) == crc:
            places = struct.unpack(f"<{n}I", packed) if n else None
            return ChunkRecord(base, places, value[end:])
    raise CorruptionError("what is in front of its frame is damaged")


def uses_value(number: int, n_uses: int) -> bytes:
    """The record of how many pointers and chunks use a stored chunk."""
    return _USES.pack(n_uses, _core.crc32c(struct.pack("<QQ", number, n_uses)))


def parse_uses(number: int, value: bytes, label: str) -> int:
    """Read the record of the uses of a stored chunk.

    Raises:
        CorruptionError: it is damaged.
    """
    if len(value) == _USES.size:
        n_uses, crc = _USES.unpack(value)
        if _core.crc32c(struct.pack("<QQ", number, n_uses)) == crc:
            return int(n_uses)
    raise CorruptionError(f"{label}: the number of uses of the stored chunk {number} is damaged")


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

    def keyframe_of(self, number: int) -> int | None:
        """The chunk that a chunk is coded against; None if it is coded for itself."""
        if self.base is None:
            return None
        row, part = divmod(number, self.grid.chunks_per_row)
        keyframe = row - row % self.keyframe_every
        return None if keyframe == row else keyframe * self.grid.chunks_per_row + part

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


def entry_value(name: str, epoch: int, entry: Entry | None) -> bytes:
    """An entry of the catalogue, as a signed document; None for a name that was removed."""
    document: dict[str, Any] = {"name": name, "epoch": epoch}
    if entry is None:
        return sign({**document, "kind": _REMOVED})
    if isinstance(entry, TensorRecord):
        return sign({**document, "kind": "tensor", **_tensor_document(entry)})
    tensors = [_tensor_document(record) for record in entry.tensors]
    return sign({**document, "kind": "state", "state": entry.state, "tensors": tensors})


def parse_entry(key: bytes, data: bytes, label: str) -> Entry | None:
    """Read an entry of the catalogue; None for a name that was removed.

    Raises:
        CorruptionError: the entry is damaged.
        CompatibilityError: a later release wrote it.
    """
    read_checksum(data, label)
    if not data.startswith(_about(key), CRC_END):
        raise CorruptionError(f"{label}: the entry is of another name or state; its key is damaged")
    document = Document(data, label)
    kind = document.get("kind")
    if kind == _REMOVED:
        return None
    if kind == "tensor":
        return _parse_tensor(document)
    if kind == "state":
        tensors = document.field("tensors", list)
        parts = (Document(compact_json(tensor), label) for tensor in tensors)
        return StateRecord(document.require("state"), tuple(map(_parse_tensor, parts)))
    raise CompatibilityError(f"{label}: an entry of an unknown kind; upgrade packhorse")


def is_removed(data: bytes) -> bool:
    """Whether an entry, which is not checked, says that its name was removed."""
    return data.endswith(_END_OF_REMOVED)


def _about(key: bytes) -> bytes:
    """How the document of an entry goes on after its checksum."""
    if len(key) < _NAME_END or key[-_NAME_END]:
        return b"no key of an entry"
    name = compact_json(key[:-_NAME_END].decode(errors="replace"))
    return b'","name":%b,"epoch":%d,' % (name, EPOCH.unpack(key[-4:])[0])


def identity_of(key: bytes, data: bytes) -> tuple[str, int]:
    """The name and the epoch of an entry: those of its key, or, if that is damaged, those that the
    entry tells itself."""
    return _told_by(key, data) or (
        key[:-_NAME_END].decode(errors="backslashreplace"), EPOCH.unpack(key[-4:])[0]
    )  # fmt: skip


def _told_by(key: bytes, data: bytes) -> tuple[str, int] | None:
    """The name and the epoch that an entry tells, if it is whole, and its key tells others."""
    if data.startswith(_about(key), CRC_END):
        return None
    with suppress(CorruptionError):
        read_checksum(data, "")
        document = Document(data, "")
        return document.field("name", str), document.count("epoch")
    return None


def has_key(key: bytes, data: bytes) -> bool:
    """Whether the key of an entry is not damaged, as far as the entry tells."""
    return _told_by(key, data) is None


def is_lost_entry(key: bytes, other: bytes, data: bytes) -> bool:
    """Whether a record is a version of an entry under a damaged key; as `is_lost_pointer`."""
    told = _told_by(other, data)
    return (
        told is not None
        and told[0].encode() == key[:-_NAME_END]
        and (told[1] <= EPOCH.unpack(key[-4:])[0])
    )


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


def tag_value(name: str, epoch: int, time: str, commit: int) -> bytes:
    """The record of a tag."""
    return sign({"name": name, "epoch": epoch, "time": time, "commit": commit})


def name_of_tag(key: bytes, data: bytes) -> str:
    """The name of a tag: that of its key, or, if that is damaged, the one that the tag tells."""
    with suppress(CorruptionError):
        read_checksum(data, "")
        told: str = Document(data, "").field("name", str)
        return told
    return key.decode(errors="backslashreplace")


def parse_tag(name: str, data: bytes, label: str) -> tuple[int, str, int]:
    """Read the record of a tag: its epoch, its time and the number of its commit.

    Raises:
        CorruptionError: it is damaged.
    """
    read_checksum(data, label)
    document = Document(data, label)
    if document.get("name") != name:
        raise CorruptionError(f"{label}: the tag is another one; its key is damaged")
    return document.count("epoch"), document.field("time", str), document.count("commit")
