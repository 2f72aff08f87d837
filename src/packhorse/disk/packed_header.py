"""The header of a packed file (docs/format.md, section 8): how it records the original's header.

A packed file is a safetensors file of frames, so `safetensors_header.py` does the container's
checks. This module adds what makes it packed: the key `packhorse` in `__metadata__`, which holds
the original header's text byte for byte, and the check that the two headers agree.

The size of a header depends on the sizes of the frames, which are known only after they have been
written. So `PrefixWriter` reserves room for the largest possible frames, and fills the rest with
spaces.

The record is compressed, and parsed JSON takes up to thirty times the size of its text, so a short
file could require gigabytes of memory. Therefore a recorded text may not be much longer than the
text around it, which describes the same tensors and is usually about as long. If it is too short,
the encoder adds spaces.
"""

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zstandard

from packhorse import _core
from packhorse.codecs.content import crc32c
from packhorse.codecs.zstd import memory_is_told
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.frame.plan import form_of
from packhorse.layout import (
    FILE_ALIGNMENT,
    FILE_METADATA_KEY,
    FILE_VERSION,
    LENGTH_NBYTES,
    MAX_FILE_HEADER_NBYTES,
    METADATA_KEY,
    RECORD_BASE_KEY,
    RECORD_CRC_KEY,
    RECORD_FREE_NBYTES,
    RECORD_GROWTH,
)
from packhorse.storage.safetensors_header import (
    FileHeader,
    TensorEntry,
    parse_header,
    quoted,
)
from packhorse.storage.strict_json import parse_json, shown

__all__ = [
    "PackedHeader",
    "PrefixWriter",
    "is_packed",
    "min_text_nbytes",
    "parse_packed_header",
    "read_record",
    "rooms_of",
    "write_record",
]

_RECORD_KEY = "header"
_RECORD_LEVEL = 9  # of zstd; headers are small and compress about tenfold


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """Both headers of a packed file, after checking that they agree.

    Attributes:
        packed: the header of the file itself.
        original: the recorded header of the file that was packed.
        frames: the entry of each tensor's frame, by the tensor's name.
        base_name: the recorded name of the base that the file was packed against, or None; only a
            hint for people, as nothing checks it.
    """

    packed: FileHeader
    original: FileHeader
    frames: dict[str, TensorEntry]
    base_name: str | None = None

    def frame_offset(self, name: str) -> int:
        """Offset of a tensor's frame in the file."""
        return self.packed.data_offset + self.frames[name].start


class PrefixWriter:
    """Reserves room for the bytes before the data section of a packed file, and renders them.

    Attributes:
        nbytes: the room; a multiple of 64, and the offset of the data section.
        rooms: the length of the longest frame of each tensor.
    """

    def __init__(self, original: FileHeader, base_name: str | None = None) -> None:
        self._original = original
        self._record = write_record(_RECORD_KEY, original.text)
        self._names = [entry.name for entry in original.entries]
        self.rooms = rooms_of(original.entries)
        text_nbytes = len(self._text(self.rooms, base_name))
        text_nbytes = max(text_nbytes, min_text_nbytes(len(original.text)))
        room = LENGTH_NBYTES + text_nbytes
        self.nbytes = room + -room % FILE_ALIGNMENT
        if self.nbytes - LENGTH_NBYTES > MAX_FILE_HEADER_NBYTES:
            raise CompatibilityError(
                f"the packed header would take {self.nbytes} bytes, but at most "
                f"{MAX_FILE_HEADER_NBYTES} are allowed; split the file into shards"
            )

    def render(self, frame_nbytes: Sequence[int], base_name: str | None = None) -> bytes:
        """The prefix for frames of these sizes.

        Args:
            frame_nbytes: the size of each frame, in the order of the original's entries.
            base_name: the name of the base to record: the one that room was reserved for, or None.

        Returns:
            Exactly `nbytes` bytes.
        """
        text = self._text(frame_nbytes, base_name).ljust(self.nbytes - LENGTH_NBYTES, b" ")
        return len(text).to_bytes(LENGTH_NBYTES, "little") + text

    def _text(self, frame_nbytes: Sequence[int], base_name: str | None) -> bytes:
        record = self._record if base_name is None else {**self._record, RECORD_BASE_KEY: base_name}
        metadata = {
            **(self._original.metadata or {}),
            FILE_METADATA_KEY: json.dumps(record, separators=(",", ":")),
        }
        pairs = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
        beginning = f"{{{quoted(METADATA_KEY)}:{pairs}".encode()
        rows = _core.rows_of_frames(self._names, frame_nbytes)
        return b"".join([beginning, b"," if rows else b"", rows, b"}"])


def rooms_of(entries: Sequence[TensorEntry]) -> list[int]:
    """The length of the longest frame of each tensor."""
    return [form_of(dtype, shape).capacity for _, dtype, shape, _, _ in entries]


