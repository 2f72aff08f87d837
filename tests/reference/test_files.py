"""The slow decoder restores packed files byte for byte and refuses all other files."""

import base64
import json
import struct
from collections.abc import Callable

import frame_builder as fb
import pytest
import zstandard
from format_page import clauses
from frame_builder import build_file, build_frame, original_file

from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, TruncationError
from packhorse.reference import decode_file

A = fb.units_of_values(30, 2, 9)
B = bytes(range(7))
TENSORS = {"layer.a": ("BF16", (5, 6), A), "b": ("U8", (7,), B), "none": ("F64", (0, 2), b"")}
METADATA = {"format": "pt", "naïve ☃": "\N{SNOWMAN}"}
ORIGINAL = original_file(TENSORS, METADATA)
FRAMES = {
    "layer.a": bytes(build_frame(A, "BF16", (5, 6), split=2, codings=[fb.Rans(), fb.Stored()])),
    "b": bytes(build_frame(B, codings=[fb.Stored()])),
    "none": bytes(build_frame(b"", "F64", (0, 2), codings=[fb.Stored()])),
}


def packed(frames: dict[str, bytes] | None = None, **hooks: Callable) -> bytes:
    frames = FRAMES if frames is None else frames
    return build_file(ORIGINAL, frames, metadata=METADATA, **hooks)


@pytest.mark.parametrize("metadata", [None, {}, METADATA, {"packhorse": "mine"}])
@pytest.mark.parametrize("padding", [0, 1, 8])
def test_a_file_comes_back_byte_for_byte(metadata: dict[str, str] | None, padding: int) -> None:
    original = original_file(TENSORS, metadata, padding=padding)
    assert decode_file(build_file(original, FRAMES, metadata=metadata)) == original


def test_a_file_of_no_tensors_comes_back() -> None:
    original = original_file({})
    assert decode_file(build_file(original, {})) == original


def test_tensors_are_restored_in_the_order_of_the_original_data() -> None:
    text = json.dumps(
        {
            "z": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]},
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [7, 9]},
        }
    ).encode()
    original = struct.pack("<Q", len(text)) + text + B + b"ab"
    z, a = (bytes(build_frame(data, codings=[fb.Stored()])) for data in (B, b"ab"))
    assert decode_file(build_file(original, {"z": z, "a": a})) == original
    assert decode_file(build_file(original, {"a": a, "z": z})) == original


def test_the_limit_of_the_caller_names_the_tensor() -> None:
    assert decode_file(packed(), max_nbytes=60) == ORIGINAL
    with pytest.raises(CorruptionError, match=r"'layer\.a'.*takes 60 bytes; the caller allows 59"):
        decode_file(packed(), max_nbytes=59)


def test_every_truncation_of_a_file_is_reported() -> None:
    whole = packed()
    for length in range(len(whole)):
        with pytest.raises(TruncationError):
            decode_file(whole[:length])


def test_a_flipped_bit_in_a_file_is_noticed_or_harmless() -> None:
    whole = build_file(original_file({"b": TENSORS["b"]}), {"b": FRAMES["b"]})
    original = decode_file(whole)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            restored = decode_file(bytes(damaged))
        except PackhorseError:
            continue
        assert restored == original, f"bit {bit}"


def entry(name: str, **fields: object) -> Callable[[dict], None]:
    return lambda header: header[name].update(fields)


def record(**fields: object) -> Callable[[dict], None]:
    return lambda record: record.update(fields)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def edit(text: bytes) -> bytes:
        assert old in text
        return text.replace(old, new)

    return edit


def dropped(name: str) -> Callable[[dict], None]:
    return lambda fields: fields.pop(name)


def swapped_metadata(value: object) -> Callable[[dict], None]:
    return lambda header: header.update(__metadata__=value)


def metadata_changed(key: str, value: str | None) -> Callable[[dict], None]:
    def edit(header: dict) -> None:
        header["__metadata__"].pop(key)
        if value is not None:
            header["__metadata__"][key] = value

    return edit


def stray_bits(record: dict) -> None:
    record["header"] = "QUJDRB=="  # as "QUJDRA==", but for a bit behind the last byte


def long_header(header: dict) -> None:
    record = json.loads(header["__metadata__"]["packhorse"])
    frame = zstandard.ZstdCompressor().compress(b"{}" + b" " * 100_000_000)
    record["header"] = base64.b64encode(frame).decode()
    record["crc32c"] = fb.record_crc(record)
    header["__metadata__"]["packhorse"] = json.dumps(record)


def twice(record: dict) -> None:
    record["header"] = base64.b64encode(base64.b64decode(record["header"]) * 2).decode()


def without_size(record: dict) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")
    record["header"] = base64.b64encode(frame).decode()


