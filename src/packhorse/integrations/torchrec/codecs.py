"""Codecs of a fixed rate for torchrec's own all-to-all of pooled embeddings, with bounds by table.

torchrec asks a codec how long a message will be before there is one, from the number of elements
alone, so all tables share one number of bits; their bounds differ. A block for a rank is scaled by
table and coded in the fixed form of docs/format.md, section 13. Scales are powers of two, which
cost no digit: the bound of a table is rounded down to one. What does not fit is kept exactly;
if too much does not fit, the bound of that block is doubled, and `doublings` counts it.

torchrec gives a codec flat tensors without borders of tables or ranks. So its makers must say which
columns each rank has, and these codecs serve one sharding type with one size of batch on all ranks.
Sums of codes mean nothing, so there is none for the reduce-scatter of row-wise sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    decode_fixed,
    encode_fixed,
    fixed_nbytes,
)
from packhorse.errors import CorruptionError
from packhorse.integrations.torchrec.backend import sharding
from packhorse.wire.backend import torch

__all__ = ["BoundedCommCodec", "Columns", "bounded_codecs"]

_Bytes = npt.NDArray[np.uint8]
_MAX_BITS = 12


class Columns(NamedTuple):
    """The columns of one table, or of a part of it, on a rank.

    Args:
        dim: how many.
        bound: the largest error of a row's element.
        gradient_bound: the largest error of a gradient's element.
    """

    dim: int
    bound: float
    gradient_bound: float


@dataclass
class _Context:
    """What a codec remembers from `encode` to `decode`; the second is for torchrec to read."""

    batch: int = 0
    padded_dim_sum_per_rank: list[int] | None = None


def bounded_codecs(
    columns: Sequence[Sequence[Columns]], rank: int, *, bits: int = 6, backward_bits: int = 8
) -> dict[str, sharding.QuantizedCommCodecs]:
    """A registry of codecs for torchrec's sharders.

    Args:
        columns: for each rank, the columns of its tables, in the order of the collection.
        rank: this rank.
        bits: of an element of a row, 1 to 12. Values up to `2^bits - 1` bounds have codes.
        backward_bits: of an element of a gradient, which is rounded stochastically.

    Raises:
        ValueError: a bound is not positive, or bits are out of range.

    Example:
        >>> from packhorse.torchrec import Columns, bounded_codecs
        >>> user, item = Columns(16, 0.01, 1e-4), Columns(16, 0.02, 1e-4)
        >>> registry = bounded_codecs([[user], [item]], rank=0)  # a table on each of two ranks
        >>> sorted(registry)
        ['POOLED_EMBEDDINGS_ALL_TO_ALL']
    """
    forward = BoundedCommCodec([[(c.dim, c.bound) for c in own] for own in columns], rank, bits)
    backward = BoundedCommCodec(
        [[(c.dim, c.gradient_bound) for c in own] for own in columns], rank, backward_bits,
        is_backward=True,
    )  # fmt: skip
    codecs = sharding.QuantizedCommCodecs(forward=forward, backward=backward)
    return {sharding.CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs}


class BoundedCommCodec:
    """A `QuantizedCommCodec` of torchrec that keeps an error bound for each table.

    Args:
        columns: for each rank, (how many columns, bound) of its tables.
        rank: this rank.
        bits: of an element, 1 to 12.
        is_backward: whether it codes gradients; these are rounded stochastically.
        seed: of rounding.

    Attributes:
        doublings: how often a block's bound had to be doubled.

    Raises:
        ValueError: a bound is not positive, or `bits` are out of range.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[tuple[int, float]]],
        rank: int,
        bits: int,
        *,
        is_backward: bool = False,
        seed: int = 0,
    ) -> None:
        if not 1 <= bits <= _MAX_BITS:
            raise ValueError(f"bits are {bits}; 1 to {_MAX_BITS} are allowed")
        self._scales = [_scales(own) for own in columns]
        self._rank = rank
        self._bits = bits
        self._is_backward = is_backward
        self._seed = seed
        self._n_blocks = 0
        self.doublings = 0

    @property
    def quantized_dtype(self) -> torch.dtype:
        """As torchrec's: bytes."""
        return torch.uint8

    def create_context(self) -> _Context:
        """As torchrec's."""
        return _Context()

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: _Context
    ) -> tuple[int, int]:
        """As torchrec's: nothing is padded. Checks that the columns are those of this codec.

        Raises:
            ValueError: they are not.
        """
        dims = [len(scales) for scales in self._scales]
        if list(dim_per_rank) != dims or my_rank != self._rank:
            raise ValueError(
                f"rank {my_rank} exchanges {list(dim_per_rank)} columns of the ranks; these codecs "
                f"were made for rank {self._rank} and {dims}"
            )
        batch, rest = divmod(input_tensor.shape[0], len(dims))
        if rest:
            raise ValueError(
                f"a batch of {input_tensor.shape[0]} samples cannot be shared equally by "
                f"{len(dims)} ranks, as these codecs need"
            )
        qcomm_ctx.batch = batch
        return dims[my_rank], 0

    def calc_quantized_size(self, input_len: int, ctx: _Context | None = None) -> int:
        """As torchrec's: the bytes of a block."""
        return fixed_nbytes(input_len, self._bits, "F32") if input_len else 0

    def encode(self, input_tensor: Tensor, ctx: _Context | None = None) -> Tensor:
        """As torchrec's.

        Raises:
            ValueError: more elements are infinite or NaN than a message has slots for.
        """
        assert ctx is not None
        if self._is_backward:
            ctx.batch = input_tensor.numel() // max(1, sum(map(len, self._scales)))
        values = input_tensor.detach().cpu().float().contiguous().numpy().reshape(-1)
        parts, at = [], 0
        for scales in self._sent():
            n = ctx.batch * len(scales)
            block = values[at : at + n].reshape(ctx.batch, len(scales)) / scales
            parts.append(self._encode(block.astype(np.float32, copy=False)))
            at += n
        return torch.from_numpy(np.concatenate(parts)).to(input_tensor.device)

    def decode(self, input_grad: Tensor, ctx: _Context | None = None) -> Tensor:
        """As torchrec's.

        Raises:
            CorruptionError: a message is damaged.
        """
        assert ctx is not None
        message = input_grad.cpu().numpy()
        parts, at = [], 0
        for scales in self._received():
            n = ctx.batch * len(scales)
            nbytes = self.calc_quantized_size(n)
            parts.append(self._decode(message[at : at + nbytes], ctx.batch, scales))
            at += nbytes
        if at != len(message):
            raise CorruptionError(f"{len(message)} bytes came from all ranks, not {at}")
        return torch.from_numpy(np.concatenate(parts)).to(input_grad.device)

    def _sent(self) -> list[npt.NDArray[np.float32]]:
        """The scales of the block for each rank: rows of this rank, or gradients of its rows."""
        return self._scales if self._is_backward else [self._scales[self._rank]] * len(self._scales)

    def _received(self) -> list[npt.NDArray[np.float32]]:
        return [self._scales[self._rank]] * len(self._scales) if self._is_backward else self._scales

    def _encode(self, block: npt.NDArray[np.float32]) -> _Bytes:
        if not block.size:
            return np.empty(0, np.uint8)
        self._n_blocks += 1
        found = encode_fixed(
            block, "F32", Segment(block.size, 1.0, self._bits),
            rounding=Rounding.STOCHASTIC if self._is_backward else Rounding.NEAREST,
            seed=((self._seed << 40) + (self._rank << 32) + self._n_blocks) % (1 << 64),
        )  # fmt: skip
        self.doublings += found.doublings
        return found.data

    def _decode(
        self, message: _Bytes, batch: int, scales: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        block = np.empty((batch, len(scales)), np.float32)
        if block.size:
            decode_fixed(message, block, dtype="F32")
        return (block * scales).reshape(-1)


def _scales(columns: Sequence[tuple[int, float]]) -> npt.NDArray[np.float32]:
    """The scale of each column: the largest power of two that is at most its bound."""
    for _, bound in columns:
        if not 2.0**-100 <= bound <= 2.0**100:
            raise ValueError(f"bound is {bound}; it must be a positive number of usual size")
    scales: list[Any] = [np.full(dim, 2.0 ** math.floor(math.log2(b))) for dim, b in columns]
    return np.concatenate([np.empty(0), *scales]).astype(np.float32)
