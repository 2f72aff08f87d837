"""Packs the exponents of BF16 and F32 elements into four bits each, on a GPU, for the wire.

Nothing is stored in this form: both ends of a transfer run this file. Elements are coded in blocks
of 1024. A block has a base, its largest exponent below that of infinities. The code of an element
is the base minus its exponent if that is 0 to 13; 14 stands for an exponent of zero; 15 for any
other exponent, an *escape*, which follows as a byte of its own. Sign and mantissa travel as they
are. So 16 bits become 12, and 32 become 28, plus the escapes; finding the codes takes no statistics
and no second look at the elements.

A message has these sections, each padded to 16 bytes:

    low       n bytes: sign and mantissa (BF16); or n words of 16 bits: the lower mantissa (F32)
    high      n bytes: sign and upper mantissa (F32 only)
    codes     512 bytes a block: byte j has the code of element j in its lower half, and that of
              element 512 + j in its upper half
    bases     a byte a block
    counts    16 bits a block: how many escapes it has
    escapes   a byte each, in the order of the elements
"""

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from packhorse.kernels.launch import ceil_div, device_of, require_tensor

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "Sections",
    "can_pack",
    "collect_exponents_kernel",
    "decode_exponents",
    "decode_exponents_kernel",
    "encode_exponents",
    "encode_exponents_kernel",
    "message_nbytes",
    "sections_of",
]

