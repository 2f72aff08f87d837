"""Lies of frames with a base: the clauses B and E, and other clauses that apply to mode delta."""

import struct
from collections.abc import Callable
from dataclasses import replace

import frame_builder as fb
from frame_builder import (
    DELTAS,
    SMALL,
    Base,
    BuiltFrame,
    Delta,
    DeltaEqual,
    Edit,
    Raw,
    Stored,
    build_frame,
)

from lying_frames.lie import DATA, add, appended, cut_to, set_at
from packhorse.layout import DTYPE_BY_NAME, Mode

__all__ = ["delta"]

THRESHOLDS = (100, 200)
SHIFTS = (2, 0, 3)
BASE = Base(DATA, "BF16")


def delta(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Thirty BF16 in three classes, as "delta"; the stream starts at byte 128 of the frame."""
    how = Delta(**{"thresholds": THRESHOLDS, "shifts": SHIFTS, **kwargs})
    return DELTAS["delta"](codings=[how], edit=edit)


def of_base(name: str, dtype: int) -> BuiltFrame:
    """Gives the base another dtype."""
    built = DELTAS[name]()
    return built.patch(built.base_offset + 16, bytes([dtype]))


def reserved(at: int) -> BuiltFrame:
    built = DELTAS["delta"]()
    return built.patch(built.base_offset + at, b"\1")


def given(built: BuiltFrame, change: Callable[[bytes], bytes | None]) -> BuiltFrame:
    """A good frame that is decoded with another base."""
    return replace(built, base=change(built.base or b""))


def beside(descriptor: int, name: str = "delta") -> BuiltFrame:
    """Another descriptor of plane 1, where plane 0 has mode delta."""
    built = DELTAS[name]()
    return built.patch(built.table_offset + 8, struct.pack("<I", descriptor))


def nothing(base: Base = BASE) -> BuiltFrame:
    """A frame with a base and without chunks."""
    return build_frame(b"", "BF16", (0, 3), codings=[Stored()], base=base)


CODES = {name: row.code for name, row in DTYPE_BY_NAME.items()}
BASE_LIES = {
    "base dtype 0": ("B1", lambda: of_base("delta", 0), "unknown base dtype 0 at byte offset 80"),
    "base dtype 255": ("B1", lambda: of_base("delta", 255), "unknown base dtype 255"),
    "a flag without a base": ("B1", lambda: SMALL["stored"]().lie(flags=1), "unknown base dtype 0"),
    "an F16 base of BF16": (
        "B2",
        lambda: of_base("delta", CODES["F16"]),
        "base dtype at byte offset 80 is F16, allowed: BF16, F32",
    ),
    "an F64 base of F16": ("B2", lambda: of_base("delta-of-f32", CODES["F64"]), "allowed: F16, F3"),
    "a BF16 base of F32": ("B2", lambda: of_base("delta-whole", CODES["BF16"]), "allowed: F32"),
    "a U64 base of I64": ("B2", lambda: of_base("delta-integers", CODES["U64"]), "allowed: I64"),
    "an F32 base of I64": ("B2", lambda: of_base("delta-integers", CODES["F32"]), "allowed: I64"),
    "an F32 base of F16 that is named by its sum": (
        "B2",
        lambda: DELTAS["delta-of-f32"]().lie(flags=3),
        "is F32, allowed: F16",
    ),
    "first reserved byte of the base": ("B3", lambda: reserved(17), "base at byte offset 81"),
    "last reserved byte of the base": ("B3", lambda: reserved(23), "base at byte offset 81"),
    "no base": (
        "B4",
        lambda: given(DELTAS["delta"](), lambda base: None),
        "needs the base of 60 bytes BF16 with content hash",
    ),
    "no base beside equal chunks": (
        "B4",
        lambda: given(DELTAS["delta-equal"](), lambda base: None),
        "none was given",
    ),
    "no base where no chunk needs it": (
        "B4",
        lambda: given(SMALL["stored"](base=BASE), lambda base: None),
        "none was given",
    ),
    "no base of a tensor without elements": (
        "B4",
        lambda: given(nothing(Base(b"", "BF16")), lambda base: None),
        "the base of 0 bytes BF16 with content hash 99aa06d3014798d86001c324468d497f, but none was",
    ),
    "too long a base of a tensor without elements": ("B4", nothing, "given has 60 bytes"),
    "a base without its last byte": (
        "B4",
        lambda: given(DELTAS["delta"](), lambda base: base[:-1]),
        "the one given has 59 bytes",
    ),
    "a base with a unit too many": (
        "B4",
        lambda: given(DELTAS["delta"](), lambda base: base + bytes(2)),
        "the one given has 62 bytes",
    ),
    "a base of right length and another content": (
        "B4",
        lambda: given(DELTAS["delta"](), lambda base: base[:-1] + bytes([base[-1] ^ 128])),
        "the one given has",
    ),
    "a base rounded before it is given": (
        "B4",
        lambda: given(DELTAS["delta-of-f32"](), lambda base: Base(base, "F32").units("F16")),
        "the one given has 60 bytes",
    ),
    "a named base of another length": (
        "B4",
        lambda: DELTAS["delta-equal"](base=Base(DATA + bytes(2), "BF16")),
        "needs the base of 60 bytes",
    ),
    "mode delta without a base": (
        "D2",
        lambda: build_frame(DATA, "BF16", split=2, codings=[Raw(Mode.DELTA, b"")]),
        "mode delta",
    ),
    "mode delta behind plane 0": (
        "D2",
        lambda: build_frame(
            DATA, "BF16", split=2, codings=[Stored(), Raw(Mode.DELTA, b"")], base=BASE
        ),
        "mode delta in table row at byte offset 88",
    ),
    "delta side data": (
        "S6",
        lambda: SMALL["prediction"](base=BASE).lie(side_descriptor=6 << 24 | 41),
        "mode 6 of the side data",
    ),
    "a constant plane beside mode delta": ("E9", lambda: beside(1 << 24 | 1), "is [16777217], but"),
    "a stored plane beside mode delta": ("E9", lambda: beside(30), "descriptors beside mode delta"),
    "mode delta twice": ("E9", lambda: beside(6 << 24), "is [100663296], but must be [0]"),
    "an unknown mode beside mode delta": ("D1", lambda: beside(99 << 24), "unknown mode 99"),
    "a plane beside an equal chunk": ("E9", lambda: beside(1 << 24 | 1, "delta-equal"), "must be"),
    "the last plane beside mode delta": (
        "E9",
        lambda: DELTAS["delta-integers"]().patch(120, b"\1"),
        "is [0, 0, 0, 0, 0, 0, 1], but must be [0, 0, 0, 0, 0, 0, 0]",
    ),
}
for name, (clause, build, fragment) in BASE_LIES.items():
    add(clause, name, build, fragment)


def models_end(stream: bytes) -> int:
    at = 32
    for _ in range(stream[2]):
        at += 2 + -(-3 * (stream[at + 1] + 2) // 2)
    return at


def cut_behind_models(nbytes: int) -> Edit:
    return lambda chunk, plane, stream: stream[: models_end(stream) + nbytes]


def cut_in_escapes(chunk: int, plane: int, stream: bytes) -> bytes:
    """Cuts a stream without raw bits in its escapes."""
    extra_nbytes = int.from_bytes(stream[4:8], "little")
    return stream[: models_end(stream) + (4 << stream[0]) + extra_nbytes + 1]


def low_state(chunk: int, plane: int, stream: bytes) -> bytes:
    """The last lane starts from 65,535."""
    at = models_end(stream) + (4 << stream[0]) - 4
    return stream[:at] + b"\xff\xff\0\0" + stream[at + 4 :]


STREAM_LIES = {  # edits of the stream, or other arguments of the coding
    "no classes": ("E1", set_at(2, 0), {}, "n_classes at byte offset 130 is 0, allowed: 1 to 8"),
    "9 classes": ("E1", set_at(2, 9), {}, "n_classes at byte offset 130 is 9"),
    "reserved byte 3": ("E2", set_at(3, 1), {}, "reserved bytes at byte offset 131"),
    "reserved byte 12": ("E2", set_at(12, 1), {}, "reserved bytes at byte offset 140"),
    "reserved byte 15": ("E2", set_at(15, 1), {}, "reserved bytes at byte offset 140"),
    "a threshold too many": ("E2", set_at(18, 250), {}, "unused thresholds at byte offset 146"),
    "the eighth threshold": (
        "E2",
        set_at(23, 250),
        {"thresholds": (30,) * 7},
        "unused thresholds at byte offset 151",
    ),
    "a shift too many": ("E2", set_at(27, 1), {}, "unused shifts at byte offset 155"),
    "the eighth shift": ("E2", set_at(31, 3), {}, "unused shifts at byte offset 155"),
    "descending thresholds": ("E3", set_at(16, 200, 199), {}, "thresholds at byte offset 144"),
    "the last thresholds descend": (
        "E3",
        set_at(22, 29),
        {"thresholds": (30,) * 7},
        "thresholds at byte offset 144",
    ),
    "a shift of 16": ("E4", set_at(26, 16), {}, "a shift at byte offset 152 is 16, allowed: 0 to"),
    "a shift of 255": ("E4", set_at(24, 255), {}, "a shift at byte offset 152 is 255"),
    "an escape of 64": (
        "E5",
        None,
        {"mapped": (16,), "edit_escapes": lambda escapes: escapes[:-1] + b"\x40"},
        "is 64, allowed: 0 to 63",
    ),
    "a byte of extra bits too few": (
        "E6",
        None,
        {"edit_extra": lambda bits: bits[: len(bits) // 8 * 8]},
        "extra bits, but the 4 bytes at byte offset",
    ),
    "a byte of extra bits too many": (
        "E6",
        None,
        {"edit_extra": lambda bits: bits + "0" * 8},
        "number of bytes of extra bits at byte offset",
    ),
    "no extra bits": ("E6", None, {"edit_extra": lambda bits: ""}, "but the 0 bytes"),
    "extra bits that no token takes": (
        "E6",
        None,
        {"shifts": (15, 15, 15), "edit_extra": lambda bits: bits + "0"},
        "number of bytes of extra bits",
    ),
    "a bit behind the extra bits": (
        "E7",
        None,
        {"edit_extra": lambda bits: bits + "1"},
        "bits left over behind the extra bits",
    ),
    "the last bit behind the extra bits": (
        "E7",
        None,
        {"edit_extra": lambda bits: bits.ljust(39, "0") + "1"},
        "bits left over behind the extra bits",
    ),
    "a last state of 2^16 + 1": ("E8", None, {"first_state": 0x10001}, "other than 2^16"),
    "a last state of 2^17": ("E8", None, {"first_state": 0x20000}, "other than 2^16"),
    "lanes_log 1": ("R1", set_at(0, 1), {}, "lanes_log at byte offset 128 is 1"),
    "lanes_log 8": ("R1", set_at(0, 8), {}, "allowed: 2 to 7"),
    "prob_bits 13": ("R2", set_at(1, 13), {}, "prob_bits at byte offset 129 is 13"),
    "state of 65535": ("R4", low_state, {}, "states below 2^16"),
    "an escape too many": (
        "R6",
        None,
        {"mapped": (16,), "edit_escapes": lambda escapes: escapes + b"\0"},
        "n_escapes at byte offset 136",
    ),
    "an escape too few": (
        "R6",
        None,
        {"mapped": (16,), "edit_escapes": lambda escapes: escapes[1:]},
        "n_escapes at byte offset 136",
    ),
    "escapes without a code": (
        "R6",
        None,
        {"mapped": tuple(range(64)), "edit_escapes": lambda escapes: b"??"},
        "n_escapes at byte offset 136 is 2, but must be 0",
    ),
    "half a word": ("R7", cut_to(-1), {}, "half a word"),
    "words cut": ("R8", cut_to(-2), {}, "no word is left"),
    "a word too many": ("R9", appended(b"ab"), {}, "number of unused words"),
    "range beyond 63": ("M1", set_at(32, 40), {}, "symbols at byte offset 160 is 70, allowed: 1"),
    "half byte left over": ("M2", set_at(80, 16), {}, "half byte behind the frequencies"),
    "a bad sum": ("M3", set_at(34, 1), {}, "sum of the frequencies at byte offset 162"),
    "escape beside 64 tokens": (
        "M4",
        None,
        {"mapped": tuple(range(64)), "frequencies": (*[64] * 63, 63, 1)},
        "has an escape beside codes for all",
    ),
    "header cut": ("D9", cut_to(31), {}, "bytes of the delta header at byte offset 128"),
    "a byte of header": ("D9", cut_to(1), {}, "bytes of the delta header at byte offset 128"),
    "model cut": ("D9", cut_to(33), {}, "bytes of a model at byte offset 160"),
    "frequencies cut": ("D9", cut_to(80), {}, "bytes of frequencies at byte offset 162"),
    "last model cut": ("D9", cut_behind_models(-1), {}, "bytes of frequencies"),
    "states cut": ("D9", cut_behind_models(15), {}, "states at byte offset"),
    "raw bits cut": ("D9", cut_behind_models(16 + 7), {}, "bytes of a raw bit plane"),
    "whole raw bytes cut": (
        "D9",
        cut_behind_models(16 + 1),
        {"shifts": (8, 9, 15)},
        "bytes of raw bits",
    ),
    "extra bits cut": ("D9", cut_behind_models(16 + 4), {"shifts": ()}, "extra bits at byte"),
    "escapes cut": ("D9", cut_in_escapes, {"mapped": (16,), "shifts": ()}, "escapes at byte off"),
    "4 GiB of extra bits": ("D9", set_at(4, *[255] * 4), {}, "take 4294967295"),
    "4 GiB of escapes": ("D9", set_at(8, *[255] * 4), {}, "take 4294967295"),
    "equal to another base": ("D10", cut_to(0), {}, "content hash at byte offset 24"),
}
for name, (clause, edit, kwargs, fragment) in STREAM_LIES.items():
    add(clause, f"delta: {name}", lambda e=edit, k=kwargs: delta(e, **k), fragment)


def of_shift(dtype: str, shift: int) -> BuiltFrame:
    data = DATA[:56]
    edit = set_at(24, shift)
    return build_frame(data, dtype, codings=[Delta()], base=Base(data, dtype), edit=edit)


for dtype, shift in (("U8", 8), ("F8_E4M3", 8), ("I16", 16), ("F32", 32), ("C64", 32), ("F64", 64)):
    add(
        "E4",
        f"delta: {dtype} by {shift}",
        lambda d=dtype, s=shift: of_shift(d, s),
        f"a shift at byte offset 152 is {shift}, allowed: 0 to {shift - 1}",
    )
add(
    "S8",
    "side data: broken, beside mode delta",
    lambda: SMALL["prediction"](
        codings=[DeltaEqual()], base=BASE, side=fb.side_of(5, 6, coding=Raw(Mode.PALETTE, b"x"))
    ),
    "palette header",
)
