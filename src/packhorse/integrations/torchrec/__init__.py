"""Packhorse for torchrec: sharded bags that fetch each distinct row once, and packed transfers."""

from packhorse.integrations.torchrec.sharder import (
    DedupEmbeddingBagCollectionSharder,
    DedupShardedEmbeddingBagCollection,
)

__all__ = ["DedupEmbeddingBagCollectionSharder", "DedupShardedEmbeddingBagCollection"]
