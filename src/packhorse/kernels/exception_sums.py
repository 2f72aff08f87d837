"""Adds the products of a weight's exceptions to the sums of a product of a few tokens.

What the sums begin with is loaded before the loop over the weight (`first_exceptions`): where the
exceptions of a program's rows lie, then the first of them. These are two trips to memory, one after
the other, that would otherwise come at the end, where nothing else is under way. Where each single
row's exceptions lie is loaded at the end, together with the first tokens: it would take too many
registers during the loop.
"""

import triton
from triton import language as tl

from packhorse.kernels.weights import widen

__all__ = ["across", "add_exceptions", "down", "first_exceptions", "no_tiles"]

# Exceptions that a part takes at once, the depth of a product: if all warps of a program are one
# part, and if each is a part of its own.
_SHARED_BLOCK = tl.constexpr(32)
_OWN_BLOCK = tl.constexpr(16)


@triton.jit
def no_tiles():
    """An empty tuple of tiles, to which tiles are added."""
    return ()


@triton.jit
def down(values, SHARED: tl.constexpr):
    """A vector as a column of a tile. Tiles have the number of the part as their first dimension,
    unless all warps share the columns."""
    return values[:, None] if SHARED else values[None, :, None]


@triton.jit
def across(values, SHARED: tl.constexpr):
    """A vector as a row of a tile; see `down`."""
    return values[None, :] if SHARED else values[None, None, :]


@triton.jit
def _first_numbers(begin, part, N_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The first exception that each part takes: parts take blocks in turns, counted from the first
    exception of the whole weight, so that a block's part does not depend on the program."""
    block = begin // BLOCK
    return (block + (part - block % N_PARTS + N_PARTS) % N_PARTS) * BLOCK


@triton.jit
def _load_entries(exceptions_ptr, number, begin, end, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """A block of exceptions for each part, along the weight's rows and along the tokens."""
    number_w = number + across(tl.arange(0, BLOCK), SHARED)
    number_x = number + down(tl.arange(0, BLOCK), SHARED)
    mask_x = (number_x >= begin) & (number_x < end)
    entries_w = tl.load(exceptions_ptr + number_w.to(tl.int64), mask=number_w < end, other=0)
    entries_x = tl.load(exceptions_ptr + number_x.to(tl.int64), mask=mask_x, other=0)
    return entries_w, entries_x


@triton.jit
def first_exceptions(
    starts_ptr,
    exceptions_ptr,
    first_row,
    end_row,
    part,  # PARTS x 1 x 1, or a number: the part, of N_PARTS in all programs
    N_PARTS: tl.constexpr,
    SHARED: tl.constexpr,  # all warps share the columns
):
    """What `add_exceptions` begins with: the first and the end of the exceptions of some rows, and
    those that the parts take first."""
    begin = tl.load(starts_ptr + first_row)
    end = tl.load(starts_ptr + end_row)
    BLOCK: tl.constexpr = _SHARED_BLOCK if SHARED else _OWN_BLOCK
    number = _first_numbers(begin, part, N_PARTS, BLOCK)
    entries_w, entries_x = _load_entries(exceptions_ptr, number, begin, end, BLOCK, SHARED)
    return begin, end, entries_w, entries_x


@triton.jit
def add_exceptions(
    totals,  # tiles of PARTS x BLOCK_ROWS x BLOCK_TOKENS, FP32; without PARTS if SHARED, as below
    found,  # by first_exceptions, for the rows of all tiles
    x_ptr,
    by_column_ptr,  # n_columns x n_tokens, BF16: the tokens again; read if BY_COLUMN
    starts_ptr,
    exceptions_ptr,
    rows,  # of each tile: 1 x BLOCK_ROWS x 1, int64
    tokens,  # 1 x 1 x BLOCK_TOKENS, int64
    mask_tokens,
    holes,  # of each tile: 1 x BLOCK_ROWS x 1, FP32: the value of a hole, the packed element of an
    # exception; without effect unless HOLES
    part,  # as for first_exceptions
    n_tokens,
    n_columns,
    TILES: tl.constexpr,
    N_PARTS: tl.constexpr,
    HOLES: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SHARED: tl.constexpr,
    AHEAD: tl.constexpr,  # exceptions are fetched ahead, which takes registers
    UPCAST: tl.constexpr,
):
    """Adds the products of exceptions: a small matrix with a column for each exception, times the
    elements of the tokens in these columns. The order of sums depends neither on the block of rows
    nor on the tiles: see `_first_numbers`."""
    begin, end, entries_w, entries_x = found
    starts, ends = no_tiles(), no_tiles()
    for tile in tl.static_range(TILES):
        starts += (tl.load(starts_ptr + rows[tile]),)
        ends += (tl.load(starts_ptr + rows[tile] + 1),)
    BLOCK: tl.constexpr = _SHARED_BLOCK if SHARED else _OWN_BLOCK
    number = _first_numbers(begin, part, N_PARTS, BLOCK)
    for _ in range(tl.cdiv(tl.cdiv(end, BLOCK) - begin // BLOCK, N_PARTS)):
        following = number + N_PARTS * BLOCK
        if AHEAD:  # they arrive while the tokens of these exceptions are fetched
            next_w, next_x = _load_entries(exceptions_ptr, following, begin, end, BLOCK, SHARED)
        number_w = number + across(tl.arange(0, BLOCK), SHARED)
        number_x = number + down(tl.arange(0, BLOCK), SHARED)
        mask_x = (number_x >= begin) & (number_x < end) & mask_tokens
        columns = entries_x & 0xFFFF
        if BY_COLUMN:  # an exception's elements of all tokens lie side by side
            places = by_column_ptr + columns.to(tl.int64) * n_tokens + tokens
        else:
            places = x_ptr + tokens * n_columns + columns
        x_tile = tl.load(places, mask=mask_x, other=0.0)
        if UPCAST:
            x_tile = widen(x_tile, True)
        values = ((entries_w >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        sums = no_tiles()
        for tile in tl.static_range(TILES):
            of_row = (number_w >= starts[tile]) & (number_w < ends[tile])
            w_tile = tl.where(of_row, values, 0.0).to(tl.bfloat16)
            if UPCAST:
                w_tile = widen(w_tile, True)
            total = tl.dot(w_tile, x_tile, totals[tile])
            if HOLES:
                hole_tile = tl.where(of_row, -holes[tile], 0.0).to(x_tile.dtype)
                total = tl.dot(hole_tile, x_tile, total)
            sums += (total,)
        totals = sums
        if not AHEAD:
            next_w, next_x = _load_entries(exceptions_ptr, following, begin, end, BLOCK, SHARED)
        number, entries_w, entries_x = following, next_w, next_x
    return totals
