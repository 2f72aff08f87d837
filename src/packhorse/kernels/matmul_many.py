"""Products of many tokens with a packed weight of format W12, which is decoded in registers on its
way to the tensor cores. They are for numbers of tokens with which `matmul` would read the weight
more than once.

A program owns a block of rows and a block of tokens, and all its warps work on the same columns, as
in a product of plain matrices. On Hopper, the tensor cores do not expect an element of the weight
in the thread that loads and decodes it, but in another one, within groups of 16 columns. A sum does
not depend on the order of columns. So the elements stay where they are, and an earlier kernel
(`arrange_tokens_kernel`) puts the tokens into the same order once. Then tokens go from memory to
the tensor cores without passing through registers, and both halves of the columns are one product.

On Hopper, the tensor cores read the decoded elements from registers while a product runs. So the
kernel waits for each product before it decodes the next elements (`_wait_for`); meanwhile another
program of the same multiprocessor decodes.

Exceptions of a block of rows are adjacent in memory. They form a small matrix, with a column for
each exception; its product with the gathered columns of the tokens is added.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton import language as tl

from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import (
    MIN_SHARED_NBYTES,
    ceil_div,
    choose_dialect,
    device_of,
    limits_of,
)
from packhorse.kernels.matmul import (
    add_splits,
    check_product,
    memory_for_sums,
    scale_rows,
    shift_tokens,
)
from packhorse.kernels.weights import (
    round_to_bf16,
    widen,
    window_elements,
)
from packhorse.layout import W12, WeightFormat

__all__ = [
    "ManyConfig",
    "arrange_tokens_kernel",
    "default_many_config",
    "many_shared_nbytes",
    "multiply_many",
    "multiply_many_kernel",
]

_ARRANGED_BLOCK = 1024  # elements that a program arranges
_MAX_BLOCK_OFFSETS = 1 << 31  # of results of a block


@dataclass(frozen=True)
class ManyConfig:
    """How a product is divided.

    Attributes:
        block_rows: rows of the weight for a program; a power of two, at least 64.
        block_tokens: tokens for a program; a power of two, at least 16.
        block_steps: columns of each half in a turn; a power of two, at least 16.
        n_warps: warps of a program: 4 or 8.
        n_splits: programs that share a block.
        n_stages: one more than the number of turns that weights are fetched ahead.
    """

    block_rows: int = 128
    block_tokens: int = 64
    block_steps: int = 64
    n_warps: int = 8
    n_splits: int = 1
    n_stages: int = 3


@triton.jit
def _place_of(position, REORDER: tl.constexpr):
    """The place, among 16 columns, of the column that the tensor cores expect at a position:
    4t + 2h + i for position 8h + 2t + i."""
    if REORDER:
        return ((position >> 1) & 3) * 4 + (position >> 3) * 2 + (position & 1)
    return position


@triton.jit
def arrange_tokens_kernel(
    x_ptr,  # n_tokens x n_columns, BF16
    out_ptr,  # n_tokens x 2 * n_steps, BF16
    n_columns,
    n_steps,
    BLOCK: tl.constexpr,
    REORDER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Arranges tokens for products: 16 columns of either half in turns. On Hopper, tokens then go
    to the tensor cores unchanged, so this kernel also orders each 16 columns and scales them."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = (place >> 4) & 1
    column = half * n_steps + (place >> 5) * 16 + _place_of(place & 15, REORDER)
    mask = place < 2 * n_steps
    x = tl.load(x_ptr + token * n_columns + column, mask=mask & (column < n_columns), other=0.0)
    if REORDER:
        x = round_to_bf16(shift_tokens(widen(x, UPCAST)), UPCAST)
    tl.store(out_ptr + token * (2 * n_steps) + place, x, mask=mask)


@triton.jit
def _wait_for(total, REORDER: tl.constexpr, UPCAST: tl.constexpr):
    """Sums of a product that has ended. Without this use of them, Triton leaves Hopper's product
    running, and versions before 3.9 overwrite the registers from which it reads the weight."""
    if REORDER and not UPCAST:
        total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], tl.float32, True, 1)
    return total


@triton.jit
def _join_halves(tile_0, tile_1, REORDER: tl.constexpr):
    """Elements of two halves in the order of arranged tokens, without leaving their threads."""
    rows: tl.constexpr = tile_0.shape[0]
    steps: tl.constexpr = tile_0.shape[1]
    both = tl.join(tile_0, tile_1)
    if REORDER:
        groups = tl.reshape(both, (rows, steps // 16, 4, 2, 2, 2))
        ordered = tl.permute(groups, (0, 1, 5, 3, 2, 4))
    else:
        groups = tl.reshape(both, (rows, steps // 16, 16, 2))
        ordered = tl.permute(groups, (0, 1, 3, 2))
    return tl.reshape(ordered, (rows, 2 * steps))


@triton.jit
def _multiply_exceptions(
    total,  # BLOCK_ROWS x BLOCK_TOKENS, FP32
    x_ptr,
    starts_ptr,
    exceptions_ptr,
    rows,  # BLOCK_ROWS
    tokens,  # 1 x BLOCK_TOKENS, int64
    mask_tokens,
    n_columns,
    begin,
    end,
    REORDER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Adds the product with exceptions `begin` to `end`: all of the rows' exceptions, or a part."""
    BLOCK: tl.constexpr = 32
    first = tl.load(starts_ptr + rows)[:, None]
    last = tl.load(starts_ptr + rows + 1)[:, None]
    for start in range(begin, end, BLOCK):
        number = start + tl.arange(0, BLOCK)
        mask = number < end
        entries = tl.load(exceptions_ptr + number.to(tl.int64), mask=mask, other=0)
        values = ((entries >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        of_row = (number[None, :] >= first) & (number[None, :] < last) & mask[None, :]
        w_tile = tl.where(of_row, values[None, :], 0.0).to(tl.bfloat16)
        columns = (entries & 0xFFFF)[:, None]
        x_mask = mask[:, None] & mask_tokens
        x_tile = tl.load(x_ptr + tokens * n_columns + columns, mask=x_mask, other=0.0)
        if UPCAST:
            w_tile = widen(w_tile, True)
            x_tile = widen(x_tile, True)
        total = _wait_for(tl.dot(w_tile, x_tile, total), REORDER, UPCAST)
    return total


# All batch sizes use the same machine code.
@triton.jit(do_not_specialize=["n_tokens"])
def multiply_many_kernel(
    x_ptr,  # n_tokens x n_columns, BF16
    arranged_ptr,  # n_tokens x 2 * n_steps, BF16
    low_ptr,  # n_rows x 2 * n_steps
    high_ptr,  # n_rows x n_steps
    first_ptr,
    starts_ptr,
    exceptions_ptr,
    bias_ptr,  # n_rows, BF16; read if HAS_BIAS
    y_ptr,  # n_tokens x n_rows, BF16; FP32 and SPLITS of them if there are several
    n_tokens,
    n_rows,
    n_columns,
    n_steps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,  # no turn reaches beyond a half
    HAS_BIAS: tl.constexpr,
    REORDER: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    UPCAST: tl.constexpr,
):
    n_token_blocks = tl.cdiv(n_tokens, BLOCK_TOKENS)
    row_block = tl.program_id(0) // n_token_blocks
    token_block = tl.program_id(0) % n_token_blocks
    split = tl.program_id(1)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_rows = (rows < n_rows)[:, None]
    # Rows beyond the last are computed like the last one, and not stored.
    rows = tl.minimum(rows, n_rows - 1).to(tl.int64)
    tokens = (token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[None, :].to(tl.int64)
    mask_tokens = tokens < n_tokens

    within = tl.arange(0, BLOCK_STEPS)
    per_split = tl.cdiv(tl.cdiv(n_steps, BLOCK_STEPS), SPLITS) * BLOCK_STEPS
    begin = split * per_split
    end = tl.minimum(begin + per_split, n_steps)
    low = low_ptr + rows[:, None] * (2 * n_steps) + begin + within[None, :]
    high = high_ptr + rows[:, None] * n_steps + begin + within[None, :]
    both = tl.arange(0, 2 * BLOCK_STEPS)[:, None]
    x = arranged_ptr + tokens * (2 * n_steps) + 2 * begin + both
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for start in range(begin, end, BLOCK_STEPS):
        left = end - start  # a multiple of 16
        mask_w = None if EVEN else (within < left)[None, :]
        other_w = None if EVEN else 0
        mask_x = mask_tokens if EVEN else mask_tokens & (both < 2 * left)
        high_bits = tl.load(high, mask=mask_w, other=other_w)
        low_0 = tl.load(low, mask=mask_w, other=other_w)
        low_1 = tl.load(low + n_steps, mask=mask_w, other=other_w)
        x_tile = tl.load(x, mask=mask_x, other=0.0)
        w_0 = window_elements(low_0, high_bits, high_bits, 0, 12, ASSEMBLY)
        w_1 = window_elements(low_1, high_bits, high_bits, 1, 12, ASSEMBLY)
        w_tile = _join_halves(w_0, w_1, REORDER)
        if UPCAST:
            x_tile = widen(x_tile, True)
            w_tile = widen(w_tile, True)
        if not REORDER:
            x_tile = shift_tokens(x_tile)
        total = _wait_for(tl.dot(w_tile, x_tile, total), REORDER, UPCAST)
        low += BLOCK_STEPS
        high += BLOCK_STEPS
        x += 2 * BLOCK_STEPS

    total = scale_rows(total, tl.load(first_ptr + rows)[:, None], 12)
    if split == 0:  # exceptions are too few to divide among the splits
        last_row = tl.minimum((row_block + 1) * BLOCK_ROWS, n_rows)
        total = _multiply_exceptions(
            total, x_ptr, starts_ptr, exceptions_ptr, rows, tokens, mask_tokens, n_columns,
            tl.load(starts_ptr + row_block * BLOCK_ROWS), tl.load(starts_ptr + last_row), REORDER,
            UPCAST,
        )  # fmt: skip
        if HAS_BIAS:
            total += widen(tl.load(bias_ptr + rows)[:, None], UPCAST)
    # Offsets from the block's first element are small; pointers would take twice the registers.
    first_token = token_block.to(tl.int64) * BLOCK_TOKENS
    first_row = row_block * BLOCK_ROWS
    y = y_ptr + (split.to(tl.int64) * n_tokens + first_token) * n_rows + first_row
    offsets = (tokens - first_token).to(tl.int32) * n_rows + (rows - first_row).to(tl.int32)[
        :, None
    ]
    y_tile = total if SPLITS > 1 else round_to_bf16(total, UPCAST)
    tl.store(y + offsets, y_tile, mask=mask_rows & mask_tokens)


def default_many_config(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    n_processors: int = 132,
    shared_nbytes: int = MIN_SHARED_NBYTES,
) -> ManyConfig:
    """A sensible division for products that were not measured.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        n_processors: multiprocessors of the GPU.
        shared_nbytes: shared memory that a program may have on it; at least 60 KiB.
    """
    block_tokens = 64 if n_tokens <= 64 else 128
    n_blocks = -(-n_rows // 128) * -(-n_tokens // block_tokens)
    n_turns = -(-W12.n_steps(n_columns) // 64)
    n_splits = 1
    while n_blocks * n_splits * 2 <= n_processors and n_turns >= 8 * n_splits:
        n_splits *= 2
    for block_steps, n_stages in ((64, 3), (32, 3), (32, 2)):
        config = ManyConfig(128, block_tokens, block_steps, 8, n_splits, n_stages)
        if many_shared_nbytes(config) <= shared_nbytes:
            break
    return config


def many_shared_nbytes(config: ManyConfig) -> int:
    """The most shared memory of a program: the tiles of all turns that are being fetched, and of
    the one that is being multiplied (Hopper needs less)."""
    turn = config.block_steps * (3 * config.block_rows + 4 * config.block_tokens)
    return max(config.n_stages, 2) * turn


def multiply_many(
    x: torch.Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: torch.Tensor | None = None,
    config: ManyConfig | None = None,
) -> torch.Tensor:
    """y = x W^T + bias with a packed weight of W12, as `torch.nn.functional.linear` computes it.

    Args:
        x: BF16, n_tokens x n_columns; elements below 2^87 in size.
        weights: checked arrays of `n_rows` rows.
        format: their format, which must be W12.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.
        config: how the work is divided.

    Returns:
        BF16, n_tokens x n_rows, rounded once from sums in FP32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """

    if format is not W12:
        raise ValueError(f"products of many tokens need weights of W12, not {format.name}")
    y = check_product(x, weights, format, n_columns, bias)
    if not y.numel():
        return y
    if config is None:
        config = default_many_config(y.shape[1], n_columns, len(x), *limits_of(y.device))
    if config.block_tokens * y.shape[1] > _MAX_BLOCK_OFFSETS:
        config = replace(config, block_tokens=16)
    with device_of(x):
        sums = memory_for_sums(y, config.n_splits)
        _launch(x, weights, bias, sums, config)
        if sums is not y:
            add_splits(sums, y)
    return y


def _launch(
    x: torch.Tensor,
    weights: WeightTensors,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: ManyConfig,
) -> None:
    n_tokens, n_columns = x.shape
    n_rows = weights.n_rows
    n_steps = W12.n_steps(n_columns)
    dialect = choose_dialect(x.device)
    arranged = torch.empty((n_tokens, 2 * n_steps), dtype=torch.bfloat16, device=x.device)
    arrange_tokens_kernel[(n_tokens, ceil_div(2 * n_steps, _ARRANGED_BLOCK))](
        x,
        arranged,
        n_columns,
        n_steps,
        BLOCK=_ARRANGED_BLOCK,
        REORDER=dialect.hopper,
        UPCAST=dialect.upcast,
        num_warps=4,
    )
    n_blocks = ceil_div(n_rows, config.block_rows) * ceil_div(n_tokens, config.block_tokens)
    multiply_many_kernel[(n_blocks, config.n_splits)](
        x,
        arranged,
        *weights,
        weights.first_exponents if bias is None else bias,
        y,
        n_tokens,
        n_rows,
        n_columns,
        n_steps,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_STEPS=config.block_steps,
        SPLITS=config.n_splits,
        EVEN=n_steps % config.block_steps == 0,
        HAS_BIAS=bias is not None,
        REORDER=dialect.hopper,
        ASSEMBLY=dialect.assembly,
        UPCAST=dialect.upcast,
        num_warps=config.n_warps,
        num_stages=config.n_stages,
    )
