"""Plans estimate from samples, so an estimate may be wrong. It is always above nothing and at most
the tensor's length, and packing works whatever it is."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse import numpy as ph_numpy
from packhorse.disk import SnapshotStore
from packhorse.disk.container import pack_file, plan_file
from packhorse.frame import compress_buffer, plan_buffer, planned_frame_nbytes
from packhorse.layout import DTYPE_BY_NAME, DTYPES

# Rows and columns: of one chunk or of several, with side data and without.
SHAPES = [(1, 1), (7, 5), (40, 1024), (256, 256), (1024, 1024), (3, 100_000), (16, 64, 64)]
LEVELS = ["fast", "default", "max"]


def steps() -> np.ndarray:
    """A tensor whose samples of planes are all the same, while its rows and columns differ."""
    return np.floor(np.arange(1 << 20) / 5120).astype(ml_dtypes.bfloat16).reshape(1024, 1024)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("with_base", [False, True])
def test_side_data_do_not_save_more_than_there_is(level: str, with_base: bool) -> None:
    array = steps()
    base = np.zeros_like(array) if with_base else None
    frame = ph_numpy.compress(array, base=base, level=level)
    assert frame.plan is not None
    assert 0 < frame.plan.estimated_nbytes <= array.nbytes
    assert np.array_equal(ph_numpy.decompress(frame, base=base), array)


def test_files_and_snapshots_of_such_tensors(tmp_path: Path) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    arrays = {new: steps(), old: np.zeros_like(steps())}
    for path, array in arrays.items():
        header = f'{{"x":{{"dtype":"BF16","shape":[1024,1024],"data_offsets":[0,{array.nbytes}]}}}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + array.tobytes())
    for base in (None, old):
        (plan,) = plan_file(new, base=base)
        assert 0 < plan.plan.estimated_nbytes <= arrays[new].nbytes
    pack_file(new, tmp_path / "new.ph.safetensors", base=old)
    with SnapshotStore(tmp_path / "store") as store:
        store.take("a", {"x": arrays[old]})
        store.take("b", {"x": arrays[new]})
        assert store.verify() == []


def make_units(recipe: str, n: int, seed: int, dtype: np.dtype) -> np.ndarray:
    """Units whose pattern samples of runs mostly miss."""
    rng, top = np.random.default_rng(seed), np.iinfo(dtype).max
    places = np.arange(n, dtype=np.uint64)
    if recipe == "steps":
        return (places // int(rng.integers(1, 9000)) * 131).astype(dtype)
    if recipe == "islands":  # equal units but for runs between the samples
        units = np.zeros(n, dtype)
        for at in rng.integers(0, n, 20):
            units[at : at + 3000] = rng.integers(0, top, len(units[at : at + 3000]), dtype)
        return units
    if recipe == "stripes":
        return (places % int(rng.integers(1, 2000)) * 257).astype(dtype)
    if recipe == "noise":
        return rng.integers(0, top, n, dtype)
    return np.full(n, rng.integers(0, top, dtype=dtype), dtype)


def make_structure(recipe: str, rng: np.random.Generator) -> np.ndarray:
    """A matrix that is nearly constant, or periodic."""
    flat, found = np.arange(SIDE * SIDE), np.zeros((SIDE, SIDE))
    length = int(np.exp(rng.uniform(0, np.log(flat.size))))
    if recipe == "steps":
        return np.floor(flat / length).reshape(SIDE, SIDE)
    if recipe == "ramp":
        return [flat / flat.size, flat // SIDE / SIDE, flat % SIDE / SIDE][rng.integers(3)].reshape(
            SIDE, SIDE
        )
    if recipe == "period":
        return np.sin(flat % length).reshape(SIDE, SIDE)
    if recipe == "blocks":
        size = 1 << int(rng.integers(3, 10))
        few = rng.standard_normal((-(-SIDE // size), -(-SIDE // size)))
        return np.kron(few, np.ones((size, size)))[:SIDE, :SIDE]
    at, n = int(rng.integers(SIDE)), int(rng.integers(1, 200))
    places: dict[str, Any] = {
        "one row": np.s_[at], "one column": np.s_[:, at], "first": np.s_[:n], "last": np.s_[-n:]
    }  # fmt: skip
    found[places[recipe]] = rng.standard_normal(found[places[recipe]].shape)
    return found


SIDE = 700  # so that matrices are no whole number of chunks, and columns no power of two
STRUCTURES = ["steps", "ramp", "period", "blocks", "one row", "one column", "first", "last"]


def check_estimate(array: np.ndarray, dtype: str, level: str, base: np.ndarray | None) -> float:
    """Estimate divided by length of the frame, for frames or estimates that are not tiny."""
    data, shape = array.tobytes(), array.shape
    against = None if base is None else base.tobytes()
    plan = plan_buffer(data, dtype, shape, level=level, base=against)
    frame = compress_buffer(data, dtype, shape, level=level, base=against)
    planned, slack = planned_frame_nbytes(plan, dtype, shape), array.nbytes / 200
    return (planned + slack) / (frame.nbytes + slack)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(STRUCTURES), st.sampled_from(["BF16", "F32"]), st.sampled_from(LEVELS),
    st.sampled_from(["none", "zeros", "weights"]), st.integers(0, 1 << 16),
)  # fmt: skip
@example("first", "BF16", "fast", "none", 6798)  # noise in the first piece alone
def test_estimates_of_what_is_no_weights_are_not_far_off(
    structure: str, dtype: str, level: str, base: str, seed: int
) -> None:
    """The factor is at most `BOUND`, apart from a two hundredth of the tensor."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "BF16" else np.float32)
    array, weights = make_structure(structure, rng), rng.standard_normal((SIDE, SIDE)) * 0.02
    if base == "weights":
        array = array + weights
    against = {"none": None, "zeros": np.zeros_like(weights), "weights": weights}[base]
    ratio = check_estimate(
        array.astype(kind), dtype, level, None if against is None else against.astype(kind)
    )
    assert 1 / BOUND < ratio < BOUND