FIRST, LAST = len(FRAMES["layer.a"]), len(FRAMES["layer.a"] + FRAMES["b"])  # the offsets of "b"
WITHOUT_B = {name: frame for name, frame in FRAMES.items() if name != "b"}
FILE_LIES = {  # clause of section 9.1, arguments of `packed`, what the message says
    "no metadata": (
        "not packed",
        {"edit_header": dropped("__metadata__")},
        "this is not a packed file",
    ),
    "null metadata": (
        "not packed",
        {"edit_header": swapped_metadata(None)},
        "this is not a packed file",
    ),
    "list of metadata": ("F4", {"edit_header": swapped_metadata([])}, "not a map of strings"),
    "number in metadata": (
        "F4",
        {"edit_header": swapped_metadata({"a": 1})},
        "not a map of strings",
    ),
    "record is no JSON": (
        "F3",
        {"edit_header": swapped_metadata({"packhorse": "{"})},
        "not valid JSON",
    ),
    "record is a list": (
        "F11",
        {"edit_header": swapped_metadata({"packhorse": "[]"})},
        "is a list, but must be an object",
    ),
    "version 0": ("F11", {"edit_record": record(version=0)}, "lacks version 1"),
    "version true": ("F11", {"edit_record": record(version=True)}, "lacks version 1"),
    "version text": ("F11", {"edit_record": record(version="1")}, "lacks version 1"),
    "no version": ("F11", {"edit_record": dropped("version")}, "lacks version 1"),
    "no recorded header": ("F11", {"edit_record": dropped("header")}, "lacks version 1"),
    "header is no base64": ("F12", {"edit_record": record(header="K-Uv")}, "not base64"),
    "header without padding": ("F12", {"edit_record": record(header="KLU")}, "not base64"),
    "header has stray bits": ("F12", {"edit_record": stray_bits}, "not base64"),
    "header is no zstd": ("F12", {"edit_record": record(header="QUJDRA==")}, "Zstandard magic"),
    "header over 100 MB": ("F2", {"edit_header": long_header}, "content size"),
    "no CRC": ("F13", {"edit_record": record(crc32c=None)}, "crc32c in metadata key"),
    "CRC is a number": ("F13", {"edit_record": record(crc32c=0)}, "crc32c in metadata key"),
    "another CRC": ("F13", {"edit_record": record(crc32c="0" * 8)}, "crc32c in metadata key"),
    "frame is missing": ("F14", {"frames": WITHOUT_B}, "['b'] differ"),
    "frame too many": ("F14", {"frames": {**FRAMES, "c": FRAMES["b"]}}, "['c'] differ"),
    "metadata is missing": (
        "F15",
        {"edit_header": metadata_changed("format", None)},
        "['format'] differ",
    ),
    "metadata differs": (
        "F15",
        {"edit_header": metadata_changed("format", "tf")},
        "['format'] differ",
    ),
    "frames swapped": (
        "F17",
        {"frames": {**FRAMES, "b": FRAMES["none"]}},
        "dtype and shape of the frame",
    ),
    "another dtype": ("F16", {"edit_header": entry("b", dtype="I8")}, "dtype and number of"),
    "another shape": (
        "F16",
        {"edit_header": entry("b", shape=[1, LAST - FIRST])},
        "dtype and number of",
    ),
    "overlap": (
        "F8",
        {"edit_header": entry("b", data_offsets=[FIRST - 8, LAST - 8])},
        "start of tensor 'b'",
    ),
    "hole": (
        "F8",
        {"edit_header": entry("b", data_offsets=[FIRST + 8, LAST + 8])},
        "start of tensor",
    ),
    "hole at the start": (
        "F8",
        {"edit_header": entry("layer.a", data_offsets=[8, FIRST + 8])},
        "start of",
    ),
    "backwards": ("F5", {"edit_header": entry("b", data_offsets=[LAST, FIRST])}, "lacks valid"),
    "negative": ("F5", {"edit_header": entry("b", data_offsets=[-1, LAST])}, "lacks valid"),
    "one offset": ("F5", {"edit_header": entry("b", data_offsets=[LAST])}, "lacks valid"),
    "fraction": ("F5", {"edit_header": entry("b", shape=[float(LAST - FIRST)])}, "lacks valid"),
    "shape is a map": ("F5", {"edit_header": entry("b", shape={})}, "lacks valid"),
    "entry is a list": ("F5", {"edit_header": lambda header: header.update(b=[])}, "lacks valid"),
    "no dtype": ("F5", {"edit_header": lambda header: header["b"].pop("dtype")}, "lacks valid"),
    "not JSON": ("F3", {"edit_text": lambda text: text.replace(b":", b";", 1)}, "not valid JSON"),
    "not UTF-8": (
        "F3",
        {"edit_text": lambda text: text.replace(b'"b"', b'"\xff"')},
        "not valid JSON",
    ),
    "lone surrogate": ("F3", {"edit_text": replaced(b'"none"', rb'"\ud800"')}, "not valid JSON"),
    "NaN": ("F3", {"edit_text": replaced(b'"U8"', b"NaN ")}, "not valid JSON"),
    "infinite number": ("F3", {"edit_text": replaced(b'"U8"', b"1e999")}, "not valid JSON"),
    "leading space": ("F3", {"edit_text": lambda text: b" " + text[:-1]}, "opening brace"),
    "duplicate key": ("F3", {"edit_text": replaced(b'"none"', b'"b"   ')}, "duplicate key"),
    "deep JSON": ("F3", {"edit_text": lambda text: b'{"a":' + b"[" * 200_000}, "not valid JSON"),
    "recorded: no JSON": ("F3", {"edit_original": lambda text: text[:-9]}, "recorded header"),
    "recorded: hole": (
        "F8",
        {"edit_original": replaced(b"[60, 67]", b"[61, 68]")},
        "recorded header",
    ),
    "recorded: duplicate": ("F3", {"edit_original": replaced(b'"none"', b'"b"')}, "duplicate key"),
    "recorded: dtype": (
        "F17",
        {"edit_original": replaced(b"BF16", b"F16")},
        "('BF16', (5, 6)), but must be ('F16', (5, 6))",
    ),
    "recorded: shape": ("F17", {"edit_original": replaced(b"[5, 6]", b"[30]")}, "('BF16', (30,))"),
    "recorded: size": ("F7", {"edit_original": replaced(b"67]", b"68]")}, "is 64, but must be 56"),
    "size": ("F7", {"edit_header": entry("b", shape=[191])}, "is 1536, but must be 1528"),
    "2^63 bits": ("F7", {"edit_header": entry("b", shape=[1 << 60, 0])}, "takes 2^63 bits"),
    "2^63": ("F5", {"edit_header": entry("b", shape=[1 << 63])}, "lacks valid"),
    "unknown dtype": ("F6", {"edit_header": entry("b", dtype="U7")}, "tensor 'b' in the file's"),
    "65 dimensions": ("F6", {"edit_header": entry("b", shape=[1] * 65)}, "of 65 dimensions"),
    "recorded: unknown dtype": (
        "F6",
        {"edit_original": replaced(b"BF16", b"BF15")},
        "in the recorded header is BF15",
    ),
    "newer version": ("F10", {"edit_record": record(version=2)}, "file version is 2, known: 1"),
    "surrogate in a list": (
        "F3",
        {"edit_header": lambda header: header["b"].update(more=["\ud800"])},
        "not valid JSON",
    ),
    "header of two zstd frames": ("F12", {"edit_record": twice}, "Zstandard frame"),
    "header without size": ("F12", {"edit_record": without_size}, "content size"),
}