BLOCK = 1024
_BLOCK = tl.constexpr(BLOCK)
_HALF = tl.constexpr(BLOCK // 2)
_ZERO = tl.constexpr(14)
_ESCAPE = tl.constexpr(15)
ALIGNMENT = 16  # of a message and of its sections, in bytes
_ROOM = 8  # there is room for an escape of every eighth element
_WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_WARPS = 4


class Sections(NamedTuple):
    """Where the sections of a message begin, in bytes.

    Attributes:
        high: sign and upper mantissa of F32; the lower one begins at 0.
        codes: the codes.
        bases: a byte for each block.
        counts: 16 bits for each block.
        escapes: the escapes; all that comes before is as long for any elements.
        capacity: where the room for escapes ends.
    """

    high: int
    codes: int
    bases: int
    counts: int
    escapes: int
    capacity: int

    @property
    def room(self) -> int:
        """The most escapes that a message holds."""
        return self.capacity - self.escapes


def can_pack(dtype: torch.dtype) -> bool:
    """Whether the kernels take a dtype: BF16 or F32."""
    return dtype in _WORDS


def sections_of(n: int, dtype: torch.dtype) -> Sections:
    """The layout of the message of some elements.

    Args:
        n: how many.
        dtype: BF16 or F32.
    """
    whole, rest = divmod(n, BLOCK)
    n_blocks = ceil_div(n, BLOCK)
    is_f32 = dtype == torch.float32
    ends = [0]
    for nbytes in (
        n * (2 if is_f32 else 1),
        n if is_f32 else 0,
        whole * BLOCK // 2 + min(rest, BLOCK // 2),
        n_blocks,
        2 * n_blocks,
        ceil_div(n, _ROOM),
    ):
        ends.append(_padded(ends[-1] + nbytes))
    return Sections(*ends[1:])


def message_nbytes(n: int, dtype: torch.dtype, n_escapes: int) -> int | None:
    """The length of the message of some elements.

    Args:
        n: how many.
        dtype: BF16 or F32.
        n_escapes: how many escapes it has, at least 0.

    Returns:
        A multiple of `ALIGNMENT` bytes; None if there is no room for so many escapes.
    """
    sections = sections_of(n, dtype)
    return _padded(sections.escapes + n_escapes) if n_escapes <= sections.room else None


def _padded(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


@triton.jit
def _halves(n):
    """The block of this program, and where the elements of its two halves are."""
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _HALF)
    first = block * _BLOCK + lanes
    second = first + _HALF
    return block, block * _HALF + lanes, first, second, first < n, second < n


@triton.jit
def _exponents(words, MANTISSA: tl.constexpr):
    return (words >> MANTISSA) & 0xFF


@triton.jit
def _codes(exponents, base):
    """The codes of exponents."""
    down = base - exponents
    is_near = (down >= 0) & (down < _ZERO)
    return tl.where(exponents == 0, _ZERO, tl.where(is_near, down, _ESCAPE))


@triton.jit
def _store_rest(words, low_ptr, high_ptr, at, there, IS_F32: tl.constexpr):
    """Writes the sign and the mantissa of elements."""
    if IS_F32:
        tl.store(low_ptr + at, words.to(tl.int16), mask=there)
        high = ((words >> 24) & 0x80) | ((words >> 16) & 0x7F)
        tl.store(high_ptr + at, high.to(tl.uint8), mask=there)
    else:
        tl.store(low_ptr + at, (((words >> 8) & 0x80) | (words & 0x7F)).to(tl.uint8), mask=there)


@triton.jit
def _load_rest(low_ptr, high_ptr, at, there, IS_F32: tl.constexpr):
    """Reads the sign and the mantissa of elements; the exponent is zero."""
    if IS_F32:
        low = tl.load(low_ptr + at, mask=there, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(high_ptr + at, mask=there, other=0).to(tl.int32)
        return ((high & 0x80) << 24) | ((high & 0x7F) << 16) | low
    low = tl.load(low_ptr + at, mask=there, other=0).to(tl.int32)
    return ((low & 0x80) << 8) | (low & 0x7F)


@triton.jit(do_not_specialize=["n"])
def encode_exponents_kernel(
    words_ptr,  # n: the elements' bits, int16 or int32
    low_ptr,  # n, uint8 (BF16) or int16 (F32)
    high_ptr,  # n, uint8; written for F32 only
    codes_ptr,
    bases_ptr,  # blocks, uint8
    counts_ptr,  # blocks, int16
    n,
    MANTISSA: tl.constexpr,
    IS_F32: tl.constexpr,
):
    block, pairs, first, second, there, there_too = _halves(n)
    a = tl.load(words_ptr + first, mask=there, other=0).to(tl.int32)
    b = tl.load(words_ptr + second, mask=there_too, other=0).to(tl.int32)
    low, high = _exponents(a, MANTISSA), _exponents(b, MANTISSA)
    finite = tl.maximum(tl.where(low < 255, low, 0), tl.where(high < 255, high, 0))
    base = tl.max(finite, axis=0)
    codes, more = _codes(low, base), _codes(high, base)
    tl.store(codes_ptr + pairs, (codes | (more << 4)).to(tl.uint8), mask=there)
    _store_rest(a, low_ptr, high_ptr, first, there, IS_F32)
    _store_rest(b, low_ptr, high_ptr, second, there_too, IS_F32)
    escaped = (codes == _ESCAPE).to(tl.int32) + (more == _ESCAPE).to(tl.int32)
    tl.store(bases_ptr + block, base.to(tl.uint8))
    tl.store(counts_ptr + block, tl.sum(escaped, axis=0).to(tl.int16))


@triton.jit
def _places(codes, more, before):
    """Where the escapes of a block are, for the elements of both of its halves."""
    first, second = (codes == _ESCAPE).to(tl.int32), (more == _ESCAPE).to(tl.int32)
    places = before + tl.cumsum(first, 0) - 1
    behind = before + tl.sum(first, axis=0) + tl.cumsum(second, 0) - 1
    return places, behind


@triton.jit(do_not_specialize=["n", "capacity"])
def collect_exponents_kernel(
    words_ptr,  # n: the elements' bits, int16 or int32
    codes_ptr,
    counts_ptr,  # blocks, int16
    ends_ptr,  # blocks, int64: sums of counts up to and with each block
    escapes_ptr,  # capacity, uint8
    n,
    capacity,
    MANTISSA: tl.constexpr,
):
    block, pairs, first, second, there, there_too = _halves(n)
    count = tl.load(counts_ptr + block).to(tl.int64)
    if count > 0:
        both = tl.load(codes_ptr + pairs, mask=there, other=0).to(tl.int32)
        codes, more = both & 15, both >> 4
        places, behind = _places(codes, more, tl.load(ends_ptr + block) - count)
        is_first = (codes == _ESCAPE) & there
        is_second = (more == _ESCAPE) & there_too
        a = tl.load(words_ptr + first, mask=is_first, other=0).to(tl.int32)
        b = tl.load(words_ptr + second, mask=is_second, other=0).to(tl.int32)
        low, high = _exponents(a, MANTISSA).to(tl.uint8), _exponents(b, MANTISSA).to(tl.uint8)
        tl.store(escapes_ptr + places, low, mask=is_first & (places < capacity))
        tl.store(escapes_ptr + behind, high, mask=is_second & (behind < capacity))


@triton.jit
def _decode(codes, base, places, escapes_ptr, there, n_escapes):
    """The exponents of codes."""
    exponents = tl.where(codes == _ZERO, 0, base - codes)
    # Counts from elsewhere may lie; no place is outside of the escapes.
    known = (codes == _ESCAPE) & there & (places >= 0) & (places < n_escapes)
    found = tl.load(escapes_ptr + places, mask=known, other=0).to(tl.int32)
    return tl.where(codes == _ESCAPE, found, exponents) & 0xFF


@triton.jit(do_not_specialize=["n", "n_escapes"])
def decode_exponents_kernel(
    low_ptr,  # n, uint8 (BF16) or int16 (F32)
    high_ptr,  # n, uint8; read for F32 only
    codes_ptr,
    bases_ptr,  # blocks, uint8
    counts_ptr,  # blocks, int16
    ends_ptr,  # blocks, int64: sums of counts up to and with each block
    escapes_ptr,  # n_escapes, uint8
    words_ptr,  # n: receives the elements' bits, int16 or int32
    n,
    n_escapes,
    MANTISSA: tl.constexpr,
    IS_F32: tl.constexpr,
):
    block, pairs, first, second, there, there_too = _halves(n)
    both = tl.load(codes_ptr + pairs, mask=there, other=0).to(tl.int32)
    codes, more = both & 15, both >> 4
    base = tl.load(bases_ptr + block).to(tl.int32)
    count = tl.load(counts_ptr + block).to(tl.int64)
    places, behind = _places(codes, more, tl.load(ends_ptr + block) - count)
    low = _decode(codes, base, places, escapes_ptr, there, n_escapes)
    high = _decode(more, base, behind, escapes_ptr, there_too, n_escapes)
    a = _load_rest(low_ptr, high_ptr, first, there, IS_F32) | (low << MANTISSA)
    b = _load_rest(low_ptr, high_ptr, second, there_too, IS_F32) | (high << MANTISSA)
    tl.store(words_ptr + first, a.to(words_ptr.dtype.element_ty), mask=there)
    tl.store(words_ptr + second, b.to(words_ptr.dtype.element_ty), mask=there_too)


def encode_exponents(elements: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
    """Packs elements.

    Args:
        elements: BF16 or F32, (n,), contiguous.
        message: uint8, (sections_of(n, dtype).capacity,): receives the message.

    Returns:
        int64, (): how many escapes there are, on the same device. If there is room for all, the
        message is whole and ends behind them; otherwise it is useless.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    n, sections = _require(elements, message)
    if n == 0:
        return torch.zeros((), dtype=torch.int64, device=elements.device)
    require_tensor(message, "message", torch.uint8, (sections.capacity,), elements.device)
    view = _View(message, n, elements.dtype, sections)
    words, grid = elements.view(_WORDS[elements.dtype]), (view.n_blocks,)
    constants = {"MANTISSA": view.mantissa, "num_warps": _WARPS}
    with device_of(elements):
        encode_exponents_kernel[grid](
            words, view.low, view.high, view.codes, view.bases, view.counts, n,
            IS_F32=view.is_f32, **constants,
        )  # fmt: skip
        ends = view.ends()
        collect_exponents_kernel[grid](
            words, view.codes, view.counts, ends, view.escapes, n, view.escapes.numel(),
            **constants,
        )  # fmt: skip
    return ends[-1]


def decode_exponents(message: torch.Tensor, n_escapes: int, out: torch.Tensor) -> None:
    """Makes the elements of a message again.

    Nothing is read or written outside of the tensors, whatever they hold; a message that is damaged
    gives wrong elements without an error.

    Args:
        message: uint8, (sections_of(n, dtype).escapes + n_escapes,) at least.
        n_escapes: how many escapes it has.
        out: BF16 or F32, (n,), contiguous: receives the elements.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous; or the
            message is shorter than it must be.
    """
    n, sections = _require(out, message)
    if n == 0:
        return
    if n_escapes < 0 or message.numel() < sections.escapes + n_escapes:
        raise ValueError(
            f"message has {message.numel()} bytes; {n} elements with {n_escapes} escapes need "
            f"{sections.escapes + n_escapes}"
        )
    view = _View(message, n, out.dtype, sections)
    with device_of(out):
        decode_exponents_kernel[(view.n_blocks,)](
            view.low, view.high, view.codes, view.bases, view.counts, view.ends(), view.escapes,
            out.view(_WORDS[out.dtype]), n, n_escapes,
            MANTISSA=view.mantissa, IS_F32=view.is_f32, num_warps=_WARPS,
        )  # fmt: skip


class _View:
    """The sections of a message as tensors that share its memory."""

    def __init__(
        self, message: torch.Tensor, n: int, dtype: torch.dtype, sections: Sections
    ) -> None:
        self.n_blocks = ceil_div(n, BLOCK)
        self.is_f32 = dtype == torch.float32
        self.mantissa = 23 if self.is_f32 else 7
        low = message[: sections.high]
        self.low = low.view(torch.int16) if self.is_f32 else low
        self.high = message[sections.high : sections.codes] if self.is_f32 else low
        self.codes = message[sections.codes : sections.bases]
        self.bases = message[sections.bases : sections.counts]
        self.counts = message[sections.counts : sections.escapes].view(torch.int16)
        self.escapes = message[sections.escapes :]

    def ends(self) -> torch.Tensor:
        """The sums of the counts up to and with each block, int64."""
        return torch.cumsum(self.counts[: self.n_blocks], 0, dtype=torch.int64)


def _require(elements: torch.Tensor, message: torch.Tensor) -> tuple[int, Sections]:
    if not can_pack(elements.dtype):
        raise TypeError(f"elements have dtype {elements.dtype}; the kernels take BF16 and F32")
    n = elements.numel()
    require_tensor(elements, "elements", elements.dtype, (n,), elements.device)
    require_tensor(message, "message", torch.uint8, (message.numel(),), elements.device)
    if message.data_ptr() % ALIGNMENT:
        raise ValueError("message must begin at a multiple of 16 bytes; copy it first")
    return n, sections_of(n, elements.dtype)