BOUND = 2.6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("length", [1000, 4096, 5120, 33_333, 200_000, 500_000])
def test_estimates_of_steps_are_near(level: str, with_base: bool, length: int) -> None:
    array = np.floor(np.arange(1 << 20) / length).astype(ml_dtypes.bfloat16).reshape(1024, 1024)
    ratio = check_estimate(array, "BF16", level, np.zeros_like(array) if with_base else None)
    assert 1 / 1.5 < ratio < 1.5


@pytest.mark.parametrize("place", [np.s_[-1], np.s_[500], np.s_[:, 70], np.s_[:, -1]])
@pytest.mark.parametrize("with_base", [False, True])
def test_what_samples_do_not_see_is_packed_well(place: Any, with_base: bool) -> None:
    """A model made from a sample must not lead to storing the rest as it is."""
    array = np.zeros((1024, 1024), ml_dtypes.bfloat16)
    array[place] = np.random.default_rng(0).standard_normal(1024)
    base = np.zeros_like(array) if with_base else None
    assert ph_numpy.compress(array, base=base).nbytes < array.nbytes / 100


@pytest.mark.parametrize("seed", range(4))
def test_estimates_of_weights_and_their_steps_are_near(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((512, 512)) * np.exp(rng.standard_normal((512, 1)) / 2) / 50
    stepped = weights + 1e-4 * rng.standard_normal((512, 512)) * (rng.random((512, 512)) < 0.3)
    old, new = weights.astype(ml_dtypes.bfloat16), stepped.astype(ml_dtypes.bfloat16)
    assert check_estimate(new, "BF16", "default", None) == pytest.approx(1, abs=0.04)
    assert check_estimate(new, "BF16", "default", old) == pytest.approx(1, abs=0.25)


RECIPES = st.sampled_from(["steps", "islands", "stripes", "noise", "constant"])


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([dtype.name for dtype in DTYPES]), st.sampled_from(SHAPES),
    st.sampled_from(LEVELS), RECIPES, st.none() | RECIPES, st.integers(0, 1 << 16),
)  # fmt: skip
@example("BF16", (1024, 1024), "default", "steps", "constant", 3)
@example("F32", (1024, 1024), "max", "islands", "islands", 0)
def test_estimates_are_between_nothing_and_the_tensor(
    dtype: str, shape: tuple[int, ...], level: str, recipe: str, base_recipe: str | None, seed: int
) -> None:
    row = DTYPE_BY_NAME[dtype]
    shape = (*shape[:-1], shape[-1] * 4) if row.bits % 8 else shape
    n = int(np.prod(shape)) * row.bits // 8 // row.unit_nbytes
    kind = np.dtype(f"u{row.unit_nbytes}")
    data = make_units(recipe, n, seed, kind).tobytes()
    base = None if base_recipe is None else make_units(base_recipe, n, seed + 1, kind).tobytes()
    plan = plan_buffer(data, dtype, shape, level=level, base=base)
    assert 0 < plan.estimated_nbytes <= len(data)
    assert plan.reason
    frame = compress_buffer(data, dtype, shape, level=level, base=base)
    target = bytearray(len(data))
    frame.decompress_into(target, base=base)
    assert target == data


@pytest.mark.parametrize("level", LEVELS)
def test_a_tensor_that_equals_its_base_is_expected_to_take_something(level: str) -> None:
    data = make_units("noise", 100_000, 0, np.dtype(np.uint16)).tobytes()
    plan = plan_buffer(data, "BF16", (100_000,), level=level, base=data)
    assert 0 < plan.estimated_nbytes < 100
