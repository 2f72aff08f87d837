"""Lies of chunks of mode nibbles: the clause Q, and other clauses that apply inside of them."""

from frame_builder import SMALL, BuiltFrame, Edit, Nibbles, Raw, Stored, build_frame

from lying_frames.lie import DATA, add, appended, cut_to, set_at
from packhorse.layout import Mode

__all__ = ["halved"]

PAIRS = bytes(range(0, 240, 7))


def halved(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """35 bytes whose halves have codes of their own, or few of them."""
    return build_frame(PAIRS, codings=[Nibbles(**kwargs)], edit=edit)


LIES = {
    "mode nibbles in a frame of version 3": (
        "D1",
        lambda: SMALL["nibbles"]().lie(version=3),
        "unknown mode 9 in table row",
    ),
    "mode nibbles of split units": (
        "D2",
        lambda: build_frame(DATA, "U16", split=1, codings=[Raw(Mode.NIBBLES, b""), Stored()]).lie(
            version=4
        ),
        "mode nibbles",
    ),
    "3 raw bits": ("Q1", lambda: halved(raw_bits=3), "raw_bits at byte offset 130 is 3"),
    "no raw bits": ("Q1", lambda: halved(raw_bits=0), "raw_bits at byte offset 130 is 0"),
    "5 raw bits": ("Q1", lambda: halved(raw_bits=5), "raw_bits at byte offset 130 is 5"),
    "a raw bit plane": ("Q1", lambda: halved(raw_mask=1), "raw_mask at byte offset 131 is 1"),
    "8 lanes_log": ("R1", lambda: halved(set_at(0, 8)), "lanes_log"),
    "13 prob_bits": ("R2", lambda: halved(set_at(1, 13)), "prob_bits"),
    "8 raw bits": ("R3", lambda: halved(set_at(2, 8)), "raw_bits"),
    "a range of 17 symbols": ("M1", lambda: halved(set_at(8, 1)), "end of the range of symbols"),
    "an escape of 16": (
        "R5",
        lambda: halved(
            lambda c, p, s: s[: 8 + 2 + 6 + 16] + bytes([16]) + s[8 + 2 + 6 + 16 + 1 :],
            mapped=(1, 2, 3),
        ),
        "an escape",
    ),
    "an odd byte of words": ("R7", lambda: halved(appended(b"\0")), "half a word behind the words"),
    "words cut": ("R8", lambda: halved(cut_to(-2)), "word"),
    "a word left over": ("R9", lambda: halved(appended(b"\0\0")), "words"),
    "a last state that carries": (
        "D8",
        lambda: halved(first_state=0x10001),
        "lower halves of the last states",
    ),
    "a last state of 2^17": ("R10", lambda: halved(first_state=0x20000), "2^17 or more"),
}
for name, (clause, build, fragment) in LIES.items():
    add(clause, f"nibbles: {name}", build, fragment)
