"""Chunks of mode sparse delta (docs/format.md, section 6.7)."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from frame_builder.codings import Around, Coding
from frame_builder.deltas import distances, integers, lowest_first, to_bytes
from packhorse.layout import DTYPE_BY_NAME, DType, Mode, Split

__all__ = ["Sparse"]

EACH, ONES = 255, 254


@dataclass(frozen=True)
class Sparse(Coding):
    """Attributes:
    thresholds: between the classes.
    gap_shifts, run_shifts, size_shifts: of class after class; those that are missing are 3, 255
        and 2. Classes without changes ignore theirs.
    always_full: write every number in full.
    edit_bits: gets the numbers as 0s and 1s, and returns those to write instead.
    """

    thresholds: tuple[int, ...] = ()
    gap_shifts: tuple[int, ...] = ()
    run_shifts: tuple[int, ...] = ()
    size_shifts: tuple[int, ...] = ()
    always_full: bool = False
    edit_bits: Callable[[str], str] = str
    mode = Mode.SPARSE_DELTA

    def encode(self, plane: bytes, around: Around) -> bytes:
        row = DTYPE_BY_NAME[around.dtype]
        n_classes = len(self.thresholds) + 1
        steps, classes = distances(around, row), self.classes(around.base, row)
        fields, bits = b"", ""
        for c in range(n_classes):
            of_class = [step for step, k in zip(steps, classes, strict=True) if k == c]
            shifts = [
                (*given, *[usual] * n_classes)[c]
                for given, usual in (
                    (self.gap_shifts, 3),
                    (self.run_shifts, EACH),
                    (self.size_shifts, 2),
                )
            ]
            if shifts[1] == ONES:
                shifts[2] = 0
            n_changes = len([step for step in of_class if step])
            fields += struct.pack("<I", n_changes)[:3]
            fields += bytes(shifts if n_changes else 3)
            bits += self.gaps(of_class, shifts[0])
            bits += self.sizes([step for step in of_class if step], *shifts[1:], row)
        cuts = b"".join(t.to_bytes(row.unit_nbytes, "little") for t in self.thresholds)
        return bytes([n_classes]) + cuts + fields + to_bytes(self.edit_bits(bits))

    def classes(self, base: bytes, row: DType) -> list[int]:
        """The class of each unit."""
        half = 1 << (8 * row.unit_nbytes - 1)
        if Split.FLOAT in row.splits:
            sizes = [b & (half - 1) for b in integers(base, row)]
        else:
            sizes = [max(b, ~b) for b in integers(base, row, signed=True)]
        return [len([t for t in self.thresholds if t <= size]) for size in sizes]

    def gaps(self, steps: list[int], shift: int) -> str:
        """The gaps and signs of a class."""
        bits, gap = "", 0
        for step in steps:
            if step:
                bits += self.number(2 * gap + (step < 0), shift + 1, 22)
                gap = 0
            else:
                gap += 1
        return bits

    def sizes(self, steps: list[int], run_shift: int, size_shift: int, row: DType) -> str:
        """The sizes of the steps of a class."""
        w = 8 * row.unit_nbytes
        if run_shift == ONES:
            assert all(abs(step) == 1 for step in steps)
            return ""
        if run_shift == EACH:
            return "".join(self.number(abs(step) - 1, size_shift, w) for step in steps)
        bits, run = "", 0
        for step in steps:
            if abs(step) == 1:
                run += 1
                continue
            bits += self.number(run, run_shift, 22) + self.number(abs(step) - 2, size_shift, w)
            run = 0
        return bits + (self.number(run, run_shift, 22) if run else "")

    def number(self, x: int, shift: int, full_bits: int) -> str:
        zeros = x >> shift
        if zeros < 24 and not self.always_full:
            return "0" * zeros + "1" + lowest_first(x, shift)
        return "0" * 24 + lowest_first(x, full_bits)
