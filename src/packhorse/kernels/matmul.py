"""Products of some tokens with a packed weight, which is decoded in registers on its way to the
tensor cores (docs/format.md, section 12): y = x W^T + bias.

A program owns a block of tokens and some tiles of rows of the weight. The tokens stay in place from
tile to tile: fetching them again for every few rows would take longer than fetching the weight. The
warps of a program divide the columns among themselves, in turns of `block_steps`, and each warp has
accumulators of its own (a product of three dimensions, the first of which is the warp). So even a
small matrix keeps all multiprocessors busy, and no decoded element ever leaves its thread. If there
are still too few programs, `n_splits` of them share a block, and a second kernel adds their sums.

In blocks of 64 tokens, accumulators would take too many registers. There all warps share the
columns and divide the rows among themselves: a product of two dimensions, and no sums of warps. On
Hopper and on Blackwell's GPUs for data centers, such a product would run on while the warps do;
these GPUs refuse it (`vendor.has_waiting_products`).

Sums are in FP32, in an order that depends only on `block_steps`, `n_warps` and `n_splits`: with the
same three, a token's result is the same in a batch of any size.

The exponents of a row are relative to its first one; the sums are multiplied by a power of two at
the end. The smallest window values of W12 are the smallest normal numbers, so for W12 tokens are
multiplied by 2^40 first: their elements must be below 2^87 in size, or the result is not finite.
Exceptions are added in FP32. Where a token holds infinities or NaNs, some results are NaN where a
plain product has infinities.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton import language as tl

from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.early_launch import launch_options, prefetch_weights, wait_for_others
from packhorse.kernels.exception_sums import (
    across,
    add_exceptions,
    down,
    first_exceptions,
    no_tiles,
)
from packhorse.kernels.launch import (
    MIN_SHARED_NBYTES,
    ceil_div,
    choose_dialect,
    device_of,
    limits_of,
    require_tensor,
)
from packhorse.kernels.weights import (
    power_of_two,
    require_weights,
    round_to_bf16,
    widen,
    window_bias,
    window_elements,
)
from packhorse.layout import W12, WeightFormat

__all__ = [
    "MAX_BLOCK_TOKENS",
    "MAX_OWN_TOKENS",
    "SHARING_REGISTERS",
    "MatmulConfig",
    "add_splits",
    "add_splits_kernel",
    "check_product",
    "default_config",
    "memory_for_sums",
    "multiply_weights",
    "multiply_weights_kernel",
    "scale_rows",
    "shared_nbytes_of",
    "shift_tokens",
]

_TOKEN_SHIFT = tl.constexpr(40)  # W12: log2 of the factor that tokens are multiplied by
MAX_BLOCK_TOKENS = 64
MAX_OWN_TOKENS = 32  # with more in a block, its warps share the columns
_MAX_OWN_TOKENS = tl.constexpr(MAX_OWN_TOKENS)
# Registers of a thread at most, if warps share the columns: three programs of four warps then fit
# on a multiprocessor. They hide more of each other's waits than two, by simulation.
SHARING_REGISTERS = 168
_MAX_SHARED_ROWS = 1 << 24  # of a weight; offsets of a block's results then fit 32 bits
_MIN_BLOCK_TOKENS = 8  # the least number that a tensor core takes
_SECTOR_NBYTES = 32  # which memory and caches move at once
# Bytes in sectors that gathering tokens by column must save, as it needs a launch before: L2 moves
# as many in about four launches.
_LEAST_SAVED_NBYTES = 64 << 20


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is divided.

    Attributes:
        block_rows: rows of a tile of the weight; a power of two, at least 16.
        block_tokens: tokens for a program: 8, 16 or 32; or 64, and all warps share the columns.
        block_steps: columns of a slice that a warp takes at once; a power of two, at least 16.
        n_warps: warps of a program: 1, 2, 4 or 8.
        n_splits: programs that share a block of rows.
        n_stages: one more than the number of turns that weights are fetched ahead.
        n_tiles: tiles of rows for a program; in each turn it multiplies one after the other with
            the same tokens.
    """

    block_rows: int = 32
    block_tokens: int = 8
    block_steps: int = 32
    n_warps: int = 4
    n_splits: int = 1
    n_stages: int = 4
    n_tiles: int = 1

    @property
    def shares(self) -> bool:
        """Whether all warps share the columns."""
        return self.block_tokens > MAX_OWN_TOKENS

    @property
    def n_parts(self) -> int:
        """Parts that the columns of a turn are divided into."""
        return 1 if self.shares else self.n_warps


