"""Section 8 of docs/format.md: from a packed file back to the original safetensors file.

Both headers, the file's own and the recorded one, are checked before any frame is decoded. An error
in a frame names its tensor and where the frame lies.
"""

import base64
import json
import math
import struct
from typing import Any, NamedTuple

from packhorse import layout
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError
from packhorse.reference.frame import decode_frame
from packhorse.reference.streams import decode_zstd
from packhorse.reference.words import Reader, crc32c, equal, need

__all__ = ["decode_file", "parse_json", "recorded_text"]


class _Entry(NamedTuple):
    start: int  # byte offsets in the data section
    stop: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def decode_file(data: bytes, *, max_nbytes: int | None = None, base: bytes | None = None) -> bytes:
    """Decodes a packed file to the original safetensors file, byte for byte.

    Args:
        data: the whole packed file.
        max_nbytes: the most decoded bytes that a tensor may have; None for no limit.
        base: the whole file that it was packed against, packed or not. The base of a frame is the
            tensor of the same name in it.

    Returns:
        The original file.

    Raises:
        PackhorseError: as `decode_frame`, with the tensor's name in the message; also if the base
            needs a base itself.
    """
    entries, metadata, data_offset = _parse_file(data)
    recorded = _recorded_header(metadata, data_offset - 8)
    originals, pairs = _parse_header(recorded, "the recorded header")
    frames = {entry.name: entry for entry in entries}
    odd = frames.keys() ^ {entry.name for entry in originals}
    pairs.pop(layout.FILE_METADATA_KEY, None)
    odd |= {key for key, value in pairs.items() if metadata.get(key) != value}
    if odd:
        raise CorruptionError(f"{sorted(odd)[:5]} differ in the file and in the recorded header")
    bases = {} if base is None else _tensors_of(base)
    tensors = [
        _decode_entry(data, data_offset, frames[e.name], e, max_nbytes, bases.get(e.name))
        for e in originals
    ]
    return struct.pack("<Q", len(recorded)) + recorded + b"".join(tensors)


def _tensors_of(base: bytes) -> dict[str, bytes]:
    """Returns the tensors of a file, packed or not, by name."""
    entries, metadata, offset = _parse_file(base)
    if layout.FILE_METADATA_KEY in metadata:
        base = decode_file(base)
        entries, _, offset = _parse_file(base)
    return {entry.name: base[offset + entry.start : offset + entry.stop] for entry in entries}


def _parse_file(data: bytes) -> tuple[list[_Entry], dict[str, str], int]:
    """Returns the tensors of a safetensors file, its metadata, and where its data starts."""
    need(data, 8, "the length of the file's header")
    data_offset = 8 + int.from_bytes(data[:8], "little")
    if data_offset > 8 + layout.MAX_FILE_HEADER_NBYTES:
        raise CorruptionError(f"file header takes {data_offset - 8} bytes, more than 100,000,000")
    need(data, data_offset, "the file's header")
    entries, metadata = _parse_header(data[8:data_offset], "the file's header")
    end = data_offset + max((entry.stop for entry in entries), default=0)
    need(data, end, "the file")
    equal(len(data), end, "the end of the file, the length of the data,", end)
    return entries, metadata, data_offset


def _parse_header(text: bytes, what: str) -> tuple[list[_Entry], dict[str, str]]:
    """Returns the tensors of a safetensors header in the order of their data, and its metadata."""
    if text[:1] != b"{":
        raise CorruptionError(f"{what} starts with {text[:1]!r}, not with an opening brace")
    fields = parse_json(text, what)
    metadata = {} if fields.get("__metadata__") is None else fields["__metadata__"]
    fields.pop("__metadata__", None)
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise CorruptionError(f"__metadata__ in {what} is not a map of strings")
    entries = sorted(_parse_entry(name, field, what) for name, field in fields.items())
    end = 0
    for entry in entries:
        equal(entry.start, end, f"start of tensor {entry.name!r} in {what}, in the data", end)
        end = entry.stop
    return entries, metadata


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object as strictly as a header."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"duplicate key among {[name for name, _ in pairs][:20]}")
        return dict(pairs)

    try:
        # Python reads NaN and Infinity, which JSON does not have; int() refuses these words.
        fields = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=int)
        # A lone surrogate raises ValueError, and so does a number that became infinity.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptionError(f"{what} is a {type(fields).__name__}, but must be an object")
    return fields


