"""Safetensors files as another writer makes them, packed files of ready frames, and hex dumps."""

import base64
import json
import struct
from collections.abc import Callable, Sequence

import zstandard

from frame_builder.frames import crc32c

__all__ = ["build_file", "hexdump", "original_file", "record_crc"]


def original_file(
    tensors: dict[str, tuple[str, Sequence[int], bytes]],
    metadata: dict[str, str] | None = None,
    *,
    padding: int = 3,
) -> bytes:
    """A safetensors file as another writer might have made it, with an odd padding."""
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += data
    text = json.dumps(fields).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + body


def build_file(
    original: bytes,
    frames: dict[str, bytes],
    *,
    metadata: dict[str, str] | None = None,
    edit_record: Callable[[dict[str, object]], object] | None = None,
    edit_header: Callable[[dict[str, object]], object] | None = None,
    edit_text: Callable[[bytes], bytes] | None = None,
    edit_original: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """A packed file of ready frames; the hooks put lies into the record, the header or their texts.
    The CRC is right unless the record has one already."""
    text = original[8 : 8 + struct.unpack_from("<Q", original)[0]]
    text = edit_original(text) if edit_original else text
    zipped = zstandard.ZstdCompressor(write_checksum=True).compress(text)
    record: dict[str, object] = {"version": 1, "header": base64.b64encode(zipped).decode()}
    if edit_record:
        edit_record(record)
    record.setdefault("crc32c", record_crc(record))
    header: dict[str, object] = {
        "__metadata__": {**(metadata or {}), "packhorse": json.dumps(record)}
    }
    offset = 0
    for name, frame in frames.items():
        offsets = [offset, offset + len(frame)]
        header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": offsets}
        offset += len(frame)
    if edit_header:
        edit_header(header)
    json_text = json.dumps(header).encode()
    json_text += b" " * (-(8 + len(json_text)) % 64)
    json_text = edit_text(json_text) if edit_text else json_text
    return struct.pack("<Q", len(json_text)) + json_text + b"".join(frames.values())


def record_crc(record: dict[str, object]) -> str:
    """The right CRC of a record, whatever else is wrong with it."""
    return f"{crc32c(str(record.get('header')).encode()):08x}"


def hexdump(data: bytes) -> str:
    """Lines of 16 bytes behind their offset; `*` stands for repetitions of the line above."""
    lines: list[str] = []
    previous, skipped = b"", False
    for offset in range(0, len(data), 16):
        line = data[offset : offset + 16]
        if line == previous and offset + 16 < len(data):
            skipped = True
            continue
        lines += ["*"] if skipped else []
        lines.append(f"{offset:04x}  {line.hex(' ')}")
        previous, skipped = line, False
    return "\n".join(lines)
