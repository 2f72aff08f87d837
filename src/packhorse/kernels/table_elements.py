"""What the kernels that gather rows of packed tables share: elements of codes and rests, numbers at
odd places, and exceptions."""

import triton
from triton import language as tl

__all__ = [
    "count_bits",
    "element_of",
    "fetch_first",
    "fetch_next",
    "load_ids",
    "load_number",
    "put_exceptions",
    "stage_rows",
    "value_of",
]


@triton.jit
def count_bits(x):
    """The bits of uint32 numbers that are set. Compilers know this way as one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def put_exceptions(
    marks_ptr,
    ranks_ptr,
    starts_ptr,
    columns_ptr,
    elements_ptr,
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    n_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    """Overwrites elements with exceptions, in all rows that the program has written: block after
    block of BLOCK_ROWS, as many as there are programs apart. Each look-up waits for the one before,
    so this is done at the end, for hundreds of rows at once."""
    ROWS: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS > 512 else 512
    tl.debug_barrier()  # other threads of the program have written the elements
    numbers = tl.arange(0, ROWS)
    n_programs = tl.num_programs(0)
    n_blocks = tl.cdiv(n_ids, BLOCK_ROWS)
    for block in range(tl.program_id(0), n_blocks, n_programs * (ROWS // BLOCK_ROWS)):
        blocks = block + numbers // BLOCK_ROWS * n_programs
        out_rows = blocks * BLOCK_ROWS + numbers % BLOCK_ROWS
        mask_rows = out_rows < n_ids
        ids = tl.load(ids_ptr + out_rows, mask=mask_rows, other=0)
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        place = (ids % 32).to(tl.uint32)
        words = tl.load(marks_ptr + ids // 32, mask=mask_rows, other=0).to(tl.uint32, bitcast=True)
        marked = mask_rows & (((words >> place) & 1) != 0)
        below = words & ((tl.full(place.shape, 1, tl.uint32) << place) - 1)
        ranks = tl.load(ranks_ptr + ids // 32, mask=marked, other=0).to(tl.uint32, bitcast=True)
        rank = ranks.to(tl.int64) + count_bits(below).to(tl.int64)
        starts = tl.load(starts_ptr + rank, mask=marked, other=0).to(tl.uint32, bitcast=True)
        stops = tl.load(starts_ptr + rank + 1, mask=marked, other=0).to(tl.uint32, bitcast=True)
        starts, stops = starts.to(tl.int64), stops.to(tl.int64)
        counts = tl.where(marked, stops - starts, 0).to(tl.int32)
        for start in range(0, tl.max(counts, 0), BLOCK_EXCEPTIONS):
            number = start + tl.arange(0, BLOCK_EXCEPTIONS)[None, :]
            mask = number < counts[:, None]
            index = starts[:, None] + number
            columns = tl.load(columns_ptr + index, mask=mask, other=0).to(tl.int32) & 0xFFFF
            elements = tl.load(elements_ptr + index, mask=mask, other=0)
            tl.store(out[:, None] + columns, elements, mask=mask)


@triton.jit
def value_of(at, mask, BITS: tl.constexpr, WORD: tl.constexpr):
    """Values of codes, without a sign to extend."""
    value = tl.load(at, mask=mask, other=0)
    if BITS == 16:
        value = value.to(tl.uint16, bitcast=True)
    if BITS == 32:
        value = value.to(tl.uint32, bitcast=True)
    if BITS == 64:
        value = value.to(tl.uint64, bitcast=True)
    return value.to(WORD)


@triton.jit
def element_of(
    packed,
    values_ptr,
    mask,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_SIGN: tl.constexpr,
    BITS: tl.constexpr,
):
    """Elements of packed elements, as unsigned words."""
    WORD: tl.constexpr = packed.dtype
    MOVED: tl.constexpr = REST_BITS - HAS_SIGN
    code = tl.zeros(packed.shape, tl.int32)
    if CODE_BITS > 0:
        code = (packed >> REST_BITS).to(tl.int32) & ((1 << CODE_BITS) - 1)
    element = value_of(values_ptr + code, mask, BITS, WORD)
    if MOVED > 0:
        if MOVED == BITS:
            element |= packed
        else:
            kept = tl.full((), (1 << MOVED) - 1, WORD)
            element |= (packed & kept) << SHIFT
    if HAS_SIGN:
        element |= ((packed >> MOVED) & 1) << (BITS - 1)
    return element


@triton.jit
def load_number(at, mask, NBYTES: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr):
    """Little-endian numbers at addresses that are multiples of UNIT bytes."""
    TYPE: tl.constexpr = (
        tl.uint8 if UNIT == 1 else tl.uint16 if UNIT == 2 else tl.uint32 if UNIT == 4 else tl.uint64
    )
    units = at.to(tl.pointer_type(TYPE))
    number = tl.load(units, mask=mask, other=0).to(WORD)
    for k in tl.static_range(1, NBYTES // UNIT):
        number |= tl.load(units + k, mask=mask, other=0).to(WORD) << (8 * UNIT * k)
    return number


@triton.jit
def load_ids(ids_ptr, out_rows, n_ids):
    """Numbers of rows; 0 behind the last one."""
    return tl.load(ids_ptr + out_rows, mask=out_rows < n_ids, other=0)


@triton.jit
def _load_rows(rows_ptr, ids, out_rows, n_ids, first_row, stride, WORDS: tl.constexpr):
    """Whole rows, as words of 4 bytes: wide loads, whatever lies where in a row."""
    row = (rows_ptr + (ids - first_row) * stride).to(tl.pointer_type(tl.uint32))
    place = tl.arange(0, WORDS)[None, :]
    mask = (out_rows < n_ids)[:, None] & (place < stride // 4)
    return tl.load(row[:, None] + place, mask=mask, other=0)


@triton.jit
def fetch_first(
    rows_ptr, ids_ptr, n_ids, first_row, stride, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """The first whole rows of the program, and the numbers of those after them: rows are on their
    way while others are decoded, and their numbers before them."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ids = load_ids(ids_ptr, rows, n_ids)
    held = _load_rows(rows_ptr, ids, rows, n_ids, first_row, stride, WORDS)
    return held, load_ids(ids_ptr, rows + tl.num_programs(0) * BLOCK_ROWS, n_ids)


@triton.jit
def fetch_next(
    rows_ptr,
    ids_ptr,
    ids,
    out_rows,
    n_ids,
    first_row,
    stride,
    BLOCK_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The rows of these numbers, which come after `out_rows`, and the numbers of those after."""
    rows = out_rows + tl.num_programs(0) * BLOCK_ROWS
    held = _load_rows(rows_ptr, ids, rows, n_ids, first_row, stride, WORDS)
    return held, load_ids(ids_ptr, rows + tl.num_programs(0) * BLOCK_ROWS, n_ids)


@triton.jit
def stage_rows(scratch_ptr, held, stride, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Writes whole rows that have arrived to the program's part of the scratch memory, where each
    thread finds each byte; returns pointers to the first bytes of rows.

    Bytes of a plane, or elements one by one, would be requests of a sector or less each. A link
    takes far fewer requests a second than memory of the device does, so rows travel as a whole."""
    row = scratch_ptr + (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)) * WORDS
    place = tl.arange(0, WORDS)[None, :]
    tl.debug_barrier()  # the rows before these have been read
    tl.store(row[:, None] + place, held, mask=place < stride // 4)
    tl.debug_barrier()
    return row.to(tl.pointer_type(tl.uint8))
