"""Encodes and decodes frames whose chunks are whole units, coded by Zstandard or stored
(docs/format.md, section 6).

The zstandard package codes one chunk at a time and releases the GIL meanwhile, so Python threads
share the chunks here. The core has threads of its own for all other modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packhorse import _core
from packhorse._core import Base, EncodedTensor, Geometry
from packhorse.codecs import zstd
from packhorse.codecs.base import STATUS_WORDS, ByteArray, as_bytes
from packhorse.codecs.content import leaves_from
from packhorse.codecs.plan import Plan
from packhorse.errors import CorruptionError
from packhorse.frame.base import part_of
from packhorse.frame.header import FrameHeader, Table, padded
from packhorse.layout import STREAM_NBYTES_BITS, STREAM_NBYTES_MASK, Mode, Status
from packhorse.threads import in_order

__all__ = ["ZstdJob", "encode_zstd"]


def encode_zstd(
    data: ByteArray, plan: Plan, dst: ByteArray, table: Table, leaves: ByteArray, threads: int
) -> int:
    """Encodes chunks of whole units.

    Args:
        data: the bytes of the chunks.
        plan: what was chosen for their tensor.
        dst: memory for the payload.
        table: gets a row for each chunk.
        leaves: get the hashes of the chunks' leaves (`codecs/content.py`).
        threads: how many to use.

    Returns:
        The length of the payload.
    """
    chunk_nbytes = plan.geometry.chunk_nbytes
    long_matches = zstd.seeks_long_matches(plan.level, plan.nbytes, plan.estimated_nbytes)
    idle: list[ByteArray] = []  # memory of chunks that are done

    def compress(chunk: int) -> tuple[ByteArray, bytes]:
        start = chunk * chunk_nbytes
        source = data[start : start + chunk_nbytes]
        memory = idle.pop() if idle else np.empty(min(chunk_nbytes, data.size), np.uint8)
        piece = memory[: source.size]
        _core.copy_with_leaves(source, piece, leaves_from(leaves, start, source.size))
        return memory, zstd.compress_chunk(piece, plan.level, long_matches=long_matches)

    used = 0
    for chunk, (memory, packed) in enumerate(in_order(compress, len(table), threads)):
        nbytes = min(chunk_nbytes, data.size - chunk * chunk_nbytes)
        pays = len(packed) < nbytes
        mode, stream = (Mode.ZSTD, as_bytes(packed)) if pays else (Mode.STORED, memory[:nbytes])
        end = used + padded(stream.size)
        dst[used : used + stream.size] = stream
        dst[used + stream.size : end] = 0
        table[chunk] = _core.crc32c(dst[used:end]), mode << STREAM_NBYTES_BITS | stream.size
        used = end
        idle.append(memory)
    return used


@dataclass(frozen=True)
class ZstdJob:
    """Decodes a frame of whole units that has chunks coded by Zstandard.

    Attributes:
        header: the header of the frame.
        data: the frame.
        base: its base, if it has one.
        fail: makes the error for a chunk, from the chunk's number and what is wrong.
    """

    header: FrameHeader
    data: ByteArray
    base: Base | None
    fail: Callable[[int, str], CorruptionError]

    def decode(self, dst: ByteArray, start: int, threads: int, *, check: bool) -> None:
        """Fills `dst` with decoded bytes of the tensor, from byte `start` on.

        Args:
            dst: memory for them.
            start: the first byte.
            threads: how many to use.
            check: whether to compare each chunk's CRC32C first.
        """
        header = self.header
        if len(header.table) == 1 and dst.size == header.nbytes:
            if check:
                self._check_sum(0, header.header_nbytes)
            self._decode_chunk(zstd.ChunkDecoder(), 0, header.header_nbytes, dst)
            return
        chunk_nbytes = header.geometry.chunk_nbytes
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
            is_whole = (lo, hi) == (at, end)
            whole = dst[at - start : end - start] if is_whole else np.empty(end - at, np.uint8)
            if check:
                self._check_sum(chunk, offset)
            self._decode_chunk(decoder, chunk, offset, whole)
            if not is_whole:
                dst[lo - start : hi - start] = whole[lo - at : hi - at]

        for _ in in_order(decode_one, n_wanted, threads):
            pass

    def stored(self, threads: int, base: Base | None) -> EncodedTensor:
        """Decodes the tensor, and returns it with all chunks stored, for the core to compare with a
        base.

        Args:
            threads: how many to use.
            base: the base; None if it is not needed.

        Raises:
            CorruptionError: a chunk is damaged.
        """
        geometry = self.header.geometry
        payload = np.zeros(padded(geometry.nbytes), np.uint8)
        self.decode(payload[: geometry.nbytes], 0, threads, check=True)
        table: Table = np.empty((geometry.n_chunks, 2), np.uint32)
        for chunk in range(geometry.n_chunks):
            start = chunk * geometry.chunk_nbytes
            nbytes = min(geometry.chunk_nbytes, geometry.nbytes - start)
            crc = _core.crc32c(payload[start : start + padded(nbytes)])
            table[chunk] = crc, Mode.STORED << STREAM_NBYTES_BITS | nbytes
        return EncodedTensor(payload, table, geometry, None, base)

    def _check_sum(self, chunk: int, offset: int) -> None:
        table = self.header.table
        crc, descriptor = table.item(chunk, 0), table.item(chunk, 1)
        end = offset + padded(descriptor & STREAM_NBYTES_MASK)
        if crc != _core.crc32c(self.data[offset:end]):
            raise self.fail(chunk, STATUS_WORDS[Status.CHECKSUM])

    def _decode_chunk(
        self, decoder: zstd.ChunkDecoder, chunk: int, offset: int, dst: ByteArray
    ) -> None:
        descriptor = self.header.table.item(chunk, 1)
        nbytes = descriptor & STREAM_NBYTES_MASK
        end = offset + padded(nbytes)
        stream = self.data[offset : offset + nbytes]
        if end > offset + nbytes and self.data[offset + nbytes : end].any():
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
        """Decodes a chunk of another mode, whose checksum was compared. The core gets it as a
        tensor of its own, so that it does not look at the other chunks."""
        header, geometry, base = self.header, self.header.geometry, self.base
        if base is not None:
            first = chunk << geometry.chunk_log
            base = part_of(base, header.dtype, first, dst.size // geometry.unit_nbytes)
        alone = Geometry(geometry.unit_nbytes, geometry.split, geometry.chunk_log, dst.size)
        row = header.table[chunk : chunk + 1]
        tensor = EncodedTensor(self.data[offset:], row, alone, None, base)
        status, _ = _core.decode_range(tensor, 0, dst, False, 1)
        if status:
            raise self.fail(chunk, STATUS_WORDS[status])
