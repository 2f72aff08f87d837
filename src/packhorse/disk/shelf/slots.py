"""Chunks of tensors that a transaction has changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.disk.shelf.arrays import Array

__all__ = ["Slot", "content_of", "nbytes_of"]


@dataclass(slots=True)
class Slot:
    """A chunk that was changed.

    Attributes:
        data: its elements, if they are not packed.
        is_own: whether the memory of `data` belongs to the transaction, and not to the caller.
        chunk: the number that its packed form has; 0 if all elements are zero.
        patch: the rows that were changed, by their places, if only these are kept.
        base: the number of the stored chunk that the other rows of a patch are in.
        base_nbytes: of the frame of that chunk.
    """

    data: Array | None
    is_own: bool = True
    chunk: int = 0
    patch: dict[int, Array] | None = None
    base: int = 0
    base_nbytes: int = 0


def content_of(slot: Slot) -> Array:
    """What is packed of a chunk; of a patch, its rows in order, as rows and columns."""
    if slot.data is not None:
        return slot.data
    assert slot.patch is not None
    if len(slot.patch) == 1:
        (row,) = slot.patch.values()
        return row[None]
    rows = [slot.patch[place] for place in sorted(slot.patch)]
    return np.concatenate(rows).reshape(len(rows), -1)


def nbytes_of(slot: Slot) -> int:
    """The bytes of what is packed of a chunk."""
    if slot.data is not None:
        return slot.data.nbytes
    return sum([row.nbytes for row in slot.patch.values()]) if slot.patch else 0
