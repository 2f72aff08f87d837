"""A frame: the self-described encoding of one tensor (docs/format.md, sections 2 to 7).

`compress_buffer` makes one from a tensor's bytes; `Frame.from_buffer` reads and checks a header without touching the payload; `Frame.decompress_into`
decodes all of it, or the chunks that a byte range meets, into the caller's memory. Everything is sans-IO: buffers in, buffers out.
The input is never written to, the output does not depend on the number of threads, and nothing is allocated on the word of unchecked bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import (
    STATUS_WORDS,
    ByteArray,
    as_bytes,
    as_writable_bytes,
    choose_isa,
)
from packhorse.codecs.plan import Plan, choose_plan, chunk_log_for, natural_split
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import (
    CONTENT_LEAF_NBYTES,
    CRITICAL_FLAGS,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    FIXED_HEADER,
    FIXED_HEADER_NBYTES,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    FRAME_VERSION,
    HEADER_CRC_OFFSET,
    MAX_CHUNK_LOG,
    MAX_CHUNK_NBYTES,
    MAX_DIMS,
    MAX_NBYTES,
    MIN_CHUNK_LOG,
    STREAM_NBYTES_BITS,
    STREAM_NBYTES_MASK,
    DType,
    Level,
    Mode,
    Split,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "Frame",
    "Framework",
    "Plan",
    "PlaneSummary",
    "compress_buffer",
    "content_hash",
    "max_frame_nbytes",
    "plan_buffer",
    "resolve_level",
    "resolve_threads",
]

_MAX_DEFAULT_THREADS = 8
_SHORT_LEAF_NBYTES = 240  # the core hashes longer leaves

Table = NDArray[np.uint32]


class Framework(Protocol):
    """What a hop needs to know of NumPy or PyTorch; one object for each, in numpy.py and torch.py."""

    name: str

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A fresh tensor of undefined content.

        Raises:
            CompatibilityError: the framework has no such dtype.
        """

    def writable(self, tensor: Any) -> memoryview:
        """The bytes of a C-contiguous tensor, one-dimensional, to write to."""

    def readable(self, tensor: Any) -> tuple[memoryview, str, tuple[int, ...]]:
        """The bytes in C order, dtype name and shape; a copy only if the tensor is not C-contiguous."""


def resolve_level(level: Level | str | int) -> Level:
    """A `Level` from itself, its name in any case, or its number.

    Raises:
        ValueError: no such level.
    """
    if isinstance(level, str) and level.upper() in Level.__members__:
        return Level[level.upper()]
    if isinstance(level, int) and level in Level.__members__.values():
        return Level(level)
    names = ", ".join(repr(known.name.lower()) for known in Level)
    raise ValueError(f"level is {level!r}; it must be one of {names}")


def resolve_threads(threads: int | None) -> int:
    """The number of threads to use: as asked, or the cores that this process may use, at most 8.

    Raises:
        ValueError: below 1.
        TypeError: not an integer.
    """
    if threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)
    if not isinstance(threads, int):
        raise TypeError(f"threads must be an integer or None, not {type(threads).__name__}")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return threads


@dataclass(frozen=True)
class _Header:
    """The checked header of a frame."""

    dtype: DType
    shape: tuple[int, ...]
    split: Split
    level: int
    chunk_log: int
    content_hash: bytes
    header_nbytes: int
    frame_nbytes: int
    table: Table

    @property
    def nbytes(self) -> int:
        return _logical_nbytes(self.dtype, math.prod(self.shape))

    @property
    def n_planes(self) -> int:
        return _n_planes(self.dtype, self.split)


@dataclass(frozen=True)
class PlaneSummary:
    """What became of one plane over all chunks of a frame.

    Attributes:
        index: 0 is the exponent, or the most significant byte.
        name: a short name for people.
        nbytes: encoded bytes.
        logical_nbytes: bytes before encoding.
        modes: how many chunks were coded in which mode.
    """

    index: int
    name: str
    nbytes: int
    logical_nbytes: int
    modes: dict[Mode, int]


def _n_planes(dtype: DType, split: Split) -> int:
    return 1 if split == Split.WHOLE else dtype.unit_nbytes


