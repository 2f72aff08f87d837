"""The payload of a frame, and the hashes of what is in it.

A tensor and its base may change while they are packed: another thread trains on, another process
writes to the file. Each chunk is copied once, and its streams and its leaf of the content hash are
both made from the copy, so the payload always decodes to the bytes whose hash is given here. Which
plan was chosen before, and which side data, are a matter of size alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import empty_leaves, finish_leaves, hash_root
from packhorse.codecs.plan import Plan
from packhorse.frame.base import Base
from packhorse.frame.header import Table, n_planes_of
from packhorse.frame.zstd import encode_zstd
from packhorse.layout import FIRST_STREAM, STREAM_NBYTES_BITS, DType, Mode

__all__ = ["Payload", "encode_payload", "n_chunks_of"]

_NO_LEAVES = empty_leaves(0)


class Payload(NamedTuple):
    """What became of a tensor.

    Attributes:
        table: a row for each chunk.
        nbytes: how long the chunks are together.
        content_hash: of the bytes that were encoded.
        base_hash: of the bytes of the base that the differences were made from; empty for no base.
    """

    table: Table
    nbytes: int
    content_hash: bytes
    base_hash: bytes

    @property
    def has_delta(self) -> bool:
        """Whether any chunk needs the base."""
        return bool(np.any(self.table[:, FIRST_STREAM] >> STREAM_NBYTES_BITS == Mode.DELTA))


def n_chunks_of(nbytes: int, dtype: DType, plan: Plan) -> int:
    """How many chunks a tensor has under a plan."""
    return -(-nbytes // (dtype.unit_nbytes << plan.chunk_log))


def encode_payload(
    data: ByteArray, dtype: DType, plan: Plan, base: Base, dst: ByteArray, threads: int, isa: int
) -> Payload:
    """Encodes a tensor.

    Args:
        data: all bytes of the tensor.
        dtype: its dtype.
        plan: what was chosen for it.
        base: what chunks may be differences from; without data for none.
        dst: where the chunks go.
        threads: how many to use.
        isa: the number of the instruction set of the call.
    """
    n_planes = n_planes_of(dtype, plan.split)
    table = np.empty((n_chunks_of(data.size, dtype, plan), 1 + n_planes), np.uint32)
    leaves = empty_leaves(data.size)
    base_leaves = empty_leaves(base.data.size) if base.data.size else _NO_LEAVES
    if plan.zstd:
        nbytes = encode_zstd(data, dtype, plan, dst, table, leaves, threads, isa)
    else:
        nbytes = _core.encode_chunks(
            data, dtype.unit_nbytes, plan.split, plan.chunk_log, plan.level, plan.side.values,
            plan.side.n_rows, base.data, base.is_float, base.cast, plan.plain_nbytes, dst, table,
            leaves, base_leaves, threads, isa,
        )  # fmt: skip
    content_hash = hash_root(finish_leaves(leaves, data.size))
    if not base.data.size:
        return Payload(table, nbytes, content_hash, b"")
    base_hash = hash_root(finish_leaves(base_leaves, base.data.size))
    return Payload(table, nbytes, content_hash, base_hash)
