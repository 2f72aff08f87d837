"""Section 6.8 of docs/format.md: a chunk as numbers, of which runs repeat earlier ones."""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import Mode
from packhorse.reference.words import Reader, equal, within, zero

__all__ = ["Nested", "decode_matches"]

_DISTANCE_NBYTES = 4
_NESTED_MODES = (Mode.STORED, Mode.CONSTANT, Mode.PALETTE, Mode.RANS)


class Nested(NamedTuple):
    """A chunk inside of a stream.

    Attributes:
        unit_nbytes: bytes of its units; they are split into bytes if there are several.
        n_units: how many units it has, at least one.
        streams: mode and length of each plane.
        data: the streams.
        offset: where they begin in the frame.
    """

    unit_nbytes: int
    n_units: int
    streams: tuple[tuple[Mode, int], ...]
    data: bytes
    offset: int


class _Head(NamedTuple):
    number_nbytes: int
    differences: int
    n_literals: int
    n_matches: int
    n_run_bytes: int
    n_length_bytes: int
    base: int
    before: int


def decode_matches(
    reader: Reader, n: int, unit_nbytes: int, decode_chunk: Callable[[Nested], bytes]
) -> bytes:
    """Decodes a chunk of `n` units.

    Args:
        reader: the stream.
        n: the number of units.
        unit_nbytes: bytes of a unit.
        decode_chunk: decodes a nested chunk.

    Returns:
        The bytes of the units.
    """
    head = _read_head(reader, n, unit_nbytes)
    parts = _read_parts(reader, head, decode_chunk)
    numbers = _join(*parts, n, reader.start)
    modulus = 1 << 8 * unit_nbytes
    units, unit = [], head.before
    for number in numbers:
        unit = (unit * head.differences + number + head.base) % modulus
        units.append(unit.to_bytes(unit_nbytes, "little"))
    return b"".join(units)


def _read_head(reader: Reader, n: int, unit_nbytes: int) -> _Head:
    start = reader.start
    fields = reader.take(layout.MATCH_DESCRIPTORS_OFFSET, "bytes of the fields of matches")
    number_nbytes, differences = fields[0], fields[1]
    if number_nbytes not in (1, 2, 4, 8) or number_nbytes > unit_nbytes:
        what = f"number_nbytes at byte offset {start} is {number_nbytes}"
        raise CorruptionError(f"{what}, allowed: 1, 2, 4 or 8, and at most {unit_nbytes}")
    within(differences, 0, 1, "differences", start + 1)
    zero(fields[2:4] + fields[20:24], "reserved bytes of matches", start + 2)
    n_literals, n_matches, n_runs, n_lengths = struct.unpack("<4I", fields[4:20])
    base, before = struct.unpack("<2Q", fields[24:40])
    most = (1 << 8 * unit_nbytes) - 1
    within(base, 0, most, "base", start + 24)
    within(before, 0, most if differences else 0, "before", start + 32)
    head = _Head(number_nbytes, differences, n_literals, n_matches, n_runs, n_lengths, base, before)
    within(head.n_literals, 0, n, "n_literals", start + 4)
    within(head.n_matches, 0, n - head.n_literals, "n_matches", start + 8)
    most = head.n_matches + n // layout.RUN_BYTE_MAX
    within(head.n_run_bytes, head.n_matches, most, "n_run_bytes", start + 12)
    within(head.n_length_bytes, head.n_matches, most, "n_length_bytes", start + 16)
    return head


def _read_parts(
    reader: Reader, head: _Head, decode_chunk: Callable[[Nested], bytes]
) -> tuple[list[int], list[int], Iterator[int], Iterator[int]]:
    """Reads literals, distances, and the bytes of runs and of lengths."""
    shapes = [
        (head.number_nbytes, head.n_literals),
        (_DISTANCE_NBYTES, head.n_matches),
        (1, head.n_run_bytes),
        (1, head.n_length_bytes),
    ]
    rows = [_read_descriptors(reader, size, n) for size, n in shapes]
    parts = []
    for (size, n), streams in zip(shapes, rows, strict=True):
        offset = reader.offset
        data = reader.take(sum(nbytes for _, nbytes in streams), "bytes of a nested chunk")
        units = decode_chunk(Nested(size, n, streams, data, offset)) if n else b""
        parts.append(
            [int.from_bytes(units[i : i + size], "little") for i in range(0, len(units), size)]
        )
    equal(len(reader.rest()), 0, "number of bytes behind the nested chunks", reader.offset)
    literals, distances, runs, lengths = parts
    return literals, distances, iter(runs), iter(lengths)


def _read_descriptors(reader: Reader, unit_nbytes: int, n: int) -> tuple[tuple[Mode, int], ...]:
    offset = reader.offset
    words = struct.unpack(
        f"<{unit_nbytes}I", reader.take(4 * unit_nbytes, "descriptors of a nested chunk")
    )
    if n == 0:
        zero(b"".join(word.to_bytes(4, "little") for word in words), "descriptors", offset)
        return ()
    allowed = [*_NESTED_MODES, *([Mode.CLASSED_RANS] if unit_nbytes > 1 else [])]
    streams = []
    for word in words:
        mode = word >> layout.STREAM_NBYTES_BITS
        if mode not in allowed:
            raise CorruptionError(f"mode {mode} at byte offset {offset} is not for nested chunks")
        streams.append((Mode(mode), word & layout.STREAM_NBYTES_MASK))
    return tuple(streams)


def _take_run(run_bytes: Iterator[int], what: str, offset: int) -> int:
    run = 0
    for byte in run_bytes:
        run += byte
        if byte != layout.RUN_BYTE_MAX:
            return run
    raise CorruptionError(f"the bytes of {what} in the stream at byte offset {offset} end early")


def _join(
    literals: list[int],
    distances: list[int],
    runs: Iterator[int],
    lengths: Iterator[int],
    n: int,
    offset: int,
) -> list[int]:
    """Puts `n` numbers together."""
    numbers: list[int] = []
    taken, distance = 0, 1
    for given in distances:
        run, length = _take_run(runs, "runs", offset), _take_run(lengths, "lengths", offset) + 1
        within(run, 0, min(len(literals) - taken, n - len(numbers)), "a run", offset)
        numbers += literals[taken : taken + run]
        taken += run
        distance = given or distance
        within(distance, 1, len(numbers), "a distance", offset)
        within(length, 1, n - len(numbers), "a length", offset)
        for _ in range(length):
            numbers.append(numbers[-distance])
    equal(len([*runs, *lengths]), 0, "number of bytes left of runs and lengths", offset)
    equal(len(literals) - taken, n - len(numbers), "number of literals left", offset)
    return numbers + literals[taken:]