def _round_up(n: int) -> int:
    return -(-n // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def _header_nbytes(n_dims: int, n_chunks: int, n_planes: int) -> int:
    return _round_up(FIXED_HEADER_NBYTES + 8 * n_dims + 4 * n_chunks * (1 + n_planes))


def _logical_nbytes(dtype: DType, numel: int) -> int:
    return numel * dtype.bits // 8


def _checked_nbytes(dtype_name: str, shape: Sequence[int]) -> tuple[DType, int]:
    """The dtype's row and the bytes of a tensor that a caller names."""
    if dtype_name not in DTYPE_BY_NAME:
        raise ValueError(f"dtype {dtype_name!r} is unknown; known are {', '.join(DTYPE_BY_NAME)}")
    if len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        raise ValueError(f"shape {tuple(shape)} must have at most {MAX_DIMS} dimensions, none < 0")
    dtype, numel = DTYPE_BY_NAME[dtype_name], math.prod(shape)
    if numel * dtype.bits % 8 or numel * dtype.bits // 8 > MAX_NBYTES:
        raise ValueError(f"{numel} elements of {dtype_name} are not a whole number of bytes < 2^60")
    return dtype, _logical_nbytes(dtype, numel)


def max_frame_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """The longest frame that a tensor of this dtype and shape can take, in bytes.

    Raises:
        ValueError: unknown dtype or impossible shape.
    """
    row, nbytes = _checked_nbytes(dtype, shape)
    chunk_log = chunk_log_for(row.unit_nbytes, nbytes // row.unit_nbytes)
    n_chunks = -(-nbytes // (row.unit_nbytes << chunk_log))
    n_planes = _n_planes(row, natural_split(row))
    return _header_nbytes(len(shape), n_chunks, n_planes) + _round_up(nbytes)


def content_hash(src: Buffer, *, threads: int | None = None) -> bytes:
    """The content hash of a tensor's bytes (docs/format.md, section 7): 16 bytes.

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
        ValueError: bad `threads`.
    """
    data = as_bytes(src, "src")
    digests = _empty_digests(data.size)
    _core.leaf_digests(data, digests, resolve_threads(threads), int(choose_isa()))
    return _root_hash(data, digests)


def _empty_digests(nbytes: int) -> ByteArray:
    return np.zeros(16 * -(-nbytes // CONTENT_LEAF_NBYTES), np.uint8)


def _root_hash(data: ByteArray, digests: ByteArray) -> bytes:
    """The hash of the leaves' hashes; a last leaf that the core left out is hashed here."""
    tail = data.size % CONTENT_LEAF_NBYTES
    if data.size <= CONTENT_LEAF_NBYTES:
        if data.size > _SHORT_LEAF_NBYTES:
            return digests.tobytes()
        return xxhash.xxh3_128_digest(data.tobytes())
    if 0 < tail <= _SHORT_LEAF_NBYTES:
        last = xxhash.xxh3_128_digest(data[data.size - tail :].tobytes())
        digests[-16:] = np.frombuffer(last, np.uint8)
    return xxhash.xxh3_128_digest(digests.tobytes())


def plan_buffer(
    src: Buffer, dtype: str, shape: Sequence[int], *, level: Level | str = "default"
) -> Plan:
    """What `compress_buffer` would choose for a tensor; nothing is encoded.

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
        ValueError: unknown dtype or level, or `src` is not as long as dtype and shape say.
    """
    data = _checked_source(src, dtype, shape)
    return choose_plan(data, dtype, resolve_level(level))


def _checked_source(src: Buffer, dtype: str, shape: Sequence[int]) -> ByteArray:
    _, nbytes = _checked_nbytes(dtype, shape)
    data = as_bytes(src, "src")
    if data.size != nbytes:
        raise ValueError(f"{dtype} of shape {tuple(shape)} has {nbytes} bytes, src {data.size}")
    return data


def compress_buffer(
    src: Buffer,
    dtype: str,
    shape: Sequence[int],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    out: Buffer | None = None,
    name: str | None = None,
) -> Frame:
    """Packs the bytes of one tensor.

    Args:
        src: the tensor's bytes in C order; only read.
        dtype: safetensors' name, such as "BF16".
        shape: the tensor's shape.
        level: "fast", "default" or "max".
        threads: None for the cores of this process, at most 8.
        out: writable memory of at least `max_frame_nbytes` bytes to build the frame in; the frame is a view of it.
        name: the tensor's name, for messages.

    Returns:
        The frame.

    Raises:
        TypeError: a buffer is not C-contiguous, or `out` is read-only.
        ValueError: sizes, dtype, level or threads that do not fit.
    """
    data = _checked_source(src, dtype, shape)
    plan = choose_plan(data, dtype, resolve_level(level))
    capacity = max_frame_nbytes(dtype, shape)
    memory = np.empty(capacity, np.uint8) if out is None else as_writable_bytes(out, "out")
    if memory.size < capacity:
        raise ValueError(f"out has {memory.size} bytes; a frame of this tensor may take {capacity}")
    row = DTYPE_BY_NAME[dtype]
    n_planes = _n_planes(row, plan.split)
    n_chunks = -(-data.size // (row.unit_nbytes << plan.chunk_log))
    table = np.empty((n_chunks, 1 + n_planes), np.uint32)
    digests = _empty_digests(data.size)
    header_nbytes = _header_nbytes(len(shape), n_chunks, n_planes)
    encode = _encode_zstd if plan.zstd else _encode_planes
    used = encode(data, row, plan, memory[header_nbytes:], table, digests, resolve_threads(threads))
    header = _Header(
        row,
        tuple(shape),
        plan.split,
        int(plan.level),
        plan.chunk_log,
        _root_hash(data, digests),
        header_nbytes,
        header_nbytes + used,
        table,
    )
    _write_header(header, memory[:header_nbytes])
    return Frame(memory[: header.frame_nbytes], header, name, 0, plan)


def _encode_planes(
    data: ByteArray,
    dtype: DType,
    plan: Plan,
    dst: ByteArray,
    table: Table,
    digests: ByteArray,
    threads: int,
) -> int:
    return _core.encode_chunks(
        data,
        dtype.unit_nbytes,
        int(plan.split),
        plan.chunk_log,
        int(plan.level),
        dst,
        table,
        digests,
        threads,
        int(choose_isa()),
    )


def _in_order(work: Callable[[int], Any], n: int, threads: int) -> Iterator[Any]:
    """Results of work(0), ..., work(n - 1) in order, with a bounded number ahead."""
    if threads == 1 or n < 2:
        yield from map(work, range(n))
        return
    with ThreadPoolExecutor(min(threads, n)) as pool:
        ahead = 2 * threads
        futures = [pool.submit(work, i) for i in range(min(ahead, n))]
        for i in range(n):
            yield futures[i].result()
            if i + ahead < n:
                futures.append(pool.submit(work, i + ahead))


def _encode_zstd(
    data: ByteArray,
    dtype: DType,
    plan: Plan,
    dst: ByteArray,
    table: Table,
    digests: ByteArray,
    threads: int,
) -> int:
    isa = int(choose_isa())
    chunk_nbytes = dtype.unit_nbytes << plan.chunk_log
    _core.leaf_digests(data, digests, threads, isa)

    def compress(chunk: int) -> tuple[ByteArray, bytes]:
        piece = data[chunk * chunk_nbytes : (chunk + 1) * chunk_nbytes]
        return piece, zstd.compress_chunk(piece, plan.level)

    used = 0
    for chunk, (piece, packed) in enumerate(_in_order(compress, len(table), threads)):
        pays = len(packed) < piece.size
        mode, stream = (Mode.ZSTD, as_bytes(packed)) if pays else (Mode.STORED, piece)
        end = used + _round_up(stream.size)
        dst[used : used + stream.size] = stream
        dst[used + stream.size : end] = 0
        table[chunk] = _core.crc32c(dst[used:end], isa), mode << STREAM_NBYTES_BITS | stream.size
        used = end
    return used


def _write_header(header: _Header, dst: ByteArray) -> None:
    fixed = FIXED_HEADER.pack(
        FRAME_MAGIC,
        FRAME_VERSION,
        header.dtype.code,
        len(header.shape),
        header.split,
        CRITICAL_FLAGS,
        header.level,
        header.chunk_log,
        header.header_nbytes,
        header.frame_nbytes,
        header.content_hash,
        len(header.table),
        0,
    )
    text = fixed + np.array(header.shape, "<u8").tobytes() + header.table.tobytes()
    dst[: len(text)] = np.frombuffer(text, np.uint8)
    dst[len(text) :] = 0
    crc = _core.crc32c(dst, int(choose_isa()))
    dst[HEADER_CRC_OFFSET:FIXED_HEADER_NBYTES] = np.array([crc], "<u4").view(np.uint8)


class Frame:
    """One packed tensor: a checked header and a view of the bytes.

    Make one with `compress_buffer` (or `compress` of `packhorse.numpy` and `packhorse.torch`), or read one with `from_buffer`. It keeps the
    buffer it looks at alive. Frames are immutable and safe to use from several threads.
    """

    def __init__(
        self,
        data: ByteArray,
        header: _Header,
        name: str | None,
        offset: int,
        plan: Plan | None = None,
    ) -> None:
        """Private: use `from_buffer`."""
        self._data = data
        self._header = header
        self._name = name
        self._offset = offset
        self._plan = plan

    @classmethod
    def from_buffer(
        cls,
        buffer: Buffer,
        *,
        name: str | None = None,
        max_nbytes: int | None = None,
        offset: int = 0,
    ) -> Frame:
        """Reads and checks the header of a frame; the payload is not touched.

        Args:
            buffer: the frame's bytes, exactly; kept, not copied.
            name: the tensor's name, for messages.
            max_nbytes: refuse a tensor of more decoded bytes.
            offset: where the buffer lies in its file, for messages.

        Raises:
            TruncationError: the buffer is shorter than the frame says.
            CorruptionError: a rule of docs/format.md is broken.
            CompatibilityError: a version, dtype, flag or mode that this release does not know.
            TypeError: not a C-contiguous buffer.
        """
        data = as_bytes(buffer, "buffer")
        header = _HeaderReader(data, name, offset).read(max_nbytes)
        return cls(data, header, name, offset)

    @property
    def nbytes(self) -> int:
        """Length of the frame in bytes, a multiple of 64."""
        return self._header.frame_nbytes

    @property
    def dtype(self) -> str:
        """safetensors' name of the dtype."""
        return self._header.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._header.shape

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self._header.nbytes

    @property
    def content_hash(self) -> bytes:
        """16 bytes that name the tensor's content (docs/format.md, section 7)."""
        return self._header.content_hash

    @property
    def split(self) -> Split:
        """How units were split into planes."""
        return self._header.split

    @property
    def level(self) -> Level | None:
        """The level it was packed at, if the frame says so."""
        level = self._header.level
        return Level(level) if level in Level.__members__.values() else None

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return len(self._header.table)

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of a full chunk."""
        return self._header.dtype.unit_nbytes << self._header.chunk_log

    @property
    def ratio(self) -> float:
        """Decoded bytes divided by the frame's bytes, header included."""
        return self.logical_nbytes / self.nbytes

    @property
    def plan(self) -> Plan | None:
        """The plan it was packed by; None for a frame that was read."""
        return self._plan

    def __repr__(self) -> str:
        return f"Frame({self.dtype}, {self.shape}, nbytes={self.nbytes}, ratio={self.ratio:.3f})"

    def to_bytes(self) -> bytes:
        """A copy of the frame's bytes."""
        return self._data.tobytes()

    def buffer(self) -> memoryview:
        """The frame's bytes, read-only, not copied."""
        return memoryview(self._data).toreadonly()

    def planes(self) -> tuple[PlaneSummary, ...]:
        """Sizes and modes of each plane."""
        header = self._header
        lengths = (header.table[:, 1:] & STREAM_NBYTES_MASK).sum(axis=0, dtype=np.int64)
        modes = header.table[:, 1:] >> STREAM_NBYTES_BITS
        logical = header.nbytes // header.n_planes
        return tuple(
            PlaneSummary(
                p,
                _plane_name(header.dtype, header.split, p),
                int(lengths[p]),
                logical,
                {Mode(int(m)): int(n) for m, n in zip(*np.unique(modes[:, p], return_counts=True))},
            )
            for p in range(header.n_planes)
        )

    def decompress_into(
        self,
        dst: Buffer,
        *,
        start: int = 0,
        stop: int | None = None,
        threads: int | None = None,
        check: bool = True,
    ) -> None:
        """Decodes bytes `start` to `stop` of the tensor (C order) into the caller's memory; only chunks that the range meets are read.

        Args:
            dst: writable buffer of exactly `stop - start` bytes. After an error its content is undefined.
            start: first byte.
            stop: one past the last byte; None for the end.
            threads: None for the cores of this process, at most 8.
            check: compare each chunk's CRC32C first. Without it a damaged payload may decode to wrong data, but never harms.

        Raises:
            CorruptionError: a checksum does not match or a stream breaks a rule; names tensor, chunk and byte offset.
            TypeError: `dst` is not a writable C-contiguous buffer.
            ValueError: the range is not inside the tensor, or `dst` does not fit it.
        """
        stop = self.logical_nbytes if stop is None else stop
        target = as_writable_bytes(dst, "dst")
        if not 0 <= start <= stop <= self.logical_nbytes:
            raise ValueError(f"bytes {start}:{stop} are not inside 0:{self.logical_nbytes}")
        if target.size != stop - start:
            raise ValueError(f"dst has {target.size} bytes; bytes {start}:{stop} need {stop - start}")
        if np.any(self._header.table[:, 1] >> STREAM_NBYTES_BITS == Mode.ZSTD):
            self._decode_zstd(target, start, resolve_threads(threads), check)
        else:
            self._decode_planes(target, start, resolve_threads(threads), check)

    def verify(self, *, threads: int | None = None) -> None:
        """Checks everything: the CRC32C of every chunk, every stream, and the content hash of the decoded tensor.

        Takes as much memory as the decoded tensor.

        Raises:
            CorruptionError: what is wrong, with tensor, chunk and byte offset.
        """
        decoded = np.empty(self.logical_nbytes, np.uint8)
        self.decompress_into(decoded, threads=threads)
        if content_hash(decoded, threads=threads) != self.content_hash:
            raise self._error("the decoded tensor does not have the recorded content hash", 24)

    def _decode_planes(self, dst: ByteArray, start: int, threads: int, check: bool) -> None:
        header = self._header
        status, chunk = _core.decode_range(
            self._data[header.header_nbytes :],
            header.table,
            header.dtype.unit_nbytes,
            int(header.split),
            header.chunk_log,
            header.nbytes,
            start,
            dst,
            check,
            threads,
            int(choose_isa()),
        )
        if status:
            raise self._chunk_error(chunk, STATUS_WORDS[status])

    def _decode_zstd(self, dst: ByteArray, start: int, threads: int, check: bool) -> None:
        stop = start + dst.size
        first = start // self.chunk_nbytes
        n_wanted = -(-stop // self.chunk_nbytes) - first if dst.size else 0

        def decode(item: int) -> None:
            at = (first + item) * self.chunk_nbytes
            end = min(at + self.chunk_nbytes, self.logical_nbytes)
            lo, hi = max(at, start), min(end, stop)
            if (lo, hi) == (at, end):
                self._decode_zstd_chunk(first + item, dst[at - start : end - start], check)
                return
            whole = np.empty(end - at, np.uint8)
            self._decode_zstd_chunk(first + item, whole, check)
            dst[lo - start : hi - start] = whole[lo - at : hi - at]

        for _ in _in_order(decode, n_wanted, threads):
            pass

    def _decode_zstd_chunk(self, chunk: int, dst: ByteArray, check: bool) -> None:
        crc, descriptor = (int(value) for value in self._header.table[chunk])
        offset, nbytes = self._chunk_offset(chunk), descriptor & STREAM_NBYTES_MASK
        if check and crc != _core.crc32c(
            self._data[offset : offset + _round_up(nbytes)], int(choose_isa())
        ):
            raise self._chunk_error(chunk, STATUS_WORDS[1])
        stream = self._data[offset : offset + nbytes]
        mode = descriptor >> STREAM_NBYTES_BITS
        if mode == Mode.ZSTD:
            try:
                zstd.decompress_chunk(stream, dst)
            except CorruptionError as error:
                raise self._chunk_error(chunk, str(error)) from error
        elif mode == Mode.CONSTANT:
            dst.reshape(-1, nbytes)[:] = stream
        elif mode == Mode.STORED:
            dst[:] = stream
        else:
            self._decode_planes(dst, chunk * self.chunk_nbytes, 1, check)

    def _chunk_offset(self, chunk: int) -> int:
        lengths = (self._header.table[:chunk, 1:] & STREAM_NBYTES_MASK).sum(axis=1, dtype=np.int64)
        return self._header.header_nbytes + int((-(-lengths // FRAME_ALIGNMENT)).sum()) * FRAME_ALIGNMENT

    def _chunk_error(self, chunk: int, words: str) -> CorruptionError:
        return self._error(f"chunk {chunk} of {self.n_chunks}: {words}", self._chunk_offset(chunk))

    def _error(self, words: str, at: int) -> CorruptionError:
        return CorruptionError(f"{_label(self._name)}byte {self._offset + at}: {words}")


def _label(name: str | None) -> str:
    return "" if name is None else f"tensor {name!r}: "


def _plane_name(dtype: DType, split: Split, plane: int) -> str:
    if split == Split.WHOLE:
        return "all"
    if split == Split.FLOAT and plane < 2:
        return ("exponent", "sign+mantissa")[plane]
    kind = "mantissa" if split == Split.FLOAT else "byte"
    return f"{kind} {dtype.unit_nbytes - 1 - plane}"


class _HeaderReader:
    """Checks a frame's header in the order of docs/format.md, section 2, before anything is believed."""

    def __init__(self, data: ByteArray, name: str | None, offset: int) -> None:
        self.data = data
        self.name = name
        self.offset = offset

    def fail(self, at: int, words: str, kind: type[Exception] = CorruptionError) -> Exception:
        return kind(f"{_label(self.name)}byte {self.offset + at}: {words}")

    def need(self, nbytes: int, what: str) -> None:
        if self.data.size < nbytes:
            words = f"{what} needs {nbytes} bytes, {self.data.size} are left; the data is cut off"
            raise self.fail(self.data.size, words, TruncationError)

    def read(self, max_nbytes: int | None) -> _Header:
        self.need(FIXED_HEADER_NBYTES, "a frame header")
        fields = FIXED_HEADER.unpack(self.data[:FIXED_HEADER_NBYTES].tobytes())
        magic, version, code, n_dims, split_code, flags, level, chunk_log = fields[:8]
        header_nbytes, frame_nbytes, digest, n_chunks, _ = fields[8:]
        if magic != FRAME_MAGIC:
            raise self.fail(0, f"magic is {magic.hex()}, a frame begins with {FRAME_MAGIC.hex()}")
        if version != FRAME_VERSION:
            words = f"frame version is {version}, this release reads {FRAME_VERSION}"
            raise self.fail(4, words + "; upgrade packhorse", CompatibilityError)
        if flags != CRITICAL_FLAGS:
            words = f"critical flags are {flags:#06x}, this release knows none; upgrade packhorse"
            raise self.fail(8, words, CompatibilityError)
        dtype, split = self.read_kind(code, split_code)
        if n_dims > MAX_DIMS:
            raise self.fail(6, f"{n_dims} dimensions, at most {MAX_DIMS} are allowed")
        if not MIN_CHUNK_LOG <= chunk_log <= MAX_CHUNK_LOG or (
            dtype.unit_nbytes << chunk_log > MAX_CHUNK_NBYTES
        ):
            raise self.fail(11, f"chunk_log is {chunk_log}, out of range for {dtype.name}")
        n_planes = _n_planes(dtype, split)
        if header_nbytes != _header_nbytes(n_dims, n_chunks, n_planes):
            raise self.fail(12, f"header_nbytes is {header_nbytes}, which its fields contradict")
        self.need(header_nbytes, "the header")
        self.check_crc(header_nbytes)
        shape, nbytes = self.read_shape(n_dims, dtype)
        if n_chunks != -(-nbytes // (dtype.unit_nbytes << chunk_log)):
            raise self.fail(40, f"n_chunks is {n_chunks}, which shape {shape} contradicts")
        if max_nbytes is not None and nbytes > max_nbytes:
            words = f"the tensor has {nbytes} bytes, more than max_nbytes = {max_nbytes}"
            raise self.fail(FIXED_HEADER_NBYTES, words)
        table_at = FIXED_HEADER_NBYTES + 8 * n_dims
        table_end = table_at + 4 * n_chunks * (1 + n_planes)
        table = self.data[table_at:table_end].copy().view("<u4").reshape(n_chunks, 1 + n_planes)
        if self.data[table_end:header_nbytes].any():
            raise self.fail(table_end, "padding of the header is not zero")
        header = _Header(
            dtype, shape, split, level, chunk_log, digest, header_nbytes, frame_nbytes, table
        )
        self.check_descriptors(header, table_at)
        self.check_length(header)
        return header

    def read_kind(self, code: int, split_code: int) -> tuple[DType, Split]:
        if code not in DTYPE_BY_CODE:
            words = f"dtype code {code} is unknown to this release; upgrade packhorse"
            raise self.fail(5, words, CompatibilityError)
        dtype = DTYPE_BY_CODE[code]
        if split_code not in dtype.splits:
            raise self.fail(7, f"split {split_code} is not allowed for {dtype.name}")
        return dtype, Split(split_code)

    def check_crc(self, header_nbytes: int) -> None:
        text = self.data[:header_nbytes].copy()
        stored = int(text[HEADER_CRC_OFFSET:FIXED_HEADER_NBYTES].view("<u4")[0])
        text[HEADER_CRC_OFFSET:FIXED_HEADER_NBYTES] = 0
        if _core.crc32c(text, int(choose_isa())) != stored:
            raise self.fail(HEADER_CRC_OFFSET, "the header's checksum does not match")

    def read_shape(self, n_dims: int, dtype: DType) -> tuple[tuple[int, ...], int]:
        end = FIXED_HEADER_NBYTES + 8 * n_dims
        dims = self.data[FIXED_HEADER_NBYTES:end].copy().view("<u8")
        shape = tuple(int(dim) for dim in dims)
        # A zero dimension must not hide an overflow of the others.
        if math.prod(max(dim, 1) for dim in shape) * dtype.bits >= 1 << 63:
            raise self.fail(FIXED_HEADER_NBYTES, f"shape {shape} overflows")
        numel = math.prod(shape)
        if numel * dtype.bits % 8:
            words = f"{numel} elements of {dtype.name} are not a whole number of bytes"
            raise self.fail(FIXED_HEADER_NBYTES, words)
        return shape, _logical_nbytes(dtype, numel)

    def check_descriptors(self, header: _Header, table_at: int) -> None:
        modes = header.table[:, 1:] >> STREAM_NBYTES_BITS
        lengths = header.table[:, 1:] & STREAM_NBYTES_MASK
        unit = header.dtype.unit_nbytes
        item = unit if header.split == Split.WHOLE else 1
        units = np.full((len(header.table), 1), 1 << header.chunk_log, np.int64)
        if len(units):
            units[-1] = header.nbytes // unit - (len(units) - 1 << header.chunk_log)
        if (modes > max(Mode)).any():
            raise self.bad_descriptor(modes > max(Mode), table_at, "mode", CompatibilityError)
        one_byte = item == 1
        misplaced = (modes == Mode.ZSTD) & (header.split != Split.WHOLE)
        misplaced |= ((modes == Mode.PALETTE) | (modes == Mode.RANS)) & (not one_byte)
        stored, rans = modes == Mode.STORED, modes == Mode.RANS
        missing = units * item - lengths
        # Only the last stored plane of a chunk may be shorter, and only by bytes that rANS streams carry.
        last = header.n_planes - 1 - np.argmax(stored[:, ::-1], axis=1)
        carrier = np.arange(header.n_planes) == last[:, None]
        short = carrier & one_byte & rans.any(axis=1, keepdims=True) & (missing > 0)
        wrong = stored & (missing != 0) & ~short
        wrong |= (modes == Mode.CONSTANT) & (lengths != item)
        if (misplaced | wrong).any():
            raise self.bad_descriptor(misplaced | wrong, table_at, "mode or length")

    def bad_descriptor(
        self, bad: NDArray[np.bool_], at: int, what: str, kind: type[Exception] = CorruptionError
    ) -> Exception:
        chunk, plane = (int(i) for i in np.argwhere(bad)[0])
        offset = at + 4 * (chunk * (bad.shape[1] + 1) + 1 + plane)
        words = f"descriptor of chunk {chunk}, plane {plane}: {what} is not allowed"
        return self.fail(offset, words, kind)

    def check_length(self, header: _Header) -> None:
        lengths = (header.table[:, 1:] & STREAM_NBYTES_MASK).sum(axis=1, dtype=np.int64)
        payload = int((-(-lengths // FRAME_ALIGNMENT)).sum()) * FRAME_ALIGNMENT
        if header.frame_nbytes != header.header_nbytes + payload:
            words = f"frame_nbytes is {header.frame_nbytes}, its chunks make it"
            raise self.fail(16, f"{words} {header.header_nbytes + payload}")
        self.need(header.frame_nbytes, "the frame")
        if self.data.size > header.frame_nbytes:
            extra = self.data.size - header.frame_nbytes
            raise self.fail(header.frame_nbytes, f"{extra} bytes follow the end of the frame")
