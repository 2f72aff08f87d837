"""Encodes and decodes bounded codes (docs/format.md, section 13): F32, BF16 and F16 elements of one
segment, block by block.

The kernels write the same codes and counts, bit for bit, as the C++ coder. Encoding takes two
launches: the first writes codes and how many escapes each block has; from the sums of these, the
second knows where the escapes of each block go. Decoding is one launch.

A product of a step and a code is exact, so decoded values do not depend on whether the compiler
fuses it with the sum. When codes are chosen, fusing would matter, so the launcher forbids it.
"""

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from packhorse.kernels.launch import ceil_div, choose_dialect, device_of, require_tensor
from packhorse.kernels.weights import round_to_bf16, widen
from packhorse.layout import BOUNDED_BLOCK, BOUNDED_LANES, MAX_BOUNDED_BITS, Rounding

__all__ = [
    "Quantiser",
    "collect_escapes",
    "collect_escapes_kernel",
    "decode_codes",
    "decode_codes_kernel",
    "encode_codes",
    "encode_codes_kernel",
    "n_code_words",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = tl.constexpr(BOUNDED_BLOCK)
_LANES = tl.constexpr(BOUNDED_LANES)
_ROWS = tl.constexpr(BOUNDED_BLOCK // BOUNDED_LANES)
_MAGIC = tl.constexpr(12582912.0)  # added to a small number, it rounds it to an integer
_BLOCKS = 2  # of a program, so that a row of a tile has an element for each thread of a warp
_WARPS = 1


class Quantiser(NamedTuple):
    """How a segment is coded (docs/format.md, section 13). All numbers are F32.

    Attributes:
        bits: of a code.
        step: the difference of neighbouring codes' values.
        center: the value of the middle code.
        inverse: 1 / step; for encoding.
        inner: the largest rounded difference that is within the bound; for encoding.
        outer: the largest exact difference that is within the bound; for encoding.
    """

    bits: int
    step: float
    center: float
    inverse: float = 0.0
    inner: float = 0.0
    outer: float = 0.0


@triton.jit
def _read_numbers(elements_ptr, at, mask, IS_BF16: tl.constexpr, UPCAST: tl.constexpr):
    """Elements as F32; NaN where the mask is not set."""
    values = tl.load(elements_ptr + at, mask=mask, other=0)
    numbers = widen(values, UPCAST) if IS_BF16 else values.to(tl.float32)
    return tl.where(mask, numbers, float("nan"))


@triton.jit
def _round_numbers(numbers, IS_BF16: tl.constexpr, IS_F16: tl.constexpr, UPCAST: tl.constexpr):
    """F32 numbers rounded to values of the elements' type."""
    if IS_BF16:
        return widen(round_to_bf16(numbers, UPCAST), UPCAST)
    if IS_F16:
        return numbers.to(tl.float16).to(tl.float32)
    return numbers


@triton.jit
def _is_near(x, values, difference, inner, outer):
    """Whether values are within the bound of x, although their difference may be rounded."""
    magnitude = tl.abs(difference)
    is_exact = (x - difference == values) & (values + difference == x)
    return (magnitude <= outer) & ((magnitude <= inner) | is_exact)


@triton.jit
def _random_shares(indices, key):
    """Numbers of 24 random bits, at least 0 and below 1."""
    y = indices.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)
    y = (y ^ (y >> 16)) * 0x7FEB352D
    y = (y ^ (y >> 15)) * 0x846CA68B
    y = y ^ (y >> 16)
    return (y >> 8).to(tl.float32) * (1.0 / 16777216.0)


# A segment of any length, any key and any numbers use the same machine code.
@triton.jit(do_not_specialize=["n", "n_words", "key"])
def encode_codes_kernel(
    elements_ptr,  # n
    words_ptr,  # n_words, int32: words of the codes
    counts_ptr,  # blocks, int32: escapes of each block
    n,
    n_words,
    center,
    step,
    inverse,
    inner,
    outer,
    key,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IS_BF16: tl.constexpr,
    IS_F16: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    rows = tl.arange(0, _ROWS)[:, None]
    columns = tl.arange(0, BLOCKS * _LANES)[None, :]
    blocks, lanes = first + columns // _LANES, columns % _LANES
    at = blocks * _BLOCK + rows * _LANES + lanes
    there = at < n
    x = _read_numbers(elements_ptr, at, there, IS_BF16, UPCAST)
    most: tl.constexpr = (1 << (BITS - 1)) - 1
    scaled = (x - center) * inverse
    steps = (scaled + _MAGIC) - _MAGIC
    if STOCHASTIC:
        steps = tl.where(steps > scaled, steps - 1, steps)
    low = _round_numbers(steps * step + center, IS_BF16, IS_F16, UPCAST)
    gap = x - low
    holds = (steps >= -most) & (steps <= most) & _is_near(x, low, gap, inner, outer)
    if STOCHASTIC:
        above = steps + 1
        high = _round_numbers(above * step + center, IS_BF16, IS_F16, UPCAST)
        high_holds = (above >= -most) & (above <= most)
        high_holds = high_holds & _is_near(x, high, x - high, inner, outer)
        exceeds = gap > 0
        holds = holds & (high_holds | (gap <= 0))
        up = exceeds & (_random_shares(at, key) * (high - low) < gap)
        steps = tl.where(up, above, steps)
    codes = tl.where(holds, steps, 0.0).to(tl.int32) + (1 << (BITS - 1))
    codes = tl.where(holds, codes, 0).to(tl.uint32)
    # Bits of different codes never meet, so sums are joins.
    for word in tl.static_range(BITS):
        shift = rows * BITS - 32 * word
        upper = codes << tl.where((shift >= 0) & (shift < 32), shift, 0).to(tl.uint32)
        lower = codes >> tl.where((shift < 0) & (shift > -BITS), -shift, 0).to(tl.uint32)
        is_upper, is_lower = (shift >= 0) & (shift < 32), (shift < 0) & (shift > -BITS)
        parts = tl.where(is_upper, upper, tl.where(is_lower, lower, 0))
        joined = tl.sum(parts.to(tl.int32, bitcast=True), axis=0)
        words_at = tl.arange(0, BLOCKS * _LANES)
        to = (first + words_at // _LANES) * (_LANES * BITS) + word * _LANES + words_at % _LANES
        tl.store(words_ptr + to, joined, mask=to < n_words)
    escaped = (there & (codes == 0)).to(tl.int32)
    per_lane = tl.reshape(tl.sum(escaped, axis=0), (BLOCKS, _LANES))
    own = first + tl.arange(0, BLOCKS)
    tl.store(counts_ptr + own, tl.sum(per_lane, axis=1), mask=own * _BLOCK < n)


@triton.jit
def _read_codes(words_ptr, block, indices, there, BITS: tl.constexpr):
    """Codes of elements of a block, by their indices in it."""
    bit = indices // _LANES * BITS
    shift = (bit % 32).to(tl.uint32)
    at = block * (_LANES * BITS) + bit // 32 * _LANES + indices % _LANES
    lower = tl.load(words_ptr + at, mask=there, other=0).to(tl.uint32, bitcast=True) >> shift
    # The code may end in the next word; there is none behind the last.
    crosses = there & (shift + BITS > 32)
    upper = tl.load(words_ptr + at + _LANES, mask=crosses, other=0).to(tl.uint32, bitcast=True)
    upper = tl.where(crosses, upper << tl.where(crosses, 32 - shift, 0), 0)
    return ((lower | upper) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["n"])
def collect_escapes_kernel(
    elements_ptr,  # n
    words_ptr,  # int32: words of the codes
    counts_ptr,  # blocks, int32
    ends_ptr,  # blocks, int64: sums of counts up to and with each block
    escapes_ptr,  # capacity, of the elements' type
    n,
    capacity,
    BITS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + block)
    if count > 0:
        indices = tl.arange(0, _BLOCK)
        at = block * _BLOCK + indices
        there = at < n
        codes = _read_codes(words_ptr, block, indices, there, BITS)
        escaped = there & (codes == 0)
        places = tl.load(ends_ptr + block) - count + tl.cumsum(escaped.to(tl.int32), 0) - 1
        values = tl.load(elements_ptr + at, mask=escaped, other=0)
        tl.store(escapes_ptr + places, values, mask=escaped & (places < capacity))


@triton.jit(do_not_specialize=["n"])
def decode_codes_kernel(
    words_ptr,  # int32: words of the codes
    counts_ptr,  # blocks, int32; read if HAS_ESCAPES
    ends_ptr,  # blocks, int64: sums of counts up to and with each block; read if HAS_ESCAPES
    escapes_ptr,  # n_escapes, of the elements' type; read if HAS_ESCAPES
    out_ptr,  # n
    n,
    n_escapes,
    center,
    step,
    BITS: tl.constexpr,
    HAS_ESCAPES: tl.constexpr,
    IS_BF16: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, _BLOCK)
    at = block * _BLOCK + indices
    there = at < n
    codes = _read_codes(words_ptr, block, indices, there, BITS)
    numbers = (codes - (1 << (BITS - 1))).to(tl.float32) * step + center
    values = round_to_bf16(numbers, UPCAST) if IS_BF16 else numbers.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, values, mask=there)
    if HAS_ESCAPES:
        count = tl.load(counts_ptr + block)
        if count > 0:
            escaped = there & (codes == 0)
            places = tl.load(ends_ptr + block) - count + tl.cumsum(escaped.to(tl.int32), 0) - 1
            # Counts from elsewhere may lie; no place is outside of the escapes.
            known = escaped & (places >= 0) & (places < n_escapes)
            kept = tl.load(escapes_ptr + places, mask=known, other=0)
            tl.store(out_ptr + at, kept, mask=known)


def n_code_words(n: int, bits: int) -> int:
    """Words of 32 bits that the codes of a segment take."""
    whole, rest = divmod(n, BOUNDED_BLOCK)
    n_rows = ceil_div(rest, BOUNDED_LANES)
    return BOUNDED_LANES * (whole * bits + ceil_div(n_rows * bits, 32))


def encode_codes(
    elements: torch.Tensor,
    by: Quantiser,
    words: torch.Tensor,
    counts: torch.Tensor,
    *,
    rounding: Rounding = Rounding.NEAREST,
    key: int = 0,
) -> None:
    """Writes the codes of a segment and the number of escapes of each block.

    Args:
        elements: F32, BF16 or F16, (n,).
        by: how to code them.
        words: int32, (n_code_words(n, bits),): receives the codes.
        counts: int32, (blocks of 512 elements,): receives the counts.
        rounding: how to choose codes.
        key: of the segment's random bits, a u32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous; or
            `bits` are not 1 to 16.
    """
    n, n_blocks = _require_segment(elements, by.bits, words)
    require_tensor(counts, "counts", torch.int32, (n_blocks,), elements.device)
    if n == 0:
        return
    with device_of(elements):
        encode_codes_kernel[(ceil_div(n_blocks, _BLOCKS),)](
            elements,
            words,
            counts,
            n,
            words.numel(),
            by.center,
            by.step,
            by.inverse,
            by.inner,
            by.outer,
            key - (key >> 31 << 32),  # as an i32, whatever the key is
            BITS=by.bits,
            STOCHASTIC=rounding == Rounding.STOCHASTIC,
            IS_BF16=elements.dtype == torch.bfloat16,
            IS_F16=elements.dtype == torch.float16,
            UPCAST=choose_dialect(elements.device).upcast,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def collect_escapes(
    elements: torch.Tensor,
    bits: int,
    words: torch.Tensor,
    counts: torch.Tensor,
    escapes: torch.Tensor,
) -> torch.Tensor:
    """Writes the elements without a code, in order, as far as there is room for them.

    Args:
        elements: as for `encode_codes`.
        bits: of a code.
        words: the codes that `encode_codes` wrote.
        counts: the counts that it wrote.
        escapes: (capacity,), of the elements' dtype.

    Returns:
        int64, (blocks,): the sums of the counts up to each block. The last is the number of
        escapes, which may be more than the capacity.

    Raises:
        TypeError: as for `encode_codes`.
        ValueError: as for `encode_codes`.
    """
    n, n_blocks = _require_segment(elements, bits, words)
    require_tensor(counts, "counts", torch.int32, (n_blocks,), elements.device)
    require_tensor(escapes, "escapes", elements.dtype, (escapes.numel(),), elements.device)
    ends = torch.cumsum(counts, 0, dtype=torch.int64)
    if n == 0:
        return ends
    with device_of(elements):
        collect_escapes_kernel[(n_blocks,)](
            elements, words, counts, ends, escapes, n, escapes.numel(), BITS=bits, num_warps=4
        )
    return ends


def decode_codes(
    words: torch.Tensor,
    by: Quantiser,
    out: torch.Tensor,
    counts: torch.Tensor | None = None,
    escapes: torch.Tensor | None = None,
) -> None:
    """Decodes a segment.

    Nothing is read or written outside of the tensors, whatever they hold. But codes and counts that
    disagree give wrong elements without an error: check messages from elsewhere on the host.

    Args:
        words: int32, (n_code_words(n, bits),): the codes.
        by: how they were coded.
        out: F32, BF16 or F16, (n,): receives the elements.
        counts: int32, (blocks,); None if there are no escapes.
        escapes: (n_escapes,), of the elements' dtype; None if there are none.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous; or
            `bits` are not 1 to 16.
    """
    n, n_blocks = _require_segment(out, by.bits, words)
    has_escapes = counts is not None and escapes is not None and escapes.numel() > 0
    ends = words
    if counts is not None and escapes is not None:
        require_tensor(counts, "counts", torch.int32, (n_blocks,), out.device)
        require_tensor(escapes, "escapes", out.dtype, (escapes.numel(),), out.device)
        ends = torch.cumsum(counts, 0, dtype=torch.int64) if has_escapes else words
    if n == 0:
        return
    with device_of(out):
        decode_codes_kernel[(n_blocks,)](
            words,
            counts if has_escapes else words,
            ends,
            escapes if has_escapes else out,
            out,
            n,
            escapes.numel() if has_escapes and escapes is not None else 0,
            by.center,
            by.step,
            BITS=by.bits,
            HAS_ESCAPES=has_escapes,
            IS_BF16=out.dtype == torch.bfloat16,
            UPCAST=choose_dialect(out.device).upcast,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _require_segment(elements: torch.Tensor, bits: int, words: torch.Tensor) -> tuple[int, int]:
    """Checks the elements and the words of codes; returns elements and blocks."""
    if elements.dtype not in _DTYPES:
        names = ", ".join(str(dtype) for dtype in _DTYPES)
        raise TypeError(f"elements have dtype {elements.dtype}; kernels take {names}")
    if not 1 <= bits <= MAX_BOUNDED_BITS:
        raise ValueError(f"codes have {bits} bits; allowed are 1 to {MAX_BOUNDED_BITS}")
    n = elements.numel()
    require_tensor(elements, "elements", elements.dtype, (n,), elements.device)
    require_tensor(words, "words", torch.int32, (n_code_words(n, bits),), elements.device)
    return n, ceil_div(n, BOUNDED_BLOCK)
