"""Merges planes of bytes into units on the GPU (docs/format.md, sections 4, 5 and 6.1).

A byte comes from the payload, from scratch memory that other kernels have filled, or is constant.
If rANS states carry the end of a stored plane, these bytes are in scratch memory, too. Raw bits are
added here. Every unit is independent of all others.
"""

import torch
import triton
import triton.language as tl

from packhorse.kernels.launch import device_of
from packhorse.kernels.plan_fields import (
    CONSTANT_SOURCE,
    FIELDS,
    PLANE_CARRIED_AT,
    PLANE_N_THERE,
    PLANE_OFFSET,
    PLANE_RAW_AT,
    PLANE_RAW_BITS,
    PLANE_RAW_MASK,
    PLANE_SOURCE,
    SCRATCH_SOURCE,
)

__all__ = ["merge_planes", "merge_planes_kernel"]

_BLOCK = 1024


@triton.jit
def _is_plain(row, end):
    """Whether a plane's bytes before unit `end` of a chunk can be loaded as vectors."""
    source, offset = tl.load(row + PLANE_SOURCE), tl.load(row + PLANE_OFFSET)
    there = (offset % 16 == 0) & (tl.load(row + PLANE_N_THERE) >= end)
    return (there | (source == CONSTANT_SOURCE)) & (tl.load(row + PLANE_RAW_BITS) == 0)


@triton.jit
def _plane_bytes(payload_ptr, scratch_ptr, row, u, n, PLAIN: tl.constexpr):
    """Bytes of a plane for the units `u` of a chunk of `n`, as i32."""
    source, offset = tl.load(row + PLANE_SOURCE), tl.load(row + PLANE_OFFSET)
    constant = tl.where(source == CONSTANT_SOURCE, offset, 0).to(tl.int32)
    offset = tl.where(source == CONSTANT_SOURCE, 0, offset)
    base_ptr = tl.where(source == SCRATCH_SOURCE, scratch_ptr, payload_ptr)
    if PLAIN:
        byte = constant + u * 0
        if source != CONSTANT_SOURCE:
            byte = tl.load(base_ptr + tl.multiple_of(offset, 16) + u).to(tl.int32)
        return byte
    n_there = tl.load(row + PLANE_N_THERE).to(tl.int32)
    carried_ptr = scratch_ptr + tl.load(row + PLANE_CARRIED_AT) + (u - n_there)
    byte_ptr = tl.where(u < n_there, base_ptr + offset + u, carried_ptr)
    there = u < tl.where(source == CONSTANT_SOURCE, 0, n)
    byte = constant | tl.load(byte_ptr, mask=there, other=0).to(tl.int32)
    raw_bits = tl.load(row + PLANE_RAW_BITS).to(tl.int32)
    raw_mask = tl.load(row + PLANE_RAW_MASK).to(tl.int32)
    raw_ptr = payload_ptr + tl.load(row + PLANE_RAW_AT)
    j = raw_bits * 0
    while j < raw_bits:
        is_kept = raw_mask >> j & 1
        bits = tl.load(raw_ptr + u // 8, mask=u < n * is_kept, other=0).to(tl.int32)
        byte |= (bits >> (u % 8) & 1) << j
        raw_ptr += (n + 63) // 64 * 8 * is_kept
        j += 1
    return byte


@triton.jit
def _units(
    payload_ptr, scratch_ptr, row, u, n,
    N_PLANES: tl.constexpr, ROTATION: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Units `u` of a chunk, as i32 or i64."""
    top = _plane_bytes(payload_ptr, scratch_ptr, row, u, n, PLAIN)
    if N_PLANES > 1:
        below = _plane_bytes(payload_ptr, scratch_ptr, row + FIELDS, u, n, PLAIN)
        top = top << 8 | below
        top = (top >> ROTATION | top << (16 - ROTATION)) & 0xFFFF
    else:
        top = (top >> ROTATION | top << (8 - ROTATION)) & 0xFF
    unit = top.to(tl.int64) if N_PLANES > 4 else top
    for p in tl.static_range(2, N_PLANES):
        below = _plane_bytes(payload_ptr, scratch_ptr, row + p * FIELDS, u, n, PLAIN)
        unit = unit << 8 | below.to(unit.dtype)
    return unit


@triton.jit
def merge_planes_kernel(
    payload_ptr,  # u8, aligned to 16 bytes
    planes_ptr,  # i64 [chunks, N_PLANES, FIELDS]
    scratch_ptr,  # u8, aligned to 16 bytes
    out_ptr,  # integers of a unit's size [n_units]
    n_units,
    CHUNK_LOG: tl.constexpr,
    N_PLANES: tl.constexpr,
    ROTATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one chunk's units."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * (1 << CHUNK_LOG)
    n = tl.minimum(n_units - first, 1 << CHUNK_LOG).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    u = start + tl.arange(0, BLOCK)
    row = planes_ptr + chunk * (N_PLANES * FIELDS)
    plain = start + BLOCK <= n
    for p in tl.static_range(N_PLANES):
        plain &= _is_plain(row + p * FIELDS, start + BLOCK)
    dst_ptr = out_ptr + first + u
    if plain:
        unit = _units(payload_ptr, scratch_ptr, row, u, n, N_PLANES, ROTATION, True)
        tl.store(dst_ptr, unit.to(out_ptr.dtype.element_ty))
    else:
        unit = _units(payload_ptr, scratch_ptr, row, u, n, N_PLANES, ROTATION, False)
        tl.store(dst_ptr, unit.to(out_ptr.dtype.element_ty), mask=u < n)


def merge_planes(
    payload: torch.Tensor,
    planes: torch.Tensor,
    scratch: torch.Tensor,
    out: torch.Tensor,
    chunk_log: int,
    rotation: int,
) -> None:
    """Merges planes into units.

    The tensors are on one device and, except for `planes`, aligned to 16 bytes. Nothing in them is
    checked here.

    Args:
        payload: u8, all chunks; only read.
        planes: i64 (chunks, planes, 8); `layout.PlaneField` names the columns.
        scratch: u8, decoded planes and carried bytes; only read.
        out: u8, i16, i32 or i64 (units,), one byte for each plane; receives the units.
        chunk_log: log2 of the units of a full chunk.
        rotation: bits by which the first planes were rotated.
    """
    longest = min(1 << chunk_log, out.numel())
    grid = (len(planes), triton.cdiv(longest, _BLOCK))
    with device_of(payload):
        merge_planes_kernel[grid](
            payload,
            planes,
            scratch,
            out,
            out.numel(),
            CHUNK_LOG=chunk_log,
            N_PLANES=planes.shape[1],
            ROTATION=rotation,
            BLOCK=_BLOCK,
            num_warps=4,
        )
