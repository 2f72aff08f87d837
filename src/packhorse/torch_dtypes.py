"""PyTorch's dtypes by the names that safetensors gives them.

This is the only such table; it lies in a low layer because kernels, hops and users need it.
Importing it needs PyTorch; the module that imports it raises the error if PyTorch is missing.
PyTorch has no floats of 6 bits. An item of its dtype for floats of 4 bits is a pair of elements,
so that dtype stands apart; PyTorch has it from 2.8.
"""

import torch

__all__ = ["NAMES", "PAIR_DTYPES", "TORCH_DTYPES", "short_name"]

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_PAIR: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
PAIR_DTYPES = {} if _PAIR is None else {"F4": _PAIR}


def short_name(dtype: torch.dtype) -> str:
    """PyTorch's own name of a dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
