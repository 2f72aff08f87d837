"""Lies in headers and about places: the clauses H, S1 to S7 and D."""

import frame_builder as fb
from frame_builder import (
    SIDE,
    SMALL,
    BuiltFrame,
    Constant,
    Palette,
    Rans,
    Raw,
    Side,
    Stored,
    Zstd,
    build_frame,
)

from lying_frames.lie import DATA, LIES, Lie, add, appended, cut_to
from packhorse.layout import Mode

# Fields of the frame "stored", whose header has 128 bytes and payload 64.
HEADER_LIES = {
    "another magic": ("H2", {"magic": b"\x89PHG"}, "magic at byte offset 0 is 89504847"),
    "version 0": ("H3", {"version": 0}, "version at byte offset 4 is 0"),
    "version 5": ("H4", {"version": 5}, "version at byte offset 4 is 5"),
    "version 255": ("H4", {"version": 255}, "upgrade"),
    "flag 2": ("H5", {"flags": 4}, "flags 0x4 at byte offset 8"),
    "flag 2 beside a base": ("H5", {"flags": 5}, "flags 0x5 at byte offset 8"),
    "a flag": ("H5", {"flags": 0x8000}, "flags 0x8000 at byte offset 8"),
    "dtype 0": ("H6", {"dtype_code": 0}, "unknown dtype 0 at byte offset 5"),
    "dtype 10": ("H6", {"dtype_code": 10}, "unknown dtype 10"),
    "dtype 27": ("H6", {"dtype_code": 27}, "unknown dtype 27"),
    "split 1 of floats": ("H7", {"split": 1}, "split at byte offset 7 is 1"),
    "an unknown split": ("H7", {"split": 3}, "allowed: [0, 2]"),
    "65 dimensions": ("H8", {"n_dims": 65}, "n_dims at byte offset 6 is 65"),
    "60 dimensions": ("H10", {"n_dims": 60}, "header_nbytes at byte offset 12 is 128"),
    "chunk_log 5": ("H9", {"chunk_log": 5}, "allowed: 6 to 20"),
    "a chunk of 4 MiB": ("H9", {"chunk_log": 21}, "chunk_log of BF16 at byte offset 11"),
    "header_nbytes 0": ("H10", {"header_nbytes": 0}, "is 0, but must be 128"),
    "header_nbytes 65": ("H10", {"header_nbytes": 65}, "must be 128"),
    "header_nbytes 192": ("H10", {"header_nbytes": 192}, "header_nbytes at byte offset 12"),
    "a header beyond the end": ("H10", {"header_nbytes": 1 << 31}, "is 2147483648, but must"),
    "a table beyond the end": (
        "H1",
        {"n_chunks": 1 << 20, "header_nbytes": (1 << 23) + 128},
        "the header ends at byte offset 8388736, but the data at 192",
    ),
    "no chunks": ("H14", {"n_chunks": 0}, "n_chunks at byte offset 40 is 0, but must be 1"),
    "2 chunks": ("H14", {"n_chunks": 2}, "is 2, but must be 1"),
    "another header CRC": (
        "H11",
        {"header_crc": 1, "seal": False},
        "header CRC at byte offset 44",
    ),
    "a stale header CRC": ("H11", {"level": 0, "seal": False}, "header CRC"),
    "a reserved byte": ("H16", {"reserved": b"\0\0\1"}, "reserved bytes at byte offset 49"),
    "frame_nbytes 128": ("H17", {"frame_nbytes": 128}, "byte offset 16 is 128, but must be 192"),
    "frame_nbytes of 2^63": ("H17", {"frame_nbytes": 1 << 63}, "must be 192"),
    "another content hash": ("D10", {"content_hash": bytes(16)}, "content hash at byte offset 24"),
    "rows without side data": ("S1", {"n_row_dims": 1}, "side descriptor at byte offset 52"),
    "a side stream too long for the header": (
        "H10",
        {"n_row_dims": 1, "side_descriptor": 1 << 20},
        "is 128, but must be 1048704",
    ),
}
for name, (clause, fields, fragment) in HEADER_LIES.items():
    add(clause, name, lambda fields=fields: SMALL["stored"]().lie(**fields), fragment)


def of_shape(*shape: int, dtype: str = "U8") -> BuiltFrame:
    """A frame without chunks."""
    return build_frame(b"", dtype, shape, codings=[Stored()])


