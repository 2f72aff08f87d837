"""When a plan chooses nibbles: for packed numbers of four bits, and for nothing else."""

import numpy as np
import pytest
from numpy.typing import NDArray
from real_model import model_path
from safetensors.numpy import load_file

from benchmarks.data.quantised import int4_words, nf4_bytes
from packhorse.frame import compress_buffer, plan_buffer, planned_frame_nbytes
from packhorse.layout import Mode, Split

LEVELS = ("fast", "default", "max")
RNG = np.random.default_rng(4)
WEIGHTS = {"w": RNG.standard_normal((384, 1536), np.float32)}
WORDS = next(iter(int4_words(WEIGHTS).values()))
PAIRS = next(iter(nf4_bytes(WEIGHTS).values()))
TEXT = np.frombuffer(
    b"".join(
        bytes(f"The sum of {i} and {i * i % 977} is odd or even. ", "ascii") for i in range(9999)
    ),
    np.uint8,
)


def bell(n: int) -> NDArray[np.uint8]:
    """INT8 weights: halves of a byte that depend on each other."""
    return np.clip(np.rint(RNG.standard_normal(n) * 30), -128, 127).astype(np.int8).view(np.uint8)


@pytest.mark.parametrize(
    ("units", "dtype", "level"),
    [
        *((WORDS, "I32", level) for level in ("fast", "default", "max")),
        *((PAIRS, "U8", level) for level in ("default", "max")),  # save less than 1/32
        (WORDS, "U64", "default"),
    ],
)
def test_packed_weights_of_four_bits(units: NDArray[np.generic], dtype: str, level: str) -> None:
    units = units.reshape(-1).view(np.uint64) if dtype == "U64" else units
    plan = plan_buffer(units, dtype, units.shape, level=level)
    assert (plan.whole, plan.split) == (Mode.NIBBLES, Split.WHOLE)
    assert plan.reason.startswith("pairs of 4-bit numbers: take 9")
    frame = compress_buffer(units, dtype, units.shape, level=level)
    assert frame.to_bytes()[4] == 4  # the version that has the mode
    nbytes = planned_frame_nbytes(plan, dtype, units.shape)
    assert nbytes == pytest.approx(frame.nbytes, rel=0.005)


@pytest.mark.parametrize("n", [1 << 9, 3 << 13, 1 << 18])
def test_they_take_hardly_more_than_their_entropy(n: int) -> None:
    halves = np.clip(np.rint(RNG.standard_normal(2 * n) * 2.5 + 7.5), 0, 15).astype(np.uint8)
    counts = np.bincount(halves, minlength=16)
    shares = counts[counts > 0] / halves.size
    entropy = -(shares * np.log2(shares)).sum() * halves.size / 8
    frame = compress_buffer(halves[::2] | halves[1::2] << 4, "U8", (n,))
    assert frame.nbytes <= entropy * 1.002 + 64 + 64 + 4 * 128 + 48


def test_f4_tensors_are_such_pairs() -> None:
    pairs = PAIRS.reshape(-1)
    assert plan_buffer(pairs, "F4", (2 * pairs.size,)).whole == Mode.NIBBLES


@pytest.mark.parametrize("level", ["default", "max"])
@pytest.mark.parametrize("units", [bell(1 << 18), bell(1 << 12), TEXT[: 1 << 18]])
def test_bytes_whose_halves_depend_on_each_other(units: NDArray[np.uint8], level: str) -> None:
    assert plan_buffer(units, "U8", units.shape, level=level).whole != Mode.NIBBLES


@pytest.mark.parametrize("level", LEVELS)
def test_noise_is_stored(level: str) -> None:
    noise = RNG.integers(0, 256, 1 << 20, np.uint8)
    plan = plan_buffer(noise, "U8", noise.shape, level=level)
    assert (plan.whole, plan.planes) == (Mode.STORED, ())


def test_what_saves_little_is_left_to_level_max() -> None:
    """The halves are nearly equally frequent: 1 % is all that there is to save."""
    shares = 1 + np.cos(np.arange(16)) / 3
    halves = RNG.choice(16, 1 << 19, p=shares / shares.sum()).astype(np.uint8)
    units = halves[::2] | halves[1::2] << 4
    plans = {level: plan_buffer(units, "U8", units.shape, level=level) for level in LEVELS}
    assert {level: plan.whole for level, plan in plans.items()} == {
        "fast": Mode.STORED,
        "default": Mode.STORED,
        "max": Mode.NIBBLES,
    }
    assert 1.008 < units.nbytes / plans["max"].estimated_nbytes < 1.013


def test_real_weights_quantised() -> None:
    matrices = {
        name: w for name, w in load_file(model_path()).items() if "layer." in name and w.ndim == 2
    }
    assert len(matrices) > 20
    for name, words in int4_words(matrices).items():
        frame = compress_buffer(words, "I32", words.shape)
        assert words.nbytes / frame.nbytes > 1.05, name
        assert set(frame.planes()[0].modes) == {Mode.NIBBLES}, name


def test_what_repeats_is_matched() -> None:
    units = np.tile(WORDS.reshape(-1)[:9999], 30)
    assert plan_buffer(units, "I32", units.shape).whole in (Mode.MATCHES, Mode.ZSTD)


def test_floats_have_exponents_instead() -> None:
    halves = PAIRS.reshape(-1)
    assert plan_buffer(halves, "F8_E4M3", halves.shape).whole == Mode.STORED


def test_pieces_that_are_not_quite_alike_do_not_speak_for_others() -> None:
    """The three pieces that are looked at first take about what planes do; the rest repeats."""
    n, piece = 1 << 20, (1 << 17) // 8
    units = np.tile(RNG.integers(0, 1 << 16, 1000), n // 1000 + 1)[:n]
    for third, values in enumerate((40_000, 50_000, 1 << 16)):
        middle = (2 * third + 1) * n // 6
        around = slice(middle - piece, middle + piece)
        units[around] = RNG.integers(0, values, 2 * piece)
    assert plan_buffer(units, "I64", units.shape).whole == Mode.MATCHES


def test_trials_that_save_nothing_leave_the_nibbles() -> None:
    """A word in 8 is one of a thousand: a glance sees repeats, and trials see that they do not
    pay."""
    weights = {"w": RNG.standard_normal((4096, 1536), np.float32)}
    words = next(iter(int4_words(weights).values())).reshape(-1).copy()
    words[::8] = RNG.choice(words[:1000], words[::8].size)
    plan = plan_buffer(words, "I32", words.shape)
    assert plan.whole == Mode.NIBBLES
