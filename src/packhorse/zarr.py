"""Packhorse for zarr's format 3: `create_array(..., serializer=PackhorseCodec())` (docs/arrays.md).

Format 2 takes compressors of numcodecs: `packhorse.numcodecs`.
"""

from packhorse.integrations.zarr import PackhorseCodec

__all__ = ["PackhorseCodec"]
