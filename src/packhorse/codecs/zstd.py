"""Zstandard for whole chunks (docs/format.md, mode 4): repetitive bytes and integers.

The zstandard package does the work and releases the GIL meanwhile. Each chunk is a Zstandard
frame of its own that declares its content size, so that a decoder knows how much it will get before
it allocates anything.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zstandard

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.errors import CorruptionError
from packhorse.layout import Level

__all__ = [
    "ChunkDecoder",
    "compress_chunk",
    "estimate_nbytes",
    "memory_is_told",
    "seeks_long_matches",
]

_LEVELS = {Level.FAST: 1, Level.DEFAULT: 3, Level.MAX: 12}
_QUICK_LEVELS = {**_LEVELS, Level.MAX: 9}
_MAX_HEADER_NBYTES = 18
_MIN_LONG_NBYTES = 1 << 19  # in a shorter chunk, the ordinary search sees nearly everything
_SHORT_NBYTES = 1 << 18  # the most that is decoded to memory of its own and copied
_MAX_LONG_RATIO = 32  # above it, the ordinary search finds long matches too, and faster


def seeks_long_matches(level: Level, nbytes: int, estimated_nbytes: int) -> bool:
    """Whether to search all of each chunk of a tensor for long matches.

    Args:
        level: how hard to try.
        nbytes: length of the tensor.
        estimated_nbytes: bytes of its streams, estimated from a sample.
    """
    return level == Level.DEFAULT and nbytes < _MAX_LONG_RATIO * estimated_nbytes


@contextmanager
def memory_is_told() -> Iterator[None]:
    """Raises `MemoryError` if the library runs out of memory. The library itself raises `ZstdError`
    for that, as for bad data.

    Raises:
        MemoryError: there is too little memory.
    """
    try:
        yield
    except zstandard.ZstdError as error:
        _tell(error)
        raise


def _tell(error: zstandard.ZstdError) -> None:
    if "Allocation error" in str(error):
        raise MemoryError(f"Zstandard: {error}") from error


class _Kept(threading.local):
    """What a thread keeps: making one takes longer than coding a small tensor with it."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_kept = _Kept()


def estimate_nbytes(piece: ByteArray, level: Level, *, is_quick: bool = False) -> int:
    """Returns the length of a short piece once it is compressed by the ordinary search; or, at
    level `max`, by a quick one, which takes a fifth of the time and a fifth more bytes at most."""
    number = _QUICK_LEVELS[level] if is_quick else _LEVELS[level]
    with memory_is_told():
        return len(_compressor(number).compress(memoryview(piece)))


def _compressor(number: int) -> zstandard.ZstdCompressor:
    """This thread's compressor for a level of Zstandard."""
    compressors = _kept.compressors
    if number not in compressors:
        compressors[number] = zstandard.ZstdCompressor(level=number, write_checksum=False)
    return compressors[number]


def compress_chunk(chunk: ByteArray, level: Level, *, long_matches: bool = False) -> bytes:
    """Compresses a chunk to one Zstandard frame that declares its content size and has no checksum,
    as the chunk has its own."""
    if long_matches and chunk.size >= _MIN_LONG_NBYTES:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVELS[level],
            source_size=chunk.size,
            write_checksum=False,
            enable_ldm=True,
            ldm_hash_log=14,
            ldm_bucket_size_log=1,
            ldm_min_match=64,
            ldm_hash_rate_log=7,
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
    else:
        compressor = _compressor(_LEVELS[level])
    try:  # many chunks are short, so without the cost of a context
        return compressor.compress(memoryview(chunk))
    except zstandard.ZstdError as error:
        _tell(error)
        raise


class ChunkDecoder:
    """Decodes the chunks of one tensor, from several threads at once. Each chunk reuses memory of
    the library that an earlier one has used."""

    def __init__(self) -> None:
        self._idle: list[zstandard.ZstdDecompressor] = []

    def decode(self, stream: ByteArray, dst: ByteArray) -> None:
        """Decodes a stream into `dst`, which has exactly the chunk's length. After an error, the
        content of `dst` is undefined.

        Raises:
            CorruptionError: not one Zstandard frame that declares and holds `dst.size` bytes.
        """
        try:
            _check_frame(as_bytes(stream), dst.size)
            if dst.size <= _SHORT_NBYTES:
                with memory_is_told():
                    decoded = _kept.decompressor.decompress(memoryview(stream))
                if len(decoded) != dst.size:
                    raise CorruptionError(f"zstd stream holds {len(decoded)} bytes")
                dst[:] = np.frombuffer(decoded, np.uint8)
                return
            decompressor = self._idle.pop() if self._idle else zstandard.ZstdDecompressor()
            with memory_is_told(), decompressor.stream_reader(memoryview(stream)) as reader:
                n = reader.readinto(memoryview(dst))
                # Without asking for one more byte, the end of the frame might not be checked.
                whole = n == dst.size and not reader.read(1)
        except zstandard.ZstdError as error:
            raise CorruptionError(f"zstd stream cannot be decoded: {error}") from error
        if not whole:
            raise CorruptionError(f"zstd stream does not hold the {dst.size} bytes it declares")
        self._idle.append(decompressor)


def _check_frame(stream: ByteArray, nbytes: int) -> None:
    """Checks, without decoding, that a stream is one whole frame that declares `nbytes`."""
    head = stream[:_MAX_HEADER_NBYTES].tobytes()
    if not head.startswith(zstandard.FRAME_HEADER):
        raise CorruptionError("zstd stream does not begin with a Zstandard frame's magic")
    parameters = zstandard.get_frame_parameters(head)
    if parameters.content_size != nbytes or parameters.dict_id != 0:
        raise CorruptionError(
            f"zstd stream declares {parameters.content_size} bytes where {nbytes} belong"
        )
    header_nbytes = zstandard.frame_header_size(head)
    end = _core.zstd_frame_nbytes(stream, header_nbytes, parameters.has_checksum)
    if end != stream.size:
        raise CorruptionError(f"zstd stream has {stream.size} bytes; its frame ends at {end}")
