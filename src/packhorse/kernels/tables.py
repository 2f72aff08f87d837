"""Gathers rows of packed tables (docs/format.md, section 14) on a GPU.

The packed rows may lie in memory of the host that the GPU reads directly: each byte of a row is
loaded once, and decoded in registers. A few programs go through all ids, because a link needs only
some tens of KiB in flight: `n_programs` says how many, so that other work keeps the rest of the
GPU. Exceptions and values are in device memory.

A dense row is cut in 8 slices of columns, the same for all planes, so that one vector of a plane of
1 bit, 2 of a plane of 2 bits and 4 of a plane of 4 bits serve the 8 vectors of columns.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor, device
from triton import language as tl

from packhorse.kernels.launch import ceil_div, device_of, require_tensor
from packhorse.table_layout import TableFormat, TableMode

__all__ = [
    "TableTensors",
    "gather_dense_kernel",
    "gather_raw_kernel",
    "gather_rows",
    "gather_sparse_kernel",
]

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_DEFAULT_PROGRAMS = 64  # 16 multiprocessors with 4 programs each


class TableTensors(NamedTuple):
    """The arrays of docs/format.md, section 14, as contiguous tensors, and the values.

    Attributes:
        rows: uint8, n_rows x stride: on the device, or in memory of the host that it reads.
        marks: int32, ceil(n_rows / 32).
        ranks: int32, ceil(n_rows / 32).
        exception_starts: int32, marked rows + 1.
        exception_columns: int16, as many as there are.
        exception_elements: uint8, their bytes.
        values: integers of the elements' size, 2^code_bits of them.
    """

    rows: Tensor
    marks: Tensor
    ranks: Tensor
    exception_starts: Tensor
    exception_columns: Tensor
    exception_elements: Tensor
    values: Tensor

    @property
    def device(self) -> device:
        """The device of the kernels."""
        return self.values.device


@triton.jit
def _count_bits(x):
    """The bits of uint32 numbers that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit
