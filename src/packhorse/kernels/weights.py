"""Decodes packed weights to BF16 (docs/format.md, section 12), and has the steps that products
share.

A tile of low bytes and a tile of high bits become a tile of BF16 elements in registers, without
tables or branches: the low byte of an element needs no work, the upper bytes of four elements take
two shifts or masks, and two byte permutes interleave them. The results have the code in place of
the exponent (`W12`), or 112 + code (`W11`, whose code 0 must not become a subnormal). An exact
multiplication with a power of two then gives the row's true exponents. A product does this
multiplication once for a row; decoding does it for each element.
"""

import warnings
from functools import cache
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
import triton
from triton import language as tl

from packhorse.kernels.arrays import ALIGNMENT, WeightTensors
from packhorse.kernels.launch import (
    ceil_div,
    choose_dialect,
    device_of,
    require_tensor,
)
from packhorse.layout import WeightFormat

__all__ = [
    "decode_rows",
    "decode_weights",
    "decode_weights_kernel",
    "power_of_two",
    "require_weights",
    "round_to_bf16",
    "widen",
    "window_bias",
    "window_elements",
]

# The steps for four elements. Operands: the two results; high bits; (W11: the two bits besides the
# sign); low bytes. 0xea is (a and b) or c; 0x5140 and 0x7362 interleave bytes.
_INTERLEAVE = "prmt.b32 $0,{low},h,0x5140; prmt.b32 $1,{low},h,0x7362;"
_W12_STEPS = (
    "shl.b32 s,$2,4; and.b32 h,$2,0x07070707;",
    "shr.u32 h,$2,4; and.b32 h,h,0x07070707; mov.b32 s,$2;",
)
_W12_ASSEMBLY = tl.constexpr(
    tuple(
        f"{{ .reg .b32 s,h; {steps} lop3.b32 h,s,0x80808080,h,0xea; {_INTERLEAVE} }}".replace(
            "{low}", "$3"
        )
        for steps in _W12_STEPS
    )
)
_W11_ASSEMBLY = tl.constexpr(
    tuple(
        f"{{ .reg .b32 s,h; shl.b32 s,$2,{7 - i}; shr.u32 h,$3,{i // 2 * 2};"
        " lop3.b32 h,h,0x03030303,0x38383838,0xea; lop3.b32 h,s,0x80808080,h,0xea;"
        f" {_INTERLEAVE} }}".replace("{low}", "$4")
        for i in range(8)
    )
)
# Of the operands above. "&": a result is written before the last operand is read.
_W12_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r")
_W11_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r,r")
_W11_BIAS = tl.constexpr(112)  # is added to a code


class _Checked(NamedTuple):
    """Arrays that have passed the checks, so that products of one token need not repeat them.

    Attributes:
        format: their format.
        n_columns: columns of their matrix.
        arrays: weak references to them.
    """

    format: WeightFormat
    n_columns: int
    arrays: tuple[ReferenceType[torch.Tensor], ...]


_CHECKED: dict[int, _Checked] = {}  # by the identity of the low bytes


