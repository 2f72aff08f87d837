"""Packed files: their layout, how they are written, and that unpacking restores every byte."""

import os
from pathlib import Path

import frame_builder
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from disk_samples import entry, file_bytes, leftovers, write_sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from packhorse.disk import (
    PackedFile,
    logical_nbytes,
    pack_file,
    plan_file,
    unpack_file,
    verify_file,
)
from packhorse.disk.container import pack_tensors, write_packed
from packhorse.layout import DTYPE_BY_NAME, FILE_ALIGNMENT
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.reference import decode_file
from packhorse.storage.safetensors_header import build_header, read_header
from packhorse.torch import FRAMEWORK as TORCH

NUMPY_DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "bfloat16"),
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (63,), (1000,), (7, 11, 13)]


def round_trip(source: Path) -> Path:
    """Pack and unpack a file, and compare; the packed file stays."""
    packed, back = source.with_suffix(".packed"), source.with_suffix(".back")
    pack_file(source, packed)
    unpack_file(packed, back)
    assert back.read_bytes() == source.read_bytes()
    assert verify_file(packed) == []
    return packed


def test_files_of_the_numpy_saver_come_back_byte_for_byte(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {}
    for name in NUMPY_DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for shape in SHAPES:
            raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
            raw = raw & 1 if name == "bool" else raw
            tensors[f"{name}{shape}"] = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    source = tmp_path / "all.safetensors"
    safetensors.numpy.save_file(tensors, source, {"k": "v"})
    packed = round_trip(source)
    with PackedFile(packed, NUMPY) as file:
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert got.tobytes() == tensor.tobytes()


def test_files_of_the_torch_saver_come_back_byte_for_byte(tmp_path):
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, dtype in safetensors.torch._TYPES.items():
        for shape in SHAPES:
            nbytes = int(np.prod(shape)) * DTYPE_BY_NAME[name].bits // 8
            raw = torch.randint(0, 2 if name == "BOOL" else 256, (nbytes,), generator=generator)
            tensors[f"{name}{shape}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    source = tmp_path / "all.safetensors"
    safetensors.torch.save_file(tensors, source)
    packed = round_trip(source)
    with PackedFile(packed, TORCH) as file:
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert raw_bytes(got) == raw_bytes(tensor)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BY_NAME))
def test_every_dtype_of_the_format_comes_back(tmp_path, dtype):
    numel = 4 * 4099
    data = np.random.default_rng(3).bytes(numel * DTYPE_BY_NAME[dtype].bits // 8)
    header = {"t": entry(0, len(data), dtype, [4, 4099])}
    (tmp_path / "a.safetensors").write_bytes(file_bytes(header, data))
    round_trip(tmp_path / "a.safetensors")


def test_headers_that_the_library_would_not_write_come_back(tmp_path):
    # Unsorted, with spaces, an unknown field, escapes, an empty name, and line breaks as padding.
    text = (
        b'{ "b\\u00e9" : {"dtype":"U8", "shape":[2],"data_offsets":[1,3], "note":"x"},\n'
        b'"":{"shape":[],"dtype":"I8","data_offsets":[0,1]},'
        b'"__metadata__":{"packhorse":"mine","k":"\\ud83d\\ude00"}, '
        b'"z":{"dtype":"F32","shape":[0,5],"data_offsets":[1,1]}}\n\t  '
    )
    source = tmp_path / "odd.safetensors"
    source.write_bytes(file_bytes(text, b"abc"))
    packed = round_trip(source)
    with PackedFile(packed, NUMPY) as file:
        assert file.metadata() == {"packhorse": "mine", "k": "😀"}
        assert file.offset_keys() == ["", "z", "bé"]
        assert file.get_tensor("bé").tolist() == [98, 99]


@pytest.mark.parametrize("header", [{}, {"__metadata__": {}}, {"__metadata__": {"a": "b"}}])
def test_a_file_without_tensors_comes_back(tmp_path, header):
    (tmp_path / "a.safetensors").write_bytes(file_bytes(header))
    packed = round_trip(tmp_path / "a.safetensors")
    with PackedFile(packed, NUMPY) as file:
        assert file.keys() == []
        assert file.metadata() == header.get("__metadata__")


def test_a_tensor_of_many_windows_comes_back(tmp_path):
    n = (1 << 25) * 2 + 12345  # unpacking decodes 32 MiB at once
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(file_bytes({"t": entry(0, n)}))
        file.seek(n - 5, os.SEEK_CUR)
        file.write(b"tail!")
    round_trip(tmp_path / "a.safetensors")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tensors=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(DTYPE_BY_NAME)),
            st.lists(st.integers(0, 9), max_size=3).map(lambda shape: [*shape, 4]),
        ),
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_file_comes_back(tmp_path, tensors, metadata, seed):
    header = build_header(tensors, metadata)
    data = np.random.default_rng(seed).bytes(header.data_nbytes)
    source, packed, back = (tmp_path / name for name in ("a", "b", "c"))
    source.write_bytes(header.prefix() + data)
    safetensors.deserialize(source.read_bytes())
    pack_file(source, packed, force=True)
    safetensors.deserialize(packed.read_bytes())
    unpack_file(packed, back, force=True)
    assert back.read_bytes() == source.read_bytes()


def test_the_safetensors_library_opens_a_packed_file(sample):
    source, packed = sample
    with safe_open(source, "np") as original, safe_open(packed, "np") as file:
        assert file.keys() == original.keys()
        assert file.metadata().items() >= original.metadata().items()
        for name in file.keys():  # noqa: SIM118
            assert file.get_slice(name).get_dtype() == "U8"
            assert len(file.get_slice(name).get_shape()) == 1


