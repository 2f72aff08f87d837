"""Every decoder decodes the frames printed in docs/format.md to the values that the page gives."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from format_page import PAGE
from frame_builder import hexdump

from packhorse.codecs.tables import TableArrays, decode_header, gather_into, rank_marks
from packhorse.layout import DTYPE_BY_CODE, Mode
from packhorse.reference import decode_frame
from packhorse.reference.tables import TableArrays as SlowArrays
from packhorse.reference.tables import decode_table

EXPECTED_MODES = {
    "constant": {Mode.CONSTANT},
    "stored": {Mode.STORED},
    "palette": {Mode.PALETTE, Mode.STORED},
    "rans-alias": {Mode.RANS, Mode.STORED},
    "rans-wide": {Mode.RANS},
    "zstd": {Mode.ZSTD},
    "prediction": {Mode.CLASSED_RANS, Mode.STORED},
    "lead": {Mode.CLASSED_RANS, Mode.PALETTE},
    "delta": {Mode.DELTA},
    "delta-equal": {Mode.DELTA},
    "sparse-delta": {Mode.SPARSE_DELTA},
    "matches": {Mode.MATCHES},
    "nibbles": {Mode.NIBBLES},
}


@dataclass(frozen=True)
class Example:
    frame: bytes
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    base_dtype: str | None
    base: bytes | None


def read_dump(dump: str) -> bytes:
    """The inverse of `frame_builder.hexdump`."""
    data, line = b"", b""
    for text in dump.strip().splitlines():
        if text == "*":
            continue
        offset, digits = text.split("  ")
        gap = int(offset, 16) - len(data)
        data += line * (gap // 16)
        line = bytes.fromhex(digits)
        data += line
    return data


def read_example(block: str) -> Example:
    front, _, decoded = block.partition("decodes to ")
    dump, _, base = front.partition("with the base ")
    match = re.fullmatch(r"(\w+) \[([\d, ]*)\]:([0-9a-f\s]*)", decoded)
    assert match, decoded
    shape = tuple(int(dim) for dim in match[2].split(",") if dim.strip())
    base_dtype, _, base_data = base.partition(":")
    return Example(
        read_dump(dump),
        match[1],
        shape,
        bytes.fromhex(match[3]),
        base_dtype or None,
        bytes.fromhex(base_data) if base else None,
    )


def read_page() -> dict[str, Example]:
    blocks = re.findall(r"^```\w*\nexample: (\S+)\n(.*?)^```$", PAGE, re.S | re.M)
    return {name: read_example(block) for name, block in blocks}


def test_the_page_has_an_example_for_each_mode() -> None:
    assert read_page().keys() == EXPECTED_MODES.keys()
    assert set().union(*EXPECTED_MODES.values()) == set(Mode)


@pytest.mark.parametrize("name", EXPECTED_MODES)
def test_the_dumps_are_as_the_page_says_they_are(name: str) -> None:
    assert f"example: {name}\n{hexdump(read_page()[name].frame)}\n" in PAGE


@pytest.mark.parametrize("name", EXPECTED_MODES)
def test_the_slow_decoder_agrees_with_the_page(name: str) -> None:
    example = read_page()[name]
    decoded = decode_frame(example.frame, base=example.base)
    assert decoded.base_dtype == example.base_dtype
    assert (decoded.dtype, decoded.shape) == (example.dtype, example.shape)
    assert decoded.data == example.data
    assert {mode for modes in decoded.modes for mode in modes} == EXPECTED_MODES[name]
    assert DTYPE_BY_CODE[example.frame[5]].name == example.dtype
    assert decoded.side_mode == (Mode.STORED if name == "prediction" else None)


@pytest.mark.parametrize("name", EXPECTED_MODES)
def test_the_fast_decoder_agrees_with_the_page(name: str) -> None:
    from packhorse.frame import Frame

    example = read_page()[name]
    frame = Frame.from_buffer(example.frame)
    assert (frame.dtype, frame.shape) == (example.dtype, example.shape)
    data = bytearray(frame.logical_nbytes)
    frame.decompress_into(data, base=example.base)
    assert data == example.data
    frame.verify(base=example.base)


TABLES = {"triples", "list"}


def test_the_page_has_examples_of_tables() -> None:
    assert set(re.findall(r"^example table: (\S+)$", PAGE, re.M)) == TABLES


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_are_what_the_page_says(name: str) -> None:
    match = re.search(
        rf"example table: {name}\ntable\n(.*?)rows\n(.*?)marks:(.*?)exception_starts:(.*?)"
        r"exception_columns:(.*?)exception_elements:(.*?)"
        r"decodes to (\w+) \[(\d+), (\d+)\]:(.*?)```",
        PAGE,
        re.S,
    )
    assert match is not None
    header = decode_header(read_dump(match[1]))
    format, n_rows, n_columns = header.format, int(match[8]), int(match[9])
    assert (header.dtype, header.n_rows, format.n_columns) == (match[7], n_rows, n_columns)
    rows = np.frombuffer(read_dump(match[2]), np.uint8).reshape(n_rows, format.stride)
    marks, starts, columns, elements = (
        np.frombuffer(bytes.fromhex(match[part]), kind)
        for part, kind in zip((3, 4, 5, 6), ("<u4", "<u4", "<u2", "u1"), strict=True)
    )
    data = bytes.fromhex(match[10])
    words = elements.view(f"<u{format.element_nbytes}")
    slow = SlowArrays(rows, marks, rank_marks(marks), starts, columns, words)
    assert decode_table(slow, format).tobytes() == data
    out = np.empty((n_rows, format.row_nbytes), np.uint8)
    arrays = TableArrays(rows, marks, rank_marks(marks), starts, columns, elements)
    gather_into(arrays, format, np.arange(n_rows), out)
    assert out.tobytes() == data
