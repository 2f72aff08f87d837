"""The slow decoder on classed rANS, by the lead and by prediction, and on side data."""

import random
from itertools import product

import frame_builder as fb
import pytest
from frame_builder import Classed, Constant, Palette, Rans, Side, Stored, build_frame, side_of

from packhorse.layout import DTYPE_BY_NAME, DTYPES, ClassSource, Mode, Split
from packhorse.reference import decode_frame

FLOATS = [row.name for row in DTYPES if Split.FLOAT in row.splits]
SPLIT_PAIRS = [
    (row.name, int(s)) for row in DTYPES for s in row.splits if s and row.unit_nbytes > 1
]
SHAPES = ((1, 1), (1, 65), (65, 1), (7, 19), (13, 77))
THRESHOLDS = ((), (100,), (0, 255), (70, 70, 70), (40, 90, 200))


def matrix(dtype: str, n_rows: int, n_columns: int, n_values: int = 60) -> bytes:
    """Columns count units here, so a C64 matrix has half as many elements."""
    return fb.units_of_values(n_rows * n_columns, DTYPE_BY_NAME[dtype].unit_nbytes, n_values)


def prediction(**kwargs: object) -> Classed:
    return Classed(source=ClassSource.PREDICTION, **kwargs)


def check(data: bytes, dtype: str, codings: list[fb.Coding], **kwargs: object) -> fb.BuiltFrame:
    built = build_frame(data, dtype, codings=codings, **kwargs)
    decoded = decode_frame(bytes(built))
    assert decoded.data == data
    assert all(modes == tuple(c.mode for c in codings) for modes in decoded.modes)
    return built


