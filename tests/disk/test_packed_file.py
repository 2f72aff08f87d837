"""Lazy reading of packed files, compared with `safetensors.safe_open` and with whole tensors."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from packhorse.disk import (
    PackedFile,
    pack_file,
)
from packhorse.disk.packed_file import load_tensors
from packhorse.errors import CorruptionError
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.torch import FRAMEWORK as TORCH


@pytest.mark.parametrize(("framework", "name"), [(NUMPY, "np"), (TORCH, "pt")])
def test_a_packed_file_reads_like_safe_open(sample, framework, name):
    source, packed = sample
    with safe_open(source, name) as expected, PackedFile(packed, framework) as file:
        assert file.keys() == expected.keys() == list(file)
        assert file.offset_keys() == expected.offset_keys()
        assert file.metadata() == expected.metadata()
        assert len(file) == len(expected.keys())
        assert "scalar" in file
        assert "absent" not in file
        for key in expected.keys():  # noqa: SIM118
            theirs, ours = expected.get_slice(key), file.get_slice(key)
            assert ours.get_shape() == theirs.get_shape()
            assert ours.get_dtype() == theirs.get_dtype()
            assert_same(file.get_tensor(key), expected.get_tensor(key))
        assert file.get_tensors().keys() == expected.get_tensors().keys()


def assert_same(got, expected):
    assert type(got) is type(expected)
    assert (got.dtype, tuple(got.shape)) == (expected.dtype, tuple(expected.shape))
    assert np.array_equal(np.asarray(got), np.asarray(expected), equal_nan=True)


# The indices that safetensors 0.8.0 accepts for NumPy; for PyTorch it accepts those of torch.
BOTH = [0, 7, -1, -300, slice(0, 2), slice(5, 290, 7), slice(None), slice(3, 3), ..., (), (1, 2, 3)]
BOTH += [
    (..., 0),
    (0, ...),
    (..., slice(1, 2)),
    (slice(None), 1),
    (slice(None), slice(None, None, 2)),
]
BOTH += [(slice(1, 2), ..., slice(1, 2)), (5, slice(3, 7)), (slice(None), 1, 2), np.int64(2)]
TORCH_ONLY = [
    slice(-2, None),
    slice(5, 9999),
    slice(2, 1),
    slice(None, -5),
    None,
    [0, 2],
    ([0, 2], slice(2)),
]
TORCH_ONLY += [
    (slice(None), [1, 0]),
    True,
    slice(-9999, 2),
    (slice(None), None),
    torch.tensor([3, 1]),
]


@pytest.mark.parametrize("index", BOTH, ids=repr)
def test_slices_for_numpy_are_those_of_safetensors(sample, index):
    source, packed = sample
    with safe_open(source, "np") as expected, PackedFile(packed, NUMPY) as file:
        theirs = expected.get_slice("layers.0.weight")[index]
        assert_same(file.get_slice("layers.0.weight")[index], theirs)


@pytest.mark.parametrize("index", [*BOTH, *TORCH_ONLY], ids=repr)
def test_slices_for_torch_are_those_of_safetensors(sample, index):
    source, packed = sample
    with safe_open(source, "pt") as expected, PackedFile(packed, TORCH) as file:
        theirs = expected.get_slice("layers.0.weight")[index]
        assert_same(file.get_slice("layers.0.weight")[index], theirs)


def items(size: int) -> st.SearchStrategy:
    edge = st.none() | st.integers(-size - 2, size + 2)
    step = st.none() | st.integers(-3, 3).filter(bool)
    return st.integers(-size - 1, size) | st.builds(slice, edge, edge, step)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(index=st.tuples(items(33), items(7), items(33)).flatmap(
    lambda parts: st.integers(0, 2).map(lambda n: parts[:n] if n < 2 else (..., parts[1])))
)  # fmt: skip
def test_any_slice_is_that_slice_of_the_tensor(sample, index):
    _, packed = sample
    with PackedFile(packed, NUMPY) as file:
        tensor, part = file.get_tensor("zeros"), file.get_slice("zeros")
        tensor = np.arange(tensor.size, dtype=tensor.dtype).reshape(tensor.shape)
        try:
            expected = tensor[index]
        except IndexError:
            with pytest.raises(IndexError):
                part[index]
        else:
            assert part[index].shape == expected.shape


@pytest.mark.parametrize(
    "index", [300, -301, (0, 0, 0, 0), (slice(None), 20), "a", 1.5, (..., ...)]
)
def test_an_index_that_numpy_refuses_is_refused(sample, index):
    with PackedFile(sample[1], NUMPY) as file, pytest.raises(IndexError):
        file.get_slice("layers.0.weight")[index]


@pytest.mark.parametrize("framework", [NUMPY, TORCH], ids=["np", "pt"])
def test_a_slice_step_of_nothing_is_refused(sample, framework):
    with PackedFile(sample[1], framework) as file, pytest.raises(ValueError, match="step"):
        file.get_slice("layers.0.weight")[::0]


def test_a_slice_holds_no_more_memory_than_its_own(sample):
    with PackedFile(sample[1], NUMPY) as file:
        part = file.get_slice("layers.0.weight")[:, 3]
        assert part.flags.c_contiguous
        assert part.base is None or part.base.nbytes == part.nbytes
        column = file.get_slice("zeros")[::-1]
        assert column.flags.c_contiguous


def test_a_slice_decodes_only_the_chunks_it_meets(tmp_path):
    rows = np.random.default_rng(5).standard_normal((1024, 1024)).astype(np.float32)
    source, packed = tmp_path / "a", tmp_path / "b"
    safetensors.numpy.save_file({"w": rows}, source)
    pack_file(source, packed)
    data = bytearray(packed.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1  # one bad chunk, about row 512
    packed.write_bytes(data)
    with PackedFile(packed, NUMPY) as file:
        part = file.get_slice("w")
        assert np.array_equal(part[:300], rows[:300])
        assert np.array_equal(part[800:, 5], rows[800:, 5])
        assert np.array_equal(part[3, 7:9], rows[3, 7:9])
        assert np.array_equal(part[-1], rows[-1])
        with pytest.raises(CorruptionError, match=r"'w'"):
            part[400:700]
        with pytest.raises(CorruptionError, match=r"'w'"):
            file.get_tensor("w")


def test_threads_may_read_from_one_file(sample):
    source, packed = sample
    expected = safetensors.numpy.load_file(source)
    with PackedFile(packed, NUMPY, threads=2) as file, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for name, tensor in zip(expected, pool.map(file.get_tensor, expected), strict=True):
                assert_same(tensor, expected[name])


def test_what_was_handed_out_outlives_the_file(sample):
    packed = sample[1]
    with PackedFile(packed, NUMPY) as file:
        frame, part = file.frame("scalar"), file.get_slice("scalar")
        assert repr(file) == f"<PackedFile {str(packed)!r}, 7 tensors>"
    out = np.empty(1, np.float32)
    frame.decompress_into(memoryview(out.view(np.uint8)))
    assert out[0] == 3.25
    with pytest.raises(ValueError, match="closed"):
        file.keys()
    with pytest.raises(ValueError, match="closed"):
        part[...]
    assert repr(file) == "<PackedFile, closed>"
    file.close()


def test_a_limit_on_decoded_bytes_holds(sample):
    with PackedFile(sample[1], NUMPY, max_nbytes=100_000) as file:
        assert file.get_slice("layers.0.weight")[:5].shape == (5, 20, 50)
        with pytest.raises(CorruptionError, match=r"'layers.0.weight'.*1200000.*100000"):
            file.get_tensor("layers.0.weight")
    with pytest.raises(CorruptionError, match="100000"):
        load_tensors(sample[1].read_bytes(), NUMPY, max_nbytes=100_000)


def test_wrong_questions_get_clear_answers(sample):
    with PackedFile(sample[1], NUMPY) as file:
        with pytest.raises(ValueError, match=r"no tensor is named 'nope'"):
            file.get_tensor("nope")
        with pytest.raises(ValueError, match=r"no tensor is named 'nope'"):
            file.get_slice("nope")
        with pytest.raises(TypeError, match="string"):
            file.get_tensor(1)
    with pytest.raises(ValueError, match=r"device 'cuda'"):
        PackedFile(sample[1], NUMPY, device="cuda")
    with pytest.raises(ValueError, match="threads"):
        PackedFile(sample[1], NUMPY, threads=0)


def test_a_device_is_honoured(sample):
    with PackedFile(sample[1], TORCH, device="meta") as file:
        assert file.get_tensor("scalar").device.type == "meta"
        assert file.get_slice("zeros")[2:4].device.type == "meta"


def test_a_file_in_memory_loads(sample):
    source, packed = sample
    tensors = load_tensors(packed.read_bytes(), NUMPY)
    for name, expected in safetensors.numpy.load_file(source).items():
        assert_same(tensors[name], expected)
