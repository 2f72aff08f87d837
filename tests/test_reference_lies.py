"""One lie a row: a frame that breaks one rule, the documented error, a fragment of its message.

Every checksum is right unless the row is about it, so that the check which a row names is the one
that must catch the lie.
"""

from collections.abc import Callable

import frame_builder as fb
import pytest
import zstandard
from frame_builder import SMALL, BuiltFrame, Edit, Rans, Raw, Stored, Zstd, build_frame

from packhorse.errors import (
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.layout import Mode
from packhorse.reference import decode_frame

DATA = fb.units_of_values(30, 2, 9)
COMPAT, CORRUPT, TRUNC = CompatibilityError, CorruptionError, TruncationError


def check(build: Callable[[], BuiltFrame], error: type[PackhorseError], fragment: str) -> None:
    with pytest.raises(PackhorseError) as caught:
        decode_frame(bytes(build()))
    assert caught.type is error
    assert fragment in str(caught.value)


def cases(table: dict[str, tuple]) -> list:
    return [pytest.param(*row, id=name) for name, row in table.items()]


def set_at(offset: int, *replacement: int) -> Edit:
    """An edit that overwrites bytes of the stream of plane 0."""
    new, end = bytes(replacement), offset + len(replacement)
    return lambda _, p, stream: stream[:offset] + new + stream[end:] if p == 0 else stream


def cut_to(nbytes: int) -> Edit:
    return lambda _, p, stream: stream[:nbytes] if p == 0 else stream


def appended(tail: bytes) -> Edit:
    return lambda _, p, stream: stream + tail if p == 0 else stream


HEADER_LIES = {  # fields of the frame "stored", whose header has 128 bytes and payload 64
    "magic": ({"magic": b"\x89PHG"}, CORRUPT, "magic at byte offset 0 is 89504847"),
    "version 0": ({"version": 0}, CORRUPT, "version at byte offset 4 is 0"),
    "version 2": ({"version": 2}, COMPAT, "version at byte offset 4 is 2"),
    "version 255": ({"version": 255}, COMPAT, "upgrade"),
    "dtype 0": ({"dtype_code": 0}, COMPAT, "unknown dtype 0 at byte offset 5"),
    "dtype 10": ({"dtype_code": 10}, COMPAT, "unknown dtype 10"),
    "dtype 27": ({"dtype_code": 27}, COMPAT, "unknown dtype 27"),
    "65 dimensions": ({"n_dims": 65}, CORRUPT, "n_dims at byte offset 6 is 65"),
    "60 dimensions": ({"n_dims": 60}, CORRUPT, "header_nbytes at byte offset 12 is 128"),
    "split of integers": ({"split": 1}, CORRUPT, "split at byte offset 7 is 1"),
    "unknown split": ({"split": 3}, CORRUPT, "allowed: [0, 2]"),
    "flag": ({"flags": 0x8000}, COMPAT, "flags 0x8000 at byte offset 8"),
    "chunk_log 5": ({"chunk_log": 5}, CORRUPT, "allowed: 6 to 20"),
    "chunk of 4 MiB": ({"chunk_log": 21}, CORRUPT, "chunk_log of BF16 at byte offset 11"),
    "header_nbytes 0": ({"header_nbytes": 0}, CORRUPT, "is 0, but must be 128"),
    "header_nbytes 65": ({"header_nbytes": 65}, CORRUPT, "must be 128"),
    "header_nbytes 192": ({"header_nbytes": 192}, CORRUPT, "header_nbytes at byte offset 12"),
    "header beyond the end": (
        {"header_nbytes": 1 << 31},
        CORRUPT,
        "is 2147483648, but must be 128",
    ),
    "table beyond the end": (
        {"n_chunks": 1 << 20, "header_nbytes": (1 << 23) + 64},
        TRUNC,
        "the header ends at byte offset 8388672, the data at 192",
    ),
    "frame_nbytes": ({"frame_nbytes": 128}, CORRUPT, "byte offset 16 is 128, but must be 192"),
    "frame_nbytes of 2^63": ({"frame_nbytes": 1 << 63}, CORRUPT, "must be 192"),
    "content hash": ({"content_hash": bytes(16)}, CORRUPT, "content hash at byte offset 24"),
    "no chunks": ({"n_chunks": 0}, CORRUPT, "header_nbytes at byte offset 12 is 128, but must be"),
    "2 chunks": ({"n_chunks": 2}, CORRUPT, "is 2, but must be 1"),
    "header CRC": ({"header_crc": 1, "seal": False}, CORRUPT, "header CRC at byte offset 44"),
    "old header CRC": ({"level": 0, "seal": False}, CORRUPT, "header CRC"),
}


@pytest.mark.parametrize(("fields", "error", "fragment"), cases(HEADER_LIES))
def test_a_lying_header_field_is_refused(
    fields: dict[str, int], error: type[PackhorseError], fragment: str
) -> None:
    check(lambda: SMALL["stored"]().lie(**fields), error, fragment)


def of_shape(*shape: int, dtype: str = "U8") -> BuiltFrame:
    return build_frame(b"", dtype, shape, codings=[Stored()])


SHAPE_LIES = {
    "2^63 elements": ((1 << 63,), "U8", "2^63 bits"),
    "2^63 bits": ((1 << 60,), "U8", "2^63 bits"),
    "product of 2^64": ((1 << 32, 1 << 32), "U8", "2^63 bits"),
    "overflow times 0": ((1 << 40, 1 << 40, 0), "U8", "2^63 bits"),
    "0 times overflow": ((0, 1 << 40, 1 << 40), "U8", "2^63 bits"),
    "2^50 bytes in 64": ((1 << 50,), "U8", "n_chunks"),
    "half a byte": ((3,), "F4", "bits beyond the last byte"),
    "a byte and a half": ((2,), "F6_E2M3", "bits beyond the last byte"),
    "65 dimensions": ((0,) * 65, "U8", "n_dims"),
}


@pytest.mark.parametrize(("shape", "dtype", "fragment"), cases(SHAPE_LIES))
def test_a_lying_shape_is_refused(shape: tuple[int, ...], dtype: str, fragment: str) -> None:
    check(lambda: of_shape(*shape, dtype=dtype), CORRUPT, fragment)


def raw(mode: int, stream: bytes) -> BuiltFrame:
    return build_frame(bytes(60), codings=[Raw(mode, stream)])


def rans_beside_stored(nbytes: int) -> BuiltFrame:
    """The stored plane of 30 bytes is cut or filled to `nbytes`; the rANS stream carries 8."""
    return SMALL["rans-carry"](
        edit=lambda _, p, stream: stream.ljust(nbytes, b"x")[:nbytes] if p == 1 else stream
    )


def short_first_of_two() -> BuiltFrame:
    codings = [Stored(), Rans(), Rans(), Stored()]
    return build_frame(DATA, "F32", split=2, codings=codings, edit=cut_to(7))


PLACE_LIES = {
    "bytes behind": (lambda: bytes(SMALL["stored"]()) + bytes(64), CORRUPT, "must be 192"),
    "another file": (lambda: b"PK\3\4" + bytes(60), CORRUPT, "magic at byte offset 0"),
    "chunk table shorter than the shape": (
        lambda: of_shape(1 << 34).lie(chunk_log=21, n_chunks=1 << 13),
        CORRUPT,
        "header_nbytes at byte offset 12",
    ),
    "header padding": (lambda: SMALL["stored"]().patch(127, b"x"), CORRUPT, "of the header"),
    "chunk padding": (lambda: SMALL["stored"]().patch(191, b"x"), CORRUPT, "byte offset 188"),
    "chunk CRC": (
        lambda: SMALL["stored"]().patch(64, b"lies", seal=False).seal(chunks=False),
        CORRUPT,
        "CRC of the chunk at byte offset 128",
    ),
    "hash of nothing": (
        lambda: SMALL["empty"]().lie(content_hash=bytes(16)),
        CORRUPT,
        "content hash",
    ),
    "chunk_log 22": (lambda: raw(0, bytes(60)).lie(chunk_log=22), CORRUPT, "allowed: 6 to 21"),
    "float split of bytes": (lambda: raw(0, bytes(60)).lie(split=2), CORRUPT, "allowed: [0]"),
    "mode 5": (lambda: raw(5, bytes(60)), COMPAT, "unknown mode 5"),
    "mode 255": (lambda: raw(255, b""), COMPAT, "unknown mode 255"),
    "palette of units": (
        lambda: build_frame(DATA, "BF16", codings=[Raw(Mode.PALETTE, b"")]),
        CORRUPT,
        "mode palette",
    ),
    "rans of units": (
        lambda: build_frame(DATA, "BF16", codings=[Raw(Mode.RANS, b"")]),
        CORRUPT,
        "mode rans",
    ),
    "zstd of a split": (
        lambda: build_frame(DATA, "I16", split=1, codings=[Zstd(), Stored()]),
        CORRUPT,
        "mode zstd",
    ),
    "constant of nothing": (lambda: raw(1, b""), CORRUPT, "constant stream"),
    "constant of 2 bytes": (lambda: raw(1, b"ab"), CORRUPT, "is 2, but must be 1"),
    "constant of half a unit": (
        lambda: build_frame(DATA, "I16", codings=[Raw(1, b"a")]),
        CORRUPT,
        "is 1, but must be 2",
    ),
    "stored is short": (lambda: raw(0, bytes(59)), CORRUPT, "stored stream in table row"),
    "stored is long": (lambda: raw(0, bytes(61)), CORRUPT, "is 61, but must be 60"),
    "carrier of more than its plane": (lambda: rans_beside_stored(31), CORRUPT, "stored stream"),
    "carrier lacks a byte": (lambda: rans_beside_stored(21), CORRUPT, "is 29, but must be 30"),
    "carrier has a byte too many": (lambda: rans_beside_stored(23), CORRUPT, "is 31, but must be"),
    "only the last stored plane carries": (short_first_of_two, CORRUPT, "stored stream"),
    "plane shorter than what is carried": (
        lambda: build_frame(
            DATA[:14],
            "BF16",
            split=2,
            codings=[Rans(), Stored()],
            edit=lambda _, p, stream: b"" if p == 1 else stream,
        ),
        CORRUPT,
        "is 8, but must be 7",
    ),
}


@pytest.mark.parametrize(("build", "error", "fragment"), cases(PLACE_LIES))
def test_a_thing_in_the_wrong_place_is_refused(
    build: Callable[[], BuiltFrame], error: type[PackhorseError], fragment: str
) -> None:
    check(build, error, fragment)


def escape_dropped(chunk: int, plane: int, stream: bytes) -> bytes:
    return stream if plane else stream[:4] + bytes([stream[4] - 1]) + stream[5:-1]


def escape_declared(chunk: int, plane: int, stream: bytes) -> bytes:
    """Plane 1 of "palette" has no escape code."""
    return stream[:4] + b"\1" + stream[5:] + b"?" if plane else stream


PALETTE_LIES = {  # edits of plane 0 of "palette", whose stream starts at byte 128
    "code_bits 0": (set_at(0, 0), "code_bits at byte offset 128 is 0"),
    "code_bits 5": (set_at(0, 5), "allowed: 1 to 4"),
    "has_escape 2": (set_at(1, 2), "has_escape at byte offset 129 is 2"),
    "reserved": (set_at(3, 1), "reserved field at byte offset 130"),
    "escape without its code": (escape_declared, "n_escapes without has_escape"),
    "entry of the escape": (set_at(8 + 3, 7), "unused palette entries at byte offset 139"),
    "last entry": (set_at(8 + 15, 7), "unused palette entries"),
    "header cut": (cut_to(23), "palette header"),
    "empty": (cut_to(0), "palette header"),
    "bit plane cut": (cut_to(24 + 15), "bytes of a bit plane at byte offset 160"),
    "escapes cut": (cut_to(24 + 16), "escapes at byte offset 168"),
    "too long": (appended(b"\0"), "behind the escapes"),
    "an escape too few": (escape_dropped, "n_escapes at byte offset 132"),
    "4 GiB of escapes": (set_at(4, 255, 255, 255, 255), "escapes at byte offset 168"),
}


@pytest.mark.parametrize(("edit", "fragment"), cases(PALETTE_LIES))
def test_a_lying_palette_is_refused(edit: Edit, fragment: str) -> None:
    check(lambda: SMALL["palette"](edit=edit), CORRUPT, fragment)


def rans(edit: Edit | None = None, **kwargs: object) -> BuiltFrame:
    """Bytes 1, 2 and three escapes in 4 lanes; the stream has frequencies at 40, states at 45."""
    how = {"mapped": (1, 2), "frequencies": (3000, 1000, 96), **kwargs}
    data = bytes([1] * 80 + [2] * 17 + [9] * 3)
    return build_frame(data, codings=[Rans(**how)], edit=edit, chunk_log=7)


def frequencies(*values: int) -> Edit:
    packed = sum(value << 12 * i for i, value in enumerate(values))
    return set_at(40, *packed.to_bytes(-(-3 * len(values) // 2), "little"))


def two_escapes_inserted(chunk: int, plane: int, stream: bytes) -> bytes:
    states = 40 + 6
    return stream[:4] + b"\2" + stream[5 : states + 16] + b"??" + stream[states + 16 :]


RANS_LIES = {  # edits of the stream, which starts at byte 64, or other arguments of the coding
    "lanes_log 1": (set_at(0, 1), {}, "lanes_log at byte offset 64 is 1"),
    "lanes_log 8": (set_at(0, 8), {}, "allowed: 2 to 7"),
    "prob_bits 11": (set_at(1, 11), {}, "prob_bits at byte offset 65 is 11"),
    "reserved": (set_at(2, 1), {}, "reserved field at byte offset 66"),
    "frequency 0": (frequencies(4000, 0, 96), {}, "mapped values of frequency 0"),
    "sum of 4095": (frequencies(2999, 1000, 96), {}, "frequencies at byte offset 104 is 4095"),
    "sum of 8192": (frequencies(4095, 4095, 2), {}, "is 8192, but must be 4096"),
    "no symbols": (set_at(8, *[0] * 34), {}, "sum of the frequencies"),
    "half byte left over": (set_at(44, 16), {}, "half byte behind the frequencies"),
    "escape beside 256 values": (
        None,
        {"mapped": range(256), "frequencies": (*[15] * 255, 270, 1)},
        "256 mapped values",
    ),
    "escapes without a code": (
        two_escapes_inserted,
        {"mapped": (1, 2, 9), "frequencies": (3000, 1000, 96, 0)},
        "n_escapes at byte offset 68 is 2, but must be 0",
    ),
    "state of 65535": (set_at(45 + 12, 255, 255, 0, 0), {}, "states below 2^16 at byte offset 109"),
    "last state of 2^17": (None, {"first_state": 0x20000}, "last states of 2^17 or more"),
    "last state of 2^16 + 5": (None, {"first_state": 0x10005}, "though nothing is carried"),
    "header cut": (cut_to(39), {}, "bytes of the rANS header"),
    "empty": (cut_to(0), {}, "bytes of the rANS header"),
    "frequencies cut": (cut_to(44), {}, "bytes of frequencies at byte offset 104"),
    "states cut": (cut_to(45 + 15), {}, "bytes of states at byte offset 109"),
    "escapes cut": (cut_to(61 + 2), {}, "escapes at byte offset 125"),
    "padding of the escapes cut": (cut_to(61 + 3), {}, "padding bytes of the escapes"),
    "words cut": (cut_to(-2), {}, "no word is left"),
    "half a word": (cut_to(-1), {}, "half a word"),
    "a word too many": (appended(b"ab"), {}, "number of unused words"),
    "an escape too many": (set_at(4, 4), {}, "n_escapes at byte offset 68 is 4, but must be 3"),
    "4 GiB of escapes": (set_at(4, 255, 255, 255, 255), {}, "escapes at byte offset 125"),
}


@pytest.mark.parametrize(("edit", "kwargs", "fragment"), cases(RANS_LIES))
def test_a_lying_rans_stream_is_refused(
    edit: Edit | None, kwargs: dict[str, object], fragment: str
) -> None:
    check(lambda: rans(edit, **kwargs), CORRUPT, fragment)


def zstd_frame(descriptor: int, fields: bytes) -> bytes:
    """A frame of one raw block, its header written by hand."""
    block = (len(DATA) << 3 | 1).to_bytes(3, "little") + DATA
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + fields + block


GOOD_ZSTD = zstd_frame(0x20, bytes([len(DATA)]))
ZSTD_LIES = {
    "another size": (zstandard.compress(DATA + b"xx"), "content size at byte offset 64 is 62"),
    "no size": (zstd_frame(0, b"\x50"), "content size"),
    "a petabyte": (zstd_frame(0xE0, (1 << 50).to_bytes(8, "little")), "content size"),
    "dictionary 7": (zstd_frame(0x21, bytes([7, len(DATA)])), "dictionary at byte offset 64 is 7"),
    "a byte behind": (GOOD_ZSTD + b"x", "Zstandard frame at byte offset 64"),
    "two frames": (GOOD_ZSTD * 2, "Zstandard frame"),
    "a skippable frame": (b"\x50\x2a\x4d\x18\4\0\0\0abcd", "Zstandard magic"),
    "cut": (GOOD_ZSTD[:-1], "Zstandard frame"),
    "header cut": (GOOD_ZSTD[:5], "Zstandard frame"),
    "empty": (b"", "Zstandard magic"),
    "checksum": (zstd_frame(0x24, bytes([len(DATA)])) + b"lies", "Zstandard frame"),
}


def test_the_hand_made_zstd_frame_is_good() -> None:
    frame = build_frame(DATA, "I16", codings=[Raw(Mode.ZSTD, GOOD_ZSTD)])
    assert decode_frame(bytes(frame)).data == DATA


@pytest.mark.parametrize(("stream", "fragment"), cases(ZSTD_LIES))
def test_a_lying_zstd_stream_is_refused(stream: bytes, fragment: str) -> None:
    check(lambda: build_frame(DATA, "I16", codings=[Raw(Mode.ZSTD, stream)]), CORRUPT, fragment)


def test_the_limit_of_the_caller_is_kept_before_anything_is_decoded() -> None:
    frame = SMALL["stored"]()
    assert len(decode_frame(bytes(frame), max_nbytes=60).data) == 60
    broken = bytes(frame.patch(150, b"another chunk CRC", seal=False))
    with pytest.raises(CorruptionError, match="takes 60 bytes, the caller allows 59"):
        decode_frame(broken, max_nbytes=59)


def test_ignored_bits_change_nothing() -> None:
    """Palette codes behind the last unit, and the byte behind an odd number of escapes."""
    decoded = decode_frame(bytes(SMALL["palette"](edit=set_at(24 + 7, 0xFF))))
    assert decoded.data == DATA
    odd = rans(set_at(61 + 3, 0xFF))
    assert decode_frame(bytes(odd)).data == odd.source
