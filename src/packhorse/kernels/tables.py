"""Gathers rows of packed tables (docs/format.md, section 14) on a GPU.

The packed rows may lie in memory of the host that the GPU reads directly: each byte of a row is
loaded once. Dense rows, and bitmaps with elements, travel as a whole while the ones before them
are decoded; they wait in scratch memory of the device, if they are not too long. A few programs go
through all ids, because a link needs only some tens of KiB in flight: `n_programs` says how many,
so that other work keeps the rest of the GPU. Exceptions and values are in device memory.

A dense row is cut in 8 slices of columns, the same for all planes, so that one vector of a plane of
1 bit, 2 of a plane of 2 bits and 4 of a plane of 4 bits serve the 8 vectors of columns.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor, device
from triton import language as tl

from packhorse.kernels.launch import ceil_div, device_of, require_tensor
from packhorse.kernels.sparse_tables import gather_bitmap_kernel, gather_list_kernel
from packhorse.kernels.table_elements import (
    element_of,
    fetch_first,
    fetch_next,
    load_ids,
    put_exceptions,
    stage_rows,
)
from packhorse.kernels.triple_tables import gather_triples_kernel
from packhorse.table_layout import TableFormat, TableMode

__all__ = [
    "DEFAULT_PROGRAMS",
    "INTEGERS",
    "TableKernel",
    "TableTensors",
    "gather_dense_kernel",
    "gather_raw_kernel",
    "gather_rows",
    "kernel_of",
    "put_rows",
    "put_rows_kernel",
    "upload_table",
]

INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
DEFAULT_PROGRAMS = 16
# Programs are so large that each has a multiprocessor of its own: then their number is a budget.
_N_WARPS = 16
_TILE = 16384  # elements that a program decodes at once: 32 of a thread
_MAX_IDS = (1 << 31) - (1 << 24)  # so that numbers of rows behind the last one fit 32 bits
_LIST_ROWS = 32  # of a program at once
_MAX_STAGED = 4096  # words of a bitmap row that travels as a whole
_MAX_STAGED_TILE = 8192  # words of dense rows that a program waits for at once: 16 of a thread


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
def _load_vectors(at, n_steps, steps, mask, N: tl.constexpr):
    """The vectors of a narrow plane for the 8 slices of columns: vector s % N for slice s. They are
    repeated after they were loaded, so that a byte travels once."""
    vectors = tl.load(at + tl.arange(0, N)[None, :, None] * n_steps + steps, mask=mask, other=0)
    ROWS: tl.constexpr = vectors.shape[0]
    STEPS: tl.constexpr = vectors.shape[2]
    repeated = tl.broadcast_to(vectors[:, None, :, :], (ROWS, 8 // N, N, STEPS))
    return tl.reshape(repeated, (ROWS, 8, STEPS))


@triton.jit(do_not_specialize=["n_ids", "first_row"], do_not_specialize_on_alignment=["ids_ptr"])
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
    first_row,  # the row that rows_ptr begins with
    n_columns,
    stride,
    n_steps,  # ceil(n_columns / 8)
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
    BLOCK_STEPS: tl.constexpr,
    BLOCK_EXCEPTIONS: tl.constexpr,
):
    WORD: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32
    slices = tl.arange(0, 8)[None, :, None]
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
        for first in range(0, n_steps, BLOCK_STEPS):
            steps = first + tl.arange(0, BLOCK_STEPS)[None, None, :]
            in_slice = mask_rows[:, None, None] & (steps < n_steps)
            columns = slices * n_steps + steps
            mask = in_slice & (columns < n_columns)
            packed = tl.zeros(mask.shape, WORD)
            for k in tl.static_range(N_WHOLE):
                plane = tl.load(row + k * n_columns + columns, mask=mask, other=0)
                packed |= plane.to(WORD) << (8 * k)
            if NARROW & 4:
                fours = _load_vectors(narrow, n_steps, steps, in_slice, 4)
                field = (fours >> (slices // 4 * 4)) & 15
                packed |= field.to(WORD) << (8 * N_WHOLE)
            if NARROW & 2:
                at = narrow + (NARROW & 4) * n_steps
                twos = _load_vectors(at, n_steps, steps, in_slice, 2)
                field = (twos >> (slices // 2 * 2)) & 3
                packed |= field.to(WORD) << (8 * N_WHOLE + (NARROW & 4))
            if NARROW & 1:
                at = narrow + (NARROW & 6) * n_steps
                ones = _load_vectors(at, n_steps, steps, in_slice, 1)
                field = (ones >> slices) & 1
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


@triton.jit(do_not_specialize=["n_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def put_rows_kernel(
    head_ptr,  # int64: how many rows there are, the address of their numbers, and that of the rows
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    n_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Overwrites gathered rows with plain ones, found by bisection."""
    n_rows = tl.load(head_ptr)
    numbers_ptr = tl.load(head_ptr + 1).to(tl.pointer_type(tl.int64))
    rows_ptr = tl.multiple_of(tl.load(head_ptr + 2).to(out_ptr.dtype), 16)
    n_blocks = tl.where(n_rows > 0, tl.cdiv(n_ids, BLOCK_ROWS), 0)
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        out_rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask_rows = out_rows < n_ids
        ids = tl.load(ids_ptr + out_rows, mask=mask_rows, other=-1)
        place = tl.zeros((BLOCK_ROWS,), tl.int64)  # of the first number that is not less
        left = n_rows
        while left > 1:
            half = left // 2
            number = tl.load(numbers_ptr + place + half - 1, mask=mask_rows, other=0)
            place += tl.where(number < ids, half, 0)
            left -= half
        number = tl.load(numbers_ptr + place, mask=mask_rows, other=0)
        place += (number < ids).to(tl.int64)
        is_there = mask_rows & (place < n_rows)
        found = is_there & (tl.load(numbers_ptr + place, mask=is_there, other=-1) == ids)
        if tl.max(found.to(tl.int32), 0) != 0:
            out = out_ptr + out_rows.to(tl.int64) * n_columns
            row = rows_ptr + place * n_columns
            for start in range(0, n_columns, BLOCK_COLUMNS):
                columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
                mask = found[:, None] & (columns < n_columns)
                elements = tl.load(row[:, None] + columns, mask=mask)
                tl.store(out[:, None] + columns, elements, mask=mask)


