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
from packhorse.codecs.content import empty_leaves, finish_leaves, hash_root, leaves_from
from packhorse.codecs.plan import Plan
from packhorse.codecs.source import Source
from packhorse.frame.header import Table
from packhorse.frame.zstd import encode_zstd
from packhorse.layout import BASE_MODES, FIRST_STREAM, STREAM_NBYTES_BITS, Mode

__all__ = ["Payload", "PayloadEncoder", "encode_payload"]


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


class PayloadEncoder:
    """Encodes a tensor, some chunks at a time, in order."""

    def __init__(
        self,
        plan: Plan,
        base: Base | None = None,
        *,
        base_is_fixed: bool = False,
        last_mode: Mode = Mode.SPARSE_DELTA,
    ) -> None:
        """
        Args:
            plan: what was chosen for the tensor.
            base: the tensor that chunks may be differences from; None for no base.
            base_is_fixed: whether nothing changes the base meanwhile, so that it need not be
                hashed.
            last_mode: chunks of differences have no later mode; for benchmarks.
        """
        geometry = plan.geometry
        self._plan = plan
        self._base = base
        self._last_mode = last_mode
        self._table = np.empty((geometry.n_chunks, 1 + geometry.n_planes), np.uint32)
        self._leaves = empty_leaves(geometry.nbytes)
        is_hashed = base is not None and not base_is_fixed
        self._base_leaves = empty_leaves(base.data.size) if base and is_hashed else None
        self._taken = self._made = 0

    def add(self, data: ByteArray, dst: ByteArray, threads: int) -> int:
        """Encodes the next chunks.

        Args:
            data: their bytes: whole chunks, unless it is the end of the tensor.
            dst: memory for as many bytes, rounded up to 64.
            threads: how many to use.

        Returns:
            How many bytes of `dst` they take.
        """
        plan, geometry, start = self._plan, self._plan.geometry, self._taken
        first = start // geometry.chunk_nbytes
        if plan.whole == Mode.ZSTD:
            table = self._table[first : first + -(-data.size // geometry.chunk_nbytes)]
            leaves = leaves_from(self._leaves, start, data.size)
            nbytes = encode_zstd(data, plan, dst, table, leaves, threads)
        else:
            context = _core.EncodeContext(
                plan.level, plan.side.view(), self._base, plan.plain_nbytes, self._last_mode,
                whole=plan.whole,
            )  # fmt: skip
            output = _core.EncodeOutput(dst, self._table, self._leaves, self._base_leaves)
            nbytes = _core.encode_chunks(data, geometry, context, output, threads, first)
        self._taken += data.size
        self._made += nbytes
        return nbytes

    def finish(self) -> Payload:
        """What is known when all chunks are encoded.

        Raises:
            ValueError: chunks are missing.
        """
        if self._taken != self._plan.nbytes:
            raise ValueError(f"{self._taken} of {self._plan.nbytes} bytes were encoded")
        content_hash = hash_root(finish_leaves(self._leaves, self._taken))
        base_hash = b""
        if self._base is not None and self._base_leaves is not None:
            base_hash = hash_root(finish_leaves(self._base_leaves, self._base.data.size))
        return Payload(self._table, self._made, content_hash, base_hash)


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
    """Encodes a whole tensor. The arguments are those of `PayloadEncoder` and of its `add`."""
    encoder = PayloadEncoder(plan, base, base_is_fixed=base_is_fixed, last_mode=last_mode)
    encoder.add(source.data, dst, threads)
    return encoder.finish()
