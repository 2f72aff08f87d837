"""Mode nibbles: every width of units, every level and code path, and what does not pay."""

from itertools import product

import numpy as np
import pytest
from codec_battery import check_paths, make_data
from frame_builder import SMALL

from packhorse import _core
from packhorse.codecs.plan import Plan
from packhorse.codecs.source import cut
from packhorse.frame import Frame, compress_buffer
from packhorse.gpu.plans import why_unsupported
from packhorse.layout import DTYPE_BY_NAME, NIBBLE_CHUNK_NBYTES, Level, Mode, Split
from packhorse.reference import decode_frame

CHUNK = NIBBLE_CHUNK_NBYTES


def halved(data: bytes, dtype: str, level: Level, threads: int = 1) -> Frame:
    """A frame of mode nibbles, whether it pays or not."""
    row = DTYPE_BY_NAME[dtype]
    geometry = cut(row, Split.WHOLE, len(data), NIBBLE_CHUNK_NBYTES)
    plan = Plan(geometry, level, len(data), whole=Mode.NIBBLES)
    shape = (len(data) * 8 // row.bits,)
    return compress_buffer(data, dtype, shape, level=level, like=plan, threads=threads)


def check(data: bytes, dtype: str, level: Level = Level.DEFAULT) -> Frame:
    """Every path writes the same bytes, and reads them, whole and in part."""
    return check_paths(data, lambda threads: halved(data, dtype, level, threads))


def modes(frame: Frame) -> set[Mode]:
    return set(frame.planes()[0].modes)


@pytest.mark.parametrize(("dtype", "level"), [*product(("U8", "I16", "U32", "I64", "F4"), Level)])
def test_units_of_any_width_come_back(dtype: str, level: Level) -> None:
    for n in (300, 1111, 4096, 5001):
        data = make_data("halves", dtype, n)
        frame = check(data, dtype, level)
        assert modes(frame) == {Mode.NIBBLES}
        assert decode_frame(frame.to_bytes()).data == data


# Bytes around the ends of rounds (two units a byte), segments of the encoder and blocks of the
# decoder, and where the number of lanes changes.
EDGES = [2, 8, 64, 511, 512, 513, 1024, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 10_000, 40_000]


@pytest.mark.parametrize("n", [*range(1, 40), *(n + k for n in EDGES for k in (0, 1))])
def test_any_length_comes_back(n: int) -> None:
    check(make_data("halves", "U8", n), "U8")


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + CHUNK // 2 + 1, 3 * CHUNK + 17])
def test_chunks_are_packed_one_by_one(n: int) -> None:
    frame = check(make_data("halves", "U8", n), "U8")
    assert frame.n_chunks == (1 if n <= CHUNK else -(-n // CHUNK))
    assert modes(frame) - {Mode.STORED} == {Mode.NIBBLES}  # a last chunk of 17 bytes is stored


def test_long_streams_have_128_lanes_and_short_ones_fewer() -> None:
    for n, lanes_log in ((20_000, 7), (5000, 4), (900, 2)):
        frame = halved(make_data("halves", "U8", n), "U8", Level.DEFAULT)
        assert frame.to_bytes()[128] == lanes_log


@pytest.mark.parametrize("kind", ["constant", "noise", "few", "ids", "31 values"])
def test_what_does_not_pay_is_stored_or_constant(kind: str) -> None:
    for dtype in ("U8", "I32"):
        data = make_data(kind, dtype, 5001)
        frame = check(data, dtype)
        assert len(modes(frame)) == 1
        assert modes(frame) <= {Mode.NIBBLES, Mode.STORED, Mode.CONSTANT}
        assert frame.nbytes <= len(data) + 192
        if kind in ("constant", "noise"):
            assert modes(frame) == {Mode.CONSTANT if kind == "constant" else Mode.STORED}


@pytest.mark.parametrize("rare", [0x10, 0xF3, 0x0F])
def test_halves_that_a_sample_missed_escape(rare: int) -> None:
    """The sample of a chunk has one run of 64 bytes in 32; the rare halves are beside it."""
    rng = np.random.default_rng(3)
    halves = rng.choice([5, 6, 7, 8], 2 * CHUNK, p=[0.1, 0.4, 0.4, 0.1]).astype(np.uint8)
    data = halves[::2] | halves[1::2] << 4
    data[100:CHUNK:40_000] = rare
    frame = check(data.tobytes(), "U8")
    assert modes(frame) == {Mode.NIBBLES}
    n_escapes = int.from_bytes(frame.to_bytes()[132:136], "little")
    assert n_escapes >= len(data[100:CHUNK:40_000])


def test_the_source_may_change_meanwhile() -> None:
    """The hash is that of the bytes that were packed, although the plan is of others."""
    first = make_data("halves", "U8", 9000)
    plan = halved(first, "U8", Level.DEFAULT).plan
    for kind in ("noise", "constant", "weights"):
        data = make_data(kind, "U8", 9000)
        frame = compress_buffer(data, "U8", (9000,), like=plan)
        assert decode_frame(frame.to_bytes()).data == data


def test_kernels_leave_nibbles_to_the_host() -> None:
    frame = Frame.from_buffer(bytes(SMALL["nibbles-of-words"]()))
    table = np.array([[0, Mode.NIBBLES << 24 | 90]], np.uint32)
    assert "4 bytes that are not split" in (why_unsupported(table, frame.header.geometry) or "")
    frame = halved(make_data("halves", "U8", 5000), "U8", Level.DEFAULT)
    reason = why_unsupported(frame.header.table, frame.header.geometry)
    assert reason == "a plane of mode nibbles"


def test_the_core_refuses_nibbles_of_split_units_or_beside_a_base() -> None:
    source = np.zeros(2000, np.uint8)
    geometry = _core.Geometry(2, Split.BYTES, 12, 2000)
    context = _core.EncodeContext(2, None, None, 0, whole=Mode.NIBBLES)
    leaves = np.empty(16 + 239, np.uint8)
    output = _core.EncodeOutput(np.empty(2048, np.uint8), np.empty((1, 3), np.uint32), leaves)
    with pytest.raises(ValueError, match="matches and nibbles need whole units and no base"):
        _core.encode_chunks(source, geometry, context, output, 1)
    whole = _core.Geometry(1, Split.WHOLE, 12, 2000)
    base = _core.Base(source, False, 0)
    context = _core.EncodeContext(2, None, base, 0, whole=Mode.NIBBLES)
    with pytest.raises(ValueError, match="matches and nibbles need whole units and no base"):
        _core.encode_chunks(source, whole, context, output, 1)
    context = _core.EncodeContext(2, None, None, 0, whole=Mode.RANS)
    with pytest.raises(ValueError, match="whole must be stored, matches or nibbles"):
        _core.encode_chunks(source, geometry, context, output, 1)
    with pytest.raises(ValueError, match="one whole unit or more"):
        _core.estimate_nibbles(source[:0], 1, 2, 1)
    with pytest.raises(ValueError, match="something to sample"):
        _core.estimate_nibbles(source, 1, 2, 0)
