"""What this integration uses of torchrec; without it the error names the extra to install.

torchrec and fbgemm warn that parts of themselves are deprecated or missing when they are imported;
that is not for our users to read.
"""

import warnings

from packhorse.errors import MissingBackendError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec
        from torchrec.distributed import comm_ops, embeddingbag
        from torchrec.distributed import types as sharding
        from torchrec.modules import embedding_modules
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.torchrec needs torchrec and fbgemm; install them with: pip install "
        "'packhorse[torchrec]' (without a GPU as docs/dlrm.md says)"
    ) from error

__all__ = ["comm_ops", "embedding_modules", "embeddingbag", "sharding", "torchrec"]
