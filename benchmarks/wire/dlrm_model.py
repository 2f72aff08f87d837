"""A small DLRM and data like Criteo's: the public cardinalities, Zipf ids, labels of a teacher.

Sources: cardinalities of Criteo Kaggle and Terabyte, and the shape of the model, from the public
code of DLRM (Naumov et al., 2019) and of Feng et al. (SC 2024). Small tables are more skewed than
large ones, as in the data: the exponent is 1.05 for large tables and up to 1.5 for the smallest.
The teacher has an effect for each id, products of pairs of tables, and the dense features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["KAGGLE", "TERABYTE", "Batch", "Model", "Teacher", "auc", "capped"]

KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
TERABYTE = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208,
    11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
N_DENSE = 13
_QUARTERS = 4


class Batch(NamedTuple):
    """Samples: dense features [n, 13], ids of each table [tables, n], labels [n]."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


def capped(cardinalities: Sequence[int], cap: int) -> list[int]:
    """Cardinalities of at most `cap`."""
    return [min(n, cap) for n in cardinalities]


class Teacher:
    """Draws batches; each is a function of the seed and its number alone.

    Args:
        cardinalities: of the tables.
        seed: of everything.
    """

    def __init__(self, cardinalities: Sequence[int], seed: int = 0) -> None:
        self.cardinalities = tuple(cardinalities)
        self._seed = seed
        generator = np.random.default_rng(seed)
        self._cumulated = [_zipf(n, _exponent(n)) for n in cardinalities]
        self._orders = [generator.permutation(n) for n in cardinalities]
        scale = 1.1 / math.sqrt(len(cardinalities))
        self._effects = [scale * generator.standard_normal(n) for n in cardinalities]
        self._pairs = [generator.choice(len(cardinalities), 2, replace=False) for _ in range(20)]
        self._hidden = [generator.standard_normal((n, 4)) * 0.3 for n in cardinalities]
        self._dense = generator.standard_normal(N_DENSE) * 0.2

    def batch(self, number: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        """A rank's part of batch `number`, of `size` samples; numbers below 0 are for tests.

        A batch has four quarters, so 1, 2 and 4 ranks see the same samples together.
        """
        own = range(_QUARTERS * rank // world, _QUARTERS * (rank + 1) // world)
        parts = [self._quarter(number, i, size // _QUARTERS) for i in own]
        return Batch(
            torch.cat([part.dense for part in parts]),
            torch.cat([part.ids for part in parts], 1),
            torch.cat([part.labels for part in parts]),
        )

    def _quarter(self, number: int, quarter: int, size: int) -> Batch:
        generator = np.random.default_rng((self._seed, number + (1 << 40), quarter))
        dense = generator.standard_normal((size, N_DENSE))
        ids = np.stack(
            [
                order[np.searchsorted(cumulated, generator.random(size))]
                for cumulated, order in zip(self._cumulated, self._orders, strict=True)
            ]
        )
        logits = self._logits(dense, ids)
        labels = generator.random(size) < 1 / (1 + np.exp(-logits))
        return Batch(
            torch.from_numpy(dense).float(), torch.from_numpy(ids), torch.from_numpy(labels).float()
        )

    def _logits(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        logits = dense @ self._dense - 1.0
        for effects, column in zip(self._effects, ids, strict=True):
            logits += effects[column]
        for a, b in self._pairs:
            logits += (self._hidden[a][ids[a]] * self._hidden[b][ids[b]]).sum(1)
        return logits


class Model(nn.Module):
    """The dense part: bottom layers, products of all pairs of vectors, top layers.

    Args:
        n_tables: how many embeddings there are.
        dim: of an embedding.
    """

    def __init__(self, n_tables: int, dim: int) -> None:
        super().__init__()
        n = n_tables + 1
        self.bottom = _layers(N_DENSE, 64, dim)
        self.top = _layers(dim + n * (n - 1) // 2, 128, 32, 1)
        rows, columns = torch.tril_indices(n, n, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", rows * n + columns)

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [n], of dense features and of the embeddings [n, dim] of all tables."""
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *embeddings], 1)
        products = vectors @ vectors.transpose(1, 2)
        chosen = products.flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([bottom, chosen], 1))
        return logits.squeeze(1)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve; equal scores count half."""
    order = np.argsort(scores, kind="stable")
    ascending = scores[order]
    _, first, counts = np.unique(ascending, return_index=True, return_counts=True)
    ranks = np.repeat(first + (counts + 1) / 2, counts)
    positive = labels[order] > 0.5
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def _layers(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2 or b > 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _exponent(n: int) -> float:
    return 1.05 + 0.45 * max(0.0, 1 - math.log10(n) / 4)


def _zipf(n: int, exponent: float) -> np.ndarray:
    shares = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    cumulated = np.cumsum(shares / shares.sum())
    cumulated[-1] = 1.0
    return cumulated
