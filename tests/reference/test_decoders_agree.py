"""Random legal frames, and damaged ones: every decoder gives the same bytes or the same error.

The frames are built by hand, so they contain things that the encoder never writes: any mode in any
plane, odd models, raw bits that are all zero, side data that predict nothing.
"""

import random

import frame_builder as fb
import pytest
from codec_battery import ISAS, forced, guarded, guarded_output
from frame_builder import Classed, Coding, Palette, Rans, Side, Stored, build_frame

from packhorse.errors import PackhorseError
from packhorse.frame import Frame
from packhorse.layout import DTYPES, ClassSource, Mode, Split
from packhorse.reference import decode_frame

N_FRAMES = 40  # for each seed
N_DAMAGED = 6  # for each frame
MAX_NBYTES = 1 << 26
KINDS = [
    (dtype, split)
    for dtype in DTYPES
    for split in dtype.splits
    if dtype.bits >= 8 and (split or dtype.unit_nbytes == 1)
]
N_CODES = (1, 2, 31, 32, 33, 63, 64, 65, 200)
BYTES = (0, 1, 2, 3, 4, 5, 7, 8, 255)


def random_rans(rng: random.Random, kind: type[Rans] = Rans, **kwargs: object) -> Rans:
    raw_bits = rng.choice((0, 0, 1, 3, 4, 6, 7))
    n_symbols = 1 << (8 - raw_bits)
    how: dict[str, object] = {"lanes_log": rng.randint(2, 7), "raw_bits": raw_bits, **kwargs}
    if rng.random() < 0.3:
        how["raw_mask"] = (1 << raw_bits) - 1
    if rng.random() < 0.5:
        mapped = sorted(rng.sample(range(n_symbols), min(rng.choice(N_CODES), n_symbols)))
        how["mapped"] = tuple(mapped)
        how["margin"] = (rng.randint(0, mapped[0]), rng.randint(0, n_symbols - 1 - mapped[-1]))
        if len(mapped) < n_symbols:
            how["escape_frequency"] = rng.choice((1, 50, 900, 3000))
    return kind(**how)


def random_coding(rng: random.Random, before: list[Coding], side: Side | None) -> Coding:
    """A random coding of the next plane, after the planes that are there."""
    kinds = ["stored", "rans", "palette"]
    if before and before[0].mode != Mode.STORED:
        kinds.append("lead")
    if not before and side:
        kinds.append("prediction")
    kind = rng.choice(kinds)
    if kind == "palette":
        return Palette(rng.randint(1, 4), raw_bits=rng.randint(0, 8))
    if kind == "lead":
        thresholds = tuple(sorted(rng.choices(range(256), k=rng.randint(0, 3))))
        return random_rans(rng, Classed, thresholds=thresholds)
    if kind == "prediction":
        return random_rans(rng, Classed, source=ClassSource.PREDICTION)
    return random_rans(rng) if kind == "rans" else Stored()


def random_frame(rng: random.Random) -> fb.BuiltFrame:
    dtype, split = rng.choice(KINDS)
    n_rows, n_columns = rng.randint(1, 40), rng.randint(1, 60)
    per_element = dtype.bits // 8 // dtype.unit_nbytes
    n_units = n_rows * n_columns * per_element
    n_values = rng.choice((2, 9, 40, 200))
    data = fb.units_of_values(n_units, dtype.unit_nbytes, n_values, seed=rng.getrandbits(32))
    side = None
    if split == Split.FLOAT and rng.random() < 0.6:
        how = rng.choice((Stored(), Palette(2), random_rans(rng)))
        side = fb.side_of(n_rows, n_columns * per_element, coding=how)
    codings: list[Coding] = []
    for _ in range(dtype.unit_nbytes):
        codings.append(random_coding(rng, codings if split else [], side))
    chunk_log, carry = rng.choice((6, 8, 11)), rng.random() < 0.8
    kwargs = {"codings": codings, "split": split, "chunk_log": chunk_log, "carry": carry}
    return build_frame(data, dtype.name, (n_rows, n_columns), side=side, **kwargs)


def by_core(frame: bytes, base: bytes | None = None) -> bytes | str:
    """The result of the fast decoder: the bytes, or the name of the error."""
    given = None if base is None else guarded(base)
    try:
        opened = Frame.from_buffer(guarded(frame), max_nbytes=MAX_NBYTES)
        opened.verify(threads=1, base=given)
        target = guarded_output(opened.logical_nbytes)
        opened.decompress_into(target, threads=1, base=given)
    except PackhorseError as error:
        return type(error).__name__
    return bytes(target)


def by_reference(frame: bytes, base: bytes | None = None) -> bytes | str:
    try:
        return decode_frame(frame, max_nbytes=MAX_NBYTES, base=base).data
    except PackhorseError as error:
        return type(error).__name__


def damage(rng: random.Random, built: fb.BuiltFrame) -> bytes:
    """Damages a byte of the header, or a byte of the payload, mostly near its start; seals the
    frame again."""
    first = rng.choice((4, built.header_nbytes))
    built.patch(
        first + int(rng.random() ** 3 * (len(built.data) - first)),
        bytes([rng.choice((*BYTES, rng.randrange(256)))]),
    )
    return bytes(built)


def check_agreement(rng: random.Random, built: fb.BuiltFrame) -> None:
    """Checks that decoders agree on a frame, and on damaged versions of it."""
    whole, base = bytes(built), built.base
    assert by_reference(whole, base) == built.source
    for isa in ISAS:
        with forced(isa):
            assert by_core(whole, base) == built.source, isa
    for _ in range(N_DAMAGED):
        built.data[:] = whole
        damaged, isa = damage(rng, built), rng.choice(ISAS)
        with forced(isa):
            assert by_core(damaged, base) == by_reference(damaged, base), isa


# `make fuzz ARGS=reference` goes on with this for as long as one likes.
@pytest.mark.parametrize("seed", range(2))
def test_decoders_agree(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(N_FRAMES):
        check_agreement(rng, random_frame(rng))


@pytest.mark.parametrize("seed", range(3))
def test_decoders_agree_on_matches(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(N_FRAMES):
        check_agreement(rng, fb.draw_matches_frame(rng))


@pytest.mark.parametrize("seed", range(3))
def test_decoders_agree_on_nibbles(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(N_FRAMES):
        check_agreement(rng, fb.draw_nibbles_frame(rng))


@pytest.mark.parametrize("seed", range(3))
def test_decoders_agree_on_frames_with_a_base(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(N_FRAMES):
        check_agreement(rng, fb.draw_delta_frame(rng))
