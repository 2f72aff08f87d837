"""How embeddings travel in the benchmarks of DLRM: the arms, each an exchange with its options.

`fp32`, `fp16` and `int8` are what torchrec's all-to-all sends: a row for each sample, from its
holder and back, as they are, halved, or as bytes with a scale and a bias for each row (the formula
of fbgemm's `FloatToFused8BitRowwise`). The rest sends distinct rows: without loss, forward only
as the paper does, or within bounds both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.codecs.bounded import Rounding
from packhorse.errors import CorruptionError
from packhorse.wire.bounds import Schedule, TableBounds, Tightness
from packhorse.wire.embeddings import BoundedRows, Piece, RawRows, RowCodec, Sending

__all__ = ["ARMS", "HOW", "Float16Rows", "Int8Rows", "options_of"]

Bytes = Any  # a NumPy array of uint8


class Float16Rows(RawRows):
    """Rows as half floats; what is too large becomes infinite."""

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[Bytes]:
        """As `RowCodec`."""
        return super().encode([[p._replace(rows=p.rows.half()) for p in parts] for parts in pieces])

    def decode(self, message: Bytes, rows: Sequence[Tensor]) -> None:
        """As `RowCodec`."""
        halves = [torch.empty_like(part, dtype=torch.float16) for part in rows]
        super().decode(message, halves)
        for part, half in zip(rows, halves, strict=True):
            part.copy_(half)

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """As `RowCodec`."""
        return 2


class Int8Rows(RawRows):
    """Rows as bytes: x = byte * scale + bias, with both in fp32 for each row."""

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[Bytes]:
        """As `RowCodec`."""
        return [
            np.concatenate([_int8(piece.rows) for piece in parts]) if parts else np.empty(0, "u1")
            for parts in pieces
        ]

    def decode(self, message: Bytes, rows: Sequence[Tensor]) -> None:
        """As `RowCodec`."""
        at = 0
        for part in rows:
            n, width = part.shape
            coded = message[at : at + n * (width + 8)].reshape(n, width + 8)
            at += n * (width + 8)
            ends = torch.from_numpy(np.ascontiguousarray(coded[:, width:]).view("<f4"))
            part.copy_(torch.from_numpy(coded[:, :width].copy()) * ends[:, :1] + ends[:, 1:])
        if at != len(message):
            raise CorruptionError(f"{len(message)} bytes of rows came, {at} were asked for")

    def element_nbytes(self, shard: int, itemsize: int) -> float:
        """As `RowCodec`."""
        return 1


def _int8(rows: Tensor) -> Bytes:
    low = rows.amin(1, keepdim=True)
    spread = rows.amax(1, keepdim=True) - low
    inverse = 255.0 / (spread + 1e-8)
    codes = torch.round((rows - low) * inverse).to(torch.uint8)
    ends = torch.cat([spread / 255.0, low], 1).numpy().astype("<f4").view(np.uint8)
    return np.concatenate([codes.numpy(), ends], 1).reshape(-1)


def _bounded(part: float, iterations: int, **options: Any) -> BoundedRows:
    """Codes with bounds that are a part of the paper's."""
    bounds = TableBounds(
        {kind: kind.value * part for kind in Tightness},
        schedule=Schedule(iterations=iterations),
        rounding=options.pop("rounding", Rounding.NEAREST),
    )
    return BoundedRows(bounds, **options)


def _usual(iterations: int, **options: Any) -> BoundedRows:
    """Codes with the bounds that users get."""
    rounding = options.pop("rounding", Rounding.NEAREST)
    bounds = TableBounds(schedule=Schedule(iterations=iterations), rounding=rounding)
    return BoundedRows(bounds, **options)


def _both(codec: Callable[[], RowCodec]) -> dict[str, Any]:
    return {"forward": codec(), "backward": codec(), "sending": Sending.BAGS}


# The name of an arm, and the options of `EmbeddingExchange` for a number of iterations.
ARMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fp32": lambda n: {"sending": Sending.BAGS},
    "fp16": lambda n: _both(Float16Rows),
    "int8": lambda n: _both(Int8Rows),
    "dedup": lambda n: {},
    "forward only": lambda n: {"forward": _bounded(1, n), "sending": Sending.BAGS},
    "bounded": lambda n: {
        "forward": _usual(n),
        "backward": _usual(n, rounding=Rounding.STOCHASTIC),
    },
    "bounded, feedback": lambda n: {
        "forward": _usual(n),
        "backward": _bounded(0.25, n, feedback_rows=1 << 30),
    },
    "bounded, nearest": lambda n: {"forward": _usual(n), "backward": _bounded(0.25, n)},
    "bounded, a quarter": lambda n: {
        "forward": _bounded(0.25, n),
        "backward": _bounded(0.25, n, rounding=Rounding.STOCHASTIC),
    },
    "bounded as the paper": lambda n: {
        "forward": _bounded(1, n),
        "backward": _bounded(1, n, rounding=Rounding.STOCHASTIC),
    },
}


HOW = {
    "fp32": "a row for each sample from its holder and a gradient back, as torchrec does",
    "fp16": "the same in half precision, as torchrec's codec",
    "int8": "the same in bytes, with scale and bias for each row, the formula of fbgemm",
    "dedup": "each distinct row once, gradients summed by id, both exact",
    "forward only": "as the SC 2024 paper: a row for each sample, within bounds; gradients exact",
    "bounded": "distinct rows within the default bounds, gradients too, rounded stochastically",
    "bounded, feedback": "the same with error feedback for gradients",
    "bounded, nearest": "the same, gradients rounded to the nearest value",
    "bounded, a quarter": "as `bounded`, with bounds of a quarter of the paper's both ways",
    "bounded as the paper": "as `bounded`, with the paper's bounds both ways",
}


def options_of(arm: str, iterations: int) -> dict[str, Any]:
    """New options of `EmbeddingExchange` for an arm, whose bounds settle in a part of a run."""
    return ARMS[arm](iterations)
