"""Chunks of whole units, coded by Zstandard or stored beside those (docs/format.md, section 6).

The zstandard package codes one chunk at a time and lets go of Python's lock meanwhile, so chunks
are spread over Python's threads here; the core has threads of its own for all other modes.
"""

from __future__ import annotations

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.plan import Plan
from packhorse.frame_header import Table, padded
from packhorse.layout import STREAM_NBYTES_BITS, DType, Mode
from packhorse.threads import in_order

__all__ = ["encode_zstd"]


def encode_zstd(
    data: ByteArray,
    dtype: DType,
    plan: Plan,
    dst: ByteArray,
    table: Table,
    leaves: ByteArray,
    threads: int,
    isa: int,
) -> int:
    """Encodes a tensor in chunks of whole units.

    Args:
        data: all bytes of the tensor.
        dtype: its dtype.
        plan: what was chosen for it.
        dst: where the payload goes.
        table: a row for each chunk, to be filled.
        leaves: 16 bytes for each leaf of the content hash, to be filled.
        threads: how many to use.
        isa: the number of the instruction set of the call.

    Returns:
        The length of the payload.
    """
    chunk_nbytes = dtype.unit_nbytes << plan.chunk_log
    _core.leaf_digests(data, leaves, threads, isa)
    long_matches = zstd.seeks_long_matches(plan.level, data.size, plan.estimated_nbytes)

    def compress(chunk: int) -> tuple[ByteArray, bytes]:
        piece = data[chunk * chunk_nbytes : (chunk + 1) * chunk_nbytes]
        return piece, zstd.compress_chunk(piece, plan.level, long_matches=long_matches)

    used = 0
    for chunk, (piece, packed) in enumerate(in_order(compress, len(table), threads)):
        pays = len(packed) < piece.size
        mode, stream = (Mode.ZSTD, as_bytes(packed)) if pays else (Mode.STORED, piece)
        end = used + padded(stream.size)
        dst[used : used + stream.size] = stream
        dst[used + stream.size : end] = 0
        table[chunk] = _core.crc32c(dst[used:end], isa), mode << STREAM_NBYTES_BITS | stream.size
        used = end
    return used