def _parse_entry(name: str, field: Any, what: str) -> _Entry:
    where = f"tensor {name!r} in {what}"
    try:
        dtype, shape, (start, stop) = field["dtype"], field["shape"], field["data_offsets"]
        fine = type(dtype) is str and type(shape) is list
        fine &= all(type(x) is int and 0 <= x < layout.MAX_BITS for x in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        fine = False
    if not fine or start > stop:
        raise CorruptionError(f"{where} lacks valid dtype, shape, data_offsets")
    if dtype not in layout.DTYPE_BY_NAME or len(shape) > layout.MAX_DIMS:
        known = f"{layout.MAX_DIMS} dimensions and the dtypes of docs/format.md are known; upgrade"
        raise CompatibilityError(f"{where} is {dtype} of {len(shape)} dimensions: {known}")
    bits = layout.DTYPE_BY_NAME[dtype].bits
    if math.prod(max(dim, 1) for dim in shape) * bits >= layout.MAX_BITS:
        raise CorruptionError(f"{where} has shape {shape}, which takes 2^63 bits or more")
    n_bits, what = math.prod(shape) * bits, f"bits between the offsets of {where}, in the data"
    equal(8 * (stop - start), n_bits, what, start)
    return _Entry(start, stop, name, dtype, tuple(shape))


def _recorded_header(metadata: dict[str, str], text_nbytes: int) -> bytes:
    key = layout.FILE_METADATA_KEY
    if key not in metadata:
        raise CorruptionError(f"no key {key!r} in __metadata__: this is not a packed file")
    fields = parse_json(metadata[key].encode(), f"metadata key {key!r}")
    return recorded_text(fields, "header", text_nbytes, f"metadata key {key!r}")


def recorded_text(fields: dict[str, Any], name: str, text_nbytes: int, what: str) -> bytes:
    """Returns the original text that a record holds under a name. The JSON text that contains the
    record has `text_nbytes` bytes."""
    version, text, crc = (fields.get(key) for key in ("version", name, "crc32c"))
    if type(version) is int and version > layout.FILE_VERSION:
        known = layout.FILE_VERSION
        raise CompatibilityError(f"file version is {version}, known: {known}; upgrade packhorse")
    if type(version) is not int or version != layout.FILE_VERSION or type(text) is not str:
        raise CorruptionError(f"{what} lacks version 1 or {name!r}, has {version!r}")
    equal(crc, f"{crc32c(text.encode()):08x}", f"crc32c in {what}, in it", 0)
    try:
        frame = base64.b64decode(text, validate=True)
        if base64.b64encode(frame).decode() != text:
            raise ValueError("stray bits in the last digit")
    except ValueError as error:
        raise CorruptionError(f"{name!r} in {what} is not base64: {error}") from error
    most = layout.RECORD_GROWTH * text_nbytes + layout.RECORD_FREE_NBYTES
    return decode_zstd(Reader(frame, 0), 0, min(layout.MAX_FILE_HEADER_NBYTES, most))


def _decode_entry(
    data: bytes,
    data_offset: int,
    packed: _Entry,
    original: _Entry,
    max_nbytes: int | None,
    base: bytes | None,
) -> bytes:
    start, stop = data_offset + packed.start, data_offset + packed.stop
    where = f"tensor {packed.name!r} at byte offset {start}"
    try:
        equal((packed.dtype, len(packed.shape)), ("U8", 1), "dtype and number of dimensions", 0)
        tensor = decode_frame(data[start:stop], max_nbytes=max_nbytes, base=base)
        found, allowed = (tensor.dtype, tensor.shape), (original.dtype, original.shape)
        equal(found, allowed, "dtype and shape of the frame", 0)
    except PackhorseError as error:
        raise type(error)(f"{where}: {error}") from error
    return tensor.data
