"""Gathers dense rows whose codes are in triples (docs/format.md, section 14) on a GPU.

A triple has the codes of three columns that lie a third of the row apart, so a tile has three such
parts, and a fourth one that is empty, because the sizes of tiles are powers of two. A triple is
loaded once. The bytes of narrow planes, which the rows of few dtypes have, are asked for again for
each column that has bits in them: the cache of the multiprocessor has them then.
"""

import triton
from triton import language as tl

from packhorse.kernels.table_elements import (
    element_of,
    fetch_first,
    fetch_next,
    load_ids,
    put_exceptions,
    stage_rows,
)

__all__ = ["gather_triples_kernel"]


@triton.jit
def _narrow_bits(at, columns, mask, n_columns, BITS: tl.constexpr):
    """Bits that columns have in a narrow plane."""
    nbytes = BITS * ((n_columns + 7) // 8)
    part = (columns >= nbytes).to(tl.int32)  # a division takes longer
    for i in tl.static_range(2, 8 // BITS):
        part += (columns >= i * nbytes).to(tl.int32)
    bits = tl.load(at + columns - part * nbytes, mask=mask, other=0).to(tl.int32)
    return (bits >> (BITS * part)) & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["n_ids", "first_row"], do_not_specialize_on_alignment=["ids_ptr"])
def gather_triples_kernel(
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
    first_row,  # the row that rows_ptr begins with
    n_columns,
    stride,
    n_steps,  # ceil(n_columns / 8)
    n_triples,  # ceil(n_columns / 3)
    scratch_ptr,  # n_programs x BLOCK_ROWS x STAGED
    STAGED: tl.constexpr,  # words of 4 bytes for a row, if rows travel as a whole; or 0
    N_WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_SIGN: tl.constexpr,
    BITS: tl.constexpr,
    HAS_EXCEPTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TRIPLES: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    WORD: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32
    thirds = tl.arange(0, 4)[None, :, None]
    if STAGED > 0:
        held, ids = fetch_first(rows_ptr, ids_ptr, n_ids, first_row, stride, BLOCK_ROWS, STAGED)
    for block in range(tl.program_id(0), tl.cdiv(n_ids, BLOCK_ROWS), tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        if STAGED > 0:
            row = stage_rows(scratch_ptr, held, stride, BLOCK_ROWS, STAGED)[:, None, None]
            held, ids = fetch_next(
                rows_ptr, ids_ptr, ids, out_rows, n_ids, first_row, stride, BLOCK_ROWS, STAGED
            )
        else:
            ids = load_ids(ids_ptr, out_rows, n_ids)
            row = (rows_ptr + (ids - first_row) * stride)[:, None, None]
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        narrow = row + N_WHOLE * n_columns
        triples = narrow + NARROW * n_steps
        for first in range(0, n_triples, BLOCK_TRIPLES):
            number = first + tl.arange(0, BLOCK_TRIPLES)[None, None, :]
            is_triple = mask_rows[:, None, None] & (number < n_triples)
            low = tl.load(triples + number, mask=is_triple, other=0).to(tl.int32)
            top = _narrow_bits(triples + n_triples, number, is_triple, n_triples, 2)
            triple = low | (top << 8)
            hundreds = (triple * 656) >> 16  # triple / 100, for all numbers of 10 bits
            two = triple - 100 * hundreds
            tens = (two * 6554) >> 16
            code = tl.where(thirds == 0, two - 10 * tens, tl.where(thirds == 1, tens, hundreds))
            columns = number + thirds * n_triples
            mask = is_triple & (thirds < 3) & (columns < n_columns)
            packed = code.to(WORD) << REST_BITS
            for k in tl.static_range(N_WHOLE):
                plane = tl.load(row + k * n_columns + columns, mask=mask, other=0)
                packed |= plane.to(WORD) << (8 * k)
            if NARROW & 4:
                field = _narrow_bits(narrow, columns, mask, n_columns, 4)
                packed |= field.to(WORD) << (8 * N_WHOLE)
            if NARROW & 2:
                at = narrow + (NARROW & 4) * n_steps
                field = _narrow_bits(at, columns, mask, n_columns, 2)
                packed |= field.to(WORD) << (8 * N_WHOLE + (NARROW & 4))
            if NARROW & 1:
                at = narrow + (NARROW & 6) * n_steps
                field = _narrow_bits(at, columns, mask, n_columns, 1)
                packed |= field.to(WORD) << (8 * N_WHOLE + (NARROW & 6))
            element = element_of(
                packed, values_ptr, mask, CODE_BITS, REST_BITS, SHIFT, HAS_SIGN, BITS
            )
            element = element.to(out_ptr.dtype.element_ty)
            tl.store(out[:, None, None] + columns, element, mask=mask)
    if HAS_EXCEPTIONS:
        put_exceptions(
            marks_ptr, ranks_ptr, starts_ptr, columns_ptr, elements_ptr,
            ids_ptr, out_ptr, n_ids, n_columns, BLOCK_ROWS, BLOCK_EXCEPTIONS,
        )  # fmt: skip