SHAPE_LIES = {
    "2^63 elements": ("H12", (1 << 63,), "U8", "2^63 bits"),
    "2^63 bits": ("H12", (1 << 60,), "U8", "2^63 bits"),
    "a product of 2^64": ("H12", (1 << 32, 1 << 32), "U8", "2^63 bits"),
    "an overflow times 0": ("H12", (1 << 40, 1 << 40, 0), "U8", "2^63 bits"),
    "0 times an overflow": ("H12", (0, 1 << 40, 1 << 40), "U8", "2^63 bits"),
    "2^50 bytes in 64": ("H14", (1 << 50,), "U8", "n_chunks"),
    "half a byte": ("H13", (3,), "F4", "bits beyond the last byte"),
    "a byte and a half": ("H13", (2,), "F6_E2M3", "bits beyond the last byte"),
    "65 true dimensions": ("H8", (0,) * 65, "U8", "n_dims"),
}
for name, (clause, shape, dtype, fragment) in SHAPE_LIES.items():
    add(clause, name, lambda s=shape, d=dtype: of_shape(*s, dtype=d), fragment)


def with_side(side: Side, dtype: str = "BF16", split: int = 2, **kwargs: object) -> BuiltFrame:
    """Side data that no chunk uses, beside a tensor of 5 x 6 units."""
    codings = [Stored()] * (2 if split else 1)
    kwargs = {"data": DATA, "shape": (5, 6), "codings": codings, **kwargs}
    return build_frame(dtype=dtype, split=split, side=side, **kwargs)


def too_many_rows() -> BuiltFrame:
    """2^21 columns and a row, in a frame that is right otherwise."""
    n, side = 1 << 21, Side(b"", b"", coding=Raw(Mode.PALETTE, b"?"))
    kwargs = {"split": 2, "codings": [Constant()], "chunk_log": 21, "side": side}
    return build_frame(bytes(n), "F8_E4M3", (1, n), **kwargs)


def raw(mode: int, stream: bytes) -> BuiltFrame:
    return build_frame(bytes(60), codings=[Raw(mode, stream)])


def of_units(mode: Mode) -> BuiltFrame:
    return build_frame(DATA, "BF16", codings=[Raw(mode, b"")])


def beside_stored(nbytes: int) -> BuiltFrame:
    """The stored plane of 30 bytes is cut or filled to `nbytes`; the rANS stream carries 8."""
    return SMALL["rans-carry"](
        edit=lambda _, p, stream: stream.ljust(nbytes, b"x")[:nbytes] if p == 1 else stream
    )