def require_weights(weights: WeightTensors, format: WeightFormat, n_columns: int) -> None:
    """Checks shapes and dtypes. The caller has checked the content.

    Arrays that have passed are remembered by their identity, and not checked again.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    key = id(weights.low_bytes)
    known = _CHECKED.get(key)
    if known is not None and known.format is format and known.n_columns == n_columns:
        low, high, first, starts, exceptions = known.arrays
        if (
            low() is weights.low_bytes
            and high() is weights.high_bits
            and first() is weights.first_exponents
            and starts() is weights.exception_starts
            and exceptions() is weights.exceptions
        ):
            return
    _check_weights(weights, format, n_columns)
    others = map(ref, weights[1:])
    # An entry must not outlive the tensor whose identity is its key.
    low_bytes = ref(weights.low_bytes, lambda _: _CHECKED.pop(key, None))
    _CHECKED[key] = _Checked(format, n_columns, (low_bytes, *others))


def _check_weights(weights: WeightTensors, format: WeightFormat, n_columns: int) -> None:
    n_rows, device = weights.n_rows, weights.device
    shapes = [
        (torch.uint8, (n_rows, format.n_padded(n_columns))),
        (torch.uint8, (n_rows, format.n_high_bytes(n_columns))),
        (torch.uint8, (n_rows,)),
        (torch.int32, (n_rows + 1,)),
        (torch.int32, (weights.exceptions.numel(),)),
    ]
    for name, tensor, (dtype, shape) in zip(weights._fields, weights, shapes, strict=True):
        require_tensor(tensor, name, dtype, shape, device)
    if names := weights.misaligned():
        _warn_of_alignment(", ".join(names))


@cache  # one loader has usually made the arrays of all weights
def _warn_of_alignment(names: str) -> None:
    warnings.warn(
        f"arrays of a packed weight ({names}) do not begin at a multiple of {ALIGNMENT} bytes, as "
        "views of one large buffer do: products are right, but kernels load a few bytes at a time; "
        "give each array memory of its own with clone(), or wrap the arrays in a PackedWeight, "
        "which does it",
        RuntimeWarning,
        stacklevel=4,
    )


@triton.jit
def window_elements(
    low, high, rest, SLICE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """BF16 elements of a slice, with codes of the window instead of exponents.

    `low` are the low bytes; `high` the high bits (W12) or signs (W11); `rest` the two bits besides
    the signs (W11; unused in W12).
    """
    if ASSEMBLY:
        if BITS == 12:
            return tl.inline_asm_elementwise(
                _W12_ASSEMBLY[SLICE], _W12_CONSTRAINTS, [high, low], tl.bfloat16, True, 4
            )
        else:
            return tl.inline_asm_elementwise(
                _W11_ASSEMBLY[SLICE], _W11_CONSTRAINTS, [high, rest, low], tl.bfloat16, True, 4
            )
    if BITS == 12:
        nibble = high >> (4 * SLICE)
        upper = ((nibble & 8) << 4) | (nibble & 7)
    else:
        upper = (((high >> SLICE) & 1) << 7) | 0x38 | ((rest >> (SLICE // 2 * 2)) & 3)
    bits = (upper.to(tl.uint16) << 8) | low.to(tl.uint16)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def window_bias(BITS: tl.constexpr):
    """The exponent field that `window_elements` gives code 0."""
    return 0 if BITS == 12 else _W11_BIAS


@triton.jit
def power_of_two(exponent):
    """2 to the power of int32 numbers of -126 to 127, as FP32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(values, UPCAST: tl.constexpr):
    """FP32 to the nearest BF16, ties to even; by bits where conversions are unreliable."""
    if not UPCAST:
        return values.to(tl.bfloat16)
    bits = values.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    is_number = values == values  # a NaN may not be rounded up to an infinity
    upper = tl.where(is_number, rounded, bits | 0x400000) >> 16
    return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen(values, UPCAST: tl.constexpr):
    """BF16 to FP32, by bits where conversions are unreliable."""
    if not UPCAST:
        return values.to(tl.float32)
    bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


