"""Lies inside streams: the clauses P, M, R, K, S8 and Z, and the cases of D that only decoding
shows."""

import frame_builder as fb
import zstandard
from frame_builder import (
    SIDE,
    SMALL,
    BuiltFrame,
    Classed,
    Coding,
    Edit,
    Palette,
    Rans,
    Raw,
    Stored,
    build_frame,
)

from lying_frames.lie import DATA, add, appended, cut_to, set_at
from packhorse.layout import Mode

__all__ = ["GOOD_ZSTD", "lead", "prediction", "rans", "raw_palette"]


def escape_dropped(chunk: int, plane: int, stream: bytes) -> bytes:
    return stream if plane else stream[:4] + bytes([stream[4] - 1]) + stream[5:-1]


def escape_declared(chunk: int, plane: int, stream: bytes) -> bytes:
    """Plane 1 of "palette" has no escape code."""
    return stream[:4] + b"\1" + stream[5:] + b"?" if plane else stream


PALETTE_LIES = {  # edits of plane 0 of "palette", whose stream starts at byte 128
    "code_bits 5": ("P1", set_at(0, 5), "code_bits at byte offset 128 is 5, allowed: 0 to 4"),
    "has_escape 2": ("P2", set_at(1, 2), "has_escape at byte offset 129 is 2"),
    "an escape of no bits": ("P2", set_at(0, 0), "has_escape at byte offset 129 is 1, allowed: 0"),
    "raw_bits 9": ("P3", set_at(2, 9), "raw_bits at byte offset 130 is 9, allowed: 0 to 8"),
    "a raw plane beyond no raw bits": ("P3", set_at(3, 1), "raw_mask beyond raw_bits at byte"),
    "a raw plane beyond 3 raw bits": ("P3", set_at(2, 3, 8), "raw_bits at byte offset 131 is 1"),
    "escape without its code": ("P4", escape_declared, "n_escapes without has_escape"),
    "entry of the escape": ("P5", set_at(8 + 3, 7), "unused palette entries at byte offset 139"),
    "last entry": ("P5", set_at(8 + 15, 7), "unused palette entries"),
    "entry beyond the raw bits": (
        "P6",
        lambda _, p, s: s if p else s[:2] + b"\1" + s[3:8] + bytes([9, 128, 3]) + s[11:],
        "a symbol of the palette at byte offset 136 is 128, allowed: 0 to 127",
    ),
    "an escape too few": ("P7", escape_dropped, "n_escapes at byte offset 132"),
    "palette header cut": ("D9", cut_to(23), "palette header"),
    "palette empty": ("D9", cut_to(0), "palette header"),
    "bit plane cut": ("D9", cut_to(24 + 15), "bytes of a bit plane at byte offset 160"),
    "palette escapes cut": ("D9", cut_to(24 + 16), "escapes at byte offset 168"),
    "palette too long": ("D9", appended(b"\0"), "behind the escapes"),
    "4 GiB of palette escapes": ("D9", set_at(4, *[255] * 4), "escapes at byte offset 168"),
}
for name, (clause, edit, fragment) in PALETTE_LIES.items():
    add(clause, f"palette: {name}", lambda edit=edit: SMALL["palette"](edit=edit), fragment)


def raw_palette(edit: Edit) -> BuiltFrame:
    """Bytes 3 to 66 in a palette of the symbols 0 to 3, with escapes from 4 on; 4 raw bits."""
    how = Palette(2, raw_bits=4, raw_mask=0xF)
    return build_frame(bytes(range(3, 67)), codings=[how], edit=edit)


RAW_PALETTE_LIES = {  # the stream has planes of 8 bytes from 24 on, 4 raw ones from 40, escapes
    "an escape beyond the raw bits": ("P6", set_at(72, 16), "an escape at byte offset 200 is 16"),
    "raw plane cut": ("D9", cut_to(24 + 5 * 8 + 7), "bytes of a raw bit plane at byte offset 192"),
}
for name, (clause, edit, fragment) in RAW_PALETTE_LIES.items():
    add(clause, f"palette: {name}", lambda edit=edit: raw_palette(edit), fragment)
add(
    "D9",
    "palette: a raw plane that is not declared",
    lambda: SMALL["palette-raw"](edit=set_at(3, 0x7F, plane=1)),
    "behind the escapes",
)


