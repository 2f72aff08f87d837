"""Checkpoints of `torch.distributed.checkpoint`: `PackhorseWriter` and `PackhorseReader`.

What PyTorch calls a storage: it plans who writes and who reads what, across ranks and for any
sharding, and this stores shards as frames and finds the parts of them that a read needs
(docs/dcp.md). `packs` and `manifest` are what files hold, `regions` the geometry of a read;
`storage/` knows where files lie.
"""

from packhorse.errors import MissingBackendError

try:
    import torch.distributed.checkpoint  # noqa: F401 - the error shall name the extra
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.disk.dcp needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error

from packhorse.disk.dcp.reader import PackhorseReader, ReadStats
from packhorse.disk.dcp.writer import PackhorseWriter

__all__ = ["PackhorseReader", "PackhorseWriter", "ReadStats"]
