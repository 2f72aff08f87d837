"""What the fuzz targets in Python share.

The format is full of checksums, which a fuzzer does not guess. So a target does not use a frame as
it stands in the input: first `repair` writes the sizes that follow from other fields, and `seal`
writes every checksum, unless the first byte of the input says not to. Both use only the header, and
know nothing of the layout of streams.

A target catches only the documented errors. Any other exception ends the run, and atheris keeps the
input. A target that is imported and not run does not need atheris: the soak (`soak.py`) uses its
checks in this way.
"""

import math
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

import numpy as np


def instrumented() -> AbstractContextManager[None]:
    """Let atheris instrument the imports of the package in this block, if a target is running."""
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    if not Path(program).name.startswith("fuzz_"):
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["packhorse"])


with instrumented():
    import packhorse.disk.container
    import packhorse.numpy
    import packhorse.reference  # noqa: F401  these imports instrument what the targets run
    from packhorse import _core, layout
    from packhorse.codecs.base import ISA_VARIABLE, available_isas
    from packhorse.codecs.content import content_sum
    from packhorse.errors import PackhorseError
    from packhorse.frame import Frame, content_hash
    from packhorse.frame.header import frame_header_nbytes, n_planes_of, padded
    from packhorse.reference.frame import base_check
    from packhorse.reference.header import read_header

__all__ = [
    "MAX_NBYTES",
    "Mutator",
    "base_of",
    "choose_isa",
    "count_bytes",
    "fuzz",
    "instrumented",
    "is_fixed",
    "mutate_bytes",
    "repair",
    "scratch_folder",
    "seal",
]

MAX_NBYTES = 1 << 20  # no target decodes a larger tensor
_MEMORY_NBYTES = 1 << 30  # in addition to the memory at the start; more is a finding
_MAX_CHUNKS = 64
_MAX_CHECKED_NBYTES = 1 << 16  # of a base whose check is computed by the slow decoder

_N_DIMS, _SPLIT, _FLAGS, _CHUNK_LOG = 6, 7, 8, 11
_HEADER_NBYTES, _HASH, _N_CHUNKS, _SIDE = 12, 24, 40, 52


Mutator = Callable[[bytes, int, int], bytes]  # data, the most it may grow to, seed


def fuzz(target: Callable[[bytes], None], mutator: Mutator | None = None) -> NoReturn:
    """Run a target under atheris, with the arguments of the command line."""
    import atheris

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_NBYTES, resource.RLIM_INFINITY))
    options = {} if mutator is None else {"custom_mutator": mutator}
    atheris.Setup(sys.argv, target, **options)
    atheris.Fuzz()
    sys.exit(0)


def mutate_bytes(data: bytes, max_nbytes: int) -> bytes:
    """Changes the input as libFuzzer does."""
    import atheris

    mutated: bytes = atheris.Mutate(data, max_nbytes)
    return mutated


