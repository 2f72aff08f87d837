"""Short tensors that are no floats: the core packs them without a plan."""

from itertools import product

import numpy as np
import pytest
from codec_battery import check_tensor, make_data, tensor_shape

from packhorse import _core
from packhorse.frame import Frame, compress_buffer, plan_buffer, planned_frame_nbytes
from packhorse.layout import DTYPE_BY_NAME, DTYPES, Level, Mode, Split
from packhorse.numpy import compress_all, decompress_all
from packhorse.reference import decode_frame

OTHERS = tuple(row.name for row in DTYPES if Split.FLOAT not in row.splits)
KINDS = ("constant", "noise", "sorted", "few", "ids", "steps", "outlier", "halves", "weights")
SHORT_NBYTES = 1 << 16


def is_packed_by_the_core(data: bytes, dtype: str, level: Level = Level.DEFAULT) -> bool:
    units = np.frombuffer(data, np.uint8)
    code = DTYPE_BY_NAME[dtype].code
    views = _core.views_of_buffers([units], [code], [tensor_shape(data, dtype)])
    (found,) = _core.pack_views(views, None, lambda n: np.empty(n, np.uint8), level, 1)
    return found is not None


@pytest.mark.parametrize(("dtype", "kind"), [*product(OTHERS, KINDS)])
def test_any_length_comes_back(dtype: str, kind: str) -> None:
    for n, level in zip((1, 2, 7, 63, 64, 65, 300, 3001), ["default", "fast"] * 4, strict=True):
        check_tensor(make_data(kind, dtype, n), dtype, level=level)