@triton.jit
def shift_tokens(tile):
    """W12: tokens, scaled to be multiplied with elements of the window."""
    return tile * tl.full((), 2.0**_TOKEN_SHIFT, tile.dtype)


@triton.jit
def scale_rows(total, first, BITS: tl.constexpr):
    """Scales sums over window elements to sums over the row's elements, by the row's first
    exponent."""
    shift = first.to(tl.int32) - window_bias(BITS)
    if BITS == 12:
        shift -= _TOKEN_SHIFT
    # 2^199 does not fit FP32. In two steps nothing overflows unless the result does.
    return total * power_of_two(tl.minimum(shift, 127)) * power_of_two(tl.maximum(shift - 127, 0))


@triton.jit
def _rows_of(first_row, n_rows, BLOCK_ROWS: tl.constexpr, SHARED: tl.constexpr):
    """Rows of a tile. Rows beyond the last are computed as copies of the last row, and not
    stored."""
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    return down(tl.minimum(rows, n_rows - 1).to(tl.int64), SHARED)


@triton.jit
def _load_bits(high, n_steps, mask, other, BITS: tl.constexpr):
    """The high bits of a turn; for W11 the signs, and the other bits of even and of odd slices."""
    bits = tl.load(high, mask=mask, other=other)
    if BITS == 12:
        return bits, bits, bits
    else:
        even = tl.load(high + n_steps, mask=mask, other=other)
        return bits, even, tl.load(high + 2 * n_steps, mask=mask, other=other)


@triton.jit
def _advance(pointers, step: tl.constexpr, TILES: tl.constexpr):
    moved = no_tiles()
    for tile in tl.static_range(TILES):
        moved += (pointers[tile] + step,)
    return moved