@pytest.mark.parametrize(("dtype", "split"), SPLIT_PAIRS)
@pytest.mark.parametrize("thresholds", THRESHOLDS, ids=str)
def test_planes_follow_plane_0(dtype: str, split: int, thresholds: tuple[int, ...]) -> None:
    n_planes = DTYPE_BY_NAME[dtype].unit_nbytes
    for i, n in enumerate((2, 64, 66, 130, 700)):
        data = fb.units_of_values(n, n_planes, 90, seed=n)
        first = (Rans(4), Palette(2), Palette(3, raw_bits=3))[i % 3]
        follow = Classed((2, 4, 7)[i % 3], thresholds=thresholds, raw_bits=(0, 3, 7)[i // 2])
        codings = [first, follow, Stored(), Stored(), Rans(), follow, Stored(), follow][:n_planes]
        built = check(data, dtype, codings, split=split, chunk_log=10)
        assert n_planes != 4 or n < 700 or built.streams[0, 3][1] == n - carried(codings)


def carried(codings: list[fb.Coding]) -> int:
    return sum(coding.n_carried for coding in codings)


def test_a_constant_leads_to_one_class() -> None:
    rng = random.Random(1)
    data = b"".join(bytes([rng.randrange(128), 0x3F]) for _ in range(100))
    check(data, "I16", [Constant(), Classed(thresholds=(1, 0x3F, 0x80))], split=1, chunk_log=7)


@pytest.mark.parametrize("lanes_log", [2, 4, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_predictions_come_back(dtype: str, lanes_log: int) -> None:
    n_planes = DTYPE_BY_NAME[dtype].unit_nbytes
    per_element = DTYPE_BY_NAME[dtype].bits // 8 // n_planes
    side_codings = [Stored(), Palette(2), Palette(1, raw_bits=4), Rans(3), Rans(2, raw_bits=2)]
    for i, (n_rows, n_columns) in enumerate(SHAPES):
        units = per_element * n_columns
        data = matrix(dtype, n_rows, units)
        side = side_of(n_rows, units, coding=side_codings[(i + lanes_log) % 5])
        how = prediction(lanes_log=lanes_log, raw_bits=i)
        rest = (Stored(), Classed(thresholds=(60, 128)), Rans(lanes_log))[i % 3]
        codings = [how, *[rest] * (n_planes - 1)]
        kwargs = {"split": 2, "chunk_log": 9, "side": side}
        check(data, dtype, codings, shape=(n_rows, n_columns), **kwargs)


@pytest.mark.parametrize(
    ("shape", "n_row_dims"),
    [((2, 3, 5), 1), ((2, 3, 5), 2), ((1, 1, 30), 2), ((30, 1, 1), 1), ((6, 5, *[1] * 62), 63)],
    ids=str,
)
def test_rows_are_the_first_dimensions(shape: tuple[int, ...], n_row_dims: int) -> None:
    n_rows = 1
    for dim in shape[:n_row_dims]:
        n_rows *= dim
    side = side_of(n_rows, 30 // n_rows, n_row_dims)
    data = matrix("BF16", 1, 30)
    built = check(data, "BF16", [prediction(), Stored()], shape=shape, split=2, side=side)
    assert decode_frame(bytes(built)).side_mode == Mode.STORED


def test_a_prediction_is_in_quarters_and_wraps() -> None:
    """One row without noise: the stream yields 128 wherever plane 0 equals the prediction."""
    rows, columns = bytes([250]), bytes(range(0, 64, 2))
    predicted = [((250 + column) % 256) // 4 for column in columns]
    data = bytes((byte >> 1 | byte << 7) & 0xFF for byte in predicted)
    how = prediction(mapped=(128,), frequencies=(4095, 1))
    side = Side(rows, columns)
    built = build_frame(data, "F8_E5M2", (1, 32), split=2, codings=[how], side=side)
    assert decode_frame(bytes(built)).data == data
    offset = built.streams[0, 0][0]
    models = [bytes([128, 0]) + (4095 | 1 << 12).to_bytes(3, "little")] * 4
    assert bytes(built.data[offset + 16 : offset + 36]) == b"".join(models)


@pytest.mark.parametrize("chunk_log", [6, 7, 9])
def test_rows_go_on_from_chunk_to_chunk(chunk_log: int) -> None:
    data, side = matrix("F32", 11, 37), side_of(11, 37)
    codings = [prediction(lanes_log=3), Rans(), Classed(thresholds=(128,)), Stored()]
    check(data, "F32", codings, shape=(11, 37), split=2, chunk_log=chunk_log, side=side)


def test_classes_share_escapes_in_the_order_of_decoding() -> None:
    """Every unit is an escape of its class, so a wrong order gives wrong bytes."""
    data = bytes(byte for i in range(200) for byte in (i, i % 7))
    how = Classed(thresholds=(2, 4, 6), mapped=(255,), frequencies=(1, 4095))
    check(data, "U16", [Palette(3, has_escape=False), how], split=1, chunk_log=8)


@pytest.mark.parametrize(
    ("n_classes", "raw_bits", "lanes_log"), list(product((1, 2, 3, 4), range(8), (2, 4, 7)))
)
def test_every_shape_of_a_classed_stream(n_classes: int, raw_bits: int, lanes_log: int) -> None:
    data = fb.units_of_values(333, 2, 200, seed=raw_bits)
    how = Classed(lanes_log, thresholds=(60, 120, 180)[: n_classes - 1], raw_bits=raw_bits)
    check(data, "F16", [Rans(lanes_log, raw_bits=raw_bits), how], split=2, chunk_log=9)


@pytest.mark.parametrize("n_mapped", [31, 32, 63, 64, 200])
def test_models_of_classes_have_every_layout(n_mapped: int) -> None:
    data = fb.units_of_values(500, 2, 250)
    how = Classed(3, mapped=tuple(range(n_mapped)), thresholds=(128,), escape_frequency=900)
    check(data, "BF16", [Palette(4), how], split=2, chunk_log=9)


def test_the_most_side_data() -> None:
    n = (1 << 21) - 1
    kwargs = {"split": 2, "codings": [Constant()], "chunk_log": 21}
    side = Side(bytes(1), bytes(n))
    built = build_frame(bytes(n), "F8_E4M3", (1, n), side=side, **kwargs)
    decoded = decode_frame(bytes(built))
    assert decoded.data == bytes(n)
    assert decoded.side_mode == Mode.STORED