def min_text_nbytes(recorded_nbytes: int) -> int:
    """How long a text must be, including spaces, to contain the record of a text of this length."""
    return max(0, -(-(recorded_nbytes - RECORD_FREE_NBYTES) // RECORD_GROWTH))


def write_record(key: str, text: bytes) -> dict[str, Any]:
    """A JSON object that records `text` byte for byte.

    Args:
        key: the key of the recorded text in the object.
        text: the text to record.

    Returns:
        `{"version": ..., key: ..., "crc32c": ...}`.
    """
    compressor = zstandard.ZstdCompressor(level=_RECORD_LEVEL, write_checksum=True)
    with memory_is_told():
        blob = base64.b64encode(compressor.compress(text))
    return {"version": FILE_VERSION, key: blob.decode("ascii"), RECORD_CRC_KEY: _crc_digits(blob)}


def _crc_digits(blob: bytes) -> str:
    # The CRC covers the base64 text and not the decoded bytes, because some bits of a Zstandard
    # frame can flip without changing the decoded bytes.
    return f"{crc32c(blob):08x}"


def read_record(record: object, key: str, *, text_nbytes: int, label: str) -> bytes:
    """The text that `write_record` recorded.

    Args:
        record: the JSON object.
        key: the key of the recorded text in it.
        text_nbytes: the length of the JSON text that contains the object.
        label: the name of the record in messages.

    Returns:
        The text.

    Raises:
        CompatibilityError: the record is of a newer version.
        CorruptionError: the record is not what `write_record` writes.
    """
    if not isinstance(record, dict):
        raise CorruptionError(f"{label} must be a JSON object with 'version' and {key!r}")
    version, blob = record.get("version"), record.get(key)
    if type(version) is not int or version < 1:
        raise CorruptionError(
            f"{label}: version must be an integer from 1, but is {shown(version)}"
        )
    if version > FILE_VERSION:
        raise CompatibilityError(
            f"{label}: version {shown(version)}, but this release reads up to {FILE_VERSION}; "
            "upgrade"
        )
    if not isinstance(blob, str):
        raise CorruptionError(f"{label}: {key!r} is missing or not a string")
    crc = record.get(RECORD_CRC_KEY)
    if crc != (found := _crc_digits(blob.encode())):
        raise CorruptionError(
            f"{label}: {RECORD_CRC_KEY!r} is {shown(crc)}, but {key!r} has the CRC {found!r}; the "
            "file is damaged: fetch or pack it again"
        )
    try:
        data = base64.b64decode(blob, validate=True)
        if base64.b64encode(data) != blob.encode():
            raise ValueError("the last base64 digit has stray bits")
        return _decompress(data, text_nbytes)
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptionError(f"{label}: {key!r} cannot be decoded: {error}") from error


def _decompress(data: bytes, text_nbytes: int) -> bytes:
    nbytes = zstandard.get_frame_parameters(data).content_size
    if nbytes > MAX_FILE_HEADER_NBYTES:  # an undeclared size reads as the largest number
        raise ValueError(f"must declare a size of at most {MAX_FILE_HEADER_NBYTES} bytes")
    if text_nbytes < min_text_nbytes(nbytes):
        raise ValueError(
            f"declares {nbytes} bytes, but in {text_nbytes} bytes of JSON at most "
            f"{RECORD_GROWTH * text_nbytes + RECORD_FREE_NBYTES} are allowed"
        )
    with memory_is_told():
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


def is_packed(header: FileHeader) -> bool:
    """Whether a safetensors file declares itself packed, rightly or not.

    A plain file may have a metadata pair named `packhorse` too. The file counts as plain if the
    pair is not a record and the tensors are not frames.
    """
    text = (header.metadata or {}).get(FILE_METADATA_KEY)
    if text is None:
        return False
    with suppress(CorruptionError):
        if _RECORD_KEY in parse_json(text.encode(), label=""):
            return True
    return all(_is_frame(entry) for entry in header.entries) and bool(header.entries)


def _is_frame(entry: TensorEntry) -> bool:
    return entry.dtype == "U8" and len(entry.shape) == 1


def parse_packed_header(header: FileHeader, *, label: str) -> PackedHeader:
    """Read the recorded header and check that the two agree.

    Args:
        header: the header of the packed file.
        label: the name of the file in messages.

    Returns:
        Both headers. The frames are not opened.

    Raises:
        ValueError: the file is a plain safetensors file.
        CompatibilityError: it was packed by a newer version.
        CorruptionError: the headers are damaged or disagree.
    """
    if not is_packed(header):
        raise ValueError(
            f"{label}: not a packed file, but a plain safetensors file: read it with the "
            "safetensors library, or pack it first"
        )
    pairs = header.metadata or {}
    where = f"{label}: {METADATA_KEY} {FILE_METADATA_KEY!r}"
    record = parse_json(pairs[FILE_METADATA_KEY].encode(), label=where)
    text = read_record(record, _RECORD_KEY, text_nbytes=len(header.text), label=where)
    original = parse_header(text, label=f"{label}: recorded header")
    frames = {entry.name: entry for entry in header.entries}
    _check_names(frames, original, label)
    _check_metadata(pairs, original, label)
    base_name = record.get(RECORD_BASE_KEY)
    return PackedHeader(header, original, frames, base_name if isinstance(base_name, str) else None)


def _check_names(frames: dict[str, TensorEntry], original: FileHeader, label: str) -> None:
    names = {entry.name for entry in original.entries}
    for name in sorted(names ^ frames.keys()):
        fault = "no frame" if name in names else "a frame, but is not in the recorded header"
        raise CorruptionError(f"{label}: tensor {shown(name)} has {fault}")
    for entry in frames.values():
        if not _is_frame(entry):
            raise CorruptionError(
                f"{label}: tensor {shown(entry.name)}: a frame is U8 of one dimension, but this is "
                f"{entry.dtype} of shape {list(entry.shape)}"
            )


def _check_metadata(pairs: dict[str, str], original: FileHeader, label: str) -> None:
    for key, value in (original.metadata or {}).items():
        if key != FILE_METADATA_KEY and pairs.get(key) != value:
            raise CorruptionError(
                f"{label}: {METADATA_KEY} {shown(key)} is {shown(pairs.get(key))}, but "
                f"{shown(value)} in the recorded header"
            )
