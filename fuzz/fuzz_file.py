"""Fuzz the readers of packed files and of packed indexes: lazy, whole, to disk and by `verify`. All
of them are compared with the slow decoder.

The header of a packed file is JSON that holds a compressed record as base64, and lengths and
offsets around it must agree. So an input contains only the parts, and the target builds the file.
The two low bits of the first byte choose the form:

0. the file as it is;
1. u16 length and text of the original header, then frames one after the other, from which the
   target makes names, offsets and the header of the packed file;
2. u16 length and text of the original header, u16 length and text of the packed file's header, in
   which `@RECORD@` stands for the record, then the data;
3. u16 length and text of an original index, then the packed index, with `@RECORD@` as above.

If frames have a base, all readers get a file with the bases that `harness.py` makes.
"""

import json
import os
import random
import struct
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import harness
from claims import check_slice
from edits import edit_pairs
from harness import PackhorseError

from packhorse import numpy as packhorse_numpy
from packhorse import open_file
from packhorse.disk import unpack_file, verify_file
from packhorse.disk.folder_index import is_packed_index, pack_index, unpack_index
from packhorse.disk.packed_header import parse_packed_header, write_record
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME, FILE_METADATA_KEY, FRAME_MAGIC
from packhorse.reference import decode_file
from packhorse.storage.safetensors_header import build_header, parse_file_header

_PLACEHOLDER = b"@RECORD@"
_INDEXES: tuple[Any, ...] = (
    (), 0, -1, slice(3, None), slice(None, None, -2), (..., 0), (slice(1, 9), -1), (None, slice(1))
)  # fmt: skip
# Messages that a ValueError may have if the bytes are of another kind than the call expects.
_OTHER_KIND = ("not a packed file", "the index of a packed folder")
_SHARE_OF_JSON = 0.4  # of all mutations
_MAX_NBYTES = (
    1 << 14
)  # of all tensors of a file, because the slow decoder decodes a megabyte a second
_FOLDER = harness.scratch_folder()
_BASE = harness.scratch_folder() / "base.safetensors"


def main(data: bytes) -> None:
    """Run one input."""
    control, rest = data[0] if data else 0, data[1:]
    harness.choose_isa(control >> 2 & 3)
    if control & 3 == 3:
        check_index(*_take_text(rest))
        return
    if control & 3:
        rest = build_file(*_take_text(rest), control)
    check_file(rest, control)


def _take_text(data: bytes) -> tuple[bytes, bytes]:
    nbytes = int.from_bytes(data[:2], "little")
    return data[2 : 2 + nbytes], data[2 + nbytes :]


def _with_record(text: bytes, key: str, original: bytes, *, in_string: bool) -> bytes:
    record = json.dumps(write_record(key, original))
    return text.replace(_PLACEHOLDER, (json.dumps(record)[1:-1] if in_string else record).encode())


def mutate(data: bytes, max_nbytes: int, seed: int) -> bytes:
    """Mutate bytes as libFuzzer does, or one pair of a JSON object."""
    rng = random.Random(seed)
    if rng.random() < _SHARE_OF_JSON:
        edited = edit_pairs(data, rng)
        if len(edited) <= max_nbytes:
            return edited
    return harness.mutate_bytes(data, max_nbytes)


def build_file(original: bytes, rest: bytes, control: int) -> bytes:
    """A packed file made of the parts in the input."""
    if control & 3 == 2:
        text, rest = _take_text(rest)
    frames = [FRAME_MAGIC + piece for piece in rest.split(FRAME_MAGIC)[1:]]
    if control & 16:
        frames = [harness.seal(harness.repair(frame)) for frame in frames]
    if control & 3 == 1:
        text = packed_header(original, frames)
    data = rest.split(FRAME_MAGIC)[0] * (control & 3 == 2) + b"".join(frames)
    text = _with_record(text, "header", original, in_string=True)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def packed_header(original: bytes, frames: list[bytes]) -> bytes:
    """The header in which each tensor of the original has the frame at the same place."""
    try:
        document = dict(json.loads(original))
    except (ValueError, TypeError, RecursionError):
        document = {}
    pairs = document.pop("__metadata__", None)
    metadata = {**(pairs if isinstance(pairs, dict) else {}), FILE_METADATA_KEY: "@RECORD@"}
    header: dict[str, Any] = {"__metadata__": metadata}
    stop = 0
    for name, frame in zip_longest(document, frames):
        start, stop = stop, stop + len(frame or b"")
        header[str(name)] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    return json.dumps(header).encode()


