"""Every clause of docs/format.md, section 9.1: a frame that breaks it gives its error."""

from itertools import combinations

import pytest
from cases import each
from format_page import clauses
from frame_builder import SMALL, Base, Raw, build_frame
from lying_frames import DATA, LIES, deltas, matches, nibbles, set_at, sparse, streams

from packhorse.errors import PackhorseError
from packhorse.layout import Mode
from packhorse.reference import decode_frame

NOT_OF_FRAMES = "FG"  # files, in reference/test_files.py; folders, in disk/test_folder.py


@each("name", LIES)
def test_a_lie_is_refused(name: str) -> None:
    lie = LIES[name]
    with pytest.raises(PackhorseError) as caught:
        decode_frame(lie.frame(), max_nbytes=lie.max_nbytes, base=lie.base())
    assert {caught.type} == clauses()[lie.clause]
    assert lie.fragment in str(caught.value)


def test_every_clause_of_the_page_has_a_lie() -> None:
    of_frames = {number for number in clauses() if number[0] not in NOT_OF_FRAMES}
    assert {lie.clause for lie in LIES.values()} == of_frames


def test_the_hand_made_zstd_frame_is_good() -> None:
    frame = build_frame(DATA, "I16", codings=[Raw(Mode.ZSTD, streams.GOOD_ZSTD)])
    assert decode_frame(bytes(frame)).data == DATA


def test_the_frames_that_lies_are_made_of_are_good() -> None:
    for build in (
        streams.rans,
        streams.lead,
        streams.prediction,
        deltas.delta,
        sparse.sparse,
        matches.matched,
        nibbles.halved,
    ):
        built = build()
        assert decode_frame(bytes(built), base=built.base).data == built.source
    whole = streams.raw_palette(lambda chunk, plane, stream: stream)
    assert decode_frame(bytes(whole)).data == whole.source


# What breaks the frame "prediction", which gets a base here, for the first time at each step of the
# order in section 2.
STEPS = {
    "magic": {"magic": b"\x89PHG"},
    "version": {"version": 5},
    "flags": {"flags": 5},
    "dtype": {"dtype_code": 99},
    "split": {"split": 1},
    "n_dims": {"n_dims": 65},
    "chunk_log": {"chunk_log": 22},
    "header_nbytes": {"header_nbytes": 64},
    "header CRC": {"header_crc": 1},
    "n_chunks": {"n_chunks": 0},
    "reserved bytes at": {"reserved": b"\1\0\0"},
    "base dtype": {},
    "reserved bytes of the base": {},
    "n_row_dims": {"n_row_dims": 9},
    "padding bytes of the header": {},
    "unknown mode": {},
    "frame_nbytes": {"frame_nbytes": 64},
    "the end of the frame": {},
}


def broken(*steps: str) -> bytes:
    built = SMALL["prediction"](base=Base(DATA, "BF16"))
    if "base dtype" in steps:
        built.patch(built.base_offset + 16, b"\x63")
    if "reserved bytes of the base" in steps:
        built.patch(built.base_offset + 20, b"x")
    if "padding bytes of the header" in steps:
        built.patch(built.header_nbytes - 1, b"x")
    if "unknown mode" in steps:
        built.patch(built.table_offset + 7, b"\x63")
    fields = {name: value for step in steps for name, value in STEPS[step].items()}
    built.lie(seal="header CRC" not in steps, **fields)
    return bytes(built) + b"x" * ("the end of the frame" in steps)


@each("first, second", combinations(STEPS, 2))
def test_the_first_broken_rule_is_reported(first: str, second: str) -> None:
    with pytest.raises(PackhorseError, match=rf"^{first}|^unknown {first}"):
        decode_frame(broken(first, second))


def after_the_last_unit(chunk: int, plane: int, stream: bytes) -> bytes:
    """Sets bits behind the last unit in the first raw plane of "rans-raw", which follows model and
    states."""
    raw_plane = 8 + 2 + -(-3 * (stream[9] + 2) // 2) + 16
    return stream[: raw_plane + 7] + b"\xff" + stream[raw_plane + 8 :]


def test_ignored_bits_change_nothing() -> None:
    """Codes and raw bits behind the last of 30 units."""
    edits = {
        "palette": set_at(24 + 7, 0xFF),
        "palette-raw": set_at(24 + 15, 0xFF),
        "rans-raw": after_the_last_unit,
    }
    for name, edit in edits.items():
        built = SMALL[name](edit=edit)
        assert built.data != SMALL[name]().data
        assert decode_frame(bytes(built)).data == built.source