def rans(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Bytes 1, 2 and three escapes in 4 lanes.

    In the stream the model starts at 8, its frequencies at 10, states at 15, escapes at 31 and
    words at 34; it starts at byte 128 of the frame.
    """
    how = {"mapped": (1, 2), "frequencies": (3000, 1000, 96), **kwargs}
    data = bytes([1] * 80 + [2] * 17 + [9] * 3)
    return build_frame(data, codings=[Rans(**how)], edit=edit, chunk_log=7)


def frequencies(*values: int) -> Edit:
    packed = sum(value << 12 * i for i, value in enumerate(values))
    return set_at(10, *packed.to_bytes(-(-3 * len(values) // 2), "little"))


def escapes_inserted(n: int, models_at: int = 8, plane: int = 0) -> Edit:
    """An edit that puts more escapes behind the states of a stream without raw planes."""

    def edit(_: int, p: int, stream: bytes) -> bytes:
        if p != plane:
            return stream
        at = models_at
        for _ in range(1 if models_at == 8 else stream[9]):
            at += 2 + -(-3 * (stream[at + 1] + 2) // 2)
        at += 4 << stream[0]
        return stream[:4] + bytes([stream[4] + n]) + stream[5:at] + bytes(n) + stream[at:]

    return edit


RANS_LIES = {  # edits of the stream, or other arguments of the coding
    "range beyond 255": ("M1", set_at(8, 255), {}, "symbols at byte offset 136 is 257"),
    "range beyond the raw bits": (
        "M1",
        set_at(8, 127),
        {"raw_bits": 1, "mapped": (0, 1)},
        "end of the range of symbols at byte offset 136 is 129, allowed: 1 to 128",
    ),
    "half byte left over": ("M2", set_at(14, 16), {}, "half byte behind the frequencies"),
    "sum of 4095": ("M3", frequencies(2999, 1000, 96), {}, "frequencies at byte offset 138 is 40"),
    "sum of 8192": ("M3", frequencies(4095, 4095, 2), {}, "is 8192, but must be 4096"),
    "no frequencies": ("M3", frequencies(0, 0, 0), {}, "sum of the frequencies"),
    "escape beside 256 symbols": (
        "M4",
        None,
        {"mapped": range(256), "frequencies": (*[15] * 255, 270, 1)},
        "has an escape beside codes for all",
    ),
    "escape beside 2 symbols": (
        "M4",
        None,
        {"mapped": (0, 1), "raw_bits": 7},
        "has an escape beside codes for all",
    ),
    "lanes_log 1": ("R1", set_at(0, 1), {}, "lanes_log at byte offset 128 is 1"),
    "lanes_log 8": ("R1", set_at(0, 8), {}, "allowed: 2 to 7"),
    "prob_bits 11": ("R2", set_at(1, 11), {}, "prob_bits at byte offset 129 is 11"),
    "raw_bits 8": ("R3", set_at(2, 8), {}, "raw_bits at byte offset 130 is 8, allowed: 0 to 7"),
    "a raw plane beyond no raw bits": ("R3", set_at(3, 1), {}, "raw_mask beyond raw_bits at byte"),
    "state of 65535": ("R4", set_at(15 + 12, 255, 255, 0, 0), {}, "states below 2^16 at byte offs"),
    "an escape beyond the raw bits": (
        "R5",
        set_at(31 + 2 * 16, 64),
        {"raw_bits": 2, "raw_mask": 3, "mapped": (0, 1), "frequencies": (3000, 1000, 96)},
        "an escape at byte offset",
    ),
    "an escape too many": ("R6", escapes_inserted(1), {}, "n_escapes at byte offset 132 is 4, but"),
    "escapes without a code": (
        "R6",
        escapes_inserted(2),
        {"mapped": (1, 2, 9), "frequencies": (3000, 1000, 96, 0)},
        "n_escapes at byte offset 132 is 2, but must be 0",
    ),
    "half a word": ("R7", cut_to(-1), {}, "half a word"),
    "words cut": ("R8", cut_to(-2), {}, "no word is left"),
    "a word too many": ("R9", appended(b"ab"), {}, "number of unused words"),
    "last state of 2^17": ("R10", None, {"first_state": 0x20000}, "last states of 2^17 or more"),
    "header cut": ("D9", cut_to(7), {}, "bytes of the rANS header"),
    "empty": ("D9", cut_to(0), {}, "bytes of the rANS header"),
    "model cut": ("D9", cut_to(9), {}, "bytes of a model at byte offset 136"),
    "frequencies cut": ("D9", cut_to(14), {}, "bytes of frequencies at byte offset 138"),
    "states cut": ("D9", cut_to(15 + 15), {}, "states at byte offset 143"),
    "escapes cut": ("D9", cut_to(31 + 2), {}, "escapes at byte offset 159"),
    "4 GiB of escapes": ("D9", set_at(4, *[255] * 4), {}, "escapes at byte offset 159"),
    "raw planes cut": ("D9", cut_to(31 + 15), {"raw_bits": 1}, "bytes of a raw bit plane"),
}
for name, (clause, edit, kwargs, fragment) in RANS_LIES.items():
    add(clause, f"rans: {name}", lambda e=edit, k=kwargs: rans(e, **k), fragment)


def lead(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Plane 1 follows plane 0 in two classes, with its fields at 8, thresholds at 10.

    Its stream starts at byte 175 of the frame, and its models at byte 191.
    """
    codings = [Palette(2), Classed(**{"thresholds": (100,), "raw_bits": 7, **kwargs})]
    return SMALL["lead"](codings=codings, edit=edit)


def prediction(edit: Edit | None = None) -> BuiltFrame:
    """Plane 0 in four classes, at byte 150."""
    return SMALL["prediction"](edit=edit)


def stream_of(built: BuiltFrame, plane: int) -> Coding:
    """A classed stream of a good frame, to be put where it is not allowed."""
    offset, nbytes = built.streams[0, plane]
    return Raw(Mode.CLASSED_RANS, bytes(built.data[offset : offset + nbytes]))


def second_model_at() -> int:
    """In the stream of `lead`, whose first model is of two symbols or one and an escape."""
    built = lead()
    offset = built.streams[0, 1][0]
    return 16 + 2 + -(-3 * (built.data[offset + 17] + 2) // 2)


CLASSED_LIES = {
    "source 0": ("K1", lambda: lead(set_at(8, 0, plane=1)), "source of the classes at byte"),
    "source 3": ("K1", lambda: lead(set_at(8, 3, plane=1)), "is 3, allowed: 1 to 2"),
    "no classes": ("K2", lambda: lead(set_at(9, 0, plane=1)), "is 0, allowed: 1 to 4"),
    "5 classes": ("K2", lambda: lead(set_at(9, 5, plane=1)), "n_classes at byte offset"),
    "3 classes of predictions": (
        "K2",
        lambda: prediction(set_at(9, 3)),
        "n_classes at byte offset 159 is 3, but must be 4",
    ),
    "descending thresholds": (
        "K3",
        lambda: lead(set_at(10, 150, 149, plane=1), thresholds=(149, 150)),
        "thresholds at byte offset",
    ),
    "a threshold too many": ("K4", lambda: lead(set_at(11, 200, plane=1)), "unused thresholds"),
    "the last threshold of predictions": (
        "K4",
        lambda: prediction(set_at(12, 1)),
        "unused thresholds at byte offset 160",
    ),
    "reserved": ("K4", lambda: lead(set_at(13, 1, plane=1)), "reserved bytes of the classes"),
    "last reserved": ("K4", lambda: prediction(set_at(15, 1)), "classes at byte offset 163"),
    "prediction without side data": (
        "K5",
        lambda: SMALL["prediction"](codings=[stream_of(prediction(), 0), Stored()], side=None),
        "plane 0 of the stream at byte offset 158 uses predictions",
    ),
    "prediction behind plane 0": (
        "K5",
        lambda: SMALL["prediction"](codings=[Palette(), stream_of(prediction(), 0)]),
        "plane 1 of the stream",
    ),
    "prediction by source alone": (
        "K5",
        lambda: lead(set_at(8, 1, 4, 0, 0, 0, plane=1), thresholds=(3, 3, 3)),
        "uses predictions",
    ),
    "lead in plane 0": (
        "K6",
        lambda: SMALL["lead"](codings=[stream_of(lead(), 1), Stored()]),
        "plane 0 of the stream",
    ),
    "lead of a stored plane": (
        "K6",
        lambda: SMALL["lead"](codings=[Stored(), stream_of(lead(), 1)]),
        "plane 1 of the stream at byte offset 158 follows plane 0",
    ),
    "lanes_log 8": ("R1", lambda: lead(set_at(0, 8, plane=1)), "lanes_log"),
    "prob_bits 14": ("R2", lambda: lead(set_at(1, 14, plane=1)), "prob_bits"),
    "raw_bits 8": ("R3", lambda: lead(set_at(2, 8, plane=1)), "raw_bits"),
    "second model": (
        "M1",
        lambda: lead(set_at(second_model_at(), 2, plane=1)),
        "end of the range of symbols",
    ),
    "fields cut": ("D9", lambda: lead(cut_to(15, plane=1)), "bytes of classes"),
    "second model cut": (
        "D9",
        lambda: lead(cut_to(second_model_at() + 1, plane=1)),
        "bytes of a model",
    ),
    "a word too many": ("R9", lambda: lead(appended(b"ab", plane=1)), "unused words"),
    "an escape too many": (
        "R6",
        lambda: lead(escapes_inserted(1, 16, plane=1), raw_bits=0),
        "n_escapes at byte offset",
    ),
}
for name, (clause, build, fragment) in CLASSED_LIES.items():
    add(clause, f"classed: {name}", build, fragment)


def used_side(coding: Coding, edit: Edit | None = None) -> BuiltFrame:
    """A frame whose side data have this coding, and whose plane 0 uses them."""
    return SMALL["prediction"](side=fb.side_of(5, 6, coding=coding), edit=edit)


SIDE_LIES = {
    "palette of 5 bits": (Palette(2), set_at(0, 5, plane=SIDE), "code_bits at byte offset 84"),
    "palette too long": (Palette(2), appended(b"x", plane=SIDE), "bytes behind the escapes at"),
    "rans of 256 lanes": (Rans(), set_at(0, 8, plane=SIDE), "lanes_log at byte offset 84"),
    "rans with a bad sum": (Rans(), set_at(10, 0, 0, 0, plane=SIDE), "sum of the frequencies"),
    "rans with a word too many": (Rans(), appended(b"xy", plane=SIDE), "number of unused words"),
    "rans that carries": (Rans(first_state=0x10005), None, "the side data at byte offset 84"),
    "nothing": (Palette(2), cut_to(0, plane=SIDE), "palette header"),
}
for name, (coding, edit, fragment) in SIDE_LIES.items():
    add("S8", f"side data: {name}", lambda c=coding, e=edit: used_side(c, e), fragment)
add(
    "S8",
    "side data: broken, though no chunk uses them",
    lambda: SMALL["prediction"](codings=[Stored(), Stored()], edit=set_at(0, 5, plane=SIDE)),
    "code_bits at byte offset 84",
)


STATE_LIES = {
    "nothing carried, but a last state of 2^16 + 5": (
        "D8",
        lambda: rans(first_state=0x10005),
        "but nothing is carried",
    ),
    "a last state of 2^16 + 5 beside a whole stored plane": (
        "D8",
        lambda: SMALL["rans-carry"](codings=[Rans(first_state=0x10005), Stored()], carry=False),
        "but nothing is carried",
    ),
    "nothing carried by classes, but a last state of 2^16 + 5": (
        "D8",
        lambda: lead(first_state=0x10005),
        "but nothing is carried",
    ),
    "another prediction": (
        "D10",
        lambda: used_side(Stored()).patch(84, bytes([fb.side_of(5, 6).rows[0] + 4])),
        "content hash",
    ),
}
for name, (clause, build, fragment) in STATE_LIES.items():
    add(clause, name, build, fragment)


def zstd_frame(descriptor: int, fields: bytes) -> bytes:
    """A frame of one raw block, its header written by hand."""
    block = (len(DATA) << 3 | 1).to_bytes(3, "little") + DATA
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + fields + block


GOOD_ZSTD = zstd_frame(0x20, bytes([len(DATA)]))
ZSTD_LIES = {
    "a skippable frame": ("Z1", b"\x50\x2a\x4d\x18\4\0\0\0abcd", "Zstandard magic"),
    "empty": ("Z1", b"", "Zstandard magic"),
    "another size": ("Z2", zstandard.compress(DATA + b"xx"), "content size at byte offset 128"),
    "no size": ("Z2", zstd_frame(0, b"\x50"), "content size"),
    "a petabyte": ("Z2", zstd_frame(0xE0, (1 << 50).to_bytes(8, "little")), "content size"),
    "dictionary 7": ("Z3", zstd_frame(0x21, bytes([7, len(DATA)])), "dictionary at byte offset"),
    "a byte behind": ("Z4", GOOD_ZSTD + b"x", "Zstandard frame at byte offset 128"),
    "two frames": ("Z4", GOOD_ZSTD * 2, "Zstandard frame"),
    "cut": ("Z5", GOOD_ZSTD[:-1], "Zstandard frame"),
    "header cut": ("Z5", GOOD_ZSTD[:5], "Zstandard frame"),
    "checksum": ("Z5", zstd_frame(0x24, bytes([len(DATA)])) + b"lies", "Zstandard frame"),
}
for name, (clause, stream, fragment) in ZSTD_LIES.items():
    add(
        clause,
        f"zstd: {name}",
        lambda s=stream: build_frame(DATA, "I16", codings=[Raw(Mode.ZSTD, s)]),
        fragment,
    )
