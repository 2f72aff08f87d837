"""What this integration uses of torchrec; without it the error names the extra to install."""

from packhorse.errors import MissingBackendError

try:
    from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor, PoolingType
    from torchrec.distributed import comm_ops
    from torchrec.distributed.embeddingbag import (
        EmbeddingBagCollectionContext,
        EmbeddingBagCollectionSharder,
        ShardedEmbeddingBagCollection,
    )
    from torchrec.distributed.types import (
        CommOp,
        LazyNoWait,
        NoWait,
        ParameterSharding,
        QuantizedCommCodecs,
        ShardingEnv,
        ShardingType,
    )
    from torchrec.modules.embedding_modules import get_embedding_names_by_table
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.torchrec needs torchrec and fbgemm; install them with: pip install "
        "'packhorse[torchrec]' (without a GPU as docs/dlrm.md says)"
    ) from error

__all__ = [
    "CommOp",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "LazyNoWait",
    "NoWait",
    "ParameterSharding",
    "PoolingType",
    "QuantizedCommCodecs",
    "ShardedEmbeddingBagCollection",
    "ShardingEnv",
    "ShardingType",
    "comm_ops",
    "get_embedding_names_by_table",
]
