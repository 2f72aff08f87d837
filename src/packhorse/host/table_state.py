"""The arrays of a packed table by name (docs/format.md, section 14), as files and state dicts have
them, and the table of such arrays, once they are checked."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.table_plan import way_of_packed
from packhorse.codecs.tables import (
    TableArrays,
    TableHeader,
    check_arrays,
    checksums,
    decode_header,
    encode_header,
    rank_marks,
)
from packhorse.errors import CorruptionError
from packhorse.gpu.host_memory import HostMemory, host_memory
from packhorse.host.table import PackedTable
from packhorse.layout import DTYPE_BY_NAME
from packhorse.table_layout import TableFormat

if TYPE_CHECKING:
    import torch

__all__ = [
    "TABLE_PARTS",
    "drop_table",
    "header_bytes",
    "holds_table",
    "join_table",
    "make_table",
    "small_parts",
    "split_table",
]

_HEADER, _ROWS, _CRCS = "table", "rows", "crcs"
_EXCEPTIONS = ("marks", "exception_starts", "exception_columns", "exception_elements")
TABLE_PARTS = (_HEADER, _ROWS, *_EXCEPTIONS, _CRCS)
_SAMPLE_NBYTES = 1 << 20  # of packed rows, to say what a fetch touches
_Arrays = dict[str, NDArray[Any]]


def small_parts(format: TableFormat) -> dict[str, str]:
    """The arrays of a table besides its header and its rows, with safetensors' names of their
    dtypes."""
    dtypes = ("U32", "U32", "U16", f"U{format.element_bits}", "U32")
    return dict(zip((*_EXCEPTIONS, _CRCS), dtypes, strict=True))


def header_bytes(dtype: str, format: TableFormat, arrays: TableArrays) -> bytes:
    """The header of a table."""
    n_marked, n_exceptions = len(arrays.exception_starts) - 1, len(arrays.exception_columns)
    header = TableHeader(dtype, format, len(arrays.rows), n_marked, n_exceptions)
    return encode_header(header, DTYPE_BY_NAME[dtype].code)


def make_table(
    header: TableHeader,
    rows: NDArray[np.uint8],
    small: Mapping[str, NDArray[Any]],
    memory: HostMemory,
) -> PackedTable:
    """A table of arrays from elsewhere, after every check.

    Args:
        header: its header.
        rows: its rows, which lie in `memory`.
        small: its other arrays by name.
        memory: where the rows lie.

    Raises:
        CorruptionError: an array breaks a rule of the format.
    """
    marks = small["marks"]
    if marks.dtype != np.uint32 or marks.ndim != 1:
        # Ranks are made of marks before `check_arrays` looks at these.
        raise CorruptionError("packed table: marks is no vector of u32")
    starts, columns, elements = (small[name] for name in _EXCEPTIONS[1:])
    expected = np.dtype(f"u{header.format.element_nbytes}")
    if elements.dtype != expected or elements.ndim != 1:
        raise CorruptionError(f"packed table: exception_elements is no vector of {expected}")
    arrays = TableArrays(rows, marks, rank_marks(marks), starts, columns, elements.view(np.uint8))
    check_arrays(header, arrays, small[_CRCS])
    n_rows, sample = max(header.n_rows, 1), rows[:0]
    if header.format.is_sparse:  # others touch as much for each row
        n = min(header.n_rows, max(1, _SAMPLE_NBYTES // header.format.stride))
        sample = rows[np.linspace(0, n_rows - 1, n).astype(np.int64)]
    way = way_of_packed(
        *(sample, header.format, header.dtype),
        *(arrays.fast_nbytes / n_rows, header.n_marked / n_rows),
    )
    return PackedTable(header.dtype, way, arrays, memory)


def split_table(table: PackedTable, name: str) -> _Arrays:
    """Copies of the arrays of a table by name: `name.rows` and so on. A later change of the table
    does not reach them. Rows that were changed and are kept plain are packed here.

    Args:
        table: the table.
        name: what all names begin with.
    """
    format = table.way.format
    numbers, changed, arrays = table.settle()
    rows = arrays.rows.copy()
    rows[numbers] = changed
    arrays = arrays._replace(rows=rows)
    elements = arrays.exception_elements.view(f"u{format.element_nbytes}")
    parts: _Arrays = {
        _HEADER: np.frombuffer(header_bytes(table.dtype, format, arrays), np.uint8).copy(),
        _ROWS: arrays.rows,
        **{each: getattr(arrays, each).copy() for each in _EXCEPTIONS[:-1]},
        _EXCEPTIONS[-1]: elements.copy(),
        _CRCS: checksums(arrays, format),
    }
    return {f"{name}.{part}": array for part, array in parts.items()}


def holds_table(state: Mapping[str, Any], name: str) -> bool:
    """Whether a mapping has an array of the table `name`."""
    return any(f"{name}.{part}" in state for part in TABLE_PARTS)


def drop_table(state: MutableMapping[str, Any], name: str) -> None:
    """Removes the arrays of the table `name` from a mapping."""
    for part in TABLE_PARTS:
        state.pop(f"{name}.{part}", None)


def join_table(
    state: Mapping[str, Any], name: str, *, device: torch.device | str | None = "cpu"
) -> PackedTable:
    """The table that `split_table` took apart, in new memory, after every check.

    Args:
        state: arrays of NumPy by name.
        name: what the names begin with.
        device: as for `pack_table`.

    Raises:
        CorruptionError: an array is missing or breaks a rule of the format.
        CompatibilityError, TruncationError: as for a file.
        MemoryError: the rows do not fit in memory.
    """
    parts = {part: _part(state, name, part) for part in TABLE_PARTS}
    header = decode_header(parts.pop(_HEADER).tobytes())
    given = parts.pop(_ROWS)
    if given.dtype != np.uint8 or given.shape != (header.n_rows, header.format.stride):
        raise CorruptionError(
            f"packed table: {name}.rows has shape {given.shape} and dtype {given.dtype}; it must"
            f" be {(header.n_rows, header.format.stride)} and uint8"
        )
    memory = host_memory(max(given.nbytes, 1), device=device)
    rows = memory.numpy()[: given.nbytes].reshape(given.shape)
    rows[:] = given
    return make_table(header, rows, {part: array.copy() for part, array in parts.items()}, memory)


def _part(state: Mapping[str, Any], name: str, part: str) -> NDArray[Any]:
    try:
        return np.ascontiguousarray(state[f"{name}.{part}"])
    except KeyError:
        raise CorruptionError(f"packed table: {name}.{part} is missing") from None