def scratch_folder() -> Path:
    """A new folder for files that are written for every input: in memory, unless `tempfile` is set
    to another place."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return Path(tempfile.mkdtemp(dir=tempfile.tempdir or memory))


def choose_isa(choice: int) -> None:
    """Force one of the instruction sets of this machine."""
    isas = available_isas()
    os.environ[ISA_VARIABLE] = isas[choice % len(isas)].name.lower()


def repair(frame: bytes) -> bytes:
    """Gives a frame the counts and sizes that follow from its shape and its table, and cuts it, or
    fills it with zeros, to its length. Returns the frame unchanged if that makes no sense."""
    plan = _read_kind(frame)
    if plan is None:
        return frame
    row, n_planes, n_dims = plan
    shape_end = layout.FIXED_HEADER_NBYTES + 8 * n_dims
    dims = struct.unpack(f"<{n_dims}Q", frame[layout.FIXED_HEADER_NBYTES : shape_end])
    n_bits = row.bits
    for dim in dims:
        n_bits *= dim
    n_chunks = -(-n_bits // (8 * row.unit_nbytes << frame[_CHUNK_LOG]))
    if n_chunks > _MAX_CHUNKS:
        return frame
    side_nbytes = struct.unpack_from("<I", frame, _SIDE)[0] & layout.STREAM_NBYTES_MASK
    if side_nbytes > MAX_NBYTES:
        return frame
    has_base = _has_base(frame)
    header_nbytes = frame_header_nbytes(n_dims, n_chunks, n_planes, side_nbytes, has_base=has_base)
    shape_end += layout.BASE_BLOCK_NBYTES * has_base
    side_end = shape_end + 4 * n_chunks * (1 + n_planes) + side_nbytes
    fixed = bytearray(frame[:side_end].ljust(header_nbytes, b"\0"))
    struct.pack_into("<I", fixed, _HEADER_NBYTES, header_nbytes)
    struct.pack_into("<I", fixed, _N_CHUNKS, n_chunks)
    payload = sum(nbytes for _, nbytes in _chunks(fixed, shape_end, n_chunks, n_planes))
    struct.pack_into("<Q", fixed, _HEADER_NBYTES + 4, header_nbytes + payload)
    if payload > MAX_NBYTES:
        return frame
    return bytes(fixed) + frame[header_nbytes : header_nbytes + payload].ljust(payload, b"\0")


def seal(frame: bytes) -> bytes:
    """Gives a frame correct checksums. It also gets the right content hash if it can be decoded,
    and names `base_of` as its base if it has one."""
    plan = _read_kind(frame)
    if plan is None:
        return frame
    _, n_planes, n_dims = plan
    header_nbytes, n_chunks = (
        struct.unpack_from("<I", frame, at)[0] for at in (_HEADER_NBYTES, _N_CHUNKS)
    )
    table = layout.FIXED_HEADER_NBYTES + 8 * n_dims
    block, base = table, base_of(frame) or b""
    if _has_base(frame) and len(frame) >= table + layout.BASE_BLOCK_NBYTES:
        digest = content_sum(base) if frame[_FLAGS] & layout.FLAG_SUM else content_hash(base)
        frame = frame[:table] + digest + frame[table + 16 :]
        table += layout.BASE_BLOCK_NBYTES
    if not table + 4 * n_chunks * (1 + n_planes) <= header_nbytes <= len(frame):
        return frame
    sealed = bytearray(frame)
    at = header_nbytes
    for place, nbytes in _chunks(sealed, table, n_chunks, n_planes):
        struct.pack_into("<I", sealed, place, _crc(bytes(sealed[at : at + nbytes])))
        at += nbytes
    _seal_header(sealed, header_nbytes)
    found = _decode(bytes(sealed))
    if found is not None:
        read, decoded = found
        if read.has_sum and read.base_hash is not None and len(base) <= _MAX_CHECKED_NBYTES:
            check = base_check(read_header(bytes(sealed), None), base, bytes(decoded))
            struct.pack_into("<I", sealed, block + 20, check)
        digest = read.digest_of(np.frombuffer(decoded, np.uint8))
        sealed[_HASH : _HASH + len(digest)] = digest
        _seal_header(sealed, header_nbytes)
    return bytes(sealed)


def base_of(frame: bytes) -> bytes | None:
    """The base that every target uses for a frame: ascending numbers, as many as the frame's dtypes
    and shape need. None if that makes no sense."""
    plan = _read_kind(frame)
    if plan is None or not _has_base(frame):
        return None
    row, _, n_dims = plan
    shape_end = layout.FIXED_HEADER_NBYTES + 8 * n_dims
    code = frame[shape_end + 16] if len(frame) > shape_end + 16 else 0
    base_row = layout.DTYPE_BY_CODE.get(code)
    dims = struct.unpack(f"<{n_dims}Q", frame[layout.FIXED_HEADER_NBYTES : shape_end])
    n_units = math.prod(dims) * row.bits // 8 // row.unit_nbytes
    if base_row is None or n_units * row.unit_nbytes > MAX_NBYTES:
        return None
    return count_bytes(n_units * base_row.unit_nbytes)


def count_bytes(nbytes: int) -> bytes:
    """Numbers of two bytes from 0x3C00 on, each three more than the last."""
    return (0x3C00 + 3 * np.arange(nbytes // 2 + 1)).astype("<u2").tobytes()[:nbytes]


def _has_base(frame: bytes) -> bool:
    return len(frame) > _FLAGS and bool(frame[_FLAGS] & layout.FLAG_BASE)


def is_fixed(control: int) -> bool:
    """Whether an input asks for `repair` and `seal`: three of four do."""
    return bool(control & 3)


def _read_kind(frame: bytes) -> tuple[layout.DType, int, int] | None:
    if len(frame) < layout.FIXED_HEADER_NBYTES or frame[:4] != layout.FRAME_MAGIC:
        return None
    row = layout.DTYPE_BY_CODE.get(frame[5])
    n_dims, split = frame[_N_DIMS], frame[_SPLIT]
    if row is None or split not in row.splits or frame[_CHUNK_LOG] > layout.MAX_CHUNK_LOG:
        return None
    if len(frame) < layout.FIXED_HEADER_NBYTES + 8 * n_dims:
        return None
    return row, n_planes_of(row, layout.Split(split)), n_dims


def _chunks(header: bytearray, table: int, n_chunks: int, n_planes: int) -> list[tuple[int, int]]:
    """For each chunk, the place of its CRC, and its bytes with their padding."""
    rows = [table + 4 * (1 + n_planes) * chunk for chunk in range(n_chunks)]
    words = [struct.unpack_from(f"<{n_planes}I", header, row + 4) for row in rows]
    sizes = [padded(sum(word & layout.STREAM_NBYTES_MASK for word in row)) for row in words]
    return list(zip(rows, sizes, strict=True))


def _crc(data: bytes) -> int:
    return _core.crc32c(np.frombuffer(data, np.uint8))


def _seal_header(frame: bytearray, header_nbytes: int) -> None:
    struct.pack_into("<I", frame, layout.HEADER_CRC_OFFSET, 0)
    crc = _crc(bytes(frame[:header_nbytes]))
    struct.pack_into("<I", frame, layout.HEADER_CRC_OFFSET, crc)


def _decode(frame: bytes) -> tuple[Frame, bytearray] | None:
    try:
        read = Frame.from_buffer(frame, max_nbytes=MAX_NBYTES)
        decoded = bytearray(read.logical_nbytes)
        read.decompress_into(decoded, threads=1, base=base_of(frame))
    except PackhorseError:
        return None
    return read, decoded
