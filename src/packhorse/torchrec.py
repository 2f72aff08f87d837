"""Packhorse for torchrec: a sharder whose bags fetch each distinct row once, codecs with bounds by
table, and an all-to-all that packs (docs/dlrm.md)."""

from packhorse.integrations.torchrec.all_to_all import PackedAll2AllSingle, packed_all_to_all
from packhorse.integrations.torchrec.codecs import BoundedCommCodec, Columns, bounded_codecs
from packhorse.integrations.torchrec.sharder import (
    DedupEmbeddingBagCollectionSharder,
    DedupShardedEmbeddingBagCollection,
)

__all__ = [
    "BoundedCommCodec",
    "Columns",
    "DedupEmbeddingBagCollectionSharder",
    "DedupShardedEmbeddingBagCollection",
    "PackedAll2AllSingle",
    "bounded_codecs",
    "packed_all_to_all",
]
