"""Section 6.7 of docs/format.md: a few units of a chunk as steps from those of a base.

The numbers of a stream are bits of one long integer here, the first bit its lowest. Classes are
lists of places in the chunk, so a rank is an index.
"""

from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import DType, Split
from packhorse.reference.delta import order, unit_of
from packhorse.reference.words import Reader, equal, within, zero

__all__ = ["decode_sparse_delta"]


class _Class(NamedTuple):
    n_changes: int
    gap_shift: int
    run_shift: int
    size_shift: int


class _Numbers:
    """Takes numbers from a string of bits."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._bits, self._n_left, self._offset = (
            int.from_bytes(data, "little"),
            8 * len(data),
            offset,
        )

    def bits(self, n: int) -> int:
        """Takes the next `n` bits, the first of which is the lowest."""
        if n > self._n_left:
            where = f"but the numbers at byte offset {self._offset} have {self._n_left} left"
            raise CorruptionError(f"a number takes {n} more bits, {where}")
        taken = self._bits & ((1 << n) - 1)
        self._bits >>= n
        self._n_left -= n
        return taken

    def number(self, shift: int, full_bits: int) -> int:
        """Takes `R(shift, full_bits)` of the page."""
        for zeros in range(layout.MAX_SPARSE_ZEROS):
            if self.bits(1):
                return zeros << shift | self.bits(shift)
        return self.bits(full_bits)

    def check_end(self) -> None:
        """Checks that less than a byte is left, and that its bits are zero."""
        within(self._n_left, 0, 7, "number of unused bits", self._offset)
        equal(self._bits, 0, "bits left over behind the numbers", self._offset)


def decode_sparse_delta(reader: Reader, dtype: DType, base: list[int]) -> bytes:
    """Decodes a chunk, given the units of its base, to the bytes of its units."""
    thresholds, classes = _read_head(reader, dtype)
    within(sum(fields.n_changes for fields in classes), 0, len(base), "n_changes", reader.start)
    of_unit = [sum(t <= _size(b, dtype) for t in thresholds) for b in base]
    at = reader.offset
    numbers = _Numbers(reader.rest(), at)
    units = list(base)
    for k, fields in enumerate(classes):
        members = [place for place, c in enumerate(of_unit) if c == k]
        places, signs = _read_places(numbers, fields, members, reader.start)
        sizes = _read_sizes(numbers, fields, dtype, reader.start)
        for place, is_negative, size in zip(places, signs, sizes, strict=True):
            y = order(base[place], dtype) + (-size if is_negative else size)
            units[place] = unit_of(y % (1 << 8 * dtype.unit_nbytes), dtype)
    numbers.check_end()
    return b"".join(unit.to_bytes(dtype.unit_nbytes, "little") for unit in units)


def _size(b: int, dtype: DType) -> int:
    """Returns the page's `a(b)`."""
    half = 1 << (8 * dtype.unit_nbytes - 1)
    if Split.FLOAT in dtype.splits:
        return b % half
    return b if b < half else 2 * half - 1 - b


def _read_head(reader: Reader, dtype: DType) -> tuple[list[int], list[_Class]]:
    w = 8 * dtype.unit_nbytes
    n_classes = reader.take(1, "bytes of n_classes")[0]
    within(n_classes, 1, layout.MAX_SPARSE_CLASSES, "n_classes", reader.start)
    at = reader.offset
    thresholds = [
        int.from_bytes(reader.take(dtype.unit_nbytes, "bytes of a threshold"), "little")
        for _ in range(n_classes - 1)
    ]
    within(max(thresholds, default=0), 0, (1 << (w - 1)) - 1, "a threshold", at)
    equal(thresholds, sorted(thresholds), "thresholds", at)
    return thresholds, [_read_class(reader, w) for _ in range(n_classes)]


def _read_class(reader: Reader, w: int) -> _Class:
    at = reader.offset
    data = reader.take(layout.SPARSE_CLASS_NBYTES, "bytes of a class")
    fields = _Class(int.from_bytes(data[:3], "little"), *data[3:])
    if fields.n_changes == 0:
        zero(data, "shifts of a class without changes", at)
        return fields
    within(fields.gap_shift, 0, layout.MAX_SPARSE_COUNT_SHIFT, "gap_shift", at + 3)
    if fields.run_shift == layout.SPARSE_NO_SIZES:
        equal(fields.size_shift, 0, "size_shift without sizes", at + 5)
    elif fields.run_shift != layout.SPARSE_EVERY_SIZE:
        within(fields.run_shift, 0, layout.MAX_SPARSE_COUNT_SHIFT, "run_shift", at + 4)
    most = min(w - 1, layout.MAX_SPARSE_SIZE_SHIFT)
    within(fields.size_shift, 0, most, "size_shift", at + 5)
    return fields


def _read_places(
    numbers: _Numbers, fields: _Class, members: list[int], at: int
) -> tuple[list[int], list[int]]:
    """Returns the places of the changed units of a class, and whether their steps are negative."""
    places, signs, rank = [], [], 0
    for _ in range(fields.n_changes):
        number = numbers.number(fields.gap_shift + 1, layout.SPARSE_COUNT_BITS)
        rank += number >> 1
        within(rank, 0, len(members) - 1, "a rank", at)
        places.append(members[rank])
        signs.append(number & 1)
        rank += 1
    return places, signs


def _read_sizes(numbers: _Numbers, fields: _Class, dtype: DType, at: int) -> list[int]:
    """Returns the sizes of the steps of a class."""
    n, w = fields.n_changes, 8 * dtype.unit_nbytes
    sizes: list[int] = []
    has_runs = fields.run_shift < layout.SPARSE_NO_SIZES
    while len(sizes) < n:
        left = n - len(sizes)
        run = left
        if fields.run_shift == layout.SPARSE_EVERY_SIZE:
            run = 0
        elif has_runs:
            run = numbers.number(fields.run_shift, layout.SPARSE_COUNT_BITS)
            within(run, 0, left, "a run", at)
        sizes += [1] * run
        if run < left:
            size = numbers.number(fields.size_shift, w) + 1 + has_runs
            within(size, 1, (1 << w) - 1, "a size", at)
            sizes.append(size)
    return sizes
