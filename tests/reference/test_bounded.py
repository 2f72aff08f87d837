"""Hostile messages of bounded codes: the fast and the slow decoder refuse the same ones, with the
documented errors; and the page's worked example."""

import re
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from bounded_samples import NUMPY, raw, table_rows
from codec_battery import ISAS, forced
from format_page import section

from packhorse.codecs.bounded import (
    Segment,
    decode_bounded,
    encode_bounded,
    encode_fixed,
    read_segments,
)
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, TruncationError
from packhorse.layout import (
    BOUNDED_CRC_OFFSET,
    BOUNDED_ENTRY,
    BOUNDED_HEADER,
    DTYPE_BY_CODE,
    Rounding,
)
from packhorse.reference.bounded import Entry, decode_message, encode_message
from packhorse.reference.words import crc32c

HEAD = BOUNDED_HEADER.size


def samples() -> dict[str, bytes]:
    """Small messages: several segments, both forms, with and without escapes."""
    rows = table_rows(30, 30).reshape(-1)
    rows[7], rows[800:803] = np.inf, (np.nan, 5.0, -9.0)
    mixed = [Segment(500, 0.01, 4), Segment(0, 1.0, 3), Segment(380, 0.02, 7), Segment(20, 0.1, 9)]
    fixed = encode_fixed(rows[:600], "F32", Segment(600, 0.05, 5))
    return {
        "mixed": encode_bounded(rows, "F32", mixed).tobytes(),
        "no escapes": encode_bounded(np.ones(40), "F64", [Segment(40, 1.0, 3)]).tobytes(),
        "fixed": fixed.data.tobytes(),
        "empty": encode_bounded(b"", "BF16", []).tobytes(),
    }


SAMPLES = samples()
EACH = pytest.mark.parametrize("name", SAMPLES)


def decode(message: bytes) -> bytes:
    """What the fast decoder makes of a message, by all code paths."""
    code = message[5] if len(message) > 5 and message[5] in range(14, 18) else 16
    dtype = DTYPE_BY_CODE[code]
    try:
        n = sum(entry.n for entry in read_segments(message))
    except PackhorseError:
        n = 100
    n = min(n, 10_000)
    results = []
    for isa in ISAS:
        out = np.empty(n, NUMPY[dtype.name])
        with forced(isa):
            decode_bounded(message, raw(out), dtype=dtype.name)
        results.append(raw(out).tobytes())
    assert len(set(results)) == 1
    return results[0]


def sealed(message: bytes) -> bytes:
    """The message with the length and the checksum of what it is."""
    whole = bytearray(message)
    struct.pack_into("<Q", whole, 16, len(whole))
    struct.pack_into("<I", whole, BOUNDED_CRC_OFFSET, 0)
    struct.pack_into("<I", whole, BOUNDED_CRC_OFFSET, crc32c(bytes(whole)))
    return bytes(whole)


@EACH
def test_both_decoders_read_the_samples(name: str) -> None:
    _, _, values = decode_message(SAMPLES[name])
    assert decode(SAMPLES[name]) == raw(values).tobytes()


@EACH
def test_a_message_that_is_cut_off_is_truncated(name: str) -> None:
    for n in range(len(SAMPLES[name])):
        for read in (decode, decode_message):
            with pytest.raises(TruncationError):
                read(SAMPLES[name][:n])
    with pytest.raises(CorruptionError, match="length"):
        decode(SAMPLES[name] + b"\0")


@EACH
def test_a_flipped_bit_is_found(name: str) -> None:
    message = SAMPLES[name]
    for place in range(len(message)):
        flipped = bytearray(message)
        flipped[place] ^= 1 << place % 8
        for read in (decode, decode_message):
            with pytest.raises((CorruptionError, CompatibilityError)):
                read(bytes(flipped))


@EACH
def test_a_flipped_bit_under_a_true_checksum_is_read_alike(name: str) -> None:
    """Either both decoders refuse it with the same error, or both read the same elements."""
    message, n_refused = SAMPLES[name], 0
    for place in [*range(min(len(message), 260)), *range(260, len(message), 7)]:
        flipped = bytearray(message)
        flipped[place] ^= 1 << (place * 5 + 3) % 8
        lying = sealed(bytes(flipped)) if not 12 <= place < 24 else bytes(flipped)
        try:
            _, _, values = decode_message(lying)
        except PackhorseError as error:
            n_refused += 1
            with pytest.raises(type(error)):
                decode(lying)
        else:
            assert decode(lying) == raw(values).tobytes()
    assert n_refused > 5


