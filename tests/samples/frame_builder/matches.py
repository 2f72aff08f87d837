"""Chunks of mode matches (docs/format.md, section 6.8)."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from frame_builder.codings import Around, Coding, Stored
from frame_builder.frames import build_chunk, descriptor
from frame_builder.planes import split_planes
from packhorse.layout import DTYPE_BY_NAME, Mode

__all__ = ["Match", "Matches"]

INTEGERS = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
Match = tuple[int, int, int]  # run, length, distance; a distance of 0 repeats the one before


@dataclass(frozen=True)
class Matches(Coding):
    """Attributes:
    number_nbytes: bytes of a number.
    differences: whether numbers are differences.
    base: taken from each.
    before: the unit in front of the first one.
    matches: those to use; None to find every run of two numbers or more.
    codings: of the planes of literals, of distances, and of the bytes of runs and lengths; those
        that are missing are stored.
    edit_parts: gets the four lists of numbers, and returns those to write instead.
    """

    number_nbytes: int = 1
    differences: bool = False
    base: int = 0
    before: int = 0
    matches: Sequence[Match] | None = None
    codings: Sequence[Sequence[Coding]] = field(default_factory=tuple)
    edit_parts: Callable[..., Sequence[list[int]]] = lambda *parts: parts
    mode = Mode.MATCHES

    def encode(self, plane: bytes, around: Around) -> bytes:
        size = DTYPE_BY_NAME[around.dtype].unit_nbytes
        numbers = self.numbers(plane, size)
        found = find(numbers) if self.matches is None else self.matches
        sizes = (self.number_nbytes, 4, 1, 1)
        parts = self.edit_parts(*cut(numbers, found))
        rows, streams = b"", b""
        for part, nbytes, codings in zip(parts, sizes, self.of_parts(sizes), strict=True):
            text = b"".join(number.to_bytes(nbytes, "little") for number in part)
            descriptors, coded = nested(text, nbytes, codings)
            rows += descriptors
            streams += coded
        counts = [len(part) for part in parts]
        fields = struct.pack("<BBH4II", self.number_nbytes, self.differences, 0, *counts, 0)
        return fields + struct.pack("<QQ", self.base, self.before) + rows + streams

    def numbers(self, plane: bytes, size: int) -> list[int]:
        """The numbers of the units."""
        units = [int.from_bytes(plane[i : i + size], "little") for i in range(0, len(plane), size)]
        previous = [self.before, *units] if self.differences else [0] * len(units)
        modulus = 1 << 8 * size
        return [(unit - p - self.base) % modulus for unit, p in zip(units, previous, strict=False)]

    def of_parts(self, sizes: Sequence[int]) -> list[Sequence[Coding]]:
        """The codings of the four parts."""
        given = [*self.codings, *[()] * (4 - len(self.codings))]
        return [row or [Stored()] * size for row, size in zip(given, sizes, strict=True)]


def find(numbers: list[int]) -> list[Match]:
    """The longest run at each place, from as near as possible."""
    found, at, start, last = [], 0, 0, 1
    while at < len(numbers):
        best = (0, 0)
        for distance in range(1, at + 1):
            length = 0
            while at + length < len(numbers) and (
                numbers[at + length] == numbers[at + length - distance]
            ):
                length += 1
            best = max(best, (length, -distance))
        length, distance = best[0], -best[1]
        if length < 2:
            at += 1
            continue
        found.append((at - start, length, 0 if distance == last else distance))
        at = start = at + length
        last = distance
    return found


def cut(numbers: list[int], matches: Sequence[Match]) -> tuple[list[int], ...]:
    """Literals, distances, and the bytes of runs and lengths."""
    literals: list[int] = []
    runs: list[int] = []
    lengths: list[int] = []
    at = 0
    for run, length, _ in matches:
        literals += numbers[at : at + run]
        runs += [255] * (run // 255) + [run % 255]
        lengths += [255] * ((length - 1) // 255) + [(length - 1) % 255]
        at += run + length
    return literals + numbers[at:], [distance for _, _, distance in matches], runs, lengths


def nested(units: bytes, size: int, codings: Sequence[Coding]) -> tuple[bytes, bytes]:
    """Descriptors and streams of a nested chunk."""
    if not units:
        return bytes(4 * size), b""
    row = DTYPE_BY_NAME[INTEGERS[size]]
    planes = split_planes(units, row, 1 if size > 1 else 0)
    streams = build_chunk(planes, codings, Around(dtype=row.name, units=units), carry=True)
    order = sorted(range(size), key=lambda p: (codings[p].mode != Mode.STORED, p))
    descriptors = map(descriptor, codings, streams)
    return b"".join(descriptors), b"".join(streams[p] for p in order)
