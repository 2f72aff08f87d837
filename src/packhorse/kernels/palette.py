"""Decodes palettes on the GPU (docs/format.md, section 6.3): codes of some bits become bytes.

Escapes leave a mark, a byte that no entry has; `resolve_escapes` replaces it. Raw bits are put back
when planes are merged.
"""

import torch
import triton
import triton.language as tl

from packhorse.kernels.launch import device_of
from packhorse.kernels.plan_fields import (
    FIELDS,
    PALETTE_CODE_BITS,
    PALETTE_CODES_AT,
    PALETTE_N_UNITS,
    PALETTE_PLANE_AT,
)
from packhorse.layout import MAX_CODE_BITS

__all__ = ["decode_palettes", "decode_palettes_kernel"]

_ENTRIES = tl.constexpr(1 << MAX_CODE_BITS)  # of a palette, one for each code
_BLOCK = 1024


@triton.jit
def decode_palettes_kernel(
    payload_ptr,  # u8
    palettes_ptr,  # i64 [palettes, FIELDS]
    entries_ptr,  # u8 [palettes, 16]
    scratch_ptr,  # u8
    BLOCK: tl.constexpr,
):
    """A block of one palette's units."""
    palette = tl.program_id(0).to(tl.int64)
    row = palettes_ptr + palette * FIELDS
    codes_ptr = payload_ptr + tl.load(row + PALETTE_CODES_AT)
    code_bits = tl.load(row + PALETTE_CODE_BITS).to(tl.int32)
    n = tl.load(row + PALETTE_N_UNITS).to(tl.int32)
    dst_ptr = scratch_ptr + tl.load(row + PALETTE_PLANE_AT)
    u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plane_nbytes = (n + 63) // 64 * 8
    code = u * 0
    j = code_bits * 0
    while j < code_bits:
        bits = tl.load(codes_ptr + j * plane_nbytes + u // 8, mask=u < n, other=0).to(tl.int32)
        code |= (bits >> (u % 8) & 1) << j
        j += 1
    values = tl.load(entries_ptr + palette * _ENTRIES + code)
    tl.store(dst_ptr + u, values, mask=u < n)


def decode_palettes(
    payload: torch.Tensor,
    palettes: torch.Tensor,
    entries: torch.Tensor,
    scratch: torch.Tensor,
    longest: int,
) -> None:
    """Decodes streams of mode palette; escapes leave marks, and raw bits are zero.

    The tensors are those of a plan (csrc/tensor/plan.hpp), on one device. Nothing in them is
    checked here.

    Args:
        payload: u8, all chunks; only read.
        palettes: i64 (P, 8); `layout.PaletteField` names the columns.
        entries: u8 (P, 16).
        scratch: u8, the scratch memory of a plan; receives planes.
        longest: units of the longest plane.
    """
    if len(palettes):
        grid = (len(palettes), triton.cdiv(longest, _BLOCK))
        with device_of(payload):
            decode_palettes_kernel[grid](
                payload, palettes, entries, scratch, BLOCK=_BLOCK, num_warps=4
            )
