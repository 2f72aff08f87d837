"""Values for collectives: rows of embedding tables, and weights of a real model.

The rows are a stand-in for a batch of DLRM: the tables have the public cardinalities of Criteo
Terabyte, capped, each id is drawn from a Zipf distribution, and popular rows have larger values, as
training makes them. Each rank owns some of the tables and looks up what each rank's part of
the batch asks for, so popular rows repeat within a message.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import sets

__all__ = ["VALUES", "rows", "weights"]

# Rows of the tables, from the artifact of "Accelerating Communication in Deep Learning
# Recommendation Model Training with Dual-Level Adaptive Lossy Compression" (SC '24).
CARDINALITIES = (
    *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10),
    *(2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
)
CAP = 100_000
WIDTH = 64
ALPHA = 1.05
LEAST_SIGMA, GREATEST_SIGMA = 0.003, 0.035
SEED = 7


def rows(rank: int, world: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends in the forward all-to-all of embeddings.

    Args:
        rank: the owner of the tables.
        world: the number of ranks.
        nbytes: about how much it sends, its own share included.
        dtype: of the rows.

    Returns:
        Flat values, in `world` equal parts by receiver.
    """
    # Each rank owns as many tables, so that all parts have the same size.
    owned = CARDINALITIES[: len(CARDINALITIES) // world * world][rank::world]
    width = dtype.itemsize * WIDTH
    batch = max(1, nbytes // (width * len(owned) * world)) * world
    found = [_lookups(cardinality, batch, dtype, SEED + k) for k, cardinality in enumerate(owned)]
    return torch.stack(found, 1).reshape(-1)


def _lookups(cardinality: int, batch: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of one table for all samples of a batch, as [batch, width]."""
    rng = np.random.default_rng(seed)
    n_rows = min(cardinality, CAP)
    chance = np.arange(1, n_rows + 1) ** -ALPHA
    ids = rng.choice(n_rows, batch, p=chance / chance.sum())
    asked, inverse = np.unique(ids, return_inverse=True)
    share = np.log1p(chance[asked] * n_rows) / np.log1p(n_rows)
    sigma = (LEAST_SIGMA + (GREATEST_SIGMA - LEAST_SIGMA) * share).astype(np.float32)
    found = rng.standard_normal((asked.size, WIDTH), np.float32) * sigma[:, None]
    return torch.from_numpy(found[inverse]).to(dtype)


def weights(rank: int, world: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """A rank's shard of real weights, as FSDP gathers them.

    Args:
        rank: whose shard.
        world: the number of ranks.
        nbytes: of a shard at most.
        dtype: bf16, in which they are gathered.
    """
    flat = sets.make("model_bf16").array.view(np.int16)
    size = min(flat.size // world, nbytes // dtype.itemsize)
    return torch.from_numpy(flat[rank * size : (rank + 1) * size].copy()).view(dtype)


# Name, collective, and how a rank's values are made.
VALUES: dict[str, tuple[str, Callable[..., Tensor], Any]] = {
    "embeddings, fp32": ("all_to_all", rows, torch.float32),
    "embeddings, bf16": ("all_to_all", rows, torch.bfloat16),
    "weights, bf16": ("all_gather", weights, torch.bfloat16),
}
