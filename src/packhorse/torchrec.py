"""Packhorse for torchrec: a sharder whose bags fetch each distinct row once, codecs with bounds by
table, and an all-to-all that packs (docs/dlrm.md)."""

from packhorse.integrations.torchrec import (
    BoundedCommCodec,
    Columns,
    DedupEmbeddingBagCollectionSharder,
    DedupShardedEmbeddingBagCollection,
    PackedAll2AllSingle,
    bounded_codecs,
    packed_all_to_all,
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
