"""Lies of chunks of mode matches: the clauses L, and other clauses that apply inside of them."""

import struct

from frame_builder import (
    SMALL,
    BuiltFrame,
    Edit,
    Matches,
    Palette,
    Rans,
    Raw,
    Stored,
    build_frame,
    units_of_values,
)

from lying_frames.lie import DATA, add, appended, cut_to, set_at
from packhorse.layout import Mode

__all__ = ["matched"]

BYTES = units_of_values(60, 1, 9)
WIDE = b"".join(bytes((byte, byte & 1)) for byte in BYTES)


def matched(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Sixty U8, with all parts stored."""
    return build_frame(BYTES, codings=[Matches(**kwargs)], edit=edit)


def wide(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Sixty U16, with all parts stored."""
    return build_frame(WIDE, "U16", codings=[Matches(2, **kwargs)], edit=edit)


def of_one_match(run: int, length: int, distance: int) -> BuiltFrame:
    """Sixty numbers, of which a match gives some, whatever it says."""
    numbers = list(BYTES)
    given = numbers[:20] + numbers[30:]
    return matched(
        matches=((20, 10, 5),),
        edit_parts=lambda *_: (given, [distance], [run], [length - 1]),
    )


def counts(**changed: int) -> BuiltFrame:
    """Other counts than those of the parts."""
    names = ("n_literals", "n_matches", "n_run_bytes", "n_length_bytes")

    def edit(chunk: int, plane: int, stream: bytes) -> bytes:
        found = dict(zip(names, struct.unpack("<4I", stream[4:20]), strict=True)) | changed
        return stream[:4] + struct.pack("<4I", *found.values()) + stream[20:]

    return matched(edit)


LIES = {
    "mode matches in a frame of version 2": (
        "D1",
        lambda: SMALL["matches"]().lie(version=2),
        "unknown mode 8 in table row",
    ),
    "mode matches of split units": (
        "D2",
        lambda: build_frame(DATA, "U16", split=1, codings=[Raw(Mode.MATCHES, b""), Stored()]).lie(
            version=3
        ),
        "mode matches",
    ),
    "numbers of 0 bytes": ("L1", lambda: matched(set_at(0, 0)), "number_nbytes at byte offset 128"),
    "numbers of 3 bytes": ("L1", lambda: wide(set_at(0, 3)), "number_nbytes"),
    "numbers wider than units": ("L1", lambda: matched(set_at(0, 2)), "and at most 1"),
    "differences of 2": ("L2", lambda: matched(set_at(1, 2)), "differences at byte offset 129"),
    "a unit in front without differences": ("L2", lambda: matched(set_at(32, 1)), "before"),
    "a reserved byte at 2": ("L3", lambda: matched(set_at(2, 1)), "reserved bytes of matches"),
    "a reserved byte at 23": ("L3", lambda: matched(set_at(23, 1)), "reserved bytes of matches"),
    "a base of 256": ("L4", lambda: matched(set_at(25, 1)), "base at byte offset 152 is 256"),
    "a unit in front of 2^63": (
        "L4",
        lambda: matched(set_at(39, 128), differences=True),
        "before at byte offset 160",
    ),
    "61 literals": ("L5", lambda: counts(n_literals=61), "n_literals at byte offset 132"),
    "4 billion literals": ("L5", lambda: counts(n_literals=2**32 - 1), "n_literals"),
    "4 billion matches": ("L5", lambda: counts(n_matches=2**32 - 1), "n_matches"),
    "fewer runs than matches": ("L5", lambda: counts(n_run_bytes=0), "n_run_bytes"),
    "4 billion lengths": ("L5", lambda: counts(n_length_bytes=2**32 - 1), "n_length_bytes"),
    "no fields": ("L6", lambda: matched(cut_to(0)), "bytes of the fields of matches"),
    "fields cut": ("L6", lambda: matched(cut_to(39)), "bytes of the fields of matches"),
    "descriptors cut": ("L6", lambda: matched(cut_to(45)), "descriptors of a nested chunk"),
    "nested chunks cut": ("L6", lambda: matched(cut_to(-1)), "bytes of a nested chunk"),
    "a byte behind nested chunks": (
        "L6",
        lambda: matched(appended(b"\0")),
        "number of bytes behind the nested chunks",
    ),
    "zstd in a nested chunk": ("L7", lambda: matched(set_at(43, Mode.ZSTD)), "mode 4"),
    "matches in a nested chunk": ("L7", lambda: matched(set_at(43, Mode.MATCHES)), "mode 8"),
    "classes in a nested chunk of bytes": (
        "L7",
        lambda: matched(set_at(43, Mode.CLASSED_RANS)),
        "mode 5",
    ),
    "a descriptor of no units": ("L7", lambda: matched(set_at(44, 1), matches=()), "descriptors"),
    "a constant nested plane of 2 bytes": (
        "D3",
        lambda: matched(set_at(43, Mode.CONSTANT)),
        "length of a constant stream of the nested chunk",
    ),
    "a nested plane stored too short": (
        "D4",
        lambda: matched(lambda c, p, s: s[:40] + bytes([59]) + s[41:-1], matches=()),
        "length of a stored stream",
    ),
    "a nested palette of 5 bits": (
        "P1",
        lambda: matched(set_at(68, 5), matches=(), codings=[[Palette(4)]]),
        "code_bits",
    ),
    "nested rans of 8 lanes_log": (
        "R1",
        lambda: matched(set_at(68, 8), matches=(), codings=[[Rans()]]),
        "lanes_log",
    ),
    "runs that end early": (
        "L8",
        lambda: matched(edit_parts=lambda a, b, runs, c: (a, b, [*runs[:-1], 255], c)),
        "the bytes of runs",
    ),
    "lengths that end early": (
        "L8",
        lambda: matched(edit_parts=lambda a, b, c, lengths: (a, b, c, [*lengths[:-1], 255])),
        "the bytes of lengths",
    ),
    "a run beyond the literals": ("L9", lambda: of_one_match(51, 9, 5), "a run"),
    "a run beyond the numbers": (
        "L9",
        lambda: matched(
            matches=((20, 40, 5),),
            edit_parts=lambda *_: (list(BYTES[:58]), [5, 5], [20, 9], [31, 0]),
        ),
        "a run",
    ),
    "a length beyond the numbers": ("L9", lambda: of_one_match(20, 41, 5), "a length"),
    "a distance beyond the numbers": ("L9", lambda: of_one_match(20, 10, 21), "a distance"),
    "a distance of 4 billion": ("L9", lambda: of_one_match(20, 10, 2**32 - 1), "a distance"),
    "a distance before any number": ("L9", lambda: of_one_match(0, 10, 0), "a distance"),
    "literals left over": ("L9", lambda: of_one_match(20, 11, 5), "number of literals left"),
    "literals missing": ("L9", lambda: of_one_match(20, 9, 5), "number of literals left"),
}
for name, (clause, build, fragment) in LIES.items():
    add(clause, f"matches: {name}", build, fragment)
