"""Checkpoints of `torch.distributed.checkpoint`: `PackhorseWriter` and `PackhorseReader`.

PyTorch plans what each rank writes and reads, for any sharding. This package is what PyTorch calls
a storage: it stores shards as frames, and finds the parts of them that a read needs (docs/dcp.md).
`checkpoint_manifest` and `pack_files` define the files, and `regions` is the geometry of a read.
`storage/` handles frames and files.
"""

from packhorse.errors import MissingBackendError

try:
    import torch.distributed.checkpoint  # noqa: F401 - so that the error names the extra
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.disk.dcp needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error

from packhorse.disk.dcp.reader import PackhorseReader, ReadStats
from packhorse.disk.dcp.writer import PackhorseWriter

__all__ = ["PackhorseReader", "PackhorseWriter", "ReadStats"]