PLACE_LIES = {
    "nothing at all": ("H1", lambda: b"", "the fixed part of the header ends at byte offset 56"),
    "55 bytes": ("H1", lambda: bytes(SMALL["stored"]())[:55], "the data at 55"),
    "a header cut": ("H1", lambda: bytes(SMALL["stored"]())[:127], "the header ends at byte"),
    "a payload cut": ("H1", lambda: bytes(SMALL["stored"]())[:191], "the frame ends at byte"),
    "bytes behind": ("H18", lambda: bytes(SMALL["stored"]()) + bytes(64), "must be 192"),
    "another file": ("H2", lambda: b"PK\3\4" + bytes(60), "magic at byte offset 0"),
    "a table shorter than the shape": (
        "H10",
        lambda: of_shape(1 << 34).lie(chunk_log=21, n_chunks=1 << 13),
        "header_nbytes at byte offset 12",
    ),
    "chunk_log 22": ("H9", lambda: raw(0, bytes(60)).lie(chunk_log=22), "allowed: 6 to 21"),
    "float split of bytes": ("H7", lambda: raw(0, bytes(60)).lie(split=2), "allowed: [0]"),
    "padding of the header": (
        "H16",
        lambda: SMALL["stored"]().patch(127, b"x"),
        "padding bytes of the header at byte offset 80",
    ),
    "padding behind the side data": (
        "H16",
        lambda: SMALL["prediction"]().patch(127, b"x"),
        "padding bytes of the header at byte offset 125",
    ),
    "side data without rows": (
        "S1",
        lambda: SMALL["prediction"]().lie(n_row_dims=0),
        "side descriptor at byte offset 52",
    ),
    "side data without descriptor": (
        "S1",
        lambda: SMALL["prediction"]().lie(side_descriptor=0),
        "side descriptor at byte offset 52 is False, but must be True",
    ),
    "side data under split 0": (
        "S2",
        lambda: with_side(fb.side_of(5, 6), split=0),
        "split beside side data at byte offset 7 is 0",
    ),
    "side data under split 1": (
        "S2",
        lambda: with_side(fb.side_of(5, 6), "I16", split=1),
        "split beside side data at byte offset 7 is 1",
    ),
    "all dimensions are rows": (
        "S3",
        lambda: with_side(fb.side_of(30, 1, 2)),
        "n_row_dims at byte offset 48 is 2, allowed: 1 to 1",
    ),
    "255 row dimensions": (
        "S3",
        lambda: SMALL["prediction"]().lie(n_row_dims=255),
        "n_row_dims at byte offset 48 is 255",
    ),
    "side data of nothing": (
        "S4",
        lambda: with_side(fb.side_of(3, 0), data=b"", shape=(3, 0)),
        "whether a tensor with side data is empty",
    ),
    "2^21 + 1 rows and columns": ("S5", too_many_rows, "is 2097153, allowed: 2 to 2097152"),
    "constant side data": (
        "S6",
        lambda: with_side(Side(bytes(5), bytes(6), coding=Constant())),
        "mode 1 of the side data at byte offset 52",
    ),
    "zstd side data": (
        "S6",
        lambda: with_side(Side(bytes(5), bytes(6), coding=Zstd())),
        "mode 4 of the side data",
    ),
    "classed side data": (
        "S6",
        lambda: SMALL["prediction"]().lie(side_descriptor=5 << 24 | 41),
        "mode 5 of the side data",
    ),
    "side data of an unknown mode": (
        "S6",
        lambda: SMALL["prediction"]().lie(side_descriptor=7 << 24 | 41),
        "mode 7 of the side data",
    ),
    "stored side data are short": (
        "S7",
        lambda: with_side(fb.side_of(5, 6), edit=cut_to(10, plane=SIDE)),
        "stored side data at byte offset 52 is 10, but must be 11",
    ),
    "stored side data are long": (
        "S7",
        lambda: with_side(fb.side_of(5, 6), edit=appended(b"x", plane=SIDE)),
        "stored side data at byte offset 52 is 12, but must be 11",
    ),
    "mode 10": ("D1", lambda: raw(10, bytes(60)), "unknown mode 10"),
    "mode 255": ("D1", lambda: raw(255, b""), "unknown mode 255"),
    "a palette of units": ("D2", lambda: of_units(Mode.PALETTE), "mode palette"),
    "rans of units": ("D2", lambda: of_units(Mode.RANS), "mode rans"),
    "classed rans of units": ("D2", lambda: of_units(Mode.CLASSED_RANS), "mode classed_rans"),
    "classed rans of whole bytes": (
        "D2",
        lambda: raw(Mode.CLASSED_RANS, b"?"),
        "mode classed_rans in table row at byte offset 64",
    ),
    "zstd of a split": (
        "D2",
        lambda: build_frame(DATA, "I16", split=1, codings=[Zstd(), Stored()]),
        "mode zstd",
    ),
    "zstd of split bytes": (
        "D2",
        lambda: build_frame(DATA, "F8_E4M3", split=2, codings=[Zstd()]),
        "mode zstd",
    ),
    "constant of nothing": ("D3", lambda: raw(1, b""), "constant stream"),
    "constant of 2 bytes": ("D3", lambda: raw(1, b"ab"), "is 2, but must be 1"),
    "constant of half a unit": (
        "D3",
        lambda: build_frame(DATA, "I16", codings=[Raw(1, b"a")]),
        "is 1, but must be 2",
    ),
    "stored is short": ("D4", lambda: raw(0, bytes(59)), "stored stream in table row"),
    "stored is long": ("D4", lambda: raw(0, bytes(61)), "is 61, but must be 60"),
    "a carrier longer than its plane": ("D4", lambda: beside_stored(31), "stored stream"),
    "only the last stored plane carries": (
        "D4",
        lambda: build_frame(
            DATA,
            "F32",
            split=2,
            codings=[Stored(), Rans(), Rans(), Stored()],
            edit=cut_to(7),
        ),
        "stored stream",
    ),
    "a short carrier without rans": (
        "D4",
        lambda: build_frame(DATA, "BF16", split=2, codings=[Stored(), Palette()], edit=cut_to(7)),
        "stored stream",
    ),
    "another chunk CRC": (
        "D5",
        lambda: SMALL["stored"]().patch(72, b"lies", seal=False).seal(chunks=False),
        "CRC of the chunk at byte offset 128",
    ),
    "padding of a chunk": ("D6", lambda: SMALL["stored"]().patch(191, b"x"), "byte offset 188"),
    "a carrier lacks a byte": ("D7", lambda: beside_stored(21), "is 29, but must be 30"),
    "a carrier has a byte too many": ("D7", lambda: beside_stored(23), "is 31, but must be"),
    "a carrier of a classed stream lacks a byte": (
        "D7",
        lambda: SMALL["prediction"](edit=cut_to(21, plane=1)),
        "is 29, but must be 30",
    ),
    "a plane shorter than what is carried": (
        "D7",
        lambda: build_frame(
            DATA[:14], "BF16", split=2, codings=[Rans(), Stored()], edit=cut_to(0, plane=1)
        ),
        "is 8, but must be 7",
    ),
    "the hash of nothing": (
        "D10",
        lambda: SMALL["empty"]().lie(content_hash=bytes(16)),
        "content hash",
    ),
}
for name, (clause, build, fragment) in PLACE_LIES.items():
    add(clause, name, build, fragment)
LIES["over the limit of the caller"] = Lie(
    "H15",
    lambda: SMALL["stored"]().patch(150, b"another chunk CRC", seal=False),
    "takes 60 bytes; the caller allows 59",
    max_nbytes=59,
)
