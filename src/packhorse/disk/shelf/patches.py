"""Patches: chunks of which few rows are changed, so that only these rows are packed.

A patch is begun from the committed chunk. If that is a patch itself, the new one takes over its
rows, because a patch needs a chunk that needs no other.
"""

from __future__ import annotations

from packhorse.disk.shelf.cache import Cache
from packhorse.disk.shelf.records import Pointer, TensorRecord
from packhorse.disk.shelf.slots import Slot
from packhorse.disk.shelf.unpacking import patch_rows
from packhorse.disk.shelf.versions import State
from packhorse.errors import CompatibilityError, CorruptionError, blaming
from packhorse.layout import DTYPE_BY_NAME

__all__ = ["begin_patches", "most_rows"]

_ROWS_OF_PATCH = 4  # at most one row in so many is in a patch


def most_rows(record: TensorRecord) -> int:
    """How many rows a patch of a chunk of a tensor may have; 0 if it may have no patches."""
    is_plain = record.base is None and DTYPE_BY_NAME[record.dtype].bits >= 8
    return record.grid.rows_per_chunk // _ROWS_OF_PATCH if is_plain else 0


def begin_patches(
    state: State, cache: Cache, record: TensorRecord, n_rows: dict[int, int], label: str
) -> dict[int, Slot]:
    """Patches of committed chunks that have no changes yet, with the rows that the chunks are
    patches of themselves.

    Args:
        state: the newest committed state.
        cache: has the rows of patches.
        record: the tensor.
        n_rows: how many rows will be added, by the numbers of the chunks.
        label: the tensor, for messages.

    Returns:
        The patches; none for a chunk of zeros, and for one whose patch would have too many rows.

    Raises:
        CorruptionError: what is stored is damaged; the message names the chunk.
    """
    most, begun = most_rows(record), {}
    pointers = state.pointers(record, list(n_rows), label)
    for (number, n), pointer in zip(n_rows.items(), pointers, strict=True):
        if not pointer.chunk:
            continue
        try:
            slot = _begin(state, cache, record, pointer, most - n)
        except (CorruptionError, CompatibilityError):
            with blaming(f"{label}: chunk {number}, stored as {pointer.chunk}"):
                raise
        if slot is not None:
            begun[number] = slot
    return begun


def _begin(
    state: State, cache: Cache, record: TensorRecord, pointer: Pointer, most: int
) -> Slot | None:
    """A patch of a chunk, with at most so many rows; None if it would have more."""
    found = state.chunk(pointer.chunk)
    if found.places is None:
        return Slot(None, patch={}, base=pointer.chunk, base_nbytes=pointer.nbytes)
    if len(found.places) > most:
        return None
    rows = cache.take_rows(pointer.chunk)
    if rows is None:
        rows = patch_rows(record, found)
    patch = dict(zip(found.places, rows, strict=True))
    others = pointer.nbytes - len(found.frame)
    return Slot(None, patch=patch, base=found.base, base_nbytes=others)
