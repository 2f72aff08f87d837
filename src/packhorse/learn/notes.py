"""What only a fit needs that goes on after an interruption: its stack, and arrays of it.

The arrays lie in tensors of their own, and the stack, without them, is JSON:

    NAME/state     the stack, and what the fit depends on
    NAME/cuts      directions that cut samples, a row for each cut
    NAME/sums      float64: the sum of the points of each piece
    NAME/bases     of cells above pieces, before their nodes are added
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from packhorse.learn.bases import Array
from packhorse.learn.cells import Cuts, leaves_of
from packhorse.learn.nodes import read_parent
from packhorse.learn.tensors import Shelf
from packhorse.learn.writing import Writer

__all__ = ["Item", "Notes", "cut_parts", "read_stack"]

_ARRAYS = {"direction", "sum", "basis", "known"}
Item: TypeAlias = dict[str, Any]


class Notes:
    """Writes them."""

    def __init__(self, name: str, writer: Writer) -> None:
        """Writes nothing yet.

        Args:
            name: the beginning of the names of the tensors.
            writer: what writes them.
        """
        self._name, self._writer = name, writer
        self.n_cuts = self.n_bases = 0

    def create(self, width: int, dtype: np.dtype[Any]) -> None:
        """Makes the tensors.

        Args:
            width: columns of X.
            dtype: of directions.
        """

        def make(shelf: Shelf) -> None:
            shelf.create(f"{self._name}/cuts", (0, width), dtype)
            shelf.create(f"{self._name}/sums", (0, width), np.float64)
            shelf.create(f"{self._name}/bases", (0, width), dtype)

        self._writer.note(make)

    def keep_cuts(self, cuts: Cuts) -> None:
        """Keeps the directions of new cuts, and room for the sums of their pieces.

        Args:
            cuts: the tree, whose inner nodes get a "row".
        """
        directions: list[Array] = []
        self._number(cuts, directions)
        pieces = len(leaves_of(cuts))
        rows = np.stack(directions)

        def append(shelf: Shelf) -> None:
            shelf[f"{self._name}/cuts"].append(rows)
            shelf[f"{self._name}/sums"].append(np.zeros((pieces, rows.shape[1])))

        self._writer.note(append)

    def _number(self, cuts: Cuts, directions: list[Array]) -> None:
        if "low" not in cuts:
            return
        directions.append(cuts["direction"])
        cuts["row"] = self.n_cuts
        self.n_cuts += 1
        for half in ("low", "high"):
            self._number(cuts[half], directions)

    def keep_sums(self, pieces: Sequence[Cuts]) -> None:
        """Keeps the sums of pieces.

        Args:
            pieces: those of one tree.
        """
        sums, first = np.stack([piece["sum"] for piece in pieces]), pieces[0]["part"]

        def put(shelf: Shelf) -> None:
            shelf[f"{self._name}/sums"][first : first + len(sums)] = sums

        self._writer.note(put)

    def keep_basis(self, cuts: Cuts) -> None:
        """Keeps the basis of a cell above pieces.

        Args:
            cuts: the cell, which gets the place of its "rows".
        """
        basis = cuts["basis"]
        cuts["rows"] = [self.n_bases, self.n_bases + len(basis)]
        self.n_bases += len(basis)
        if len(basis):
            self._writer.note(lambda shelf: shelf[f"{self._name}/bases"].append(basis))

    def saved(self, stack: Sequence[Item]) -> list[Item]:
        """A stack without arrays, as values of its own.

        Args:
            stack: the items.

        Returns:
            What JSON can keep.
        """
        return [_without_arrays(item) for item in stack]


def _without_arrays(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_arrays(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _ARRAYS
    }


def cut_parts(shelf: Shelf, name: str, stack: Sequence[Item]) -> None:
    """Removes the points that were moved after the stack was kept.

    Args:
        shelf: where the tensors are.
        name: the beginning of their names.
        stack: the items.
    """
    for item in stack:
        for piece in leaves_of(item["pieces"]) if "pieces" in item else ():
            shelf[f"{name}/part-{piece['part']}"].resize(piece["n"])


def read_stack(shelf: Shelf, name: str, saved: Sequence[Item]) -> list[Item]:
    """The items of a fit that was interrupted, with their arrays.

    Args:
        shelf: where the tensors are.
        name: the beginning of their names.
        saved: the items without arrays.

    Returns:
        The stack.
    """
    for item in saved:
        parent = item["parent"]
        item["known"] = read_parent(shelf, name, parent) if parent >= 0 else None
        for tree in ("cuts", "pieces"):
            if tree in item:
                _read_arrays(shelf, name, item[tree])
    return list(saved)


def _read_arrays(shelf: Shelf, name: str, cuts: Cuts) -> None:
    if "row" in cuts:
        cuts["direction"] = np.asarray(shelf[f"{name}/cuts"][cuts["row"]])
    if "rows" in cuts:
        start, stop = cuts["rows"]
        cuts["basis"] = np.asarray(shelf[f"{name}/bases"][start:stop])
    if cuts.get("part") is not None:
        cuts["sum"] = np.asarray(shelf[f"{name}/sums"][cuts["part"]])
    for half in ("low", "high"):
        if half in cuts:
            _read_arrays(shelf, name, cuts[half])