def test_the_data_starts_aligned_and_frames_keep_the_order(sample):
    source, packed = sample
    original, header = read_header(source), read_header(packed)
    assert header.data_offset % FILE_ALIGNMENT == 0
    assert all(tensor.start % FILE_ALIGNMENT == 0 for tensor in header.entries)
    assert [tensor.name for tensor in header.entries] == [
        tensor.name for tensor in original.entries
    ]


def test_every_way_of_writing_gives_the_same_bytes(tmp_path, sample):
    source, packed = sample
    header = read_header(source)
    data = source.read_bytes()[header.data_offset :]
    buffers = [data[tensor.start : tensor.stop] for tensor in header.entries]
    assert pack_tensors(header, buffers, threads=3) == packed.read_bytes()
    write_packed(tmp_path / "other", header, iter(buffers), threads=1)
    assert (tmp_path / "other").read_bytes() == packed.read_bytes()


def test_levels_give_files_that_unpack_alike(tmp_path, sample):
    source, _ = sample
    for level in ("fast", "default", "max"):
        pack_file(source, tmp_path / level, level=level)
        unpack_file(tmp_path / level, tmp_path / "back", force=True)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_results_and_progress_count_bytes(tmp_path):
    source, packed, back = (tmp_path / name for name in ("a", "b", "c"))
    tensors = write_sample(source)
    total = sum(tensor.nbytes for tensor in tensors.values())
    done: list[int] = []
    result = pack_file(source, packed, progress=done.append)
    assert sum(done) == total == logical_nbytes(source) == logical_nbytes(packed)
    assert result.original_nbytes == source.stat().st_size
    assert result.packed_nbytes == packed.stat().st_size
    assert result.ratio == result.original_nbytes / result.packed_nbytes
    assert {tensor.name: tensor.shape for tensor in result.tensors} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    done.clear()
    unpacked = unpack_file(packed, back, progress=done.append)
    assert sum(done) == total
    assert unpacked.tensors == result.tensors
    done.clear()
    assert verify_file(packed, progress=done.append) == []
    assert sum(done) == total


def test_plans_name_every_tensor_and_write_nothing(tmp_path):
    tensors = write_sample(tmp_path / "a.safetensors")
    plans = plan_file(tmp_path / "a.safetensors", level="fast")
    assert {plan.name: plan.nbytes for plan in plans} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }
    assert all(plan.plan.reason for plan in plans)
    assert not leftovers(tmp_path, "a.safetensors")


def test_a_constant_file_packs_a_thousandfold(tmp_path):
    safetensors.numpy.save_file({"z": np.zeros((2000, 2000), np.float32)}, tmp_path / "a")
    assert pack_file(tmp_path / "a", tmp_path / "b").ratio > 1000


def test_noise_hardly_grows(tmp_path):
    noise = np.random.default_rng(4).integers(0, 256, 8_000_000, np.uint8)
    safetensors.numpy.save_file({"n": noise}, tmp_path / "a")
    assert pack_file(tmp_path / "a", tmp_path / "b").ratio >= 0.9995


def test_headers_are_laid_out_as_the_library_does():
    tensors = {}
    for place, (name, dtype) in enumerate(safetensors.torch._TYPES.items()):
        tensors[f'{place % 3}/{name}\n"é\x7f'] = torch.zeros(3, place % 4).to(dtype)
    specs = {
        name: (next(k for k, v in safetensors.torch._TYPES.items() if v is t.dtype), t.shape)
        for name, t in tensors.items()
    }
    for metadata in (None, {}, {"format": 'pt"\u2028'}):
        expected = safetensors.torch.save(tensors, metadata)
        header = build_header(specs, metadata)
        assert expected[: header.data_offset] == header.prefix()
        assert header.file_nbytes == len(expected)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"__metadata__": ("U8", [1])}, None),
        ({"\ud800": ("U8", [1])}, None),
        ({"a": ("U8", [1])}, {"k": 1}),
        ({"a": ("U8", [1])}, {"k": "\udfff"}),
    ],
)
def test_a_header_that_no_file_can_hold_is_refused(tensors, metadata):
    kinds = (TypeError, ValueError)
    with pytest.raises(kinds, match=r"reserves it|Unicode|strings to strings"):
        build_header(tensors, metadata)


def small_file() -> bytes:
    rng = np.random.default_rng(9)
    return safetensors.numpy.save(
        {
            "w": (rng.standard_normal((40, 50)) * 0.02).astype(np.float16),
            "i": np.arange(300),
            "z": np.zeros((5, 0), np.uint8),
            "s": np.array(True),
        },
        {"k": "é"},
    )


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_the_reference_decoder_reads_what_is_packed(tmp_path, level):
    (tmp_path / "a").write_bytes(small_file())
    pack_file(tmp_path / "a", tmp_path / "b", level=level)
    assert decode_file((tmp_path / "b").read_bytes()) == small_file()


def test_a_file_built_by_hand_unpacks(tmp_path):
    """The frames are in another order than the data, with other JSON layout and more metadata."""
    tensors = {"b": ("U8", (7,), b"0123456"), "a": ("I16", (3,), b"abcdef"), "": ("F64", (0,), b"")}
    original = frame_builder.original_file(tensors, {"k": "v"}, padding=5)
    frames = {
        name: bytes(frame_builder.build_frame(data, dtype, shape, codings=[frame_builder.Stored()]))
        for name, (dtype, shape, data) in sorted(tensors.items())
    }
    packed = frame_builder.build_file(original, frames, metadata={"k": "v", "more": "x"})
    (tmp_path / "a").write_bytes(packed)
    unpack_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == original
    assert verify_file(tmp_path / "a") == []
