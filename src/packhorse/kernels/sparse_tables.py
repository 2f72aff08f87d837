"""Kernels that gather rows of packed tables that are bitmaps or lists (docs/format.md, section 14).

Most of such a row is background, which takes longer to write than the packed row takes to travel.
What a program needs from the host is on its way while it writes.
"""

import triton
from triton import language as tl

from packhorse.kernels.table_elements import (
    count_bits,
    element_of,
    fetch_first,
    fetch_next,
    load_ids,
    load_number,
    put_exceptions,
    stage_rows,
    value_of,
)

__all__ = ["gather_bitmap_kernel", "gather_list_kernel"]


@triton.jit
def _stored_elements(
    at,
    row_values,
    values_ptr,
    mask,
    NBYTES: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ROW_VALUE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
):
    """Elements that sparse rows store at some addresses."""
    if HAS_ROW_VALUE:
        return row_values + tl.zeros(mask.shape, WORD)
    if NBYTES == 0:
        return value_of(values_ptr + tl.zeros(mask.shape, tl.int32), mask, BITS, WORD)
    packed = load_number(at, mask, NBYTES, UNIT, WORD)
    return element_of(packed, values_ptr, mask, CODE_BITS, REST_BITS, SHIFT, False, BITS)


@triton.jit
def _list_piece(
    stored,
    row_values,
    values_ptr,
    alive,
    start,
    capacity,
    NBYTES: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ROW_VALUE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Some entries of list rows: columns, beyond all others where there is none, and elements."""
    number = start + tl.arange(0, BLOCK_ENTRIES)[None, :]
    mask = alive[:, None] & (number < capacity)
    at = stored[:, None] + number * (NBYTES + 2)
    columns = load_number(at, mask, 2, UNIT, tl.uint32).to(tl.int32)
    # Of entries behind the end, too: so no load waits for another one.
    elements = _stored_elements(
        at + 2, row_values[:, None], values_ptr, mask,
        NBYTES, UNIT, HAS_ROW_VALUE, CODE_BITS, REST_BITS, SHIFT, BITS, WORD,
    )  # fmt: skip
    return tl.where(mask, columns, 0xFFFF), elements


@triton.jit(
    do_not_specialize=["n_ids", "first_row", "background"],  # a background of 1 would be no tensor
    do_not_specialize_on_alignment=["ids_ptr"],
)
def gather_list_kernel(
    rows_ptr,
    marks_ptr,
    ranks_ptr,
    starts_ptr,
    columns_ptr,
    elements_ptr,
    values_ptr,
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    first_row,
    n_columns,
    stride,
    capacity,
    background,
    NBYTES: tl.constexpr,  # of a packed element
    UNIT: tl.constexpr,  # bytes that divide all addresses of columns and packed elements
    HAS_ROW_VALUE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    HAS_EXCEPTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    WORD: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(n_ids, BLOCK_ROWS), tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        ids = tl.load(ids_ptr + out_rows, mask=mask_rows, other=0)
        row = rows_ptr + (ids - first_row) * stride
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        row_values = tl.zeros((BLOCK_ROWS,), WORD)
        if HAS_ROW_VALUE:
            row_values = load_number(row, mask_rows, BITS // 8, BITS // 8, WORD)
        stored = row + (BITS // 8 if HAS_ROW_VALUE else 0)
        # On the way while the background is written.
        columns, elements = _list_piece(
            stored, row_values, values_ptr, mask_rows, 0, capacity,
            NBYTES, UNIT, HAS_ROW_VALUE, CODE_BITS, REST_BITS, SHIFT, BITS, WORD, BLOCK_ENTRIES,
        )  # fmt: skip
        for start in range(0, n_columns, BLOCK_COLUMNS):
            filled = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
            mask = mask_rows[:, None] & (filled < n_columns)
            fill = tl.zeros(mask.shape, TYPE) + background.to(TYPE)
            tl.store(out[:, None] + filled, fill, mask=mask)
        tl.debug_barrier()
        alive = mask_rows
        start = 0
        # Only what comes before the end of a row's list is fetched, but for a few entries.
        while tl.max(alive.to(tl.int32), 0) != 0:
            is_stored = columns < n_columns
            tl.store(out[:, None] + columns, elements.to(TYPE), mask=is_stored)
            alive = alive & (tl.min(is_stored.to(tl.int32), 1) != 0)
            start += BLOCK_ENTRIES
            columns, elements = _list_piece(
                stored, row_values, values_ptr, alive, start, capacity,
                NBYTES, UNIT, HAS_ROW_VALUE, CODE_BITS, REST_BITS, SHIFT, BITS, WORD, BLOCK_ENTRIES,
            )  # fmt: skip
    if HAS_EXCEPTIONS:
        put_exceptions(
            marks_ptr, ranks_ptr, starts_ptr, columns_ptr, elements_ptr,
            ids_ptr, out_ptr, n_ids, n_columns, BLOCK_ROWS, BLOCK_EXCEPTIONS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["n_ids", "first_row", "background"],  # a background of 1 would be no tensor
    do_not_specialize_on_alignment=["ids_ptr"],
)
def gather_bitmap_kernel(
    rows_ptr,
    marks_ptr,
    ranks_ptr,
    starts_ptr,
    columns_ptr,
    elements_ptr,
    values_ptr,
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    first_row,
    n_columns,
    stride,
    capacity,
    first_nbytes,  # of a row, before its first packed element
    background,
    scratch_ptr,  # n_programs x BLOCK_ROWS x STAGED
    NBYTES: tl.constexpr,  # of a packed element
    STAGED: tl.constexpr,  # words of 4 bytes for a row, if rows travel as a whole; or 0
    UNIT: tl.constexpr,  # bytes that divide all addresses of words of a bitmap
    HAS_ROW_VALUE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    HAS_EXCEPTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    WORD: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    bits = tl.arange(0, 32)[None, None, :]
    if STAGED > 0:
        held, ids = fetch_first(rows_ptr, ids_ptr, n_ids, first_row, stride, BLOCK_ROWS, STAGED)
    for block in range(tl.program_id(0), tl.cdiv(n_ids, BLOCK_ROWS), tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        if STAGED > 0:
            row = stage_rows(scratch_ptr, held, stride, BLOCK_ROWS, STAGED)
            held, ids = fetch_next(
                rows_ptr, ids_ptr, ids, out_rows, n_ids, first_row, stride, BLOCK_ROWS, STAGED
            )
        else:
            ids = load_ids(ids_ptr, out_rows, n_ids)
            row = rows_ptr + (ids - first_row) * stride
        row_values = tl.zeros((BLOCK_ROWS,), WORD)
        if HAS_ROW_VALUE:
            row_values = load_number(row, mask_rows, BITS // 8, BITS // 8, WORD)
        n_before = tl.zeros((BLOCK_ROWS,), tl.int32)
        for start in range(0, tl.cdiv(n_columns, 32), BLOCK_COLUMNS // 32):
            index = start + tl.arange(0, BLOCK_COLUMNS // 32)[None, :]
            in_row = mask_rows[:, None] & (index * 32 < n_columns)
            at = row[:, None] + (BITS // 8 if HAS_ROW_VALUE else 0) + index * 4
            words = load_number(at, in_row, 4, UNIT, tl.uint32)
            counts = count_bits(words).to(tl.int32)
            before = n_before[:, None] + tl.cumsum(counts, 1) - counts
            n_before += tl.sum(counts, 1)
            below = words[:, :, None] & ((tl.full(bits.shape, 1, tl.uint32) << bits) - 1)
            number = before[:, :, None] + count_bits(below).to(tl.int32)
            columns = index[:, :, None] * 32 + bits
            mask = mask_rows[:, None, None] & (columns < n_columns)
            is_stored = mask & (((words[:, :, None] >> bits) & 1) != 0) & (number < capacity)
            element = _stored_elements(
                row[:, None, None] + first_nbytes + number * NBYTES, row_values[:, None, None],
                values_ptr, is_stored,
                NBYTES, NBYTES if NBYTES else 1, HAS_ROW_VALUE,
                CODE_BITS, REST_BITS, SHIFT, BITS, WORD,
            )  # fmt: skip
            other = tl.zeros(mask.shape, TYPE) + background.to(TYPE)
            chosen = tl.where(is_stored, element.to(TYPE), other)
            tl.store(out[:, None, None] + columns, chosen, mask=mask)
    if HAS_EXCEPTIONS:
        put_exceptions(
            marks_ptr, ranks_ptr, starts_ptr, columns_ptr, elements_ptr,
            ids_ptr, out_ptr, n_ids, n_columns, BLOCK_ROWS, BLOCK_EXCEPTIONS,
        )  # fmt: skip