@pytest.mark.parametrize("dtype", ["I64", "U16", "U8"])
def test_lengths_around_the_limit_come_back(dtype: str) -> None:
    n = SHORT_NBYTES // DTYPE_BY_NAME[dtype].unit_nbytes
    for kind, k in product(("weights", "noise"), (n - 1, n, n + 1)):
        data = make_data(kind, dtype, k)
        check_tensor(data, dtype)
        assert is_packed_by_the_core(data, dtype) == (k <= n)


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_what_fits_the_padding_is_stored(dtype: str, level: str) -> None:
    for kind, n in product(("constant", "noise"), (1, 3, 56 // DTYPE_BY_NAME[dtype].unit_nbytes)):
        data = make_data(kind, dtype, n)[:63]  # whole elements of 6 bits
        frame = check_tensor(data, dtype, level=level)
        assert frame.plan is not None
        assert frame.plan.reason == "too short to pack: stored"
        assert set(frame.planes()[0].modes) <= {Mode.STORED, Mode.CONSTANT}
        assert frame.nbytes == 128 + 64 * (len(data) > 0)


REASONS = {
    Mode.RANS: "planes in bits: ",
    Mode.STORED: "incompressible",
    Mode.MATCHES: "repetitive: matches take ",
    Mode.NIBBLES: "pairs of 4-bit numbers: take ",
}


@pytest.mark.parametrize(
    ("dtype", "kind", "mode", "most"),
    [
        ("I64", "sorted", Mode.MATCHES, 0.25),
        ("I32", "ids", Mode.MATCHES, 0.8),
        ("U16", "weights", Mode.MATCHES, 0.45),  # as numbers of one byte
        ("I16", "100 values", Mode.RANS, 0.9),
        ("I64", "few", Mode.MATCHES, 0.2),
        ("I32", "halves", Mode.NIBBLES, 0.92),
        ("U8", "halves", Mode.NIBBLES, 0.92),
        ("I8", "weights", Mode.RANS, 0.9),
        ("F8_E8M0", "few", Mode.RANS, 0.5),
        ("U32", "noise", Mode.STORED, 1.02),
        ("BOOL", "noise", Mode.STORED, 1.05),
    ],
)
def test_the_shortest_way_is_taken(dtype: str, kind: str, mode: Mode, most: float) -> None:
    data = make_data(kind, dtype, 5000)
    assert is_packed_by_the_core(data, dtype)
    frame = check_tensor(data, dtype)
    assert mode in {mode for plane in frame.planes() for mode in plane.modes}
    assert frame.nbytes <= most * len(data)
    assert frame.plan is not None
    assert frame.plan.reason.startswith(REASONS[mode])


@pytest.mark.parametrize("n", [3000, 9216, 1 << 16])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_few_values_are_not_taken_for_repetition(n: int, share: float) -> None:
    """As scales are: few values are frequent, so short runs occur twice by chance."""
    values = np.random.default_rng(0).geometric(share, n).clip(max=20).astype(np.uint8)
    assert is_packed_by_the_core(values.tobytes(), "F8_E8M0")
    twice = np.concatenate([values[: n // 2]] * 2).tobytes()
    assert not is_packed_by_the_core(twice, "F8_E8M0")


def test_bytes_that_repeat_are_left_to_zstandard() -> None:
    text = b"".join(b"%d bottles of beer on the wall, " % i for i in range(300))
    for n in (300, 900, 5000):
        assert not is_packed_by_the_core(text[:n], "U8")
        assert compress_buffer(text[:n], "U8", (n,)).planes()[0].modes == {Mode.ZSTD: 1}
    # At level fast there is nothing else against bytes of many values.
    weights = make_data("weights", "U8", 5000)
    assert not is_packed_by_the_core(weights, "U8", Level.FAST)
    assert compress_buffer(weights, "U8", (5000,), level="fast").ratio > 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_what_the_core_does(kind: str) -> None:
    for dtype, n in product(("I64", "U16", "I8", "BOOL"), (5, 200, 3000)):
        data = make_data(kind, dtype, n)
        if not is_packed_by_the_core(data, dtype):
            continue
        frame, plan = compress_buffer(data, dtype, (n,)), plan_buffer(data, dtype, (n,))
        assert frame.plan == plan
        assert planned_frame_nbytes(plan, dtype, (n,)) == frame.nbytes


@pytest.mark.parametrize("threads", [1, 3])
def test_a_mix_of_tensors_in_one_call(threads: int) -> None:
    """Units of one length are split or not; the memory of a worker must serve both."""
    rng = np.random.default_rng(7)
    tensors = [
        rng.integers(0, 50_000, 40_000),
        np.array(3),
        rng.standard_normal(70_000).astype(np.float16),
        rng.integers(0, 9, 700, np.int16),
        rng.integers(0, 256, 50_000, np.uint8),
        rng.standard_normal(300),
        np.arange(7000),
        rng.standard_normal(900_000).astype(np.float32),
        np.zeros((0, 4), np.int64),
        rng.integers(0, 2, 999).astype(bool),
    ]
    frames = compress_all(tensors, threads=threads)
    for tensor, frame, back in zip(tensors, frames, decompress_all(frames), strict=True):
        np.testing.assert_array_equal(back, tensor)
        assert back.dtype == tensor.dtype
        alone = compress_buffer(tensor, frame.dtype, tensor.shape)
        assert frame.to_bytes() == alone.to_bytes()
        assert decode_frame(frame.to_bytes()).data == tensor.tobytes()


def test_bytes_of_eight_bits_beside_longer_ones_that_are_split() -> None:
    """A short float of one byte a unit, and longer integers, in either order."""
    short = np.frombuffer(make_data("weights", "F8_E4M3", 300), np.uint8)
    long = np.frombuffer(make_data("weights", "I8", 60_000), np.uint8)
    codes = {id(short): DTYPE_BY_NAME["F8_E4M3"].code, id(long): DTYPE_BY_NAME["I8"].code}
    for order in ([short, long], [long, short]):
        views = _core.views_of_buffers(
            order, [codes[id(units)] for units in order], [units.shape for units in order]
        )
        frames = _core.pack_views(views, None, lambda n: np.empty(n, np.uint8), 2, 2)
        for units, opened in zip(order, frames, strict=True):
            frame = Frame.from_buffer(bytes(opened.memory[: opened.frame_nbytes]))
            target = bytearray(units.nbytes)
            frame.decompress_into(target)
            assert target == units.tobytes()