# All batch sizes use the same machine code.
@triton.jit(do_not_specialize=["n_tokens"])
def multiply_weights_kernel(
    x_ptr,  # n_tokens x n_columns, BF16
    low_ptr,  # n_rows x SLICES * n_steps
    high_ptr,  # n_rows x SLICES * n_steps * (BITS - 8) / 8
    first_ptr,
    starts_ptr,
    exceptions_ptr,
    bias_ptr,  # n_rows, BF16; read if HAS_BIAS
    y_ptr,  # n_tokens x n_rows, BF16; FP32 and SPLITS of them if there are several
    n_tokens,
    n_rows,
    n_columns,
    n_steps,
    BITS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,  # no turn reaches beyond a slice, no column is padding
    HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr = 0,  # turns to fetch before waiting for the kernel before; 0: started late
    BY_COLUMN: tl.constexpr = False,  # tokens are gathered from the next argument
    by_column_ptr=None,  # n_columns x n_tokens, BF16
):
    SHARED: tl.constexpr = BLOCK_TOKENS > _MAX_OWN_TOKENS
    PARTS: tl.constexpr = 1 if SHARED else WARPS
    # Programs of the same rows are neighbours, so that the second finds the weights in L2.
    n_token_blocks = tl.cdiv(n_tokens, BLOCK_TOKENS)
    first_row = tl.program_id(0) // n_token_blocks * (TILES * BLOCK_ROWS)
    token_block = tl.program_id(0) % n_token_blocks
    split = tl.program_id(1)
    tokens = token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    mask_tokens = across(tokens < n_tokens, SHARED)
    tokens = across(tokens.to(tl.int64), SHARED)
    part = 0 if SHARED else tl.arange(0, PARTS)[:, None, None]
    within = tl.arange(0, BLOCK_STEPS)

    TURN: tl.constexpr = PARTS * BLOCK_STEPS
    per_split = tl.cdiv(tl.cdiv(n_steps, TURN), SPLITS) * TURN
    begin = split * per_split
    end = tl.minimum(begin + per_split, n_steps)
    if EARLY > 0:
        prefetch_weights(
            low_ptr, high_ptr, first_row, n_rows, n_steps, begin, end, BITS, SLICES,
            TILES * BLOCK_ROWS, EARLY * TURN, 32 * WARPS,
        )  # fmt: skip
        wait_for_others()
    steps_w = begin + part * BLOCK_STEPS + across(within, SHARED)  # along the weight's rows
    steps_x = begin + part * BLOCK_STEPS + down(within, SHARED)  # along the tokens
    x = x_ptr + tokens * n_columns + steps_x
    end_row = tl.minimum(first_row + TILES * BLOCK_ROWS, n_rows)
    # Larger sums leave no registers for what is needed only at the end.
    AHEAD: tl.constexpr = TILES * BLOCK_TOKENS <= 32
    EXCEPTIONS_AHEAD: tl.constexpr = not SHARED or TILES * BLOCK_ROWS <= 64
    if EXCEPTIONS_AHEAD:
        found = first_exceptions(
            starts_ptr, exceptions_ptr, first_row, end_row, split * PARTS + part, SPLITS * PARTS,
            SHARED,
        )  # fmt: skip
    low, high, totals, firsts = no_tiles(), no_tiles(), no_tiles(), no_tiles()
    for tile in tl.static_range(TILES):
        rows = _rows_of(first_row + tile * BLOCK_ROWS, n_rows, BLOCK_ROWS, SHARED)
        if AHEAD:
            firsts += (tl.load(first_ptr + rows),)
        low += (low_ptr + rows * (SLICES * n_steps) + steps_w,)
        high += (high_ptr + rows * (SLICES * n_steps * (BITS - 8) // 8) + steps_w,)
        if SHARED:
            totals += (tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32),)
        else:
            totals += (tl.zeros((PARTS, BLOCK_ROWS, BLOCK_TOKENS), tl.float32),)
    for start in range(begin, end, TURN):
        left = end - start  # of the steps
        mask_w = None if EVEN else steps_w - begin < left
        other_w = None if EVEN else 0
        bits = no_tiles()
        for tile in tl.static_range(TILES):
            bits += (_load_bits(high[tile], n_steps, mask_w, other_w, BITS),)
        for i in tl.static_range(SLICES):
            mask_x = mask_tokens
            if not EVEN:
                columns = i * n_steps + (start - begin) + steps_x
                mask_x = mask_tokens & (steps_x - begin < left) & (columns < n_columns)
            x_tile = tl.load(x + i * n_steps, mask=mask_x, other=0.0)
            if UPCAST:
                x_tile = widen(x_tile, True)
            if BITS == 12:
                x_tile = shift_tokens(x_tile)
            sums = no_tiles()
            for tile in tl.static_range(TILES):
                low_bytes = tl.load(low[tile] + i * n_steps, mask=mask_w, other=other_w)
                rest = bits[tile][1 + i % 2]
                w_tile = window_elements(low_bytes, bits[tile][0], rest, i, BITS, ASSEMBLY)
                if UPCAST:
                    w_tile = widen(w_tile, True)
                sums += (tl.dot(w_tile, x_tile, totals[tile]),)
            totals = sums
        low = _advance(low, TURN, TILES)
        high = _advance(high, TURN, TILES)
        x += TURN

    rows, holes, sums = no_tiles(), no_tiles(), no_tiles()
    for tile in tl.static_range(TILES):
        tile_rows = _rows_of(first_row + tile * BLOCK_ROWS, n_rows, BLOCK_ROWS, SHARED)
        first = firsts[tile] if AHEAD else tl.load(first_ptr + tile_rows)
        rows += (tile_rows,)
        sums += (scale_rows(totals[tile], first, BITS),)
        holes += (power_of_two(first.to(tl.int32) - 127) if BITS == 11 else 0,)
    if not EXCEPTIONS_AHEAD:
        found = first_exceptions(
            starts_ptr, exceptions_ptr, first_row, end_row, split * PARTS + part, SPLITS * PARTS,
            SHARED,
        )  # fmt: skip
    totals = add_exceptions(
        sums, found, x_ptr, by_column_ptr, starts_ptr, exceptions_ptr, rows, tokens, mask_tokens,
        holes, split * PARTS + part, n_tokens, n_columns, TILES, SPLITS * PARTS, BITS == 11,
        BY_COLUMN, SHARED, EXCEPTIONS_AHEAD, UPCAST,
    )  # fmt: skip
    y_row = split.to(tl.int64) * n_tokens + tokens
    for tile in tl.static_range(TILES):
        y = totals[tile] if SHARED else tl.sum(totals[tile], 0, keep_dims=True)
        if HAS_BIAS and split == 0:
            y += widen(tl.load(bias_ptr + rows[tile]), UPCAST)
        y_tile = y if SPLITS > 1 else round_to_bf16(y, UPCAST)
        numbers = first_row + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = down(numbers < n_rows, SHARED)
        if SHARED:  # offsets from the block's first element are small, and take half the registers
            first_token = token_block * BLOCK_TOKENS
            y_block = y_ptr + (split.to(tl.int64) * n_tokens + first_token) * n_rows + first_row
            offsets = across(tl.arange(0, BLOCK_TOKENS), SHARED) * n_rows
            offsets += down(tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), SHARED)
            tl.store(y_block + offsets, y_tile, mask=mask_rows & mask_tokens)
        else:
            tl.store(y_ptr + y_row * n_rows + rows[tile], y_tile, mask=mask_rows & mask_tokens)