def check_file(data: bytes, control: int) -> None:
    """Check that all readers agree, and raise only the documented errors."""
    if not is_small(data):
        return
    path = _FOLDER / "in.ph.safetensors"
    path.write_bytes(data)
    content = base_of(data)
    base = _BASE if content is not None else None
    if content is not None:
        _BASE.write_bytes(content)
    restored = outcome(lambda: decode_file(data, base=content))
    unpacked = outcome(lambda: unpack(path, base))
    problems = outcome(lambda: verify_file(path, threads=1, base=base))
    assert unpacked == restored, f"slow: {restored!r}, fast: {unpacked!r}"
    assert (problems == []) == (unpacked is not None), f"verify: {problems}"
    tensors = outcome(lambda: packhorse_numpy.load(data, threads=1, base=base))
    lazily = outcome(lambda: read_lazily(path, base, control))
    if restored is not None:
        assert (tensors is None) == (lazily is None)
        assert base is None or outcome(lambda: unpack(path, None)) is None, "no base was given"


def base_of(data: bytes) -> bytes | None:
    """A file of the bases of all frames that have one; None if there is none."""
    tensors: dict[str, tuple[str, bytes]] = {}
    try:
        header = parse_file_header(memoryview(data), "f")
    except PackhorseError:
        return None
    for entry in header.entries:
        start = header.data_offset + entry.start
        frame = data[start : start + entry.nbytes]
        base = harness.base_of(frame)
        read = outcome(lambda frame=frame: Frame.from_buffer(frame))
        if base is not None and read is not None and read.base_dtype is not None:
            tensors[entry.name] = read.base_dtype, base
    if not tensors:
        return None
    shapes = {
        name: (dtype, (len(base) * 8 // DTYPE_BY_NAME[dtype].bits,))
        for name, (dtype, base) in tensors.items()
    }
    built = build_header(shapes)
    return built.prefix() + b"".join(tensors[entry.name][1] for entry in built.entries)


def is_small(data: bytes) -> bool:
    """Whether the file claims few enough bytes to decode all of them. (The size that a frame itself
    claims is checked against this before memory is allocated.)"""
    try:
        header = parse_packed_header(parse_file_header(memoryview(data), "f"), label="f")
    except (PackhorseError, ValueError):
        return True
    return header.original.data_nbytes <= _MAX_NBYTES


def unpack(path: Path, base: Path | None) -> bytes:
    """The restored file."""
    target = path.with_name("out.safetensors")
    try:
        unpack_file(path, target, threads=1, force=True, base=base)
        return target.read_bytes()
    finally:
        target.unlink(missing_ok=True)
        assert os.listdir(_FOLDER) == [path.name], "something was left behind"


def read_lazily(path: Path, base: Path | None, control: int) -> list[Any]:
    """Use everything that an open file offers."""
    limit = _MAX_NBYTES
    with open_file(path, framework="numpy", threads=1, max_nbytes=limit, base=base) as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        for name, tensor in tensors.items():
            assert tuple(file.get_slice(name).get_shape()) == tensor.shape
            check_slice(file.get_slice(name), tensor, _INDEXES[control >> 5])
        return [file.metadata(), *tensors]


def check_index(original: bytes, packed: bytes) -> None:
    """Check that a packed index is restored or refused, and that an original one comes back."""
    packed = _with_record(packed, "index", original, in_string=False)
    files = {"m.safetensors", "x.ph.safetensors"}
    for has in (files.__contains__, lambda name: True):
        outcome(lambda has=has: is_packed_index(packed, label="f", has=has))
        outcome(lambda has=has: unpack_index(packed, label="f", has=has, tensors=lambda name: "w"))
    again = outcome(lambda: pack_index(original, label="f"))
    if again is not None:
        assert unpack_index(again, label="f") == original


def outcome(work: Callable[[], Any]) -> Any:
    """The result of a call, or None for a documented error. A ValueError is documented only for
    bytes of another kind."""
    try:
        return work()
    except PackhorseError:
        return None
    except ValueError as error:
        if not any(kind in str(error) for kind in _OTHER_KIND):
            raise
        return None


if __name__ == "__main__":
    harness.fuzz(main, mutate)
