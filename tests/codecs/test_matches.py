"""Mode matches: every width of units and numbers, every level and code path, and when it is
chosen."""

import random
from itertools import product

import numpy as np
import pytest
from codec_battery import ISAS, check_paths, check_tensor, forced, guarded, make_data
from frame_builder import SMALL, draw_matches_frame

from packhorse import _core
from packhorse.codecs.plan import Plan
from packhorse.codecs.source import cut
from packhorse.frame import Frame, compress_buffer, plan_buffer
from packhorse.gpu.plans import why_unsupported
from packhorse.layout import DTYPE_BY_NAME, Level, Mode, Split
from packhorse.reference import decode_frame

DTYPES = ("BOOL", "U16", "I32", "F32", "I64")
KINDS = ("ids", "steps", "constant", "noise", "alternating", "sorted", "few", "outlier")
SIZES = (1, 2, 3, 7, 63, 64, 300, 5001)


def matched(data: bytes, dtype: str, level: Level) -> Frame:
    """A frame of mode matches, whether it pays or not."""
    row = DTYPE_BY_NAME[dtype]
    plan = Plan(cut(row, Split.WHOLE, len(data), 1 << 21), level, len(data), whole=Mode.MATCHES)
    shape = (len(data) * 8 // row.bits,)
    return compress_buffer(data, dtype, shape, level=level, like=plan)


def check(data: bytes, dtype: str, level: Level) -> Frame:
    """Every path writes the same bytes, and reads them, whole and in part."""
    return check_paths(data, lambda _: matched(data, dtype, level))


@pytest.mark.parametrize(("dtype", "kind"), [*product(DTYPES, KINDS)])
def test_units_of_any_width_come_back(dtype: str, kind: str) -> None:
    for n, level in zip(SIZES, [*Level] * len(SIZES), strict=False):
        data = make_data(kind, dtype, n)
        frame = check(data, dtype, level)
        assert decode_frame(frame.to_bytes()).data == data


@pytest.mark.parametrize("level", Level)
def test_large_chunks_come_back(level: Level) -> None:
    for dtype, n in (("I64", 300_001), ("U16", 1_100_001), ("BOOL", 2_100_001)):
        check(make_data("ids", dtype, n), dtype, level)


def test_frames_that_no_encoder_writes_decode() -> None:
    for seed in range(150):
        built = draw_matches_frame(random.Random(seed))
        assert decode_frame(bytes(built)).data == built.source, seed
        for isa in ISAS:
            with forced(isa):
                frame, target = Frame.from_buffer(bytes(built)), bytearray(len(built.source))
                frame.decompress_into(target, threads=1)
            assert target == built.source, seed


def test_long_runs_and_lengths_take_several_bytes() -> None:
    rng = np.random.default_rng(5)
    new = rng.integers(0, 1 << 16, 70_000).astype("<u2")
    units = np.concatenate([new, new[:66_000], new[:255], new[:256], new[:257], new])
    for level in Level:
        frame = check(units.tobytes(), "U16", level)
        assert frame.nbytes < 0.55 * units.nbytes


@pytest.mark.parametrize("dtype", ["BOOL", "U16", "I32"])
def test_runs_that_overlap_themselves_end_anywhere(dtype: str) -> None:
    rng = np.random.default_rng(6)
    unit_nbytes = DTYPE_BY_NAME[dtype].unit_nbytes
    for distance, length in product(
        (1, 2, 3, 31, 33, 64, 513), (1, 31, 33, 255, 257, 5000, 20_000)
    ):
        start = rng.integers(0, 256, max(distance, 5) * unit_nbytes).astype("u1").tobytes()
        pattern = start[-distance * unit_nbytes :]
        repeated = (pattern * (length // distance + 1))[: length * unit_nbytes]
        for rest in (0, 1, 40):
            data = start + repeated + rng.bytes(rest * unit_nbytes)
            check(data, dtype, Level.DEFAULT)


def text(n: int) -> np.ndarray:
    """Numbers that recur as words of a text do: phrases of several lengths from far and near, some
    of them with another word, words by their frequency, and a few very long repetitions."""
    rng = np.random.default_rng(11)
    words = np.minimum(rng.zipf(1.2, n), 9_999).astype(np.int64)
    phrases = [words[:2000]]
    at = 2000
    while sum(map(len, phrases)) < n:
        kind = rng.random()
        before = np.concatenate(phrases[-400:])
        start = int(rng.integers(0, before.size))
        phrase = before[start : start + int(rng.integers(2, 20))].copy()
        if kind < 0.2:
            phrase[phrase.size // 2] = rng.integers(0, 10_000)
        elif kind < 0.5:
            phrase, at = words[at : at + 3], at + 3
        elif kind < 0.503:
            phrase = before[start : start + 700]
        phrases.append(phrase)
    return np.concatenate(phrases)[:n]


@pytest.mark.parametrize("dtype", ["U16", "I32", "I64"])
def test_level_max_finds_the_cheapest_way(dtype: str) -> None:
    units = text(60_000).astype(f"<i{DTYPE_BY_NAME[dtype].unit_nbytes}")
    sizes = {level: check(units.tobytes(), dtype, level).nbytes for level in Level}
    assert sizes[Level.MAX] < 0.97 * sizes[Level.DEFAULT] < sizes[Level.FAST]


@pytest.mark.parametrize("n", [1, 5, 127, 128, 129, 8191, 8192, 8193, 16_500])
def test_the_cheapest_way_ends_where_segments_and_long_matches_do(n: int) -> None:
    units = text(20_000)[:n].astype("<u2")
    for rest in (0, 1, 126, 127, 128, 129, 9000):
        again = np.concatenate([units, units[: min(n, 300)], units, units[:rest]])
        check(again.tobytes(), "U16", Level.MAX)


def test_level_max_is_not_longer_where_matches_are_long_or_few() -> None:
    for kind, dtype in (("constant", "BOOL"), ("steps", "I64"), ("sorted", "I32"), ("few", "U16")):
        data = make_data(kind, dtype, 300_000)
        sizes = {level: matched(data, dtype, level).nbytes for level in Level}
        assert sizes[Level.MAX] <= 1.01 * sizes[Level.DEFAULT], kind


def test_masks_are_packed_by_matches() -> None:
    valid = np.arange(512) < np.array([512, 500, 90, 512, 17])[:, None]
    masks = np.tri(512, dtype=np.bool_)[None] & valid[:, None, :]
    frame = check_tensor(masks.tobytes(), "BOOL")
    assert set(frame.planes()[0].modes) == {Mode.MATCHES}
    assert frame.nbytes < masks.nbytes / 300


def test_edges_of_a_graph_are_packed_by_differences() -> None:
    rng = np.random.default_rng(7)
    source = np.sort(rng.integers(0, 30_000, 100_000))
    near = np.where(rng.random(100_000) < 0.7, source + rng.integers(-40, 40, 100_000), source)
    far = np.where(rng.random(100_000) < 0.2, rng.integers(0, 30_000, 100_000), near)
    target = far[np.lexsort((far, source))]
    frame = check_tensor(np.stack([source, target]).astype("<i8").tobytes(), "I64")
    assert set(frame.planes()[0].modes) == {Mode.MATCHES}
    assert frame.nbytes < 0.13 * 1_600_000


@pytest.mark.parametrize(("kind", "dtype", "most"), [
    ("ids", "I64", 0.09), ("ids", "U16", 0.3), ("steps", "I64", 0.07), ("steps", "I32", 0.14)
])  # fmt: skip
def test_what_repeats_or_rises_is_packed_by_matches(kind: str, dtype: str, most: float) -> None:
    data = make_data(kind, dtype, 200_000)
    frame = check_tensor(data, dtype)
    assert set(frame.planes()[0].modes) == {Mode.MATCHES}
    assert frame.nbytes < most * len(data)
    shape = (len(data) // DTYPE_BY_NAME[dtype].unit_nbytes,)
    assert "matches take" in plan_buffer(data, dtype, shape).reason


@pytest.mark.parametrize("n_noise", [50_000, 150_000])
def test_noise_before_ids_does_not_hide_them(n_noise: int) -> None:
    noise = np.random.default_rng(5).integers(0, 1 << 31, n_noise).astype("<i8").tobytes()
    data = make_data("ids", "I64", 1_000_000)
    apart = check_tensor(noise, "I64").nbytes + check_tensor(data, "I64").nbytes
    frame = check_tensor(noise + data, "I64")
    assert set(frame.planes()[0].modes) == {Mode.MATCHES}
    assert frame.nbytes < 1.1 * apart


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_a_single_outlier_costs_little(level: str) -> None:
    steps = np.random.default_rng(6).integers(1, 80, 200_000)
    smooth = check_tensor(np.cumsum(steps).astype("<i8").tobytes(), "I64", level=level)
    steps[77_777] = 1 << 40
    jump = check_tensor(np.cumsum(steps).astype("<i8").tobytes(), "I64", level=level)
    assert jump.nbytes < smooth.nbytes + 10_000


def test_a_glance_sees_what_repeats_or_rises() -> None:
    rng = np.random.default_rng(8)
    noise = rng.integers(0, 256, 1 << 18, np.uint8)
    twice = np.concatenate([noise[: 1 << 15]] * 8)
    walk = np.cumsum(rng.integers(-(1 << 20), 1 << 20, 1 << 16)).astype("<i4").view(np.uint8)
    assert not any(_core.may_match(noise, unit_nbytes, noise.size) for unit_nbytes in (1, 2, 4, 8))
    assert all(_core.may_match(twice, unit_nbytes, twice.size) for unit_nbytes in (1, 2, 4, 8))
    assert _core.may_match(walk, 4, walk.size)
    assert not _core.may_match(walk, 1, walk.size)
    each_twice = np.repeat(rng.integers(0, 256, (64, 1 << 16), np.uint8), 2, axis=0).reshape(-1)
    assert all(_core.may_match(each_twice, unit_nbytes, each_twice.size) for unit_nbytes in (1, 8))


@pytest.mark.parametrize("unit_nbytes", [1, 8])
def test_a_glance_ends_where_the_tensor_does(unit_nbytes: int) -> None:
    rng = np.random.default_rng(9)
    for n in (1, 255, 256, 1020, 1021, 1028, 1029, 30_000, 66_000):
        nbytes = n * unit_nbytes
        noise = guarded(rng.integers(0, 256, nbytes, np.uint8).tobytes())
        few = nbytes < 100  # places that are looked at, so nothing is known
        assert _core.may_match(np.asarray(noise), unit_nbytes, nbytes) or not few


def test_kernels_leave_matches_to_the_host() -> None:
    frame = Frame.from_buffer(bytes(SMALL["matches"]()))
    table = np.array([[0, Mode.MATCHES << 24 | 90]], np.uint32)
    assert "8 bytes that are not split" in (why_unsupported(table, frame.header.geometry) or "")
    data = make_data("ids", "BOOL", 5000)
    frame = matched(data, "BOOL", Level.DEFAULT)
    reason = why_unsupported(frame.header.table, frame.header.geometry)
    assert reason == "a plane of mode matches"


def test_the_core_refuses_matches_of_split_units_or_beside_a_base() -> None:
    geometry = _core.Geometry(2, 1, 10, 2000)
    source, table = np.zeros(2000, np.uint8), np.empty((1, 3), np.uint32)
    output = _core.EncodeOutput(np.empty(2048, np.uint8), table, np.empty(256, np.uint8), None)
    context = _core.EncodeContext(2, None, None, 0, whole=Mode.MATCHES)
    with pytest.raises(ValueError, match="matches and nibbles need whole units and no base"):
        _core.encode_chunks(source, geometry, context, output, 1)
    with pytest.raises(ValueError, match="unit_nbytes must be 1, 2, 4 or 8"):
        _core.estimate_matches(source, 3, 2)
    with pytest.raises(ValueError, match="at most a chunk of aligned units"):
        _core.estimate_matches(source[1:1999], 2, 2)
    for function in (_core.may_match, _core.estimate_matches):
        for wrong in (source[:1999], source[:0]):
            with pytest.raises(ValueError, match="one whole unit or more"):
                function(wrong, 2, 2)