def _put_exceptions(
    marks_ptr,
    ranks_ptr,
    starts_ptr,
    columns_ptr,
    elements_ptr,
    ids,
    mask_rows,
    out,  # pointers to the first element of each output row
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    """Overwrites elements of rows with exceptions, which other threads of the program wrote."""
    tl.debug_barrier()
    place = (ids % 32).to(tl.uint32)
    words = tl.load(marks_ptr + ids // 32, mask=mask_rows, other=0).to(tl.uint32, bitcast=True)
    marked = mask_rows & (((words >> place) & 1) != 0)
    below = words & ((tl.full(place.shape, 1, tl.uint32) << place) - 1)
    rank = tl.load(ranks_ptr + ids // 32, mask=marked, other=0) + _count_bits(below).to(tl.int32)
    starts = tl.load(starts_ptr + rank, mask=marked, other=0).to(tl.int64)
    stops = tl.load(starts_ptr + rank + 1, mask=marked, other=0).to(tl.int64)
    counts = tl.where(marked, stops - starts, 0).to(tl.int32)
    for start in range(0, tl.max(counts, 0), BLOCK_EXCEPTIONS):
        number = start + tl.arange(0, BLOCK_EXCEPTIONS)[None, :]
        mask = number < counts[:, None]
        index = starts[:, None] + number
        columns = tl.load(columns_ptr + index, mask=mask, other=0).to(tl.int32) & 0xFFFF
        elements = tl.load(elements_ptr + index, mask=mask, other=0)
        tl.store(out[:, None] + columns, elements, mask=mask)


@triton.jit
def _value(at, mask, BITS: tl.constexpr, WORD: tl.constexpr):
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
def _element(
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
    element = _value(values_ptr + code, mask, BITS, WORD)
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
def _triple_code(triples, columns, mask, n_triples):
    """Codes that triples have. Three columns share a triple, and 12 share the byte with the bits
    above. The link carries each byte once; the cache of the multiprocessor has it then."""
    third = columns // n_triples
    number = columns - third * n_triples
    slice_nbytes = 2 * ((n_triples + 7) // 8)
    part = number // slice_nbytes
    low = tl.load(triples + number, mask=mask, other=0).to(tl.int32)
    top = tl.load(triples + n_triples + number - part * slice_nbytes, mask=mask, other=0)
    triple = low | ((top.to(tl.int32) >> (2 * part)) & 3) << 8
    triple = tl.where(third == 0, triple, tl.where(third == 1, triple // 10, triple // 100))
    return triple % 10


@triton.jit(do_not_specialize=["n_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def gather_dense_kernel(
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
    n_columns,
    stride,
    n_steps,  # ceil(n_columns / 8)
    n_triples,  # ceil(n_columns / 3)
    N_WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_TRIPLES: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_SIGN: tl.constexpr,
    BITS: tl.constexpr,
    HAS_EXCEPTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    WORD: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32
    for block in range(tl.program_id(0), tl.cdiv(n_ids, BLOCK_ROWS), tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        ids = tl.load(ids_ptr + out_rows, mask=mask_rows, other=0)
        row = rows_ptr + ids[:, None] * stride
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        narrow = row + N_WHOLE * n_columns
        triples = narrow + NARROW * n_steps
        for first in range(0, n_steps, BLOCK_STEPS):
            steps = first + tl.arange(0, BLOCK_STEPS)[None, :]
            mask = mask_rows[:, None] & (steps < n_steps)
            at = narrow + (NARROW & 4) * n_steps + steps  # behind the plane of 4 bits
            even = mask.to(tl.uint8)
            odd = even
            if NARROW & 2:
                even = tl.load(at, mask=mask, other=0)
                odd = tl.load(at + n_steps, mask=mask, other=0)
            ones = even
            if NARROW & 1:
                ones = tl.load(at + (NARROW & 2) * n_steps, mask=mask, other=0)
            for i in tl.static_range(4):
                fours = even
                if NARROW & 4:
                    fours = tl.load(narrow + i * n_steps + steps, mask=mask, other=0)
                for half in tl.static_range(2):
                    SLICE: tl.constexpr = i + 4 * half
                    columns = SLICE * n_steps + steps
                    in_row = mask & (columns < n_columns)
                    packed = tl.zeros(mask.shape, WORD)
                    for k in tl.static_range(N_WHOLE):
                        plane = tl.load(row + k * n_columns + columns, mask=in_row, other=0)
                        packed |= plane.to(WORD) << (8 * k)
                    if NARROW & 4:
                        field = (fours >> (4 * half)) & 15
                        packed |= field.to(WORD) << (8 * N_WHOLE)
                    if NARROW & 2:
                        twos = even if i % 2 == 0 else odd
                        field = (twos >> (SLICE // 2 * 2)) & 3
                        packed |= field.to(WORD) << (8 * N_WHOLE + (NARROW & 4))
                    if NARROW & 1:
                        field = (ones >> SLICE) & 1
                        packed |= field.to(WORD) << (8 * N_WHOLE + (NARROW & 6))
                    if HAS_TRIPLES:
                        code = _triple_code(triples, columns, in_row, n_triples)
                        packed |= code.to(WORD) << REST_BITS
                    element = _element(
                        packed, values_ptr, in_row, CODE_BITS, REST_BITS, SHIFT, HAS_SIGN, BITS
                    )
                    element = element.to(out_ptr.dtype.element_ty)
                    tl.store(out[:, None] + columns, element, mask=in_row)
        if HAS_EXCEPTIONS:
            _put_exceptions(
                marks_ptr, ranks_ptr, starts_ptr, columns_ptr, elements_ptr,
                ids, mask_rows, out, BLOCK_EXCEPTIONS,
            )  # fmt: skip


@triton.jit
def _load_bytes(at, mask, NBYTES: tl.constexpr, WORD: tl.constexpr):
    """Little-endian numbers at any addresses."""
    number = tl.load(at, mask=mask, other=0).to(WORD)
    for k in tl.static_range(1, NBYTES):
        number |= tl.load(at + k, mask=mask, other=0).to(WORD) << (8 * k)
    return number


@triton.jit
def _stored_elements(
    at,
    row_values,
    values_ptr,
    mask,
    NBYTES: tl.constexpr,
    HAS_ROW_VALUE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
):
    """Elements that sparse rows store at some addresses."""
    if HAS_ROW_VALUE:
        return row_values[:, None] + tl.zeros(mask.shape, WORD)
    if NBYTES == 0:
        return _value(values_ptr + tl.zeros(mask.shape, tl.int32), mask, BITS, WORD)
    packed = _load_bytes(at, mask, NBYTES, WORD)
    return _element(packed, values_ptr, mask, CODE_BITS, REST_BITS, SHIFT, False, BITS)


@triton.jit(do_not_specialize=["n_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def gather_sparse_kernel(
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
    n_columns,
    stride,
    capacity,
    first_nbytes,  # of a row, before its first stored element or entry
    background,
    IS_LIST: tl.constexpr,
    NBYTES: tl.constexpr,  # of a packed element
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
        row = rows_ptr + ids * stride
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        row_values = tl.zeros((BLOCK_ROWS,), WORD)
        if HAS_ROW_VALUE:
            row_values = _load_bytes(row, mask_rows, BITS // 8, WORD)
        stored = row[:, None] + first_nbytes
        if IS_LIST:
            for start in range(0, n_columns, BLOCK_COLUMNS):
                columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
                mask = mask_rows[:, None] & (columns < n_columns)
                fill = tl.zeros(mask.shape, TYPE) + background.to(TYPE)
                tl.store(out[:, None] + columns, fill, mask=mask)
            tl.debug_barrier()
            # Only what comes before the end of a row's list is fetched, but for a few entries.
            alive = mask_rows
            start = 0
            while (start < capacity) & (tl.max(alive.to(tl.int32), 0) != 0):
                number = start + tl.arange(0, BLOCK_ENTRIES)[None, :]
                mask = alive[:, None] & (number < capacity)
                at = stored + number * (NBYTES + 2)
                columns = _load_bytes(at, mask, 2, tl.uint32).to(tl.int32)
                is_stored = mask & (columns < n_columns)
                element = _stored_elements(
                    at + 2, row_values, values_ptr, is_stored,
                    NBYTES, HAS_ROW_VALUE, CODE_BITS, REST_BITS, SHIFT, BITS, WORD,
                )  # fmt: skip
                tl.store(out[:, None] + columns, element.to(TYPE), mask=is_stored)
                alive = alive & (tl.min(is_stored.to(tl.int32), 1) != 0)
                start += BLOCK_ENTRIES
        else:
            bitmap = row[:, None] + (BITS // 8 if HAS_ROW_VALUE else 0)
            n_before = tl.zeros((BLOCK_ROWS,), tl.int32)
            for start in range(0, n_columns, BLOCK_COLUMNS):
                columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
                mask = mask_rows[:, None] & (columns < n_columns)
                byte = tl.load(bitmap + columns // 8, mask=mask, other=0).to(tl.int32)
                bit = (byte >> (columns % 8)) & 1
                number = n_before[:, None] + tl.cumsum(bit, 1) - 1
                is_stored = mask & (bit != 0) & (number < capacity)
                element = _stored_elements(
                    stored + number * NBYTES, row_values, values_ptr, is_stored,
                    NBYTES, HAS_ROW_VALUE, CODE_BITS, REST_BITS, SHIFT, BITS, WORD,
                )  # fmt: skip
                other = tl.zeros(mask.shape, TYPE) + background.to(TYPE)
                chosen = tl.where(is_stored, element.to(TYPE), other)
                tl.store(out[:, None] + columns, chosen, mask=mask)
                n_before += tl.sum(bit, 1)
        if HAS_EXCEPTIONS:
            _put_exceptions(
                marks_ptr, ranks_ptr, starts_ptr, columns_ptr, elements_ptr,
                ids, mask_rows, out, BLOCK_EXCEPTIONS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def gather_raw_kernel(
    rows_ptr,  # u8
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    n_columns,
    stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(n_ids, BLOCK_ROWS), tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        ids = tl.load(ids_ptr + out_rows, mask=mask_rows, other=0)
        row = (rows_ptr + ids * stride).to(tl.pointer_type(TYPE))
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        for start in range(0, n_columns, BLOCK_COLUMNS):
            columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
            mask = mask_rows[:, None] & (columns < n_columns)
            elements = tl.load(row[:, None] + columns, mask=mask)
            tl.store(out[:, None] + columns, elements, mask=mask)


def gather_rows(
    tensors: TableTensors,
    format: TableFormat,
    ids: Tensor,
    out: Tensor,
    *,
    n_programs: int | None = None,
) -> None:
    """Gathers rows. The caller has checked the ids and the table.

    Args:
        tensors: a packed table.
        format: its format.
        ids: int64 (n,), on the device of the kernels; each is a row.
        out: integers of the elements' size, n x n_columns; receives the rows.
        n_programs: programs that share the work; None for 64, which fill 16 multiprocessors.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    n, n_columns = len(ids), format.n_columns
    require_tensor(ids, "ids", torch.int64, (n,), tensors.device)
    require_tensor(out, "out", _INTEGERS[format.element_bits], (n, n_columns), tensors.device)
    if n == 0:
        return
    launch = {TableMode.RAW: _gather_raw, TableMode.DENSE: _gather_dense}
    with device_of(out):
        launch.get(format.mode, _gather_sparse)(
            tensors, format, ids, out, n_programs or _DEFAULT_PROGRAMS
        )


def _gather_raw(
    tensors: TableTensors, format: TableFormat, ids: Tensor, out: Tensor, n_programs: int
) -> None:
    block_columns = min(triton.next_power_of_2(format.n_columns), 1024)
    block_rows = max(1, 4096 // format.element_nbytes // block_columns)
    grid = (min(n_programs, ceil_div(len(ids), block_rows)),)
    gather_raw_kernel[grid](
        tensors.rows,
        ids,
        out,
        len(ids),
        format.n_columns,
        format.stride,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


def _gather_dense(
    tensors: TableTensors, format: TableFormat, ids: Tensor, out: Tensor, n_programs: int
) -> None:
    n_steps = ceil_div(format.n_columns, 8)
    block_steps = min(triton.next_power_of_2(n_steps), 256)
    block_rows = max(1, 2048 // block_steps // format.element_nbytes)
    grid = (min(n_programs, ceil_div(len(ids), block_rows)),)
    gather_dense_kernel[grid](
        *_arrays_of(tensors, out),
        ids,
        out,
        len(ids),
        format.n_columns,
        format.stride,
        n_steps,
        format.n_triples,
        N_WHOLE=format.plane_bits // 8,
        NARROW=format.plane_bits % 8,
        HAS_TRIPLES=format.has_triples,
        CODE_BITS=format.code_bits,
        REST_BITS=format.rest_bits,
        SHIFT=format.shift,
        HAS_SIGN=int(format.has_sign),
        BITS=format.element_bits,
        HAS_EXCEPTIONS=tensors.exception_columns.numel() > 0,
        BLOCK_ROWS=block_rows,
        BLOCK_STEPS=block_steps,
        BLOCK_EXCEPTIONS=8,
        num_warps=4,
    )


def _gather_sparse(
    tensors: TableTensors, format: TableFormat, ids: Tensor, out: Tensor, n_programs: int
) -> None:
    is_list = format.mode is TableMode.LIST
    block_columns = min(triton.next_power_of_2(format.n_columns), 512)
    block_rows = 8 if is_list else max(1, 1024 // block_columns)
    grid = (min(n_programs, ceil_div(len(ids), block_rows)),)
    background = format.background
    if background >= 1 << format.element_bits - 1:
        background -= 1 << format.element_bits
    gather_sparse_kernel[grid](
        *_arrays_of(tensors, out),
        ids,
        out,
        len(ids),
        format.n_columns,
        format.stride,
        format.capacity,
        format.first_nbytes,
        background,
        IS_LIST=is_list,
        NBYTES=format.packed_bits // 8,
        HAS_ROW_VALUE=format.has_row_value,
        CODE_BITS=format.code_bits,
        REST_BITS=format.rest_bits,
        SHIFT=format.shift,
        BITS=format.element_bits,
        HAS_EXCEPTIONS=tensors.exception_columns.numel() > 0,
        BLOCK_ROWS=block_rows,
        BLOCK_ENTRIES=8,
        BLOCK_COLUMNS=block_columns,
        BLOCK_EXCEPTIONS=8,
        num_warps=4,
    )


def _arrays_of(tensors: TableTensors, out: Tensor) -> tuple[Tensor, ...]:
    """The arrays as kernels take them: exceptions as elements."""
    # PyTorch cannot view an empty tensor of NumPy as another type.
    held = tensors.exception_elements
    elements = held.view(out.dtype) if held.numel() else held
    return (*tensors[:5], elements, tensors.values)
