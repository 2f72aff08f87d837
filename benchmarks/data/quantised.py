"""Weights in the formats of quantised models, made from fp32 matrices by published recipes.

Each function takes matrices by name and returns one kind of tensor of the format. Scales are the
largest magnitude of a block over the largest number of the format; they and all quotients are
computed in fp32, whose rounding IEEE 754 defines, so the bytes are the same everywhere.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "fp8_blocks",
    "int4_words",
    "mxfp4_blocks",
    "mxfp4_scales",
    "nf4_bytes",
]

Tensors = dict[str, NDArray[Any]]
Floats = NDArray[np.float32]

FP8_SIDE = 128  # of a block with one scale, as in DeepSeek-V3
E4M3_MOST = 448
MX_BLOCK = 32
E2M1_BIAS_BITS = 2  # the largest number of e2m1 is 1.5 * 2^2
NF4_BLOCK = 64
GPTQ_GROUP = 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The quantiles of a normal distribution, from the QLoRA paper.
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip


def _each(matrices: Tensors, convert: Callable[[Floats], NDArray[Any]]) -> Tensors:
    return {name: convert(matrix) for name, matrix in matrices.items()}


def fp8_blocks(matrices: Tensors) -> Tensors:
    """F8_E4M3 with one scale for each 128 x 128 block, without the scales."""
    return _each(matrices, _fp8_blocks)


def _fp8_blocks(matrix: Floats) -> NDArray[Any]:
    out = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    for i in range(0, matrix.shape[0], FP8_SIDE):
        for j in range(0, matrix.shape[1], FP8_SIDE):
            at = np.s_[i : i + FP8_SIDE, j : j + FP8_SIDE]
            scale = np.abs(matrix[at]).max() / np.float32(E4M3_MOST)
            out[at] = matrix[at] / (scale or np.float32(1))
    return out


def _nearest(values: Floats, table: Floats) -> NDArray[np.uint8]:
    """The index of the nearest number of an ascending table, the lower one of two."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, values).astype(np.uint8)


def _in_pairs(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two nibbles a byte, the first one in the lower half."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _mx_exponents(matrix: Floats) -> NDArray[np.int32]:
    """The power of two of each block of 32, as the OCP specification of MX formats has it."""
    most = np.abs(matrix.reshape(matrix.shape[0], -1, MX_BLOCK)).max(2)
    return np.frexp(most)[1].astype(np.int32) - 1 - E2M1_BIAS_BITS


def mxfp4_blocks(matrices: Tensors) -> Tensors:
    """E2M1 in pairs, U8, as the `_blocks` of gpt-oss: each block of 32 over a power of two."""
    return _each(matrices, _mxfp4_blocks)


def _mxfp4_blocks(matrix: Floats) -> NDArray[np.uint8]:
    blocks = matrix.reshape(matrix.shape[0], -1, MX_BLOCK)
    scaled = np.ldexp(blocks, -_mx_exponents(matrix)[..., None])
    signs = np.signbit(scaled).astype(np.uint8) << 3
    return _in_pairs(_nearest(np.abs(scaled), E2M1) | signs)


def mxfp4_scales(matrices: Tensors) -> Tensors:
    """The scales of these blocks, F8_E8M0."""
    kind = ml_dtypes.float8_e8m0fnu
    return _each(matrices, lambda m: (_mx_exponents(m) + 127).astype(np.uint8).view(kind))


def nf4_bytes(matrices: Tensors) -> Tensors:
    """NF4 in pairs, U8, with one scale for each 64 elements, as bitsandbytes stores it."""
    return _each(matrices, _nf4_bytes)


def _nf4_bytes(matrix: Floats) -> NDArray[np.uint8]:
    blocks = matrix.reshape(-1, NF4_BLOCK)
    scaled = blocks / np.abs(blocks).max(1, keepdims=True)
    return _in_pairs(_nearest(scaled, NF4)).reshape(-1, 1)


def int4_words(matrices: Tensors) -> Tensors:
    """Eight INT4 of a column in an I32, with scale and zero for each 128 inputs: `qweight` of GPTQ,
    rounded to nearest."""
    return _each(matrices, _int4_words)


def _int4_words(matrix: Floats) -> NDArray[np.int32]:
    groups = matrix.reshape(matrix.shape[0], -1, GPTQ_GROUP)
    least = np.minimum(groups.min(2, keepdims=True), 0)
    scale = (np.maximum(groups.max(2, keepdims=True), 0) - least) / np.float32(15)
    zero = np.rint(-least / scale)
    levels = np.clip(np.rint(groups / scale) + zero, 0, 15).astype(np.uint32)
    columns = levels.reshape(matrix.shape).T  # inputs first
    words = np.zeros((columns.shape[0] // 8, columns.shape[1]), np.uint32)
    for i in range(8):
        words |= columns[i::8] << np.uint32(4 * i)
    return words.view(np.int32)
