"""Encoding the payload of a frame, and hashing the bytes that go into it.

A tensor and its base may change while they are packed: another thread may continue training, or
another process may write to the file. Each chunk is copied once, and its streams and its leaf of
the content hash are both made from the copy. So the payload always decodes to the bytes whose hash
is returned. The plan and the side data are chosen before that, and affect only the size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse import _core
from packhorse._core import Base
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import empty_leaves, finish_leaves, hash_root
from packhorse.codecs.plan import Plan
from packhorse.codecs.source import Source
from packhorse.frame.header import Table
from packhorse.frame.zstd import encode_zstd
from packhorse.layout import BASE_MODES, FIRST_STREAM, STREAM_NBYTES_BITS, Mode

__all__ = ["Payload", "encode_payload"]


class Payload(NamedTuple):
    """An encoded tensor.

    Attributes:
        table: a row for each chunk.
        nbytes: bytes of all chunks.
        content_hash: the content hash of the bytes that were encoded.
        base_hash: the content hash of the bytes of the base that were used; empty if there is no
            base, or if nobody changes it.
    """

    table: Table
    nbytes: int
    content_hash: bytes
    base_hash: bytes

    @property
    def has_delta(self) -> bool:
        """Whether any chunk needs the base."""
        modes = self.table[:, FIRST_STREAM] >> STREAM_NBYTES_BITS
        return any(bool(np.any(modes == mode)) for mode in BASE_MODES)  # np.isin is slow


def encode_payload(
    source: Source,
    plan: Plan,
    base: Base | None,
    dst: ByteArray,
    threads: int,
    *,
    base_is_fixed: bool = False,
    last_mode: Mode = Mode.SPARSE_DELTA,
) -> Payload:
    """Encodes a tensor.

    Args:
        source: the tensor.
        plan: what was chosen for it.
        base: the tensor that chunks may be differences from; None for no base.
        dst: memory for the chunks.
        threads: how many to use.
        base_is_fixed: whether nothing changes the base meanwhile, so that it need not be hashed.
        last_mode: chunks of differences have no later mode; for benchmarks.
    """
    data, geometry = source.data, plan.geometry
    table = np.empty((geometry.n_chunks, 1 + geometry.n_planes), np.uint32)
    leaves = empty_leaves(data.size)
    base_leaves = None if base is None or base_is_fixed else empty_leaves(base.data.size)
    if plan.whole == Mode.ZSTD:
        nbytes = encode_zstd(data, plan, dst, table, leaves, threads)
    else:
        context = _core.EncodeContext(
            plan.level, plan.side.view(), base, plan.plain_nbytes, last_mode, whole=plan.whole
        )
        output = _core.EncodeOutput(dst, table, leaves, base_leaves)
        nbytes = _core.encode_chunks(data, geometry, context, output, threads)
    content_hash = hash_root(finish_leaves(leaves, data.size))
    if base is None or base_leaves is None:
        return Payload(table, nbytes, content_hash, b"")
    base_hash = hash_root(finish_leaves(base_leaves, base.data.size))
    return Payload(table, nbytes, content_hash, base_hash)
