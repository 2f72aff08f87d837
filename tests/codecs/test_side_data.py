"""Row and column predict the exponents of optimizer states; plane 0 leads the mantissas."""

from contextlib import suppress
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from codec_battery import ISAS, forced, guarded, guarded_output, second_moment
from frame_builder import Classed, Rans, build_frame

import packhorse.numpy as php
from packhorse import Frame, PackhorseError, _core
from packhorse.layout import Level, Mode
from packhorse.reference import decode_frame

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
SHAPES = [(200, 300), (24, 50, 60), (64, 8, 9, 9), (40, 1024)]


def modes(frame: Frame, plane: int) -> set[Mode]:
    return set(frame.planes()[plane].modes)


@pytest.mark.parametrize(
    ("dtype", "shape", "level"), list(product(DTYPES, SHAPES, ("default", "max")))
)
def test_moments_come_back(dtype: type, shape: tuple[int, ...], level: str) -> None:
    spread = 1 if np.dtype(dtype).itemsize == 1 or dtype is np.float16 else 3
    with np.errstate(over="ignore"):
        tensor = second_moment(shape, spread=spread).astype(dtype)
    packed = php.compress(tensor, level=level).to_bytes()
    assert php.decompress(packed).tobytes() == tensor.tobytes()
    if shape == SHAPES[0]:  # the slow reader takes a second
        assert decode_frame(packed).data == tensor.tobytes()


def test_matrices_that_are_tried() -> None:
    assert _core.side_views((200, 300), 60_000) == [1]
    assert _core.side_views((24, 50, 60), 72_000) == [2]  # 24 rows have too many columns
    assert _core.side_views((100, 10, 100), 100_000) == [1, 2]
    assert _core.side_views((64, 8, 9, 90), 414_720) == [1, 3]
    assert _core.side_views((60_000,), 60_000) == []
    assert _core.side_views((15, 4000), 60_000) == []  # too few rows
    assert _core.side_views((200, 150), 30_000) == []  # too short
    assert _core.side_views((1 << 40, 0), 0) == []
    for shape in ((200, 0), (1 << 40, 1 << 40), (20, 30)):
        with pytest.raises(ValueError, match="another number of units"):
            _core.side_views(shape, 60_000)


def test_prediction_makes_moments_smaller() -> None:
    tensor = second_moment((300, 400)).astype(np.float32)
    as_matrix, as_list = php.compress(tensor), php.compress(tensor.reshape(-1))
    assert modes(as_matrix, 0) == {Mode.CLASSED_RANS}
    assert modes(as_list, 0) == {Mode.RANS}
    assert as_matrix.nbytes < as_list.nbytes * 0.96
    assert as_matrix.plan is not None
    assert "row and column save" in as_matrix.plan.reason


def test_what_never_has_a_sign_does_not_store_it() -> None:
    tensor = second_moment((300, 400)).astype(np.float32)
    mantissas = php.compress(tensor, level="fast").planes()[1]
    assert set(mantissas.modes) == {Mode.PALETTE}
    assert mantissas.nbytes < mantissas.logical_nbytes * 0.9


def test_max_lets_exponents_lead_mantissas() -> None:
    weights = np.random.default_rng(2).standard_normal(1 << 18).astype(ml_dtypes.bfloat16)
    frame = php.compress(weights, level="max")
    assert modes(frame, 1) == {Mode.CLASSED_RANS}
    assert frame.nbytes < php.compress(weights).nbytes * 0.998


@pytest.mark.parametrize("shape", [(120_000,), (4, 30_000), (30_000, 4), (1, 1, 120_000)])
def test_thin_tensors_have_no_side_data(shape: tuple[int, ...]) -> None:
    tensor = second_moment((300, 400)).astype(np.float32).reshape(shape)
    plan = php.compress(tensor, level="max").plan
    assert plan is not None
    assert plan.side.n_row_dims == 0


