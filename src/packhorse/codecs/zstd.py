"""Zstandard for whole chunks (docs/format.md, mode 4): repetitive integers, ids, masks.

Through the zstandard package, which releases the GIL. Each chunk is a frame of its own that
declares its content size, so that a decoder knows what it will get before it allocates anything.
"""

import zstandard

from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.errors import CorruptionError
from packhorse.layout import Level

__all__ = ["compress_chunk", "decompress_chunk"]

_LEVELS = {Level.FAST: 1, Level.DEFAULT: 3, Level.MAX: 12}


def compress_chunk(chunk: ByteArray, level: Level) -> bytes:
    """One Zstandard frame of the chunk's bytes, its content size declared, without a checksum (the
    chunk has its own)."""
    compressor = zstandard.ZstdCompressor(level=_LEVELS[level], write_checksum=False)
    return compressor.compress(memoryview(chunk))


def decompress_chunk(stream: ByteArray, dst: ByteArray) -> None:
    """Decodes a stream into `dst`, which has exactly the chunk's length.

    Raises:
        CorruptionError: not one Zstandard frame that declares and holds `dst.size` bytes.
    """
    data = as_bytes(stream)
    try:
        parameters = zstandard.get_frame_parameters(data[:18].tobytes())
        if parameters.content_size != dst.size or parameters.dict_id != 0:
            raise CorruptionError(
                f"zstd stream declares {parameters.content_size} bytes where {dst.size} belong"
            )
        decompressor = zstandard.ZstdDecompressor()
        plain = decompressor.decompress(
            memoryview(data), max_output_size=dst.size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptionError(f"zstd stream cannot be decoded: {error}") from error
    dst[:] = as_bytes(plain)