def lies() -> Iterator[tuple[str, bytes, type[PackhorseError]]]:
    """A message for each rule of the page that a decoder must check, under a true checksum."""
    good = SAMPLES["mixed"]

    def with_bytes(place: int, new: bytes, base: bytes = good) -> bytes:
        return sealed(base[:place] + new + base[place + len(new) :])

    entry = HEAD + BOUNDED_ENTRY.size * 2
    yield "another magic", with_bytes(3, b"F"), CorruptionError
    yield "version 0", with_bytes(4, b"\0"), CorruptionError
    yield "version 2", with_bytes(4, b"\2"), CompatibilityError
    yield "dtype of integers", with_bytes(5, b"\7"), CorruptionError
    yield "rounding 2", with_bytes(6, b"\2"), CorruptionError
    yield "form 2", with_bytes(7, b"\2"), CorruptionError
    yield "four segments in the fixed form", with_bytes(7, b"\1"), CorruptionError
    yield "a billion segments", with_bytes(8, struct.pack("<I", 1 << 30)), CorruptionError
    yield "a segment less", with_bytes(8, struct.pack("<I", 3)), CorruptionError
    yield "reserved header bytes", with_bytes(31, b"\1"), CorruptionError
    yield "4 billion elements", with_bytes(entry, b"\xff" * 4), CorruptionError
    yield "more elements", with_bytes(entry, struct.pack("<I", 600)), CorruptionError
    yield "more escapes than elements", with_bytes(entry + 4, b"\xff" * 4), CorruptionError
    yield "an escape more", with_bytes(entry + 4, b"\4"), CorruptionError
    for what, at in (("step", 8), ("center", 16), ("bound", 24)):
        for value in (np.nan, np.inf, -1.0, 0.0, 1e300, 0.1):
            allowed = {"step": (), "center": (-1.0, 0.0), "bound": (1e300, 0.1)}[what]
            if value not in allowed:
                lie = with_bytes(entry + at, struct.pack("<d", value))
                yield f"{what} {value}", lie, CorruptionError
    yield "0 bits", with_bytes(entry + 32, b"\0"), CorruptionError
    yield "17 bits", with_bytes(entry + 32, b"\x11"), CorruptionError
    yield "reserved byte of an entry", with_bytes(entry + 33, b"\1"), CorruptionError
    yield "doublings in the plain form", with_bytes(entry + 34, b"\1"), CorruptionError
    yield "last reserved byte of an entry", with_bytes(entry + 39, b"\1"), CorruptionError
    yield "padding of the table", with_bytes(HEAD + 4 * BOUNDED_ENTRY.size, b"\1"), CorruptionError
    yield "8 bytes more", sealed(good + bytes(8)), CorruptionError
    yield "1 byte more", sealed(good + bytes(1)), CorruptionError
    yield "an escape less", sealed(good[:-4]), CorruptionError
    fixed = SAMPLES["fixed"]
    yield "a used slot", with_bytes(len(fixed) - 1, b"\1", fixed), CorruptionError
    yield "a slot less", sealed(fixed[:-4]), CorruptionError
    yield "19 escapes", with_bytes(HEAD + 4, b"\x13", fixed), CorruptionError
    # The codes begin at 192; the first segment has 500 of 4 bits: 32 rows, the last of 4 lanes.
    last_word = 192 + 64 * 3
    yield "a code behind the last", with_bytes(last_word + 4 * 4 + 3, b"\x10"), CorruptionError
    yield "a zero code", with_bytes(192, b"\x00"), CorruptionError
    # The second segment with elements has 24 rows of 7 bits: 168 of 192 bits.
    second = 192 + 64 * 4
    yield "bits behind the codes", with_bytes(second + 64 * 5 + 1, b"\1"), CorruptionError


LIES = list(lies())


@pytest.mark.parametrize(("what", "lie", "error"), LIES, ids=[what for what, _, _ in LIES])
def test_a_lie_under_a_true_checksum_is_refused(
    what: str, lie: bytes, error: type[PackhorseError]
) -> None:
    for read in (decode_message, decode):
        with pytest.raises(error):
            read(lie)


def test_a_huge_message_is_not_believed() -> None:
    """The caller says how many elements there are, so nothing is allocated for more."""
    entry = BOUNDED_ENTRY.pack(2**32 - 1, 0, 0.25, 0.0, 0.125, 1, 0, 0, bytes(4))
    header = BOUNDED_HEADER.pack(b"\x89PHB", 1, 16, 0, 0, 1, 0, 0, bytes(8))
    with pytest.raises(CorruptionError, match="length"):
        decode_bounded(sealed(header + entry + bytes(56)), np.empty(1, np.float32), dtype="F32")


def read_dump(dump: str) -> bytes:
    """The inverse of `frame_builder.hexdump`."""
    data, line = b"", b""
    for text in dump.strip().splitlines():
        if text == "*":
            continue
        offset, digits = text.split("  ")
        data += line * ((int(offset, 16) - len(data)) // 16)
        line = bytes.fromhex(digits)
        data += line
    return data


def test_the_worked_example_of_the_page() -> None:
    match = re.search(
        r"^bounded example\n(.*?)^decodes to F32: ([^\n]*)$", section(13), re.S | re.M
    )
    assert match
    message, expected = read_dump(match[1]), bytes.fromhex(match[2])
    assert decode(message) == expected
    elements = np.array([0.5, -0.2, 0.7, np.nan, 100], np.float32)
    assert encode_bounded(elements, "F32", [Segment(5, 0.125, 3)]).tobytes() == message
    assert encode_message("F32", elements, [Entry(5, 0.125, 3, 0.0)], Rounding.NEAREST) == message
