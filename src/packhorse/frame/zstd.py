"""Chunks of whole units, coded by Zstandard or stored beside those (docs/format.md, section 6).

The zstandard package codes one chunk at a time and lets go of Python's lock meanwhile, so chunks
are spread over Python's threads here; the core has threads of its own for all other modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import STATUS_WORDS, ByteArray, as_bytes
from packhorse.codecs.content import leaves_from
from packhorse.codecs.plan import Plan
from packhorse.errors import CorruptionError
from packhorse.frame.base import Base
from packhorse.frame.header import FrameHeader, Table, padded
from packhorse.layout import STREAM_NBYTES_BITS, STREAM_NBYTES_MASK, DType, Mode, Status
from packhorse.threads import in_order

__all__ = ["ZstdJob", "encode_zstd"]


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
        leaves: for the content hash (`codecs/content.py`), to be filled.
        threads: how many to use.
        isa: the number of the instruction set of the call.

    Returns:
        The length of the payload.
    """
    chunk_nbytes = dtype.unit_nbytes << plan.chunk_log
    long_matches = zstd.seeks_long_matches(plan.level, data.size, plan.estimated_nbytes)
    idle: list[ByteArray] = []  # copies of chunks that are done with

    def compress(chunk: int) -> tuple[ByteArray, bytes]:
        start = chunk * chunk_nbytes
        source = data[start : start + chunk_nbytes]
        memory = idle.pop() if idle else np.empty(min(chunk_nbytes, data.size), np.uint8)
        piece = memory[: source.size]
        _core.copy_with_leaves(source, piece, leaves_from(leaves, start, source.size), isa)
        return memory, zstd.compress_chunk(piece, plan.level, long_matches=long_matches)

    used = 0
    for chunk, (memory, packed) in enumerate(in_order(compress, len(table), threads)):
        nbytes = min(chunk_nbytes, data.size - chunk * chunk_nbytes)
        pays = len(packed) < nbytes
        mode, stream = (Mode.ZSTD, as_bytes(packed)) if pays else (Mode.STORED, memory[:nbytes])
        end = used + padded(stream.size)
        dst[used : used + stream.size] = stream
        dst[used + stream.size : end] = 0
        table[chunk] = _core.crc32c(dst[used:end], isa), mode << STREAM_NBYTES_BITS | stream.size
        used = end
        idle.append(memory)
    return used


@dataclass(frozen=True)
class ZstdJob:
    """Decodes a frame of whole units, of which some chunks are coded by Zstandard.

    Attributes:
        header: the frame's.
        data: the frame.
        side: its side data, decoded.
        base: its base, if it has one.
        fail: makes the error for a chunk, from its number and words.
        check: whether to compare each chunk's CRC32C first.
        isa: the number of the instruction set of the call.
    """

    header: FrameHeader
    data: ByteArray
    side: ByteArray
    base: Base
    fail: Callable[[int, str], CorruptionError]
    check: bool
    isa: int

    def decode(self, dst: ByteArray, start: int, threads: int) -> None:
        """Decodes as many bytes of the tensor as `dst` takes, from byte `start` on."""
        header = self.header
        chunk_nbytes = header.dtype.unit_nbytes << header.chunk_log
        stop = start + dst.size
        first = start // chunk_nbytes
        n_wanted = -(-stop // chunk_nbytes) - first if dst.size else 0
        offsets = header.chunk_offsets()
        decoder = zstd.ChunkDecoder()

        def decode_one(item: int) -> None:
            chunk, offset = first + item, int(offsets[first + item])
            at = chunk * chunk_nbytes
            end = min(at + chunk_nbytes, header.nbytes)
            lo, hi = max(at, start), min(end, stop)
            if (lo, hi) == (at, end):
                self._decode_chunk(decoder, chunk, offset, dst[at - start : end - start])
                return
            whole = np.empty(end - at, np.uint8)
            self._decode_chunk(decoder, chunk, offset, whole)
            dst[lo - start : hi - start] = whole[lo - at : hi - at]

        for _ in in_order(decode_one, n_wanted, threads):
            pass

    def _decode_chunk(
        self, decoder: zstd.ChunkDecoder, chunk: int, offset: int, dst: ByteArray
    ) -> None:
        crc, descriptor = (int(value) for value in self.header.table[chunk])
        nbytes = descriptor & STREAM_NBYTES_MASK
        end = offset + padded(nbytes)
        if self.check and crc != _core.crc32c(self.data[offset:end], self.isa):
            raise self.fail(chunk, STATUS_WORDS[Status.CHECKSUM])
        stream = self.data[offset : offset + nbytes]
        if self.data[offset + nbytes : end].any():
            raise self.fail(chunk, STATUS_WORDS[Status.RESERVED])
        mode = descriptor >> STREAM_NBYTES_BITS
        if mode == Mode.ZSTD:
            try:
                decoder.decode(stream, dst)
            except CorruptionError as error:
                raise self.fail(chunk, str(error)) from error
        elif mode == Mode.CONSTANT:
            dst.reshape(-1, nbytes)[:] = stream
        elif mode == Mode.STORED:
            dst[:] = stream
        else:
            self._decode_other_chunk(chunk, offset, dst)

    def _decode_other_chunk(self, chunk: int, offset: int, dst: ByteArray) -> None:
        """A chunk between those of zstd, its checksum compared already: for the core a tensor of
        its own, so that it does not look at the other chunks."""
        header = self.header
        base = self.base.part(chunk << header.chunk_log, dst.size // header.dtype.unit_nbytes)
        status, _ = _core.decode_range(
            self.data[offset:],
            header.table[chunk : chunk + 1],
            header.dtype.unit_nbytes,
            header.split,
            header.chunk_log,
            dst.size,
            self.side,
            header.matrix[0],
            base.data,
            base.is_float,
            base.cast,
            0,
            dst,
            False,
            1,
            self.isa,
        )
        if status:
            raise self.fail(chunk, STATUS_WORDS[status])
