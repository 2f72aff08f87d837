"""Packhorse for torchrec: bags that fetch each distinct row once, and transfers that are packed."""

from packhorse.integrations.torchrec import (
    DedupEmbeddingBagCollectionSharder,
    DedupShardedEmbeddingBagCollection,
)

__all__ = ["DedupEmbeddingBagCollectionSharder", "DedupShardedEmbeddingBagCollection"]