@triton.jit(do_not_specialize=["n_ids", "first_row"], do_not_specialize_on_alignment=["ids_ptr"])
def gather_raw_kernel(
    rows_ptr,  # u8
    ids_ptr,
    out_ptr,  # n_ids x n_columns
    n_ids,
    first_row,
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
        row = (rows_ptr + (ids - first_row) * stride).to(tl.pointer_type(TYPE))
        out = out_ptr + out_rows.to(tl.int64) * n_columns
        for start in range(0, n_columns, BLOCK_COLUMNS):
            columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
            mask = mask_rows[:, None] & (columns < n_columns)
            elements = tl.load(row[:, None] + columns, mask=mask)
            tl.store(out[:, None] + columns, elements, mask=mask)


def upload_table(rows: Tensor, others: Sequence[NDArray[Any]], format: TableFormat) -> TableTensors:
    """The tensors of a table.

    Args:
        rows: uint8, n_rows x stride, where the kernels read them.
        others: the other arrays of docs/format.md, section 14, in their order; they are copied to
            the device of the rows.
        format: of the table.
    """
    *words, columns, elements = others
    values = np.array(format.values, f"<u{format.element_nbytes}")
    kind = "u1" if format.element_bits == 8 else f"i{format.element_nbytes}"
    arrays = [array.view(np.int32) for array in words]
    arrays += [columns.view(np.int16), elements.view(np.uint8), values.view(kind)]
    return TableTensors(rows, *(torch.from_numpy(array.copy()).to(rows.device) for array in arrays))


class TableKernel(NamedTuple):
    """The kernel for rows of a format, and what it is told.

    Attributes:
        kernel: the kernel.
        numbers: its arguments after `first_row`, but for scratch memory.
        constants: its `tl.constexpr` arguments, and the warps of a program.
    """

    kernel: Any
    numbers: tuple[int, ...]
    constants: Mapping[str, int]


@cache
def kernel_of(format: TableFormat, has_exceptions: bool) -> TableKernel:
    """The kernel for a table.

    Args:
        format: of the table.
        has_exceptions: whether any row has one.
    """
    if format.mode is TableMode.RAW:
        found = _raw_kernel(format)
    elif format.mode is TableMode.DENSE:
        found = _dense_kernel(format)
    elif format.mode is TableMode.LIST:
        found = _list_kernel(format)
    else:
        found = _bitmap_kernel(format)
    constants = dict(found.constants)
    if format.mode is not TableMode.RAW:
        constants |= {
            "CODE_BITS": format.code_bits,
            "REST_BITS": format.rest_bits,
            "SHIFT": format.shift,
            "BITS": format.element_bits,
            "HAS_EXCEPTIONS": has_exceptions,
            "BLOCK_EXCEPTIONS": 8,
        }
    return found._replace(constants=constants | {"num_warps": _N_WARPS})


def _raw_kernel(format: TableFormat) -> TableKernel:
    block_columns = min(triton.next_power_of_2(format.n_columns), 1024)
    block_rows = max(1, 2 * _TILE // format.element_nbytes // block_columns)
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    return TableKernel(gather_raw_kernel, (format.n_columns, format.stride), constants)


def _dense_kernel(format: TableFormat) -> TableKernel:
    n_steps = ceil_div(format.n_columns, 8)
    n_words = triton.next_power_of_2(ceil_div(format.stride, 4))
    constants = {
        "STAGED": n_words if n_words <= _MAX_STAGED_TILE else 0,
        "N_WHOLE": format.plane_bits // 8,
        "NARROW": format.plane_bits % 8,
        "HAS_SIGN": int(format.has_sign),
    }
    numbers: tuple[int, ...] = format.n_columns, format.stride, n_steps
    if format.has_triples:
        kernel, block = gather_triples_kernel, triton.next_power_of_2(format.n_triples)
        numbers, tile = (*numbers, format.n_triples), _TILE  # a larger one spills registers
        block = constants["BLOCK_TRIPLES"] = min(block, 512)
    else:
        kernel, block = gather_dense_kernel, triton.next_power_of_2(n_steps)
        tile = _TILE // max(1, format.element_nbytes // 2)
        block = constants["BLOCK_STEPS"] = min(block, 256)
    block_rows = tile // (8 * block)
    if constants["STAGED"]:
        block_rows = min(block_rows, _MAX_STAGED_TILE // n_words)
    return TableKernel(kernel, numbers, constants | {"BLOCK_ROWS": max(1, block_rows)})


def _list_kernel(format: TableFormat) -> TableKernel:
    nbytes = format.packed_bits // 8
    numbers = format.n_columns, format.stride, format.capacity, _signed(format)
    constants = {
        "NBYTES": nbytes,
        "UNIT": 1 if (format.first_nbytes | format.entry_nbytes) % 2 else 2,
        "HAS_ROW_VALUE": format.has_row_value,
        "BLOCK_ROWS": _LIST_ROWS,
        "BLOCK_ENTRIES": 8 if nbytes else 16,
        "BLOCK_COLUMNS": min(triton.next_power_of_2(format.n_columns), 1024),
    }
    return TableKernel(gather_list_kernel, numbers, constants)


def _bitmap_kernel(format: TableFormat) -> TableKernel:
    nbytes, stride = format.packed_bits // 8, format.stride
    block_columns = min(max(triton.next_power_of_2(format.n_columns), 32), 1024)
    n_words = triton.next_power_of_2(stride // 4)
    numbers = format.n_columns, stride, format.capacity, format.first_nbytes, _signed(format)
    constants = {
        "NBYTES": nbytes,
        "STAGED": n_words if nbytes and n_words <= _MAX_STAGED else 0,
        "UNIT": min(format.element_nbytes, 4) if format.has_row_value else 4,
        "HAS_ROW_VALUE": format.has_row_value,
        "BLOCK_ROWS": max(1, _TILE // 2 // max(block_columns, n_words)),
        "BLOCK_COLUMNS": block_columns,
    }
    return TableKernel(gather_bitmap_kernel, numbers, constants)


def _signed(format: TableFormat) -> int:
    """The background as the kernel's integers have it."""
    limit = 1 << format.element_bits - 1
    return format.background - 2 * limit if format.background >= limit else format.background


def gather_rows(
    tensors: TableTensors,
    format: TableFormat,
    ids: Tensor,
    out: Tensor,
    *,
    n_programs: int | None = None,
    first_row: int = 0,
) -> None:
    """Gathers rows. The caller has checked the ids and the table.

    Args:
        tensors: a packed table.
        format: its format.
        ids: int64 (n,), on the device of the kernels; each is a row.
        out: integers of the elements' size, n x n_columns; receives the rows.
        n_programs: programs that share the work, each on a multiprocessor of its own; None for 16.
        first_row: the row that `tensors.rows` begins with; all rows that are gathered are in it.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous; or there
            are too many ids.
    """
    n, n_columns = len(ids), format.n_columns
    require_tensor(ids, "ids", torch.int64, (n,), tensors.device)
    require_tensor(out, "out", INTEGERS[format.element_bits], (n, n_columns), tensors.device)
    if n == 0:
        return
    if n > _MAX_IDS:
        raise ValueError(f"{n} ids are too many for one gather: give {_MAX_IDS} at most")
    kernel, numbers, constants = kernel_of(format, tensors.exception_columns.numel() > 0)
    arrays = (tensors.rows,) if format.mode is TableMode.RAW else _arrays_of(tensors, out)
    n_programs = min(n_programs or DEFAULT_PROGRAMS, ceil_div(n, constants["BLOCK_ROWS"]))
    arguments = (*arrays, ids, out, n, first_row, *numbers)
    if "STAGED" in constants:
        n_words = n_programs * constants["BLOCK_ROWS"] * constants["STAGED"]
        arguments = (*arguments, torch.empty(n_words, dtype=torch.uint32, device=out.device))
    with device_of(out):
        kernel[n_programs,](*arguments, **constants)


def _arrays_of(tensors: TableTensors, out: Tensor) -> tuple[Tensor, ...]:
    """The arrays as kernels take them: exceptions as elements."""
    # PyTorch cannot view an empty tensor of NumPy as another type.
    held = tensors.exception_elements
    elements = held.view(out.dtype) if held.numel() else held
    return (*tensors[:5], elements, tensors.values)


def put_rows(head: Tensor, ids: Tensor, out: Tensor, *, n_programs: int | None = None) -> None:
    """Overwrites gathered rows with plain ones, where there are such.

    Where these lie is read on the device, so that a CUDA graph finds them wherever they move.

    Args:
        head: int64 (3,): how many plain rows there are, the address of their numbers (int64,
            ascending), and that of the rows, which are like those of `out`.
        ids: int64 (n,): the numbers of the gathered rows.
        out: integers, n x n_columns.
        n_programs: programs that share the work; None for 16.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is on another device, or is not contiguous.
    """
    require_tensor(head, "head", torch.int64, (3,), out.device)
    require_tensor(ids, "ids", torch.int64, (len(out),), out.device)
    if not len(out):
        return
    block_columns = min(triton.next_power_of_2(out.shape[1]), 1024)
    block_rows = max(1, 8192 // block_columns)
    n_programs = min(n_programs or DEFAULT_PROGRAMS, ceil_div(len(out), block_rows))
    with device_of(out):
        put_rows_kernel[n_programs,](
            head, ids, out, len(out), out.shape[1],
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=8,
        )  # fmt: skip
