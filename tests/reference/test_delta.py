"""The slow decoder on deltas: units are restored with any base, and another base is refused."""

import random
import re
import struct
from dataclasses import replace

import frame_builder as fb
import ml_dtypes
import numpy as np
import pytest
from frame_builder import (
    DELTAS,
    SMALL,
    Base,
    Coding,
    Constant,
    Delta,
    DeltaEqual,
    Rans,
    Stored,
    build_frame,
    narrowed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import BaseMismatchError
from packhorse.layout import DTYPE_BY_NAME, DTYPES, ClassSource, Mode
from packhorse.reference import decode_file, decode_frame
from packhorse.reference.delta import round_f32

SPLITS = [(row.name, int(split)) for row in DTYPES for split in row.splits]
WIDE = [("BF16", 2), ("F16", 0), ("U16", 1), ("I16", 0)]
OF_WIDTH = {8: "I8", 16: "F16", 32: "C64", 64: "F64"}


def check(
    data: bytes, dtype: str, how: Coding, base: bytes, base_dtype: str = "", **kwargs: object
) -> fb.BuiltFrame:
    named = Base(base, base_dtype or dtype)
    built = build_frame(data, dtype, codings=[how], base=named, **kwargs)
    decoded = decode_frame(bytes(built), base=base)
    assert decoded.data == data
    assert set(decoded.modes) <= {(Mode.DELTA,)}
    assert decoded.base_dtype == named.dtype
    assert decoded.base_hash == fb.content_hash(base)
    return built


def integers(values: list[int], n_bits: int) -> bytes:
    return b"".join((v % (1 << n_bits)).to_bytes(n_bits // 8, "little") for v in values)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 40))
def test_any_frame_comes_back(seed: int) -> None:
    built = fb.draw_delta_frame(random.Random(seed))
    assert decode_frame(bytes(built), base=built.base).data == built.source


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_units_come_back_from_any_base(data: st.DataObject) -> None:
    dtype, split = data.draw(st.sampled_from(SPLITS))
    size, n = DTYPE_BY_NAME[dtype].unit_nbytes, 24
    units = data.draw(st.binary(min_size=n * size, max_size=n * size))
    base = data.draw(st.binary(min_size=n * size, max_size=n * size))
    how = fb.draw_delta(random.Random(data.draw(st.integers(0, 1 << 20))), 8 * size)
    check(units, dtype, how, base, split=split)


@pytest.mark.parametrize(("dtype", "split"), SPLITS)
@pytest.mark.parametrize("n", [3, 63, 66, 333])
def test_every_dtype_and_split(dtype: str, split: int, n: int) -> None:
    size = DTYPE_BY_NAME[dtype].unit_nbytes
    n -= n % (size * 2 if dtype == "C64" else 3)
    data, base = (fb.units_of_values(n, size, 40, seed=seed) for seed in (1, 2))
    check(data, dtype, Delta(4, thresholds=(5, 30, 128), shifts=(0, 3, 7, 1)), base, split=split)
    check(data, dtype, DeltaEqual(), data, split=split)


@pytest.mark.parametrize("lanes_log", range(2, 8))
@pytest.mark.parametrize("n_classes", range(1, 9))
def test_lanes_and_classes(lanes_log: int, n_classes: int) -> None:
    """Classes without units among them: many thresholds are equal, or beyond all keys."""
    base = fb.units_of_values(300, 2, 50, seed=3)
    data = fb.units_of_values(300, 2, 50, seed=4)
    thresholds = (0, 60, 60, 120, 121, 200, 255)[: n_classes - 1]
    how = Delta(lanes_log, thresholds, shifts=tuple(range(n_classes)))
    check(data, "BF16", how, base, split=2, chunk_log=8)
    check(data, "I16", Delta(lanes_log, thresholds=(3, 9, 9, 12, 15, 15, 16)), base, chunk_log=8)


@pytest.mark.parametrize("w", [8, 16, 32, 64])
def test_every_shift(w: int) -> None:
    """Differences at both ends of the range, around 0, and powers of two, from bases at both
    ends."""
    edges = {sign * (1 << k) + e for k in range(w) for sign in (1, -1) for e in (-1, 0, 1)}
    data = integers([*sorted(edges)] * 2, w)
    base = integers([0] * len(edges) + [1 << (w - 1)] * len(edges), w)
    for shift in range(w):
        for how in (Delta(shifts=(shift,)), Delta(7, (w - 1,), (shift, w - 1 - shift))):
            check(data, OF_WIDTH[w], how, base, chunk_log=10)


def test_every_token_at_its_ends() -> None:
    """The first and the last difference that each token stands for."""
    ends = [t for t in range(-17, 18)]
    for length in range(5, 64):
        ends += [1 << (length - 1), (1 << length) - 1, -1 << (length - 1), -(1 << length)]
    found = {Delta().token(t)[0] for t in ends}
    assert found == set(range(64))
    data = integers(ends, 64)
    for how in (Delta(), Delta(mapped=tuple(range(64))), Delta(mapped=(), escape_frequency=4095)):
        check(data, "I64", how, bytes(len(data)), chunk_log=9)
    assert Delta().token((1 << 34) - 1)[0] == 61
    assert Delta().token(-1 << 35) == (62, "1" + "1" * 34)
    assert Delta().token(1 << 35) == (63, "0" * 35 + "1" + "0" * 28)


@pytest.mark.parametrize(("dtype", "split"), WIDE)
def test_all_patterns_of_16_bits_against_a_shuffled_base(dtype: str, split: int) -> None:
    patterns = list(range(1 << 16))
    random.Random(split).shuffle(patterns)
    data, base = struct.pack("<65536H", *range(1 << 16)), struct.pack("<65536H", *patterns)
    thresholds = (4, 15) if dtype in ("U16", "I16") else (100, 126)
    how = Delta(5, thresholds, shifts=(11, 9, 10))
    check(data, dtype, how, base, split=split, chunk_log=16)


@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "F8_E5M2FNUZ", "F8_E8M0"])
def test_all_pairs_of_patterns_of_8_bits(dtype: str) -> None:
    data = bytes(range(256)) * 256
    base = bytes(byte for byte in range(256) for _ in range(256))
    check(data, dtype, Delta(3, (2, 8, 129), shifts=(3, 0, 7, 4)), base, chunk_log=16)


NARROW = [
    pytest.param("BF16", ml_dtypes.bfloat16, id="BF16"),
    pytest.param("F16", np.float16, id="F16"),
]


@pytest.mark.parametrize(("name", "narrow"), NARROW)
def test_neighbours_differ_by_one(name: str, narrow: type) -> None:
    """From minus to plus infinity, each value is one step above the value before, zeros
    included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    numbers = patterns[(patterns & 0x7FFF) <= (0x7F80 if name == "BF16" else 0x7C00)].view(narrow)
    ascending = numbers[np.lexsort((~np.signbit(numbers), numbers.astype(np.float32)))]
    base, data = ascending[:-1].tobytes(), ascending[1:].tobytes()
    built = check(data, name, Delta(), base, split=2, chunk_log=16)
    model = built.streams[0, 0][0] + 32
    assert bytes(built.data[model : model + 2]) == bytes([16 + 1, 0])


# Casts.
def interesting_f32() -> np.ndarray:
    """Every exponent and sign, with mantissas that are ties, or near one, in any place."""
    mantissas = {0, 0x7FFFFF}
    for k in range(24):
        for odd in (1, 3, 5):
            mantissas |= {(odd << k) + e & 0x7FFFFF for e in (-1, 0, 1)}
            mantissas |= {0x7FFFFF - ((odd << k) + e) & 0x7FFFFF for e in (-1, 0, 1)}
    tops = np.arange(512, dtype=np.uint32) << 23
    return (tops[:, None] | np.array(sorted(mantissas), np.uint32)[None]).ravel()


@pytest.fixture(scope="module")
def patterns() -> np.ndarray:
    random_ones = np.random.default_rng(0).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    return np.concatenate([interesting_f32(), random_ones])


@pytest.mark.parametrize(("name", "narrow"), NARROW)
def test_rounding_is_that_of_the_libraries(name: str, narrow: type, patterns: np.ndarray) -> None:
    numbers = patterns[~np.isnan(patterns.view(np.float32))]
    with np.errstate(over="ignore"):
        expected = numbers.view(np.float32).astype(narrow).view(np.uint16)
    found = np.array([round_f32(x, name) for x in numbers.tolist()], np.uint16)
    assert np.array_equal(found, expected)
    assert {0x0000, 0x8000, 0x0001, 0x8001} <= set(found.tolist())  # zeros and subnormals
    infinity = 0x7F80 if name == "BF16" else 0x7C00
    assert {infinity, infinity | 0x8000, infinity - 1} <= set(found.tolist())


def test_nans_keep_their_upper_bits_and_become_quiet(patterns: np.ndarray) -> None:
    nans = patterns[np.isnan(patterns.view(np.float32))].tolist()
    assert len(nans) > 200
    for x in nans:
        sign, mantissa = x >> 31, x & 0x7FFFFF
        assert round_f32(x, "BF16") == x >> 16 | 0x40
        assert round_f32(x, "F16") == sign << 15 | 0x7E00 | (mantissa & 0x3FFFFF) >> 13
    signalling = {0x7F800001: (0x7FC0, 0x7E00), 0xFF802000: (0xFFC0, 0xFE01)}
    for x, expected in signalling.items():
        assert (round_f32(x, "BF16"), round_f32(x, "F16")) == expected


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_the_builder_rounds_the_same_in_its_own_way(name: str, patterns: np.ndarray) -> None:
    some = patterns.tolist()[::3]
    assert [round_f32(x, name) for x in some] == [narrowed(x, name) for x in some]


@pytest.mark.parametrize(("name", "split"), [("BF16", 2), ("BF16", 0), ("F16", 2), ("F16", 0)])
def test_a_base_of_f32_is_rounded_first(name: str, split: int, patterns: np.ndarray) -> None:
    base = patterns[::29].tobytes()
    equal = Base(base, "F32").units(name)
    check(equal, name, DeltaEqual(), base, "F32", split=split, chunk_log=12)
    near = integers([x + i % 5 - 2 for i, x in enumerate(np.frombuffer(equal, "<u2").tolist())], 16)
    check(near, name, Delta(5, (90, 128), (0, 1)), base, "F32", split=split, chunk_log=12)


# Choices that the page leaves to the encoder, and bits that a decoder must ignore.
@pytest.mark.parametrize("turns", [-1, 0, 1, 3])
@pytest.mark.parametrize("w", [8, 16, 32, 64])
def test_differences_wrap(w: int, turns: int) -> None:
    data, base = (fb.units_of_values(70, w // 8, 30, seed=seed) for seed in (5, 6))
    for always_full in (False, True):
        how = Delta(3, (30,), (1, 5), always_full=always_full, turns=turns)
        check(data, OF_WIDTH[w], how, base, chunk_log=7)


def test_escapes_are_shared_by_the_classes_in_the_order_of_decoding() -> None:
    data, base = (fb.units_of_values(200, 2, 150, seed=seed) for seed in (7, 8))
    how = Delta(2, (60, 90, 128), mapped=(63,), frequencies=(1, 4095))
    check(data, "F16", how, base, split=2, chunk_log=8)


def test_ignored_bits_change_nothing() -> None:
    """The first bit plane of "delta" is that of class 0, of fewer than 56 units."""
    whole = DELTAS["delta"]()
    at = 32
    stream = whole.data[whole.streams[0, 0][0] :]
    for _ in range(3):
        at += 2 + -(-3 * (stream[at + 1] + 2) // 2)
    built = DELTAS["delta"]().patch_stream(0, at + 16 + 7, b"\xff")
    assert built.data != whole.data
    assert decode_frame(bytes(built), base=built.base).data == built.source


def test_chunks_of_mode_delta_stand_beside_others() -> None:
    data, base = (fb.units_of_values(400, 4, 90, seed=seed) for seed in (9, 10))
    base = base[:256] + data[256:512] + base[512:]
    modes = [
        [Delta(5, (100,), (20, 11))],
        [DeltaEqual()],
        [Stored()] * 4,
        [Rans(), Rans(), Stored(), Stored()],
        [Delta(7)],
        [Stored(), Constant(), Rans(), Stored()],
        [Delta()],
    ]
    data = data[:1280] + bytes(256) + data[1536:]
    kwargs = {"shape": (20, 20), "split": 2, "base": Base(base, "F32")}
    side = fb.side_of(20, 20)
    for more in ({}, {"side": side}):
        built = build_frame(data, "F32", codings=lambda chunk: modes[chunk], **kwargs, **more)
        decoded = decode_frame(bytes(built), base=base)
        assert decoded.data == data
        assert decoded.modes == tuple(tuple(how.mode for how in chunk) for chunk in modes)


def test_side_data_serve_the_other_chunks() -> None:
    data, base = (fb.units_of_values(150, 2, 30, seed=seed) for seed in (11, 12))
    codings = [[fb.Classed(source=ClassSource.PREDICTION), Stored()], [Delta()], [DeltaEqual()]]
    base = base[:256] + data[256:]
    kwargs = {"side": fb.side_of(10, 15), "base": Base(base, "BF16")}
    built = build_frame(
        data, "BF16", (10, 15), split=2, codings=lambda chunk: codings[chunk], **kwargs
    )
    assert decode_frame(bytes(built), base=base).data == data


def test_an_equal_tensor_takes_its_header_alone() -> None:
    data = random.Random(1).randbytes(1 << 17)
    built = check(data, "F64", DeltaEqual(), data, chunk_log=12)
    assert len(built.data) == built.header_nbytes == 128


# The base.
def test_a_tensor_without_elements_has_the_base_of_nothing() -> None:
    built = build_frame(b"", "F32", (0, 3), codings=[Stored()] * 4, split=2, base=Base(b"", "F32"))
    assert decode_frame(bytes(built), base=b"").data == b""


def test_a_frame_without_a_base_looks_at_none() -> None:
    built = SMALL["rans"]()
    decoded = decode_frame(bytes(built), base=b"anything")
    assert decoded.data == built.source
    assert (decoded.base_hash, decoded.base_dtype) == (None, None)


def test_another_base_is_refused_by_name() -> None:
    built = DELTAS["delta"]()
    assert built.base
    wanted = fb.content_hash(built.base).hex()
    other = bytes(len(built.base))
    for base, words in (
        (None, "none was given"),
        (b"", "the one given has 0 bytes"),
        (built.base + b"\0", "the one given has 61 bytes"),
        (other, f"the one given has {fb.content_hash(other).hex()}"),
    ):
        with pytest.raises(BaseMismatchError) as caught:
            decode_frame(bytes(built), base=base)
        assert f"60 bytes BF16 with content hash {wanted}, but {words}" in str(caught.value)


def test_the_base_is_asked_for_before_a_chunk_is_looked_at() -> None:
    built = DELTAS["delta"]()
    damaged = replace(built, data=built.data[:]).patch(150, b"damage", seal=False)
    with pytest.raises(BaseMismatchError):
        decode_frame(bytes(damaged))


def test_a_packed_file_names_the_tensor_whose_base_is_not_there() -> None:
    built = DELTAS["delta"]()
    original = fb.original_file({"layers.0.w": ("BF16", (30,), built.source)})
    packed = fb.build_file(original, {"layers.0.w": bytes(built)})
    with pytest.raises(BaseMismatchError, match=re.escape("tensor 'layers.0.w' at byte offset")):
        decode_file(packed)