# All numbers of rows use the same machine code: in a look-up there are as many rows as tokens.
# The same holds for a look-up of some of a batch's tokens, whose numbers begin anywhere.
@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["rows_ptr"])
def decode_weights_kernel(
    low_ptr,  # rows x SLICES * n_steps
    high_ptr,  # rows x SLICES * n_steps * (BITS - 8) / 8
    first_ptr,  # n_rows
    starts_ptr,
    exceptions_ptr,
    rows_ptr,  # n_rows, int64: numbers of the rows; read if GATHER
    out_ptr,  # n_rows x n_columns
    n_rows,
    n_columns,
    n_steps,
    BITS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
    GATHER: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    UPCAST: tl.constexpr,
):
    out_rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_rows = out_rows < n_rows
    out_rows = tl.where(mask_rows, out_rows, 0).to(tl.int64)
    rows = tl.load(rows_ptr + out_rows) if GATHER else out_rows
    first = tl.load(first_ptr + out_rows).to(tl.int32) - window_bias(BITS)
    # 2^239 does not fit BF16, so there are two factors; each step is exact.
    factor = power_of_two(tl.minimum(first, 127)).to(tl.bfloat16)[:, None]
    second = power_of_two(tl.maximum(first - 127, 0)).to(tl.bfloat16)[:, None]
    low = low_ptr + rows[:, None] * (SLICES * n_steps)
    high = high_ptr + rows[:, None] * (SLICES * n_steps * (BITS - 8) // 8)
    out = out_ptr + out_rows[:, None] * n_columns
    for start in range(0, n_steps, BLOCK_STEPS):
        steps = start + tl.arange(0, BLOCK_STEPS)[None, :]
        mask = mask_rows[:, None] & (steps < n_steps)
        first_bits = tl.load(high + steps, mask=mask, other=0)
        for i in tl.static_range(SLICES):
            rest = first_bits
            if BITS == 11:
                rest = tl.load(high + (1 + i % 2) * n_steps + steps, mask=mask, other=0)
            columns = i * n_steps + steps
            low_bytes = tl.load(low + columns, mask=mask, other=0)
            elements = window_elements(low_bytes, first_bits, rest, i, BITS, ASSEMBLY)
            if UPCAST:
                exact = widen(elements, True) * widen(factor, True) * widen(second, True)
                elements = round_to_bf16(exact, True)
            else:
                elements = elements * factor * second
            tl.store(out + columns, elements, mask=mask & (columns < n_columns))
    # Exceptions overwrite what other threads of the program have written.
    tl.debug_barrier()
    starts = tl.load(starts_ptr + rows)
    n_exceptions = tl.where(mask_rows, tl.load(starts_ptr + rows + 1) - starts, 0)
    for start in range(0, tl.max(n_exceptions, 0), BLOCK_EXCEPTIONS):
        number = start + tl.arange(0, BLOCK_EXCEPTIONS)[None, :]
        mask = number < n_exceptions[:, None]
        index = starts[:, None].to(tl.int64) + number
        entries = tl.load(exceptions_ptr + index, mask=mask, other=0)
        values = ((entries >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(out + (entries & 0xFFFF), values, mask=mask)


def decode_weights(
    weights: WeightTensors, format: WeightFormat, n_columns: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The plain weight, bit for bit.

    Args:
        weights: checked arrays of `n_rows` rows. Exceptions with columns out of range would be
            written outside of the output.
        format: their format.
        n_columns: columns of the matrix, 1 to 65536.
        out: BF16, n_rows x n_columns; receives the weight. By default a new tensor.

    Returns:
        BF16, n_rows x n_columns.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    require_weights(weights, format, n_columns)
    n_rows, device = weights.n_rows, weights.device
    if out is None:
        out = torch.empty((n_rows, n_columns), dtype=torch.bfloat16, device=device)
    require_tensor(out, "out", torch.bfloat16, (n_rows, n_columns), device)
    _decode(weights, format, None, out)
    return out


def decode_rows(
    weights: WeightTensors, format: WeightFormat, n_columns: int, rows: torch.Tensor
) -> torch.Tensor:
    """Some rows of the plain weight, bit for bit.

    Args:
        weights: as for `decode_weights`.
        format: their format.
        n_columns: columns of the matrix.
        rows: int64 (n,), numbers of the rows, in any order.

    Returns:
        BF16, n x n_columns.

    Raises:
        IndexError: there is no such row. On a GPU, PyTorch's own behaviour for such look-ups.
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    require_weights(weights, format, n_columns)
    require_tensor(rows, "rows", torch.int64, (len(rows),), weights.device)
    # If there is no such row, PyTorch's look-up stops all that follows.
    firsts = weights.first_exponents.index_select(0, rows)
    out = torch.empty((len(rows), n_columns), dtype=torch.bfloat16, device=weights.device)
    _decode(weights._replace(first_exponents=firsts), format, rows, out)
    return out


def _decode(
    weights: WeightTensors, format: WeightFormat, rows: torch.Tensor | None, out: torch.Tensor
) -> None:
    n_rows, n_columns = out.shape
    if n_rows == 0:
        return
    dialect = choose_dialect(out.device)
    n_steps = format.n_steps(n_columns)
    block_steps = min(triton.next_power_of_2(n_steps), 512)
    block_rows = 2048 // block_steps  # each of 128 threads loads 16 bytes at once
    with device_of(out):
        decode_weights_kernel[(ceil_div(n_rows, block_rows),)](
            *weights,
            weights.exception_starts if rows is None else rows,
            out,
            n_rows,
            n_columns,
            n_steps,
            BITS=format.bits,
            SLICES=format.n_slices,
            BLOCK_ROWS=block_rows,
            BLOCK_STEPS=block_steps,
            BLOCK_EXCEPTIONS=8,
            GATHER=rows is not None,
            ASSEMBLY=dialect.assembly,
            UPCAST=dialect.upcast,
            num_warps=4,
        )
