"""Lies of chunks of mode sparse delta: the clauses N, and other clauses that apply to the mode."""

from frame_builder import (
    DELTAS,
    Base,
    BuiltFrame,
    Edit,
    Raw,
    Sparse,
    Stored,
    build_frame,
    units_of_values,
)

from lying_frames.lie import DATA, add, appended, cut_to, set_at
from packhorse.layout import Mode

__all__ = ["sparse"]

BASE = Base(DATA, "BF16")
THRESHOLDS = (9000, 20000)


def sparse(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Thirty BF16 in three classes, as "sparse"; the stream starts at byte 128 of the frame."""
    how = Sparse(**{"thresholds": THRESHOLDS, "run_shifts": (0, 2, 255), **kwargs})
    return DELTAS["sparse"](codings=[how], edit=edit)


def one_step(bits: str, *fields: int, dtype: str = "U8", n: int = 40) -> BuiltFrame:
    """A chunk of one class, whose fields and numbers are given: n_changes (one byte), gap_shift,
    run_shift and size_shift."""
    data = units_of_values(n, 1 if dtype == "U8" else 8, 9)
    return build_frame(
        data,
        dtype,
        codings=[Sparse(edit_bits=lambda _: bits)],
        base=Base(data, dtype),
        edit=lambda chunk, plane, stream: (
            b"\1" + bytes((fields[0], 0, 0, *fields[1:])) + stream[7:]
        ),
    )


def of_version(version: int) -> BuiltFrame:
    return DELTAS["sparse"]().lie(version=version)


TABLE_LIES = {
    "mode sparse delta without a base": (
        "D2",
        lambda: build_frame(DATA, "BF16", split=2, codings=[Raw(Mode.SPARSE_DELTA, b"")]),
        "mode sparse_delta",
    ),
    "mode sparse delta behind plane 0": (
        "D2",
        lambda: build_frame(
            DATA, "BF16", split=2, codings=[Stored(), Raw(Mode.SPARSE_DELTA, b"")], base=BASE
        ).lie(version=2),
        "mode sparse_delta in table row at byte offset 88",
    ),
    "mode sparse delta in a frame of version 1": (
        "D1",
        lambda: of_version(1),
        "unknown mode 7 in table row at byte offset 88 of a frame of version 1",
    ),
    "a plane beside mode sparse delta": (
        "E9",
        lambda: DELTAS["sparse"]().patch(96, (1 << 24 | 1).to_bytes(4, "little")),
        "descriptors beside mode delta",
    ),
}
for name, (clause, build, fragment) in TABLE_LIES.items():
    add(clause, name, build, fragment)

STREAM_LIES = {  # edits of the stream, or other arguments of the coding
    "no classes": ("N1", set_at(0, 0), {}, "n_classes at byte offset 128 is 0, allowed: 1 to 8"),
    "9 classes": ("N1", set_at(0, 9), {}, "n_classes at byte offset 128 is 9"),
    "descending thresholds": ("N2", set_at(1, 0xFF, 0x7F), {}, "thresholds at byte offset 129"),
    "a threshold with the top bit": (
        "N2",
        set_at(3, 0, 0x80),
        {},
        "a threshold at byte offset 129 is 32768, allowed: 0 to 32767",
    ),
    "a gap_shift of 22": ("N4", set_at(8, 22), {}, "gap_shift at byte offset 136 is 22"),
    "a run_shift of 22": ("N4", set_at(9, 22), {}, "run_shift at byte offset 137 is 22"),
    "a run_shift of 253": ("N4", set_at(9, 253), {}, "run_shift at byte offset 137 is 253"),
    "a size_shift of 16": ("N4", set_at(10, 16), {}, "size_shift at byte offset 138 is 16"),
    "a size_shift without sizes": (
        "N3",
        set_at(9, 254, 1),
        {},
        "size_shift without sizes at byte offset 138",
    ),
    "shifts of no changes": (
        "N3",
        set_at(5, 0, 0, 0),
        {},
        "shifts of a class without changes at byte offset 133",
    ),
    "31 changes": ("N5", set_at(5, 31), {}, "n_changes at byte offset 128 is"),
    "16 million changes": ("N5", set_at(5, 255, 255, 255), {}, "n_changes at byte offset 128"),
    "no stream": ("N6", cut_to(0), {}, "bytes of n_classes at byte offset 128"),
    "thresholds cut": ("N6", cut_to(4), {}, "bytes of a threshold"),
    "classes cut": ("N6", cut_to(22), {}, "bytes of a class at byte offset 145"),
    "no numbers": ("N6", cut_to(23), {}, "more bits, but the numbers at byte offset 151 have 0"),
    "numbers cut": ("N6", cut_to(-1), {}, "more bits, but the numbers at byte offset 151 have"),
    "numbers that end in zeros": (
        "N6",
        None,
        {"edit_bits": lambda bits: bits[:-8] + "0" * 8},
        "more bits, but the numbers",
    ),
    "a byte too many": ("N10", appended(b"\0"), {}, "number of unused bits at byte offset 151"),
    "a bit too many": (
        "N10",
        None,
        {"edit_bits": lambda bits: bits + "0" * (-len(bits) % 8 - 1) + "1"},
        "bits left over behind the numbers",
    ),
}
for name, (clause, edit, kwargs, fragment) in STREAM_LIES.items():
    add(clause, f"sparse: {name}", lambda e=edit, k=kwargs: sparse(e, **k), fragment)

NUMBER_LIES = {
    # gap_shift 3: a number of 80 is five zeros, a one, and four bits.
    "a rank of 40": ("N7", lambda: one_step("000001" + "0000", 1, 3, 254, 0), "a rank at byte"),
    "a rank of 2^21 - 1": (
        "N7",
        lambda: one_step("0" * 24 + "1" * 22, 1, 0, 254, 0),
        "is 2097151, allowed: 0 to 39",
    ),
    "a second rank of 40": (
        "N7",
        lambda: one_step("000011110" + "10001", 2, 3, 254, 0),
        "a rank at byte offset 128 is 40, allowed: 0 to 39",
    ),
    "a run of 2 in 1": ("N8", lambda: one_step("10" + "001", 1, 0, 0, 0), "a run at byte"),
    "a run of 2^22 - 1": (
        "N8",
        lambda: one_step("10" + "0" * 24 + "1" * 22, 1, 0, 0, 0),
        "a run at byte offset 128 is 4194303, allowed: 0 to 1",
    ),
    "a size of 256": (
        "N9",
        lambda: one_step("10" + "0" * 24 + "1" * 8, 1, 0, 255, 0),
        "a size at byte offset 128 is 256, allowed: 1 to 255",
    ),
    "a size of 256 after a run": (
        "N9",
        lambda: one_step("10" + "1" + "0" * 24 + "01111111", 1, 0, 0, 0),
        "a size at byte offset 128 is 256",
    ),
    "a size of 257 after a run": (
        "N9",
        lambda: one_step("10" + "1" + "0" * 24 + "1" * 8, 1, 0, 0, 0),
        "a size at byte offset 128 is 257",
    ),
    "a size of 2^64 + 1": (
        "N9",
        lambda: one_step("10" + "1" + "0" * 24 + "1" * 64, 1, 0, 0, 0, dtype="U64"),
        "a size at byte",
    ),
    "a size of 2^64": (
        "N9",
        lambda: one_step("10" + "0" * 24 + "1" * 64, 1, 0, 255, 0, dtype="U64"),
        "a size at byte",
    ),
    "a size_shift of 59": (
        "N4",
        lambda: one_step("10" + "1" + "0" * 59, 1, 0, 255, 59, dtype="U64"),
        "allowed: 0 to 58",
    ),
    "a size_shift of 8": (
        "N4",
        lambda: one_step("10" + "1" + "0" * 8, 1, 0, 255, 8),
        "allowed: 0 to 7",
    ),
}
for name, (clause, build, fragment) in NUMBER_LIES.items():
    add(clause, f"sparse: {name}", build, fragment)
