"""Packed tables as arrays by name, for state dicts, pickles and copies, and back to tables.

The names are those of docs/format.md, section 14. Rows that were changed and that the format cannot
hold are three arrays more: their numbers, the rows, and a checksum of each. What comes from
elsewhere is checked, as a file would be.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.content import crc32c
from packhorse.codecs.table_plan import GRANULES, TableWay
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
from packhorse.gpu.host_memory import host_memory
from packhorse.host.changed_rows import ChangedRows
from packhorse.host.table import PackedTable
from packhorse.layout import DTYPE_BY_NAME
from packhorse.table_layout import TableFormat

if TYPE_CHECKING:
    import torch

__all__ = ["drop_table", "holds_table", "join_table", "split_table"]

_HEADER, _ROWS, _CRCS = "table", "rows", "crcs"
_EXCEPTIONS = ("marks", "exception_starts", "exception_columns", "exception_elements")
_CHANGED = ("changed_ids", "changed_rows", "changed_crcs")
_NAMES = (_HEADER, _ROWS, *_EXCEPTIONS, _CRCS, *_CHANGED)
_Arrays = dict[str, NDArray[Any]]


def split_table(table: PackedTable, name: str) -> _Arrays:
    """The arrays of a table by name: `name.rows` and so on. The rows are not copied.

    Args:
        table: the table; do not write to its arrays.
        name: what all names begin with.
    """
    arrays, format = table.arrays, table.way.format
    header = TableHeader(
        *(table.dtype, format, len(table), len(arrays.exception_starts) - 1),
        len(arrays.exception_columns),
    )
    changed = table.changed_rows
    code = DTYPE_BY_NAME[table.dtype].code
    parts: _Arrays = {
        _HEADER: np.frombuffer(encode_header(header, code), np.uint8).copy(),
        _ROWS: arrays.rows,
        **{each: getattr(arrays, each) for each in _EXCEPTIONS},
        _CRCS: checksums(arrays, format),
        **dict(zip(_CHANGED, (changed.numbers, changed.rows, _crcs_of(changed)), strict=True)),
    }
    return {f"{name}.{part}": array for part, array in parts.items()}


def holds_table(state: Mapping[str, Any], name: str) -> bool:
    """Whether a mapping has an array of the table `name`."""
    return any(f"{name}.{part}" in state for part in _NAMES)


def drop_table(state: MutableMapping[str, Any], name: str) -> None:
    """Removes the arrays of the table `name` from a mapping."""
    for part in _NAMES:
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
    parts = {part: _part(state, name, part) for part in _NAMES}
    header = decode_header(parts[_HEADER].tobytes())
    marks = parts["marks"]
    exceptions: tuple[Any, ...] = tuple(parts[each] for each in _EXCEPTIONS[1:])
    arrays = TableArrays(parts[_ROWS], marks, rank_marks(marks), *exceptions)
    check_arrays(header, arrays, parts[_CRCS])
    memory = host_memory(max(arrays.rows.nbytes, 1), device=device)
    rows = memory.numpy()[: arrays.rows.nbytes].reshape(arrays.rows.shape)
    rows[:] = arrays.rows
    others: tuple[Any, ...] = tuple(array.copy() for array in arrays[1:])
    copied = TableArrays(rows, *others)
    table = PackedTable(header.dtype, _way_of(header.format, copied), copied, memory)
    _keep_changed(table, parts, name)
    return table


def _crcs_of(changed: ChangedRows) -> NDArray[np.uint32]:
    return np.array([crc32c(changed.numbers), crc32c(changed.rows)], np.uint32)


def _keep_changed(table: PackedTable, parts: _Arrays, name: str) -> None:
    ids, rows, crcs = (parts[part] for part in _CHANGED)
    expected = (ids.size, table.way.format.row_nbytes)
    if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != np.uint8 or rows.shape != expected:
        raise CorruptionError(f"packed table: {name}.changed_rows are not those of changed_ids")
    if ids.size and (ids[0] < 0 or ids[-1] >= len(table) or (np.diff(ids) <= 0).any()):
        raise CorruptionError(f"packed table: {name}.changed_ids do not ascend within the table")
    table.changed_rows.keep(ids, rows)
    if not np.array_equal(crcs, _crcs_of(table.changed_rows)):
        raise CorruptionError(f"packed table: {name}.changed_rows do not match their checksum")


def _part(state: Mapping[str, Any], name: str, part: str) -> NDArray[Any]:
    try:
        array = np.ascontiguousarray(state[f"{name}.{part}"])
    except KeyError:
        raise CorruptionError(f"packed table: {name}.{part} is missing") from None
    if part == "marks" and (array.dtype != np.uint32 or array.ndim != 1):
        # Ranks are made of marks before `check_arrays` looks at these.
        raise CorruptionError(f"packed table: {name}.marks is no vector of u32")
    return array


def _way_of(format: TableFormat, arrays: TableArrays) -> TableWay:
    pulled = {
        granule: float(-(-format.content_nbytes // granule) * granule) for granule in GRANULES
    }
    share = arrays.fast_nbytes / max(len(arrays.rows), 1)
    return TableWay(format, f"{format.mode.name.lower()} rows", pulled, share)
