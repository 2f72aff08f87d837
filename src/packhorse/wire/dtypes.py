"""How tensors of PyTorch travel: as bytes, packed as a dtype that frames have.

Complex numbers travel as pairs of floats, and dtypes that safetensors has no name for as bytes.
"""

from __future__ import annotations

from packhorse.codecs.base import ByteArray
from packhorse.torch_dtypes import NAMES
from packhorse.wire.backend import torch

__all__ = ["bytes_of", "frame_dtype", "tensor_of"]

_AS_FLOATS = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}


def frame_dtype(dtype: torch.dtype) -> str:
    """The name of the dtype of a frame that holds elements of this dtype."""
    return _AS_FLOATS.get(dtype) or NAMES.get(dtype, "U8")


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The bytes of a contiguous tensor in host memory, to read and write."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    found: ByteArray = flat.view(torch.uint8).numpy()
    return found


def tensor_of(data: ByteArray, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor of some bytes, which it shares."""
    return torch.from_numpy(data).view(dtype)