# All batch sizes use the same machine code.
@triton.jit(do_not_specialize=["n"])
def add_splits_kernel(
    partial_ptr,  # SPLITS x n, FP32
    y_ptr,  # n, BF16
    n: tl.int64,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    if EARLY:
        wait_for_others()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        partial_ptr += n  # a multiple of n may not fit int32
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(y_ptr + offsets, round_to_bf16(total, UPCAST), mask=mask)


def default_config(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    n_processors: int = 132,
    shared_nbytes: int = MIN_SHARED_NBYTES,
) -> MatmulConfig:
    """A sensible division for products that were not measured.

    Every multiprocessor gets some warps: first blocks of rows are made smaller, then splits are
    added. There are as many stages as fit in memory; if two do not fit, the block of tokens is made
    smaller. The order of sums depends only on the matrix and the GPU, not on the tokens.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        n_processors: multiprocessors of the GPU.
        shared_nbytes: shared memory that a program may have on it.
    """
    block_tokens = _MIN_BLOCK_TOKENS
    while block_tokens < min(n_tokens, MAX_OWN_TOKENS):
        block_tokens *= 2
    block_steps, n_warps = 32, 4
    n_turns = -(-format.n_steps(n_columns) // (block_steps * n_warps))
    n_blocks = -(-n_rows // 32)
    n_splits = 1
    while n_blocks * n_splits * 2 <= n_processors * 2 and n_turns >= 4 * n_splits:
        n_splits *= 2
    # Every program reads all tokens again. So with many tokens, a program gets more rows, as long
    # as there are programs for all multiprocessors. Fewer stages save registers and shared memory.
    block_rows, n_tiles, n_stages = {8: (32, 1, 4), 16: (64, 2, 3), 32: (32, 3, 3)}[block_tokens]
    if format is not W12:
        block_rows, n_tiles, n_stages = 32, 1, 3
    while n_tiles > 1 and -(-n_rows // (n_tiles * block_rows)) * n_splits < n_processors:
        n_tiles -= 1
    while True:
        config = MatmulConfig(
            block_rows, block_tokens, block_steps, n_warps, n_splits, n_stages, n_tiles
        )
        if shared_nbytes_of(config, format) <= shared_nbytes:
            return config
        if n_stages > 2:
            n_stages -= 1
        else:
            block_tokens //= 2


def shared_nbytes_of(config: MatmulConfig, format: WeightFormat) -> int:
    """Shared memory of a program: the tiles of all turns that are being fetched."""
    weights = config.n_tiles * config.block_rows * format.n_slices * format.bits // 8
    tokens = 2 * format.n_slices * config.block_tokens
    # Not `n_parts`, as this is on the way of every untuned product; the same in `_launch`.
    turn = config.block_steps * (1 if config.block_tokens > MAX_OWN_TOKENS else config.n_warps)
    return max(config.n_stages - 1, 1) * turn * (weights + tokens)


def multiply_weights(
    x: torch.Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    *,
    bias: torch.Tensor | None = None,
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """y = x W^T + bias with a packed weight, as `torch.nn.functional.linear` computes it.

    Args:
        x: BF16, n_tokens x n_columns.
        weights: checked arrays of `n_rows` rows.
        format: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.
        config: how the work is divided.

    Returns:
        BF16, n_tokens x n_rows, rounded once from sums in FP32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous; or the
            config has 64 tokens, on a GPU whose warps do not wait for such products.
    """

    y = check_product(x, weights, format, n_columns, bias)
    if not y.numel():
        return y
    if config is None:
        limits = limits_of(y.device)
        config = default_config(y.shape[1], n_columns, len(x), format, *limits)
    if config.block_tokens > MAX_OWN_TOKENS and y.shape[1] > _MAX_SHARED_ROWS:
        config = replace(config, block_tokens=MAX_OWN_TOKENS)
    with device_of(x):
        sums = memory_for_sums(y, config.n_splits)
        _launch(x, weights, format, bias, sums, config)
        if sums is not y:
            add_splits(sums, y)
    return y


def check_product(
    x: torch.Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Checks the operands of a product, and makes memory for its result.

    Args:
        x: BF16, n_tokens x n_columns.
        weights: checked arrays of `n_rows` rows.
        format: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.

    Returns:
        BF16, n_tokens x n_rows.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    require_weights(weights, format, n_columns)
    n_rows, device = weights.n_rows, weights.device
    require_tensor(x, "x", torch.bfloat16, (len(x), n_columns), device)
    if bias is not None:
        require_tensor(bias, "bias", torch.bfloat16, (n_rows,), device)
    return torch.empty((len(x), n_rows), dtype=torch.bfloat16, device=device)


def memory_for_sums(y: torch.Tensor, n_splits: int) -> torch.Tensor:
    """The tensor that a kernel writes: `y` itself, or FP32, n_splits x y, for `add_splits`."""
    if n_splits == 1:
        return y
    return torch.empty((n_splits, *y.shape), dtype=torch.float32, device=y.device)


def add_splits(partial: torch.Tensor, y: torch.Tensor) -> None:
    """Adds the sums of several programs in their order, and rounds the result.

    Args:
        partial: FP32, n_splits x n_tokens x n_rows.
        y: BF16, n_tokens x n_rows; receives the result.
    """
    block = 256
    dialect = choose_dialect(y.device)
    add_splits_kernel[(ceil_div(y.numel(), block),)](
        partial,
        y,
        y.numel(),
        SPLITS=len(partial),
        BLOCK=block,
        UPCAST=dialect.upcast,
        EARLY=dialect.early,
        num_warps=4,
        **launch_options(dialect.early),
    )


def _launch(
    x: torch.Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: MatmulConfig,
) -> None:
    n_tokens, n_columns = x.shape
    n_rows = weights.n_rows
    n_steps = format.n_steps(n_columns)
    shares = config.block_tokens > MAX_OWN_TOKENS
    turn = config.block_steps * (1 if shares else config.n_warps)
    dialect = choose_dialect(x.device)
    if shares and not dialect.shares:
        raise ValueError(
            f"{config} is not for this GPU: with more than {MAX_OWN_TOKENS} tokens, products run "
            "on while their warps decode, and Triton does not wait for them in time"
        )
    is_even = n_steps % turn == 0 and n_columns == format.n_slices * n_steps
    early = dialect.early and is_even
    # Gathering an element fetches its sector, a column's elements of all tokens two at most.
    of_tokens = _SECTOR_NBYTES * (config.block_tokens - 2)
    by_column = weights.exceptions.numel() * of_tokens > _LEAST_SAVED_NBYTES
    n_row_blocks = ceil_div(n_rows, config.n_tiles * config.block_rows)
    n_blocks = n_row_blocks * ceil_div(n_tokens, config.block_tokens)
    multiply_weights_kernel[(n_blocks, config.n_splits)](
        x,
        *weights,
        weights.first_exponents if bias is None else bias,
        y,
        n_tokens,
        n_rows,
        n_columns,
        n_steps,
        BITS=format.bits,
        SLICES=format.n_slices,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_STEPS=config.block_steps,
        WARPS=config.n_warps,
        TILES=config.n_tiles,
        SPLITS=config.n_splits,
        EVEN=is_even,
        HAS_BIAS=bias is not None,
        ASSEMBLY=dialect.assembly,
        UPCAST=dialect.upcast,
        EARLY=max(config.n_stages - 1, 1) if early else 0,
        BY_COLUMN=by_column,
        by_column_ptr=x.t().contiguous() if by_column else None,
        num_warps=config.n_warps,
        num_stages=config.n_stages,
        **({"maxnreg": SHARING_REGISTERS} if shares else {}),
        **launch_options(early),
    )
