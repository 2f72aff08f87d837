"""Embeddings of models like DLRM between ranks: each distinct row travels once, both ways."""

from packhorse.wire.embeddings.bounded_rows import BoundedRows
from packhorse.wire.embeddings.exchange import (
    EmbeddingExchange,
    Plan,
    Question,
    Request,
    Traffic,
)
from packhorse.wire.embeddings.module import EmbeddingBags
from packhorse.wire.embeddings.routes import Bags, Choice, Sending
from packhorse.wire.embeddings.rows import Piece, RawRows, RowCodec
from packhorse.wire.embeddings.tables import Shard, Table, by_columns, by_rows, on_rank

__all__ = [
    "Bags",
    "BoundedRows",
    "Choice",
    "EmbeddingBags",
    "EmbeddingExchange",
    "Piece",
    "Plan",
    "Question",
    "RawRows",
    "Request",
    "RowCodec",
    "Sending",
    "Shard",
    "Table",
    "Traffic",
    "by_columns",
    "by_rows",
    "on_rank",
]