@pytest.mark.parametrize(
    ("clause", "kwargs", "fragment"),
    [pytest.param(*row, id=name) for name, row in FILE_LIES.items()],
)
def test_a_lying_file_is_refused(clause: str, kwargs: dict, fragment: str) -> None:
    allowed = {CorruptionError} if clause == "not packed" else clauses()[clause]
    with pytest.raises(PackhorseError) as caught:
        decode_file(packed(**kwargs))
    assert {caught.type} == allowed
    assert fragment in str(caught.value)


def test_every_clause_of_the_page_has_a_lie() -> None:
    of_files = {number for number in clauses() if number[0] == "F"}
    elsewhere = {"F1", "F9"}  # every truncation, and bytes behind the data
    assert {row[0] for row in FILE_LIES.values()} - {"not packed"} == of_files - elsewhere


def test_a_recorded_header_may_have_no_checksum() -> None:
    def without_checksum(record: dict) -> None:
        frame = zstandard.ZstdDecompressor().decompress(base64.b64decode(record["header"]))
        record["header"] = base64.b64encode(zstandard.compress(frame)).decode()

    assert decode_file(packed(edit_record=without_checksum)) == ORIGINAL


def test_an_unknown_frame_in_a_file_keeps_its_error_and_gets_a_name() -> None:
    newer = bytes(build_frame(B, codings=[fb.Stored()]).lie(version=9))
    with pytest.raises(CompatibilityError, match=r"tensor 'b' at byte offset .*version at byte"):
        decode_file(packed({**FRAMES, "b": newer}))


@pytest.mark.parametrize("tail", [b"x", bytes(64)])
def test_bytes_behind_the_data_are_refused(tail: bytes) -> None:
    with pytest.raises(CorruptionError, match="the end of the file"):
        decode_file(packed() + tail)


def test_a_header_longer_than_the_cap_is_refused_at_once() -> None:
    with pytest.raises(CorruptionError, match="takes 100000001 bytes"):
        decode_file(struct.pack("<Q", 100_000_001) + b"{}")