def test_the_better_of_two_matrices_is_chosen() -> None:
    """Experts: stacked matrices whose rows are the first two dimensions."""
    rng = np.random.default_rng(3)
    tensor = second_moment((32 * 40, 100), spread=4) * np.exp(rng.standard_normal((1280, 1)))
    plan = php.compress(tensor.astype(np.float32).reshape(32, 40, 100)).plan
    assert plan is not None
    assert plan.side.n_row_dims == 2


def test_fast_never_predicts() -> None:
    plan = php.compress(second_moment((300, 400)).astype(np.float32), level="fast").plan
    assert plan is not None
    assert plan.side.n_row_dims == 0


@pytest.mark.parametrize("level", [level.name.lower() for level in Level])
def test_the_bytes_depend_on_neither_code_path_nor_threads(level: str) -> None:
    tensor = second_moment((700, 900)).astype(ml_dtypes.bfloat16)
    frames = set()
    for isa, threads in product(ISAS, (1, 3)):
        with forced(isa):
            frames.add(php.compress(tensor, level=level, threads=threads).to_bytes())
    assert len(frames) == 1


def leads(n: int) -> list[np.ndarray]:
    """Plane 0 of `n` units: in one class, in long runs, in turn, at random, and mostly in one."""
    rng = np.random.default_rng(n)
    rare = np.where(rng.random(n) < 0.02, rng.integers(0, 256, n), 90)
    which = [np.full(n, 255), np.arange(n) // 37 * 50, np.arange(n) * 70, rng.integers(0, 256, n)]
    return [lead.astype(np.uint8) for lead in (*which, rare)]


@pytest.mark.parametrize("thresholds", [(), (0,), (255,), (0, 255), (64, 128, 192)], ids=str)
@pytest.mark.parametrize("n", [1, 31, 33, 64, 127, 160, 2049])
def test_units_of_any_classes_find_their_places(n: int, thresholds: tuple[int, ...]) -> None:
    for lead in leads(n):
        units = np.stack([np.random.default_rng(n).integers(0, 256, n, np.uint8), lead], axis=1)
        codings = [Rans(2), Classed(2, thresholds=thresholds, raw_bits=2)]
        built = build_frame(units.tobytes(), "U16", split=1, chunk_log=12, codings=codings)
        for isa in ISAS:
            with forced(isa):
                out = guarded_output(2 * n)
                Frame.from_buffer(guarded(bytes(built))).decompress_into(out)
                assert bytes(out) == units.tobytes(), isa


@pytest.mark.parametrize("isa", ISAS)
def test_ranges_decode_across_chunks(isa: str) -> None:
    tensor = second_moment((700, 1900)).astype(ml_dtypes.bfloat16)
    data = tensor.tobytes()
    frame = php.compress(tensor)
    assert frame.n_chunks > 1
    with forced(isa):
        for start in (0, 1, frame.chunk_nbytes - 3, frame.chunk_nbytes):
            part = bytearray(100_000)
            frame.decompress_into(part, start=start, stop=start + len(part))
            assert part == data[start : start + len(part)]


def test_zeros_special_values_and_empty_rows_are_kept() -> None:
    tensor = second_moment((300, 400)).astype(np.float32)
    tensor[7], tensor[:, 11] = 0, -0.0
    tensor[13, :5] = np.inf, -np.inf, np.nan, 1e-45, -1e-45
    frame = php.compress(tensor)
    assert modes(frame, 0) == {Mode.CLASSED_RANS}
    assert php.decompress(frame).tobytes() == tensor.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_damage_is_noticed(isa: str) -> None:
    tensor = second_moment((130, 260)).astype(ml_dtypes.bfloat16)
    whole = php.compress(tensor, level="max").to_bytes()
    packed = bytearray(whole)
    rng = np.random.default_rng(4)
    with forced(isa):
        for at in rng.integers(0, len(packed), 150):
            packed[at] ^= 1 << int(rng.integers(8))
            with pytest.raises(PackhorseError):
                Frame.from_buffer(packed).verify()
            out = bytearray(tensor.nbytes)
            with suppress(PackhorseError):  # behind the checksums: an error or some data
                Frame.from_buffer(packed).decompress_into(out, check=False)
            packed[:] = whole
