"""The elements of a tensor that an index selects, and the runs that all elements are cut into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from packhorse.disk.shelf.arrays import Array, dtype_of
from packhorse.disk.shelf.changes import Changes
from packhorse.disk.shelf.indexing import Selection, select
from packhorse.disk.shelf.records import StateRecord, TensorRecord
from packhorse.disk.shelf.rows import Chunks, RowIds, changes_of, read_rows, read_tensors
from packhorse.disk.shelf.values import to_framework
from packhorse.disk.state import decode_state
from packhorse.errors import CorruptionError, blaming
from packhorse.framework import Framework
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.strict_json import shortened

__all__ = [
    "blocks_of",
    "read_all",
    "read_index",
    "read_state",
    "shrink",
    "write_index",
    "write_rows",
]


def read_all(record: TensorRecord, chunks: Chunks) -> Array:
    """All elements of a tensor, as a new array."""
    out = np.empty(record.shape, dtype_of(record.dtype))
    n_rows = record.shape[0] if record.shape else 1
    if out.size:
        block = out.reshape(n_rows, -1)
        read_rows(chunks, record, range(n_rows), 0, block.shape[1], block)
    return out


def read_index(record: TensorRecord, chunks: Chunks, index: Any) -> Any:
    """What an index selects of a tensor, as NumPy gives it.

    Raises:
        IndexError, TypeError, ValueError: NumPy's own, for a wrong index.
    """
    if not record.shape:
        return read_all(record, chunks)[index]
    selection = select(index, record.shape)
    return selection.view(_read_selection(record, chunks, selection))


def _read_selection(record: TensorRecord, chunks: Chunks, selection: Selection) -> Array:
    block = np.empty(selection.block_shape, dtype_of(record.dtype))
    if block.size:
        low, high = selection.low, selection.high
        flat = block.reshape(len(selection.rows), high - low)
        read_rows(chunks, record, selection.rows, low, high, flat)
    return block


def read_state(entry: StateRecord, chunks: Chunks, framework: Framework) -> Any:
    """A nested state with new tensors, which are decoded many at a time.

    Args:
        entry: the state.
        chunks: where from.
        framework: of the tensors.

    Raises:
        CompatibilityError: the framework has no tensor of some dtype and shape.
        CorruptionError: a chunk, or the state, is damaged; of a chunk the message names the tensor.
    """
    tensors: list[Any] = []
    paths: list[str] = []
    wanted: list[tuple[TensorRecord, Array]] = []

    def make(index: int, path: str) -> Any:
        record = entry.tensors[index]
        with blaming(shortened(path)):
            tensor = framework.empty(record.dtype, record.shape)
        memory = framework.memory(tensor)
        if memory is None or DTYPE_BY_NAME[record.dtype].bits < 8:  # it lies there in another way
            return to_framework(read_all(record, chunks), record.dtype, framework)
        tensors.append(tensor)
        paths.append(path)
        wanted.append((record, memory.view(dtype_of(record.dtype))))
        return tensor

    state, _ = decode_state(entry.state, make)
    try:
        read_tensors(chunks, wanted)
    except CorruptionError:
        for path, tensor in zip(paths, wanted, strict=True):
            with blaming(f"tensor {shortened(path)!r} of a nested state"):
                read_tensors(chunks, [tensor])
        raise
    finally:
        framework.mark_all_written(tensors)
    return state


def write_index(record: TensorRecord, changes: Changes, index: Any, value: Array) -> None:
    """Write values to what an index selects of a tensor.

    Args:
        record: the tensor.
        changes: where to.
        index: the object in the brackets.
        value: the values, of the dtype of the tensor; they are broadcast.

    Raises:
        IndexError, TypeError, ValueError: NumPy's own, for what does not fit.
    """
    if not record.shape:
        scalar = read_all(record, changes)
        scalar[index] = value
        write_rows(record, changes, range(1), 0, 1, scalar.reshape(1, 1))
        return
    selection = select(index, record.shape, writes=True)
    shape, rows = selection.block_shape, selection.rows
    block: Array | None
    if selection.is_plain:
        block = _broadcast(value, shape)
    elif selection.inner is None and selection.whole is None:
        block = _assigned(selection, np.empty(shape, dtype_of(record.dtype)), value)
    else:
        block = _assigned(selection, _read_selection(record, changes, selection), value)
    if block is None:
        _refuse(record.shape, index, value)
    if math.prod(shape):
        width = selection.high - selection.low
        flat = block.reshape(len(rows), width)
        write_rows(record, changes, rows, selection.low, selection.high, flat)


def _broadcast(value: Array, shape: tuple[int, ...]) -> Array | None:
    """A value in another shape; None if it does not fit."""
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    with suppress(ValueError):
        return np.broadcast_to(value, shape)
    return None


def _assigned(selection: Selection, block: Array, value: Array) -> Array | None:
    """A block with values in what an index selects of it; None if they do not fit."""
    with suppress(ValueError):
        selection.assign(block, value)
        return block
    return None


def _refuse(shape: tuple[int, ...], index: Any, value: Array) -> NoReturn:
    """Raise NumPy's error for values that do not fit, by an array that takes no memory."""
    strides = (0,) * len(shape)
    as_strided(np.zeros((), value.dtype), shape, strides, writeable=True)[index] = value
    raise ValueError(f"values of shape {value.shape} do not fit")


def write_rows(
    record: TensorRecord, changes: Changes, rows: RowIds, low: int, high: int, block: Array
) -> None:
    """Write a run of elements of some rows.

    Args:
        record, rows, low, high, block: as for `rows.changes_of`.
        changes: where to.
    """
    changes.change(record, changes_of(record, rows, low, high, block))


def shrink(record: TensorRecord, resized: TensorRecord, changes: Changes) -> None:
    """Drop the rows that a tensor does not have any more, also from the last chunk."""
    old, new = record.grid, resized.grid
    last = new.n_chunks - 1
    is_cut = new.n_chunks and new.numel_of(last) != old.numel_of(last)
    changes.clear(resized, new.n_chunks, old.n_chunks)
    if is_cut:
        changes.cut(resized, last)


def blocks_of(record: TensorRecord, nbytes: int) -> Iterator[Any]:
    """Indices of all elements: runs of whole rows, or parts of a row if one is too long."""
    itemsize = dtype_of(record.dtype).itemsize
    per_chunk = record.grid.rows_per_chunk
    if not record.shape:
        yield ...
        return
    yield from _cut(record.shape, max(1, nbytes // itemsize), per_chunk)


def _cut(shape: tuple[int, ...], numel: int, multiple: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of blocks of about `numel` elements, in order."""
    row = math.prod(shape[1:])
    if row > numel:
        for i in range(shape[0]):
            for index in _cut(shape[1:], numel, 1):
                yield (i, *index)
        return
    step = max(1, numel // max(1, row))
    step = max(multiple, step - step % multiple)
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])),)
